"""How order reaches attention: positions of tokens in their documents, rotations, a learned table."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm.model.layers import normal


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, float32, with the heads' axis of length 1."""

    cos_BT1C: jax.Array
    sin_BT1C: jax.Array


def document_positions(segments_BT: jax.Array) -> jax.Array:
    """Positions that restart at 0 wherever the document id changes, int32 [B, T]."""
    index_BT = jax.lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    starts_BT = segments_BT != jnp.roll(segments_BT, 1, axis=1)
    return index_BT - jax.lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)


def rotation(positions_BT: jax.Array, head_width: int, base: float) -> Rotation:
    """The rotary angles position * base^(-2i/C) of component pairs i (Su et al. 2021, arXiv:2104.09864, eq. 15)."""
    frequency_C = base ** -(jnp.arange(head_width // 2, dtype=jnp.float32) * 2 / head_width)
    angle_BT1C = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_C[None, None, None, :]
    return Rotation(jnp.cos(angle_BT1C), jnp.sin(angle_BT1C))


def rotate(x_BTHC: jax.Array, by: Rotation) -> jax.Array:
    """Turns the pairs (i, i + C/2) of every head by their angles, in float32; returns the input's type.

    Pairing first half with second half is the layout of published Llama checkpoints in the Hugging Face format.
    """
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    turned = (first * by.cos_BT1C - second * by.sin_BT1C, second * by.cos_BT1C + first * by.sin_BT1C)
    return jnp.concatenate(turned, axis=-1).astype(x_BTHC.dtype)


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
