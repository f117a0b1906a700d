"""Cells on this machine: each in its own process, several at once, each on its own cores."""

import collections
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from lm.base.errors import UsageError
from lm.parallel.peak import measured_matmul_flops
from lm.sweep.folder import SweepFolder, last_line
from lm.sweep.launch import Outcome, cache_settings, write_order
from lm.sweep.plan import Planned, estimated_seconds


@dataclasses.dataclass(frozen=True)
class Local:
    """Starts cells here.

    Args:
      cores: one set of cores a slot; a cell runs on one slot.
    """

    cores: tuple[tuple[int, ...], ...]

    def outlook(self, cells: Sequence[Planned]) -> str:
        """Slots, and minutes from a matmul rate that is measured now."""
        count = len(self.cores)
        seconds = estimated_seconds(cells, count, measured_matmul_flops("float32") / count)
        return f"{count} at once: about {seconds / 60:.1f} minutes (estimated from this machine's matmul rate)"

    def run(self, folder: SweepFolder, name: str, cells: Sequence[Planned]) -> Iterator[Outcome]:
        """Runs cells, the costliest first, and yields each as it ends; a failed one does not stop the others.

        All processes are ended (SIGTERM: they save first) when the caller stops iterating or is interrupted.
        """
        waiting = collections.deque(sorted(cells, key=lambda cell: -cell.flops))
        free = list(self.cores)
        running: dict[subprocess.Popen, tuple[Planned, tuple[int, ...]]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    cell, cores = waiting.popleft(), free.pop(0)
                    running[_start(folder, name, cell, cores)] = (cell, cores)
                ended = [process for process in running if process.poll() is not None]
                if not ended:
                    time.sleep(0.05)
                for process in ended:
                    cell, cores = running.pop(process)
                    free.append(cores)
                    yield Outcome(cell, _failure(folder, cell, process.returncode))
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


def _start(folder: SweepFolder, name: str, cell: Planned, cores: tuple[int, ...]) -> subprocess.Popen:
    order = write_order(folder, name, cell, cores)
    with open(folder.output(cell.id), "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "lm.sweep.cell", str(order)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **cache_settings(folder)},
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends its cells in order
        )


def _failure(folder: SweepFolder, cell: Planned, code: int) -> str:
    if code == 0 and folder.finished(cell.id):
        return ""
    killed = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{killed}: {last_line(folder.output(cell.id)) or 'it said nothing'}"


def slots(count: int | None) -> tuple[tuple[int, ...], ...]:
    """This process's cores shared out among `count` slots (None: one slot a core).

    At ladder size a cell does not fill two cores: two cells with one thread each finish sooner than one after the
    other with two (docs/diary.md has the measurement).
    """
    if count is not None and count < 1:
        raise UsageError(f"{count} cells at once", where="--jobs", do="It must be at least 1.")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    count = min(count or len(cores), len(cores))
    return tuple(tuple(cores[slot::count]) for slot in range(count))
