"""How the next token is chosen, as small frozen values that are applied in the order in which they stand.

Their numbers are traced and not compiled in: another temperature is the same program. Each number may also be an array
of one a row. `lm.decode.settings` makes a strategy from plain numbers.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.base.errors import UsageError
from lm.decode.choose import LOWEST, above_or_first, largest_edge, ordered_bits

Number = float | jax.Array
SMALLEST = 1e-30  # of temperatures above 0


def _column(number: Any) -> jax.Array:
    """[1 or B, 1], to stand beside logits [B, V]."""
    return jnp.reshape(jnp.asarray(number, jnp.float32), (-1, 1))


class Step:
    """One step of a strategy: logits [B, V] in, logits out; a forbidden token has -inf.

    `counts_BV` (int32) counts what the prompt and the answer so far hold, padding left out; it is only kept where a
    step of the strategy has `counts`.
    """

    counts = False
    keeps_highest = False  # never forbids the token with the highest logit, of equal ones the first

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepetitionPenalty(Step):
    """Divides positive logits of tokens that were there by `penalty`, multiplies negative ones (Keskar et al. 2019)."""

    penalty: Number
    counts = True

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        assert counts_BV is not None
        penalty_B1 = _column(self.penalty)
        changed_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
        return jnp.where(counts_BV > 0, changed_BV, logits_BV)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PresencePenalty(Step):
    """Takes `presence` off the logits of tokens that were there, and `frequency` for each time."""

    presence: Number
    frequency: Number = 0.0
    counts = True

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        assert counts_BV is not None
        taken_BV = _column(self.presence) * (counts_BV > 0) + _column(self.frequency) * counts_BV
        return logits_BV - taken_BV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitBias(Step):
    """Adds `bias_V` [V]; -inf forbids a token."""

    bias_V: jax.Array

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        return logits_BV + self.bias_V[None, :]

    @classmethod
    def of(cls, biases: Mapping[int, float], vocab_size: int) -> "LogitBias":
        """From a bias for each token id.

        Raises:
          UsageError: an id outside the vocabulary, a bias of NaN or +inf, or all tokens forbidden.
        """
        bias_V = np.zeros(vocab_size, np.float32)
        for token, bias in biases.items():
            if not 0 <= token < vocab_size:
                raise UsageError(f"there is no token {token}: the vocabulary has {vocab_size}", where="logit bias")
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"the bias of token {token} is {bias}", where="logit bias", do="-inf forbids it.")
            bias_V[token] = bias
        if np.all(np.isneginf(bias_V)):
            raise UsageError("all tokens are forbidden", where="logit bias")
        return cls(jnp.asarray(bias_V))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Temperature(Step):
    """Divides by `temperature`; 0 leaves the highest logit alone, the first of equal ones: greedy.

    Between 0 and 1e-30 it counts as 1e-30: a smaller one would turn logits into infinities.
    """

    temperature: Number
    keeps_highest = True

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        value_B1 = _column(self.temperature)
        index_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
        best_BV = index_BV == jnp.argmax(logits_BV, axis=1, keepdims=True)
        return jnp.where(
            value_B1 == 0, jnp.where(best_BV, logits_BV, LOWEST), logits_BV / jnp.maximum(value_B1, SMALLEST)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK(Step):
    """Keeps exactly `k` tokens (0: all), of equal ones the first."""

    k: Number
    keeps_highest = True

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        k_B1 = jnp.reshape(jnp.asarray(self.k, jnp.int32), (-1, 1))

        def cut() -> jax.Array:
            bits_BV = ordered_bits(logits_BV)
            edge_B1 = largest_edge(bits_BV, lambda at: jnp.sum(at, axis=1, keepdims=True, dtype=jnp.int32) >= k_B1)
            left_B1 = k_B1 - jnp.sum(bits_BV > edge_B1, axis=1, keepdims=True, dtype=jnp.int32)
            return jnp.where(above_or_first(bits_BV, edge_B1, left_B1) | (k_B1 == 0), logits_BV, LOWEST)

        return jax.lax.cond(jnp.all(k_B1 == 0), lambda: logits_BV, cut)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopP(Step):
    """Keeps the likeliest tokens until their mass reaches `p`, the crossing one included (Holtzman et al. 2020).

    A token stays while the mass before it is below `p`. Never none; of equal ones the first; 1 keeps all.
    """

    p: Number
    keeps_highest = True

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        p_B1 = _column(self.p)

        def cut() -> jax.Array:
            share_BV = jax.nn.softmax(logits_BV, axis=1)
            bits_BV = ordered_bits(share_BV)

            def mass(at_BV: jax.Array) -> jax.Array:
                return jnp.sum(jnp.where(at_BV, share_BV, 0.0), axis=1, keepdims=True)

            edge_B1 = largest_edge(bits_BV, lambda at_BV: mass(at_BV) >= p_B1)
            edge_B1 = jnp.minimum(edge_B1, jnp.max(bits_BV, axis=1, keepdims=True))
            each_B1 = jnp.max(jnp.where(bits_BV == edge_B1, share_BV, 0.0), axis=1, keepdims=True)
            missing_B1 = p_B1 - mass(bits_BV > edge_B1)
            count_B1 = jnp.maximum(jnp.ceil(missing_B1 / jnp.where(each_B1 == 0, 1.0, each_B1)), 1.0)
            return jnp.where(above_or_first(bits_BV, edge_B1, count_B1) | (p_B1 >= 1), logits_BV, LOWEST)

        return jax.lax.cond(jnp.all(p_B1 >= 1), lambda: logits_BV, cut)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MinP(Step):
    """Keeps tokens at least `p` times as likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""

    p: Number
    keeps_highest = True

    def __call__(self, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
        p_B1 = _column(self.p)
        edge_B1 = jnp.max(logits_BV, axis=1, keepdims=True) + jnp.log(p_B1)
        return jnp.where(logits_BV >= edge_B1, logits_BV, LOWEST)


Strategy = tuple[Step, ...]
GREEDY: Strategy = (Temperature(0.0),)


def apply(strategy: Strategy, logits_BV: jax.Array, counts_BV: jax.Array | None) -> jax.Array:
    """The logits after every step, in order; float32, whatever the type that they come in."""
    logits_BV = logits_BV.astype(jnp.float32)
    for step in strategy:
        logits_BV = step(logits_BV, counts_BV)
    return logits_BV


def greedy(strategy: Strategy) -> tuple[Strategy, jax.Array] | None:
    """The steps before a temperature, and whether it is 0 in every row; None where it need not leave the highest alone.

    Where it is 0, the first of the highest logits after those steps is chosen, and what follows changes nothing.
    """
    for at, step in enumerate(strategy):
        if isinstance(step, Temperature) and all(later.keeps_highest for later in strategy[at:]):
            return strategy[:at], jnp.all(_column(step.temperature) == 0)
    return None


def needs_counts(strategy: Strategy) -> bool:
    """Whether some step looks at what was there before."""
    return any(step.counts for step in strategy)


def as_json(strategy: Strategy) -> list[dict[str, Any]]:
    """The strategy as it is saved beside samples: a name and the numbers of each step, in order."""
    return [{"step": type(step).__name__, **_numbers(step)} for step in strategy]


def _numbers(step: Step) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(step):  # type: ignore[arg-type]
        value = np.asarray(getattr(step, field.name))
        if isinstance(step, LogitBias):
            # JSON has no infinity: a forbidden token's bias is null.
            given = {str(token): float(value[token]) for token in np.flatnonzero(value)}
            found["bias"] = {token: bias if math.isfinite(bias) else None for token, bias in given.items()}
        else:
            found[field.name] = value.tolist()
    return found
