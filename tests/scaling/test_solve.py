import dataclasses
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.fitting.certificate import certify
from lm.scaling.fitting.objective import HUBER, Objective, objective_named
from lm.scaling.fitting.prepare import prepare
from lm.scaling.fitting.solve import Solution, minimise
from lm.scaling.laws.power import HOFFMANN
from tests.scaling import planted


def problem_of(rows, objective=HUBER, pins=None):
    found = read.points(rows, read.Columns("n", "d", None, "loss"))
    return prepare(found, HOFFMANN, objective, pins or {})


@pytest.mark.parametrize("delta", [1e-4, 1e-3, 1e-2, math.inf, 0.0])
def test_objective_is_its_definition(delta):
    r = np.array([-0.5, -2e-3, -5e-4, 0.0, 5e-4, 2e-3, 0.5])
    objective = Objective("test", delta)
    if delta == 0:
        expected = np.abs(r)
    else:
        expected = [0.5 * x**2 if abs(x) <= delta else delta * (abs(x) - delta / 2) for x in r]
    assert objective.value(r) == pytest.approx(np.sum(expected), rel=1e-14)


def test_noise_free_law_is_recovered_exactly():
    rows = planted.table(noise=0.0)
    problem, centre, starts = problem_of(rows)
    solution = minimise(problem, starts, far=True)
    found = HOFFMANN.to_natural(solution.theta[solution.value.argmin()], centre)
    # Residuals of 1e-16 against a curvature of order one: nine digits are easily there.
    np.testing.assert_allclose(found, planted.PARAMETERS, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [HUBER, Objective("log_least_squares", math.inf)], ids=lambda o: o.name)
def test_no_scipy_run_finds_a_lower_objective(objective):
    problem, _, starts = problem_of(planted.table(seed=3), objective)
    solution = minimise(problem, starts, far=True)
    best = solution.value.min()
    scale = objective.scale
    for start in starts[::20]:
        ended = minimize(lambda theta: float(problem.value(theta[None])[0]) * scale, start, method="Nelder-Mead",
                         options={"maxiter": 4000, "fatol": 1e-12, "xatol": 1e-9}).fun / scale  # fmt: skip
        assert ended >= best * (1 - 1e-9)
    assert np.mean(solution.value <= best * (1 + 1e-9)) > 0.9  # starts read off the data nearly all arrive
    assert solution.gradient[solution.value.argmin()] < 1e-6


def test_a_batch_is_the_same_fits_one_by_one():
    problem, _, starts = problem_of(planted.table(seed=5))
    answer = minimise(problem, starts, far=True)
    theta = answer.theta[answer.value.argmin()]
    weights = np.random.default_rng(0).multinomial(100, np.full(100, 0.01), size=8).astype(float)
    batch = minimise(dataclasses.replace(problem, weights=weights), np.repeat(theta[None], 8, 0))
    for k in range(8):
        # Weights of a resample are the rows repeated.
        repeated = np.repeat(np.arange(100), weights[k].astype(int))
        alone = dataclasses.replace(problem, log_loss=problem.log_loss[repeated],
                                    logs={name: column[repeated] for name, column in problem.logs.items()})  # fmt: skip
        single = minimise(alone, theta[None])
        assert batch.value[k] == pytest.approx(single.value[0], rel=1e-10)
        np.testing.assert_allclose(batch.theta[k], single.theta[0], rtol=1e-5)


def test_resamples_of_a_small_ladder_arrive_though_e_is_on_its_bound():
    # 20 points that hardly hold E: curved valleys, and the best E is 0 in many resamples.
    n = np.tile(np.geomspace(2e4, 1e5, 5), 4)
    c = np.repeat([1.2e11, 2.4e11, 4.8e11, 9.6e11], 5)
    rows = planted.table((n, c / 6 / n), noise=0.006, parameters=(1.0, 60.0, 70.0, 0.45, 0.30))
    problem, _, starts = problem_of(rows)
    solution = minimise(problem, starts, far=True)
    weights = np.random.default_rng(0).multinomial(20, np.full(20, 0.05), size=300).astype(float)
    resampled = dataclasses.replace(problem, weights=weights)
    batch = minimise(resampled, np.repeat(solution.theta[solution.value.argmin()][None], 300, 0))
    assert np.mean(batch.theta[:, 0] == 0) > 0.02
    assert np.mean(batch.converged) > 0.99
    assert np.quantile(batch.gradient, 0.99) < 1e-5


def test_absolute_deviations_have_a_vanishing_subgradient_and_meet_points():
    problem, _, starts = problem_of(planted.table(seed=7), objective_named("log_absolute"))
    solution = minimise(problem, starts, far=True)
    best = int(solution.value.argmin())
    proof = certify(problem, solution, best, starts)
    assert proof.passed, proof.failures
    assert proof.subgradient <= 1
    residual = problem.log_loss - HOFFMANN.log_loss(solution.theta[best], problem.logs)
    # Least absolute deviations pass through as many points as there are parameters.
    assert np.sum(np.abs(residual) < 1e-7) == 5


def test_pinned_parameters_stay():
    rows = planted.table(seed=2)
    for pins in ({"E": 1.6}, {"alpha": 0.3}, {"A": 300.0}, {"E": 1.7, "beta": 0.4}):
        problem, centre, starts = problem_of(rows, pins=pins)
        solution = minimise(problem, starts, far=True)
        best = int(solution.value.argmin())
        found = dict(zip(HOFFMANN.parameters, HOFFMANN.to_natural(solution.theta[best], centre), strict=True))
        for name, value in pins.items():
            assert found[name] == pytest.approx(value, rel=1e-12)
        assert certify(problem, solution, best, starts).passed


def test_a_stopped_solver_fails_its_certificate():
    # What the published mean-of-Huber fits did: the solver stops where it started.
    problem, _, starts = problem_of(planted.table(seed=1))
    stopped = Solution(starts, problem.value(starts), np.full(len(starts), 0.3), np.zeros(len(starts), bool))
    proof = certify(problem, stopped, int(stopped.value.argmin()), starts)
    assert not proof.passed
    assert proof.answer_equals_start
    assert proof.second_solver_gap < -0.01
    assert any("gradient" in failure for failure in proof.failures)


@pytest.mark.parametrize("name", ["huber", "huber_log:0", "huber_log:x", "log_absolute:1"])
def test_unknown_objectives_are_refused(name):
    with pytest.raises(UsageError):
        objective_named(name)


def test_delta_is_read_from_the_name():
    assert objective_named("huber_log:1e-2").delta == 1e-2
