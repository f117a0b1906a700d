"""Files that are written whole or not at all, and the hashes that name what is in them."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from etils import epath

from lm.base.errors import RunError, UsageError


def refuse_target(path: Path | str) -> None:
    """Said before long work whose result goes to `path`.

    Raises:
      UsageError: `path` is a folder or a device, or lies under a file.
      RunError: the folder that it would lie in cannot be written to.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError("is a folder", where=str(path), do="Name a file.")
    if path.exists() and not path.is_file():
        raise UsageError("is not a regular file", where=str(path), do="Name a file.")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise UsageError("is a file, not a folder", where=str(folder), do="Name a file in a folder.")
    if not os.access(folder, os.W_OK):
        raise RunError("cannot be written to", where=str(folder), do="Name a file elsewhere.")


def read_object(path: Path, do: str = "") -> dict[str, Any]:
    """The JSON object in a file; `do` is what a user can do where it holds something else.

    Raises:
      UsageError: it is not JSON, or another value.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", where=str(path), do=do) from error
    if not isinstance(value, dict):
        raise UsageError(f"not a JSON object, but a {type(value).__name__}", where=str(path), do=do)
    return value


@contextlib.contextmanager
def atomic(path: Path | str, mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a temporary file beside `path` that takes its name only when the block ends without an error.

    Raises:
      UsageError: `path` is a folder or a device, or lies under a file.
      RunError: the disk is full or the folder cannot be written to; `path` is then as it was before.
    """
    path, temporary = Path(path), None
    refuse_target(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        with os.fdopen(handle, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from error
        if isinstance(error, OSError) and temporary is None:
            raise RunError(f"cannot be written: {error.strerror}", where=str(path)) from error
        raise


def refuse_filled(path: Path) -> None:
    """Said before long work that makes the folder `path`.

    Raises:
      UsageError: it is a file, or a folder that holds something.
      RunError: the folder that it would lie in cannot be written to.
    """
    if path.is_dir() and any(path.iterdir()):
        raise UsageError("the folder holds something else", where=str(path), do="Name a new one, or delete it.")
    if not path.is_dir():
        if path.exists():
            raise UsageError("is a file, not a folder", where=str(path), do="Name a new folder.")
        refuse_target(path)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name only when the block ends without an error.

    Raises:
      RunError: the disk is full or the folder cannot be written to; nothing of it is left then.
      OSError: there is a folder of that name that holds something by now.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part"))
    except OSError as error:
        raise RunError(f"cannot be written: {error.strerror}", where=str(path)) from error
    try:
        part = temporary / "whole"  # a folder of its own: mkdtemp's is closed to everyone else
        part.mkdir()
        yield part
        os.rename(part, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def disk_full(path: Path | str) -> RunError:
    """The one message for a full disk."""
    return RunError(
        "no space left on the disk",
        where=str(path),
        do="Free some and run the same command again: it continues from the last checkpoint.",
    )


def is_remote(path: os.PathLike[str] | str) -> bool:
    """Whether `path` is the URL of an object store, such as gs://bucket/run."""
    return "://" in str(path)


def write_text(path: os.PathLike[str] | str, text: str) -> None:
    """Writes `text` to `path`, whole or not at all; on an object store that is a single put."""
    if is_remote(path):
        epath.Path(path).write_text(text)
        return
    with atomic(Path(path)) as file:
        file.write(text)


def write_json(path: os.PathLike[str] | str, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all. NaN is refused: JSON has none."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def sha256_file(path: os.PathLike[str] | str) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with epath.Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
