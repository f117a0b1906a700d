"""Prompts in, completions out: lengths are rounded up to buckets, so that few programs are compiled."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.base.errors import RunError, UsageError
from lm.data.tokenizer import Tokenizer
from lm.decode import loop, strategy
from lm.decode.choose import folded
from lm.decode.constrain import Automaton, Constraint
from lm.decode.loop import Finish, Limits, State
from lm.decode.request import Completion, Full, Request
from lm.decode.slots import CHUNK, bucket, more_slots, slots_for
from lm.decode.text import first_stop
from lm.decode.weights import lay_out
from lm.model.accounting import cache_bytes
from lm.model.cache import Cache, empty_cache, forget, grow, take_rows
from lm.model.config import CacheDtype, ModelConfig

STOP_CHECK = 16  # tokens between looks at the text for stop strings

Prompt = str | np.ndarray
"""A text, which begins a document; or ids, taken as they are."""


class Prefilled(NamedTuple):
    """Prompts that were read: the logits after each, the cache with them, and when their answers end."""

    logits_BV: jax.Array
    cache: Cache
    limits: Limits


@dataclasses.dataclass(frozen=True)
class Session:
    """Rows under way; every change gives a new one, and the one before is used up (its memory is written over).

    `context` holds the ids of each row up to its answer: prompts and earlier answers.
    """

    state: State
    limits: Limits
    request: Request
    context: tuple[np.ndarray, ...]

    @property
    def done(self) -> bool:
        """Whether every row has ended."""
        return bool(np.all(np.asarray(self.state.finish_B) != Finish.RUNNING))


class Decoder:
    """A model laid out for decoding, with its tokenizer.

    Raises:
      UsageError: a vocabulary smaller than the tokenizer's, or int8 for a model without keys and values.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer,
        *,
        cache_dtype: CacheDtype = CacheDtype.MODEL,
        unstack: bool = True,
    ):
        if config.vocab_size < tokenizer.vocab_size:
            raise UsageError(
                f"the model has {config.vocab_size} tokens, the tokenizer {tokenizer.vocab_size}", where="tokenizer"
            )
        if cache_dtype is CacheDtype.INT8 and config.mixer.recurrent:
            what = f"mixer is {config.mixer}: there are no keys and values to keep in int8"
            raise UsageError(what, where="cache", do="Leave it at model.")
        self.config, self.tokenizer, self.cache_dtype = config, tokenizer, cache_dtype
        self.model, self.params = lay_out(config, params, unstack=unstack)
        self._parameter_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    def encode(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Ids of the prompts, an array a row.

        Raises:
          UsageError: a text that is not Unicode.
        """
        return encoded(prompts, self.tokenizer)

    def check(self, prompts: Sequence[np.ndarray], request: Request) -> None:
        """Refuses prompts (ids, an array a row) that `prefill` would refuse: all of a long list before its first part.

        Raises:
          UsageError: as `prefill`.
        """
        self._allowed(self._checked(prompts), request)

    def prefill(
        self, prompts: Sequence[np.ndarray], request: Request, *, spare: int = 0, whole: bool = True
    ) -> Prefilled:
        """Reads the prompts (ids, an array a row) into a cache with room for the answers and `spare` tokens more.

        An encoder takes their last `source_length` tokens. Unless the `whole` is asked for, a cache that costs more to
        read than the parameters has only room for the beginning: `advance` makes it longer.

        Raises:
          UsageError: no prompt, an empty one, an id outside the vocabulary, or more tokens than the context holds.
        """
        longest, rows = bucket(max(self._places(prompts), default=0)), len(prompts) * request.samples
        slots, apart = slots_for(longest + request.max_tokens + spare), self.model.unstacked
        size = 1 if self.cache_dtype is CacheDtype.INT8 else jnp.dtype(self.config.dtype.value).itemsize
        if not whole and cache_bytes(self.config, slots, rows, size) > self._parameter_bytes:
            slots = slots_for(longest + 1)
        cache = empty_cache(self.config, len(prompts), slots, self.cache_dtype, spare=spare, apart=apart)
        return self._prefill(prompts, cache, request, fresh=True)

    def start(self, prompts: Sequence[np.ndarray], request: Request, *, spare: int = 0, first: int = 0) -> Session:
        """Reads the prompts as `prefill` and chooses the first token of each answer; a row an answer.

        `first` is the number of the first prompt: pieces of a list are sampled as the whole list would be.

        Raises:
          UsageError: as `prefill`; or no sample was asked for.
        """
        if request.samples < 1:
            raise UsageError(f"{request.samples} samples were asked for", where="samples", do="Ask for at least 1.")
        read = self.prefill(prompts, request, spare=spare, whole=spare > 0)
        row_N, sample_N = np.divmod(np.arange(len(prompts) * request.samples, dtype=np.uint32), request.samples)
        if request.samples > 1:
            read = repeated(read, row_N)
        key_N = folded(folded(jax.random.key(request.seed), first + row_N), sample_N)
        return self._first(read, [prompts[row] for row in row_N], key_N, request)

    def go_on(self, session: Session, prompts: Sequence[np.ndarray], request: Request | None = None) -> Session:
        """Another turn: each row's context, its answer and then its new prompt, which may be empty, are the context.

        The cache is kept. After a stop string the answer ends with the token that completed it. Where a sliding window
        has moved past what a row needs (it ended long before the others), or a state past its stop string, and by an
        encoder, everything is read again.

        Raises:
          UsageError: as `start`; not a prompt for every row; or a session that was used up.
        """
        request = session.request if request is None else request
        state = _fresh(session).state
        if len(prompts) != len(session.context):
            raise UsageError(f"{len(prompts)} prompts for {len(session.context)} rows", where="prompts")
        before = [
            np.concatenate([known, answer.tokens])
            for known, answer in zip(session.context, self.completions(session), strict=True)
        ]
        context = [np.concatenate(parts).astype(np.int32) for parts in zip(before, prompts, strict=True)]
        key_B = folded(state.key_B, state.step)
        kept_B = np.array([len(known) - 1 for known in before], np.int32)  # the last one is chosen, but not read yet
        if self._lost(state.cache, kept_B):
            return self._first(self.prefill(context, request), context, key_B, request)
        cache = forget(state.cache, jnp.asarray(kept_B))
        new = [known[kept:] for known, kept in zip(context, kept_B, strict=True)]
        slots = slots_for(int(kept_B.max()) + bucket(max(len(part) for part in new)) + request.max_tokens)
        read = self._prefill(new, grow(cache, self.config, slots), request, fresh=False)
        return self._first(read, context, key_B, request)

    def advance(self, session: Session, until: int) -> Session:
        """Goes on until every row has `until` tokens or has ended; stop strings are looked for in between.

        Raises:
          UsageError: a session that was used up.
          RunError: as `completions`, as far as they are looked at.
        """
        request = _fresh(session).request
        at = int(session.state.step)
        while at < until and not session.done:
            state, free = self._with_room(session)
            at = min(until, at + free, at + STOP_CHECK if request.stops else until)
            state = loop.advance(
                self.model, self.params, state, request.steps, session.limits, jnp.asarray(at, jnp.int32)
            )
            session = self.stopped(session, state)
        return session

    def _with_room(self, session: Session) -> tuple[State, int]:
        """The state with room for another token, and for how many."""
        state = session.state
        if self.config.reach is not None:
            return state, session.request.max_tokens
        used, slots = int(state.cache.next), state.cache.slots
        if used == slots:
            left = session.request.max_tokens - int(state.step)
            state = state._replace(cache=longer(state.cache, self.config, more_slots(slots, used + left)))
        return state, state.cache.slots - used

    def stopped(self, session: Session, state: State) -> Session:
        """The session with a newer state, in which rows that hold a stop string have ended."""
        session = dataclasses.replace(session, state=state)
        if not session.request.stops:
            return session
        stopped_B = np.array([answer.finish is Finish.STOP for answer in self.completions(session)])
        finish_B = jnp.where(stopped_B, Finish.STOP, state.finish_B)
        return dataclasses.replace(session, state=state._replace(finish_B=finish_B))

    def completions(self, session: Session) -> list[Completion]:
        """What the rows hold so far, cut at the first stop string.

        Raises:
          UsageError: a session that was used up.
          RunError: logits that are not numbers, or a strategy that left no token.
        """
        state, stops = _fresh(session).state, session.request.stops
        arrays = jax.device_get((state.token_BG, state.raw_BG, state.processed_BG, state.taken_B, state.finish_B))
        found = []
        for row, (tokens, raw, processed, length, finish) in enumerate(zip(*arrays, strict=True)):
            check_numbers(row, raw[:length], processed[:length])
            whole = Completion(tokens[:length], raw[:length], processed[:length], b"", Finish(int(finish)))
            found.append(with_text(whole, self.tokenizer, stops))
        return found

    def _prefill(self, prompts: Sequence[np.ndarray], cache: Cache, request: Request, *, fresh: bool) -> Prefilled:
        used_B = self._checked(prompts) + np.asarray(cache.length_B)
        if max(request.end_ids or (0,)) >= self.config.vocab_size:
            what = f"there is no token {max(request.end_ids or ())}: the vocabulary has {self.config.vocab_size}"
            raise UsageError(what, where="end_ids")
        allowed_B = self._allowed(used_B, request)
        end_ids = (self.tokenizer.eos_id,) if request.end_ids is None else request.end_ids
        automaton = self._automaton(request.constraint, end_ids, allowed_B)
        logits_BV, cache = self._read(prompts, cache, fresh)
        limits = Limits(
            jnp.asarray([*end_ids] or [-1], jnp.int32),
            jnp.asarray(allowed_B, jnp.int32),
            jnp.asarray(allowed_B < request.max_tokens),
            automaton,
        )
        return Prefilled(logits_BV, cache, limits)

    def _first(self, read: Prefilled, prompts: Sequence[np.ndarray], key_B: jax.Array, request: Request) -> Session:
        counts_BV = None
        if strategy.needs_counts(request.steps):
            counts = [np.bincount(prompt, minlength=self.config.vocab_size) for prompt in prompts]
            counts_BV = jnp.asarray(np.stack(counts), jnp.int32)
        steps, most = request.steps, bucket(request.max_tokens)
        state = loop.begin(read.logits_BV, read.cache, steps, read.limits, key_B, counts_BV, room=most)
        return Session(state, read.limits, request, tuple(prompts))

    def _automaton(
        self, constraint: Constraint | None, end_ids: tuple[int, ...], allowed_B: np.ndarray
    ) -> Automaton | None:
        if constraint is None:
            return None
        spelled = [end for end in end_ids if end < self.tokenizer.vocab_size and self.tokenizer.token_bytes[end]]
        if spelled:
            raise UsageError(f"the end token {spelled[0]} is text, which the constraint is about", where="end_ids")
        automaton = constraint.over(self.tokenizer, self.config.vocab_size)
        if automaton.shortest > allowed_B.min():
            raise UsageError(
                f"the shortest answer under the constraint has {automaton.shortest} tokens and "
                f"{allowed_B.min()} are allowed",
                where="max_tokens",
            )
        return automaton

    def _lost(self, cache: Cache, kept_B: np.ndarray) -> bool:
        """Whether a row cannot go on from its first `kept_B` tokens: one that the next sees is not there."""
        if self.config.encoder is not None:
            return True
        if self.config.mixer.recurrent:
            return bool((np.asarray(cache.length_B) > kept_B).any())
        if self.config.reach is None:
            return False
        first_B, held_BS = np.maximum(kept_B - self.config.reach + 1, 0), np.asarray(cache.position_BS)
        seen_BS = (held_BS >= first_B[:, None]) & (held_BS < kept_B[:, None])
        return bool((np.sum(seen_BS, axis=1) < kept_B - first_B).any())

    def _read(self, prompts: Sequence[np.ndarray], cache: Cache, fresh: bool) -> tuple[jax.Array, Cache]:
        """The logits [B, V] after each prompt, and the cache with them; in passes of at most `CHUNK` tokens."""
        chunk = CHUNK
        if self.config.encoder is not None:
            prompts = [prompt[-self.config.encoder.source_length :] for prompt in prompts]
            chunk = bucket(self.config.encoder.source_length)  # an encoder reads all at once
        count_B = np.array([len(prompt) for prompt in prompts], np.int32)
        length = bucket(int(count_B.max()))
        tokens_BT = np.zeros((len(prompts), length), np.int32)
        for row, prompt in zip(tokens_BT, prompts, strict=True):
            row[length - len(prompt) :] = prompt
        for end in range(min(chunk, length), length + 1, chunk):
            part_BT = tokens_BT[:, max(0, end - chunk) : end]
            inside_B = np.clip(count_B - (length - end), 0, part_BT.shape[1])
            logits_BV, cache = loop.prefill(self.model, self.params, part_BT, inside_B, cache, fresh=fresh)
            fresh = False
        return logits_BV, cache

    def _checked(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        if not prompts:
            raise UsageError("there is no prompt", where="prompts")
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise UsageError(f"prompt {row} is empty", where="prompts", do="Begin with the end-of-text token.")
            if prompt.min() < 0 or prompt.max() >= self.config.vocab_size:
                what = f"prompt {row} has an id outside the vocabulary of {self.config.vocab_size}"
                raise UsageError(what, where="prompts")
        return np.array(self._places(prompts))

    def _places(self, prompts: Sequence[np.ndarray]) -> list[int]:
        """How many tokens of each prompt the decoder reads: all, or the last one behind an encoder."""
        return [len(prompt) if self.config.encoder is None else min(len(prompt), 1) for prompt in prompts]

    def _allowed(self, used_B: np.ndarray, request: Request) -> np.ndarray:
        """How many tokens each row may get; the last one needs no place, since it is never read."""
        if request.max_tokens < 1:
            what = f"{request.max_tokens} tokens were asked for"
            raise UsageError(what, where="max_tokens", do="Ask for at least 1.")
        context = self.config.predicted_length
        room_B = context - used_B + 1
        row = int(np.argmin(room_B))
        if request.full is not Full.STOP and room_B[row] < 1:
            what = f"prompt {row} fills {used_B[row]} tokens of context; the model has {context}: none can follow"
            raise UsageError(what, where="prompts", do="Shorten it.")
        if request.full is Full.ERROR and room_B[row] < request.max_tokens:
            raise UsageError(
                f"prompt {row} fills {used_B[row]} tokens of context and {request.max_tokens} more are asked for: over "
                f"the {context} of the model",
                where="max_tokens",
                do=f"Ask for at most {room_B[row]}, or let answers be cut off there.",
            )
        return np.clip(room_B, 0, request.max_tokens)


def _fresh(session: Session) -> Session:
    if any(array.is_deleted() for array in jax.tree.leaves(session.state)):
        raise UsageError("this session has gone on already", where="session", do="Use the newer one, or start anew.")
    return session


def encoded(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Ids of prompts: see `Decoder.encode`."""
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, str) and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise UsageError(f"prompt {row} is not Unicode", where="prompts", do="Pass UTF-8.")
    texts = iter(tokenizer.encode_batch([prompt for prompt in prompts if isinstance(prompt, str)]))
    begin = np.array([tokenizer.bos_id])
    return [np.concatenate([begin, next(texts)]) if isinstance(prompt, str) else prompt for prompt in prompts]


