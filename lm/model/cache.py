"""The cache: what layers remember of earlier tokens, an argument and a result, never hidden state.

Attention remembers keys and values. A recurrent layer has a state in their place: its cache has no slots.

Slots are shared by the rows of a batch, so that a step of one token writes one slot of all rows in place. Which token a
slot holds in a row is said by its position there; -1 says none. That one array carries left padding, rows of different
lengths, several turns of a conversation and the ring of a sliding window alike.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lm.model.config import CacheDtype, ModelConfig

EMPTY = -1
INT8_MAX = 127.0


class Cache(NamedTuple):
    """Keys and values of every layer in S slots, or its states; a pytree.

    `k_LBKSC` and `v_LBKSC` are in the model's type, or int8 with float32 scales (one a slot and head) beside them. They
    are one array, or taken `apart`: a tuple of L arrays [B K, S, C].
    `position_BS` (int32) is the position of the token in a slot, `length_B` counts the tokens that each row has seen,
    `next` (int32) those that the slots have seen: the next token goes to slot next % S. `state_LBD` are the states
    (float32) of recurrent layers, which have neither keys nor values. `source` is a cache of what an encoder has read,
    with the keys and values of attention to it.
    """

    k_LBKSC: jax.Array | tuple[jax.Array, ...] | None
    v_LBKSC: jax.Array | tuple[jax.Array, ...] | None
    k_scale_LBKS: jax.Array | None
    v_scale_LBKS: jax.Array | None
    position_BS: jax.Array
    length_B: jax.Array
    next: jax.Array
    state_LBD: tuple[jax.Array, ...] = ()
    source: "Cache | None" = None

    @property
    def slots(self) -> int:
        """S, how many tokens of a row there is room for."""
        return self.position_BS.shape[1]


class Memory(NamedTuple):
    """The cache on its way through the layers, and which layer is next (a plain number where they are unrolled)."""

    cache: Cache
    layer: jax.Array | int


class Recall(NamedTuple):
    """What a call of T tokens sees and where it writes, the same for all layers.

    `mask_BTS` is over the slots for one token (T = 1), over the slots seen before and then the T tokens for more.
    `source_BS` says which of those each slot holds afterwards; None where the tokens themselves follow one another.
    """

    mask_BTS: jax.Array
    slot: jax.Array
    source_BS: jax.Array | None


@partial(jax.jit, static_argnames=("config", "batch", "slots", "dtype", "spare", "apart"))
def empty_cache(
    config: ModelConfig,
    batch: int,
    slots: int,
    dtype: CacheDtype = CacheDtype.MODEL,
    *,
    spare: int = 0,
    apart: bool = False,
) -> Cache:
    """A cache without tokens; a sliding window of all layers needs no more slots than it is wide, `spare` to forget.

    Recurrent layers need none.

    `apart` is for unrolled layers: one cut out of the stack is a copy of it at every token (XLA on CPU), and so is one
    whose rows and heads are axes of their own where there is one row. int8 stays stacked: each layer is widened anyway.
    """
    slots = slots if config.reach is None else min(slots, config.reach + spare)
    shape = (config.n_layer, batch, config.kv_heads, slots, config.head_width)
    layer = (batch * config.kv_heads, slots, config.head_width)

    # Each its own array: a cache is written over, and an array can be only once.
    def stored() -> jax.Array | tuple[jax.Array, ...] | None:
        if not slots:
            return None
        if dtype is CacheDtype.INT8:
            return jnp.zeros(shape, jnp.int8)
        kept = config.dtype.value
        return tuple(jnp.zeros(layer, kept) for _ in range(config.n_layer)) if apart else jnp.zeros(shape, kept)

    def scale() -> jax.Array | None:
        return jnp.zeros(shape[:-1], jnp.float32) if dtype is CacheDtype.INT8 and slots else None

    source = None
    if config.encoder is not None:
        alone = dataclasses.replace(config, encoder=None)
        source = empty_cache(alone, batch, config.encoder.source_length, dtype, apart=apart)
    return Cache(
        stored(),
        stored(),
        scale(),
        scale(),
        jnp.full((batch, slots), EMPTY, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros((), jnp.int32),
        tuple(jnp.zeros((config.n_layer, batch, config.d_model), jnp.float32) for _ in range(config.mixer.states)),
        source,
    )


def grow(cache: Cache, config: ModelConfig, slots: int) -> Cache:
    """The cache with room for `slots` tokens where it had less; a sliding window never needs more than its width."""
    more = (slots if config.reach is None else min(slots, config.reach)) - cache.slots
    if more <= 0:
        return cache

    def longer(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, more if at == axis % x.ndim else 0) for at in range(x.ndim)])

    k, v = jax.tree.map(lambda x: longer(x, -2), cache[:2])
    k_scale, v_scale = jax.tree.map(lambda x: longer(x, -1), cache[2:4])
    position_BS = jnp.pad(cache.position_BS, ((0, 0), (0, more)), constant_values=EMPTY)
    return cache._replace(k_LBKSC=k, v_LBKSC=v, k_scale_LBKS=k_scale, v_scale_LBKS=v_scale, position_BS=position_BS)


def together(cache: Cache) -> Cache:
    """The cache with its layers stacked, where they are apart."""
    if cache.v_LBKSC is None or not isinstance(cache.k_LBKSC, tuple):
        return cache
    B = len(cache.length_B)
    k_LBKSC, v_LBKSC = (jnp.stack([_rows(x_NSC, B) for x_NSC in x_LNSC]) for x_LNSC in (cache.k_LBKSC, cache.v_LBKSC))
    return cache._replace(k_LBKSC=k_LBKSC, v_LBKSC=v_LBKSC)


def _rows(layer_NSC: jax.Array, batch: int) -> jax.Array:
    return layer_NSC.reshape(batch, -1, *layer_NSC.shape[1:])


def take_rows(cache: Cache, row_N: jax.Array) -> Cache:
    """The cache of N rows, each a copy of row `row_N` of this one."""

    B = len(cache.length_B)

    def taken(x: jax.Array) -> jax.Array:
        if isinstance(cache.k_LBKSC, tuple):
            return jnp.take(_rows(x, B), row_N, axis=0, mode="clip").reshape(-1, *x.shape[1:])
        return jnp.take(x, row_N, axis=1, mode="clip")

    (k, v, k_scale, v_scale), state_LBD = jax.tree.map(taken, (cache[:4], cache.state_LBD))
    position_BS, length_B = (jnp.take(x, row_N, axis=0, mode="clip") for x in (cache.position_BS, cache.length_B))
    source = None if cache.source is None else take_rows(cache.source, row_N)
    return Cache(k, v, k_scale, v_scale, position_BS, length_B, cache.next, state_LBD, source)


def forget(cache: Cache, length_B: jax.Array) -> Cache:
    """The cache without the tokens of each row from position `length_B` on.

    Their slots stay empty until a call of several tokens packs the slots. A sliding window needs as many spare slots
    as tokens are ever forgotten: what fell out of it does not come back. No more does the state before a token.
    """
    kept_BS = cache.position_BS < length_B[:, None]
    return cache._replace(
        position_BS=jnp.where(kept_BS, cache.position_BS, EMPTY),
        length_B=jnp.minimum(cache.length_B, length_B),
    )


def recall(cache: Cache, position_BT: jax.Array, window: int | None, fresh: bool) -> tuple[Cache, Recall]:
    """Makes room for T tokens at `position_BT` (-1: padding, on the left of a row).

    The cache returned has the new positions; its keys and values follow layer by layer with `remember`. `fresh` says
    that the cache holds nothing yet: then nothing of it is read.
    """
    length_B = jnp.maximum(cache.length_B, jnp.max(position_BT, axis=1) + 1)
    T, S = position_BT.shape[1], cache.slots
    if T == 1:
        slot = cache.next % S
        position_BS = jax.lax.dynamic_update_slice(cache.position_BS, position_BT, (0, slot))
        mask_BTS = _visible(position_BT, position_BS, window)
        cache = cache._replace(position_BS=position_BS, length_B=length_B, next=cache.next + 1)
        return cache, Recall(mask_BTS, slot, None)
    seen_BA = position_BT if fresh else jnp.concatenate([cache.position_BS, position_BT], axis=1)
    mask_BTA = _visible(position_BT, seen_BA, window)
    zero = jnp.zeros((), jnp.int32)
    if fresh:  # rows end together: the tokens follow one another in the slots as they stand
        kept = seen_BA[:, -S:]
        position_BS = jnp.pad(kept, ((0, 0), (0, S - kept.shape[1])), constant_values=EMPTY)
        filled = jnp.full((), kept.shape[1], jnp.int32)
        return cache._replace(position_BS=position_BS, length_B=length_B, next=filled), Recall(mask_BTA, zero, None)
    # Newest last, padding first: so that the newest S of every row end in the same slot.
    order_BA = jnp.argsort(seen_BA, axis=1)
    filled = jnp.minimum(jnp.max(jnp.sum(seen_BA != EMPTY, axis=1)), S).astype(jnp.int32)
    slot_1S = jnp.arange(S, dtype=jnp.int32)[None]
    from_end_1S = jnp.clip(seen_BA.shape[1] - filled + slot_1S, 0, seen_BA.shape[1] - 1)
    source_BS = jnp.take_along_axis(order_BA, jnp.broadcast_to(from_end_1S, cache.position_BS.shape), axis=1)
    position_BS = jnp.where(slot_1S < filled, jnp.take_along_axis(seen_BA, source_BS, axis=1), EMPTY)
    return cache._replace(position_BS=position_BS, length_B=length_B, next=filled), Recall(mask_BTA, zero, source_BS)


def recall_source(cache: Cache, position_BS: jax.Array | None) -> tuple[Cache, Recall]:
    """As `recall` for the tokens of a source, all of which the decoder sees; None: they are there already."""
    assert cache.source is not None
    source, zero = cache.source, jnp.zeros((), jnp.int32)
    if position_BS is None:
        what = Recall(source.position_BS[:, None], zero, None)
    else:
        source, what = recall(source, position_BS, None, fresh=True)
    return cache._replace(source=source), what._replace(mask_BTS=(source.position_BS != EMPTY)[:, None])


def remember(memory: Memory, what: Recall, k_BTKC: jax.Array, v_BTKC: jax.Array) -> tuple[Memory, jax.Array, jax.Array]:
    """Writes the keys and values of a layer's T tokens; returns them with all that the tokens may see, [B, K, S, C]."""
    cache, layer = memory
    fields = (("k_LBKSC", "k_scale_LBKS", k_BTKC), ("v_LBKSC", "v_scale_LBKS", v_BTKC))
    changed: dict[str, Any] = {}
    seen = []
    for name, scale_name, new_BTKC in fields:
        stored_LBKSC, scale_LBKS = getattr(cache, name), getattr(cache, scale_name)
        new_BKTC = new_BTKC.swapaxes(1, 2)
        if scale_LBKS is None:
            changed[name], all_BKSC = _write(stored_LBKSC, layer, what, new_BKTC)
            seen.append(all_BKSC)
            continue
        new_BKTC, new_scale_BKT = _quantise(new_BKTC)
        changed[name], all_BKSC = _write(stored_LBKSC, layer, what, new_BKTC)
        scale_LBKS1, all_scale_BKS1 = _write(scale_LBKS[..., None], layer, what, new_scale_BKT[..., None])
        changed[scale_name] = scale_LBKS1[..., 0]
        seen.append((all_BKSC.astype(jnp.float32) * all_scale_BKS1).astype(new_BTKC.dtype))
    return Memory(cache._replace(**changed), layer), seen[0], seen[1]


