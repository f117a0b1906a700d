"""What the data say about each parameter: profile likelihoods, the condition of the fit, and its other optima."""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lm.scaling.fitting.bootstrap import LEVEL
from lm.scaling.fitting.certificate import GRADIENT_LIMIT, ROUNDING
from lm.scaling.fitting.fitted import Fitted
from lm.scaling.fitting.objective import Array
from lm.scaling.fitting.solve import Problem, minimise
from lm.scaling.laws.base import REACH
from lm.scaling.words import entry

FIRST_STEPS = (0.5, 1.0, 1.5, 2.0, 3.0)  # in standard errors of the linearised fit
WIDEN, WIDENINGS, REFINEMENTS = 2.0, 12, 3
WINDOW = 0.3  # share of the residuals that the density at 0 is read from: 2 % under the peak of a Gaussian
WINDOW_POINTS = 4  # and at least so many points for each parameter
OPTIMA_WITHIN, RIVALS_WITHIN = 0.05, 0.01  # of the best objective
SAME_OPTIMUM = 0.01  # in inner coordinates: 1 % of a coefficient, 0.01 of an exponent
CLEAR_RELATIVE, CLEAR_COEFFICIENT = 0.1, math.log(2)  # of an exponent, a or the least loss; in e-folds
SHOWN_OPTIMA = 4


class Bound(enum.StrEnum):
    """On which sides the profile likelihood of a parameter ends its interval."""

    BOTH = "bounded"
    BELOW = "bounded below only"
    ABOVE = "bounded above only"
    NEITHER = "not bounded"


def analyse(fitted: Fitted) -> dict[str, Any]:
    """The identifiability part of `fit.json`: {correlation, condition, scale, profiles, optima, warnings}.

    A profile holds one parameter at a value and refits the others. Its 95 % interval is where 2 (objective - minimum) /
    scale stays under the square of Student's t. Neither a Huber sum nor absolute deviations are a likelihood, and
    points differ in noise and leverage: the scale of each parameter is its sandwich variance over its inverse
    curvature, with which that drop is chi-squared for any M-estimator (Kent 1982); for least squares with equal noise
    it is the residual variance. Points count as independent. The condition number is that of J^T W J with columns of
    unit norm, W the weights of reweighted least squares, in coordinates centred on the data.
    """
    optima = _optima(fitted)
    described = [_described(fitted, theta, share) for theta, share in optima]
    exact = np.abs(fitted.problem.residual(fitted.theta)).max() <= ROUNDING
    profiles = {} if exact else _profiles(fitted, [theta for theta, _ in optima])
    found = fitted.found
    return {
        "correlation": float(np.corrcoef(np.log(found.n), np.log(found.d))[0, 1]),
        "condition": _condition(fitted),
        "scale": "sandwich variance over inverse curvature",
        "profiles": profiles,
        "optima": described,
        "warnings": [*_unbounded(profiles), *_rivals(fitted, described, [theta for theta, _ in optima])],
    }


def lines(part: dict[str, Any]) -> list[str]:
    """The analysis in plain text."""
    profiles = ", ".join(f"{name} {entry(profile)}" for name, profile in part["profiles"].items())
    shown = [
        f"identifiability: log N and log D correlate {part['correlation']:.3f}, condition number "
        f"{part['condition']:.3g}",
        f"  95 % profile likelihood: {profiles or 'none, the points lie on the law'} (scale: {part['scale']})",
    ]
    others = part["optima"][1:]
    for optimum in others[:SHOWN_OPTIMA]:
        values = ", ".join(f"{name} {value:.5g}" for name, value in optimum["parameters"].items())
        shown.append(f"  another optimum, objective {optimum['excess']:.3%} higher: {values}")
    if len(others) > SHOWN_OPTIMA:
        shown.append(f"  and {len(others) - SHOWN_OPTIMA} more optima within {OPTIMA_WITHIN:.0%} (all in the fit file)")
    return shown


