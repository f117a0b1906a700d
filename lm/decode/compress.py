"""Any bytes to few bits and back, with a language model as the source of probabilities.

The bytes become tokens, the tokens are cut into B blocks of equal length, and the blocks are rows of one batch. Both
directions run the same compiled single-token step on that batch, so that the probabilities are the same bits: a
program that saw whole sequences at once would round differently. Everything after the logits is integers.

Context. Each block begins as a document does. Where the context is full, the last `overlap` tokens are read again in
one pass and the rest is forgotten, so that a token is predicted from `overlap` to context_length tokens. What is read
again is an encoder's source, where there is one.
"""

import dataclasses
import math
import time
import zlib
from collections import deque
from typing import Any

import jax
import numpy as np

from lm.base.errors import RunError, UsageError
from lm.base.progress import Bar, bar
from lm.data.tokenizer import Tokenizer
from lm.decode import loop
from lm.decode.coder import Decoder, Encoder, information
from lm.decode.container import Container, Facts, name_blocks, unpack
from lm.decode.fingerprint import model_hash, platform_facts
from lm.decode.frequencies import LARGEST_VOCABULARY, find, interval, quantise
from lm.decode.spelling import Speller
from lm.decode.weights import lay_out
from lm.model.cache import Cache, empty_cache
from lm.model.config import ModelConfig
from lm.model.score import token_log_probs

