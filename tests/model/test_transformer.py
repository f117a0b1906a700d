import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.model.config import Dtype, FeedForward, ModelConfig, Norm, Positions, Remat
from lm.model.score import token_log_probs
from lm.model.transformer import Transformer, expected_first_loss
from tests.model.variants import COVERING, COVERING_MORE, identify, init, logits, parameters, replace, tiny, tokens

AXES = {"vocab", "embed", "position", "heads", "kv_heads", "head", "mlp", "experts", "norm", "layers"}
GPT2_LIKE = {"norm": Norm.LAYERNORM, "feed_forward": FeedForward.GELU, "positions": Positions.LEARNED, "bias": True}
MIXED = tiny(n_kv_head=2, qk_norm=True, tied_embedding=False)


def loss_of(config: ModelConfig, params, inputs_BT, targets_BT):
    logits_BTV = Transformer(config).apply({"params": params}, inputs_BT)
    return -jnp.mean(token_log_probs(logits_BTV, targets_BT))


def gradients(config: ModelConfig, params):
    x_BT = tokens(config)
    return jax.jit(jax.value_and_grad(lambda params: loss_of(config, params, x_BT, jnp.roll(x_BT, -1, 1))))(params)


@pytest.mark.slow
def test_chain_rule_sums_to_one_over_all_sequences():
    config = tiny(vocab_size=4, context_length=4)
    targets_BT = jnp.array(list(itertools.product(range(4), repeat=4)))
    inputs_BT = jnp.concatenate([jnp.zeros((256, 1), jnp.int32), targets_BT[:, :-1]], axis=1)
    log_probs_BT = token_log_probs(logits(config, parameters(config), inputs_BT), targets_BT)
    probabilities = jnp.exp(jnp.sum(log_probs_BT, axis=1))
    assert jnp.max(probabilities) > 10 / 256  # far from uniform
    np.testing.assert_allclose(jnp.sum(probabilities), 1.0, atol=1e-5)  # 256 float32 terms, each known to 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [*COVERING, *COVERING_MORE[:2], *(pytest.param(more, marks=pytest.mark.full) for more in COVERING_MORE[2:])],
    ids=identify,
)
def test_future_tokens_have_exactly_no_influence(config: ModelConfig):
    params, x_BT = parameters(config), tokens(config)
    t = config.context_length // 2
    changed_BT = x_BT.at[:, t:].set((x_BT[:, t:] + 1) % config.vocab_size)
    before, after = logits(config, params, x_BT), logits(config, params, changed_BT)
    assert before.dtype == jnp.float32
    assert jnp.array_equal(before[:, :t], after[:, :t])
    assert jnp.all(jnp.any(before[:, t:] != after[:, t:], axis=-1))


def influence(config: ModelConfig) -> np.ndarray:
    """How strongly the logits at t depend on the token at s, [T, S]."""
    x_BT = jnp.arange(config.context_length)[None, :]  # each token once: its embedding's gradient is its position's
    params = parameters(config)

    def mixed_logits(table_VD):
        logits_BTV = Transformer(config).apply({"params": {**params, "embedding": table_VD}}, x_BT)
        return logits_BTV[0] @ jnp.linspace(-1.0, 2.0, config.vocab_size)

    jacobian_TVD = jax.jit(jax.jacrev(mixed_logits))(params["embedding"])
    return np.array(jnp.max(jnp.abs(jacobian_TVD), axis=-1))[:, : config.context_length]


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny(tied_embedding=False), MIXED, tiny(tied_embedding=False, **GPT2_LIKE)])
def test_jacobian_is_causal(config: ModelConfig):
    influence_TS = influence(config)
    assert np.all(influence_TS[np.triu_indices(config.context_length, 1)] == 0.0)
    assert np.all(influence_TS[np.tril_indices(config.context_length)] > 0.0)


