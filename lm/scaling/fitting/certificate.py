"""Whether the answer of a fit is one: its gradient, other starts, a second solver, bounds. A failure is said first."""

import dataclasses

import numpy as np

from lm.scaling.fitting.solve import Array, Problem, Solution

GRADIENT_LIMIT = 1e-6
AGREEMENT = 1e-6
SECOND_SOLVER_STARTS = 3
TRUSTED_MOVE = 1e-3
ROUNDING = 1e-12  # of a log loss: where no residual is larger, the pulls are rounding and so is a share of them


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The evidence for one fit; `failures` is empty when it holds.

    `scaled_gradient` is the worst parameter's sum of pulls over the sum of their sizes; for least absolute deviations
    `subgradient` (the largest multiplier needed on the points that are met exactly, at most 1) stands in its place.
    `second_solver_gap` is how far above ours, relatively, SciPy's solver ended (negative: it found a lower objective).
    """

    passed: bool
    failures: tuple[str, ...]
    scaled_gradient: float
    subgradient: float | None
    starts: int
    starts_agreeing: float
    second_solver: str
    second_solver_gap: float
    dtype: str
    objective: float
    objective_scale: float
    points: int
    points_beyond_delta: int
    answer_equals_start: bool
    on_bound: tuple[str, ...]


def certify(problem: Problem, solution: Solution, best: int, starts: Array) -> Certificate:
    """The certificate of row `best` of a solution from several `starts` [S, P]."""
    theta, value = solution.theta[best], float(solution.value[best])
    residual = problem.residual(theta)
    agrees = solution.value <= value + AGREEMENT * (value + 1e-12)
    on_bound = tuple(
        name
        for name, at, low, high, free in zip(
            problem.law.parameters, theta, problem.low, problem.high, problem.free, strict=True
        )
        if free and not low < at < high
    )
    at_answer = np.all(np.abs(starts - theta) < 1e-9, axis=-1)
    equals_start = bool(at_answer.any()) and bool(problem.free.any())
    absolute = problem.objective.delta == 0
    solver, other = _second(problem, theta, starts, np.array([name in on_bound for name in problem.law.parameters]))
    gap = (other - value) / max(value, 1e-12)
    exact = bool(np.abs(residual).max() <= ROUNDING)
    subgradient = (0.0 if exact else _subgradient(problem, theta, residual)) if absolute else None
    gradient = 0.0 if exact else float(solution.gradient[best])
    failures = []
    if subgradient is not None and subgradient > 1 + 1e-4:
        failures.append(f"no subgradient vanishes (multiplier {subgradient:.3g} > 1)")
    if subgradient is None and gradient > GRADIENT_LIMIT:
        failures.append(f"scaled gradient {gradient:.1e} is over {GRADIENT_LIMIT:.0e}")
    if gap < -AGREEMENT:
        failures.append(f"{solver} found an objective {-gap:.1e} lower")
    # Of a law that is linear in its logarithms a start may be the answer: then the others come to it too.
    if equals_start and not (agrees & ~at_answer).any():
        failures.append("the answer equals a start")
    # A constant at 0 is an answer (it is not in the data); any other bound only says that the search was cut off.
    cut = [name for name in on_bound if name not in problem.law.constants]
    if cut:
        failures.append(f"on a bound: {', '.join(cut)}")
    moved = np.abs(problem.residual_and_slopes(theta[None])[1][0]).max(-1)
    idle = [
        name for name, size, free in zip(problem.law.parameters, moved, problem.free, strict=True) if free and not size
    ]
    if idle:
        failures.append(f"moves no prediction: {', '.join(idle)}")
    if agrees.sum() < 2:
        failures.append("no second start agrees")
    return Certificate(
        not failures,
        tuple(failures),
        gradient,
        subgradient,
        len(starts),
        float(agrees.mean()),
        solver,
        float(gap),
        str(theta.dtype),
        value,
        problem.objective.scale,
        len(residual),
        int(np.sum(np.abs(residual) > problem.objective.delta)),
        equals_start,
        on_bound,
    )


def _second(problem: Problem, theta: Array, starts: Array, on_bound: Array) -> tuple[str, float]:
    """The lowest objective that SciPy reaches by itself, in the objective's own units.

    BFGS from the starts with the lowest objectives; least absolute deviations, which have no gradient at the answer,
    are checked by the linear program of the linearised law around it.
    """
    if problem.objective.delta == 0:
        return _linear_program(problem, theta)
    from scipy.optimize import minimize

    free, scale, delta = problem.free & ~on_bound, problem.objective.scale, problem.objective.delta

    def fun(moving: Array) -> tuple[float, Array]:
        full = np.array(theta)
        full[free] = moving
        full = np.clip(full, problem.low, problem.high)
        residual, slopes = (part[0] for part in problem.residual_and_slopes(full[None]))
        pull = np.clip(residual, -delta, delta) * problem.objective.sided(residual)
        return float(problem.objective.value(residual)) * scale, -(slopes @ pull)[free] * scale

    if not free.any():
        return "scipy BFGS", fun(theta[free])[0] / scale
    order = np.argsort(problem.value(starts))[:SECOND_SOLVER_STARTS]
    ended = [
        minimize(fun, starts[k][free], jac=True, method="BFGS", options={"gtol": 1e-8, "maxiter": 500}).fun
        for k in order
    ]
    return "scipy BFGS", float(min(ended)) / scale


def _linear_program(problem: Problem, theta: Array) -> tuple[str, float]:
    """The solver and the objective after the best move within e^+-0.001 of `theta` for the linearised law.

    The dual program: as many rows as parameters, however many points there are; the move is what its rows are worth.
    """
    from scipy.optimize import linprog

    residual, jacobian = (part[0] for part in problem.residual_and_slopes(theta[None]))
    slopes = jacobian[problem.free]
    moving, points = slopes.shape
    identity = np.eye(moving)
    result = linprog(
        np.concatenate([-residual, np.full(2 * moving, TRUSTED_MOVE)]),
        A_eq=np.hstack([slopes, identity, -identity]),
        b_eq=np.zeros(moving),
        bounds=[(-problem.objective.over, 1)] * points + [(0, None)] * (2 * moving),
        method="highs",
    )
    if result.status != 0:
        return "linprog (highs), without an answer", float(problem.value(theta[None])[0])
    # The program's optimum is a bound for the linearised law only: what counts is the law itself at that point.
    moved = np.array(theta)
    moved[problem.free] -= result.eqlin.marginals
    return "linprog (highs)", float(problem.value(moved[None])[0])


def _subgradient(problem: Problem, theta: Array, residual: Array) -> float:
    slopes = problem.residual_and_slopes(theta[None])[1][0][problem.free]
    met = np.argsort(np.abs(residual))[: len(slopes)]
    pulls = np.sign(residual) * problem.objective.sided(residual)
    pulls[met] = 0
    multipliers = np.linalg.lstsq(slopes[:, met], -slopes @ pulls, rcond=None)[0]
    # A point that is met may pull up by at most 1 and down by at most `over`.
    return float(np.maximum(multipliers, -multipliers / problem.objective.over).max())
