import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.model.transformer import Transformer
from lm.parallel.mesh import make_mesh
from lm.train.config import Schedule
from lm.train.loss import loss_sums
from lm.train.step import fresh_state, loss_gradients, make_train_step
from tests.train.tiny import run_config

CONFIG = run_config("unused", "optimizer.clip_norm=0.1")
MESH = make_mesh(CONFIG.mesh)
RATE = np.float32(0.01)


def batch_of(seed: int, *, uneven: bool = False) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens_BW = draw.integers(0, 257, (CONFIG.batch_size, CONFIG.model.context_length + 1), dtype=np.int32)
    weights_BT = np.ones(tokens_BW[:, 1:].shape, np.float32)
    if uneven:  # rows 0 and 2 are one microbatch of two: nearly empty, where the other is full
        weights_BT[::2, 2:] = 0
    return {"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": weights_BT}


def steps_of(config, batches):
    step, state, losses = make_train_step(config, MESH), fresh_state(config, MESH), []
    for batch in batches:
        state, metrics = step(state, batch, RATE)
        losses.append({name: float(value) for name, value in metrics.items()})
    return state, losses


def moment(state):
    """Adam's first moment; after one step it is (1 - b1) times the clipped gradient."""
    return next(part for part in state["opt_state"] if hasattr(part, "mu")).mu


@pytest.mark.slow
def test_accumulation_is_the_large_batch_however_its_tokens_lie():
    batch = batch_of(0, uneven=True)
    whole, (metrics,) = steps_of(CONFIG, [batch])
    micro, (accumulated,) = steps_of(dataclasses.replace(CONFIG, accumulate=2), [batch])
    # float32 sums of about 40 terms in another order. Parameters are not compared: Adam's division makes the noise in
    # a gradient near 0 as large as the gradient.
    assert accumulated == pytest.approx(metrics, rel=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), moment(micro), moment(whole))


@pytest.mark.slow
def test_the_loss_is_the_mean_over_tokens_not_over_microbatches():
    batch = batch_of(1, uneven=True)
    _, (metrics,) = steps_of(dataclasses.replace(CONFIG, accumulate=2), [batch])
    apply = jax.jit(Transformer(CONFIG.model).apply)
    logits_BTV = apply({"params": fresh_state(CONFIG, MESH)["params"]}, batch["inputs"])
    nll_BT = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch["targets"]))
    weights_BT = batch["weights"]
    by_token = (nll_BT * weights_BT).sum() / weights_BT.sum()
    by_microbatch = np.mean([np.average(nll_BT[i::2], weights=weights_BT[i::2]) for i in range(2)])
    assert abs(by_token - by_microbatch) > 1e-3  # the two rules can be told apart here
    assert metrics["loss"] == pytest.approx(by_token, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["lstm", pytest.param("gru", marks=pytest.mark.full)])
def test_a_recurrent_model_learns_what_it_sees_again_and_again(mixer):
    config = run_config("unused", f"model.mixer={mixer}", "model.n_head=1", "model.positions=none", "model.bias=true",
                        "model.feed_forward=none", "model.d_ff=0", "data.segment_mask=true")  # fmt: skip
    segments_BT = np.repeat(np.arange(2, dtype=np.int32)[None], CONFIG.batch_size, axis=0).repeat(8, axis=1)
    _, found = steps_of(config, [batch_of(0) | {"segments": segments_BT}] * 30)
    losses = [metrics["loss"] for metrics in found]
    assert losses[0] == pytest.approx(np.log(257), abs=0.1)
    assert losses[-1] < losses[0] - 1  # 64 random tokens, by heart
    assert np.isfinite([list(metrics.values()) for metrics in found]).all()


