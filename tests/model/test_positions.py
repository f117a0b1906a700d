"""Fixed positions, slowed-down rotations, and no positions at all, against their definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.config import Positions
from lm.model.parts import RopeScaling, Slowdown
from lm.model.positions import rotate, rotation, sinusoids
from tests.model.variants import logits, parameters, tiny, tokens

AT = jnp.arange(12, dtype=jnp.int32)[None, :]


def test_sinusoids_are_those_of_the_paper():
    found = sinusoids(AT, 8)[0]
    for position in (0, 1, 11):
        for i in range(4):
            angle = position / 10_000 ** (2 * i / 8)
            np.testing.assert_allclose(
                found[position, 2 * i : 2 * i + 2], [math.sin(angle), math.cos(angle)], atol=1e-6
            )


def test_a_shift_of_sinusoids_is_one_linear_map():
    shift, found = 3, np.asarray(sinusoids(AT, 8)[0], np.float64)
    turn = np.zeros((8, 8))
    for i in range(4):
        angle = shift / 10_000 ** (2 * i / 8)
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [
            [math.cos(angle), math.sin(angle)],
            [-math.sin(angle), math.cos(angle)],
        ]
    np.testing.assert_allclose(found[:-shift] @ turn.T, found[shift:], atol=1e-5)  # float32 angles of up to 11


def test_linear_scaling_is_a_slower_clock():
    x = jax.random.normal(jax.random.key(0), (1, 12, 2, 16))
    slow = rotation(AT, 16, 10_000.0, RopeScaling(Slowdown.LINEAR, 4.0))
    np.testing.assert_allclose(rotate(x[:, ::4], rotation(AT[:, ::4] // 4, 16, 10_000.0)),
                               rotate(x, slow)[:, ::4], atol=1e-5)  # fmt: skip


def test_llama3_scaling_is_its_definition_frequency_by_frequency():
    by = RopeScaling(Slowdown.LLAMA3, 8.0, original_context=64, low_freq_factor=1.0, high_freq_factor=4.0)
    expected = []
    for i in range(16):
        frequency = 500.0 ** (-i / 16)
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4.0:
            expected.append(frequency)
        elif wavelength > 64 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    turn = rotation(jnp.ones((1, 1), jnp.int32), 32, 500.0, by)
    np.testing.assert_allclose(jnp.arctan2(turn.sin_BT1C, turn.cos_BT1C)[0, 0, 0], expected, rtol=1e-5)
    plain = rotation(jnp.ones((1, 1), jnp.int32), 32, 500.0)
    kept = np.isclose(plain.sin_BT1C, turn.sin_BT1C, rtol=1e-6).sum()
    assert 0 < kept < 16


@pytest.mark.parametrize("positions", [Positions.NONE, Positions.SINUSOIDAL])
def test_without_positions_the_past_is_a_set(positions):
    config = tiny(positions=positions, n_layer=1)
    x_BT = tokens(config, rows=1)
    shuffled_BT = x_BT.at[0, :7].set(x_BT[0, jnp.array([3, 0, 6, 1, 5, 2, 4])])
    last, other = (logits(config, parameters(config), each)[0, -1] for each in (x_BT, shuffled_BT))
    apart = np.abs(last - other).max()
    assert (apart < 1e-5) == (positions is Positions.NONE)  # sums of 8 terms of order 1 in another order
