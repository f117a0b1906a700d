"""What a step executes, against every product in the jaxpr of the step."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from lm.model.accounting import Flops, flops_per_token, jaxpr_dot_flops
from lm.model.attention import Plain
from lm.model.config import Experts, FeedForward, Mixer, ModelConfig, NormPlacement, Positions, Remat
from lm.model.execution import executed_flops_per_token, least_saved, least_traffic
from lm.model.fused import Kernel
from lm.model.transformer import Transformer

MODEL = ModelConfig(
    vocab_size=32, context_length=16, n_layer=3, d_model=16, n_head=4, n_kv_head=2, d_ff=24, tied_embedding=False
)


LSTM = {"mixer": Mixer.LSTM, "n_head": 1, "n_kv_head": None, "positions": Positions.NONE,
        "feed_forward": FeedForward.NONE, "d_ff": 0}  # fmt: skip


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("feed_forward", [FeedForward.GELU, FeedForward.SWIGLU])
def test_the_count_is_that_of_the_jaxpr_with_what_is_recomputed(remat, feed_forward):
    compare_with_jaxpr(dataclasses.replace(MODEL, remat=remat, feed_forward=feed_forward))


ENDS = [
    {"parallel_block": True},
    *({"norm_placement": placement} for placement in NormPlacement),
    {"experts": Experts(4, 2)},
    {"experts": Experts(4, 2, shared=2)},
    {"experts": Experts(4, 2, shared=1), "parallel_block": True},
    {"experts": Experts(4, 2, shared=1), "norm_placement": NormPlacement.POST},
    {"feed_forward": FeedForward.NONE, "d_ff": 0},
    LSTM,
    {**LSTM, "feed_forward": FeedForward.GELU, "d_ff": 24, "parallel_block": True},
]


@pytest.mark.parametrize("remat", [Remat.DOTS, Remat.FULL])
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_what_a_block_leaves_out_when_it_runs_again_follows_from_how_it_ends(remat, ends):
    compare_with_jaxpr(dataclasses.replace(MODEL, remat=remat, **ends))


def compare_with_jaxpr(config):
    model, tokens = Transformer(config), jnp.zeros((1, config.context_length), jnp.int32)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens))
    jaxpr = jax.make_jaxpr(jax.grad(lambda params: jnp.sum(jnp.sin(jnp.asarray(model.apply(params, tokens))))))(params)
    executed = executed_flops_per_token(config, Plain().products)
    assert executed * config.context_length == jaxpr_dot_flops(jaxpr)


def test_without_recomputation_plain_attention_executes_what_is_counted():
    assert executed_flops_per_token(MODEL, Plain().products) == flops_per_token(MODEL, Flops.MATMUL_FULL)


def test_a_kernel_computes_scores_again_but_not_what_is_masked():
    counted = flops_per_token(MODEL, Flops.MATMUL)
    scores = MODEL.n_layer * 2 * MODEL.n_head * MODEL.head_width * (MODEL.context_length + 1) / 2  # one product
    assert executed_flops_per_token(MODEL, Kernel.CUDNN.products) == counted + scores
    assert executed_flops_per_token(MODEL, Kernel.SPLASH.products) == counted + 3 * scores


def test_traffic_grows_with_tokens_microbatches_and_recomputation_and_falls_with_shards():
    def traffic(tokens=64, shards=1, microbatches=1, config=MODEL):
        return least_traffic(config, tokens, shards, microbatches)

    assert traffic(128) < 2 * traffic(64)  # weights are read once for all tokens
    assert traffic(128) - traffic(64) == traffic(192) - traffic(128)
    assert traffic(shards=2) < traffic()
    assert traffic(config=dataclasses.replace(MODEL, remat=Remat.FULL)) > traffic()
    # one more microbatch reads every weight of a product three times more, in float32
    weights = MODEL.n_layer * (16 * 4 * 2 * (4 + 2) + 3 * 16 * 24) + 16 * 32
    assert traffic(microbatches=2) - traffic() == 3 * 4 * weights


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("sublayers", [*({"feed_forward": one} for one in list(FeedForward)[1:]), LSTM], ids=str)
def test_blocks_keep_at_least_what_is_said_and_not_three_times_as_much(remat, sublayers):
    config = dataclasses.replace(MODEL, remat=remat, **sublayers)
    model, tokens = Transformer(config), jnp.zeros((1, config.context_length), jnp.int32)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens))
    kept = jax.eval_shape(lambda params: jax.vjp(lambda params: model.apply(params, tokens), params)[1], params)
    # One row: what is stacked over layers and goes with the tokens begins with these lengths, in time the latter first.
    lengths = (1, config.context_length)
    begin = [(config.n_layer, *lengths), (config.n_layer, *reversed(lengths))]
    stacked = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape[:3] in begin]
    numbers = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in stacked) / config.context_length
    assert least_saved(config, 1) <= numbers < 3 * least_saved(config, 1)