MOST_BLOCKS = 64
BLOCK_TOKENS = 4096  # fewer do not pay for a block's start without context and its 12 bytes of checks
AT_ONCE = 32  # steps between looks at the device when all tokens are known


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compression cost: bits, bytes and seconds.

    `model_bits` is the information of the tokens under the model, `quantised_bits` under its integer frequencies,
    `payload_bits` what the messages take; `header_bytes` (checks included) come on top. `coder_seconds` is the part of
    `seconds` in which the host was in the coder.
    """

    size: int
    tokens: int
    blocks: int
    model_bits: float
    quantised_bits: float
    payload_bits: int
    header_bytes: int
    parameter_bytes: int
    seconds: float
    coder_seconds: float


@dataclasses.dataclass
class _Cost:
    """The sums of a report while they grow."""

    model_bits: float = 0.0
    quantised_bits: float = 0.0
    coder_seconds: float = 0.0


class Compressor:
    """A model with its tokenizer, ready for both directions.

    Raises:
      UsageError: a tokenizer that cannot spell every byte, has more tokens than the coder has room for, or more than
        the model.
    """

    def __init__(self, config: ModelConfig, params: Any, tokenizer: Tokenizer):
        room = min(config.vocab_size, LARGEST_VOCABULARY)
        if tokenizer.vocab_size > room:
            raise UsageError(f"has {tokenizer.vocab_size} tokens; there is room for {room}", where="tokenizer")
        self.config, self.tokenizer = config, tokenizer
        self.speller = Speller(tokenizer)
        self.identity = model_hash(config, params)
        self.parameter_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        self.model, self.params = lay_out(config, params)

    def compress(
        self, data: bytes, *, blocks: int | None = None, overlap: int | None = None, progress: bool = False
    ) -> tuple[bytes, Report]:
        """The compressed file and what it cost.

        Args:
          blocks: coded side by side; None: one for each `BLOCK_TOKENS` tokens, `MOST_BLOCKS` at most.
          overlap: tokens read again where the context is full; None: half of it, or all of an encoder's source.
          progress: shows a bar with tokens/s and the time left, on a terminal.

        Raises:
          UsageError: `blocks` or `overlap` out of range.
          RunError: the model gives no probability to a token.
        """
        began, encoder = time.perf_counter(), self.config.encoder
        if overlap is None:
            overlap = max(1, self.config.context_length // 2) if encoder is None else encoder.source_length
        if not 1 <= overlap <= self._longest:
            what = "context" if encoder is None else "source"
            raise UsageError(f"{overlap} is not between 1 and the {what} length {self._longest}", where="overlap")
        if blocks is not None and blocks < 1:
            raise UsageError(f"{blocks} is not at least 1", where="blocks")
        tokens = self.speller.tokens(data)
        blocks = min(len(tokens) // BLOCK_TOKENS, MOST_BLOCKS) if blocks is None else blocks
        blocks = min(max(blocks, 1), len(tokens))
        token_BN, length_B = _in_rows(tokens, blocks)
        cost = _Cost()
        with bar("compress", len(tokens), shown=progress) as line:
            messages = self._encode(token_BN, length_B, overlap, cost, line)
        container = Container(
            Facts(len(data), len(tokens), blocks, overlap, self.identity, self.tokenizer.fingerprint, platform_facts()),
            messages,
            [zlib.crc32(text) for text in self._texts(token_BN, length_B)],
        )
        file = container.pack()
        return file, Report(
            size=len(data),
            tokens=len(tokens),
            blocks=blocks,
            payload_bits=container.payload_bits,
            header_bytes=len(file) - -(-container.payload_bits // 8),
            parameter_bytes=self.parameter_bytes,
            seconds=time.perf_counter() - began,
            **dataclasses.asdict(cost),
        )

    def decompress(self, file: bytes, *, where: str = "file", force: bool = False, progress: bool = False) -> bytes:
        """The bytes that `compress` was given.

        Args:
          where: names the file in errors.
          force: tries although model, tokenizer or platform are not those of the compression: the checks then tell.
          progress: shows a bar with tokens/s and the time left, on a terminal.

        Raises:
          UsageError: not a compressed file, or made by another model, tokenizer, platform or version.
          RunError: a truncated or damaged file, or blocks whose text is not the one that was compressed.
        """
        container = unpack(file, where)
        facts = container.facts
        found = facts.differences(self.identity, self.tokenizer.fingerprint, platform_facts())
        if found and not force:
            raise UsageError(
                f"cannot be decoded exactly: {'; '.join(found)}",
                where=where,
                do="Use what it was compressed with, or --force to try: every block has a check.",
            )
        if facts.overlap > self._longest:
            what = f"needs {facts.overlap} tokens of context; the model has {self._longest}"
            raise UsageError(what, where=where)
        token_BN, length_B = _in_rows(np.zeros(facts.tokens, np.int32), facts.blocks)
        with bar("decompress", facts.tokens, shown=progress) as line:
            self._decode(container.messages, token_BN, facts.overlap, line)
        texts = self._texts(token_BN, length_B)
        wrong = [block for block, text in enumerate(texts) if zlib.crc32(text) != container.text_checks[block]]
        if wrong:
            raise RunError(
                f"{name_blocks(wrong, facts.blocks)} did not decode to what was compressed: the model's probabilities "
                "are not the same to the bit",
                where=where,
                do="Decode on the machine and with the versions of the compression.",
            )
        return b"".join(texts)

    @property
    def _longest(self) -> int:
        """Tokens that one pass can read at the most."""
        encoder = self.config.encoder
        return self.config.context_length if encoder is None else encoder.source_length

    def _encode(
        self, token_BN: np.ndarray, length_B: np.ndarray, overlap: int, cost: _Cost, line: Bar
    ) -> list[np.ndarray]:
        rows, steps = token_BN.shape
        encoder, reader, began = Encoder(rows), _Reader(self, rows, overlap), time.perf_counter()
        previous_B = np.full(rows, self.tokenizer.bos_id, np.int32)
        for first in range(0, steps, AT_ONCE):
            waiting = []
            for token_B in token_BN[:, first : first + AT_ONCE].T:
                logits_BV = reader.after(previous_B)
                waiting.append((*interval(quantise(logits_BV), token_B), _log_probs(logits_BV, token_B)))
                previous_B = token_B
            fetched, coding = jax.device_get(waiting), time.perf_counter()
            for at, (start_B, frequency_B, log_prob_B) in enumerate(fetched, first):
                active_B = at < length_B
                encoder.add(start_B, frequency_B, active_B)
                cost.quantised_bits += float(np.sum(information(frequency_B)[active_B]))
                cost.model_bits -= float(np.sum(log_prob_B[active_B], dtype=np.float64)) / math.log(2)
            cost.coder_seconds += time.perf_counter() - coding
            if not math.isfinite(cost.model_bits):
                raise RunError("the model gives no probability to a token: its logits are not finite", where="model")
            _show(line, (first + len(fetched)) * rows, began)
        return encoder.finish()

    def _decode(self, messages: list[np.ndarray], token_BN: np.ndarray, overlap: int, line: Bar) -> None:
        """Fills `token_BN`; a row that ends one token before others gets one that means nothing."""
        rows, steps = token_BN.shape
        decoder, reader, began = Decoder(messages), _Reader(self, rows, overlap), time.perf_counter()
        token_B = np.full(rows, self.tokenizer.bos_id, np.int32)
        found: tuple[jax.Array, ...] = ()
        for at in range(steps):
            frequency_BV = quantise(reader.after(token_B))
            if found:  # only now: the device reads the token while the host brings the coder behind it
                decoder.take(*map(np.asarray, found))
            found_B, *found = find(frequency_BV, decoder.targets())
            token_B = token_BN[:, at] = np.asarray(found_B)
            if at % AT_ONCE == 0:
                _show(line, at * rows, began)

    def _texts(self, token_BN: np.ndarray, length_B: np.ndarray) -> list[bytes]:
        return [self.tokenizer.decode(row[:length]) for row, length in zip(token_BN, length_B, strict=True)]


class _Reader:
    """Reads B rows token by token, and gives the logits of the next one: the only way to logits in both directions."""

    def __init__(self, compressor: Compressor, rows: int, overlap: int):
        self._compressor, self._rows, self._overlap = compressor, rows, overlap
        self._recent: deque[np.ndarray] = deque(maxlen=overlap)
        self._one_B = np.ones(rows, np.int32)
        self._cache: Cache | None = None
        self._used = 0

    def after(self, token_B: np.ndarray) -> jax.Array:
        """The logits [B, V] after `token_B` (int32 [B]), over the tokenizer's tokens."""
        compressor = self._compressor
        self._recent.append(token_B)
        context = compressor.config.predicted_length
        if self._cache is None or self._used == context:
            count = len(self._recent)
            part_BT = np.zeros((self._rows, self._overlap), np.int32)
            part_BT[:, self._overlap - count :] = np.stack(self._recent, axis=1)
            count_B, fresh = np.full(self._rows, count, np.int32), True
            self._cache = empty_cache(compressor.config, self._rows, context, apart=True)
            self._used = count if compressor.config.encoder is None else 1
        else:
            part_BT, count_B, fresh = token_B[:, None], self._one_B, False
            self._used += 1
        logits_BV, self._cache = loop.prefill(
            compressor.model, compressor.params, part_BT, count_B, self._cache, fresh=fresh
        )
        known = compressor.tokenizer.vocab_size
        return logits_BV if known == logits_BV.shape[1] else logits_BV[:, :known]


def _show(line: Bar, tokens: int, began: float) -> None:
    line.update(tokens, f"{tokens / (time.perf_counter() - began):,.0f} tokens/s")


@jax.jit
def _log_probs(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    return token_log_probs(logits_BV[:, None], token_B[:, None])[:, 0]


def _in_rows(tokens: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens cut into rows [B, N] whose lengths [B] differ by at most one, the first ones the longer."""
    parts = np.array_split(tokens, rows) if rows else []
    length_B = np.array([len(part) for part in parts], np.int64)
    token_BN = np.zeros((rows, int(length_B.max(initial=0))), np.int32)
    for row, part in zip(token_BN, parts, strict=True):
        row[: len(part)] = part
    return token_BN, length_B
