"""The kernels compute what `attend` computes. The TPU's runs interpreted here, the GPU's needs a GPU."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.attention import USUAL, Plain, Scoring, attend, causal_mask
from lm.model.config import Dtype, ModelConfig
from lm.model.fused import Fused, Kernel, choose, cudnn, splash

RULES = (("batch", ("data", "fsdp")), ("heads", "tensor"), ("sequence", "sequence"))


def qkv(T: int, H: int, K: int, C: int, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, T, H, C), (2, T, K, C), (2, T, K, C))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def documents(T: int) -> jax.Array:
    return jnp.sort(jax.random.randint(jax.random.key(1), (2, T), 0, 3), axis=1)


def values_and_gradients(attention, q, k, v):
    """Of a function that weighs every output differently, so that no error cancels."""

    def total(q, k, v):
        return jnp.sum(jnp.sin(attention(q, k, v).astype(jnp.float32)))

    return attention(q, k, v), *jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v)


# Two blocks of 128: one on the diagonal, one below it, and one above it that is skipped.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "masked"),
    [
        pytest.param(None, True),
        pytest.param(150, True),
        pytest.param(None, False, marks=pytest.mark.full),
        pytest.param(50, True, marks=pytest.mark.full),
        pytest.param(50, False, marks=pytest.mark.full),
    ],
)
def test_splash_attention_is_plain_attention(window, masked):
    T = 256
    q, k, v = qkv(T, 2, 1, 16)
    segments = documents(T) if masked else None
    kernel = values_and_gradients(lambda *x: splash(*x, segments, window, interpret=True), q, k, v)
    plain = values_and_gradients(lambda *x: attend(*x, causal_mask(T, segments, window)), q, k, v)
    for ours, theirs in zip(kernel, plain, strict=True):
        # float32 sums of up to 256 terms of order 1 in another order: 256 x 2^-24, times some
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.full
def test_splash_attention_scales_and_caps_scores_as_plain_attention_does():
    scoring, (q, k, v) = Scoring(scale=0.5, softcap=1.5), qkv(128, 2, 1, 16)
    kernel = values_and_gradients(lambda *x: splash(*x, None, 50, scoring, interpret=True), q, k, v)
    plain = values_and_gradients(lambda *x: attend(*x, causal_mask(128, None, 50), scoring), q, k, v)
    for ours, theirs in zip(kernel, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN's attention needs an NVIDIA GPU")
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_attention_is_plain_attention(window, masked):
    T = 256
    q, k, v = qkv(T, 4, 2, 64, jnp.bfloat16)
    segments = documents(T) if masked else None
    kernel = values_and_gradients(lambda *x: cudnn(*x, segments, window), q, k, v)
    plain = values_and_gradients(lambda *x: attend(*x, causal_mask(T, segments, window)), q, k, v)
    for ours, theirs in zip(kernel, plain, strict=True):
        # both round weights and results to bfloat16, of 8 bits: values and gradients of order 1 to some 2^-6
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=0.06)


class Device:
    """As much of a device as the choice reads."""

    def __init__(self, platform: str, device_kind: str):
        self.platform, self.device_kind = platform, device_kind


def mesh_of(platform: str, kind: str, **axes: int):
    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1} | axes
    devices = np.empty(tuple(sizes.values()), object)
    devices.fill(Device(platform, kind))
    return types.SimpleNamespace(devices=devices, shape=sizes)


def model(**changes) -> ModelConfig:
    fields = {"vocab_size": 64, "context_length": 1024, "n_layer": 2, "d_model": 64, "n_head": 4, "d_ff": 128}
    return ModelConfig(**(fields | {"dtype": Dtype.BFLOAT16} | changes))


def chosen(config: ModelConfig, mesh):
    return choose(config, config.context_length, mesh, RULES)


def test_each_platform_has_its_kernel_and_the_cpu_none():
    assert chosen(model(), mesh_of("tpu", "TPU v5")).kernel is Kernel.SPLASH
    assert chosen(model(), mesh_of("gpu", "NVIDIA H100")).kernel is Kernel.CUDNN
    assert isinstance(chosen(model(), mesh_of("cpu", "cpu")), Plain)
    assert isinstance(chosen(model(), mesh_of("gpu", "AMD Instinct MI300X")), Plain)


@pytest.mark.parametrize(
    ("changes", "platform", "axes", "reason"),
    [
        ({"context_length": 1000}, "tpu", {}, "1000 tokens are no multiple of 128"),
        ({}, "tpu", {"sequence": 2}, "the sequence is spread over devices"),
        ({"dtype": Dtype.FLOAT32}, "gpu", {}, "cuDNN has no float32"),
        ({"attention_softcap": 50.0}, "gpu", {}, "cuDNN has no soft cap of scores (attention_softcap 50.0)"),
        ({"d_head": 160}, "gpu", {}, "head width 160 is no multiple of 8 up to 128"),
    ],
)
def test_what_does_not_suit_a_kernel_is_computed_plainly_and_says_why(changes, platform, axes, reason):
    kind = "TPU v5" if platform == "tpu" else "NVIDIA H100"
    assert reason in str(chosen(model(**changes), mesh_of(platform, kind, **axes)))


def test_rows_and_heads_lie_where_the_rules_put_them():
    fused = chosen(model(window=7, attention_softcap=50.0), mesh_of("tpu", "TPU v5", fsdp=4, tensor=2))
    assert (fused.rows, fused.heads, fused.windows) == (("data", "fsdp"), ("tensor",), (7,))


@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(2, 4, 2), (2, 4, 1), (3, 3, 3)])
def test_a_kernel_runs_on_the_rows_and_heads_of_each_device(monkeypatch, rows, heads, kv_heads):
    """One device of a mesh of two by two (abstract: nothing is run) is given its share, or all where it is odd."""
    given = []

    def kernel(q, k, v, segments, window, scoring):
        given.append((q.shape, k.shape))
        return q

    monkeypatch.setattr("lm.model.fused.splash", kernel)
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
    fused = Fused(Kernel.SPLASH, mesh, ("data",), ("tensor",))
    q = jax.ShapeDtypeStruct((rows, 8, heads, 4), jnp.float32)
    k = jax.ShapeDtypeStruct((rows, 8, kv_heads, 4), jnp.float32)
    assert jax.eval_shape(lambda q, k: fused(q, k, k, (None,), USUAL), q, k).shape == q.shape
    (q_shape, k_shape), share = given[0], 2 if rows % 2 == 0 else 1
    assert q_shape == (rows // share, 8, heads // share, 4)
    # each device's query heads find the key-value heads of their own group
    assert q_shape[2] % k_shape[2] == 0
    assert k_shape[2] == (kv_heads // share if kv_heads % share == 0 else q_shape[2])


def test_where_layers_differ_each_runs_the_kernel_of_its_window(monkeypatch):
    def kernel(q, k, v, segments, window, scoring):
        return q * (0.0 if window is None else window)

    monkeypatch.setattr("lm.model.fused.splash", kernel)
    fused = Fused(
        Kernel.SPLASH, jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)), ("data",), (), windows=(7, None)
    )
    q = jnp.ones((2, 8, 4, 4))
    inside, everywhere = (fused.sees(8, None, window) for window in fused.windows)
    run = jax.jit(lambda seen: fused(q, q, q, seen, USUAL))
    assert (run(inside) == 7.0).all()
    assert (run(everywhere) == 0.0).all()
