"""Cells on this machine: each in its own process, several at once, each on its own cores."""

import collections
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lm.base.files import write_json
from lm.run.folder import RunFolder
from lm.sweep.plan import Planned


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a cell ended; `why` is empty when it finished."""

    cell: Planned
    seconds: float
    why: str


@dataclasses.dataclass(frozen=True)
class Local:
    """How cells are started here.

    Args:
      sweep: the sweep's folder.
      name: the ladder's name.
      cores: one set of cores a slot; a cell runs on one slot.
    """

    sweep: Path
    name: str
    cores: tuple[tuple[int, ...], ...]

    def run(self, cells: Sequence[Planned]) -> Iterator[Outcome]:
        """Runs cells, the costliest first, and yields each as it ends; a failed one does not stop the others.

        All processes are ended (SIGTERM: they save first) when the caller stops iterating or is interrupted.
        """
        waiting = collections.deque(sorted(cells, key=lambda cell: -cell.flops))
        free = list(self.cores)
        running: dict[subprocess.Popen, tuple[Planned, tuple[int, ...], float]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    cell, cores = waiting.popleft(), free.pop(0)
                    running[self._start(cell, cores)] = (cell, cores, time.monotonic())
                ended = [process for process in running if process.poll() is not None]
                if not ended:
                    time.sleep(0.05)
                for process in ended:
                    cell, cores, begun = running.pop(process)
                    free.append(cores)
                    yield Outcome(cell, time.monotonic() - begun, self._failure(cell, process.returncode))
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()

    def _start(self, cell: Planned, cores: tuple[int, ...]) -> subprocess.Popen:
        write_json(self._config(cell), cell.values)
        command = [
            sys.executable, "-m", "lm.cli", "train", "--config", str(self._config(cell)), "--workdir",
            str(self.sweep / cell.id), "--cache", str(self.sweep / "data"), "--sweep", self.name, "--role",
            cell.role.value, "--budget", repr(cell.budget),
        ]  # fmt: skip
        with open(self._output(cell), "w") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                preexec_fn=_pinned(cores),
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends its cells in order
            )

    def _environment(self) -> dict[str, str]:
        return {
            "JAX_COMPILATION_CACHE_DIR": str(self.sweep / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **os.environ,
        }

    def _failure(self, cell: Planned, code: int) -> str:
        if code == 0 and RunFolder(self.sweep / cell.id).result.is_file():
            return ""
        lines = [line for line in self._output(cell).read_text(errors="replace").splitlines() if line.strip()]
        killed = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{killed}: {lines[-1] if lines else 'it said nothing'}"

    def _config(self, cell: Planned) -> Path:
        return self.sweep / "cells" / f"{cell.id}.json"

    def _output(self, cell: Planned) -> Path:
        return self.sweep / "cells" / f"{cell.id}.txt"


def slots(count: int | None) -> tuple[tuple[int, ...], ...]:
    """This process's cores shared out among `count` slots (None: one slot a core).

    At ladder size a cell does not fill two cores: two cells with one thread each finish sooner than one after the
    other with two (docs/diary.md has the measurement).
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    count = min(count or len(cores), len(cores))
    return tuple(tuple(cores[slot::count]) for slot in range(count))


def _pinned(cores: tuple[int, ...]) -> Callable[[], None] | None:
    """Pins the child to its cores; XLA then makes that many threads."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    return lambda: os.sched_setaffinity(0, cores)
