"""Patches among tokens: the seam changes nothing of text, and a patch is a linear map of its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.model.accounting import Flops, Group, count_parameters, flops_per_token, group_of
from lm.model.count import traced_flops_per_token
from lm.model.patches import PATCH, Patches
from lm.model.transformer import Transformer
from lm.train.config import OptimizerConfig, RunConfig
from lm.train.step import loss_gradients
from tests.model.variants import init, logits, parameters, replace, tiny, tokens

TEXT = tiny(n_layer=1)
MIXED = replace(TEXT, patch_width=3)
PLACES = np.array([[1, 1, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 1, 1, 1]], bool)


def mixed_tokens() -> jax.Array:
    return jnp.where(PLACES, PATCH, tokens(MIXED))


def patches(seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, 8, 3))


@jax.jit
def apply(params, tokens_BT, patches_BTP):
    return Transformer(MIXED).apply({"params": params}, tokens_BT, None, patches_BTP)


@pytest.mark.slow
def test_without_patches_the_bits_of_text_are_what_they_were():
    params = parameters(MIXED)
    text = {name: leaf for name, leaf in params.items() if name != "patches"}
    x_BT = tokens(MIXED)
    assert jnp.array_equal(logits(MIXED, params, x_BT), logits(TEXT, text, x_BT))
    # Patches that are there but nowhere looked at make another program, which may round sums otherwise.
    np.testing.assert_allclose(apply(params, x_BT, patches()), logits(TEXT, text, x_BT), atol=1e-5)
    assert {*init(MIXED)} == {*init(TEXT), "patches"}
    assert "patches" not in init(TEXT)


def test_the_vector_of_a_patch_is_a_linear_map_of_its_numbers():
    kernel_PD = np.asarray(parameters(MIXED)["patches"]["kernel"])
    x_BTD = jax.random.normal(jax.random.key(1), (2, 8, MIXED.d_model))
    found = Patches(MIXED).apply({"params": {"kernel": kernel_PD}}, x_BTD, mixed_tokens(), patches())
    expected = np.where(PLACES[..., None], np.asarray(patches()) @ kernel_PD, x_BTD)
    np.testing.assert_allclose(found, expected, atol=1e-6)  # float32 sums of three terms of order 1
    np.testing.assert_array_equal(np.asarray(found)[~PLACES], np.asarray(x_BTD)[~PLACES])


def test_patches_and_text_in_one_sequence_are_causal():
    params, x_BT = parameters(MIXED), mixed_tokens()
    before = apply(params, x_BT, patches())
    for place in (1, 5):
        other = patches().at[:, place].add(1.0)
        after = apply(params, x_BT, other)
        changed = np.asarray(jnp.any(before != after, axis=-1))
        at_patch = PLACES[:, place]
        assert not changed[:, :place].any()
        assert changed[at_patch, place:].all()  # later text sees the patch
        assert not changed[~at_patch].any()  # numbers behind a token are not looked at
    changed_text = x_BT.at[1, 3].set((x_BT[1, 3] + 1) % MIXED.vocab_size)
    after = apply(params, changed_text, patches())
    changed = np.asarray(jnp.any(before != after, axis=-1))
    assert not changed[1, :3].any()
    assert changed[1, 3:].all()  # later patches see the text


@pytest.mark.slow
def test_the_step_trains_the_map_where_there_are_patches():
    config = RunConfig(MIXED, OptimizerConfig(peak_lr=1e-2, warmup_steps=0), steps=1, batch_size=2)
    params = parameters(MIXED)
    batch = {
        "inputs": mixed_tokens(), "targets": tokens(MIXED, seed=3), "weights": jnp.ones((2, 8)), "patches": patches()
    }  # fmt: skip
    gradients, _ = loss_gradients(config)(params, batch)
    assert float(jnp.abs(gradients["patches"]["kernel"]).min()) > 0
    without, _ = loss_gradients(config)(params, {**batch, "inputs": tokens(MIXED)})
    assert float(jnp.abs(without["patches"]["kernel"]).max()) == 0


def test_patches_are_counted_as_they_are_computed():
    assert group_of(("patches", "kernel")) is Group.EMBEDDING
    assert count_parameters(MIXED).embedding == count_parameters(TEXT).embedding + 3 * MIXED.d_model
    assert flops_per_token(MIXED, Flops.MATMUL_FULL) == traced_flops_per_token(MIXED)
    assert flops_per_token(MIXED, Flops.MATMUL) - flops_per_token(TEXT, Flops.MATMUL) == 4 * 3 * MIXED.d_model


def test_patches_that_do_not_fit_are_usage_errors():
    with pytest.raises(UsageError, match="patches of 4 numbers, and patch_width is 3"):
        apply(parameters(MIXED), mixed_tokens(), jnp.zeros((2, 8, 4)))
    with pytest.raises(UsageError, match="patch_width is None"):
        Transformer(TEXT).apply({"params": parameters(TEXT)}, mixed_tokens(), None, patches())
    with pytest.raises(UsageError, match="patch_width is 0"):
        tiny(patch_width=0)
