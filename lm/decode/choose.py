"""From logits to a token: thresholds without sorting, and a draw that is fair to rare tokens.

A vocabulary is never sorted: the k-th largest value and the edge of a nucleus are found by bisection over the bits of
float32, 32 passes that each read the row once. Everything is float32.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

LOWEST = -jnp.inf


def ordered_bits(x: jax.Array) -> jax.Array:
    """uint32 that order as the float32 `x` do (-inf first); NaN is not ordered. -0 and 0 are one value."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def largest_edge(bits_BV: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest threshold [B, 1] for which `enough(bits >= threshold)` [B, 1] holds, 0 where none does.

    `enough` may only turn from true to false as the threshold grows.
    """

    def halve(step: jax.Array, edge_B1: jax.Array) -> jax.Array:
        trial_B1 = edge_B1 | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(enough(bits_BV >= trial_B1), trial_B1, edge_B1)

    return jax.lax.fori_loop(0, 32, halve, jnp.zeros((bits_BV.shape[0], 1), jnp.uint32))


def above_or_first(bits_BV: jax.Array, edge_B1: jax.Array, count_B1: jax.Array) -> jax.Array:
    """The places above the edge, and of those at it the first `count`."""
    at_BV = bits_BV == edge_B1
    # Counting along the vocabulary costs as much as finding the edge, and there is seldom anything to cut.
    cut = jnp.any(jnp.sum(at_BV, axis=1, keepdims=True, dtype=jnp.int32) > count_B1)
    first_BV = jax.lax.cond(cut, lambda: at_BV & (jnp.cumsum(at_BV, axis=1) <= count_B1), lambda: at_BV)
    return (bits_BV > edge_B1) | first_BV


def first_highest(logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first token with the highest logit, int32 [B], and that logit [B]."""
    highest_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    index_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    last = logits_BV.shape[1] - 1  # where the highest is NaN, which equals nothing
    return jnp.min(jnp.where(logits_BV == highest_B1, index_BV, last), axis=1), highest_B1[:, 0]


def draw(logits_BV: jax.Array, key_B: jax.Array) -> jax.Array:
    """A token a row from softmax(logits), int32 [B]; each row by its own key.

    Two levels: a block of about sqrt(V) tokens by its mass, then a token within it, each by a uniform number of its
    own. One cumulative sum over the vocabulary would round tokens below 1e-7 away.
    """
    B, V = logits_BV.shape
    width = math.isqrt(V - 1) + 1
    blocks = -(-V // width)
    weight_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=1, keepdims=True))
    weight_BNW = jnp.pad(weight_BV, ((0, 0), (0, blocks * width - V))).reshape(B, blocks, width)
    uniform_B2 = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(key_B)
    block_B = _invert(jnp.sum(weight_BNW, axis=2), uniform_B2[:, :1])
    inside_BW = jnp.take_along_axis(weight_BNW, block_B[:, None, None], axis=1)[:, 0]
    return (block_B * width + _invert(inside_BW, uniform_B2[:, 1:])).astype(jnp.int32)


def _invert(weight_BN: jax.Array, uniform_B1: jax.Array) -> jax.Array:
    """The first place whose cumulative weight exceeds the uniform share of the total; never one of weight 0."""
    upto_BN = jnp.cumsum(weight_BN, axis=1)
    return jnp.argmax((upto_BN > uniform_B1 * upto_BN[:, -1:]) & (weight_BN > 0), axis=1)


@jax.jit
def folded(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """Keys with numbers folded in; a single key or number goes with each of the others."""
    return jnp.vectorize(jax.random.fold_in)(key, number)