def remembered(memory: Memory, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The keys and values that a layer holds, all slots of them, [B, K, S, C]."""
    cache, layer = memory

    def read(stored_LBKSC: Any, scale_LBKS: jax.Array | None) -> jax.Array:
        if isinstance(stored_LBKSC, tuple):
            return _rows(stored_LBKSC[layer], len(cache.length_B))
        x_BKSC = jax.lax.dynamic_index_in_dim(stored_LBKSC, layer, keepdims=False)
        if scale_LBKS is None:
            return x_BKSC
        scale_BKS = jax.lax.dynamic_index_in_dim(scale_LBKS, layer, keepdims=False)
        return (x_BKSC.astype(jnp.float32) * scale_BKS[..., None]).astype(dtype)

    return read(cache.k_LBKSC, cache.k_scale_LBKS), read(cache.v_LBKSC, cache.v_scale_LBKS)


def _visible(query_BT: jax.Array, key_BS: jax.Array, window: int | None) -> jax.Array:
    """True where a token at a position may see one at another: not later, not empty, not out of the window."""
    query_BT1, key_B1S = query_BT[:, :, None], key_BS[:, None, :]
    mask_BTS = (key_B1S <= query_BT1) & (key_B1S != EMPTY)
    return mask_BTS if window is None else mask_BTS & (query_BT1 - key_B1S < window)


def _write(stored_LBKSC: Any, layer: Any, what: Recall, new_BKTC: jax.Array) -> tuple[Any, jax.Array]:
    """What is stored (one array, or apart) with the layer's new tokens, and what they may see of it."""
    (B, K, T, C), zero = new_BKTC.shape, jnp.zeros((), jnp.int32)
    if isinstance(stored_LBKSC, tuple):
        layer_NSC = stored_LBKSC[layer]
        if T == 1:
            layer_NSC = jax.lax.dynamic_update_slice(layer_NSC, new_BKTC.reshape(B * K, 1, C), (zero, what.slot, zero))
            seen_BKAC = _rows(layer_NSC, B)
        else:
            kept_BKTC, seen_BKAC = _packed(_rows(layer_NSC, B), what, new_BKTC)
            layer_NSC = jax.lax.dynamic_update_slice(layer_NSC, kept_BKTC.reshape(B * K, -1, C), (zero, zero, zero))
        return (*stored_LBKSC[:layer], layer_NSC, *stored_LBKSC[layer + 1 :]), seen_BKAC
    if T == 1:
        at = (layer, zero, zero, what.slot, zero)
        stored_LBKSC = jax.lax.dynamic_update_slice(stored_LBKSC, new_BKTC[None], at)
        return stored_LBKSC, jax.lax.dynamic_index_in_dim(stored_LBKSC, layer, keepdims=False)
    old_BKSC = jax.lax.dynamic_index_in_dim(stored_LBKSC, layer, keepdims=False)
    kept_BKTC, seen_BKAC = _packed(old_BKSC, what, new_BKTC)
    return jax.lax.dynamic_update_slice(stored_LBKSC, kept_BKTC[None], (layer, zero, zero, zero, zero)), seen_BKAC


def _packed(old_BKSC: jax.Array, what: Recall, new_BKTC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first slots of a layer with its new tokens, and what these may see."""
    if what.source_BS is None:
        return new_BKTC[:, :, -old_BKSC.shape[2] :], new_BKTC
    all_BKAC = jnp.concatenate([old_BKSC, new_BKTC], axis=2)
    return jnp.take_along_axis(all_BKAC, what.source_BS[:, None, :, None], axis=2), all_BKAC


def _quantise(x_BKTC: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 of the largest magnitude of each head and token, and the scale that undoes it."""
    scale_BKT = jnp.max(jnp.abs(x_BKTC.astype(jnp.float32)), axis=-1) / INT8_MAX
    safe_BKT1 = jnp.where(scale_BKT == 0, 1.0, scale_BKT)[..., None]
    return jnp.round(x_BKTC.astype(jnp.float32) / safe_BKT1).astype(jnp.int8), scale_BKT
