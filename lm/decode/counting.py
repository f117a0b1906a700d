"""Answers under counts: distributions are looked up on the host, and tokens are chosen from them as from any model."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lm.base.errors import UsageError
from lm.data.tokenizer import Tokenizer
from lm.decode import choose, strategy
from lm.decode.clock import Clock
from lm.decode.generate import Prompt, check_numbers, encoded, with_text
from lm.decode.loop import Finish
from lm.decode.methods import Answer, Method
from lm.decode.request import Completion, Request
from lm.decode.strategy import Strategy
from lm.decode.text import first_stop
from lm.decode.vote import by_prompt
from lm.model.counting import Counts
from lm.model.score import token_log_probs

# Options of `lm generate` that need what counts have not: a cache, a context that ends, batches of hypotheses.
_NOT_FOR_COUNTS = (
    *("beams", "length_alpha", "length_form", "best", "best_of", "draft", "draft_tokens"),
    *("regex", "schema", "full"),
)


@dataclasses.dataclass(frozen=True)
class CountingDecoder:
    """Counts with their tokenizer; the context of an answer has no end, and no cache is kept of it."""

    counts: Counts
    tokenizer: Tokenizer
    cache_dtype: None = None

    def encode(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Ids of the prompts, an array a row.

        Raises:
          UsageError: a text that is not Unicode.
        """
        return encoded(prompts, self.tokenizer)

    def check(self, prompts: Sequence[np.ndarray], request: Request) -> None:
        """Refuses what `complete` would refuse.

        Raises:
          UsageError: no prompt, an id outside the vocabulary, or no token or no sample asked for.
        """
        V = self.counts.config.vocab_size
        if not prompts:
            raise UsageError("there is no prompt", where="prompts")
        for row, ids in enumerate([*prompts, np.array(request.end_ids or (), np.int64)]):
            if len(ids) and not 0 <= ids.min() <= ids.max() < V:
                where = "end_ids" if row == len(prompts) else "prompts"
                raise UsageError(f"there is an id outside the vocabulary of {V}", where=where)
        for name in ("max_tokens", "samples"):
            if getattr(request, name) < 1:
                raise UsageError(f"{getattr(request, name)} were asked for", where=name, do="Ask for at least 1.")

    def complete(self, prompts: Sequence[np.ndarray], request: Request, *, first: int = 0) -> list[Completion]:
        """Answers to prompts, `request.samples` to each, with the random numbers that `Decoder.start` would use.

        Raises:
          UsageError: as `check`.
          RunError: a strategy that left no token.
        """
        self.check(prompts, request)
        row_N, sample_N = np.divmod(np.arange(len(prompts) * request.samples, dtype=np.uint32), request.samples)
        key_N = choose.folded(choose.folded(jax.random.key(request.seed), first + row_N), sample_N)
        contexts = [prompts[row].tolist() for row in row_N]
        begins = [len(context) for context in contexts]
        numbers: list[tuple[np.ndarray, np.ndarray]] = []
        finish = [Finish.RUNNING] * len(contexts)
        ends = (self.tokenizer.eos_id,) if request.end_ids is None else request.end_ids
        lengths = [0] * len(contexts)
        for step in range(request.max_tokens):
            token_N, *told = self._next(contexts, request.steps, choose.folded(key_N, step))
            numbers.append((told[0], told[1]))
            for row, token in enumerate(token_N.tolist()):
                if finish[row] is not Finish.RUNNING:
                    continue
                contexts[row].append(token)
                lengths[row] += 1
                answer = contexts[row][begins[row] :]
                if token in ends:
                    finish[row] = Finish.END
                elif request.stops and first_stop(self.tokenizer.decode(answer), request.stops) is not None:
                    finish[row] = Finish.STOP
                elif step + 1 == request.max_tokens:
                    finish[row] = Finish.LENGTH
            if Finish.RUNNING not in finish:
                break
        raw_NG, processed_NG = (np.stack(parts, axis=1) for parts in zip(*numbers, strict=True))
        found = []
        for row, length in enumerate(lengths):
            raw, processed = raw_NG[row, :length], processed_NG[row, :length]
            check_numbers(row, raw, processed)
            tokens = np.array(contexts[row][begins[row] :], np.int32)
            answer = Completion(tokens, raw, processed, b"", finish[row])
            found.append(with_text(answer, self.tokenizer, request.stops))
        return found

    def _next(self, contexts: Sequence[list[int]], steps: Strategy, key_N: jax.Array) -> tuple[np.ndarray, ...]:
        """A token for each context, with its log-probabilities under the counts and under the strategy."""
        V, counts_NV = self.counts.config.vocab_size, None
        if strategy.needs_counts(steps):
            counts_NV = np.stack([np.bincount(context, minlength=V) for context in contexts]).astype(np.int32)
        with np.errstate(divide="ignore"):
            logits_NV = np.log(np.stack([self.counts.distribution(context) for context in contexts]))
        return jax.device_get(_chosen(steps, logits_NV.astype(np.float32), counts_NV, key_N))


@jax.jit
def _chosen(
    steps: Strategy, logits_NV: jax.Array, counts_NV: jax.Array | None, key_N: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    processed_NV = strategy.apply(steps, logits_NV, counts_NV)
    token_N = choose.draw(processed_NV, key_N)
    raw_N, processed_N = (token_log_probs(of[:, None], token_N[:, None])[:, 0] for of in (logits_NV, processed_NV))
    return token_N, raw_N, processed_N


@dataclasses.dataclass
class Counted(Method):
    """One token after the other, each from the counts by the request's strategy."""

    decoder: CountingDecoder
    request: Request
    clock: Clock = dataclasses.field(default_factory=Clock)

    def answers(self, prompts: Sequence[Prompt], first: int) -> list[list[Answer]]:
        with self.clock.whole():
            found = self.decoder.complete(self.decoder.encode(prompts), self.request, first=first)
        self.clock.tokens += sum(len(completion.tokens) for completion in found)
        return [[Answer(completion, {}) for completion in group] for group in by_prompt(found, self.request.samples)]

    def settings(self) -> dict[str, Any]:
        return {"full": None}  # a context that never is

    def report(self) -> str:
        return f"{self.clock.tokens_per_second:,.1f} tokens/s from counts, compiling {self.clock.compile:.2f} s"


def counted_of(args: argparse.Namespace, decoder: CountingDecoder, request: Request) -> Counted:
    """The way that the arguments of `lm generate` ask for, of counts.

    Raises:
      UsageError: an option that is not for counts, by its name.
    """
    for name in _NOT_FOR_COUNTS:
        if getattr(args, name) is not None:
            raise UsageError("is not for counts, which sample token by token", where=f"--{name.replace('_', '-')}",
                             do="Leave it out.")  # fmt: skip
    if args.cache != "model":
        raise UsageError("is about keys and values, which counts have not", where="--cache", do="Leave it out.")
    return Counted(decoder, request)
