"""Attention: which keys a query may see, the weighted sum itself, and the sublayer around it."""

import dataclasses
from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.model.cache import Memory, Recall, remember, remembered
from lm.model.config import ModelConfig, Norm, QkNorm
from lm.model.execution import Products
from lm.model.layers import Normalise, Projection, residual_std, softcapped
from lm.model.positions import Rotation, rotate

JOINED = "query_key_value"


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How the product of a query and a key becomes a score: times `scale`, C^-0.5 where it is None, then c tanh(s / c)
    of a `softcap` c (Bello et al. 2016, arXiv:1611.09940; Gemma 2)."""

    scale: float | None = None
    softcap: float | None = None


USUAL = Scoring()


def causal_mask(length: int, segments_BT: jax.Array | None, window: int | None = None) -> jax.Array:
    """True where query t may see key s: s <= t, t - s < window and, with document ids, the same document.

    [B or 1, T, S].
    """
    query = jax.lax.broadcasted_iota(jnp.int32, (1, length, length), 1)
    key = jax.lax.broadcasted_iota(jnp.int32, (1, length, length), 2)
    mask_BTS = key <= query
    if window is not None:
        mask_BTS = mask_BTS & (query - key < window)
    if segments_BT is None:
        return mask_BTS
    return mask_BTS & (segments_BT[:, :, None] == segments_BT[:, None, :])


def attend(
    q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, mask_BTS: jax.Array, scoring: Scoring = USUAL
) -> jax.Array:
    """Scaled dot-product attention with H query heads in K equal groups (Ainslie et al. 2023, arXiv:2305.13245).

    The mask is boolean, [B or 1, T, S]. A masked weight is exactly 0, and a query that sees no key gets exactly 0.
    Products are in the inputs' type with float32 sums; the softmax is in float32. Keys and values are never repeated.
    Returns [B, T, H, C] in the inputs' type.
    """
    q_BTKGC = _grouped(q_BTHC, k_BSKC.shape[2], scoring)
    scores_BKGTS = jnp.einsum("BTKGC,BSKC->BKGTS", q_BTKGC, k_BSKC, preferred_element_type=jnp.float32)
    weights_BKGTS = _weights(scores_BKGTS, mask_BTS[:, None, None], scoring).astype(q_BTHC.dtype)
    return jnp.einsum("BKGTS,BSKC->BTKGC", weights_BKGTS, v_BSKC).reshape(q_BTHC.shape)


def attend_cached(
    q_BTHC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, mask_BTS: jax.Array, scoring: Scoring
) -> jax.Array:
    """`attend` over keys and values as the cache holds them: a head's slots lie together, so that nothing is moved."""
    (B, T, H, C), (_, K, S, _) = q_BTHC.shape, k_BKSC.shape
    q_BKGTC = jnp.moveaxis(_grouped(q_BTHC, K, scoring), 1, 3)
    # Batches of plain matrices, N = B K, for a single token with the keys on the left: else XLA on CPU copies them,
    # transposed for a single query and without axes of length 1.
    k_NSC, v_NSC, q_NMC = (x.reshape(B * K, -1, C) for x in (k_BKSC, v_BKSC, q_BKGTC))
    if T == 1:
        scores_NMS = jnp.einsum("NSC,NMC->NSM", k_NSC, q_NMC, preferred_element_type=jnp.float32).swapaxes(1, 2)
    else:
        scores_NMS = jnp.einsum("NMC,NSC->NMS", q_NMC, k_NSC, preferred_element_type=jnp.float32)
    scores_BKGTS = scores_NMS.reshape(B, K, H // K, T, S)
    weights_BKGTS = _weights(scores_BKGTS, mask_BTS[:, None, None], scoring).astype(q_BTHC.dtype)
    out_NMC = jnp.einsum("NMS,NSC->NMC", weights_BKGTS.reshape(B * K, -1, S), v_NSC)
    return jnp.moveaxis(out_NMC.reshape(q_BKGTC.shape), 3, 1).reshape(q_BTHC.shape)


def _for_all_queries(x_BSKC: jax.Array) -> jax.Array:
    # Made where its tokens lie, and only then sent: else what they are made of would be, which is wider.
    x_BSKC = nn.with_logical_constraint(x_BSKC, ("batch", "sequence", "kv_heads", "head"))
    return nn.with_logical_constraint(x_BSKC, ("batch", "keys", "kv_heads", "head"))


def scaled(q_BTHC: jax.Array, scoring: Scoring) -> jax.Array:
    """Queries times the scale of their scores."""
    return q_BTHC * (q_BTHC.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)


def _grouped(q_BTHC: jax.Array, kv_heads: int, scoring: Scoring) -> jax.Array:
    B, T, H, C = q_BTHC.shape
    return scaled(q_BTHC, scoring).reshape(B, T, kv_heads, H // kv_heads, C)


def _weights(scores: jax.Array, mask: jax.Array, scoring: Scoring) -> jax.Array:
    """The softmax over the keys that the mask leaves."""
    scores = jnp.where(mask, softcapped(scores, scoring.softcap), -jnp.inf)
    highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    # A row without any key has maximum -inf, and -inf - -inf would be NaN.
    weights = jnp.exp(scores - jnp.where(highest == -jnp.inf, 0.0, highest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


class Attention(Protocol):
    """How rows attend to themselves: causally, in a sliding window where the model has one, inside documents."""

    @property
    def products(self) -> Products:
        """What it executes."""

    def sees(self, length: int, segments_BT: jax.Array | None, window: int | None) -> Any:
        """What every layer needs to know of who sees whom; a pytree."""

    def __call__(
        self, q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, seen: Any, scoring: Scoring
    ) -> jax.Array:
        """The weighted sums of one layer, [B, T, H, C] in the inputs' type."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """`attend` under `causal_mask`, for any shape, type and device; `reason` says why it is no kernel."""

    reason: str = "asked for"

    @property
    def products(self) -> Products:
        """Two products backward for each one forward, over all T x T."""
        return Products(backward=4, causal=False)

    def sees(self, length: int, segments_BT: jax.Array | None, window: int | None) -> jax.Array:
        """The mask."""
        return causal_mask(length, segments_BT, window)

    def __call__(
        self, q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, seen: jax.Array, scoring: Scoring
    ) -> jax.Array:
        """Holds the scores of all T x T."""
        return attend(q_BTHC, k_BSKC, v_BSKC, seen, scoring)

    def __str__(self) -> str:
        return f"plain attention, all T x T scores: {self.reason}"


class SelfAttention(nn.Module):
    """Queries, keys and values, optional QK-norm (RMSNorm), rotary turn, attention, output projection.

    Parameters in which the first three are one matrix, named `JOINED`, are used as they are.

    QK-norm follows Dehghani et al. 2023, arXiv:2302.05442, section 2.1, with one scale a component shared by all heads,
    or one norm over all heads (`QkNorm`). With a memory the keys and values go through it, and it is returned too.
    """

    config: ModelConfig
    attention: Attention = Plain()

    @nn.compact
    def __call__(
        self, x_BTD: jax.Array, turn: Rotation | None, seen: Any, memory: Memory | None
    ) -> tuple[jax.Array, Memory | None]:
        config, H, K = self.config, self.config.n_head, self.config.kv_heads
        if self.has_variable("params", JOINED):
            joined_BTNC = _heads(config, x_BTD, JOINED, H + 2 * K, "heads")
            q_BTHC, k_BSKC, v_BSKC = jnp.split(joined_BTNC, (H, H + K), axis=2)
        else:
            q_BTHC, k_BSKC, v_BSKC = _queries(config, x_BTD), *_keys_and_values(config, x_BTD)
        q_BTHC, k_BSKC = _normalised(config, q_BTHC, "query_norm"), _normalised(config, k_BSKC, "key_norm")
        if turn is not None:
            q_BTHC, k_BSKC = rotate(q_BTHC, turn), rotate(k_BSKC, turn)
        q_BTHC = nn.with_logical_constraint(q_BTHC, ("batch", "sequence", "heads", "head"))
        k_BSKC, v_BSKC = _for_all_queries(k_BSKC), _for_all_queries(v_BSKC)
        if isinstance(seen, Recall) and memory is not None:
            memory, k_BKSC, v_BKSC = remember(memory, seen, k_BSKC, v_BSKC)
            out_BTHC = attend_cached(q_BTHC, k_BKSC, v_BKSC, seen.mask_BTS, _scoring(config))
        else:
            out_BTHC = self.attention(q_BTHC, k_BSKC, v_BSKC, seen, _scoring(config))
        return _out(config, out_BTHC), memory


class Source(NamedTuple):
    """What a decoder attends to beside itself: the encoder's output, or None where a cache has its keys and values.

    `seen` is a mask [B or 1, T, S]; with a cache, where keys and values are kept and which of its slots hold any.
    """

    x_BSD: jax.Array | None
    seen: jax.Array | Recall


class CrossAttention(nn.Module):
    """`SelfAttention` with the keys and values of a source, none of them turned (Vaswani et al. 2017, section 3.2.3).

    With a memory they are kept in its `source` where they are given, and read from it in any case.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, source: Source, memory: Memory | None) -> tuple[jax.Array, Memory | None]:
        config, scoring = self.config, _scoring(self.config)
        q_BTHC = _normalised(config, _queries(config, x_BTD), "query_norm")
        q_BTHC = nn.with_logical_constraint(q_BTHC, ("batch", "sequence", "heads", "head"))
        if source.x_BSD is not None:
            k_BSKC, v_BSKC = _keys_and_values(config, source.x_BSD)
            k_BSKC, v_BSKC = _for_all_queries(_normalised(config, k_BSKC, "key_norm")), _for_all_queries(v_BSKC)
        if isinstance(source.seen, Recall):
            assert memory is not None
            assert memory.cache.source is not None
            kept = Memory(memory.cache.source, memory.layer)
            if source.x_BSD is not None:
                kept, *_ = remember(kept, source.seen, k_BSKC, v_BSKC)
            k_BKSC, v_BKSC = remembered(kept, q_BTHC.dtype)
            out_BTHC = attend_cached(q_BTHC, k_BKSC, v_BKSC, source.seen.mask_BTS, scoring)
            memory = memory._replace(cache=memory.cache._replace(source=kept.cache))
        else:
            out_BTHC = attend(q_BTHC, k_BSKC, v_BSKC, source.seen, scoring)
        return _out(config, out_BTHC), memory


def _scoring(config: ModelConfig) -> Scoring:
    return Scoring(config.score_scale, config.attention_softcap)


# What follows makes submodules of the attention that calls it.


def _heads(config: ModelConfig, x_BTD: jax.Array, name: str, count: int, axis: str) -> jax.Array:
    shape, axes, dtype = (config.d_model, count, config.head_width), ("embed", axis, "head"), config.dtype.value
    return Projection(shape, axes, dtype, config.matrix_scale, bias=config.qkv_biased, name=name)(x_BTD)


def _queries(config: ModelConfig, x_BTD: jax.Array) -> jax.Array:
    return _heads(config, x_BTD, "query", config.n_head, "heads")


def _keys_and_values(config: ModelConfig, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    key, value = (_heads(config, x_BSD, name, config.kv_heads, "kv_heads") for name in ("key", "value"))
    return key, value


def _normalised(config: ModelConfig, x_BTHC: jax.Array, name: str) -> jax.Array:
    """Queries or keys under QK-norm, as they are in a model without."""
    if not config.qk_norm:
        return x_BTHC
    each = config.qk_norm_over is QkNorm.HEAD
    axis = "head" if each else {"query_norm": "heads", "key_norm": "kv_heads"}[name]
    norm = Normalise(Norm.RMSNORM, config.norm_eps, bias=False, axis=axis, name=name)
    return norm(x_BTHC) if each else norm(x_BTHC.reshape(*x_BTHC.shape[:2], -1)).reshape(x_BTHC.shape)


def _out(config: ModelConfig, out_BTHC: jax.Array) -> jax.Array:
    shape, axes = (config.n_head, config.head_width, config.d_model), ("heads", "head", "embed")
    dtype, std = config.dtype.value, residual_std(config)
    return Projection(shape, axes, dtype, std, contracted=2, bias=config.bias, name="out")(out_BTHC)
