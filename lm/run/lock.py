"""One process a run folder: a lock that dies with the process that holds it."""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

from lm.base.errors import RunError, UsageError
from lm.base.files import disk_full

NAME = ".lock"
_LOOK_SECONDS = 0.05  # far longer than `holder` keeps a process out


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that works in a folder."""

    pid: int
    host: str
    since: str  # local date and time with its offset

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since},"


def holder(path: Path | str) -> Holder | None:
    """The process that holds the folder `path`; None when it is free, was never locked, or its holder is not told."""
    try:
        handle = os.open(Path(path) / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _written(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path | str) -> Iterator[None]:
    """Holds the run folder `path` (made if absent) for this process while the block runs.

    The kernel drops the lock when the process ends, however it ends, so no stale lock is left to remove by hand. Of
    several processes that train one run together, only process 0 takes it.

    Raises:
      UsageError: the folder cannot be made or written to.
      RunError: another process holds it; the message names it, its machine and since when. Or the disk is full.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from error
        raise UsageError(
            f"cannot be a run folder: {error.strerror}", where=str(path), do="Use another --workdir."
        ) from None
    try:
        try:
            _take(handle)
        except BlockingIOError:
            raise RunError(
                f"{_written(handle) or 'an unknown process'} is working in this run folder",
                where=str(path),
                do="Wait until it ends, or choose another --workdir.",
            ) from None
        os.ftruncate(handle, 0)
        since = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        os.pwrite(handle, f"{Holder(os.getpid(), platform.node(), since)}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _take(handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # perhaps for the moment of a look
        time.sleep(_LOOK_SECONDS)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _written(handle: int) -> Holder | None:
    text = os.pread(handle, 512, 0).decode(errors="replace")
    found = re.match(r"process (\d+) on (.*), since (.*),$", text, re.MULTILINE)
    return Holder(int(found[1]), found[2], found[3]) if found else None
