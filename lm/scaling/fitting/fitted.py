"""One law fitted to one table: the answer with all that later questions about it need."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from lm.scaling import read
from lm.scaling.fitting.certificate import Certificate, certify
from lm.scaling.fitting.objective import Array, Objective
from lm.scaling.fitting.prepare import prepare
from lm.scaling.fitting.solve import Problem, Solution, minimise
from lm.scaling.laws.base import Law


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


def fit_points(found: read.Points, law: Law, objective: Objective, pins: Mapping[str, float]) -> Fitted:
    """Fits from starts read off the data and certifies the best answer.

    Raises:
      UsageError: an impossible pin, too few points, or a design in which the exponents cannot be told apart.
    """
    problem, centre, starts = prepare(found, law, objective, pins)
    solution = minimise(problem, starts, far=True)
    best = int(np.argmin(solution.value))
    proof = certify(problem, solution, best, starts)
    return Fitted(found, dict(pins), problem, centre, starts, solution, solution.theta[best], proof)
