"""What a run writes down: rows as they come, and one row of the run table at the end."""

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from lm.base.config import nearest
from lm.base.errors import RunError
from lm.base.files import disk_full, write_json
from lm.run.folder import RunFolder
from lm.scaling.table import LATER, NAMES


@dataclasses.dataclass(frozen=True)
class Position:
    """A prefix of a log: its length and the SHA-256 of its bytes, in hex."""

    bytes: int
    sha256: str


class RowLog:
    """An append-only file of JSON rows, one a line; `timing.jsonl` is one.

    Floats are written with all their digits, so equal rows are equal bytes. JSON has no NaN: numbers that are not
    finite are written as the strings "nan", "inf" and "-inf". Opening cuts a last line that a killed process left
    half-written; a full disk leaves the file as it was before the row.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = 0
        content = self.path.read_bytes()
        self._cut(content[: content.rfind(b"\n") + 1])

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one row and hands it to the operating system, so that it outlives this process.

        Raises:
          RunError: the disk is full.
        """
        line = json.dumps(finite(row), separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except OSError as error:
            os.ftruncate(self._handle, self._size)
            raise as_told(error, self.path) from error
        self._extend(line)

    def close(self) -> None:
        """Ends writing."""
        os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self, prefix: bytes) -> None:
        os.ftruncate(self._handle, len(prefix))
        self._size = len(prefix)

    def _extend(self, line: bytes) -> None:
        self._size += len(line)


class MetricsLog(RowLog):
    """A row log that can return to any earlier position: what a resumed run needs to write the same file again."""

    def position(self) -> Position:
        """The whole file so far, which is on the disk when this returns.

        Raises:
          RunError: the disk is full.
        """
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise as_told(error, self.path) from error
        return Position(self._size, self._hash.hexdigest())

    def check(self, position: Position) -> None:
        """Sees that the file still begins with `position`.

        Raises:
          RunError: it is shorter, or its first bytes are others.
        """
        self._prefix(position)

    def rewind(self, position: Position | None) -> None:
        """Drops all rows after `position`; None drops every row.

        Raises:
          RunError: as `check`; the file is then left as it was.
        """
        self._cut(b"" if position is None else self._prefix(position))

    def _prefix(self, position: Position) -> bytes:
        prefix = os.pread(self._handle, position.bytes, 0)
        if len(prefix) < position.bytes:
            raise RunError(
                f"truncated metrics file: {self._size} bytes where the checkpoint needs {position.bytes}",
                where=str(self.path),
            )
        if hashlib.sha256(prefix).hexdigest() != position.sha256:
            raise RunError(
                f"changed metrics file: its first {position.bytes} bytes are not those that the checkpoint knows",
                where=str(self.path),
            )
        return prefix

    def _cut(self, prefix: bytes) -> None:
        super()._cut(prefix)
        self._hash = hashlib.sha256(prefix)

    def _extend(self, line: bytes) -> None:
        super()._extend(line)
        self._hash.update(line)


class NoLog(MetricsLog):
    """The log of a process that keeps none: where several train one run, only process 0 writes its files."""

    def __init__(self, path: Path | str):
        self.path = Path(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Forgets the row."""

    def position(self) -> Position:
        """The empty beginning: what is saved of a position is what process 0 says."""
        return Position(0, "")

    def check(self, position: Position) -> None:
        """Has nothing to object."""

    def rewind(self, position: Position | None) -> None:
        """Has nothing to drop."""

    def close(self) -> None:
        """Has nothing to end."""


def as_told(error: OSError, path: Path) -> Exception:
    """The error to raise for a failed write to `path`: the one message for a full disk, else `error` itself."""
    return disk_full(path) if error.errno in (errno.ENOSPC, errno.EDQUOT) else error


def finite(value: Any) -> Any:
    """Plain JSON values, in which numbers that are not finite have become "nan", "inf" or "-inf"."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_result(folder: RunFolder, row: Mapping[str, Any]) -> None:
    """Writes `result.json`, whole or not at all: the run's row of the run table, in the table's order.

    Raises:
      RunError: a column of `lm.scaling.table` is missing or a name is not one of them; the disk is full.
    """
    for name in row:
        if name not in NAMES:
            raise RunError(f"unknown column '{name}'", where="the run table", do=nearest(name, NAMES))
    missing = [name for name in NAMES if name not in row]
    if missing:
        raise RunError(f"the row lacks {', '.join(missing)}", where="the run table")
    write_json(folder.result, finite({name: row[name] for name in NAMES}))


def read_result(folder: RunFolder) -> dict[str, Any]:
    """What `write_result` wrote.

    Raises:
      RunError: the file is not such a row.
    """
    try:
        row = json.loads(folder.result.read_bytes())
    except ValueError:
        row = None
    if not isinstance(row, dict) or not row.keys() | LATER >= set(NAMES):
        raise RunError("the result is damaged", where=str(folder.result), do="Delete it and run again.")
    return LATER | row


def environment() -> dict[str, str]:
    """What bit identity is promised under: versions, machine, devices, threads, XLA flags, and the code's commit."""
    import jax

    kinds = sorted({device.device_kind for device in jax.devices()})
    packages = ("jax", "jaxlib", "flax", "numpy", "optax")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
        "machine": f"{platform.system()} {platform.machine()} {_processor()}",
        "devices": f"{jax.device_count()} x {', '.join(kinds)}",
        "processes": str(jax.process_count()),
        "threads": str(_threads()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": _commit(),
    }


def versions(facts: Mapping[str, str]) -> str:
    """The run table's `versions` column: all of `environment()` but the commit, as `name=value; ...`."""
    return "; ".join(f"{name}={value}" for name, value in facts.items() if name != "commit")


def _threads() -> int:
    # An affinity mask, which is how a cell is given fewer threads, is not visible in os.cpu_count().
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _commit() -> str:
    """The checkout's commit, with `-dirty` when a tracked file differs; 'unknown' for an installed package."""
    package = Path(__file__).parents[1]
    try:
        # An environment may lie inside somebody else's checkout, whose commit says nothing about this code.
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ("git", "-C", str(folder), *arguments), capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
