"""How the answer moves with Huber's delta, from least absolute deviations to least squares."""

import dataclasses
import math
from typing import Any

import numpy as np

from lm.scaling.fitting.fitted import Fitted
from lm.scaling.fitting.quantities import quantities
from lm.scaling.fitting.solve import minimise

DELTAS = (0.0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, math.inf)


def analyse(fitted: Fitted, budget: float) -> dict[str, Any]:
    """The sensitivity part of `fit.json`: {budget, of, sweep}, a row for each delta and the fit's own.

    A row is {delta, parameters, a, tokens_per_parameter, beyond_delta, own}: a delta of 0 is least absolute deviations,
    null least squares; tokens/parameter at `budget` FLOP; `beyond_delta` the share of points with a larger residual.
    Residuals, sides and pins are those of the fit; `of` is what its text shows.
    """
    own = fitted.problem.objective.delta
    sweep, theta = [], fitted.theta
    for delta in sorted({*DELTAS, own}, reverse=True):
        objective = dataclasses.replace(fitted.problem.objective, delta=delta)
        problem = dataclasses.replace(fitted.problem, objective=objective)
        # From the neighbour's answer and from the fit's, whichever ends lower.
        solved = minimise(problem, np.stack([fitted.theta, theta]))
        theta = solved.theta[solved.value.argmin()]
        parameters = fitted.natural(theta)
        named = quantities(fitted.law, parameters, [budget], fitted.found.flops_per_nd)
        sweep.append(
            {
                "delta": delta if math.isfinite(delta) else None,
                "parameters": {name: float(named[name]) for name in fitted.law.parameters},
                "a": _value(named.get("a")),
                "tokens_per_parameter": _value(named.get(f"tokens_per_parameter@{budget:.6g}")),
                "beyond_delta": float(np.mean(np.abs(problem.residual(theta)) > delta)),
                "own": delta == own,
            }
        )
    return {"budget": budget, "of": fitted.headline, "sweep": sweep[::-1]}


def lines(part: dict[str, Any]) -> list[str]:
    """The sweep in plain text: one line, delta by delta."""
    of, ratios = part["of"], part["of"] == "a"
    rows = []
    for row in part["sweep"]:
        delta = {None: "least squares", 0: "absolute"}.get(row["delta"], f"{row['delta'] or 0:g}")
        value = f"{row['a'] if ratios else row['parameters'][of]:.4g}"
        ratio = row["tokens_per_parameter"]
        beside = "" if not ratios else "/unbounded" if ratio is None else f"/{ratio:.4g}"
        rows.append(f"{delta}{' (this fit)' * row['own']} {value}{beside}")
    meaning = f"a/tokens per parameter at {part['budget']:.3g} FLOP" if ratios else of
    return [f"delta sweep, {meaning}: " + ", ".join(rows)]


def _value(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
