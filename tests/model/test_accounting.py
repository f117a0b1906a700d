import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from lm.base.config import build, load_file
from lm.base.errors import UsageError
from lm.cli import main
from lm.model.accounting import (
    Flops,
    Group,
    cache_bytes,
    count_parameters,
    flops_per_token,
    group_of,
    jaxpr_dot_flops,
    kaplan_forward_flops,
    step_flops,
)
from lm.model.cache import empty_cache
from lm.model.config import CacheDtype, Dtype, Experts, FeedForward, Mixer, ModelConfig, Norm, Positions, Remat
from lm.model.count import CACHE_NUMBERS, traced_flops_per_token
from lm.model.transformer import Transformer
from lm.train.config import RunConfig
from tests.model.variants import COVERING, COVERING_MORE, NO_FEED_FORWARD, RECURRENT, identify, recurrent, replace, tiny

CONFIGS = Path(__file__).parents[2] / "configs"
covered = pytest.mark.parametrize("config", [*COVERING, *COVERING_MORE, *RECURRENT], ids=identify)


def published(name: str) -> ModelConfig:
    return build(RunConfig, load_file(f"{CONFIGS}/{name}")).model


def test_gpt2_counts():
    counts = count_parameters(published("gpt2.py"))
    assert counts.total == 124_439_808
    assert counts.total - counts.position - counts.norms == 123_532_032
    assert counts.embedding == 50257 * 768
    assert count_parameters(published("gpt2.py"), active=True) == counts


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama.py:1b", 1_235_814_400),
        ("llama.py:8b", 8_030_261_248),
        ("llama.py", 8_030_261_248),
        ("llama.py:70b", 70_553_706_496),
    ],
)
def test_llama_counts(name: str, total: int):
    assert count_parameters(published(name)).total == total


@pytest.mark.parametrize(("name", "arg"), [("llama.py", "3b"), ("gpt2.py", "xl"), ("recurrent.py", "rnn")])
def test_unknown_variants_are_usage_errors(name: str, arg: str):
    with pytest.raises(UsageError, match=arg):
        load_file(f"{CONFIGS}/{name}:{arg}")


@covered
def test_counts_are_those_of_the_initialised_model(config: ModelConfig):
    params = nn.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))
    sizes = dict.fromkeys(Group, 0)
    for path, leaf in jax.tree.leaves_with_path(params["params"]):
        sizes[group_of(tuple(entry.key for entry in path))] += leaf.size
    counts = count_parameters(config)
    assert {group: getattr(counts, group.value) for group in Group} == sizes
    assert counts.total == sum(sizes.values())


@covered
def test_full_matmul_flops_are_those_of_the_traced_step(config: ModelConfig):
    assert flops_per_token(config, Flops.MATMUL_FULL) == traced_flops_per_token(config)


@pytest.mark.parametrize("changes", [{"unroll_layers": True}, {"dtype": Dtype.BFLOAT16}, {"remat": Remat.FULL}])
def test_how_a_step_is_computed_changes_no_count(changes):
    config = tiny(n_kv_head=2)
    assert traced_flops_per_token(replace(config, **changes)) == flops_per_token(config, Flops.MATMUL_FULL)


@pytest.mark.parametrize("name", ["gpt2.py", "llama.py:70b", "recurrent.py:lstm"])
def test_published_shapes_trace_to_their_count(name: str):
    config = published(name)
    assert flops_per_token(config, Flops.MATMUL_FULL) == traced_flops_per_token(config)


def test_hand_counts_of_one_small_model():
    config = ModelConfig(
        vocab_size=10, context_length=4, n_layer=3, d_model=8, n_head=4, n_kv_head=2, d_ff=16, bias=True,
        norm=Norm.LAYERNORM, feed_forward=FeedForward.GELU, positions=Positions.LEARNED, tied_embedding=False,
    )  # fmt: skip
    counts = count_parameters(config)
    assert (counts.embedding, counts.position, counts.head) == (80, 32, 80)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 8 * 16  # query, key and value, output, feed-forward
    assert counts.matrices == 3 * layer == 1344
    assert counts.norms == 3 * (2 * 16 + (8 + 4 + 4 + 8) + (16 + 8)) + 16
    forward = 2 * (3 * layer + 80)
    assert flops_per_token(config, Flops.MATMUL_FULL) == 3 * (forward + 3 * 2 * 2 * 8 * 4)
    assert 4 * flops_per_token(config, Flops.MATMUL) == 3 * (4 * forward + 3 * 2 * 2 * 8 * (1 + 2 + 3 + 4))
    assert flops_per_token(config, Flops.KAPLAN) == 6 * (counts.total - 192)
    assert flops_per_token(config, Flops.SIX_ND) == 6 * counts.total
    assert kaplan_forward_flops(config) == 2 * counts.nonembedding + 2 * 3 * 4 * 8


