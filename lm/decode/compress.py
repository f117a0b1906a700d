"""Any bytes to few bits and back, with a language model as the source of probabilities.

The bytes become tokens, the tokens are cut into B blocks of equal length, and the blocks are rows of one batch. Both
directions run the same compiled single-token step on that batch, so that the probabilities are the same bits: a
program that saw whole sequences at once would round differently. Everything after the logits is integers.

Context. Each block begins as a document does. Where the context is full, the last `overlap` tokens are read again in
one pass and the rest is forgotten, so that a token is predicted from `overlap` to context_length tokens.
"""

import dataclasses
import hashlib
import math
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm
from lm.base.config import canonical_json
from lm.base.errors import RunError, UsageError
from lm.data.tokenizer import Tokenizer
from lm.decode import loop
from lm.decode.coder import TOTAL_BITS, Decoder, Encoder, information
from lm.decode.container import Container, Facts, name_blocks, unpack
from lm.decode.weights import lay_out
from lm.model.cache import Cache, empty_cache
from lm.model.config import ModelConfig
from lm.model.score import token_log_probs
from lm.run.record import environment

MOST_BLOCKS = 64
BLOCK_TOKENS = 4096  # fewer tokens than that do not pay for a block's start without context and its 12 bytes of checks
FETCHED_AT_ONCE = 32  # steps that the device is ahead of the coder when all tokens are known
LARGEST_VOCABULARY = 2**18
_HALF = 14  # bits; weights have 28 and are added up in two halves, so that 2^18 of them fit into uint32

Progress = Callable[[int], None]


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


