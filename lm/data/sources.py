"""Where text comes from: files, folders and globs of documents, and the interpreter's own standard library."""

import glob
import gzip
import hashlib
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lm.base.errors import UsageError

STDLIB = "stdlib"
_CHUNK = 1 << 20  # bytes of a .txt file read at a time
# Tests, character tables, generated help topics, editors and other people's packages are no text worth learning.
_NOT_LIBRARY = frozenset(
    ["test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data", "lib2to3", "site-packages", "dist-packages"]
)


def read_documents(source: str, separator: str | None = None) -> Iterator[str]:
    """The documents of a source, in an order that depends on nothing but names and content.

    A source is a .txt, .md, .jsonl, .jsonl.gz, .jsonl.xz (key "text") or .parquet (column "text") file, a folder or a
    glob of them, or 'stdlib'. `separator` splits plain text into documents, and newline and tab may be spelled `\\n`
    and `\\t` in it; without one a file is a document. Documents of white space alone are skipped.

    Raises:
      UsageError: nothing there, an unknown extension, or content that cannot be read, with file and line.
    """
    for path in find_files(source):
        yield from read_file(path, separator)


def find_files(source: str) -> list[Path]:
    """The files of a source in sorted order.

    Raises:
      UsageError: a missing file, a folder without text, a glob that matches nothing, or an unknown extension.
    """
    if source == STDLIB:
        return _stdlib_files()
    if not source.strip():
        raise UsageError("the text has no name", do="Pass a text file, a folder, a glob in quotes, or 'stdlib'.")
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _reader(file) is not None)
        if not files:
            raise UsageError("the folder holds no text", where=source, do=f"It needs files that end in {_KNOWN}.")
    else:
        files = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(source, recursive=True))]
    if not files:
        is_glob = glob.has_magic(source)
        raise UsageError("the glob matches no file" if is_glob else "there is no such file or folder", where=source,
                         do="Pass a text file, a folder, a glob in quotes, or 'stdlib'.")  # fmt: skip
    for file in files:
        if _reader(file) is None:
            raise UsageError("unknown kind of text file", where=str(file), do=f"Known endings: {_KNOWN}.")
        if not os.access(file, os.R_OK):
            raise UsageError("the file may not be read", where=str(file), do="Change its permissions.")
    return files


def read_file(path: Path, separator: str | None = None) -> Iterator[str]:
    """The documents of one file that `find_files` found.

    Raises:
      UsageError: content that cannot be read, with file and line.
    """
    reader = _read_text if path.suffix == ".py" else _reader(path)
    if reader is None:
        raise UsageError("unknown kind of text file", where=str(path), do=f"Known endings: {_KNOWN}.")
    for text in reader(path, separator):
        if text and not text.isspace():
            yield text


def splits_by_separator(path: Path) -> bool:
    """Whether a separator has any effect on this file."""
    return _reader(path) is _read_text


def _read_text(path: Path, separator: str | None) -> Iterator[str]:
    if separator is None or path.suffix == ".py":
        yield _decode(path.read_bytes(), path, 1)
        return
    mark = separator.replace("\\n", "\n").replace("\\t", "\t").encode()
    if not mark:
        raise UsageError("the separator is empty", where=str(path), do="Leave it out: a file is then a document.")
    rest, line = b"", 1
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            *documents, rest = (rest + chunk).split(mark)
            for document in documents:
                yield _decode(document, path, line)
                line += document.count(b"\n") + mark.count(b"\n")
    yield _decode(rest, path, line)


def _read_jsonl(path: Path, separator: str | None) -> Iterator[str]:
    opener: Callable[[Path, str], IO[Any]] = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)  # type: ignore[assignment]
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _document_of(line, path, number)
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(f"the compressed file is damaged or cut short: {error}", where=str(path)) from error


def _document_of(line: bytes, path: Path, number: int) -> str:
    where = f"{path}, line {number}"
    try:
        row = json.loads(_decode(line, path, number))
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} at column {error.colno}", where=where) from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise UsageError(f"no \"text\" with a string in it (found: {keys})", where=where,
                         do='Each line is an object like {"text": "..."}.')  # fmt: skip
    text = row["text"]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "half of a surrogate pair is not text", where=where, do="Repair the \\ud8xx escape."
        ) from error
    return text


def _read_parquet(path: Path, separator: str | None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise UsageError(f'no column "text" (found: {", ".join(file.schema_arrow.names)})', where=str(path))
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise UsageError(f'row {row} of column "text" is {type(text).__name__}', where=str(path))
                    yield text
                    row += 1
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UsageError(f"not a whole parquet file: {error}", where=str(path)) from error


_READERS: dict[str, Callable[[Path, str | None], Iterator[str]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.xz": _read_jsonl,
    ".parquet": _read_parquet,
}
_KNOWN = ", ".join(_READERS)


def _reader(path: Path) -> Callable[[Path, str | None], Iterator[str]] | None:
    return next((reader for ending, reader in _READERS.items() if path.name.endswith(ending)), None)


def _decode(content: bytes, path: Path, line: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content[: error.start].count(b"\n")
        raise UsageError(f"byte 0x{content[error.start]:02x} is not UTF-8", where=f"{path}, line {line}",
                         do="Convert the file to UTF-8 first.") from error  # fmt: skip


def _stdlib_files() -> list[Path]:
    root = sysconfig.get_path("stdlib")
    seen, files = set(), []
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - _NOT_LIBRARY)
        for name in sorted(names):
            path = Path(folder, name)
            # _sysconfigdata holds the paths and flags with which this interpreter was built.
            if path.suffix != ".py" or name.startswith("_sysconfigdata") or not path.is_file():
                continue
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if digest not in seen and _is_utf8(content):
                seen.add(digest)
                files.append(path)
    if not files:
        raise UsageError("this Python has no standard library in source form", where=root,
                         do="Name a corpus of your own: a text file, folder or glob.")  # fmt: skip
    return files


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
