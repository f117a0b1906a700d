"""What is commonly said of attention and its layers, held to the functions that compute them."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.model.accounting import Flops, count_parameters, flops_per_token
from lm.model.attention import Plain, Scoring, attend, causal_mask, scaled
from lm.model.config import Norm, Positions
from lm.model.feedforward import PositionWise
from lm.model.layers import Normalise
from lm.model.parts import Encoder
from lm.model.score import token_log_probs
from lm.model.transformer import Transformer
from tests.model.variants import logits, parameters, tiny, tokens


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def heads(T: int, H: int, K: int, C: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return random(1, T, H, C), random(1, T, K, C, seed=1), random(1, T, K, C, seed=2)


@pytest.mark.parametrize(("H", "K", "T", "C"), [(4, 4, 5, 3), (4, 2, 7, 5), (3, 1, 4, 2), (2, 2, 1, 4)])
def test_attention_is_four_steps_for_each_query_of_each_head(H: int, K: int, T: int, C: int):
    q, k, v = heads(T, H, K, C)
    expected = np.zeros((1, T, H, C))
    for h in range(H):
        shared = h * K // H
        for t in range(T):
            scores = np.array([q[0, t, h] @ k[0, s, shared] for s in range(T)]) / math.sqrt(C)
            scores[t + 1 :] = -np.inf
            weights = np.exp(scores - scores.max())
            expected[0, t, h] = weights / weights.sum() @ v[0, :, shared]
    # Sums of at most 7 float32 terms of order 1.
    np.testing.assert_allclose(attend(*map(jnp.array, (q, k, v)), causal_mask(T, None)), expected, atol=1e-5)


def test_an_output_lies_in_the_hull_of_the_values_that_its_query_sees():
    q, k, v = map(jnp.array, heads(9, 2, 2, 4))
    out = np.asarray(attend(3 * q, k, v, causal_mask(9, None)))
    for direction in random(100, 4, seed=3):
        for h in range(2):
            reached = np.asarray(v[0, :, h]) @ direction
            # The support of the hull of the first t + 1 values; float32 sums of 9 terms of order 1.
            assert np.all(out[0, :, h] @ direction <= np.maximum.accumulate(reached) + 1e-5)


@pytest.mark.parametrize("C", [16, 64, 256])
def test_the_product_of_unit_vectors_varies_by_their_width_and_the_score_by_one(C: int):
    q, k = random(20_000, C), random(20_000, C, seed=1)
    products = np.sum(q * k, axis=1)
    scores = np.sum(np.asarray(scaled(jnp.array(q[None, :, None]), Scoring()))[0, :, 0] * k, axis=1)
    # A variance of 20,000 draws is known to about 1 %.
    np.testing.assert_allclose([products.var(), scores.var()], [C, 1], rtol=0.05)


def test_unscaled_scores_of_64_components_are_nearly_all_on_one_key():
    """Among 1,000 keys the largest of products of standard deviation 8 is 8 times that of the normal law, 3.24: 26."""
    q, k = random(200, 64), random(1000, 64, seed=1)
    products = q @ k.T
    assert 24 < products.max(axis=1).mean() < 29
    ones = jnp.ones((1, 200, 1000), bool)

    def largest(scale: float) -> float:
        eye = jnp.eye(1000)[None, :, None]
        wide = jnp.zeros((1, 200, 1, 1000)).at[..., :64].set(q[None, :, None])
        keys = jnp.zeros((1, 1000, 1, 1000)).at[..., :64].set(k[None, :, None])
        return float(jnp.max(attend(wide, keys, eye, ones, Scoring(scale)), axis=-1).mean())

    assert largest(1.0) > 0.5
    assert largest(1 / 8) < 0.05


def test_a_longer_query_is_a_colder_softmax():
    q, k, v = map(jnp.array, heads(6, 1, 1, 4))
    mask = jnp.ones((1, 6, 6), bool)
    longer, colder = attend(3 * q, k, v, mask), attend(q, k, v, mask, Scoring(scale=3 * 4**-0.5))
    np.testing.assert_allclose(longer, colder, atol=1e-6)
    best = jnp.argmax(q[0, :, 0] @ k[0, :, 0].T, axis=1)
    np.testing.assert_allclose(attend(1e4 * q, k, v, mask)[0, :, 0], v[0, best, 0], atol=1e-5)
    mean = jnp.broadcast_to(v.mean(axis=1, keepdims=True), v.shape)
    np.testing.assert_allclose(attend(1e-6 * q, k, v, mask), mean, atol=1e-5)


def test_attention_is_as_near_to_any_key_as_to_any_other():
    q, k, v = map(jnp.array, heads(8, 2, 2, 4))
    order = np.random.default_rng(5).permutation(8)
    seen = jnp.ones((1, 8, 8), bool)
    np.testing.assert_allclose(attend(q, k, v, seen), attend(q, k[:, order], v[:, order], seen), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("positions", [Positions.NONE, Positions.ROPE, Positions.LEARNED])
def test_who_sees_all_knows_no_order_but_for_positions(positions: Positions):
    """Dog bites man and man bites dog are one to an encoder without positions."""
    config = tiny(positions=positions, encoder=Encoder(n_layer=2, source_length=4))
    x_BT = tokens(config, rows=1)
    # The last token of the source begins the decoder: the ones before it change places.
    shuffled_BT = x_BT.at[0, :3].set(x_BT[0, jnp.array([2, 0, 1])])
    assert len(set(np.asarray(x_BT[0, :3]).tolist())) > 1
    one, other = (logits(config, parameters(config), each) for each in (x_BT, shuffled_BT))
    assert (np.abs(one - other).max() < 1e-5) == (positions is Positions.NONE)


def test_more_heads_cost_neither_parameters_nor_products():
    shapes = [tiny(d_model=64, n_head=n_head, positions=Positions.NONE) for n_head in (1, 2, 8, 64)]
    assert len({count_parameters(config) for config in shapes}) == 1
    # Attention is 4 D^2, a feed-forward with a gate 3 D F.
    assert count_parameters(shapes[0]).matrices == shapes[0].n_layer * (4 * 64**2 + 3 * 64 * shapes[0].d_ff)
    for convention in Flops:
        assert len({flops_per_token(config, convention) for config in shapes}) == 1


def test_only_attention_moves_anything_between_positions():
    config = tiny(n_layer=2, positions=Positions.NONE)
    params, x_BT = parameters(config), tokens(config)
    out = params["layers"]["attention"]["out"]["kernel"]
    still = {**params, "layers": {**params["layers"], "attention": {**params["layers"]["attention"]}}}
    still["layers"]["attention"]["out"] = {"kernel": jnp.zeros_like(out)}
    changed_BT = x_BT.at[:, 0].set((x_BT[:, 0] + 1) % config.vocab_size)
    for each, alone in ((params, False), (still, True)):
        before, after = logits(config, each, x_BT), logits(config, each, changed_BT)
        assert jnp.any(before[:, 0] != after[:, 0])
        assert bool(jnp.all(before[:, 1:] == after[:, 1:])) == alone


def test_the_feed_forward_takes_each_position_by_itself():
    config = tiny()
    x_BTD = jnp.array(random(1, 6, config.d_model))
    module = PositionWise(config)
    params = module.init(jax.random.key(0), x_BTD)
    order = jnp.array([3, 1, 5, 0, 2, 4])
    np.testing.assert_allclose(module.apply(params, x_BTD)[:, order], module.apply(params, x_BTD[:, order]), atol=1e-6)


@pytest.mark.parametrize("norm", list(Norm))
def test_norms_are_their_formulas(norm: Norm):
    x = 3 + 2 * random(2, 3, 8)
    module = Normalise(norm, 1e-5, norm is Norm.LAYERNORM)
    params = nn.unbox(module.init(jax.random.key(0), jnp.array(x)))
    scale, bias = random(8, seed=1), random(8, seed=2)
    given = {name: {"scale": scale, "bias": bias}[name] for name in params["params"]}
    centred = x - x.mean(axis=-1, keepdims=True) if norm is Norm.LAYERNORM else x
    expected = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5) * scale + given.get("bias", 0)
    np.testing.assert_allclose(module.apply({"params": given}, jnp.array(x)), expected, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Unmasked(Plain):
    """Attention that sees what it is to predict."""

    def sees(self, length: int, segments_BT: jax.Array | None, window: int | None) -> jax.Array:
        return jnp.ones((1, length, length), bool)


@pytest.mark.slow
def test_without_the_mask_even_noise_is_predicted_by_looking_ahead():
    """Tokens without any order: nobody predicts them better than ln V, and who sees the next one need not."""
    config = tiny(vocab_size=8, n_layer=1, d_model=32, n_head=4, d_head=8, d_ff=64)

    def trained(attention: Plain) -> float:
        model, optimizer = Transformer(config, attention=attention), optax.adam(1e-2)
        row_BT = jax.random.randint(jax.random.key(1), (200, 16, config.context_length + 1), 0, 8)
        params = nn.unbox(model.init(jax.random.key(0), row_BT[0, :, :-1]))

        def loss(params, row_BT):
            return -jnp.mean(token_log_probs(jnp.asarray(model.apply(params, row_BT[:, :-1])), row_BT[:, 1:]))

        def step(carry, row_BT):
            value, grads = jax.value_and_grad(loss)(carry[0], row_BT)
            updates, state = optimizer.update(grads, carry[1])
            return (optax.apply_updates(carry[0], updates), state), value

        _, losses = jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), row_BT))()
        return float(losses[-20:].mean())

    # The last position has nothing ahead of it: one of T stays at ln V.
    assert trained(Unmasked()) < 0.6 * math.log(8)
    assert trained(Plain()) > 0.99 * math.log(8)
