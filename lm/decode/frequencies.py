"""Probabilities as integers that add up to a power of two, the same on every pass: what an arithmetic coder needs."""

import math

import jax
import jax.numpy as jnp

from lm.decode.coder import TOTAL_BITS

LARGEST_VOCABULARY = 2**18
_HALF = 14  # bits; weights have 28 and are added up in two halves, so that 2^18 of them fit into uint32


@jax.jit
def quantise(logits_BV: jax.Array) -> jax.Array:
    """Integer frequencies of softmax(logits), int32 [B, V]: each at least 1, 2^TOTAL_BITS together.

    exp(logit - largest) in units of 2^-28 is an integer, and the integers are added up exactly, in whatever order. Each
    token then gets 1, its share of what is left, rounded down, and the likeliest one the rest. The ones cost
    -log2(1 - V / 2^TOTAL_BITS) bits a token: 2.7e-4 at V = 50,257, 1.4e-6 for bytes. The share is scaled down by 2^-20
    (1.4e-6 bits), more than six roundings of float32 can add.
    """
    V = logits_BV.shape[1]
    weight_BV = jnp.floor(jnp.exp(logits_BV - jnp.max(logits_BV, axis=1, keepdims=True)) * 2.0**TOTAL_BITS)
    bits_BV = weight_BV.astype(jnp.uint32)
    high_B1 = jnp.sum(bits_BV >> _HALF, axis=1, keepdims=True, dtype=jnp.uint32)
    low_B1 = jnp.sum(bits_BV & (2**_HALF - 1), axis=1, keepdims=True, dtype=jnp.uint32)
    sum_B1 = high_B1.astype(jnp.float32) * 2.0**_HALF + low_B1.astype(jnp.float32)
    scale_B1 = (2**TOTAL_BITS - V) * (1 - 2.0**-20) / sum_B1
    frequency_BV = 1 + jnp.floor(weight_BV * scale_B1).astype(jnp.int32)
    rest_B1 = 2**TOTAL_BITS - jnp.sum(frequency_BV, axis=1, keepdims=True)
    index_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    return frequency_BV + jnp.where(index_BV == jnp.argmax(bits_BV, axis=1, keepdims=True), rest_B1, 0)


@jax.jit
def interval(frequency_BV: jax.Array, token_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of the frequencies before a token, and its own."""
    index_BV = jax.lax.broadcasted_iota(jnp.int32, frequency_BV.shape, 1)
    start_B = jnp.sum(jnp.where(index_BV < token_B[:, None], frequency_BV, 0), axis=1)
    return start_B, jnp.sum(jnp.where(index_BV == token_B[:, None], frequency_BV, 0), axis=1)


@jax.jit
def find(frequency_BV: jax.Array, target_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The token whose share holds the target, the sum of the frequencies before it, and its own.

    First a block of about sqrt(V) tokens, then the token within it: a cumulative sum over the vocabulary costs as much
    as a step of a small model.
    """
    B, V = frequency_BV.shape
    width = math.isqrt(V - 1) + 1
    blocks = -(-V // width)
    frequency_BNW = jnp.pad(frequency_BV, ((0, 0), (0, blocks * width - V))).reshape(B, blocks, width)
    target_B1 = target_B[:, None]
    upto_BN = jnp.cumsum(jnp.sum(frequency_BNW, axis=2), axis=1)
    block_B1 = jnp.sum(upto_BN <= target_B1, axis=1, keepdims=True)
    inside_BW = jnp.take_along_axis(frequency_BNW, block_B1[:, :, None], axis=1)[:, 0]
    before_B1 = jnp.take_along_axis(upto_BN, block_B1, axis=1) - jnp.sum(inside_BW, axis=1, keepdims=True)
    upto_BW = before_B1 + jnp.cumsum(inside_BW, axis=1)
    place_B1 = jnp.sum(upto_BW <= target_B1, axis=1, keepdims=True)
    own_B1 = jnp.take_along_axis(inside_BW, place_B1, axis=1)
    start_B1 = jnp.take_along_axis(upto_BW, place_B1, axis=1) - own_B1
    return (block_B1 * width + place_B1)[:, 0], start_B1[:, 0], own_B1[:, 0]
