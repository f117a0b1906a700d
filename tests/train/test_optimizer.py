import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from hypothesis import given
from hypothesis import strategies as st

from lm.base.config import override
from lm.base.errors import UsageError
from lm.model.accounting import count_parameters
from lm.parallel.mesh import make_mesh
from lm.train.config import OptimizerConfig, Schedule
from lm.train.optimizer import decay_mask, learning_rate, lr_fraction, make_optimizer
from lm.train.step import abstract_state
from tests.train.tiny import run_config

PLAIN = OptimizerConfig(peak_lr=0.01, warmup_steps=4)


@given(
    schedule=st.sampled_from(Schedule),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    final=st.floats(0, 1),
    cooldown=st.floats(0, 1),
)
def test_a_rate_rises_from_above_zero_then_falls_and_never_leaves_its_bounds(schedule, steps, warmup, final, cooldown):
    config = OptimizerConfig(1.0, warmup, schedule, final, cooldown)
    rates = [lr_fraction(config, steps, step) for step in range(200)]
    assert all(0 < rate <= 1 for rate in rates[:warmup])
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(final - 1e-12 <= rate <= 1 for rate in rates[warmup:])  # 1e-12: rounding of 1 - (1 - final)
    falls = steps - 1 - warmup if schedule is Schedule.COSINE else min(steps - 1 - warmup, round(cooldown * steps))
    if falls > 0:
        assert rates[steps - 1] == pytest.approx(final)  # reached at the last step
    if warmup < steps:
        assert rates[-1] == rates[steps - 1]  # constant far past the end


def test_the_schedules_take_their_known_values():
    cosine = dataclasses.replace(PLAIN, final_lr_fraction=0.2)
    assert [learning_rate(cosine, 13, step) for step in (0, 3, 4, 8, 12, 10**6)] == pytest.approx(
        [0.002, 0.008, 0.01, 0.01 * (0.2 + 0.8 / 2), 0.002, 0.002]
    )
    wsd = dataclasses.replace(PLAIN, schedule=Schedule.WSD, cooldown_fraction=0.25, final_lr_fraction=0.0)
    assert [learning_rate(wsd, 40, step) for step in (0, 4, 29, 34, 39, 10**6)] == pytest.approx(
        [0.002, 0.01, 0.01, 0.005, 0.0, 0.0]
    )


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_step_is_that_of_optax_adamw(clip):
    config = dataclasses.replace(PLAIN, clip_norm=clip, weight_decay=0.3)
    params = {"layer": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}, "norm": {"scale": jnp.full(2, 2.0)}}
    mask = {"layer": {"kernel": True, "bias": False}, "norm": {"scale": False}}
    reference = optax.adamw(config.peak_lr, config.b1, config.b2, config.eps, weight_decay=0.3, mask=mask)
    if clip:
        reference = optax.chain(optax.clip_by_global_norm(clip), reference)
    ours, theirs = (make_optimizer(config), params), (reference, params)
    states = [optimizer.init(params) for optimizer, _ in (ours, theirs)]
    p, q = params, params
    for step in range(4):
        grads = jax.tree.map(lambda x, step=step: jax.random.normal(jax.random.key(step), x.shape), params)
        direction, states[0] = ours[0].update(grads, states[0], p)
        p = optax.apply_updates(p, jax.tree.map(lambda u: -config.peak_lr * u, direction))
        updates, states[1] = theirs[0].update(grads, states[1], q)
        q = optax.apply_updates(q, updates)
    # The same float32 sums, multiplied by the rate in another order: a few units in the last place.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), p, q)


@pytest.mark.parametrize(
    "shape",
    [
        (),
        ("model.norm=layernorm", "model.bias=true", "model.positions=learned", "model.feed_forward=gelu"),
        ("model.qk_norm=true", "model.tied_embedding=false", "model.n_kv_head=1"),
    ],
)
def test_exactly_the_embeddings_and_matrices_decay(shape):
    config = run_config("unused", *shape)
    params = abstract_state(config, make_mesh(config.mesh))["params"]
    mask = traverse_util.flatten_dict(decay_mask(params), sep=".")
    sizes = {name: leaf.size for name, leaf in traverse_util.flatten_dict(params, sep=".").items()}
    decayed = sum(sizes[name] for name in sizes if mask[name])
    counts = count_parameters(config.model)
    assert decayed == counts.embedding + counts.position + counts.head + counts.matrices
    assert sum(sizes.values()) - decayed == counts.norms


@pytest.mark.parametrize(
    "change",
    ["optimizer.peak_lr=-1", "optimizer.warmup_steps=-1", "optimizer.final_lr_fraction=1.1", "optimizer.b2=1",
     "optimizer.eps=0", "optimizer.clip_norm=-1", "steps=0", "eval_every=-1", "z_loss=-1", "seed=-1",
     "seed=4294967296", "accumulate=3", "checkpoints_kept=0"],
)  # fmt: skip
def test_a_number_outside_its_range_is_refused_by_name(change):
    name = change.partition("=")[0].rpartition(".")[2]
    with pytest.raises(UsageError, match=f"{name} "):
        override(run_config("unused"), [change])
