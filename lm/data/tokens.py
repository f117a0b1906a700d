"""Token files: a flat array of ids on disk, and a sidecar that says what is in it.

The stream is [eos d1 eos d2 eos ... dn eos]: as an input, an eos begins the document behind it; as a target, it ends
the document before it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.base import files
from lm.base.errors import RunError
from lm.data.tokenizer import Tokenizer

_WIDEST_UINT16 = 1 << 16
_DELETE = "Delete the folder and tokenise again."


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """One token file on disk; it pickles as its path.

    `tokens` counts the whole stream, `bytes` the UTF-8 of the documents' text, `document_starts` [documents] int64
    are the indices of the eos that begins each document, `document_digests` the head of the SHA-256 of each text,
    `fingerprint` the SHA-256 of all texts with their lengths.
    """

    path: Path
    dtype: np.dtype
    tokens: int
    bytes: int
    document_starts: np.ndarray
    document_digests: tuple[str, ...]
    fingerprint: str
    tokenizer: str  # fingerprint
    vocab_size: int
    eos_id: int
    crc32: int | None = None  # of the ids as they lie on disk; files of an earlier version have none

    @staticmethod
    def open(path: Path | str) -> "TokenFile":
        """Reads the sidecar of a token file and checks that the file is whole.

        Raises:
          RunError: the file or its sidecar is missing, damaged or cut short.
        """
        path = Path(path)
        sidecar = path.with_suffix(".json")
        try:
            values: dict[str, Any] = json.loads(sidecar.read_text())
            values["dtype"] = np.dtype(values["dtype"])
            values["document_starts"] = np.array(values["document_starts"], np.int64)
            values["document_digests"] = tuple(values["document_digests"])
            file = TokenFile(path=path, **values)
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise RunError("part of a token file is missing", where=str(error.filename), do=_DELETE) from error
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(f"the sidecar is damaged: {error}", where=str(sidecar), do=_DELETE) from error
        if size != file.tokens * file.dtype.itemsize:
            raise RunError(f"{size} bytes where the sidecar says {file.tokens * file.dtype.itemsize}", where=str(path),
                           do=_DELETE)  # fmt: skip
        if file.crc32 not in (None, zlib.crc32(file.array().data)):
            raise RunError("damaged: its CRC-32 is not the sidecar's", where=str(path), do=_DELETE)
        if file.tokens and int(file.array().max()) >= file.vocab_size:
            raise RunError(f"damaged: it holds {file.array().max()}, which is none of the {file.vocab_size} entries",
                           where=str(path), do=_DELETE)  # fmt: skip
        return file

    @property
    def documents(self) -> int:
        """How many documents the file holds."""
        return len(self.document_starts)

    def array(self) -> np.ndarray:
        """The ids [tokens], mapped from disk and read-only."""
        return self._mapped

    @functools.cached_property
    def _mapped(self) -> np.ndarray:
        # The plain view indexes faster than np.memmap, whose every slice is set up in Python.
        return np.memmap(self.path, self.dtype, mode="r").view(np.ndarray)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile.open, (self.path,)


class TokenWriter(contextlib.AbstractContextManager["TokenWriter"]):
    """Writes a token file document by document; without an error the file and its sidecar appear at the end."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self.path, self.tokenizer = path, tokenizer
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= _WIDEST_UINT16 else np.uint32)
        self.tokens = self.bytes = self._crc32 = 0
        self._starts: list[int] = []
        self._digests: list[str] = []
        self._text = hashlib.sha256()

    def __enter__(self) -> "TokenWriter":
        self._stack = contextlib.ExitStack()
        self._file = self._stack.enter_context(files.atomic(self.path, "wb"))
        return self

    def append(self, texts: Sequence[str], ids: Sequence[np.ndarray]) -> None:
        """Adds documents and their ids, each behind an eos."""
        for text, document in zip(texts, ids, strict=True):
            content = text.encode()
            self._text.update(struct.pack("<Q", len(content)))
            self._text.update(content)
            self._starts.append(self.tokens)
            self._digests.append(digest(content))
            self.tokens += 1 + len(document)
            self.bytes += len(content)
            self._write([self.tokenizer.eos_id])
            self._write(document)

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._write([self.tokenizer.eos_id])
            self.tokens += 1
        self._stack.__exit__(*error)
        if error[0] is not None:
            return
        sidecar = {
            "dtype": self.dtype.name,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "fingerprint": self._text.hexdigest(),
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "eos_id": self.tokenizer.eos_id,
            "crc32": self._crc32,
            "document_starts": self._starts,
            "document_digests": self._digests,
        }
        # One line: an indented list would give each of a million documents a line of its own.
        files.write_text(self.path.with_suffix(".json"), json.dumps(sidecar) + "\n")

    def _write(self, ids: np.ndarray | list[int]) -> None:
        content = np.asarray(ids, self.dtype).tobytes()
        self._crc32 = zlib.crc32(content, self._crc32)
        self._file.write(content)

    @property
    def documents(self) -> int:
        """How many documents were added."""
        return len(self._starts)


def digest(content: bytes) -> str:
    """The first 16 hex digits of the SHA-256 of a document: its name in sidecars, and its side of the split."""
    return hashlib.sha256(content).hexdigest()[:16]