def test_a_sliding_window_is_counted_by_the_keys_that_are_seen():
    config = tiny(n_head=2, d_head=4, context_length=4)
    for window, seen in ((None, 1 + 2 + 3 + 4), (1, 4), (2, 1 + 2 + 2 + 2), (3, 1 + 2 + 3 + 3), (4, 10), (99, 10)):
        windowed = replace(config, window=window)
        without_attention = 3 * (2 * 16 * 11 + 2 * 2 * (16 * 4 * 8 + 3 * 16 * 24))
        # Two layers of two heads of width 4; a score and its share of the sum are two products each, times 3.
        assert 4 * (flops_per_token(windowed, Flops.MATMUL) - without_attention) == 3 * 2 * (2 * 4 * 4) * seen
        # What is computed is the whole square, masked.
        full = flops_per_token(windowed, Flops.MATMUL_FULL)
        assert full == flops_per_token(config, Flops.MATMUL_FULL) == traced_flops_per_token(windowed)
        assert count_parameters(windowed) == count_parameters(config)


def test_layers_with_and_without_the_window_are_counted_each_by_its_keys():
    mixed = tiny(n_layer=3, window=2, window_layers=(True, False))
    parts = [flops_per_token(replace(mixed, window=w, window_layers=(True,)), Flops.MATMUL) for w in (2, 2, None)]
    all_windowed, _, none = parts
    assert 3 * flops_per_token(mixed, Flops.MATMUL) == 2 * all_windowed + none
    # One layer needs every slot, and the stacked cache has as many for all.
    assert cache_bytes(mixed, 20, 1, 4) == cache_bytes(tiny(n_layer=3), 20, 1, 4)


def test_experts_cost_by_those_a_token_visits_and_weigh_by_all():
    dense, few, many = (tiny(experts=e) for e in (None, Experts(4, 2), Experts(64, 2)))
    expert, router = 3 * 16 * 24, 16
    counted = {e: count_parameters(e).matrices - count_parameters(dense).matrices for e in (few, many)}
    assert counted == {few: 2 * (3 * expert + 4 * router), many: 2 * (63 * expert + 64 * router)}
    used = count_parameters(few, active=True)
    assert used.total - count_parameters(dense).total == 2 * (expert + 4 * router)
    assert flops_per_token(few, Flops.SIX_ND) == 6 * used.total
    assert flops_per_token(few, Flops.KAPLAN) == 6 * used.nonembedding
    # More experts cost a token their row of the router and nothing else.
    more = flops_per_token(many, Flops.MATMUL) - flops_per_token(few, Flops.MATMUL)
    assert more == 3 * 2 * 2 * 60 * router
    shared = tiny(experts=Experts(4, 2, shared=1))
    assert count_parameters(shared).total - count_parameters(few).total == 2 * expert
    assert flops_per_token(shared, Flops.MATMUL) - flops_per_token(few, Flops.MATMUL) == 3 * 2 * 2 * expert


def test_hand_counts_of_an_lstm_and_a_gru():
    lstm = recurrent(Mixer.LSTM, **NO_FEED_FORWARD, norm=Norm.LAYERNORM)
    gru = recurrent(Mixer.GRU, tied_embedding=False)
    counts = count_parameters(lstm)
    assert (counts.embedding, counts.position, counts.head) == (11 * 16, 0, 0)
    assert counts.matrices == 2 * 4 * (16 * 16 + 16 * 16)  # of two layers, four gates of input and state
    assert counts.norms == 2 * (4 * 16 + 2 * 16) + 2 * 16
    counts = count_parameters(gru)
    assert counts.matrices == 2 * (3 * (16 * 16 + 16 * 16) + 3 * 16 * 24)
    # A layer's norms, biases of inputs and candidate, and of the feed-forward.
    assert counts.norms == 2 * (2 * 16 + (3 + 1) * 16 + (2 * 24 + 16)) + 16
    for config in (lstm, gru):
        forward = 2 * (11 * 16 + count_parameters(config).matrices)
        # No product depends on how long a window is.
        for longer in (config, replace(config, context_length=64)):
            assert flops_per_token(longer, Flops.MATMUL) == flops_per_token(longer, Flops.MATMUL_FULL) == 3 * forward
            assert kaplan_forward_flops(longer) == 2 * count_parameters(config).nonembedding
        assert flops_per_token(config, Flops.SIX_ND) == 6 * count_parameters(config).total


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("mixer", [Mixer.LSTM, Mixer.GRU])
def test_a_recurrent_cache_is_as_large_at_every_length(mixer: Mixer, dtype: Dtype):
    config = recurrent(mixer, dtype=dtype)
    sizes = {cache_bytes(config, length, 3, *CACHE_NUMBERS[dtype.value]) for length in (0, 1, 20, 1000)}
    arrays = jax.tree.leaves(empty_cache(config, 3, 20).state_LBD)
    assert sizes == {sum(array.nbytes for array in arrays)} == {mixer.states * 2 * 3 * 16 * 4}


def test_a_share_of_a_flop_is_rounded_once_a_token():
    config = tiny(n_head=1, d_head=2, context_length=7, window=3)
    # Two products of width 2 with 1 + 2 + 5 x 3 keys for 7 tokens are 20.57 FLOPs a token and layer; with one key, 8.
    more = flops_per_token(config, Flops.MATMUL) - flops_per_token(replace(config, window=1), Flops.MATMUL)
    assert more == 3 * 2 * (21 - 8)


