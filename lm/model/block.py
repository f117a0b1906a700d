"""One layer, and the stack of them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.model.attention import Attention, CrossAttention, Plain, SelfAttention, Source
from lm.model.cache import Memory
from lm.model.config import FeedForward, ModelConfig, NormPlacement, Remat
from lm.model.experts import TOLD, MixtureOfExperts
from lm.model.feedforward import PositionWise
from lm.model.layers import Normalise
from lm.model.positions import Rotation
from lm.model.recurrent import Recurrence

RESIDUAL = ("batch", "sequence", "embed")

Carry = tuple[jax.Array, Memory | None]


class Block(nn.Module):
    """One layer, normalised as `NormPlacement` says; its result is a pair because `scan` wants a carry and an output.

    It mixes positions by attention or by a recurrence, and may do without a feed-forward sublayer.

    The norm before a sublayer, or after the sum, bears its name; the one of its output is its `out_norm`. A parallel
    block has one norm, which all sublayers read (Wang & Komatsuzaki 2021, GPT-J). Behind an encoder, attention to its
    output comes between the two others.
    """

    config: ModelConfig
    attention: Attention = Plain()

    @nn.compact
    def __call__(
        self,
        carry: Carry,
        turn: Rotation | None,
        seen: tuple[Any, ...],
        source: Source | None = None,
        windowed: jax.Array | bool = True,
    ) -> tuple[Carry, None]:
        """One layer.

        `seen` is for each of `config.window_kinds`; `windowed` says whether the layer has the window, where not all do.
        """
        config, placement = self.config, self.config.norm_placement

        def normalised(x_BTD: jax.Array, name: str) -> jax.Array:
            return Normalise(config.norm, config.norm_eps, config.bias, name=name)(x_BTD)

        def read(x_BTD: jax.Array, name: str) -> jax.Array:
            return normalised(x_BTD, f"{name}_norm") if placement.on_input else x_BTD

        def added(x_BTD: jax.Array, y_BTD: jax.Array, name: str) -> jax.Array:
            x_BTD = x_BTD + (normalised(y_BTD, f"{name}_out_norm") if placement.on_output else y_BTD)
            return normalised(x_BTD, f"{name}_norm") if placement is NormPlacement.POST else x_BTD

        x_BTD, memory = carry
        mixer_name = "recurrence" if config.mixer.recurrent else "attention"

        def mixed(x_BTD: jax.Array) -> tuple[jax.Array, Memory | None]:
            if config.mixer.recurrent:
                return Recurrence(config, name=mixer_name)(x_BTD, seen[0], memory)
            attention = SelfAttention(config, self.attention, name=mixer_name)
            return attention(x_BTD, turn, _of_layer(seen, windowed), memory)

        feed_forward = (MixtureOfExperts if config.experts else PositionWise)(config, name="feed_forward")
        cross = CrossAttention(config, name="cross")
        if config.parallel_block:
            h_BTD = normalised(x_BTD, "norm")
            y_BTD, memory = mixed(h_BTD)
            x_BTD = x_BTD + y_BTD
            if source is not None:
                y_BTD, memory = cross(h_BTD, source, memory)
                x_BTD = x_BTD + y_BTD
            x_BTD = x_BTD + feed_forward(h_BTD)
        else:
            y_BTD, memory = mixed(read(x_BTD, mixer_name))
            x_BTD = added(x_BTD, y_BTD, mixer_name)
            if source is not None:
                y_BTD, memory = cross(read(x_BTD, "cross"), source, memory)
                x_BTD = added(x_BTD, y_BTD, "cross")
            if config.feed_forward is not FeedForward.NONE:
                x_BTD = added(x_BTD, feed_forward(read(x_BTD, "feed_forward")), "feed_forward")
        memory = None if memory is None else memory._replace(layer=memory.layer + 1)
        return (nn.with_logical_constraint(x_BTD, RESIDUAL), memory), None


def _of_layer(seen: tuple[Any, ...], windowed: jax.Array | bool) -> Any:
    if len(seen) == 1:
        return seen[0]
    if isinstance(windowed, bool):
        return seen[not windowed]
    return jax.tree.map(lambda inside, everywhere: jnp.where(windowed, inside, everywhere), *seen)


def _keeps_products(primitive: Any, *operands: Any, **settings: Any) -> bool:
    """What `Remat.DOTS` keeps: products without batch axes, which leaves out attention's, and those by groups."""
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return dots(primitive, *operands, **settings) or primitive.name == "ragged_dot_general"


def stack(config: ModelConfig, attention: Attention, name: str = "layers") -> nn.Module:
    """All layers as one scan over their parameters, stacked [L, ...], and over `windowed` where they differ in it."""
    block = Block
    if config.remat is not Remat.NONE:
        policy = _keeps_products if config.remat is Remat.DOTS else None
        # Inside a loop nothing can be merged with the forward pass; unrolled, XLA would undo the recomputation.
        block = nn.remat(Block, policy=policy, prevent_cse=config.unroll_layers)
    return nn.scan(
        block,
        variable_axes={"params": 0, TOLD: 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast if len(config.window_kinds) == 1 else (nn.broadcast, nn.broadcast, nn.broadcast, 0),
        length=config.n_layer,
        unroll=config.n_layer if config.unroll_layers else 1,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(config, attention, name=name)