def with_text(answer: Completion, tokenizer: Tokenizer, stops: Sequence[bytes]) -> Completion:
    """An answer with the text of its tokens; where that holds a stop string, it ends with the token that ended it."""
    tokens, length = answer.tokens, len(answer.tokens)
    text = tokenizer.decode(tokens)
    if (cut := first_stop(text, stops)) is None:
        return dataclasses.replace(answer, text=text)
    while first_stop(tokenizer.decode(tokens[: length - 1]), stops) is not None:
        length -= 1
    log_probs, after = answer.log_probs[:length], answer.strategy_log_probs[:length]
    return Completion(tokens[:length], log_probs, after, text[:cut], Finish.STOP)


def check_numbers(row: int, raw: np.ndarray, processed: np.ndarray) -> None:
    """Raises a RunError where a log-probability is not a number: under the model, or under the strategy."""
    if np.isnan(raw).any():
        raise RunError(f"the logits before token {int(np.argmax(np.isnan(raw)))} of answer {row} are not numbers",
                       do="The parameters are not usable: take an earlier checkpoint.")  # fmt: skip
    if np.isnan(processed).any():
        raise RunError(f"the strategy left no token at {int(np.argmax(np.isnan(processed)))} of answer {row}",
                       do="Forbid fewer.")  # fmt: skip