def test_tied_head_costs_products_but_no_parameters():
    tied, untied = tiny(), tiny(tied_embedding=False)
    assert count_parameters(untied).total - count_parameters(tied).total == 11 * 16
    assert flops_per_token(tied, Flops.MATMUL) == flops_per_token(untied, Flops.MATMUL)


def test_counts_of_huge_runs_are_exact():
    config = published("llama.py:70b")
    tokens = 15_000_000_000_001
    assert step_flops(config, tokens, Flops.SIX_ND) == 6 * 70_553_706_496 * 15_000_000_000_001


def test_cache_of_llama_8b():
    config = published("llama.py:8b")
    assert cache_bytes(config, 1, 1, bytes_per_number=2) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert cache_bytes(config, 8192, 3, bytes_per_number=2) == 3 * 2**30
    assert cache_bytes(config, 1, 1, bytes_per_number=1, bytes_per_scale=4) == 2 * 32 * 8 * (128 + 4)


def test_products_by_groups_are_those_of_one_matrix_a_vector():
    x, kernel, sizes = jnp.ones((6, 4)), jnp.ones((3, 4, 5)), jnp.array([1, 5, 0])
    grads = jax.grad(lambda x, kernel: jnp.sum(jax.lax.ragged_dot(x, kernel, sizes)), (0, 1))
    assert jaxpr_dot_flops(jax.make_jaxpr(grads)(x, kernel)) == 3 * 2 * 6 * 4 * 5


@pytest.mark.parametrize("kv_heads", [None, 2, 1])  # multi-head, grouped, multi-query
@pytest.mark.parametrize("window", [None, 5, 99])
@pytest.mark.parametrize("dtype", Dtype)
def test_cache_bytes_are_those_of_the_arrays(kv_heads: int | None, window: int | None, dtype: Dtype):
    config = tiny(n_kv_head=kv_heads, window=window, dtype=dtype)
    for kept, sizes in ((CacheDtype.MODEL, CACHE_NUMBERS[dtype.value]), (CacheDtype.INT8, CACHE_NUMBERS["int8"])):
        cache = empty_cache(config, 3, 20, kept)
        stored = jax.tree.leaves((cache.k_LBKSC, cache.v_LBKSC, cache.k_scale_LBKS, cache.v_scale_LBKS))
        assert sum(array.nbytes for array in stored) == cache_bytes(config, 20, 3, *sizes)


def test_products_inside_control_flow_are_counted_as_often_as_they_run():
    square = jnp.ones((4, 4))

    def scanned(x):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(lambda y: y @ y)(x), None), x, None, length=5)[0]

    assert jaxpr_dot_flops(jax.make_jaxpr(jax.jit(scanned))(square)) == 5 * 2 * 4**3
    same = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y.T @ y, x))
    assert jaxpr_dot_flops(same(square)) == 2 * 4**3
    uneven = jax.make_jaxpr(lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y, x))
    with pytest.raises(ValueError, match="no single count"):
        jaxpr_dot_flops(uneven(square))
    endless = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ y, x))
    with pytest.raises(ValueError, match="no static FLOP count"):
        jaxpr_dot_flops(endless(square))


def test_count_command(capsys):
    assert main(["count", "--config", f"{CONFIGS}/gpt2.py", "--json", "--check", "--config.steps=2"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["parameters"]["total"] == 124_439_808
    assert counted["traced_flops_per_token"] == counted["flops_per_token"]["flops_matmul_full"]
    assert counted["tokens"] == 2 * 512 * 1024
    assert counted["run_flops"]["flops_6nd"] == 6 * 124_439_808 * counted["tokens"]
    named = {*counted["flops_per_token"], "parameters", "cache_bytes", "run_flops"}
    assert named <= set(counted["conventions"])
    assert main(["count", "--config", f"{CONFIGS}/llama.py:1b"]) == 0
    assert "1,235,814,400" in capsys.readouterr().out
    assert main(["count", "--config", f"{CONFIGS}/llama.py:1b", "--config.model.window=512", "--json"]) == 0
    sliding = json.loads(capsys.readouterr().out)["cache_bytes"]
    # 16 layers, 8 heads of 64; no more than the window is kept, and int8 has a float32 scale a head.
    assert sliding["bfloat16"] == {"per_token": 32_768, "at_context": 512 * 32_768}
    assert sliding["int8"] == {"per_token": 2 * 16 * 8 * (64 + 4), "at_context": 512 * 2 * 16 * 8 * (64 + 4)}
    assert main(["count", "--config", f"{CONFIGS}/llama.py:1b", "--config.model.window=0"]) == 2
    assert "window is 0" in capsys.readouterr().err
    assert main(["count", "--config", f"{CONFIGS}/recurrent.py:gru", "--json", "--check"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["traced_flops_per_token"] == counted["flops_per_token"]["flops_matmul_full"]
    assert counted["cache_bytes"] == {"float32": {"per_token": 0, "at_context": 2 * 88 * 4}}
    assert main(["count", "--config", f"{CONFIGS}/llama.py:3b"]) == 2
    assert "Known: 1b, 8b, 70b" in capsys.readouterr().err
