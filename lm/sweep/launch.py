"""What every way to start cells has in common: the order that a cell's process reads, and how its end is told."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from lm.base.config import to_dict
from lm.base.files import write_json
from lm.sweep.cell import Order
from lm.sweep.folder import SweepFolder
from lm.sweep.plan import Planned
from lm.train.result import Labels


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a cell ended; `why` is empty when it finished."""

    cell: Planned
    why: str


class Launcher(Protocol):
    """A place where cells run."""

    def outlook(self, cells: Sequence[Planned]) -> str:
        """How many cells run at once and, where that can be told, for how long."""
        ...

    def run(self, folder: SweepFolder, name: str, cells: Sequence[Planned]) -> Iterator[Outcome]:
        """Runs a ladder's cells, the costliest first, and yields each as it ends; a failed one stops no other."""
        ...


def write_order(folder: SweepFolder, name: str, cell: Planned, cores: tuple[int, ...] = ()) -> Path:
    """Writes what a cell's process reads, clears what the last try said, and returns the file."""
    order = Order(
        config=cell.values,
        workdir=str(folder.run(cell.id).path.absolute()),
        cache=str(folder.data.absolute()),
        labels=dataclasses.asdict(Labels(name, cell.role.value, cell.budget)),
        cores=cores,
    )
    for path in (folder.output(cell.id), folder.failure(cell.id)):
        path.unlink(missing_ok=True)
    write_json(folder.order(cell.id), to_dict(order))
    return folder.order(cell.id).absolute()


def cache_settings(folder: SweepFolder) -> dict[str, str]:
    """Environment variables by which all cells of a sweep share one compilation cache; those that are set stand."""
    ours = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.compiled.absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return {name: os.environ.get(name, value) for name, value in ours.items()}
