"""Width scaling: what a few steps of training change is as large at every width with it, and is not without."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.config import ModelConfig, WidthScaling
from lm.model.transformer import Transformer
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.train.config import OptimizerConfig, RunConfig
from lm.train.optimizer import make_optimizer
from lm.train.step import fresh_state, make_train_step

BASE, WIDTHS, STEPS = 32, (32, 128, 512), 4


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """Nearly all the time goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def run_of(width: int, scaling: WidthScaling | None) -> RunConfig:
    model = ModelConfig(vocab_size=64, context_length=16, n_layer=2, d_model=width, n_head=4, d_ff=2 * width,
                        tied_embedding=False, width_scaling=scaling)  # fmt: skip
    optimizer = OptimizerConfig(peak_lr=1e-2, warmup_steps=0, weight_decay=0.0, clip_norm=0.0)
    return RunConfig(model, optimizer, STEPS, 8)


def batch_of() -> dict[str, np.ndarray]:
    tokens_BW = np.random.default_rng(0).integers(0, 64, (8, 17), dtype=np.int32)
    return {"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": np.ones((8, 16), np.float32)}


def activations(config: ModelConfig, params) -> dict[str, jax.Array]:
    """Logits, and what the layers leave to the final norm."""
    found = {}

    def spy(call, args, kwargs, context):
        if context.module.name == "final_norm":
            found["residual"] = args[0]
        return call(*args, **kwargs)

    with nn.intercept_methods(spy):
        found["logits"] = Transformer(config).apply({"params": params}, batch_of()["inputs"])
    return found


def growth(scaling: WidthScaling | None) -> dict[str, float]:
    """Exponents of width in the root mean square of what a few steps change."""
    mesh, moved = make_mesh(MeshConfig(), jax.devices()[:1]), {}
    for width in WIDTHS:
        config = run_of(width, scaling)
        look = jax.jit(lambda params, model=config.model: activations(model, params))
        state, step = fresh_state(config, mesh), make_train_step(config, mesh)
        before = look(state["params"])
        for _ in range(STEPS):
            state, _ = step(state, batch_of(), np.float32(1e-2))
        after = look(state["params"])
        for name, at_first in before.items():
            moved.setdefault(name, []).append(float(jnp.sqrt(jnp.mean(jnp.square(after[name] - at_first)))))
    return {name: np.polyfit(np.log(WIDTHS), np.log(sizes), 1)[0] for name, sizes in moved.items()}


@pytest.mark.full
def test_what_training_moves_is_flat_in_width_with_it_and_grows_without():
    plain, scaled = growth(None), growth(WidthScaling(BASE, base_head=BASE // 4))
    assert all(abs(exponent) < 0.2 for exponent in scaled.values()), scaled
    assert all(exponent > 0.4 for exponent in plain.values()), plain


def batches(steps: int):
    """Walks through a random graph in which each of 64 tokens is followed by one of four: ln 4 can be learned."""
    draw = np.random.default_rng(0)
    next_V4 = draw.integers(0, 64, (64, 4))
    for _ in range(steps):
        tokens_BW = np.empty((8, 17), np.int32)
        tokens_BW[:, 0] = draw.integers(0, 64, 8)
        for t, choice_B in enumerate(draw.integers(0, 4, (16, 8))):
            tokens_BW[:, t + 1] = next_V4[tokens_BW[:, t], choice_B]
        yield {"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": np.ones((8, 16), np.float32)}


def best_rate(width: int, scaling: WidthScaling | None) -> float:
    """The logarithm to base 2 of the rate, of powers of 2, with the lowest loss over the last quarter of 120 steps."""
    config, mesh = run_of(width, scaling), make_mesh(MeshConfig(), jax.devices()[:1])
    step, losses = make_train_step(config, mesh), {}
    for exponent in range(-11, -2):
        state, found = fresh_state(config, mesh), []
        for batch in batches(120):
            state, metrics = step(state, batch, np.float32(2.0**exponent))
            found.append(metrics["loss"])
        losses[exponent] = float(np.mean(found[-30:]))
    return min(losses, key=lambda exponent: losses[exponent])


@pytest.mark.full
def test_the_best_rate_stays_where_it_is_with_it_and_falls_without():
    scaling = WidthScaling(BASE, base_head=BASE // 4)
    base, scaled, plain = best_rate(BASE, None), best_rate(8 * BASE, scaling), best_rate(8 * BASE, None)
    assert abs(scaled - base) <= 1  # a step of the grid
    assert base - plain >= 2  # muP's rule for matrices is 1 / 8


def test_at_the_base_width_nothing_changes():
    plain, scaled = run_of(BASE, None).model, run_of(BASE, WidthScaling(BASE)).model
    assert (scaled.width_ratio, scaled.matrix_scale, scaled.score_scale) == (1.0, plain.matrix_scale, None)
    texts = {jax.jit(Transformer(each).init).lower(jax.random.key(0), batch_of()["inputs"]).as_text()
             for each in (plain, scaled)}  # fmt: skip
    assert len(texts) == 1


def test_matrices_of_layers_learn_slower_and_nothing_else_does():
    config = run_of(4 * BASE, WidthScaling(BASE, base_head=8))
    assert config.model.score_scale == pytest.approx(8**0.5 / 32)
    assert config.model.matrix_scale == pytest.approx(0.02 / 2)
    params = nn.unbox(jax.eval_shape(Transformer(config.model).init, jax.random.key(0), batch_of()["inputs"]))["params"]
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), params)
    updates = {}
    for ratio in (1.0, config.model.width_ratio):
        optimizer = make_optimizer(config.optimizer, ratio)
        updates[ratio], _ = optimizer.update(params, optimizer.init(params), params)
    found = {}
    for (path, one), other in zip(jax.tree.leaves_with_path(updates[1.0]), jax.tree.leaves(updates[4.0]), strict=True):
        found[path[-1].key] = float((one / other).mean())
    assert found == pytest.approx({"kernel": 4.0, "embedding": 1.0, "head": 1.0, "scale": 1.0})
