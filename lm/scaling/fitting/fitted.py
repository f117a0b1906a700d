"""One law fitted to one table: the answer with all that later questions about it need."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from lm.scaling import read
from lm.scaling.fitting.certificate import ROUNDING, Certificate, certify
from lm.scaling.fitting.objective import Array, Objective
from lm.scaling.fitting.prepare import prepare
from lm.scaling.fitting.solve import Problem, Solution, minimise
from lm.scaling.laws.base import Law

RESTARTS = 32
LOG_RISES = math.log(0.01), math.log(0.3)  # of the objective at the answer
FLATTEST = 1e-10  # of the largest curvature: a direction that no point bends is not followed to infinity


@dataclasses.dataclass(frozen=True)
class Fitted:
    """The answer `theta` [P] (inner coordinates, see `laws.base`) of a law at `found`, and how it was reached.

    `starts` [S, P] and `solution` are what was started from and where each ended; `centre` makes parameters natural.
    """

    found: read.Points
    pins: Mapping[str, float]
    problem: Problem
    centre: Mapping[str, float]
    starts: Array
    solution: Solution
    theta: Array
    certificate: Certificate

    @property
    def law(self) -> Law:
        return self.problem.law

    @property
    def estimate(self) -> Array:
        """The fitted parameters [P] in natural units."""
        return self.natural(self.theta)

    def natural(self, theta: Array) -> Array:
        """Natural parameters [..., P] of inner ones."""
        return self.law.to_natural(theta, self.centre)

    @property
    def headline(self) -> str:
        """What the answer is judged by: a where the fit moves it, else its first free exponent or parameter."""
        free = [name for name, moves in zip(self.law.parameters, self.problem.free, strict=True) if moves]
        exponents = [name for name in self.law.exponents if name in free]
        terms = self.law.balanced(self.estimate)
        if terms is not None and terms[1] != terms[3] and exponents:
            return "a"
        return (*exponents, *free)[0]

    @property
    def noise(self) -> dict[str, float | None]:
        """Standard deviations of the log loss: of the residuals, and between runs of equal n and d (None without)."""
        found, problem = self.found, self.problem
        residual = problem.log_loss - self.law.log_loss(self.theta, problem.logs)
        freedom = len(residual) - int(problem.free.sum())
        codes = read.repeats(found)
        counts = np.bincount(codes)
        inside = counts[codes] > 1
        seed_sd = None
        if inside.any():
            logs = np.log(found.loss)
            means = np.bincount(codes, logs) / counts
            seed_sd = float(np.sqrt(np.sum((logs - means[codes])[inside] ** 2) / np.sum(counts[counts > 1] - 1)))
        return {
            "residual_sd": float(np.sqrt(np.sum(residual**2) / freedom)),
            "freedom": float(freedom),
            "seed_sd": seed_sd,
            "repeated_points": float(inside.sum()),
        }


def fit_points(found: read.Points, law: Law, objective: Objective, pins: Mapping[str, float]) -> Fitted:
    """Fits from starts read off the data, then from around the best answer, and certifies the best.

    The way through wider deltas leads all starts into one valley; where its floor has several optima (few points lie
    within delta), those around it are found from the floor only.

    Raises:
      UsageError: an impossible pin, too few points, or a design in which the exponents cannot be told apart.
    """
    problem, centre, starts = prepare(found, law, objective, pins)
    solution = minimise(problem, starts, far=True)
    answer = solution.theta[solution.value.argmin()]
    if np.abs(problem.residual(answer)).max() > ROUNDING:
        around = _around(problem, answer)
        again = minimise(problem, around)
        starts = np.concatenate([starts, around])
        solution = Solution(*(np.concatenate(pair) for pair in zip(_columns(solution), _columns(again), strict=True)))
    best = int(np.argmin(solution.value))
    proof = certify(problem, solution, best, starts)
    return Fitted(found, dict(pins), problem, centre, starts, solution, solution.theta[best], proof)


def _around(problem: Problem, answer: Array) -> Array:
    """Starts [RESTARTS, P] in random directions from `answer`, where the objective is 1 to 30 % higher."""
    random = np.random.default_rng(0)
    residual, slopes = (part[0] for part in problem.residual_and_slopes(answer[None]))
    size, delta = np.abs(residual), problem.objective.delta
    bend = 1 / np.maximum(size, np.median(size)) if delta == 0 else np.minimum(1, delta / np.maximum(size, ROUNDING))
    slopes = slopes[problem.free]
    values, axes = np.linalg.eigh((slopes * bend * problem.objective.sided(residual)) @ slopes.T)
    directions = random.standard_normal((RESTARTS, len(values)))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    rise = float(problem.value(answer)) * np.exp(random.uniform(*LOG_RISES, (RESTARTS, 1)))
    starts = np.repeat(answer[None], RESTARTS, axis=0)
    starts[:, problem.free] += directions * np.sqrt(2 * rise / np.maximum(values, FLATTEST * values.max())) @ axes.T
    return np.clip(starts, problem.low, problem.high)


def _columns(solution: Solution) -> list[Array]:
    return [getattr(solution, field.name) for field in dataclasses.fields(solution)]
