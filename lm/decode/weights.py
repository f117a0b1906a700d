"""Parameters laid out for decoding: taken apart layer by layer, the head the way that products read it fastest."""

import dataclasses
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lm.model.attention import JOINED
from lm.model.config import FeedForward, ModelConfig
from lm.model.transformer import Transformer


def lay_out(config: ModelConfig, params: Any, *, unstack: bool = True) -> tuple[Transformer, Any]:
    """The model and parameters for decoding: the same numbers, in the type that products are computed in.

    `unstack` takes the layers apart once: a loop over stacked ones copies each layer's weights at every token (XLA on
    CPU). Queries, keys and values become one product: a narrow model spends much of a token on starting products. A
    tied head gets a transposed copy [D, V]: as `x @ E.T` it costs up to six times as much on some versions. Hidden
    units that are always 0 are added where the width of the feed-forward sublayer is a bad one.
    """
    dtype = config.dtype.value
    laid = {name: value for name, value in params.items() if name != "layers"}
    if config.tied_embedding:
        laid["head"] = jnp.array(params["embedding"].T)
        config = dataclasses.replace(config, tied_embedding=False)
    if unstack:
        idle = _idle(config)
        config = dataclasses.replace(config, d_ff=config.d_ff + idle)
        for layer in range(config.n_layer):
            taken = jax.tree.map(operator.itemgetter(layer), params["layers"])
            taken = taken if config.mixer.recurrent else _joined(taken)
            laid[f"layer_{layer}"] = _widened(taken, idle) if idle else taken
    else:
        laid["layers"] = params["layers"]
    return Transformer(config, unstacked=unstack), jax.tree.map_with_path(partial(_kept, dtype), laid)


def _joined(layer: dict[str, Any]) -> dict[str, Any]:
    attention = dict(layer["attention"])
    parts = [attention.pop(name) for name in ("query", "key", "value")]
    # The axis of heads is the last but one of the kernel and of the bias.
    attention[JOINED] = jax.tree.map(lambda *part: jnp.concatenate(part, axis=-2), *parts)
    return {**layer, "attention": attention}


def _idle(config: ModelConfig) -> int:
    """How many hidden units of the feed-forward sublayer to add: they cost less than they save.

    On CPU the rows of a matrix that lie a multiple of 4 KiB apart fall into the same few sets of the cache: 16 rows by
    [256, 1024] take 1.6 times as long as by [256, 1056] (docs/diary.md).
    """
    row = config.d_ff * jnp.dtype(config.dtype.value).itemsize
    one = config.experts is None and config.feed_forward is not FeedForward.NONE and config.encoder is None
    return 32 if jax.default_backend() == "cpu" and row % 4096 == 0 and one else 0


def _widened(layer: dict[str, Any], idle: int) -> dict[str, Any]:
    def zeros_after(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, idle if at == axis else 0) for at in range(x.ndim)])

    hidden = {
        name: {kind: x if (name, kind) == ("down", "bias") else zeros_after(x, 0 if name == "down" else x.ndim - 1)
               for kind, x in arrays.items()}
        for name, arrays in layer["feed_forward"].items()
    }  # fmt: skip
    return {**layer, "feed_forward": hidden}


def _kept(dtype: str, path: Any, x: jax.Array) -> jax.Array:
    # Scales of norms and biases are used in float32, and so are routers; other matrices and tables are rounded anyway.
    ndim = x.ndim - (path[0].key in ("layers", "encoder"))  # which are stacked
    return x if ndim < 2 or any(entry.key == "router" for entry in path) else x.astype(dtype)
