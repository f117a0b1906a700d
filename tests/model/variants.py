"""Tiny models for the tests of this room, and pairwise covering sets of every architectural choice."""

import dataclasses
import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lm.model.config import (
    Experts,
    FeedForward,
    Mixer,
    ModelConfig,
    Norm,
    NormPlacement,
    Positions,
    QkNorm,
    WidthScaling,
)
from lm.model.transformer import Transformer

CHOICES: dict[str, tuple[Any, ...]] = {
    "norm": tuple(Norm),
    "feed_forward": (FeedForward.GELU, FeedForward.SWIGLU),  # two matrices or three
    "positions": (Positions.LEARNED, Positions.ROPE),  # a table or none
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
    """Rows in which every pair of values of any two choices occurs; greedy, the first rows with the most of them."""
    places = {(name, at) for name, values in choices.items() for at in range(len(values))}
    missing = {frozenset(pair) for pair in itertools.combinations(sorted(places), 2) if pair[0][0] != pair[1][0]}
    rows = []
    while missing:
        row = dict(min(map(sorted, missing)))
        while len(row) < len(choices):
            # The choice and value that go with most of what the row has, in a fixed order.
            gain = {
                (name, at): sum(frozenset([(name, at), other]) in missing for other in row.items())
                for name, at in sorted(places)
                if name not in row
            }
            name, at = max(gain, key=lambda place: gain[place])
            row[name] = at
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append({name: values[row[name]] for name, values in choices.items()})
    return rows


# Settings that go together, so that none contradicts another: what their names stand for.
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "placement": (
        *({"norm_placement": placement} for placement in NormPlacement),
        {"parallel_block": True},
    ),
    "sublayers": (
        {"qkv_bias": True},
        {"bias": True, "qkv_bias": False, "norm": Norm.LAYERNORM},
        {"experts": Experts(count=3, chosen=2)},
        {"experts": Experts(count=4, chosen=1, shared=2, normalised=False), "feed_forward": FeedForward.RELU2},
    ),
    "positions": tuple(
        {"positions": positions} for positions in (Positions.NONE, Positions.SINUSOIDAL, Positions.ROPE)
    ),
    "heads": (
        {"qk_norm": True, "qk_norm_over": QkNorm.HEADS, "n_kv_head": 2},
        {"attention_softcap": 2.0, "attention_scale": 0.3, "logit_softcap": 5.0, "embedding_scale": 4.0},
        {"width_scaling": WidthScaling(base_width=8, base_head=2)},
    ),
    "window": ({}, {"window": 3, "window_layers": (True, False)}),
}


def merged(*settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for some in settings for name, value in some.items()}


def recurrent(mixer: Mixer, **changes: Any) -> ModelConfig:
    """`tiny` with recurrent layers in place of attention."""
    return tiny(**{"mixer": mixer, "n_head": 1, "positions": Positions.NONE, "bias": True, **changes})


NO_FEED_FORWARD: dict[str, Any] = {"feed_forward": FeedForward.NONE, "d_ff": 0}
RECURRENT = [
    recurrent(Mixer.LSTM, **NO_FEED_FORWARD, norm=Norm.LAYERNORM, n_layer=3),
    recurrent(Mixer.GRU, feed_forward=FeedForward.GELU, norm_placement=NormPlacement.SANDWICH, tied_embedding=False),
    recurrent(Mixer.LSTM, bias=False, parallel_block=True, unroll_layers=True),
    recurrent(Mixer.GRU, bias=False, experts=Experts(count=3, chosen=2), width_scaling=WidthScaling(base_width=8)),
    recurrent(Mixer.GRU, **NO_FEED_FORWARD, norm_placement=NormPlacement.POST, n_layer=1),
]
COVERING = [tiny(**row) for row in pairwise(CHOICES)]
COVERING_MORE = [tiny(n_layer=3, **merged(*row.values())) for row in pairwise(MORE)]


def identify(config: ModelConfig) -> str:
    """What sets a model apart from `tiny()`."""
    changed = {name: value for name, value in dataclasses.asdict(config).items() if value != getattr(tiny(), name)}
    return "-".join(f"{name}={value}" for name, value in changed.items())


@functools.cache
def init(config: ModelConfig) -> Any:
    """The model's own initial parameters."""
    # Jitted: op by op, each of some fifty small functions would be compiled by itself.
    return jax.jit(lambda: nn.unbox(Transformer(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))))()[
        "params"
    ]


def abstract(config: ModelConfig) -> Any:
    """Shapes and types of the model's parameters."""
    return nn.unbox(jax.eval_shape(Transformer(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]


@functools.cache
def parameters(config: ModelConfig, std: float = 0.3) -> Any:
    """Random parameters of the model, biases and scales too, far from the nearly uniform model of `init`."""
    random = np.random.default_rng(0)

    def drawn(path: Any, leaf: Any) -> jax.Array:
        numbers = std * random.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(1 + numbers if path[-1].key == "scale" else numbers)

    return jax.tree.map_with_path(drawn, abstract(config))


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
