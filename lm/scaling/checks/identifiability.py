"""What the data say about each parameter: profile likelihoods, the condition of the fit, and its other optima."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.scaling import read
from lm.scaling.fitting.certificate import GRADIENT_LIMIT, ROUNDING
from lm.scaling.fitting.fitted import Fitted
from lm.scaling.fitting.objective import Array
from lm.scaling.fitting.profile import Bound, Profile, profiles
from lm.scaling.fitting.solve import Solution, minimise
from lm.scaling.words import entry, span

OPTIMA_WITHIN, RIVALS_WITHIN = 0.05, 0.01  # of the best objective
SAME_OPTIMUM = 0.01  # in inner coordinates: 1 % of a coefficient, 0.01 of an exponent
CLEAR_RELATIVE, CLEAR_COEFFICIENT = 0.1, math.log(2)  # of an exponent, a or the least loss; in e-folds
SHOWN_OPTIMA = 4


def analyse(fitted: Fitted) -> dict[str, Any]:
    """The identifiability part of `fit.json`: {correlation, condition, scale, profiles, optima, warnings}.

    `profiles` are those of `fitting.profile`, with points that count as independent. `optima` are the distinct end
    points within 5 % of the best objective, of the starts and of refits set free again from every point of the
    profiles. The condition number is that of J^T W J with columns of unit norm, W the weights of reweighted least
    squares, in coordinates centred on the data.
    """
    found, problem = fitted.found, fitted.problem
    shapes: dict[str, Profile] = {}
    optima = _optima(fitted, fitted.solution)
    if np.abs(problem.residual(fitted.theta)).max() > ROUNDING:
        shapes, met = profiles(fitted, optima)
        more = _optima(fitted, _joined(fitted.solution, minimise(problem, met)))
        if len(more) > len(optima):
            shapes, _ = profiles(fitted, more[: SHOWN_OPTIMA + 1])
        optima = more
    described = [_described(fitted, theta) for theta in optima]
    both = min(np.ptp(np.log(found.n)), np.ptp(np.log(found.d))) > read.SAME
    return {
        "correlation": float(np.corrcoef(np.log(found.n), np.log(found.d))[0, 1]) if both else None,
        "condition": _condition(fitted),
        "scale": "sandwich variance over inverse curvature",
        "profiles": {
            name: {
                "value": shape.value,
                "interval": list(shape.interval),
                "bounded": shape.bounded.value,
                "threshold": shape.threshold,
                "curve": [list(point) for point in shape.curve],
            }
            for name, shape in shapes.items()
        },
        "optima": described,
        "warnings": [*_unbounded(shapes), *_rivals(fitted, described, optima)],
    }


def lines(part: dict[str, Any]) -> list[str]:
    """The analysis in plain text."""
    profiles = ", ".join(f"{name} {entry(profile)}" for name, profile in part["profiles"].items())
    correlation = part["correlation"]
    design = "n or d does not vary" if correlation is None else f"log N and log D correlate {correlation:.3f}"
    shown = [
        f"identifiability: {design}, condition number {part['condition']:.3g}",
        f"  95 % profile likelihood: {profiles or 'none, the points lie on the law'} (scale: {part['scale']})",
    ]
    others = part["optima"][1:]
    for optimum in others[:SHOWN_OPTIMA]:
        values = ", ".join(f"{name} {optimum['parameters'][name]:.5g}" for name in part["profiles"])
        shown.append(f"  another optimum, objective {_excess(optimum)}: {values}")
    if len(others) > SHOWN_OPTIMA:
        shown.append(f"  and {len(others) - SHOWN_OPTIMA} more optima within {OPTIMA_WITHIN:.0%} (all in the fit file)")
    return shown


def _condition(fitted: Fitted) -> float:
    problem = fitted.problem
    residual, jacobian = (part[0] for part in problem.residual_and_slopes(fitted.theta[None]))
    delta = max(problem.objective.delta, ROUNDING)
    weight = problem.objective.sided(residual) * np.minimum(1, delta / np.maximum(np.abs(residual), ROUNDING))
    columns = (jacobian * np.sqrt(weight))[problem.free].T
    columns = columns / np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    return float(np.linalg.cond(columns)) ** 2


def _joined(one: Solution, two: Solution) -> Solution:
    columns = ((getattr(part, field.name) for part in (one, two)) for field in dataclasses.fields(Solution))
    return Solution(*(np.concatenate(list(column)) for column in columns))


def _optima(fitted: Fitted, solution: Solution) -> list[Array]:
    """The answer, then the other distinct converged rows [P] of a solution near the best objective, best first."""
    arrived = solution.converged & (solution.value <= solution.value.min() * (1 + OPTIMA_WITHIN))
    if fitted.problem.objective.delta:
        arrived &= solution.gradient <= GRADIENT_LIMIT
    found = [fitted.theta]
    for theta in solution.theta[arrived][np.argsort(solution.value[arrived])]:
        if np.abs(np.stack(found) - theta).max(-1).min() > SAME_OPTIMUM:
            found.append(theta)
    return found


def _described(fitted: Fitted, theta: Array) -> dict[str, Any]:
    """Parameters, objective, how far it is above the answer's (relative; below: negative) and, by law, a."""
    answer, value = (float(fitted.problem.value(at)) for at in (fitted.theta, theta))
    parameters = fitted.natural(theta)
    described: dict[str, Any] = {
        "parameters": dict(zip(fitted.law.parameters, map(float, parameters), strict=True)),
        "objective": value,
        "excess": value / answer - 1 if answer else 0.0,
    }
    terms = fitted.law.balanced(parameters)
    return described if terms is None else described | {"a": float(terms[3] / (terms[1] + terms[3]))}


