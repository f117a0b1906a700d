"""Tiny models for the tests of this room, and a pairwise covering set of every architectural choice."""

import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

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


def covering(choices: dict[str, tuple[Any, ...]] = CHOICES) -> list[ModelConfig]:
    """Models in which every pair of values of any two choices occurs; greedy, in a fixed order."""
    rows = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    pairs = {pair for row in rows for pair in itertools.combinations(row.items(), 2)}
    chosen = []
    while pairs:
        best = max(rows, key=lambda row: sum(pair in pairs for pair in itertools.combinations(row.items(), 2)))
        pairs -= set(itertools.combinations(best.items(), 2))
        chosen.append(tiny(**best))
    return chosen


COVERING = covering()


def identify(config: ModelConfig) -> str:
    return "-".join(str(getattr(config, name)) for name in CHOICES)


def init(config: ModelConfig, scale: float = 1.0, seed: int = 0) -> Any:
    """Parameters, all matrices and tables times `scale`: at 1 the model hardly differs from a uniform one."""
    tokens_BT = jnp.zeros((1, config.context_length), jnp.int32)
    params = nn.unbox(Transformer(config).init(jax.random.key(seed), tokens_BT))["params"]
    return jax.tree.map_with_path(
        lambda path, leaf: leaf if path[-1].key in ("scale", "bias") else leaf * scale, params
    )


def tokens(config: ModelConfig, rows: int = 2, seed: int = 1) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, config.context_length), 0, config.vocab_size)


def logits(config: ModelConfig, params: Any, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
    return jax.jit(Transformer(config).apply)({"params": params}, tokens_BT, segments_BT)


def replace(config: ModelConfig, **changes: Any) -> ModelConfig:
    return dataclasses.replace(config, **changes)
