"""Profile likelihood: how well a parameter fits at every value when all the others may follow."""

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np

from lm.scaling.fitting.bootstrap import LEVEL
from lm.scaling.fitting.fitted import Fitted
from lm.scaling.fitting.solve import Array, Problem, minimise
from lm.scaling.laws.base import EXPONENT_BOUNDS, REACH, Law

FIRST_STEPS = (0.5, 1.0, 1.5, 2.0, 3.0)  # in standard errors
WIDEN, WIDENINGS, REFINEMENTS = 2.0, 12, 3
WINDOW = 0.3  # share of the residuals that the density at 0 is read from: 2 % under the peak of a Gaussian
WINDOW_POINTS = 4  # and at least so many points for each parameter


class Bound(enum.StrEnum):
    """On which sides the profile likelihood of a parameter ends its interval."""

    BOTH = "bounded"
    BELOW = "bounded below only"
    ABOVE = "bounded above only"
    NEITHER = "not bounded"


@dataclasses.dataclass(frozen=True)
class Profile:
    """One parameter in natural units: its value, the ends of its 95 % interval (None: unbounded), and the curve.

    `curve` pairs values with the drop 2 (objective - minimum) / scale, `threshold` is where the interval ends.
    """

    value: float
    interval: tuple[float | None, float | None]
    threshold: float
    curve: tuple[tuple[float, float], ...]

    @property
    def bounded(self) -> Bound:
        low, high = (end is not None for end in self.interval)
        return (Bound.BOTH if high else Bound.BELOW) if low else (Bound.ABOVE if high else Bound.NEITHER)


def profiles(fitted: Fitted, optima: Sequence[Array]) -> tuple[dict[str, Profile], Array]:
    """The profile of every free parameter, and all answers [R, P] that were met on the way.

    A parameter is held at values around the answer `optima[0]` and the rest refitted, from there and from the other
    optima (each [P]); the values widen until the drop passes its threshold, the square of Student's t, or a bound.
    The scale is the parameter's sandwich variance over its inverse curvature, with which the drop of any M-estimator's
    objective is chi-squared (Kent 1982); for least squares with equal noise it is the residual variance.
    """
    from scipy.special import stdtrit

    problem = _uncentred(fitted)
    law, free = problem.law, np.flatnonzero(problem.free)
    answers = np.stack([law.to_inner(fitted.natural(theta), {}) for theta in optima])
    covariance, inverse = sandwich(problem, answers[0])
    threshold = float(stdtrit(len(fitted.found) - len(free), (1 + LEVEL) / 2)) ** 2
    drops = 2 * (problem.value(answers) - problem.value(answers).min())
    sides = [
        side
        for k in free
        if inverse[k, k] > 0
        for sign in (-1.0, 1.0)
        if (side := _side(problem, answers, drops, covariance, inverse, threshold, int(k), sign)) is not None
    ]

    def look(wanted: list[tuple[_Side, float]]) -> None:
        if wanted:
            _look(problem, answers, inverse, wanted)

    look([(side, step * side.unit) for side in sides for step in FIRST_STEPS if step * side.unit < side.limit])
    for _ in range(WIDENINGS):
        look([(side, at) for side in sides if (at := side.wider(threshold)) is not None])
    for _ in range(REFINEMENTS):
        look([(side, at) for side in sides if (at := side.crossing(threshold)) is not None])
    found = {
        law.parameters[k]: _profile(
            law.parameters[k] in law.logged, answers[0, k], [side for side in sides if side.parameter == k], threshold
        )
        for k in free
    }
    met = np.array([theta for side in sides for theta in side.thetas[1:]]).reshape(-1, len(law.parameters))
    return found, law.to_inner(law.to_natural(met, {}), fitted.centre)


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
    # In units of its own slope, so that a parameter that hardly moves the losses is not taken for one that does not.
    unit = np.linalg.norm(slopes, axis=1)
    slopes = slopes / np.where(unit > 0, unit, 1)[:, None]
    inverse = np.linalg.pinv((slopes * rise * sided) @ slopes.T, hermitian=True)
    spread = (slopes * (pull * sided) ** 2) @ slopes.T * points / (points - len(free))
    whole = np.zeros((2, len(theta), len(theta)))
    units = np.outer(unit, unit)
    whole[:, free[:, None], free] = np.array([inverse @ spread @ inverse, inverse]) / np.where(units > 0, units, 1)
    return whole[0], whole[1]


