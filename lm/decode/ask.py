"""The front door: a run and prompts in, answers out."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lm.base.errors import UsageError
from lm.decode.constrain import Constraint
from lm.decode.generate import Decoder, Prompt, Session, stream
from lm.decode.request import MAX_TOKENS, Completion, Full, Request
from lm.decode.settings import DEFAULT_ORDER, Settings
from lm.model.config import CacheDtype

if TYPE_CHECKING:
    from lm.run.restore import LoadedModel

BATCH = 16  # answers at once


def generate(
    model: "Decoder | LoadedModel | Path | str",
    prompts: Prompt | Sequence[Prompt],
    *,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    order: Sequence[str] = DEFAULT_ORDER,
    seed: int = 0,
    n: int = 1,
    stop: Sequence[str] = (),
    end_ids: Sequence[int] | None = None,
    constraint: Constraint | None = None,
    full: Full | None = None,
    cache: CacheDtype = CacheDtype.MODEL,
    batch_size: int = BATCH,
) -> list[Completion]:
    """Answers to a prompt or to each of a list, `n` to each, one prompt after the other.

    With the defaults it samples from the model as it is; `temperature=0` is greedy. The numbers are those of
    `lm.decode.settings.Settings`. A text begins a document: the end-of-text token is put in front, so that an empty
    one is a prompt too. Ids are taken as they are.

    Args:
      model: a run folder, a loaded run, or a `Decoder`, which keeps the parameters laid out from call to call.
      max_tokens: tokens of an answer at most; None: 128, fewer where the context ends.
      stop: texts that end an answer, which ends before them.
      end_ids: tokens that end an answer; None: the tokenizer's end of text; (): none.
      constraint: what every answer matches whole, e.g. `Constraint(regex)` or `Constraint.of_schema(schema)`.
      full: what happens where prompt and answer would not fit the context; None: ERROR, or SHORTER without
        `max_tokens`.
      cache: what keys and values are kept in; a `Decoder` has its own.
      batch_size: answers at once. A row's random numbers depend neither on it nor on the prompts beside.

    Raises:
      UsageError: a number outside its range, no prompt, more tokens than the context holds, or no such run.
      RunError: no usable checkpoint, or logits that are not numbers.
    """
    settings = Settings(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
        logit_bias or {}, order,
    )  # fmt: skip
    decoder = model if isinstance(model, Decoder) else load_decoder(model, cache)
    request = Request(
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        steps=settings.steps(decoder.config.vocab_size),
        seed=seed,
        end_ids=None if end_ids is None else tuple(end_ids),
        stops=tuple(text.encode() for text in ([stop] if isinstance(stop, str) else stop)),
        full=full_of(full, max_tokens),
        samples=n,
        constraint=constraint,
    )
    asked = decoder.encode([prompts] if isinstance(prompts, str | np.ndarray) else list(prompts))
    decoder.check(asked, request)
    found = []
    for part, sessions in batches(decoder, asked, request, batch_size):
        *_, session = sessions
        found += decoder.completions(session)[: len(part) * n]
    return found


def load_decoder(model: "LoadedModel | Path | str", cache: CacheDtype = CacheDtype.MODEL) -> Decoder:
    """A decoder of a run folder's newest checkpoint, or of a model that is loaded already.

    Raises:
      UsageError: not a run folder, or no checkpoint yet.
      RunError: no usable checkpoint.
    """
    from lm.run.restore import load_model  # checkpoints bring Orbax along: half a second that a `Decoder` needs none of

    loaded = load_model(model) if isinstance(model, Path | str) else model
    return Decoder(loaded.model, loaded.params, loaded.tokenizer, cache_dtype=cache)


def full_of(full: Full | None, max_tokens: int | None) -> Full:
    """What happens at the end of the context: as was said, else an error where it breaks what was asked for."""
    return full or (Full.SHORTER if max_tokens is None else Full.ERROR)


def batches(
    decoder: Decoder, prompts: Sequence[Prompt], request: Request, size: int
) -> Iterator[tuple[Sequence[Prompt], Iterator[Session]]]:
    """The prompts in parts of at most `size` answers (at least one prompt), each with its sessions (see `stream`).

    A last part that is smaller is filled up with copies of its last prompt, so that nothing is compiled for it.

    Raises:
      UsageError: no prompt, or a size below 1.
    """
    for first, part, filled in parts(prompts, request.samples, size):
        yield part, stream(decoder, filled, request, request.max_tokens, first=first)


def parts(
    prompts: Sequence[Prompt], samples: int, size: int
) -> Iterator[tuple[int, Sequence[Prompt], Sequence[Prompt]]]:
    """The number of the first prompt of each part, the part, and the part filled up: see `batches`.

    Raises:
      UsageError: no prompt, or a size below 1.
    """
    if not prompts:
        raise UsageError("there is no prompt", where="prompts")
    if size < 1:
        raise UsageError(f"{size} answers at once were asked for", where="batch_size", do="Ask for at least 1.")
    rows = min(max(1, size // max(samples, 1)), len(prompts))
    for first in range(0, len(prompts), rows):
        part = prompts[first : first + rows]
        yield first, part, [*part, *[part[-1]] * (rows - len(part))]
