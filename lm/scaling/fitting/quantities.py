"""What follows from a fitted law and gets an interval like its parameters: exponents and optima at budgets."""

from collections.abc import Sequence

import numpy as np

from lm.scaling.laws.base import Array, Law

NEAR = 1e-3  # of the optimal loss: what counts as no worse
FARTHEST = 40.0  # e-folds from the optimum: beyond it the loss is as flat as it gets
HALVINGS = 50  # of FARTHEST: to rounding


def quantities(law: Law, parameters: Array, budgets: Sequence[float], flops_per_nd: float) -> dict[str, Array]:
    """All that gets an interval: the parameters [..., P] by name and, by law, exponents and optima at `budgets`."""
    found = {name: parameters[..., k] for k, name in enumerate(law.parameters)}
    terms = law.balanced(parameters)
    if terms is None:
        return found
    _, alpha, _, beta = terms
    found |= {"a": beta / (alpha + beta), "b": alpha / (alpha + beta)}
    theta = law.to_inner(parameters, {})
    for budget in budgets:
        # Where the data pin no exponent, the optimum runs away: an infinite value is then the answer, not a mistake.
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            n, d = law.allocate(parameters, budget, flops_per_nd)
            found |= {
                f"n@{budget:.6g}": n,
                f"d@{budget:.6g}": d,
                f"tokens_per_parameter@{budget:.6g}": d / n,
                f"loss@{budget:.6g}": np.exp(_log_loss(law, theta, np.log(n), flops_per_nd, budget)),
            }
    return found


def near_optimal(
    law: Law, parameters: Array, budget: float, flops_per_nd: float, tolerance: float = NEAR
) -> tuple[Array, Array]:
    """The smallest and largest N [...] whose loss at `budget` is within `tolerance` (relative) of the optimal one.

    `parameters` are natural [..., P]; bisection along budget = flops_per_nd * n * d. 0 or infinity where the loss never
    rises that far within e^40 of the optimum.
    """
    theta = law.to_inner(parameters, {})
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        best = np.log(law.allocate(parameters, budget, flops_per_nd)[0])
        allowed = _log_loss(law, theta, best, flops_per_nd, budget) + np.log1p(tolerance)
        ends = []
        for far, none in ((best - FARTHEST, -np.inf), (best + FARTHEST, np.inf)):
            inside, outside = best, far
            for _ in range(HALVINGS):
                middle = (inside + outside) / 2
                within = _log_loss(law, theta, middle, flops_per_nd, budget) <= allowed
                inside, outside = np.where(within, middle, inside), np.where(within, outside, middle)
            bounded = _log_loss(law, theta, far, flops_per_nd, budget) > allowed
            ends.append(np.exp(np.where(bounded, inside, none)))
    return ends[0], ends[1]


def _log_loss(law: Law, theta: Array, log_n: Array, flops_per_nd: float, budget: float) -> Array:
    """log of the loss [...] of uncentred `theta` [..., P] at log N [...] along the line of one budget."""
    log_c = np.full_like(log_n, np.log(budget))
    logs = {"n": log_n, "d": log_c - np.log(flops_per_nd) - log_n, "c": log_c}
    return law.log_loss(theta, {name: value[..., None] for name, value in logs.items()})[..., 0]
