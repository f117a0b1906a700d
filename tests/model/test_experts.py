"""A mixture of experts against loops over tokens and experts, and what its routers tell."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.config import Dtype, Experts, FeedForward
from lm.model.experts import TOLD, MixtureOfExperts, router_losses
from lm.model.feedforward import PositionWise
from lm.model.transformer import Transformer
from tests.model.variants import logits, parameters, replace, tiny, tokens

UNNORMALISED = {"experts": Experts(count=4, chosen=2, normalised=False, shared=2)}
CONFIGS = [
    tiny(experts=Experts(count=4, chosen=2)),
    tiny(**UNNORMALISED, feed_forward=FeedForward.RELU2),
    tiny(experts=Experts(count=3, chosen=3)),
]


def layer_of(config):
    return jax.tree.map(lambda leaf: leaf[0], parameters(config)["layers"]["feed_forward"])


def vectors(rows=2, length=5):
    return jnp.asarray(np.random.default_rng(0).standard_normal((rows, length, 16), np.float32))


def dense(config, params, x_D):
    """One position through one set of matrices."""
    return PositionWise(config, params["up"]["kernel"].shape[1]).apply({"params": params}, x_D[None, None])[0, 0]


def by_loops(config, params, x_BTD):
    """Each token to each of its experts, one after the other."""
    experts = config.experts
    rows = []
    for x_D in x_BTD.reshape(-1, 16):
        logits_E = x_D @ params["router"]["kernel"]
        chosen = jnp.argsort(-logits_E)[: experts.chosen]
        share_E = jax.nn.softmax(logits_E)  # before the choice, as Mixtral and Qwen3-MoE are published
        weight = share_E[chosen] / jnp.sum(share_E[chosen]) if experts.normalised else share_E[chosen]
        y_D = jnp.zeros(16)
        for place in range(experts.chosen):
            one = {
                n: {"kernel": jnp.take(params[n]["kernel"], chosen[place], axis=0)}
                for n in params
                if n not in ("router", "shared")
            }
            y_D = y_D + weight[place] * dense(config, one, x_D)
        if experts.shared:
            y_D = y_D + dense(config, params["shared"], x_D)
        rows.append(y_D)
    return jnp.stack(rows).reshape(x_BTD.shape)


def values_and_gradients(of, params, x_BTD):
    """Of a function that weighs every output differently, so that no error cancels."""
    return jax.jit(jax.value_and_grad(lambda *at: jnp.sum(jnp.sin(of(*at))), (0, 1)))(params, x_BTD)


@pytest.mark.parametrize(
    "config", [CONFIGS[0], *(pytest.param(config, marks=pytest.mark.slow) for config in CONFIGS[1:])]
)
def test_grouped_products_are_the_loop_over_experts(config):
    params, x_BTD = layer_of(config), vectors(length=3)
    ours = values_and_gradients(lambda p, x: MixtureOfExperts(config).apply({"params": p}, x), params, x_BTD)
    theirs = values_and_gradients(lambda p, x: by_loops(config, p, x), params, x_BTD)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, theirs)


def test_one_expert_is_the_dense_sublayer():
    alone, config = tiny(experts=Experts(count=1, chosen=1)), tiny()
    params = layer_of(alone)
    matrices = {name: {"kernel": params[name]["kernel"][0]} for name in ("gate", "up", "down")}
    found = MixtureOfExperts(alone).apply({"params": params}, vectors())
    np.testing.assert_allclose(found, PositionWise(config).apply({"params": matrices}, vectors()), atol=1e-5)


def told_by(config, params, x_BT):
    apply = jax.jit(functools.partial(Transformer(config).apply, mutable=[TOLD]))
    return router_losses(apply({"params": params}, x_BT)[1])


def test_routers_tell_their_losses_as_means_over_layers():
    config = CONFIGS[0]
    params, x_BTD, experts = layer_of(config), vectors(), config.experts
    _, told = MixtureOfExperts(config).apply({"params": params}, x_BTD, mutable=[TOLD])
    logits_NE = np.asarray(x_BTD.reshape(-1, 16) @ params["router"]["kernel"], np.float64)
    share_NE = np.exp(logits_NE) / np.exp(logits_NE).sum(1, keepdims=True)
    load_E = np.bincount(np.argsort(-logits_NE)[:, :2].ravel(), minlength=4) / (2 * len(logits_NE))
    one = {name: float(value) for name, value in told[TOLD].items()}
    assert one["balance_loss"] == pytest.approx(experts.count * load_E @ share_NE.mean(0), rel=1e-5)
    assert one["router_z_loss"] == pytest.approx(np.mean(np.log(np.exp(logits_NE).sum(1)) ** 2), rel=1e-5)

    x_BT = tokens(config)
    whole = told_by(config, parameters(config), x_BT)
    assert whole.keys() == {"balance_loss", "router_z_loss"}
    even = jax.tree.map(lambda leaf: leaf, parameters(config))
    even["layers"]["feed_forward"]["router"]["kernel"] *= 0.0
    # With equal probabilities any choice is balanced, and the logsumexp is ln 4.
    assert {name: float(value) for name, value in told_by(config, even, x_BT).items()} == pytest.approx(
        {"balance_loss": 1.0, "router_z_loss": np.log(4) ** 2}, rel=1e-5
    )
    assert whole["balance_loss"] > 1.01


def test_nothing_is_told_where_nobody_asks_nor_at_initialisation():
    config = CONFIGS[0]
    variables = jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    assert variables.keys() == {"params"}
    assert told_by(tiny(), parameters(tiny()), tokens(tiny())) == {}


def test_each_expert_has_a_matrix_that_carries_its_axis():
    boxed = jax.eval_shape(Transformer(CONFIGS[1]).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    names = nn.get_partition_spec(boxed)["layers"]["feed_forward"]
    assert tuple(names["up"]["kernel"]) == ("layers", "experts", "embed", "mlp")
    assert tuple(names["down"]["kernel"]) == ("layers", "experts", "mlp", "embed")
    assert tuple(names["router"]["kernel"]) == ("layers", "embed", "experts")


@pytest.mark.slow
def test_the_router_of_a_bfloat16_model_is_float32():
    config = replace(CONFIGS[0], dtype=Dtype.BFLOAT16)
    exact, near = (logits(each, parameters(CONFIGS[0]), tokens(config)) for each in (CONFIGS[0], config))
    # Some choices may still differ: what is routed has been rounded. Most are the same.
    assert np.median(np.abs(exact - near)) < 0.05 * np.std(exact)
