"""How order reaches attention: positions of tokens in their documents, rotations, fixed vectors, a learned table."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm.model.layers import normal
from lm.model.parts import RopeScaling, Slowdown

LONGEST_WAVE = 10_000.0  # of sinusoidal positions, in turns of one radian


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, float32, with the heads' axis of length 1."""

    cos_BT1C: jax.Array
    sin_BT1C: jax.Array


def document_positions(segments_BT: jax.Array) -> jax.Array:
    """Positions that restart at 0 wherever the document id changes, int32 [B, T]."""
    index_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    starts_BT = segments_BT != jnp.roll(segments_BT, 1, axis=1)
    return index_BT - jax.lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)


def rotation(positions_BT: jax.Array, head_width: int, base: float, scaling: RopeScaling | None = None) -> Rotation:
    """The rotary angles position * base^(-2i/C) of component pairs i (Su et al. 2021, arXiv:2104.09864, eq. 15)."""
    frequency_C = base ** -(jnp.arange(head_width // 2, dtype=jnp.float32) * 2 / head_width)
    if scaling is not None:
        frequency_C = _slowed(frequency_C, scaling)
    angle_BT1C = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_C[None, None, None, :]
    return Rotation(jnp.cos(angle_BT1C), jnp.sin(angle_BT1C))


def _slowed(frequency_C: jax.Array, by: RopeScaling) -> jax.Array:
    if by.kind is Slowdown.LINEAR:
        return frequency_C / by.factor
    assert by.original_context is not None
    assert by.low_freq_factor is not None
    assert by.high_freq_factor is not None
    turns_C = frequency_C * (by.original_context / (2 * math.pi))
    kept_C = jnp.clip((turns_C - by.low_freq_factor) / (by.high_freq_factor - by.low_freq_factor), 0.0, 1.0)
    return frequency_C * (kept_C + (1.0 - kept_C) / by.factor)


def rotate(x_BTHC: jax.Array, by: Rotation) -> jax.Array:
    """Turns the pairs (i, i + C/2) of every head by their angles, in float32; returns the input's type.

    Pairing first half with second half is the layout of published Llama checkpoints in the Hugging Face format.
    """
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    turned = (first * by.cos_BT1C - second * by.sin_BT1C, second * by.cos_BT1C + first * by.sin_BT1C)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHC.dtype)


def sinusoids(positions_BT: jax.Array, d_model: int) -> jax.Array:
    """sin and cos, in turn, of position * 10000^(-2i/D), float32 [B, T, D] (Vaswani et al. 2017, section 3.5)."""
    frequency_D = LONGEST_WAVE ** -(jnp.arange(0, d_model, 2, dtype=jnp.float32) / d_model)
    angle_BTD = positions_BT[:, :, None].astype(jnp.float32) * frequency_D[None, None, :]
    return jnp.stack([jnp.sin(angle_BTD), jnp.cos(angle_BTD)], axis=-1).reshape(*positions_BT.shape, d_model)


class LearnedPositions(nn.Module):
    """A trained vector for each position up to the context length."""

    context_length: int
    d_model: int
    std: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        init = normal(self.std, ("position", "embed"))
        table = self.param("embedding", init, (self.context_length, self.d_model), jnp.float32)
        return jnp.take(table, positions_BT, axis=0).astype(self.dtype)
