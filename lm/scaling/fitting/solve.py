"""Many fits at once: a batched damped Newton solver for (starts x resamples).

All float64 numpy, no Python loop over resamples. The objective is solved in units of its scale (residuals over delta):
left at its size of 1e-3, the relative tolerances of common solvers stop it early. Rows are solved in blocks, on all
cores (numpy lets go of the interpreter), and long tables are summed piece by piece: what is at work stays in the cache.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Sequence

import numpy as np

from lm.scaling.fitting.objective import Objective
from lm.scaling.laws.base import Law, Logs

Array = np.ndarray

BLOCK_NUMBERS = 24_000  # of rows x points: larger temporaries go back to the system each time
PIECE = 6_000  # points that are summed at once
THIN = 3_000  # points that far starts of a longer table are brought near on
SAME_END = 6  # digits to which ends on the thinned table are one
MAX_ITERATIONS = 300
TOLERANCE = 1e-15
LONGEST_STEP, SHORTEST_STEP = 1.0, 1e-13
FIRST_DAMPING, MOST_DAMPING = 1.0, 100.0
SNAP = 1e-9
STRAIGHT_ITERATIONS, BEND_PROBE = 20, 0.1


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is fitted: a law at centred logarithms (each [points]) against log losses [points] or [R, points].

    `weights` [R, points] are the counts of a resample (None: all ones); `free` marks the parameters that move, `low`
    and `high` bound them: each [P], or [R, P] where they differ from row to row.
    """

    law: Law
    objective: Objective
    logs: Logs
    log_loss: Array
    low: Array
    high: Array
    free: Array
    weights: Array | None = None

    def rows(self, chosen: Array | slice) -> "Problem":
        """The same problem for some of the resamples."""
        varying = ("log_loss", "weights", "free", "low", "high")
        values = {name: getattr(self, name) for name in varying}
        return dataclasses.replace(
            self, **{name: value[chosen] for name, value in values.items() if value is not None and value.ndim == 2}
        )

    def points(self, chosen: Array | slice) -> "Problem":
        """The same problem for some of the points."""
        return dataclasses.replace(
            self,
            logs={name: log[chosen] for name, log in self.logs.items()},
            log_loss=self.log_loss[..., chosen],
            weights=None if self.weights is None else self.weights[:, chosen],
        )

    def value(self, theta: Array) -> Array:
        """The objective [...] at `theta` [..., P]."""
        parts = [self.objective.value(piece.residual(theta), piece.weights) for piece in self.pieces]
        return functools.reduce(np.add, parts)

    @property
    def pieces(self) -> list["Problem"]:
        """The same problem for a few thousand points at a time: what is at work stays in the cache."""
        starts = range(0, self.log_loss.shape[-1], PIECE)
        return [self.points(slice(begin, begin + PIECE)) for begin in starts]

    def residual(self, theta: Array) -> Array:
        """Observed minus predicted [..., points] at `theta` [..., P]: of the logarithms, or in nats."""
        predicted = self.law.log_loss(theta, self.logs)
        if self.objective.logarithm:
            return self.log_loss - predicted
        return np.exp(self.log_loss) - np.exp(predicted)

    def residual_and_slopes(self, theta: Array) -> tuple[Array, Array]:
        """The residuals [R, points] and what the prediction gains [R, P, points] with each parameter."""
        predicted, jacobian = self.law.log_loss_and_jacobian(theta, self.logs)
        if self.objective.logarithm:
            return self.log_loss - predicted, jacobian
        loss = np.exp(predicted)
        return np.exp(self.log_loss) - loss, jacobian * loss[:, None]


@dataclasses.dataclass(frozen=True)
class Solution:
    """Answers [R, P] with their objective [R], scaled gradient [R] and whether the last step was within tolerance [R].

    The scaled gradient of a parameter is the sum of the points' pulls on it over the sum of their sizes: 0 when they
    cancel exactly, 1 when they all pull one way; the worst parameter that is free to move counts.
    """

    theta: Array
    value: Array
    gradient: Array
    converged: Array

    @classmethod
    def joined(cls, parts: Sequence["Solution"]) -> "Solution":
        """One solution of the rows of several, in their order."""
        columns = (tuple(getattr(part, field.name) for part in parts) for field in dataclasses.fields(cls))
        return cls(*(np.concatenate(column) for column in columns))

    def rows(self, chosen: Array) -> "Solution":
        """The solution of some rows."""
        return Solution(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))


