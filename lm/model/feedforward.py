"""The position-wise sublayer."""

import flax.linen as nn
import jax

from lm.model.config import FeedForward, ModelConfig
from lm.model.layers import Projection, residual_std


class PositionWise(nn.Module):
    """Two matrices around a GELU (tanh form, as GPT-2), or three with a SiLU gate (Shazeer 2020, arXiv:2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        D, F, dtype = config.d_model, config.d_ff, config.dtype.value

        def widened(name: str) -> jax.Array:
            return Projection((D, F), ("embed", "mlp"), dtype, config.init_scale, bias=config.bias, name=name)(x_BTD)

        if config.feed_forward is FeedForward.SWIGLU:
            hidden_BTF = nn.silu(widened("gate")) * widened("up")
        else:
            hidden_BTF = nn.gelu(widened("up"), approximate=True)
        hidden_BTF = nn.with_logical_constraint(hidden_BTF, ("batch", "sequence", "mlp"))
        std = residual_std(config)
        return Projection((F, D), ("mlp", "embed"), dtype, std, bias=config.bias, name="down")(hidden_BTF)