def sandwich(problem: Problem, theta: Array) -> tuple[Array, Array]:
    """The sandwich covariance of an answer [P] and the inverse curvature of its objective, both [P, P].

    H^-1 G H^-1 and H^-1 with H the sum of psi' j j^T and G that of psi^2 j j^T, psi the slope of the objective in the
    residual and j that of the prediction (White 1980; Powell 1984). Where psi jumps or bends within the smallest 30 %
    of the residuals, psi' is its mean rise over them (over more of few points).
    """
    (residual,), (jacobian,) = problem.residual_and_slopes(theta[None])
    free, delta = np.flatnonzero(problem.free), problem.objective.delta
    points = len(residual)
    if math.isinf(delta):
        pull, rise = residual, np.ones_like(residual)
    else:
        size, share = np.abs(residual), min(1.0, max(WINDOW, WINDOW_POINTS * len(free) / points))
        window = max(delta, float(np.quantile(size, share)))
        pull = np.clip(residual, -delta, delta) if delta else np.sign(residual)
        rise = (size <= window) * (delta or 1.0) / window
    sided, slopes = problem.objective.sided(residual), jacobian[free]
    inverse = np.linalg.pinv((slopes * rise * sided) @ slopes.T, hermitian=True)
    spread = (slopes * (pull * sided) ** 2) @ slopes.T * points / (points - len(free))
    whole = np.zeros((2, len(theta), len(theta)))
    whole[:, free[:, None], free] = inverse @ spread @ inverse, inverse
    return whole[0], whole[1]


def _condition(fitted: Fitted) -> float:
    problem = fitted.problem
    residual, jacobian = (part[0] for part in problem.residual_and_slopes(fitted.theta[None]))
    delta = max(problem.objective.delta, ROUNDING)
    weight = problem.objective.sided(residual) * np.minimum(1, delta / np.maximum(np.abs(residual), ROUNDING))
    columns = (jacobian * np.sqrt(weight))[problem.free].T
    columns = columns / np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    return float(np.linalg.cond(columns)) ** 2


def _optima(fitted: Fitted) -> list[tuple[Array, float]]:
    """Distinct converged end points [P] near the best objective, best first; the share of starts that ended at each."""
    solution = fitted.solution
    best = float(solution.value.min())
    arrived = solution.converged & (solution.value <= best * (1 + OPTIMA_WITHIN))
    if fitted.problem.objective.delta:
        arrived &= solution.gradient <= GRADIENT_LIMIT
    found: list[Array] = [fitted.theta]
    counts = [0]
    for k in np.flatnonzero(arrived)[np.argsort(solution.value[arrived])]:
        gaps = np.abs(np.stack(found) - solution.theta[k]).max(-1)
        if gaps.min() > SAME_OPTIMUM:
            found.append(solution.theta[k])
            counts.append(1)
        else:
            counts[int(gaps.argmin())] += 1
    return [(theta, count / len(solution.value)) for theta, count in zip(found, counts, strict=True)]


def _described(fitted: Fitted, theta: Array, share: float) -> dict[str, Any]:
    best, value = (float(fitted.problem.value(at)) for at in (fitted.theta, theta))
    parameters = fitted.natural(theta)
    described = {
        "parameters": {name: float(at) for name, at in zip(fitted.law.parameters, parameters, strict=True)},
        "objective": value,
        "excess": value / best - 1 if best else 0.0,
        "starts": share,
    }
    terms = fitted.law.balanced(parameters)
    return described if terms is None else described | {"a": float(terms[3] / (terms[1] + terms[3]))}