def test_z_loss_is_its_weight_times_the_squared_logsumexp():
    logits_BTV = jnp.log(jnp.array([[[1.0, 3.0], [2.0, 6.0]]]))  # logsumexp: ln 4 and ln 8
    batch = {"targets": jnp.array([[1, 0]]), "weights": jnp.array([[1.0, 0.5]])}
    objective, sums = loss_sums(logits_BTV, batch, 0.1)
    nll = -np.log(3 / 4) - 0.5 * np.log(1 / 4)
    assert sums["nll"] == pytest.approx(nll, rel=1e-6)
    assert sums["tokens"] == 1.5
    assert objective == pytest.approx(nll + 0.1 * (np.log(4) ** 2 + 0.5 * np.log(8) ** 2), rel=1e-6)
    assert loss_sums(logits_BTV, batch, 0.0)[0] == sums["nll"]


@pytest.mark.slow
def test_the_gradient_of_the_loss_is_softmax_minus_onehot():
    logits_BTV = jax.random.normal(jax.random.key(0), (2, 3, 5))
    batch = {"targets": jnp.array([[0, 1, 2], [3, 4, 0]]), "weights": jnp.array([[1.0, 0.0, 2.0], [1.0, 1.0, 0.5]])}
    got_BTV = jax.grad(lambda x: loss_sums(x, batch, 0.0)[0])(logits_BTV)
    expected_BTV = (jax.nn.softmax(logits_BTV) - jax.nn.one_hot(batch["targets"], 5)) * batch["weights"][..., None]
    np.testing.assert_allclose(got_BTV, expected_BTV, atol=1e-6)


@pytest.mark.slow
def test_clipping_bounds_what_reaches_adam_and_the_recorded_norm_is_the_one_before():
    batch = batch_of(2)
    state, (metrics,) = steps_of(CONFIG, [batch])
    grads, sums = jax.jit(loss_gradients(CONFIG))(fresh_state(CONFIG, MESH)["params"], batch)
    norm = float(optax.tree.norm(grads) / sums["tokens"])
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > CONFIG.optimizer.clip_norm
    clipped = (1 - CONFIG.optimizer.b1) * CONFIG.optimizer.clip_norm
    assert float(optax.tree.norm(moment(state))) == pytest.approx(clipped, rel=1e-5)


@pytest.mark.slow
def test_one_program_serves_cells_that_differ_in_rate_length_and_schedule():
    optimizer = dataclasses.replace(CONFIG.optimizer, peak_lr=0.5, warmup_steps=9, schedule=Schedule.WSD)
    other = dataclasses.replace(CONFIG, optimizer=optimizer, steps=999, seed=5, log_every=7)
    state, batch = fresh_state(CONFIG, MESH), batch_of(0)
    texts = {make_train_step(config, MESH).lower(state, batch, RATE).as_text() for config in (CONFIG, other)}
    assert len(texts) == 1
    deeper = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, d_ff=24))
    assert make_train_step(deeper, MESH).lower(fresh_state(deeper, MESH), batch, RATE).as_text() not in texts


def test_a_step_is_compiled_once_whatever_its_rate():
    step, state = make_train_step(CONFIG, MESH), fresh_state(CONFIG, MESH)
    for number in range(3):
        state, _ = step(state, batch_of(number), np.float32(0.1 / (number + 1)))
    assert step._cache_size() == 1
    assert int(state["step"]) == 3


def test_fresh_parameters_are_a_function_of_the_seed():
    first, again = (fresh_state(CONFIG, MESH)["params"] for _ in range(2))
    other = fresh_state(dataclasses.replace(CONFIG, seed=1), MESH)["params"]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, first, again)))
    assert not np.array_equal(first["embedding"], other["embedding"])


def test_one_batch_is_learned_by_heart():
    batch = batch_of(4)
    _, losses = steps_of(CONFIG, [batch] * 150)
    assert losses[0]["loss"] > 5
    # Rows begin with different tokens here, so that a memory of 64 targets reaches 0; 150 steps reach below a tenth.
    assert losses[-1]["loss"] < 0.1
