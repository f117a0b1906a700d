"""What a parabola does to the fitted surface itself: minima without noise against its own optima."""

from typing import Any

import numpy as np

from lm.scaling.approaches.curve import PARABOLA
from lm.scaling.approaches.isoflop import power_law, rows_of
from lm.scaling.fitting.fitted import Fitted
from lm.scaling.read import Points

FAR = 10.0  # times the largest budget


# Where the data pin no exponent, the surface's own optimum runs away: what is not finite is then left out.
@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def analyse(fitted: Fitted, found: Points, isoflop: dict[str, Any]) -> dict[str, Any] | None:
    """The error in per cent of N* and D* by parabolas, if the fitted law were true and the runs had no noise.

    At each usable budget of `isoflop`, which was made of the points `found`, and of their power laws carried to ten
    times the largest. None where the law allocates nothing or no budget is usable.
    """
    law = fitted.law
    if not law.allocates or not isoflop["budgets"]:
        return None
    exact = law.predict(fitted.estimate, {name: found.variable(name) for name in law.variables})
    budgets = np.array([part["budget"] for part in isoflop["budgets"]])
    places, optima = np.empty((2, 2, len(budgets)))  # N and D
    for k, rows in enumerate(rows_of(found, budgets)):
        per_nd = float(np.exp(np.mean(np.log(found.c[rows]) - np.log(found.n[rows]) - np.log(found.d[rows]))))
        optima[:, k] = np.log(law.allocate(fitted.estimate, budgets[k], per_nd))
        for column, x in zip(places, (found.n[rows], found.d[rows]), strict=True):
            column[k] = PARABOLA.minima(np.log(x), exact[None, rows])[0][0]
    far = FAR * budgets.max()
    slopes, constants = power_law(np.log(budgets), places)
    carried = constants + slopes * np.log(far) - np.log(law.allocate(fitted.estimate, far, found.flops_per_nd))
    return {
        "law": law.name,
        "budgets": [
            {"budget": float(budget), **_percent(errors)}
            for budget, errors in zip(budgets, (places - optima).T, strict=True)
        ],
        "mean": _percent((places - optima).mean(1)),
        "extrapolated": {"budget": float(far), **_percent(carried)},
    }


def lines(part: dict[str, Any]) -> list[str]:
    """The bias as text."""
    far = part["extrapolated"]
    return [
        f"parabola bias (parabolas through the fitted {part['law']} surface without noise, against its own optimum): "
        f"{_words(part['mean'])} on average over {len(part['budgets'])} budgets"
        + ("" if far["n_percent"] is None else f"; {_words(far)} when carried to {far['budget']:.4g} FLOP")
    ]


def _percent(errors: np.ndarray) -> dict[str, float | None]:
    """Of the log errors of N and D [2]."""
    return {
        name: float(100 * np.expm1(error)) if np.isfinite(error) else None
        for name, error in zip(("n_percent", "d_percent"), errors, strict=True)
    }


def _words(part: dict[str, Any]) -> str:
    n, d = ("none" if part[name] is None else f"{part[name]:+.1f} %" for name in ("n_percent", "d_percent"))
    return f"N* {n}, D* {d}"