def minimise(problem: Problem, theta: Array, *, far: bool = False) -> Solution:
    """Solves all rows of `theta` [R, P] at once, in blocks that fit the cache; `far` starts go by wider deltas."""
    points = problem.log_loss.shape[-1]
    if far and points > THIN:
        return _by_thinned(problem, theta)
    block = max(1, BLOCK_NUMBERS // min(points, PIECE))
    # A resample of a long table ends so near its start that Newton's own steps need no caution.
    damping = FIRST_DAMPING if far or points <= PIECE else 0.0
    blocks = [slice(begin, begin + block) for begin in range(0, len(theta), block)]

    def solve(rows: slice) -> Solution:
        part, found = problem.rows(rows), theta[rows]
        for delta in (problem.objective.approach if far else ()) + problem.objective.stages:
            found, gradient, converged = _newton(part, found, delta, damping)
        return Solution(found, part.value(found), gradient, converged)

    if len(blocks) == 1:
        return solve(blocks[0])
    with concurrent.futures.ThreadPoolExecutor(_cores()) as pool:
        return Solution.joined(list(pool.map(solve, blocks)))


def _by_thinned(problem: Problem, theta: Array) -> Solution:
    """From far starts to where each ends on a part of the points, and from there, once for each end, to its answer."""
    chosen = np.random.default_rng(0).choice(problem.log_loss.shape[-1], THIN, replace=False)
    near = minimise(problem.points(chosen), theta, far=True).theta
    _, first, which = np.unique(np.round(near, SAME_END), axis=0, return_index=True, return_inverse=True)
    return minimise(problem.rows(first), near[first]).rows(which.reshape(-1))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass
class _State:
    theta: Array
    value: Array
    pull: Array
    pull_size: Array
    newton: Array
    majorant: Array


def _newton(problem: Problem, theta: Array, delta: float, first_damping: float) -> tuple[Array, Array, Array]:
    """Damped steps between Newton (only points within delta curve) and reweighted least squares (never overshoots).

    The damping interpolates between the two: 0 is Newton, 1 the majorant, above 1 adds a ridge. No parameter moves
    further than the radius in one step; it shrinks when a step does not lower the objective. Rows that are not there
    after some steps are in a curved valley: theirs follow its bend.
    """
    theta = _within(problem, theta)
    answer, gradient = theta.copy(), np.zeros(len(theta))
    converged = np.zeros(len(theta), bool)
    active = np.arange(len(theta))
    state = _evaluate(problem, theta, delta)
    damping, radius = np.full(len(theta), first_damping), np.full(len(theta), LONGEST_STEP)
    for iteration in range(MAX_ITERATIONS):
        step, gain = _step(problem, state, damping)
        length = np.abs(step).max(-1)
        step *= np.minimum(1, radius / np.maximum(length, 1e-300))[:, None]
        if iteration >= STRAIGHT_ITERATIONS:
            step += _bend(problem, state, step, damping, delta)
        trial = _evaluate(problem, _within(problem, state.theta + step), delta)
        better = trial.value < state.value
        small = gain <= TOLERANCE * (state.value + 1)
        for field in dataclasses.fields(_State):
            old, new = getattr(state, field.name), getattr(trial, field.name)
            setattr(state, field.name, np.where(better.reshape(-1, *[1] * (old.ndim - 1)), new, old))
        damping = np.where(better, np.where(damping < 1e-4, 0, damping * 0.2), np.clip(damping * 5, 0.01, MOST_DAMPING))
        radius = np.where(better, np.minimum(2 * radius, LONGEST_STEP), 0.3 * np.minimum(length, radius))
        stop = small | (radius < SHORTEST_STEP)
        if stop.any():
            finished = active[stop]
            answer[finished], gradient[finished] = state.theta[stop], _scaled_gradient(problem, state)[stop]
            converged[finished] = small[stop]
            keep = ~stop
            active, damping, radius, problem = active[keep], damping[keep], radius[keep], problem.rows(keep)
            state = _State(*(getattr(state, field.name)[keep] for field in dataclasses.fields(_State)))
            if not len(active):
                break
    answer[active], gradient[active] = state.theta, _scaled_gradient(problem, state)
    return answer, gradient, converged


def _evaluate(problem: Problem, theta: Array, delta: float) -> _State:
    totals = [_sums(piece, theta, delta) for piece in problem.pieces]
    return _State(theta, *(functools.reduce(np.add, column) for column in zip(*totals, strict=True)))


def _sums(problem: Problem, theta: Array, delta: float) -> tuple[Array, Array, Array, Array, Array]:
    """The sums over points that a `_State` holds beside theta, in their order."""
    residual, jacobian = problem.residual_and_slopes(theta)
    inside, reach, count, unit = _curvatures(problem, residual, delta)
    scaled = residual / unit
    slope = scaled * reach
    product = slope * scaled
    rho = np.where(inside > 0, 0.5 * product, product - 0.5 * count)
    transposed = jacobian.transpose(0, 2, 1)
    return (
        rho.sum(-1),
        np.matmul(jacobian, slope[:, :, None])[:, :, 0] / unit,
        np.matmul(np.abs(jacobian), np.abs(slope)[:, :, None])[:, :, 0] / unit,
        np.matmul(jacobian * inside[:, None], transposed) / unit**2,
        np.matmul(jacobian * reach[:, None], transposed) / unit**2,
    )


def _within(problem: Problem, theta: Array) -> Array:
    """`theta` [R, P] within the bounds, and on one where it is nearly there: shrinking steps would never reach it."""
    near = SNAP * (problem.high - problem.low)
    theta = np.where(theta <= problem.low + near, problem.low, theta)
    return np.where(theta >= problem.high - near, problem.high, theta)


def _moving(problem: Problem, state: _State) -> Array:
    """The parameters [R, P] that are free and not pressed against a bound."""
    pressed = (state.theta <= problem.low) & (state.pull < 0) | (state.theta >= problem.high) & (state.pull > 0)
    return problem.free & ~pressed


def _scaled_gradient(problem: Problem, state: _State) -> Array:
    share = np.abs(state.pull) / np.maximum(state.pull_size, 1e-300)
    return np.where(_moving(problem, state), share, 0).max(-1)


def _step(problem: Problem, state: _State, damping: Array) -> tuple[Array, Array]:
    """The damped step [R, P] and the decrease [R] that it promises."""
    moving = _moving(problem, state)
    step = _solve(_matrix(state, damping, moving), np.where(moving, state.pull, 0))
    # A parameter on its bound whose own pull is inward may still be sent outward by the others: it stays, they move.
    outward = (state.theta <= problem.low) & (step < 0) | (state.theta >= problem.high) & (step > 0)
    blocked = (outward & moving).any(-1)
    if blocked.any():
        part = _State(*(getattr(state, field.name)[blocked] for field in dataclasses.fields(_State)))
        inner = (moving & ~outward)[blocked]
        step[blocked] = _solve(_matrix(part, damping[blocked], inner), np.where(inner, part.pull, 0))
    return step, 0.5 * (step * np.where(moving, state.pull, 0)).sum(-1)


def _solve(matrix: Array, right: Array) -> Array:
    return np.linalg.solve(matrix, right[:, :, None])[:, :, 0]


def _matrix(state: _State, damping: Array, moving: Array) -> Array:
    mix = np.minimum(damping, 1)[:, None, None]
    matrix = (1 - mix) * state.newton + mix * state.majorant
    diagonal = np.einsum("rpp->rp", state.majorant)
    ridge = (0.01 * np.maximum(damping - 1, 0)[:, None] + 1e-13) * diagonal + 1e-30
    matrix = matrix + ridge[:, :, None] * np.eye(matrix.shape[-1])
    both = moving[:, :, None] & moving[:, None, :]
    return np.where(both, matrix, np.eye(matrix.shape[-1]) * (~moving)[:, :, None])


def _bend(problem: Problem, state: _State, step: Array, damping: Array, delta: float) -> Array:
    """The second-order part of a step along a curved valley (geodesic acceleration, Transtrum and Sethna 2012)."""
    residual, jacobian = problem.residual_and_slopes(state.theta)
    ahead = problem.residual(state.theta + BEND_PROBE * step)
    along = np.matmul(step[:, None, :], jacobian)[:, 0]
    second = 2 / BEND_PROBE * ((residual - ahead) / BEND_PROBE - along)
    inside, reach, _, unit = _curvatures(problem, residual, delta)
    mix = np.minimum(damping, 1)[:, None]
    force = np.matmul(jacobian, (((1 - mix) * inside + mix * reach) * second)[:, :, None])[:, :, 0] / unit**2
    moving = _moving(problem, state) & (step != 0)
    bend = -0.5 * _solve(_matrix(state, damping, moving), np.where(moving, force, 0))
    trusted = np.abs(bend).max(-1) <= np.abs(step).max(-1)
    return np.where(trusted[:, None] & np.isfinite(bend), bend, 0)


def _curvatures(problem: Problem, residual: Array, delta: float) -> tuple[Array, Array, Array | float, float]:
    """Per point [R, points]: the curvature within delta, the majorant's everywhere, both times what the point counts.

    And that count, by resample and side, and the unit of the residuals.
    """
    if math.isinf(delta):
        inside = np.ones_like(residual)
        reach, unit = inside, 1.0
    else:
        size = np.abs(residual) / delta
        inside, reach, unit = (size <= 1).astype(np.float64), 1 / np.maximum(size, 1), delta
    if problem.weights is None and problem.objective.over == 1:
        return inside, reach, 1.0, unit
    count = problem.objective.sided(residual) if problem.weights is None else problem.weights
    if problem.weights is not None and problem.objective.over != 1:
        count = count * problem.objective.sided(residual)
    return inside * count, reach * count, count, unit
