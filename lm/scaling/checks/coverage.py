"""How often 95 % intervals hold the truth, measured on planted laws: what the intervals of a real fit are worth.

`experiments/coverage` runs `measure` over designs and writes `coverage.json` beside this file; `analyse` reads from it
what a fit of few points is told.
"""

import dataclasses
import functools
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.scaling.approaches.isoflop import in_budgets
from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import Bootstrap, Interval, Resampling
from lm.scaling.fitting.fitted import Fitted
from lm.scaling.fitting.objective import HUBER, Array, Objective
from lm.scaling.fitting.quantities import quantities
from lm.scaling.fitting.solve import Problem, minimise
from lm.scaling.laws.base import Law
from lm.scaling.laws.power import HOFFMANN

MANY = 100  # points (clusters): from there on the intervals hold what they promise
ENOUGH = 200  # resamples, five of them beyond each end; the study took 400
MOST_LOST = 0.05  # of the resamples: as many as an interval leaves out
PROMISED = 92, 98  # %: what 400 replicates cannot tell from 95 %
MEASURED = "coverage.json"


@dataclasses.dataclass(frozen=True)
class Planted:
    """A law with known parameters [P] and Gaussian noise of `noise` on the log loss, at points n, d (each [points]).

    `clusters` are codes [points] of runs; all points of one share a further noise of `run_noise`.
    """

    parameters: tuple[float, ...]
    n: Array
    d: Array
    noise: float
    law: Law = HOFFMANN
    objective: Objective = HUBER
    clusters: Array | None = None
    run_noise: float = 0.0

    @property
    def table(self) -> dict[str, Array]:
        return {"n": self.n, "d": self.d, "c": 6 * self.n * self.d}

    def losses(self, random: np.random.Generator) -> Array:
        """One draw of the losses [points], nats/token."""
        exact = self.law.predict(np.array(self.parameters), self.table)
        noise = self.noise * random.standard_normal(len(self.n))
        if self.clusters is not None:
            noise += self.run_noise * random.standard_normal(self.clusters.max() + 1)[self.clusters]
        return exact * np.exp(noise)


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
    planted: Planted, kinds: Sequence[Resampling], *, replicates: int, resamples: int, seed: int, budget: float
) -> dict[tuple[Resampling, Interval], dict[str, float]]:
    """The share of replicates whose 95 % interval holds the truth, for each parameter and derived quantity.

    Both kinds of interval are read off the same resamples; optima are those at `budget` FLOP.
    """
    law, table = planted.law, planted.table
    centre = {name: float(np.log(table[name]).mean()) for name in law.variables}
    logs = {name: np.log(table[name]) - centre[name] for name in law.variables}
    truth = np.array(planted.parameters)
    start = law.to_inner(truth, centre)[None]

    def derived(theta: Array) -> dict[str, Array]:
        return quantities(law, law.to_natural(theta, centre), [budget], 6.0)

    exact = quantities(law, truth, [budget], 6.0)
    held = {(kind, interval): dict.fromkeys(exact, 0) for kind in kinds for interval in Interval}
    for replicate in range(replicates):
        random = np.random.default_rng((seed, replicate))
        loss = planted.losses(random)
        low, high = law.bounds(logs, loss)
        problem = Problem(law, planted.objective, logs, np.log(loss), low, high, np.ones(len(truth), bool))
        theta = minimise(problem, start, far=True).theta[0]
        estimate, left_out = derived(theta), None
        for kind in kinds:
            spec = Bootstrap(resamples, kind, int(random.integers(2**31)), planted.clusters)
            samples = derived(bootstrap.draw(problem, theta, spec).theta)
            left_out = left_out or derived(bootstrap.jackknife(problem, theta, spec))
            for interval in Interval:
                for name, value in exact.items():
                    ends = bootstrap.interval(samples[name], float(estimate[name]), left_out[name], interval)
                    held[kind, interval][name] += ends[0] <= float(value) <= ends[1]
    return {key: {name: count / replicates for name, count in counts.items()} for key, counts in held.items()}


def analyse(fitted: Fitted, spec: Bootstrap, interval: Interval, lost: float) -> dict[str, Any]:
    """What is known of intervals from so few points (clusters): {told}, from the nearest measured design.

    Among `warnings` instead where a measured share is not what is promised, and where nothing measured is like this
    fit; empty from 100 points on, and without resamples. `lost` is the share of resamples that did not converge.
    """
    found, law, objective = fitted.found, fitted.law, fitted.problem.objective
    count = len(found) if spec.clusters is None else int(spec.clusters.max()) + 1
    if count >= MANY or not spec.resamples:
        return {}
    what = "optima" if not law.of_loss else "points" if spec.clusters is None else "clusters"
    reasons = {
        f"for the law {law.name}": law is not HOFFMANN,
        f"for the objective {objective.name}": objective != HUBER,
        "with pins": bool(fitted.pins),
        "for a fit that is not certified": not fitted.certificate.passed,
        f"with under {ENOUGH} resamples": spec.resamples < ENOUGH,
        "where resamples did not converge": lost > MOST_LOST,
    }
    unlike = [reason for reason, holds in reasons.items() if holds]
    design = "IsoFLOP" if in_budgets(found) else "N x D"
    asked = (design, spec.kind.value, interval.value)
    rows = [row for row in measured()["rows"] if (row["design"], row["resampling"], row["interval"]) == asked]
    if unlike or not rows:
        reason = unlike[0] if unlike else f"by {spec.kind.value}, {interval.value}"
        line = f"{count} {what}: how often 95 % intervals from so few hold the truth is not measured {reason}"
        return {"warnings": [line]}
    nearest = min(rows, key=lambda row: abs(math.log(row["points"] / count)))
    low, high = (round(100 * end(nearest["held"].values())) for end in (min, max))
    line = (
        f"{count} {what}: in such a design (about {nearest['points']} {what}, {design}, {law.name}, {objective.name}, "
        f"by {spec.kind.value}, {interval.value}) 95 % intervals held the truth in {low} to {high} "
        "% of planted tables"
    )
    return {"told": line} if PROMISED[0] <= low and high <= PROMISED[1] else {"warnings": [line]}


def lines(part: Mapping[str, Any]) -> list[str]:
    """What was told as plain text."""
    return [part["told"]]


@functools.cache
def measured() -> Mapping[str, Any]:
    """What the study wrote: how, and `rows` of {points, design, resampling, interval, held: {name: share}}."""
    return json.loads(importlib.resources.files(__package__).joinpath(MEASURED).read_text())