@pytest.mark.slow
def test_each_layer_of_a_sliding_window_reaches_back_its_width_less_one():
    config = tiny(window=3, tied_embedding=False)
    back_TS = np.arange(8)[:, None] - np.arange(8)[None, :]
    reached_TS = (back_TS >= 0) & (back_TS <= config.n_layer * 2)
    assert not reached_TS[-1, 0]
    np.testing.assert_array_equal(influence(config) > 0.0, reached_TS)


@pytest.mark.slow
def test_a_window_as_wide_as_the_context_is_none():
    params, x_BT = parameters(tiny()), tokens(tiny())
    plain_BTV = logits(tiny(), params, x_BT)
    assert jnp.array_equal(logits(tiny(window=8), params, x_BT), plain_BTV)
    narrow_BTV = logits(tiny(window=3), params, x_BT)
    np.testing.assert_allclose(narrow_BTV[:, :3], plain_BTV[:, :3], atol=1e-5)  # the same sums with exact zeros
    assert np.abs(narrow_BTV[:, 3:] - plain_BTV[:, 3:]).max(axis=(0, 2)).min() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny(), MIXED, tiny(**GPT2_LIKE)])
def test_unrolled_layers_are_the_scanned_ones(config: ModelConfig):
    unrolled = replace(config, unroll_layers=True)
    same = jax.tree.map(np.array_equal, init(config), init(unrolled))
    assert all(jax.tree.leaves(same))
    # Not the same bits: without the loop XLA fuses across layers and rounds some sums in another order.
    params = parameters(config)
    close(gradients(config, params), gradients(unrolled, params))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [Remat.DOTS, Remat.FULL])
@pytest.mark.parametrize("unroll", [False, True])
def test_rematerialisation_changes_no_number(remat: Remat, unroll: bool):
    config = replace(MIXED, unroll_layers=unroll)
    params = parameters(config)
    close(gradients(config, params), gradients(replace(config, remat=remat), params))


@pytest.mark.slow
def test_grouped_queries_equal_repeated_heads():
    params = parameters(MIXED)
    layers = params["layers"]
    repeated = {
        name: {"kernel": jnp.repeat(layers["attention"][name]["kernel"], 2, axis=2)} for name in ("key", "value")
    }
    full = {**params, "layers": {**layers, "attention": {**layers["attention"], **repeated}}}
    x_BT = tokens(MIXED)
    grouped, ungrouped = logits(MIXED, params, x_BT), logits(replace(MIXED, n_kv_head=None), full, x_BT)
    np.testing.assert_allclose(grouped, ungrouped, atol=1e-4)  # logits of order 10, another order of products


def test_as_many_key_heads_as_queries_is_multi_head_attention():
    params, x_BT = parameters(tiny()), tokens(tiny())
    assert jnp.array_equal(logits(tiny(), params, x_BT), logits(tiny(n_kv_head=4), params, x_BT))


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny(), MIXED, tiny(**GPT2_LIKE), tiny(window=3)])
def test_document_alone_equals_document_among_others(config: ModelConfig):
    params, x_BT = parameters(config), tokens(config, rows=1)
    together = logits(config, params, x_BT, jnp.array([[4, 4, 4, 4, 7, 7, 7, 7]]))
    for document in (slice(0, 4), slice(4, 8)):
        alone = logits(config, params, x_BT[:, document])
        # Logits of order 10; masked positions only add exact zeros, in sums of another length.
        np.testing.assert_allclose(together[:, document], alone, atol=2e-4)
    assert np.max(np.abs(together - logits(config, params, x_BT))[:, 4:]) > 1e-2


def test_without_sublayers_logits_are_head_of_normalised_embedding():
    params = jax.tree.map(lambda leaf: leaf, parameters(MIXED))  # new dicts, to change
    for sublayer, name in (("attention", "out"), ("feed_forward", "down")):
        kernel = params["layers"][sublayer][name]["kernel"]
        params["layers"][sublayer][name]["kernel"] = jnp.zeros_like(kernel)
    x_BT = tokens(MIXED)
    e_BTD = np.asarray(params["embedding"])[x_BT]
    root = np.sqrt(np.mean(e_BTD**2, axis=-1, keepdims=True) + MIXED.norm_eps)
    expected = e_BTD / root * np.asarray(params["final_norm"]["scale"]) @ np.asarray(params["head"])
    np.testing.assert_allclose(logits(MIXED, params, x_BT), expected, atol=1e-5)  # sums of 16 terms of order 1