@dataclasses.dataclass
class _Side:
    """The profile of one parameter towards one side: values as distances from the answer, the statistic at each."""

    parameter: int
    sign: float
    scale: float
    unit: float
    limit: float
    least: float  # how far it has to be followed: another optimum lies there
    distances: list[float]
    statistics: list[float]
    thetas: list[Array]

    def add(self, distance: float, statistic: float, theta: Array) -> None:
        at = int(np.searchsorted(self.distances, distance))
        self.distances.insert(at, distance)
        self.statistics.insert(at, statistic)
        self.thetas.insert(at, theta)

    def crossing(self, threshold: float) -> float | None:
        """The outermost distance at which the statistic passes the threshold, by its root: nearly a straight line."""
        inside = max(k for k, value in enumerate(self.statistics) if value <= threshold)
        if inside + 1 == len(self.statistics):
            return None
        near, far = (math.sqrt(max(self.statistics[k], 0.0)) for k in (inside, inside + 1))
        share = (math.sqrt(threshold) - near) / (far - near)
        return self.distances[inside] + share * (self.distances[inside + 1] - self.distances[inside])

    def wider(self, threshold: float) -> float | None:
        """The next distance to look at, None when the threshold is passed or the bound reached."""
        last = self.distances[-1]
        passed = self.statistics[-1] > threshold and last >= self.least
        return None if passed or last >= self.limit else min(max(WIDEN * last, self.unit), self.limit)


def _profiles(fitted: Fitted, optima: Sequence[Array]) -> dict[str, dict[str, Any]]:
    from scipy.special import stdtrit

    problem = _uncentred(fitted)
    law, free = problem.law, np.flatnonzero(problem.free)
    answers = np.stack([law.to_inner(fitted.natural(theta), {}) for theta in optima])
    covariance, inverse = sandwich(problem, answers[0])
    values = problem.value(answers)
    threshold = float(stdtrit(len(fitted.found) - len(free), (1 + LEVEL) / 2)) ** 2
    sides = []
    for k in free:
        scale = max(covariance[k, k] / inverse[k, k], 1e-300)
        near = answers[2 * (values - values[0]) / scale <= threshold, k]
        error = math.sqrt(covariance[k, k])
        sides += [
            side for sign in (-1.0, 1.0) if (side := _side(problem, answers[0], near, scale, error, int(k), sign))
        ]

    def look(wanted: list[tuple[_Side, float]]) -> None:
        """Refits all of them at once, from the nearest answer on their side and from every other optimum."""
        starts, pinned = [], []
        for side, distance in wanted:
            k = side.parameter
            nearest = side.thetas[int(np.argmin(np.abs(np.array(side.distances) - distance)))]
            value = answers[0, k] + side.sign * distance
            along = inverse[k] / inverse[k, k]
            starts += [start + along * (value - start[k]) for start in (nearest, *answers[1:])]
            pinned += [(k, value)] * len(answers)
        chosen, held = np.array([k for k, _ in pinned]), np.array([value for _, value in pinned])
        rows = np.arange(len(pinned))
        low, high, moving = (np.repeat(part[None], len(rows), 0) for part in (problem.low, problem.high, problem.free))
        low[rows, chosen] = high[rows, chosen] = held
        moving[rows, chosen] = False
        solved = minimise(dataclasses.replace(problem, low=low, high=high, free=moving), np.stack(starts))
        objective = solved.value.reshape(len(wanted), -1)
        for (side, distance), row, theta in zip(
            wanted, objective, solved.theta.reshape(len(wanted), len(answers), -1), strict=True
        ):
            side.add(distance, 2 * float(row.min() - values[0]) / side.scale, theta[row.argmin()])

    look([(side, step * side.unit) for side in sides for step in FIRST_STEPS if step * side.unit < side.limit])
    for _ in range(WIDENINGS):
        further = [(side, at) for side in sides if (at := side.wider(threshold)) is not None]
        if not further:
            break
        look(further)
    for _ in range(REFINEMENTS):
        look([(side, at) for side in sides if (at := side.crossing(threshold)) is not None])
    return {
        law.parameters[k]: _profile(law.parameters[k] in law.logged, answers[0, k], int(k), sides, threshold)
        for k in free
    }


