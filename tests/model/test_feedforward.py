"""What lies between the matrices, against the formulas."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.config import FeedForward
from lm.model.feedforward import hidden


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exact_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


FORMULAS = {
    FeedForward.RELU: lambda gate, up: max(up, 0.0),
    FeedForward.RELU2: lambda gate, up: max(up, 0.0) ** 2,
    FeedForward.GELU: lambda gate, up: tanh_gelu(up),
    FeedForward.GELU_EXACT: lambda gate, up: exact_gelu(up),
    FeedForward.SWIGLU: lambda gate, up: gate / (1 + math.exp(-gate)) * up,
    FeedForward.GEGLU: lambda gate, up: tanh_gelu(gate) * up,
    FeedForward.GEGLU_EXACT: lambda gate, up: exact_gelu(gate) * up,
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_each_kind_is_its_formula(kind):
    values = {"gate": np.linspace(-3, 3, 13), "up": np.linspace(2, -2, 13)}
    asked = []

    def widened(name):
        asked.append(name)
        return jnp.asarray(values[name], jnp.float32)

    expected = [FORMULAS[kind](gate, up) for gate, up in zip(values["gate"], values["up"], strict=True)]
    np.testing.assert_allclose(hidden(kind, widened), expected, atol=2e-6)
    assert len(asked) == kind.matrices - 1


def test_the_two_forms_of_gelu_can_be_told_apart():
    assert abs(tanh_gelu(2.0) - exact_gelu(2.0)) > 5e-5  # 25 times the tolerance above
