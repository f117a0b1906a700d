"""What follows from a fitted law and gets an interval like its parameters: exponents and optima at budgets."""

from collections.abc import Sequence

import numpy as np

from lm.scaling.laws.base import Array, Law

NEAR = 1e-3  # of the optimal loss: what counts as no worse


def quantities(law: Law, parameters: Array, budgets: Sequence[float], flops_per_nd: float) -> dict[str, Array]:
    """All that gets an interval: the parameters [..., P] by name and, by law, exponents and optima at `budgets`.

    An optimum has at least one parameter and one token.
    """
    found = {name: parameters[..., k] for k, name in enumerate(law.parameters)}
    terms = law.balanced(parameters)
    if terms is None:
        return found
    _, alpha, _, beta = terms
    found |= {"a": beta / (alpha + beta), "b": alpha / (alpha + beta)}
    theta = law.to_inner(parameters, {})
    for budget in budgets:
        # Where the data pin no exponent, the optimum runs away, to one parameter or to one token.
        with np.errstate(over="ignore", under="ignore", divide="ignore"):
            n = np.clip(law.allocate(parameters, budget, flops_per_nd)[0], 1.0, budget / flops_per_nd)
            d = budget / flops_per_nd / n
            logs = {
                "n": np.log(n)[..., None],
                "d": np.log(d)[..., None],
                "c": np.log(np.full_like(n, budget))[..., None],
            }
            found |= {
                f"n@{budget:.6g}": n,
                f"d@{budget:.6g}": d,
                f"tokens_per_parameter@{budget:.6g}": d / n,
                f"loss@{budget:.6g}": np.exp(law.log_loss(theta, logs)[..., 0]),
            }
    return found
