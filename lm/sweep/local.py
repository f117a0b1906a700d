"""Cells on this machine: each in its own process, several at once, each on its own cores."""

import collections
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lm.base.config import to_dict
from lm.base.errors import UsageError
from lm.base.files import write_json
from lm.run.folder import RunFolder
from lm.sweep.cell import Order
from lm.sweep.plan import Planned
from lm.train.result import Labels


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
        order = Order(
            config=cell.values,
            workdir=str(self.sweep / cell.id),
            cache=str(self.sweep / "data"),
            labels=dataclasses.asdict(Labels(self.name, cell.role.value, cell.budget)),
            cores=cores,
        )
        write_json(self._order(cell), to_dict(order))
        with open(self._output(cell), "w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "lm.sweep.cell", str(self._order(cell))],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(),
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

    def _order(self, cell: Planned) -> Path:
        return self.sweep / "cells" / f"{cell.id}.json"

    def _output(self, cell: Planned) -> Path:
        return self.sweep / "cells" / f"{cell.id}.txt"


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