class Compressor:
    """A model with its tokenizer, ready for both directions.

    Raises:
      UsageError: a tokenizer that cannot spell every byte, more tokens than the coder has room for, or a vocabulary
        smaller than the tokenizer's.
    """

    def __init__(self, config: ModelConfig, params: Any, tokenizer: Tokenizer):
        if not tokenizer.vocab_size <= min(config.vocab_size, LARGEST_VOCABULARY):
            what = f"{tokenizer.vocab_size} tokens; the model has {config.vocab_size}, the coder {LARGEST_VOCABULARY}"
            raise UsageError(what, where="tokenizer")
        self.config, self.tokenizer = config, tokenizer
        self.byte_ids = _byte_ids(tokenizer)
        self.identity = model_hash(config, params)
        self.parameter_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        self.model, self.params = lay_out(config, params)

    def compress(
        self, data: bytes, *, blocks: int | None = None, overlap: int | None = None, progress: Progress | None = None
    ) -> tuple[bytes, Report]:
        """The compressed file and what it cost.

        Args:
          blocks: coded side by side; None: one for each `BLOCK_TOKENS` tokens, `MOST_BLOCKS` at most.
          overlap: tokens read again where the context is full; None: half of it.
          progress: called with the number of tokens done.

        Raises:
          UsageError: `blocks` or `overlap` out of range.
          RunError: the model gives no probability to a token.
        """
        began, coder_seconds = time.perf_counter(), 0.0
        longest = self.config.context_length
        overlap = max(1, longest // 2) if overlap is None else overlap
        if not 1 <= overlap <= longest:
            raise UsageError(f"{overlap} is not between 1 and the context length {longest}", where="overlap")
        if blocks is not None and blocks < 1:
            raise UsageError(f"{blocks} blocks; there must be one at least", where="blocks")
        tokens = to_tokens(self.tokenizer, self.byte_ids, data)
        blocks = min(len(tokens) // BLOCK_TOKENS, MOST_BLOCKS) if blocks is None else blocks
        blocks = min(max(blocks, 1), len(tokens))
        token_BN, length_B = _in_rows(tokens, blocks)
        encoder, reader = Encoder(blocks), _Reader(self, blocks, overlap)
        previous_B = np.full(blocks, self.tokenizer.eos_id, np.int32)
        model_bits = quantised_bits = 0.0
        waiting: list[Any] = []
        for at, token_B in enumerate(token_BN.T):
            logits_BV = reader.after(previous_B)
            shares = _interval(quantise(logits_BV), token_B)
            waiting.append((*shares, _log_probs(logits_BV, token_B)))
            previous_B = token_B
            if len(waiting) < FETCHED_AT_ONCE and at + 1 < token_BN.shape[1]:
                continue
            fetched = jax.device_get(waiting)
            first, coding = at + 1 - len(waiting), time.perf_counter()
            for place, (start_B, frequency_B, log_prob_B) in enumerate(fetched, first):
                active_B = place < length_B
                encoder.add(start_B, frequency_B, active_B)
                quantised_bits += float(np.sum(information(frequency_B)[active_B]))
                model_bits -= float(np.sum(log_prob_B[active_B], dtype=np.float64)) / math.log(2)
            coder_seconds += time.perf_counter() - coding
            if not np.isfinite(model_bits):
                raise RunError("the model gives no probability to a token: its logits are not finite", where="model")
            waiting.clear()
            if progress is not None:
                progress(int(np.minimum(length_B, at + 1).sum()))
        checks = [zlib.crc32(text) for text in self._texts(token_BN, length_B)]
        facts = Facts(
            len(data), len(tokens), blocks, overlap, self.identity, self.tokenizer.fingerprint, platform_facts()
        )
        container = Container(facts, encoder.finish(), checks)
        file = container.pack()
        return file, Report(
            size=len(data),
            tokens=len(tokens),
            blocks=blocks,
            model_bits=model_bits,
            quantised_bits=quantised_bits,
            payload_bits=container.payload_bits,
            header_bytes=len(file) - -(-container.payload_bits // 8),
            parameter_bytes=self.parameter_bytes,
            seconds=time.perf_counter() - began,
            coder_seconds=coder_seconds,
        )

    def decompress(
        self, file: bytes, *, where: str = "file", force: bool = False, progress: Progress | None = None
    ) -> bytes:
        """The bytes that `compress` was given.

        Args:
          force: tries although model, tokenizer or platform are not those of the compression: the checks then tell.

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
        if not 1 <= facts.overlap <= self.config.context_length:
            raise UsageError(f"needs a context of {facts.overlap} tokens", where=where)
        token_BN, length_B = _in_rows(np.zeros(facts.tokens, np.int32), facts.blocks)
        decoder, reader = Decoder(container.messages), _Reader(self, facts.blocks, facts.overlap)
        steps = token_BN.shape[1]
        if steps:
            frequency_BV = quantise(reader.after(np.full(facts.blocks, self.tokenizer.eos_id, np.int32)))
        for at in range(steps):
            found_B, start_B, taken_B = _find(frequency_BV, decoder.targets())
            if at + 1 < steps:  # the device goes on while the host brings the coder up to date
                frequency_BV = quantise(reader.after(found_B))
            token_BN[:, at] = found_B
            decoder.take(np.asarray(start_B), np.asarray(taken_B))
            if progress is not None and (at + 1 == steps or at % FETCHED_AT_ONCE == 0):
                progress(int(np.minimum(length_B, at + 1).sum()))
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

    def _texts(self, token_BN: np.ndarray, length_B: np.ndarray) -> list[bytes]:
        return [self.tokenizer.decode(row[:length]) for row, length in zip(token_BN, length_B, strict=True)]


class _Reader:
    """Reads B rows token by token, and gives the logits of the next one: the only way to logits in both directions."""

    def __init__(self, compressor: Compressor, rows: int, overlap: int):
        self._compressor, self._rows, self._overlap = compressor, rows, overlap
        self._recent: deque[Any] = deque(maxlen=overlap)
        self._one_B = jnp.ones(rows, jnp.int32)
        self._cache: Cache | None = None
        self._used = 0

    def after(self, token_B: Any) -> jax.Array:
        """The logits [B, V] after `token_B` (int32 [B]), over the tokenizer's tokens."""
        compressor = self._compressor
        self._recent.append(token_B)
        context = compressor.config.context_length
        if self._cache is None or self._used == context:
            count = len(self._recent)
            part_BT = np.zeros((self._rows, self._overlap), np.int32)
            part_BT[:, self._overlap - count :] = np.stack([np.asarray(token_B) for token_B in self._recent], axis=1)
            count_B, fresh = np.full(self._rows, count, np.int32), True
            self._cache, self._used = empty_cache(compressor.config, self._rows, context), count
        else:
            part_BT, count_B, fresh = token_B[:, None], self._one_B, False
            self._used += 1
        logits_BV, self._cache = loop.prefill(
            compressor.model, compressor.params, part_BT, count_B, self._cache, fresh=fresh
        )
        return logits_BV[:, : compressor.tokenizer.vocab_size]


@jax.jit
def quantise(logits_BV: jax.Array) -> jax.Array:
    """Integer frequencies of softmax(logits), int32 [B, V]: each at least 1, 2^TOTAL_BITS together.

    exp(logit - largest) in units of 2^-28 is an integer, and the integers are added up exactly, in whatever order. Each
    token then gets 1, its share of what is left, rounded down, and the likeliest one the rest. The ones cost
    -log2(1 - V / 2^TOTAL_BITS) bits a token: 2.7e-4 at V = 50,257, 1.4e-6 for bytes. The share is scaled down by 2^-20
    (1.4e-6 bits), more than six roundings of float32 can add.
    """
    V = logits_BV.shape[1]
    weight_BV = jnp.floor(jnp.exp(logits_BV - jnp.max(logits_BV, axis=1, keepdims=True)) * 2.0**TOTAL_BITS)
    bits_BV = weight_BV.astype(jnp.uint32)
    high_B1 = jnp.sum(bits_BV >> _HALF, axis=1, keepdims=True, dtype=jnp.uint32)
    low_B1 = jnp.sum(bits_BV & (2**_HALF - 1), axis=1, keepdims=True, dtype=jnp.uint32)
    sum_B1 = high_B1.astype(jnp.float32) * 2.0**_HALF + low_B1.astype(jnp.float32)
    scale_B1 = (2**TOTAL_BITS - V) * (1 - 2.0**-20) / sum_B1
    frequency_BV = 1 + jnp.floor(weight_BV * scale_B1).astype(jnp.int32)
    rest_B1 = 2**TOTAL_BITS - jnp.sum(frequency_BV, axis=1, keepdims=True)
    index_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    return frequency_BV + jnp.where(index_BV == jnp.argmax(bits_BV, axis=1, keepdims=True), rest_B1, 0)


@jax.jit
def _interval(frequency_BV: jax.Array, token_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of the frequencies before a token, and its own."""
    index_BV = jax.lax.broadcasted_iota(jnp.int32, frequency_BV.shape, 1)
    start_B = jnp.sum(jnp.where(index_BV < token_B[:, None], frequency_BV, 0), axis=1)
    return start_B, jnp.sum(jnp.where(index_BV == token_B[:, None], frequency_BV, 0), axis=1)


@jax.jit
def _find(frequency_BV: jax.Array, target_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The token whose share holds the target, and its interval."""
    token_B = jnp.sum(jnp.cumsum(frequency_BV, axis=1) <= target_B[:, None], axis=1).astype(jnp.int32)
    return token_B, *_interval(frequency_BV, token_B)


@jax.jit
def _log_probs(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    return token_log_probs(logits_BV[:, None], token_B[:, None])[:, 0]


def to_tokens(tokenizer: Tokenizer, byte_ids: np.ndarray, data: bytes) -> np.ndarray:
    """Tokens (int32) that decode to exactly `data`.

    Text is encoded as text. Bytes that are not UTF-8, and text that the tokenizer would change (one that normalises),
    are spelled byte by byte.
    """
    if tokenizer.token_bytes.max() == 1:
        return byte_ids[np.frombuffer(data, np.uint8)]
    parts = re.split("([\udc80-\udcff]+)", data.decode("utf-8", errors="surrogateescape"))
    texts = parts[::2]  # the parts between are bytes that are not UTF-8
    ids = []
    for text, encoded in zip(texts, tokenizer.encode_batch(texts), strict=True):
        exact = tokenizer.decode(encoded) == text.encode()
        ids.append(encoded if exact else byte_ids[np.frombuffer(text.encode(), np.uint8)])
    for place, strange in enumerate(parts[1::2]):
        ids.insert(2 * place + 1, byte_ids[np.frombuffer(strange.encode(errors="surrogateescape"), np.uint8)])
    return np.concatenate(ids)


def model_hash(config: ModelConfig, params: Any) -> str:
    """SHA-256 over the configuration and over name, type, shape and bytes of every parameter."""
    found = hashlib.sha256(canonical_json(config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def platform_facts() -> dict[str, str]:
    """What may change the last bit of a logit: versions, devices, threads, instruction set, flags of the compiler."""
    facts = environment()
    names = ("jax", "jaxlib", "machine", "devices", "processes", "threads", "xla_flags")
    return {
        "lm": lm.__version__,
        **{name: facts[name] for name in names},
        "backend": jax.default_backend(),
        "instructions": _instructions(),
        "matmul_precision": str(jax.config.jax_default_matmul_precision),
        "nproc": os.environ.get("NPROC", ""),
    }


def _instructions() -> str:
    """A hash of the processor's features, empty where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]


def _byte_ids(tokenizer: Tokenizer) -> np.ndarray:
    """The id of each byte's own token, int32 [256].

    Raises:
      UsageError: some byte has none.
    """
    ids = {tokenizer.decode([i]): i for i in np.flatnonzero(tokenizer.token_bytes == 1).tolist()}
    missing = [byte for byte in range(256) if bytes([byte]) not in ids]
    if missing:
        raise UsageError(
            f"{len(missing)} bytes, 0x{missing[0]:02x} first, have no token of their own: it cannot spell every file",
            where="tokenizer",
            do="Compress with a model of bytes or of a byte-level BPE.",
        )
    return np.array([ids[bytes([byte])] for byte in range(256)], np.int32)


def _in_rows(tokens: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens cut into rows [B, N] whose lengths [B] differ by at most one, the first ones the longer."""
    parts = np.array_split(tokens, rows) if rows else []
    length_B = np.array([len(part) for part in parts], np.int64)
    token_BN = np.zeros((rows, int(length_B.max(initial=0))), np.int32)
    for row, part in zip(token_BN, parts, strict=True):
        row[: len(part)] = part
    return token_BN, length_B