@dataclasses.dataclass
class _Side:
    """The profile of one parameter towards one side: distances from the answer, the drop at each, the rest refitted."""

    parameter: int
    sign: float
    scale: float
    unit: float
    limit: float
    least: float  # how far it has to be followed: another optimum lies there
    distances: list[float]
    drops: list[float]
    thetas: list[Array]

    def add(self, distance: float, drop: float, theta: Array) -> None:
        at = int(np.searchsorted(self.distances, distance))
        self.distances.insert(at, distance)
        self.drops.insert(at, drop)
        self.thetas.insert(at, theta)

    def nearest(self, distance: float) -> Array:
        return self.thetas[int(np.argmin(np.abs(np.array(self.distances) - distance)))]

    def crossing(self, threshold: float) -> float | None:
        """The outermost distance at which the drop passes the threshold, by its root: nearly a straight line."""
        inside = max((k for k, drop in enumerate(self.drops) if drop <= threshold), default=0)
        if inside + 1 == len(self.drops):
            return None
        near, far = (math.sqrt(max(self.drops[k], 0.0)) for k in (inside, inside + 1))
        share = (math.sqrt(threshold) - near) / (far - near)
        return self.distances[inside] + share * (self.distances[inside + 1] - self.distances[inside])

    def wider(self, threshold: float) -> float | None:
        """The next distance to look at, None when the threshold is passed or the bound reached."""
        last = self.distances[-1]
        passed = self.drops[-1] > threshold and last >= self.least
        return None if passed or last >= self.limit else min(max(WIDEN * last, self.unit), self.limit)


def _side(
    problem: Problem,
    answers: Array,
    drops: Array,
    covariance: Array,
    inverse: Array,
    threshold: float,
    k: int,
    sign: float,
) -> _Side | None:
    """None where the answer lies on the bound of that side."""
    at, scale = answers[0, k], covariance[k, k] / inverse[k, k]
    limit = float(sign * ((problem.high if sign > 0 else problem.low)[k] - at))
    if _follows(problem.law)[k]:
        limit = REACH
    if limit <= 0 or scale <= 0:
        return None
    near = answers[drops / scale <= threshold, k]
    unit = min(max(math.sqrt(covariance[k, k]), 1e-4 * limit), limit)
    least = float(np.max(sign * (near - at), initial=0.0))
    return _Side(k, sign, scale, unit, limit, least, [0.0], [float(drops[0] / scale)], [answers[0]])


def _look(problem: Problem, answers: Array, inverse: Array, wanted: list[tuple[_Side, float]]) -> None:
    """Refits all that is wanted at once, from the nearest answer on each side and from every other optimum."""
    straight, pinned = [], []
    for side, distance in wanted:
        k = side.parameter
        value = answers[0, k] + side.sign * distance
        # Along the straight valley of the linearised law the others are nearly where they will end.
        along = inverse[k] / inverse[k, k]
        straight += [start + along * (value - start[k]) for start in (side.nearest(distance), *answers[1:])]
        pinned += [(k, value)] * len(answers)
    chosen, held = np.array([k for k, _ in pinned]), np.array([value for _, value in pinned])
    rows = np.arange(len(pinned))
    low, high, moving = (np.repeat(part[None], len(rows), 0) for part in (problem.low, problem.high, problem.free))
    low[rows, chosen] = high[rows, chosen] = held
    moving[rows, chosen] = False
    here = np.concatenate([[side.nearest(distance), *answers[1:]] for side, distance in wanted])
    here[rows, chosen] = held
    with np.errstate(all="ignore"):  # far from the answer a law may leave the range of floats: such a start is no use
        ahead = np.clip(straight, low, high)
        better = problem.value(ahead) < problem.value(here)
        solved = minimise(
            dataclasses.replace(problem, low=low, high=high, free=moving), np.where(better[:, None], ahead, here)
        )
    solved_value = np.where(np.isfinite(solved.value), solved.value, np.inf)
    least = problem.value(answers).min()
    for (side, distance), values, thetas in zip(
        wanted,
        solved_value.reshape(len(wanted), -1),
        solved.theta.reshape(len(wanted), len(answers), -1),
        strict=True,
    ):
        side.add(distance, 2 * float(values.min() - least) / side.scale, thetas[values.argmin()])


def _profile(logged: bool, answer: float, sides: Sequence[_Side], threshold: float) -> Profile:
    def natural(value: float) -> float:
        return float(np.exp(value) if logged else value)

    ends: dict[float, float | None] = {-1.0: None, 1.0: None}
    curve = set()
    for side in sides:
        end = side.crossing(threshold)
        ends[side.sign] = None if end is None else natural(answer + side.sign * end)
        curve |= {
            (natural(answer + side.sign * at), float(drop)) for at, drop in zip(side.distances, side.drops, strict=True)
        }
    return Profile(natural(answer), (ends[-1.0], ends[1.0]), threshold, tuple(sorted(curve)))


def _uncentred(fitted: Fitted) -> Problem:
    """The same problem at logarithms that are not centred: a coefficient held fixed is then A, not A / N^alpha."""
    problem, law = fitted.problem, fitted.law
    moved = law.to_inner(fitted.estimate, {}) - fitted.theta
    # A coefficient has to follow its exponents to their bounds.
    shift = EXPONENT_BOUNDS[1] * sum(abs(at) for at in fitted.centre.values())
    wide = np.where(problem.free & _follows(law), shift, 0.0)
    logs = {name: value + fitted.centre[name] for name, value in problem.logs.items()}
    return dataclasses.replace(
        problem,
        logs=logs,
        low=problem.low + moved - wide,
        high=problem.high + moved + wide,
    )


def _follows(law: Law) -> Array:
    """Which parameters [P] are coefficients of powers: A of A / N^alpha."""
    return np.array([any(exponent for _, exponent in law.logged.get(name, ())) for name in law.parameters])
