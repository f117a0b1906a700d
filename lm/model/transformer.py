"""The transformer, a decoder alone or behind an encoder, or recurrent layers: token ids in, logits out.

Parameters are float32 and stacked over layers. Their logical axis names are `vocab`, `embed`, `position`, `heads`,
`kv_heads`, `head` (the components of one head), `hidden` (those of a recurrent state), `gates`, `mlp`, `experts`,
`norm` (scales), `patch` and `layers`; activations are constrained by `batch`, `lookup` (rows out of a table),
`sequence`, `keys` (positions that are attended to), `embed`, `heads`, `kv_heads`, `head`, `hidden`, `gates`, `mlp` and
`vocab`.
Which of them is sharded over which devices is not known here: without rules and a mesh (`lm.parallel.rules.sharded`)
the names mean nothing.
"""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.base.errors import UsageError
from lm.model.attention import Attention, Plain, Source
from lm.model.block import RESIDUAL, Block, stack
from lm.model.cache import EMPTY, Cache, Memory, Recall, recall, recall_source
from lm.model.config import ModelConfig, NormPlacement, Positions
from lm.model.layers import Normalise, normal, softcapped
from lm.model.patches import Patches
from lm.model.positions import LearnedPositions, Rotation, document_positions, rotation, sinusoids
from lm.model.recurrent import Course

# What tables give where their widths lie: the next constraint turns widths into rows. In one constraint XLA cannot.
LOOKED_UP = ("lookup", "sequence", "embed")


class Reading(NamedTuple):
    """What an encoder reads, at which positions, and who sees whom, [B or 1, S or 1, S]."""

    tokens_BS: jax.Array
    position_BS: jax.Array
    mask_BSS: jax.Array


