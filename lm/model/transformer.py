"""The decoder-only transformer: token ids in, logits out.

Parameters are float32 and stacked over layers. Their logical axis names are `vocab`, `embed`, `position`, `heads`,
`kv_heads`, `head` (the components of one head), `mlp`, `norm` (scales) and `layers`; activations are constrained by
`batch`, `sequence`, `keys` (positions that are attended to), `embed`, `heads`, `kv_heads`, `head`, `mlp` and `vocab`.
Which of them is sharded over which devices is not known here: without rules and a mesh (`lm.parallel.rules.sharded`)
the names mean nothing.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.base.errors import UsageError
from lm.model.attention import Attention, Plain, SelfAttention
from lm.model.cache import EMPTY, Cache, Memory, recall
from lm.model.config import ModelConfig, Positions, Remat
from lm.model.feedforward import PositionWise
from lm.model.layers import Normalise, normal
from lm.model.positions import LearnedPositions, Rotation, document_positions, rotation

RESIDUAL = ("batch", "sequence", "embed")


Carry = tuple[jax.Array, Memory | None]


class Block(nn.Module):
    """One pre-norm layer; its result is a pair because `scan` wants a carry and an output."""

    config: ModelConfig
    attention: Attention = Plain()

    @nn.compact
    def __call__(self, carry: Carry, turn: Rotation | None, seen: Any) -> tuple[Carry, None]:
        config = self.config
        x_BTD, memory = carry
        y_BTD = Normalise(config.norm, config.norm_eps, config.bias, name="attention_norm")(x_BTD)
        y_BTD, memory = SelfAttention(config, self.attention, name="attention")(y_BTD, turn, seen, memory)
        x_BTD = x_BTD + y_BTD
        y_BTD = Normalise(config.norm, config.norm_eps, config.bias, name="feed_forward_norm")(x_BTD)
        x_BTD = x_BTD + PositionWise(config, name="feed_forward")(y_BTD)
        return (nn.with_logical_constraint(x_BTD, RESIDUAL), memory), None


class Transformer(nn.Module):
    """Decoder-only, pre-norm (the layout of GPT-2, and of Llama with its choices).

    Parameters are stacked over layers; `unstacked` reads them layer by layer (`lm.decode.weights` takes them apart).
    `attention` is what whole rows attend with (`lm.model.fused` has kernels); a cache has its own way.
    """

    config: ModelConfig
    unstacked: bool = False
    attention: Attention = Plain()

    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        """The logits of whole rows, float32 [B, T, V].

        `segments_BT` holds the document id of each position (int32, non-decreasing along T): attention then stays
        inside a document and positions restart at each document's first token. Without it the row is one document.

        Raises:
          UsageError: a row longer than the table of learned positions.
        """
        config, length = self.config, tokens_BT.shape[1]
        if config.positions is Positions.LEARNED and length > config.context_length:
            raise UsageError(
                f"a window of {length} tokens is longer than context_length {config.context_length}",
                where="config.model",
                do="Learned positions end there: use a shorter window.",
            )
        if segments_BT is None:
            position_BT = jnp.arange(length, dtype=jnp.int32)[None, :]
        else:
            position_BT = document_positions(segments_BT)
        seen = self.attention.sees(length, segments_BT, config.window)
        logits_BTV, _ = self._through(tokens_BT, position_BT, seen, None)
        return logits_BTV

    def extend(
        self, tokens_BT: jax.Array, count_B: jax.Array, cache: Cache, *, fresh: bool = False, last: int | None = None
    ) -> tuple[jax.Array, Cache]:
        """Goes on from `cache` with the last `count_B` of the T tokens of each row (what is left of them is padding).

        Returns float32 logits of the `last` places (None: all T) and the cache with the tokens. `fresh` promises that
        the cache holds nothing yet, and saves reading it. Room is the caller's business: without it the oldest tokens
        are forgotten, as in a sliding window.
        """
        T = tokens_BT.shape[1]
        index_BT = jnp.arange(T, dtype=jnp.int32)[None, :] - (T - count_B[:, None])
        position_BT = jnp.where(index_BT >= 0, cache.length_B[:, None] + index_BT, EMPTY)
        cache, seen = recall(cache, position_BT, self.config.window, fresh)
        first = Memory(cache, 0 if self.unstacked else jnp.zeros((), jnp.int32))
        logits_BTV, memory = self._through(tokens_BT, jnp.maximum(position_BT, 0), seen, first, last)
        return logits_BTV, cache if memory is None else memory.cache

    @nn.compact
    def _through(
        self,
        tokens_BT: jax.Array,
        position_BT: jax.Array,
        seen: Any,
        memory: Memory | None,
        last: int | None = None,
    ) -> tuple[jax.Array, Memory | None]:
        config, dtype = self.config, self.config.dtype.value
        table_VD = self.param(
            "embedding", normal(config.init_scale, ("vocab", "embed")), (config.vocab_size, config.d_model), jnp.float32
        )
        x_BTD = jnp.take(table_VD, tokens_BT, axis=0).astype(dtype)
        turn = None
        if config.positions is Positions.LEARNED:
            table = LearnedPositions(config.context_length, config.d_model, config.init_scale, dtype, name="position")
            x_BTD = x_BTD + table(position_BT)
        else:
            turn = rotation(position_BT, config.head_width, config.rope_base)
        carry = nn.with_logical_constraint(x_BTD, RESIDUAL), memory
        if self.unstacked:
            for layer in range(config.n_layer):
                carry, _ = Block(config, self.attention, name=f"layer_{layer}")(carry, turn, seen)
        else:
            carry, _ = _stack(config, self.attention)(carry, turn, seen)
        x_BTD, memory = carry
        if last is not None:
            x_BTD = x_BTD[:, -last:]
        x_BTD = Normalise(config.norm, config.norm_eps, config.bias, name="final_norm")(x_BTD)
        if config.tied_embedding:
            head_DV = table_VD.T
        else:
            head_DV = self.param(
                "head", normal(config.init_scale, ("embed", "vocab")), (config.d_model, config.vocab_size), jnp.float32
            )
        logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head_DV.astype(dtype), preferred_element_type=jnp.float32)
        return nn.with_logical_constraint(logits_BTV, ("batch", "sequence", "vocab")), memory


def expected_first_loss(config: ModelConfig) -> float:
    """Mean cross-entropy in nats/token at initialisation: ln V + D s^2 / 2, s being `config.init_scale`.

    The final norm has unit mean square, so that logits are Gaussian with variance D s^2, independent of the target.
    """
    return math.log(config.vocab_size) + config.d_model * config.init_scale**2 / 2


def _stack(config: ModelConfig, attention: Attention) -> nn.Module:
    block = Block
    if config.remat is not Remat.NONE:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat is Remat.DOTS else None
        # Inside a loop nothing can be merged with the forward pass; unrolled, XLA would undo the recomputation.
        block = nn.remat(Block, policy=policy, prevent_cse=config.unroll_layers)
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=nn.broadcast,
        length=config.n_layer,
        unroll=config.n_layer if config.unroll_layers else 1,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )(config, attention, name="layers")
