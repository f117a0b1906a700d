"""The file that `lm compress` writes: what it needs to be read back, checks, and the messages bit to bit.

    "LMAC"  version (uint16)  length of the facts (uint32)  facts (JSON)
    for each block: bits of its message, CRC-32 of them in whole bytes, CRC-32 of its text (uint32 each)
    CRC-32 of all of that (uint32)
    the messages, without gaps, the last byte filled up with zeros

Integers are little-endian. The first check of a block finds a damaged file before any model has run, the second one a
model, a machine or a version that computes other probabilities.
"""

import dataclasses
import json
import re
import struct
import zlib

import numpy as np

from lm.base.config import canonical_json, differences
from lm.base.errors import RunError, UsageError

MAGIC = b"LMAC"
VERSION = 1  # of this layout, of the coder and of how frequencies come from logits
_HEAD = struct.Struct("<4sHI")
_BLOCK = struct.Struct("<III")
_CHECK = struct.Struct("<I")
_LONG_HASH = re.compile("([0-9a-f]{12})[0-9a-f]{52}")


@dataclasses.dataclass(frozen=True)
class Facts:
    """How a file was made; decoding needs all of it to be the same again.

    `size` counts the bytes of the original, `tokens` all blocks' tokens, which differ by at most one between blocks:
    the first ones are the longer. `overlap` tokens are read again where the context is full. `model`, `tokenizer` and
    `platform` are what may not differ: SHA-256 of parameters and configuration, the tokenizer's fingerprint, and what
    may change the last bit of a logit.
    """

    size: int
    tokens: int
    blocks: int
    overlap: int
    model: str
    tokenizer: str
    platform: dict[str, str]

    def differences(self, model: str, tokenizer: str, platform: dict[str, str]) -> list[str]:
        """What differs, as `name: at compression -> now` lines, of hashes the beginning."""
        then = {"model": self.model, "tokenizer": self.tokenizer, "platform": self.platform}
        now = {"model": model, "tokenizer": tokenizer, "platform": platform}
        return [_LONG_HASH.sub(r"\1...", line) for line in differences(then, now, "compressed with")]


@dataclasses.dataclass(frozen=True)
class Container:
    """A file's facts, its messages (an array of bits a block) and the CRC-32 of each block's text."""

    facts: Facts
    messages: list[np.ndarray]
    text_checks: list[int]

    def pack(self) -> bytes:
        """The whole file."""
        facts = canonical_json(self.facts).encode()
        head = _HEAD.pack(MAGIC, VERSION, len(facts)) + facts
        for bits, check in zip(self.messages, self.text_checks, strict=True):
            head += _BLOCK.pack(len(bits), _check_of(bits), check)
        every_bit = np.concatenate([np.zeros(0, np.uint8), *self.messages])
        return head + _CHECK.pack(zlib.crc32(head)) + np.packbits(every_bit).tobytes()

    @property
    def payload_bits(self) -> int:
        """What the messages take."""
        return sum(map(len, self.messages))


def unpack(file: bytes, where: str) -> Container:
    """Reads what `pack` wrote.

    Raises:
      UsageError: not such a file, or one of another version.
      RunError: a truncated or damaged file; damaged blocks are named.
    """
    if file[: len(MAGIC)] != MAGIC[: len(file)] or not file:
        raise UsageError("was not written by `lm compress`", where=where)
    if len(file) < _HEAD.size:
        raise _truncated(len(file), _HEAD.size, where)
    _, version, length = _HEAD.unpack_from(file)
    if version != VERSION:
        raise UsageError(f"has version {version} of the format; this program reads version {VERSION}", where=where)
    try:
        facts = Facts(**json.loads(file[_HEAD.size : _HEAD.size + length]))
        if not (0 <= facts.blocks <= facts.tokens and facts.overlap >= 1):
            raise ValueError
    except (ValueError, TypeError):
        if len(file) < _HEAD.size + length:
            raise _truncated(len(file), _HEAD.size + length, where) from None
        raise _damaged_header(where) from None
    begin = _HEAD.size + length
    end = begin + facts.blocks * _BLOCK.size
    if len(file) < end + _CHECK.size:
        raise _truncated(len(file), end + _CHECK.size, where)
    if _CHECK.unpack_from(file, end) != (zlib.crc32(file[:end]),):
        raise _damaged_header(where)
    table = list(_BLOCK.iter_unpack(file[begin:end]))
    payload = np.frombuffer(file, np.uint8, offset=end + _CHECK.size)
    total = sum(bits for bits, _, _ in table)
    if len(payload) * 8 < total:
        raise _truncated(len(file), len(file) - len(payload) + -(-total // 8), where)
    if len(payload) > -(-total // 8):
        raise RunError(f"has {len(payload) - -(-total // 8):,} bytes behind its end", where=where)
    every_bit = np.unpackbits(payload)
    if every_bit[total:].any():
        raise RunError("is damaged: the bits that fill up its last byte are not zero", where=where)
    messages = np.split(every_bit[:total], np.cumsum([bits for bits, _, _ in table])[:-1]) if table else []
    damaged = [block for block, bits in enumerate(messages) if _check_of(bits) != table[block][1]]
    if damaged:
        raise RunError(f"is damaged in {name_blocks(damaged, len(table))}", where=where)
    return Container(facts, messages, [check for _, _, check in table])


def name_blocks(which: list[int], count: int) -> str:
    """Blocks by number, the first one 1."""
    return f"block {', '.join(str(block + 1) for block in which)} of {count}"


def _check_of(bits: np.ndarray) -> int:
    return zlib.crc32(np.packbits(bits).tobytes())


def _truncated(length: int, needed: int, where: str) -> RunError:
    return RunError(f"is truncated: {length:,} bytes where at least {needed:,} are needed", where=where)


def _damaged_header(where: str) -> RunError:
    return RunError("is damaged: its header does not match its check", where=where)