@pytest.mark.slow
@pytest.mark.parametrize("config", [tiny(), MIXED, tiny(**GPT2_LIKE)])
def test_first_loss_is_near_ln_v(config: ModelConfig):
    wide = replace(config, vocab_size=257, context_length=64, d_model=64, d_ff=128)
    x_BT = tokens(wide, rows=4)
    loss = jax.jit(loss_of, static_argnums=0)(wide, init(wide), x_BT, tokens(wide, rows=4, seed=5))
    assert abs(loss - math.log(257)) < 0.1


@pytest.mark.slow
def test_first_loss_of_a_wide_model_is_the_expected_one():
    config = tiny(vocab_size=257, context_length=128, d_model=1024, n_layer=1, tied_embedding=False)
    x_BT = tokens(config, rows=8)
    loss = jax.jit(loss_of, static_argnums=0)(config, init(config), x_BT, tokens(config, rows=8, seed=9))
    # The excess over ln V is D std^2 / 2 = 0.2; its sampling error over 1,024 tokens is sqrt(0.4 / 1024) = 0.02.
    assert abs(loss - expected_first_loss(config)) < 0.06
    assert loss - math.log(257) > 0.14


@pytest.mark.parametrize("config", [MIXED, pytest.param(tiny(**GPT2_LIKE), marks=pytest.mark.slow)])
def test_bfloat16_is_near_float32(config: ModelConfig):
    low = replace(config, dtype=Dtype.BFLOAT16)
    params, x_BT = parameters(config), tokens(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(init(low))} == {jnp.dtype("float32")}
    exact, near = logits(config, params, x_BT), logits(low, params, x_BT)
    assert near.dtype == jnp.float32
    # A bfloat16 rounds by 2^-9 = 0.2 %; some twenty roundings lie on the way to a logit.
    error = jnp.sqrt(jnp.mean((exact - near) ** 2) / jnp.mean(exact**2))
    assert 1e-5 < error < 0.04


@pytest.mark.parametrize("config", [*COVERING, *COVERING_MORE], ids=identify)
def test_parameters_carry_the_documented_axis_names(config: ModelConfig):
    boxed = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    boxes = jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    assert all(len(box.names) == box.value.ndim and set(box.names) <= AXES for box in boxes)
    stacked = jax.tree.leaves(boxed["layers"], is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    assert all(box.names[0] == "layers" and box.value.shape[0] == config.n_layer for box in stacked)
    for name, doc in ((name, Transformer.__module__) for name in AXES):
        assert f"`{name}`" in __import__(doc, fromlist=["x"]).__doc__


def test_window_beyond_learned_positions_is_a_usage_error():
    config = tiny(**GPT2_LIKE)
    with pytest.raises(UsageError, match="9 tokens is longer than context_length 8"):
        Transformer(config).apply({"params": parameters(config)}, jnp.zeros((1, 9), jnp.int32))
    assert logits(tiny(), parameters(tiny()), jnp.zeros((1, 9), jnp.int32)).shape == (1, 9, 11)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 3}, "n_head 3 does not divide d_model 16"),
        ({"n_kv_head": 3}, "n_kv_head 3 does not divide n_head 4"),
        ({"n_kv_head": 0}, "n_kv_head is 0"),
        ({"d_head": 0}, "d_head is 0"),
        ({"window": 0}, "window is 0"),
        ({"window": -1}, "window is -1"),
        ({"d_head": 5}, "head width 5 is odd"),
        ({"n_layer": 0}, "n_layer is 0"),
    ],
)
def test_shapes_that_do_not_fit_are_usage_errors(changes, message: str):
    with pytest.raises(UsageError, match=message):
        tiny(**changes)


def close(first, second) -> None:
    """Equal losses and gradients up to the float32 rounding of sums of a few dozen terms."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), first, second)
