"""Tiny models for the tests of this room, and a pairwise covering set of every architectural choice."""

import dataclasses
import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lm.model.config import FeedForward, ModelConfig, Norm, Positions
from lm.model.transformer import Transformer

CHOICES: dict[str, tuple[Any, ...]] = {
    "norm": tuple(Norm),
    "feed_forward": tuple(FeedForward),
    "positions": tuple(Positions),
    "n_kv_head": (None, 2, 1),
    "d_head": (None, 6),
    "bias": (False, True),
    "qk_norm": (False, True),
    "tied_embedding": (True, False),
    "n_layer": (1, 3),
}


def tiny(**changes: Any) -> ModelConfig:
    values = {"vocab_size": 11, "context_length": 8, "n_layer": 2, "d_model": 16, "n_head": 4, "d_ff": 24}
    return ModelConfig(**{**values, **changes})


def pairwise(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows in which every pair of values of any two choices occurs; greedy, in a fixed order."""
    rows = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    pairs_of = [set(itertools.combinations(row.items(), 2)) for row in rows]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda row: len(pairs_of[row] & missing))
        missing -= pairs_of[best]
        chosen.append(rows[best])
    return chosen


def covering(choices: dict[str, tuple[Any, ...]] = CHOICES) -> list[ModelConfig]:
    """Models in which every pair of values of any two choices occurs."""
    return [tiny(**row) for row in pairwise(choices)]


COVERING = covering()


def identify(config: ModelConfig) -> str:
    return "-".join(str(getattr(config, name)) for name in CHOICES)


@functools.cache
def init(config: ModelConfig) -> Any:
    """The model's own initial parameters."""
    # Jitted: op by op, each of some fifty small functions would be compiled by itself.
    return jax.jit(lambda: nn.unbox(Transformer(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))))()[
        "params"
    ]


@functools.cache
def parameters(config: ModelConfig, std: float = 0.3) -> Any:
    """Random parameters of the model, biases and scales too, far from the nearly uniform model of `init`."""
    shapes = nn.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    random = np.random.default_rng(0)

    def drawn(path: Any, leaf: Any) -> jax.Array:
        numbers = std * random.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(1 + numbers if path[-1].key == "scale" else numbers)

    return jax.tree.map_with_path(drawn, shapes["params"])


def tokens(config: ModelConfig, rows: int = 2, seed: int = 1) -> jax.Array:
    shape = (rows, config.context_length)
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, shape), jnp.int32)


def logits(config: ModelConfig, params: Any, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
    return _compiled(config)({"params": params}, tokens_BT, segments_BT)


@functools.cache
def _compiled(config: ModelConfig) -> Any:
    return jax.jit(Transformer(config).apply)


def replace(config: ModelConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config, **changes)
