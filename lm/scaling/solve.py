"""Many fits at once: objectives on log residuals and a batched damped Newton solver for (starts x resamples).

All float64 numpy, no Python loop over resamples. The objective is solved in units of its scale (residuals over delta):
left at its size of 1e-3, the relative tolerances of common solvers stop it early.
"""

import dataclasses
import math

import numpy as np

from lm.base.config import nearest
from lm.base.errors import UsageError
from lm.scaling.laws import Law, Logs

Array = np.ndarray

BLOCK_NUMBERS = 60_000
MAX_ITERATIONS = 300
TOLERANCE = 1e-15
LONGEST_STEP, SHORTEST_STEP = 1.0, 1e-13
MOST_DAMPING = 100.0
SNAP = 1e-9
STRAIGHT_ITERATIONS, BEND_PROBE = 20, 0.1


@dataclasses.dataclass(frozen=True)
class Objective:
    """The sum over points of Huber(delta) of log(observed) - log(predicted).

    delta = inf is least squares on the logarithm, delta = 0 least absolute deviations (solved as the limit of small
    deltas). `value` is in the objective's own units: r^2 / 2 within delta, delta (|r| - delta / 2) beyond; |r| at 0.
    """

    name: str
    delta: float

    @property
    def stages(self) -> tuple[float, ...]:
        """The deltas that are solved one after the other, each from the answer of the one before."""
        return (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8) if self.delta == 0 else (self.delta,)

    @property
    def approach(self) -> tuple[float, ...]:
        """Wider deltas to pass through on the way from a far start, where nearly all points lie beyond delta."""
        return () if math.isinf(self.delta) else (100 * self.stages[0], 10 * self.stages[0])

    @property
    def scale(self) -> float:
        """What the objective is multiplied by while it is solved: 1 / delta^2, or 1."""
        return 1.0 if self.delta in (0, math.inf) else 1 / self.delta**2

    def value(self, residuals: Array, weights: Array | None = None) -> Array:
        """The objective [...] of log residuals [..., points], weighted by counts where given."""
        size = np.abs(residuals)
        if self.delta == 0:
            rho = size
        elif math.isinf(self.delta):
            rho = 0.5 * size**2
        else:
            rho = np.where(size <= self.delta, 0.5 * size**2, self.delta * (size - 0.5 * self.delta))
        return (rho if weights is None else rho * weights).sum(-1)


HUBER = Objective("huber_log", 1e-3)
OBJECTIVES: tuple[Objective, ...] = (HUBER, Objective("log_least_squares", math.inf), Objective("log_absolute", 0.0))


def objective_named(name: str) -> Objective:
    """`huber_log` (delta 1e-3), `huber_log:DELTA`, `log_least_squares` or `log_absolute`.

    Raises:
      UsageError: no such objective, or a delta that is not a positive number.
    """
    base, colon, delta = name.partition(":")
    for objective in OBJECTIVES:
        if objective.name == base and not colon:
            return objective
    if base != HUBER.name:
        raise UsageError(
            f"there is no objective '{name}'", where="--objective", do=nearest(base, [o.name for o in OBJECTIVES])
        )
    try:
        value = float(delta)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"'{delta}' is not a positive delta", where="--objective", do="Write huber_log:1e-3.")
    return Objective(HUBER.name, value)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is fitted: a law at centred logarithms (each [points]) against log losses [points] or [R, points].

    `weights` [R, points] are the counts of a resample (None: all ones); `free` [P] marks the parameters that move;
    `low` and `high` [P] bound them.
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
        return dataclasses.replace(
            self,
            log_loss=self.log_loss[chosen] if self.log_loss.ndim == 2 else self.log_loss,
            weights=None if self.weights is None else self.weights[chosen],
        )

    def value(self, theta: Array) -> Array:
        """The objective [R] at `theta` [R, P]."""
        return self.objective.value(self.log_loss - self.law.log_loss(theta, self.logs), self.weights)


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


def minimise(problem: Problem, theta: Array, *, far: bool = False) -> Solution:
    """Solves all rows of `theta` [R, P] at once, in blocks that fit the cache; `far` starts go by wider deltas."""
    points = problem.log_loss.shape[-1]
    block = max(1, BLOCK_NUMBERS // points)
    parts = []
    for begin in range(0, len(theta), block):
        part, found = problem.rows(slice(begin, begin + block)), theta[begin : begin + block]
        for delta in (problem.objective.approach if far else ()) + problem.objective.stages:
            found, gradient, converged = _newton(part, found, delta)
        parts.append((found, part.value(found), gradient, converged))
    return Solution(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclasses.dataclass
class _State:
    theta: Array
    value: Array
    pull: Array
    pull_size: Array
    newton: Array
    majorant: Array


def _newton(problem: Problem, theta: Array, delta: float) -> tuple[Array, Array, Array]:
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
    damping, radius = np.ones(len(theta)), np.full(len(theta), LONGEST_STEP)
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
    predicted, jacobian = problem.law.log_loss_and_jacobian(theta, problem.logs)
    residual = problem.log_loss - predicted
    inside, reach, unit = _curvatures(problem, residual, delta)
    scaled = residual / unit
    slope = scaled * reach
    product = slope * scaled
    count = 1.0 if problem.weights is None else problem.weights
    rho = np.where(inside > 0, 0.5 * product, product - 0.5 * count)
    transposed = jacobian.transpose(0, 2, 1)
    return _State(
        theta,
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
    predicted, jacobian = problem.law.log_loss_and_jacobian(state.theta, problem.logs)
    ahead = problem.law.log_loss(state.theta + BEND_PROBE * step, problem.logs)
    along = np.matmul(step[:, None, :], jacobian)[:, 0]
    second = 2 / BEND_PROBE * ((ahead - predicted) / BEND_PROBE - along)
    inside, reach, unit = _curvatures(problem, problem.log_loss - predicted, delta)
    mix = np.minimum(damping, 1)[:, None]
    force = np.matmul(jacobian, (((1 - mix) * inside + mix * reach) * second)[:, :, None])[:, :, 0] / unit**2
    moving = _moving(problem, state) & (step != 0)
    bend = -0.5 * _solve(_matrix(state, damping, moving), np.where(moving, force, 0))
    trusted = np.abs(bend).max(-1) <= np.abs(step).max(-1)
    return np.where(trusted[:, None] & np.isfinite(bend), bend, 0)


def _curvatures(problem: Problem, residual: Array, delta: float) -> tuple[Array, Array, float]:
    """Per point [R, points]: the curvature within delta, the majorant's everywhere (both by count), and their unit."""
    if math.isinf(delta):
        inside = np.ones_like(residual)
        reach, unit = inside, 1.0
    else:
        size = np.abs(residual) / delta
        inside, reach, unit = (size <= 1).astype(np.float64), 1 / np.maximum(size, 1), delta
    if problem.weights is not None:
        inside, reach = inside * problem.weights, reach * problem.weights
    return inside, reach, unit
