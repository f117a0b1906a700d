"""The position-wise sublayer."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.model.config import FeedForward, ModelConfig
from lm.model.layers import Projection, residual_std

_tanh_gelu, _exact_gelu = (partial(nn.gelu, approximate=approximate) for approximate in (True, False))
_FUNCTIONS: dict[FeedForward, Callable[[jax.Array], jax.Array]] = {
    FeedForward.RELU: nn.relu,
    FeedForward.RELU2: lambda x: jnp.square(nn.relu(x)),
    FeedForward.GELU: _tanh_gelu,
    FeedForward.GELU_EXACT: _exact_gelu,
    FeedForward.SWIGLU: nn.silu,
    FeedForward.GEGLU: _tanh_gelu,
    FeedForward.GEGLU_EXACT: _exact_gelu,
}


def hidden(kind: FeedForward, widened: Callable[[str], jax.Array]) -> jax.Array:
    """What lies between the matrices; `widened` gives the products with "up" and, where there is a gate, "gate"."""
    function = _FUNCTIONS[kind]
    return function(widened("gate")) * widened("up") if kind.gated else function(widened("up"))


class PositionWise(nn.Module):
    """The matrices of `FeedForward`, each position by itself; `width` where it is not the model's d_ff."""

    config: ModelConfig
    width: int | None = None

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        D, F, dtype = config.d_model, self.width or config.d_ff, config.dtype.value

        def widened(name: str) -> jax.Array:
            return Projection((D, F), ("embed", "mlp"), dtype, config.matrix_scale, bias=config.bias, name=name)(x_BTD)

        hidden_BTF = hidden(config.feed_forward, widened)
        hidden_BTF = nn.with_logical_constraint(hidden_BTF, ("batch", "sequence", "mlp"))
        std = residual_std(config)
        return Projection((F, D), ("mlp", "embed"), dtype, std, bias=config.bias, name="down")(hidden_BTF)