longer = jax.jit(grow, static_argnums=(1, 2))


@jax.jit
def repeated(read: Prefilled, row_N: jax.Array) -> Prefilled:
    """N rows, each a copy of row `row_N` of what was read: several answers to one prompt."""
    limits = read.limits._replace(tokens_B=read.limits.tokens_B[row_N], full_B=read.limits.full_B[row_N])
    return Prefilled(read.logits_BV[row_N], take_rows(read.cache, row_N), limits)


def generate(decoder: Decoder, prompts: Sequence[Prompt], request: Request = Request()) -> list[Completion]:
    """Answers to prompts, `request.samples` to each, one prompt after the other.

    Raises:
      UsageError: no prompt, or more tokens than the context holds.
    """
    *_, session = stream(decoder, prompts, request, request.max_tokens)
    return decoder.completions(session)


def stream(
    decoder: Decoder, prompts: Sequence[Prompt], request: Request, tokens: int, *, first: int = 0
) -> Iterator[Session]:
    """The session after the first token of the answers and after every `tokens` more, until all rows have ended.

    Each session is used up by the next one. `first` is as in `Decoder.start`.
    """
    session = decoder.start(decoder.encode(prompts), request, first=first)
    yield session
    for at in range(1 + tokens, request.max_tokens + tokens, tokens):
        if session.done:
            return
        session = decoder.advance(session, min(at, request.max_tokens))
        yield session
