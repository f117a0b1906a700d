"""How often 95 % intervals hold the truth, measured on planted laws: what the intervals of a real fit are worth."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import Bootstrap, Interval, Resampling
from lm.scaling.fitting.objective import HUBER, Array, Objective
from lm.scaling.fitting.quantities import quantities
from lm.scaling.fitting.solve import Problem, minimise
from lm.scaling.laws.base import Law
from lm.scaling.laws.power import HOFFMANN


@dataclasses.dataclass(frozen=True)
class Planted:
    """A law with known parameters [P] and Gaussian noise of `noise` on the log loss, at points n, d (each [points])."""

    parameters: tuple[float, ...]
    n: Array
    d: Array
    noise: float
    law: Law = HOFFMANN
    objective: Objective = HUBER

    @property
    def table(self) -> dict[str, Array]:
        return {"n": self.n, "d": self.d, "c": 6 * self.n * self.d}

    def losses(self, random: np.random.Generator) -> Array:
        """One draw of the losses [points], nats/token."""
        exact = self.law.predict(np.array(self.parameters), self.table)
        return exact * np.exp(self.noise * random.standard_normal(len(self.n)))


def grid(sizes: int, lengths: int) -> tuple[Array, Array]:
    """An N x D design: sizes from 1e7 to 1e10 parameters, lengths from 1e9 to 3e11 tokens, every pair."""
    n, d = np.meshgrid(np.geomspace(1e7, 1e10, sizes), np.geomspace(1e9, 3e11, lengths), indexing="ij")
    return n.ravel(), d.ravel()


def isoflop(budgets: int, sizes: int) -> tuple[Array, Array]:
    """An IsoFLOP design: budgets from 1e18 to 1e21 FLOP, sizes within a factor of 8 about 20 tokens a parameter."""
    c = np.repeat(np.geomspace(1e18, 1e21, budgets), sizes)
    n = np.sqrt(c / 120) * np.tile(np.geomspace(1 / 8, 8, sizes), budgets)
    return n, c / (6 * n)


def measure(
    planted: Planted, *, kind: Resampling, interval: Interval, replicates: int, resamples: int, seed: int, budget: float
) -> Mapping[str, float]:
    """The share of replicates whose 95 % interval holds the truth, for each parameter and derived quantity."""
    law, table = planted.law, planted.table
    centre = {name: float(np.log(table[name]).mean()) for name in law.variables}
    logs = {name: np.log(table[name]) - centre[name] for name in law.variables}
    truth = np.array(planted.parameters)
    start = law.to_inner(truth, centre)[None]
    exact = {name: float(value) for name, value in quantities(law, truth, [budget], 6.0).items()}
    held = dict.fromkeys(exact, 0)
    for replicate in range(replicates):
        random = np.random.default_rng((seed, replicate))
        loss = planted.losses(random)
        low, high = law.bounds(logs, loss)
        problem = Problem(law, planted.objective, logs, np.log(loss), low, high, np.ones(len(truth), bool))
        theta = minimise(problem, start, far=True).theta[0]
        spec = Bootstrap(resamples, kind, int(random.integers(2**31)))
        estimate = quantities(law, law.to_natural(theta, centre), [budget], 6.0)
        samples = quantities(law, law.to_natural(bootstrap.draw(problem, theta, spec).theta, centre), [budget], 6.0)
        left_out = None
        if interval is Interval.BCA:
            left_out = quantities(law, law.to_natural(bootstrap.jackknife(problem, theta, spec), centre), [budget], 6.0)
        for name, value in exact.items():
            ends = bootstrap.interval(
                samples[name], float(estimate[name]), None if left_out is None else left_out[name], interval
            )
            held[name] += ends[0] <= value <= ends[1]
    return {name: count / replicates for name, count in held.items()}
