"""One process a run folder: a lock that dies with the process that holds it."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from lm.base.errors import RunError, UsageError
from lm.base.files import disk_full

NAME = ".lock"


@contextlib.contextmanager
def locked(path: Path | str) -> Iterator[None]:
    """Holds the run folder `path` (made if absent) for this process while the block runs.

    The kernel drops the lock when the process ends, however it ends, so no stale lock is left to remove by hand. Of
    several processes that train one run together, only process 0 takes it.

    Raises:
      UsageError: the folder cannot be made or written to.
      RunError: another process holds it; the message names that process. Or the disk is full.
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
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise RunError(
                f"process {holder} is working in this run folder",
                where=str(path),
                do="Wait until it ends, or choose another --workdir.",
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
