"""Answers held to a regular expression or a JSON schema, within the loop on the device.

A token is masked where no text that matches goes on with it, and also where the text could no longer be completed with
the tokens that are left: whatever is sampled, the answer matches.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.base.errors import UsageError
from lm.data.tokenizer import Tokenizer
from lm.decode import automaton, schema
from lm.decode.automaton import DEAD, NEVER, START

SMALLEST = (512, 64)  # states and classes: small automata share one program


class Automaton(NamedTuple):
    """An `automaton.Table` on the device; both sizes are padded to powers of two, so that few programs are compiled."""

    next_SC: jax.Array
    class_V: jax.Array
    distance_S: jax.Array
    last_S: jax.Array

    @property
    def shortest(self) -> int:
        """How many tokens the shortest answer has."""
        return int(self.distance_S[START])


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer, all of it, must match: a regular expression in Python's syntax."""

    pattern: str

    @classmethod
    def of_schema(cls, schema_json: Any) -> "Constraint":
        """Holds answers to a JSON schema, given as parsed JSON; `lm.decode.schema` tells what is written.

        Raises:
          UsageError: a schema that nothing satisfies, or a keyword that cannot be held.
        """
        return cls(schema.regex_of(schema_json))

    @classmethod
    def of_schema_file(cls, path: Path) -> "Constraint":
        """As `of_schema`, from a file.

        Raises:
          UsageError: also no such file, or not JSON.
        """
        try:
            return cls.of_schema(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise UsageError("there is no such schema", where=str(path)) from error
        except ValueError as error:
            raise UsageError(f"is not JSON: {error}", where=str(path)) from error

    def over(self, tokenizer: Tokenizer, vocab_size: int) -> Automaton:
        """The automaton over the tokens of a model; ids that the tokenizer does not have are never allowed.

        Raises:
          UsageError: a vocabulary that is not one of bytes; or as `automaton.over_tokens`.
        """
        return _over(self.pattern, tokenizer, vocab_size)


@functools.lru_cache(maxsize=16)
def _over(pattern: str, tokenizer: Tokenizer, vocab_size: int) -> Automaton:
    if not tokenizer.byte_level:
        raise UsageError("a constraint needs a byte-level vocabulary", where=tokenizer.spec)
    pieces = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    table = automaton.over_tokens(pattern, pieces + [b""] * (vocab_size - tokenizer.vocab_size))
    extra, more = (
        max(1 << (size - 1).bit_length(), smallest) - size
        for size, smallest in zip(table.next_SC.shape, SMALLEST, strict=True)
    )
    return Automaton(
        jnp.asarray(np.pad(table.next_SC, ((0, extra), (0, more)), constant_values=DEAD)),
        jnp.asarray(table.class_V),
        jnp.asarray(np.pad(table.distance_S, (0, extra), constant_values=NEVER)),
        jnp.asarray(np.pad(table.last_S, (0, extra), constant_values=True)),
    )


def mask(
    machine: Automaton, state_B: jax.Array, logits_BV: jax.Array, end_E: jax.Array, left_B: jax.Array
) -> jax.Array:
    """The logits with -inf where a token is forbidden, when each row may have `left_B` more tokens.

    End tokens are allowed where the text is complete, other tokens where it can be completed after them in time.
    """
    need_BC = machine.distance_S[machine.next_SC[state_B]]
    allowed_BV = (need_BC < left_B[:, None])[:, machine.class_V]
    end_V = jnp.any(jnp.arange(logits_BV.shape[1])[:, None] == end_E[None, :], axis=1)
    complete_B = machine.distance_S[state_B] == 0
    return jnp.where(allowed_BV | (end_V[None, :] & complete_B[:, None]), logits_BV, -jnp.inf)


def move(machine: Automaton, state_B: jax.Array, token_B: jax.Array) -> jax.Array:
    """The states [B] after a token."""
    return machine.next_SC[state_B, machine.class_V[token_B]]
