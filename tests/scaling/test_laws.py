import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.base.errors import UsageError
from lm.scaling.laws import LAWS, law_named
from lm.scaling.laws.base import Law
from lm.scaling.laws.power import HOFFMANN, PowerSum, Term

LOGS = {"n": np.linspace(-2, 2, 7), "d": np.linspace(1, -1, 7) ** 3, "c": np.linspace(-4, 4, 7)}
LOGS["u"] = LOGS["d"] - np.linspace(0, 3, 7)


def theta_of(law: Law, seed: int = 0) -> np.ndarray:
    theta = np.random.default_rng(seed).uniform(-1, 1, len(law.parameters))
    for k, name in enumerate(law.parameters):
        if name in law.exponents:
            theta[k] = 0.2 + abs(theta[k]) / 2
        if name in law.constants:
            theta[k] = 1.5
    return theta


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("seed", range(3))
def test_jacobian_is_the_derivative(law, seed):
    theta = theta_of(law, seed)
    value, jacobian = law.log_loss_and_jacobian(theta[None], LOGS)
    np.testing.assert_allclose(value[0], law.log_loss(theta, LOGS), rtol=1e-14)
    written_out = type(law).log_loss_and_jacobian is not Law.log_loss_and_jacobian
    for k in range(len(theta)):
        if written_out:  # against the complex step, which has no cancellation: agreement is to rounding
            stepped = theta.astype(complex)
            stepped[k] += 1e-30j
            slope, tolerance = law.log_loss(stepped, LOGS).imag / 1e-30, 1e-12
        else:  # the complex step itself, against central differences: 1e-16 / 1e-5 of rounding, 1e-10 of curvature
            step = 1e-5 * np.eye(len(theta))[k]
            slope, tolerance = (law.log_loss(theta + step, LOGS) - law.log_loss(theta - step, LOGS)) / 2e-5, 1e-8
        np.testing.assert_allclose(jacobian[0, k], slope, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_inner_and_natural_parameters_are_inverse(law):
    theta, centre = theta_of(law), {"n": 18.0, "d": 23.0, "c": 45.0}
    np.testing.assert_allclose(law.to_inner(law.to_natural(theta, centre), centre), theta, rtol=1e-12)


def test_predict_is_the_formula():
    loss = HOFFMANN.predict(np.array([1.7, 400.0, 410.0, 0.34, 0.28]), {"n": np.array([1e9]), "d": np.array([2e10])})
    assert loss[0] == pytest.approx(1.7 + 400 / 1e9**0.34 + 410 / 2e10**0.28, rel=1e-14)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 0.8), st.floats(0.1, 0.8), st.floats(18, 26))
def test_allocation_minimises_the_loss_on_the_budget(alpha, beta, log10_c):
    parameters, budget = np.array([1.7, 400.0, 900.0, alpha, beta]), 10.0**log10_c
    n, d = HOFFMANN.allocate(parameters, budget, 6.0)
    assert 6 * n * d == pytest.approx(budget, rel=1e-12)
    around = n * np.array([0.9, 1.0, 1.1])
    losses = HOFFMANN.predict(parameters, {"n": around, "d": budget / 6 / around})
    assert losses.argmin() == 1


def test_hoffmann_allocation_matches_the_paper():
    # Unrounded constants of the paper give 40.4 B parameters at 5.76e23 FLOP; rounded exponents 32.2 B.
    exact = HOFFMANN.allocate(
        np.array([1.69, np.exp(6.0073404), np.exp(6.0179186), 0.33917084, 0.2849083]), 5.76e23, 6.0
    )
    rounded = HOFFMANN.allocate(np.array([1.69, 406.4, 410.7, 0.34, 0.28]), 5.76e23, 6.0)
    assert float(exact[0]) == pytest.approx(40.4e9, rel=2e-3)
    assert float(rounded[0]) == pytest.approx(32.2e9, rel=2e-3)


def test_a_new_law_is_one_value():
    law = PowerSum(
        "joint", "E + A / (N^alpha D^beta)", "a test", (Term("E"), Term("A", (("n", "alpha"), ("d", "beta"))))
    )
    assert law.parameters == ("E", "A", "alpha", "beta")
    assert not law.allocates
    assert law.starts(LOGS, np.linspace(2, 3, 7)).shape[1] == 4
    assert dataclasses.replace(law, name="other").parameters == law.parameters


def test_unknown_law_names_the_nearest():
    with pytest.raises(UsageError, match="'hoffmann'"):
        law_named("hofmann")
