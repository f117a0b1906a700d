"""The position-wise sublayer."""

import flax.linen as nn
import jax

from lm.model.config import FeedForward, ModelConfig
from lm.model.layers import INIT_STD, Projection


class PositionWise(nn.Module):
    """Two matrices around a GELU (its tanh form, as GPT-2), or three with a SiLU gate (Shazeer 2020, arXiv:2002.05202)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        dtype, width = config.dtype.value, config.d_ff
        into = {"shape": (config.d_model, width), "axes": ("embed", "mlp"), "dtype": dtype, "bias": config.bias}
        hidden_BTF = Projection(**into, name="up")(x_BTD)
        if config.feed_forward is FeedForward.SWIGLU:
            hidden_BTF = hidden_BTF * nn.silu(Projection(**into, name="gate")(x_BTD))
        else:
            hidden_BTF = nn.gelu(hidden_BTF, approximate=True)
        hidden_BTF = nn.with_logical_constraint(hidden_BTF, ("batch", "sequence", "mlp"))
        return Projection(
            (width, config.d_model),
            ("mlp", "embed"),
            dtype,
            std=INIT_STD * (2 * config.n_layer) ** -0.5,
            bias=config.bias,
            name="down",
        )(hidden_BTF)