class Transformer(nn.Module):
    """A decoder (the layout of GPT-2, and of Llama and others with their choices), which may have an encoder.

    The encoder reads the first tokens of a row (`config.encoder`), all of a shorter one. The decoder begins with the
    last of them, so that a row has logits from there on.

    Parameters are stacked over layers; `unstacked` reads them layer by layer (`lm.decode.weights` takes them apart).
    `attention` is what whole rows attend with (`lm.model.fused` has kernels); a cache has its own way.
    """

    config: ModelConfig
    unstacked: bool = False
    attention: Attention = Plain()

    def __call__(
        self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None, patches_BTP: jax.Array | None = None
    ) -> jax.Array:
        """The logits of whole rows, float32 [B, T, V]; behind an encoder those of the last T - S + 1 places.

        `segments_BT` holds the document id of each position (int32, non-decreasing along T): attention then stays
        inside a document and positions restart at each document's first token. Without it the row is one document.
        `patches_BTP` holds the numbers of those places whose token is `lm.model.patches.PATCH`.

        Raises:
          UsageError: a row longer than the table of learned positions, or patches of another width than the model's.
        """
        config, length = self.config, tokens_BT.shape[1]
        if config.positions is Positions.LEARNED and length > config.context_length:
            raise UsageError(
                f"a window of {length} tokens is longer than context_length {config.context_length}",
                where="config.model",
                do="Learned positions end there: use a shorter window.",
            )
        read = across = None
        if config.encoder is not None:
            S = min(config.encoder.source_length, length)
            document_BT = jnp.zeros((1, length), jnp.int32) if segments_BT is None else segments_BT
            source_BS, document_BT = document_BT[:, :S], document_BT[:, S - 1 :]
            read = Reading(tokens_BT[:, :S], document_positions(source_BS), _same(source_BS, source_BS))
            across = _same(document_BT, source_BS)
            tokens_BT, length = tokens_BT[:, S - 1 :], length - S + 1
            segments_BT = None if segments_BT is None else document_BT
        if segments_BT is None:
            position_BT = jnp.arange(length, dtype=jnp.int32)[None, :]
        else:
            position_BT = document_positions(segments_BT)
        seen: tuple[Any, ...]
        if config.mixer.recurrent:
            seen = (Course() if segments_BT is None else Course(begins_BT=position_BT == 0),)
        else:
            seen = tuple(self.attention.sees(length, segments_BT, window) for window in config.window_kinds)
        logits_BTV, _ = self._through(
            tokens_BT, position_BT, seen, None, patches_BTP=patches_BTP, read=read, across=across
        )
        return logits_BTV

    def extend(
        self, tokens_BT: jax.Array, count_B: jax.Array, cache: Cache, *, fresh: bool = False, last: int | None = None
    ) -> tuple[jax.Array, Cache]:
        """Goes on from `cache` with the last `count_B` of the T tokens of each row (what is left of them is padding).

        Returns float32 logits of the `last` places (None: all T) and the cache with the tokens. `fresh` promises that
        the cache holds nothing yet, and saves reading it. Room is the caller's business: without it the oldest tokens
        are forgotten, as in a sliding window.

        Behind an encoder the tokens of a fresh cache are its source, the last ones of them that it takes, and the
        decoder begins with the last: the logits are of one place.
        """
        read = across = None
        if self.config.encoder is not None:
            position_BS = None
            if fresh:
                tokens_BS = tokens_BT[:, -self.config.encoder.source_length :]
                position_BS = _right_aligned(count_B, tokens_BS.shape[1])
                read = Reading(tokens_BS, jnp.maximum(position_BS, 0), (position_BS != EMPTY)[:, None])
                tokens_BT, count_B = tokens_BT[:, -1:], jnp.minimum(count_B, 1)
            cache, across = recall_source(cache, position_BS)
        index_BT = _right_aligned(count_B, tokens_BT.shape[1])
        position_BT = jnp.where(index_BT >= 0, cache.length_B[:, None] + index_BT, EMPTY)
        seen: tuple[Any, ...]
        if self.config.mixer.recurrent:
            seen = (Course(index_BT == 0, count_B > 0),)
            cache = cache._replace(length_B=cache.length_B + count_B)
        else:
            # Only the masks differ between windows.
            (cache, *_), seen = zip(
                *(recall(cache, position_BT, window, fresh) for window in self.config.window_kinds), strict=True
            )
        first = Memory(cache, 0 if self.unstacked else jnp.zeros((), jnp.int32))
        position_BT = jnp.maximum(position_BT, 0)
        logits_BTV, memory = self._through(tokens_BT, position_BT, seen, first, last, read=read, across=across)
        return logits_BTV, cache if memory is None else memory.cache

    @nn.compact
    def _through(
        self,
        tokens_BT: jax.Array,
        position_BT: jax.Array,
        seen: tuple[Any, ...],
        memory: Memory | None,
        last: int | None = None,
        *,
        patches_BTP: jax.Array | None = None,
        read: Reading | None = None,
        across: jax.Array | Recall | None = None,
    ) -> tuple[jax.Array, Memory | None]:
        config, dtype = self.config, self.config.dtype.value
        table_VD = self.param(
            "embedding", normal(config.init_scale, ("vocab", "embed")), (config.vocab_size, config.d_model), jnp.float32
        )
        if config.positions is Positions.LEARNED:
            count = config.position_count
            position = LearnedPositions(count, config.d_model, config.init_scale, dtype, name="position")

        patches = Patches(config, name="patches")

        def looked_up(
            tokens_BT: jax.Array, position_BT: jax.Array, patches_BTP: jax.Array | None = None
        ) -> tuple[jax.Array, Rotation | None]:
            x_BTD = jnp.take(table_VD, tokens_BT, axis=0).astype(dtype)
            if config.embedding_scale is not None:
                x_BTD = x_BTD * config.embedding_scale
            x_BTD = patches(x_BTD, tokens_BT, patches_BTP)
            turn = None
            if config.positions is Positions.LEARNED:
                x_BTD = x_BTD + position(position_BT)
            elif config.positions is Positions.SINUSOIDAL:
                x_BTD = x_BTD + sinusoids(position_BT, config.d_model).astype(dtype)
            elif config.positions is Positions.ROPE:
                turn = rotation(position_BT, config.head_width, config.rope_base, config.rope_scaling)
            x_BTD = nn.with_logical_constraint(x_BTD, LOOKED_UP)
            return nn.with_logical_constraint(x_BTD, RESIDUAL), turn

        def ended(x_BTD: jax.Array, name: str) -> jax.Array:
            if config.norm_placement is NormPlacement.POST:  # which has left it normalised
                return x_BTD
            return Normalise(config.norm, config.norm_eps, config.bias, name=name)(x_BTD)

        source = None
        if across is not None:
            source = Source(None, across)
            if read is not None:
                x_BSD, turn = looked_up(read.tokens_BS, read.position_BS)
                encoder = stack(config.encoder_stack, Plain(), "encoder")
                (x_BSD, _), _ = encoder((x_BSD, None), turn, (read.mask_BSS,))
                source = Source(ended(x_BSD, "encoder_norm"), across)
        x_BTD, turn = looked_up(tokens_BT, position_BT, patches_BTP)
        carry = x_BTD, memory
        windowed = [window is not None for window in config.windows]
        if self.unstacked:
            for layer in range(config.n_layer):
                block = Block(config, self.attention, name=f"layer_{layer}")
                carry, _ = block(carry, turn, seen, source, windowed[layer])
        else:
            differing = () if len(seen) == 1 else (jnp.array(windowed),)
            carry, _ = stack(config, self.attention)(carry, turn, seen, source, *differing)
        x_BTD, memory = carry
        if last is not None:
            x_BTD = x_BTD[:, -last:]
        x_BTD = ended(x_BTD, "final_norm")
        if config.width_ratio != 1:
            x_BTD = x_BTD / config.width_ratio  # and with it the logits, which are more
        if config.tied_embedding:
            head_DV = table_VD.T
        else:
            head_DV = self.param(
                "head", normal(config.init_scale, ("embed", "vocab")), (config.d_model, config.vocab_size), jnp.float32
            )
        logits_BTV = jnp.einsum("BTD,DV->BTV", x_BTD, head_DV.astype(dtype), preferred_element_type=jnp.float32)
        logits_BTV = softcapped(logits_BTV, config.logit_softcap)
        return nn.with_logical_constraint(logits_BTV, ("batch", "sequence", "vocab")), memory


def _same(document_BT: jax.Array, document_BS: jax.Array) -> jax.Array:
    """Whether a position lies in the document of another, [B, T, S]."""
    return document_BT[:, :, None] == document_BS[:, None, :]


def _right_aligned(count_B: jax.Array, length: int) -> jax.Array:
    """Positions of the last `count_B` of so many tokens, -1 before them, [B, T]; from 0 on where all are counted."""
    count_B1 = jnp.minimum(count_B, length)[:, None]
    index_BT = jnp.arange(length, dtype=jnp.int32)[None, :] - (length - count_B1)
    return jnp.where(index_BT >= 0, index_BT, EMPTY)


def abstract_variables(config: ModelConfig) -> Any:
    """What `Transformer.init` would make: shapes and types in boxes that name logical axes. Nothing is computed."""
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


def expected_first_loss(config: ModelConfig) -> float:
    """Mean cross-entropy in nats/token at initialisation: ln V + D s^2 / 2, s being `config.init_scale`.

    What the head reads has unit mean square: logits are Gaussian with variance D s^2, independent of the target. Width
    scaling makes them smaller.
    """
    return math.log(config.vocab_size) + config.d_model * (config.init_scale / config.width_ratio) ** 2 / 2