def _side(
    problem: Problem, answer: Array, near: Array, scale: float, error: float, k: int, sign: float
) -> _Side | None:
    """None where the answer lies on the bound of that side."""
    limit = float(sign * ((problem.high if sign > 0 else problem.low)[k] - answer[k]))
    if problem.law.parameters[k] in problem.law.logged:
        limit = REACH
    if limit <= 0:
        return None
    least = float(np.max(sign * (near - answer[k]), initial=0.0))
    return _Side(k, sign, scale, min(max(error, 1e-4 * limit), limit), limit, least, [0.0], [0.0], [answer])


def _profile(logged: bool, answer: float, k: int, sides: Sequence[_Side], threshold: float) -> dict[str, Any]:
    def natural(value: float) -> float:
        return float(np.exp(value) if logged else value)

    ends: dict[float, float | None] = {-1.0: None, 1.0: None}
    curve = [[natural(answer), 0.0]]
    for side in sides:
        if side.parameter == k:
            end = side.crossing(threshold)
            ends[side.sign] = None if end is None else natural(answer + side.sign * end)
            points = list(zip(side.distances[1:], side.statistics[1:], strict=True))
            curve += [[natural(answer + side.sign * at), float(value)] for at, value in points]
    bounded = {(True, True): Bound.BOTH, (True, False): Bound.BELOW, (False, True): Bound.ABOVE}
    return {
        "value": natural(answer),
        "interval": [ends[-1.0], ends[1.0]],
        "bounded": bounded.get((ends[-1.0] is not None, ends[1.0] is not None), Bound.NEITHER).value,
        "threshold": threshold,
        "curve": sorted(curve),
    }


def _uncentred(fitted: Fitted) -> Problem:
    """The same problem at logarithms that are not centred: a coefficient held fixed is then A, not A / N^alpha."""
    problem, law = fitted.problem, fitted.law
    moved = law.to_inner(fitted.estimate, {}) - fitted.theta
    low, high = problem.low + np.minimum(moved, 0), problem.high + np.maximum(moved, 0)
    shift = 5.0 * max(abs(at) for at in fitted.centre.values())  # a coefficient follows the largest exponent that far
    wide = problem.free & np.isin(law.parameters, list(law.logged))
    low, high = np.where(wide, low - shift, low), np.where(wide, high + shift, high)
    logs = {name: value + fitted.centre[name] for name, value in problem.logs.items()}
    return dataclasses.replace(problem, logs=logs, low=low, high=high)


def _unbounded(profiles: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name} is {profile['bounded']} by the data (95 % profile likelihood: {entry(profile)})"
        for name, profile in profiles.items()
        if profile["bounded"] != Bound.BOTH.value
    ]


def _rivals(fitted: Fitted, optima: Sequence[dict[str, Any]], thetas: Sequence[Array]) -> list[str]:
    """Optima as good as the answer that say something else."""
    law, base, warnings = fitted.law, optima[0], []
    scale = np.where(np.isin(law.parameters, law.constants), np.exp(fitted.problem.log_loss.min()), np.abs(thetas[0]))
    clear = np.where(np.isin(law.parameters, list(law.logged)), CLEAR_COEFFICIENT, CLEAR_RELATIVE * scale)
    for other, theta in zip(optima[1:], thetas[1:], strict=True):
        moved = [name for name, far in zip(law.parameters, np.abs(theta - thetas[0]) > clear, strict=True) if far]
        said = [f"{name} {other['parameters'][name]:.4g} instead of {base['parameters'][name]:.4g}" for name in moved]
        if "a" in base and abs(other["a"] - base["a"]) > CLEAR_RELATIVE * base["a"]:
            said.append(f"a {other['a']:.4g} instead of {base['a']:.4g}")
        if said and other["excess"] <= RIVALS_WITHIN:
            warnings.append(f"another optimum is as good (objective {other['excess']:.2%} higher): {', '.join(said)}")
    return warnings
