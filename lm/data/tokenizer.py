"""Text to token ids and back: raw bytes, or any Hugging Face `tokenizer.json`.

Every tokenizer has one token that ends a document (`eos_id`) and one that begins it (`bos_id`), mostly the same. Text
never turns into them: a document that spells out `<|endoftext|>` is encoded as those characters.
"""

import abc
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from lm.base.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|endofdocument|>", "[EOS]", "<|im_end|>")
_SMALLEST_BPE = 257  # every byte, and the end of a document


class Tokenizer(abc.ABC):
    """Encodes text as ids in [0, vocab_size) and decodes them to bytes.

    `token_bytes` [V] int32 counts the bytes of text that each id stands for (0 for special tokens); `fingerprint` is a
    SHA-256 that changes with anything that changes ids; `spec` is what `load_tokenizer` was given. `byte_level`: ids
    decode one by one, to the same bytes whatever stands beside them.
    """

    spec: str
    fingerprint: str
    vocab_size: int
    eos_id: int
    token_bytes: np.ndarray
    byte_level: bool

    @property
    def bos_id(self) -> int:
        """What a document begins with: what ends the one before, unless the tokenizer was given another."""
        return self.eos_id

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The int32 ids of each text, without special tokens."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        """The bytes that the ids stand for; special tokens give none. Cut anywhere, it may end within a character."""

    def encode(self, text: str) -> np.ndarray:
        """The int32 ids of one text, without special tokens."""
        return self.encode_batch([text])[0]


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8 as ids 0-255, and 256 for the end of a document."""

    spec = "bytes"
    vocab_size = 257
    eos_id = 256
    byte_level = True

    def __init__(self) -> None:
        self.fingerprint = hashlib.sha256(b"utf-8 bytes, end of text 256").hexdigest()
        self.token_bytes = np.array([1] * 256 + [0], np.int32)

    def to_json(self) -> str:
        """The content of a `tokenizer.json` that gives the same ids."""
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(_byte_of_character(), []))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens([END_OF_TEXT])
        return tokenizer.to_str()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        return array[array != self.eos_id].astype(np.uint8).tobytes()


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, with its end-of-text token found by name or named as `tokenizer.json#TOKEN`.

    Another token that begins a document is named behind it: `tokenizer.json#END#BEGIN`.

    Raises:
      UsageError: no such file, not a tokenizer, or no token that ends a document.
    """

    def __init__(self, spec: str):
        path, named, begins = (*spec.split("#", 2), "", "")[:3]
        if not Path(path).is_file():
            raise UsageError("there is no such tokenizer", where=path, do="Pass 'bytes' or a tokenizer.json.")
        content = Path(path).read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception and ValueError alike
            raise UsageError(f"not a tokenizer.json: {error}", where=path) from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        end = _end_token(vocabulary, named, path)
        self.spec, self.path = spec, Path(path)
        self.vocab_size = max(vocabulary.values()) + 1
        begin = _end_token(vocabulary, begins, path) if begins else end
        self.eos_id, self._bos_id = vocabulary[end], vocabulary[begin]
        ends = f"\0{self.eos_id}" if begin == end else f"\0{self.eos_id}\0{self._bos_id}"
        self.fingerprint = hashlib.sha256(content + ends.encode()).hexdigest()
        self._tokenizer.add_special_tokens([end, begin])
        self._tokenizer.encode_special_tokens = True  # the characters of a special token are ordinary text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.byte_level = _is_byte_level(json.loads(content))
        self._pieces = self._bytes_of(vocabulary)
        self.token_bytes = np.array([len(piece) for piece in self._pieces], np.int32)

    @property
    def bos_id(self) -> int:
        return self._bos_id

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        whole = [int(i) for i in ids]
        if self.byte_level:
            return b"".join(self._pieces[i] for i in whole)
        return self._tokenizer.decode(whole, skip_special_tokens=True).encode()

    def _bytes_of(self, vocabulary: dict[str, int]) -> list[bytes]:
        pieces = [b""] * self.vocab_size
        added = self._tokenizer.get_added_tokens_decoder()
        for token, i in vocabulary.items():
            if i in added:
                pieces[i] = b"" if added[i].special else added[i].content.encode()
            elif self.byte_level:
                pieces[i] = bytes(_byte_of_character()[character] for character in token)
            elif len(token) == 6 and token.startswith("<0x"):
                pieces[i] = bytes([int(token[3:5], 16)])
            else:
                pieces[i] = token.removeprefix("##").replace("▁", " ").encode()
        return pieces


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: 'bytes', or the path of a tokenizer.json, `#END` or `#END#BEGIN` behind it.

    Raises:
      UsageError: no such file, not a tokenizer, or no token that ends a document.
    """
    return ByteTokenizer() if spec == "bytes" else HuggingFaceTokenizer(spec)


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer on `texts` and writes it to `path` as a tokenizer.json.

    The same texts in the same order give the same file.

    Raises:
      UsageError: `vocab_size` has no room for every byte and the end of a document.
    """
    if vocab_size < _SMALLEST_BPE:
        raise UsageError(f"a byte-level BPE of {vocab_size} tokens cannot hold all bytes", where="--train-bpe",
                         do=f"Ask for at least {_SMALLEST_BPE}.")  # fmt: skip
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(_byte_of_character()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _end_token(vocabulary: dict[str, int], named: str, path: str) -> str:
    for name in [named] if named else _END_NAMES:
        if name in vocabulary:
            return name
    if named:
        raise UsageError(f"'{named}' is not in the vocabulary", where=path)
    raise UsageError("no token that ends a document was found", where=path,
                     do=f"Name it after the path: {path}#TOKEN. Looked for {', '.join(_END_NAMES)}.")  # fmt: skip


def _is_byte_level(content: dict[str, Any]) -> bool:
    decoder = content["decoder"] or {}
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as one printable character: itself, or the next free one from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
