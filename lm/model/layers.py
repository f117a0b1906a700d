"""The two layers that everything else is made of: a projection with named axes, and a normalisation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm.model.config import ModelConfig, Norm


def residual_std(config: ModelConfig) -> float:
    """Of matrices that write to the residual stream, so that its variance does not grow with the sublayers."""
    return config.matrix_scale * ((config.attentions + 1) * config.n_layer) ** -0.5


def named(init: Callable[..., jax.Array], axes: tuple[str, ...]) -> Callable[..., Any]:
    """The initialiser `init` of an array whose axes carry logical names."""
    return nn.with_logical_partitioning(init, axes)


def normal(std: float, axes: tuple[str, ...]) -> Callable[..., Any]:
    """An initialiser of Gaussian numbers whose axes carry logical names."""
    return named(nn.initializers.normal(std), axes)


def with_rank(x: jax.Array, ndim: int) -> jax.Array:
    """`x` with leading axes of length 1 up to `ndim` axes: broadcasting is always asked for, never implied."""
    return jnp.expand_dims(x, tuple(range(ndim - x.ndim)))


def softcapped(x: jax.Array, cap: float | None) -> jax.Array:
    """`x` held softly between -cap and cap: cap tanh(x / cap); as it is without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Projection(nn.Module):
    """A matrix product over the last `contracted` axes of the input, with an optional bias.

    The kernel has the contracted axes first, then the produced ones; it is stored in float32 and used in `dtype`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: DTypeLike
    std: float
    contracted: int = 1
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", normal(self.std, self.axes), self.shape, jnp.float32)
        y = jnp.tensordot(x, kernel.astype(self.dtype), self.contracted)
        if not self.bias:
            return y
        zeros = named(nn.initializers.zeros_init(), self.axes[self.contracted :])
        bias = self.param("bias", zeros, self.shape[self.contracted :], jnp.float32)
        return y + with_rank(bias.astype(self.dtype), y.ndim)


class Normalise(nn.Module):
    """LayerNorm or RMSNorm over the last axis, computed in float32 and returned in the input's type.

    LayerNorm has a bias where the model has biases; RMSNorm never has one (Zhang & Sennrich 2019, arXiv:1910.07467).
    """

    kind: Norm
    eps: float
    bias: bool
    axis: str = "norm"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = (x.shape[-1],)
        ones = named(nn.initializers.ones_init(), (self.axis,))
        y = x.astype(jnp.float32)
        if self.kind is Norm.LAYERNORM:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y * with_rank(self.param("scale", ones, width, jnp.float32), y.ndim)
        if self.kind is Norm.LAYERNORM and self.bias:
            zeros = named(nn.initializers.zeros_init(), (self.axis,))
            y = y + with_rank(self.param("bias", zeros, width, jnp.float32), y.ndim)
        return y.astype(x.dtype)
