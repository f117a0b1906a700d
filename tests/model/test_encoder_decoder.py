"""An encoder and a decoder of the layers of the decoder-only family: who sees what, what it costs, how it is scored."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.accounting import Flops, Group, cache_bytes, count_parameters, flops_per_token, group_of, step_flops
from lm.model.attention import CrossAttention, Source
from lm.model.cache import empty_cache
from lm.model.config import FeedForward, ModelConfig, Norm, NormPlacement, Positions, QkNorm, Remat
from lm.model.count import costs, traced_flops_per_token
from lm.model.parts import Encoder, Experts, WidthScaling
from lm.model.score import BEFORE, Bos, Stream, predicted, score_windows, sliding_windows, token_log_probs
from lm.model.transformer import Transformer
from tests.decode.conftest import compiled_quickly  # noqa: F401
from tests.model.variants import identify, logits, parameters, replace, tiny, tokens

# The source is longer than what follows, as long, and shorter.
VARIANTS = [
    tiny(encoder=Encoder(1, 5)),
    tiny(encoder=Encoder(3, 4), n_layer=1, n_kv_head=2, qk_norm=True, positions=Positions.LEARNED, bias=True,
         norm=Norm.LAYERNORM, feed_forward=FeedForward.GELU, tied_embedding=False),
    tiny(encoder=Encoder(2, 2), norm_placement=NormPlacement.POST, positions=Positions.SINUSOIDAL, qkv_bias=True,
         attention_softcap=2.0, width_scaling=WidthScaling(8, 2)),
    tiny(encoder=Encoder(1, 6), norm_placement=NormPlacement.SANDWICH, qk_norm=True, qk_norm_over=QkNorm.HEADS,
         n_kv_head=1, experts=Experts(3, 2, shared=1)),
    tiny(encoder=Encoder(1, 1), parallel_block=True, positions=Positions.NONE, d_head=6),
]  # fmt: skip
# The variants that differ most in `make test`, the others in `make test-all`.
MARKS = (None, pytest.mark.slow, pytest.mark.full, pytest.mark.slow, pytest.mark.full)
each = pytest.mark.parametrize(
    "config",
    [pytest.param(one, marks=mark or ()) for one, mark in zip(VARIANTS, MARKS, strict=True)],
    ids=identify,
)


def test_cross_attention_is_its_definition_in_loops():
    config = tiny(n_kv_head=2, qk_norm=True, bias=True, encoder=Encoder(1, 5))
    H, K, C, D = 4, 2, 4, 16
    draw = np.random.default_rng(0)
    x_TD, source_SD = draw.standard_normal((3, D)), draw.standard_normal((5, D))
    mask_TS = np.array([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], bool)
    attention = CrossAttention(config)
    source = Source(jnp.asarray(source_SD[None], jnp.float32), jnp.asarray(mask_TS[None]))
    x_BTD = jnp.asarray(x_TD[None], jnp.float32)
    shapes = jax.eval_shape(attention.init, jax.random.key(0), x_BTD, source, None)["params"]
    params = jax.tree.map(lambda leaf: draw.standard_normal(leaf.shape).astype(np.float32) / 2, nn.unbox(shapes))
    found_BTD, _ = attention.apply({"params": params}, x_BTD, source, None)

    def head(x_D, name, h):
        return x_D @ params[name]["kernel"][:, h].astype(np.float64) + params[name]["bias"][h]

    def normalised(x_C, name):
        return x_C / np.sqrt(np.mean(x_C**2) + config.norm_eps) * params[name]["scale"]

    expected_TD = np.tile(params["out"]["bias"].astype(np.float64), (3, 1))
    for t, h in itertools.product(range(3), range(H)):
        q_C, group = normalised(head(x_TD[t], "query", h), "query_norm"), h // (H // K)
        weights = {s: np.exp(q_C @ normalised(head(source_SD[s], "key", group), "key_norm") / np.sqrt(C))
                   for s in range(5) if mask_TS[t, s]}  # fmt: skip
        for s, weight in weights.items():
            mean_C = weight / sum(weights.values()) * head(source_SD[s], "value", group)
            expected_TD[t] += mean_C @ params["out"]["kernel"][h]
    np.testing.assert_allclose(found_BTD[0], expected_TD, atol=1e-5)  # float32 sums of 16 terms of order 1


@pytest.mark.parametrize(
    "config", [VARIANTS[0], *(pytest.param(one, marks=pytest.mark.full) for one in VARIANTS[1:])], ids=identify
)
def test_the_decoder_sees_all_of_the_source_and_nothing_that_comes_later(config: ModelConfig):
    config = replace(config, vocab_size=11, tied_embedding=False)
    tokens_BT, S, params = jnp.arange(8, dtype=jnp.int32)[None], config.encoder.source_length, parameters(config)

    @jax.jit
    def of_table(table_VD, t):
        return jnp.sum(logits(config, {**params, "embedding": table_VD}, tokens_BT)[0, t] ** 3)

    # Each token is another one: the row of the table is the place in the window.
    gradients = [jax.grad(of_table)(params["embedding"], t) for t in range(8 - S + 1)]
    effect_TV = np.abs(np.stack(gradients)).sum(axis=-1)
    for t, v in np.ndindex(*effect_TV.shape):
        assert (effect_TV[t, v] != 0) == (v <= S - 1 + t), (t, v)


@each
def test_counts_are_those_of_the_initialised_model_and_of_the_traced_step(config: ModelConfig):
    params = nn.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens(config)))["params"]
    sizes = dict.fromkeys(Group, 0)
    for path, leaf in jax.tree.leaves_with_path(params):
        sizes[group_of(tuple(entry.key for entry in path))] += leaf.size
    assert {group: getattr(count_parameters(config), group.value) for group in Group} == sizes
    assert flops_per_token(config, Flops.MATMUL_FULL) == traced_flops_per_token(config)
    cache = jax.eval_shape(lambda: empty_cache(config, 3, 7))
    arrays = [*cache[:2], *cache.source[:2]]
    assert cache_bytes(config, 7, 3, 4) == sum(4 * array.size for array in arrays)


def test_hand_counts_of_one_small_model():
    config = ModelConfig(vocab_size=10, context_length=8, n_layer=3, d_model=8, n_head=4, n_kv_head=2, d_ff=16,
                         feed_forward=FeedForward.GELU, encoder=Encoder(2, 5))  # fmt: skip
    attention, feed_forward = 8 * 8 + 2 * 8 * 4 + 8 * 8, 2 * 8 * 16
    counts = count_parameters(config)
    assert counts.matrices == 2 * (attention + feed_forward) + 3 * (2 * attention + feed_forward)
    assert counts.norms == 2 * 2 * 8 + 8 + 3 * 3 * 8 + 8
    assert (config.predicted_length, config.processed_length) == (4, 9)
    # The encoder and the decoder's keys and values of the source are of 5 tokens; all the rest is of 4.
    window = 5 * 2 * 2 * (attention + feed_forward) + 2 * (4 * 8) * 5 * 5
    window += 4 * 3 * 2 * (attention + feed_forward + 8 * 8 + 8 * 8) + 5 * 3 * 2 * (2 * 8 * 4)
    window += 3 * (4 * 8) * 4 * 5 + 4 * 2 * 8 * 10
    assert step_flops(config, 4, Flops.MATMUL) == 3 * (window + 3 * (4 * 8) * (1 + 2 + 3 + 4))
    assert step_flops(config, 4, Flops.MATMUL_FULL) == 3 * (window + 3 * (4 * 8) * 4 * 4)
    assert step_flops(config, 4, Flops.SIX_ND) == 6 * counts.total * 4
    told = costs(config, 400)
    assert (told["tokens"], told["tokens_processed"]) == (400, 900)
    assert told["flops_per_processed_token"]["flops_6nd"] == round(6 * counts.total * 4 / 9)
    assert told["cache_bytes"]["float32"] == {"per_token": 96, "at_context": 96 * (4 + 5)}  # K C is 4


@pytest.mark.full
def test_layers_and_their_order_of_computing_change_nothing():
    config = tiny(encoder=Encoder(2, 4), n_layer=3)
    expected = logits(config, parameters(config), tokens(config))
    for changes in ({"unroll_layers": True}, {"remat": Remat.FULL}):
        found = logits(replace(config, **changes), parameters(config), tokens(config))
        np.testing.assert_allclose(found, expected, atol=1e-5)  # the same sums of 16 to 24 terms, perhaps fused


@pytest.mark.parametrize("config", [VARIANTS[1], pytest.param(VARIANTS[2], marks=pytest.mark.full)], ids=identify)
def test_a_source_with_nothing_in_front_is_a_shorter_one(config: ModelConfig):
    row_BT, params, S = tokens(config, rows=1), parameters(config), config.encoder.source_length
    segments_BT = jnp.asarray(np.where(np.arange(8) < 1, BEFORE, 1)[None], jnp.int32)
    padded = logits(config, params, row_BT, segments_BT)
    shorter = replace(config, context_length=7, encoder=Encoder(config.encoder.n_layer, S - 1))
    alone = Transformer(shorter).apply({"params": params}, row_BT[:, 1:])
    np.testing.assert_allclose(padded, alone, atol=1e-5)  # the same sums, of which some terms are exactly 0


def test_documents_do_not_see_each_other():
    config = VARIANTS[0]
    params, segments_BT = parameters(config), jnp.asarray([[1, 1, 1, 2, 2, 2, 3, 3]], jnp.int32)
    row_BT = tokens(config, rows=1) % 10  # so that one more is a token too
    before = logits(config, params, row_BT, segments_BT)  # of the places 4, 5, 6, 7
    other = logits(config, params, row_BT.at[0, :3].add(1), segments_BT)
    assert jnp.array_equal(before, other)
    other = logits(config, params, row_BT.at[0, 3].add(1), segments_BT)
    assert not jnp.any(jnp.all(before[:, :2] == other[:, :2], axis=-1))  # the second document's, from its source
    assert jnp.array_equal(before[:, 2:], other[:, 2:])


def test_every_token_is_scored_once_and_all_sequences_sum_to_one():
    config = tiny(vocab_size=3, context_length=5, encoder=Encoder(1, 3))
    params, lead, window = parameters(config), config.lead, config.predicted_length

    @jax.jit
    def log_probs(params, inputs_BT, targets_BT, segments_BT):
        logits_BTV = Transformer(config).apply({"params": params}, inputs_BT, segments_BT)
        return token_log_probs(logits_BTV, predicted(logits_BTV, targets_BT))

    # Four tokens are more than a window predicts; the first ones have sources of one and of two tokens.
    for stride in (window, 1):
        total = 0.0
        for ids in itertools.product(range(3), repeat=4):
            stream = Stream(np.array([2, *ids], np.uint16), np.array([0]), np.ones(3, int), Bos.END_OF_TEXT)
            starts = sliding_windows(5, window, stride)
            scored = score_windows(log_probs, params, stream, starts, window, 2, lead=lead)
            assert scored.indices.tolist() == [1, 2, 3, 4]
            total += np.exp(np.sum(scored.log_probs, dtype=np.float64))
        np.testing.assert_allclose(total, 1.0, atol=1e-5)  # float32 log-probabilities of 81 sequences


@pytest.mark.full
def test_it_is_torchs_transformer():
    torch = pytest.importorskip("torch")
    config = tiny(encoder=Encoder(2, 4), n_layer=3, norm=Norm.LAYERNORM, bias=True, positions=Positions.NONE,
                  feed_forward=FeedForward.GELU_EXACT)  # fmt: skip
    params, row_BT = parameters(config), tokens(config)
    theirs = torch.nn.Transformer(16, 4, 2, 3, 24, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64)

    def given(module, weight, bias):
        with torch.no_grad():
            module.weight.copy_(torch.tensor(np.asarray(weight)))
            module.bias.copy_(torch.tensor(np.asarray(bias)))

    def attention(module, ours):
        parts = [ours[name] for name in ("query", "key", "value")]
        with torch.no_grad():
            module.in_proj_weight.copy_(torch.tensor(np.concatenate([p["kernel"].reshape(16, 16).T for p in parts])))
            module.in_proj_bias.copy_(torch.tensor(np.concatenate([p["bias"].reshape(16) for p in parts])))
        given(module.out_proj, ours["out"]["kernel"].reshape(16, 16).T, ours["out"]["bias"])

    for name, side in (("encoder", theirs.encoder), ("layers", theirs.decoder)):
        for number, layer in enumerate(side.layers):
            ours = jax.tree.map(lambda x, number=number: np.asarray(x[number]), params[name])
            norms = {"encoder": ("attention", "feed_forward"), "layers": ("attention", "cross", "feed_forward")}[name]
            for at, sublayer in enumerate(norms, 1):
                given(getattr(layer, f"norm{at}"), ours[f"{sublayer}_norm"]["scale"], ours[f"{sublayer}_norm"]["bias"])
            attention(layer.self_attn, ours["attention"])
            if name == "layers":
                attention(layer.multihead_attn, ours["cross"])
            for linear, part in ((layer.linear1, "up"), (layer.linear2, "down")):
                given(linear, ours["feed_forward"][part]["kernel"].T, ours["feed_forward"][part]["bias"])
    for norm, name in ((theirs.encoder.norm, "encoder_norm"), (theirs.decoder.norm, "final_norm")):
        given(norm, params[name]["scale"], params[name]["bias"])
    table_VD = np.asarray(params["embedding"], np.float64)
    source_BSD, target_BTD = (torch.tensor(table_VD[np.asarray(x)]) for x in (row_BT[:, :4], row_BT[:, 3:]))
    causal = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    with torch.no_grad():
        expected_BTV = theirs(source_BSD, target_BTD, tgt_mask=causal).numpy() @ table_VD.T
    np.testing.assert_allclose(logits(config, params, row_BT), expected_BTV, atol=1e-4)  # float32 against float64