def _unbounded(shapes: Mapping[str, Profile]) -> list[str]:
    return [
        f"{name} is {shape.bounded} by the data (95 % profile likelihood: {span(shape.value, shape.interval)})"
        for name, shape in shapes.items()
        if shape.bounded is not Bound.BOTH
    ]


def _rivals(fitted: Fitted, optima: Sequence[Mapping[str, Any]], thetas: Sequence[Array]) -> list[str]:
    """One warning for all optima as good as the answer, or better, that say something else."""
    law, base = fitted.law, optima[0]
    scale = np.where(np.isin(law.parameters, law.constants), np.exp(fitted.problem.log_loss.min()), np.abs(thetas[0]))
    clear = np.where(np.isin(law.parameters, list(law.logged)), CLEAR_COEFFICIENT, CLEAR_RELATIVE * scale)
    rivals, apart = [], set()
    for other, theta in zip(optima[1:], thetas[1:], strict=True):
        moved = {name for name, far in zip(law.parameters, np.abs(theta - thetas[0]) > clear, strict=True) if far}
        if "a" in base and abs(other["a"] - base["a"]) > CLEAR_RELATIVE * base["a"]:
            moved.add("a")
        if moved and other["excess"] <= RIVALS_WITHIN:
            rivals.append(other)
            apart |= moved
    if not rivals:
        return []
    said = []
    for name in (name for name in (*law.parameters, "a") if name in apart):
        values = [part["a"] if name == "a" else part["parameters"][name] for part in (base, *rivals)]
        said.append(f"{name} {values[0]:.4g}, there {', '.join(f'{value:.4g}' for value in values[1:])}")
    worst = max(rivals, key=lambda other: abs(other["excess"]))
    count = "another optimum is" if len(rivals) == 1 else f"{len(rivals)} other optima are"
    return [f"{count} as good as the answer (objective at most {_excess(worst)}): {'; '.join(said)}"]


def _excess(optimum: Mapping[str, Any]) -> str:
    return f"{abs(optimum['excess']):.2%} {'higher' if optimum['excess'] >= 0 else 'LOWER'}"
