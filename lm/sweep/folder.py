"""A sweep's folder: what lies where, and the list of its cells that can be read without a model."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from lm.base.config import build, to_dict
from lm.base.errors import UsageError
from lm.base.files import read_object, write_json
from lm.run.folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Listed:
    """One cell as `cells.json` names it."""

    id: str
    role: str
    n: int  # all parameters
    steps: int


@dataclasses.dataclass(frozen=True)
class CellList:
    """The cells known so far; `later` more get their learning rate, and with it their name, from the tune stage."""

    cells: tuple[Listed, ...]
    later: int = 0


@dataclasses.dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk; every file of this room asks here for a path."""

    path: Path

    def run(self, cell: str) -> RunFolder:
        """The cell's run folder."""
        return RunFolder(self.path / cell)

    def order(self, cell: str) -> Path:
        """What the cell's process was asked to do."""
        return self.path / "cells" / f"{cell}.json"

    def output(self, cell: str, process: int = 0) -> Path:
        """What the cell's process said in its last try; processes after the first have a file each."""
        return self.path / "cells" / (f"{cell}.{process}.txt" if process else f"{cell}.txt")

    def failure(self, cell: str) -> Path:
        """One line that says why the last try failed; absent while none has."""
        return self.path / "cells" / f"{cell}.failure"

    @property
    def list(self) -> Path:
        """The cells, as `write_list` writes them."""
        return self.path / "cells.json"

    @property
    def ladder(self) -> Path:
        """The ladder as it was last run."""
        return self.path / "ladder.json"

    @property
    def tune(self) -> Path:
        """Losses of the tune stage and the rule for the learning rate."""
        return self.path / "tune.json"

    @property
    def table(self) -> Path:
        """The run table of the finished cells."""
        return self.path / "table.csv"

    @property
    def data(self) -> Path:
        """Token files that all cells share."""
        return self.path / "data"

    @property
    def compiled(self) -> Path:
        """The compilation cache that all cells share."""
        return self.path / "compiled"

    @property
    def batches(self) -> Path:
        """What was submitted to Slurm, a folder a submission."""
        return self.path / "slurm"

    def finished(self, cell: str) -> bool:
        """Whether the cell has its result."""
        return self.run(cell).result.is_file()

    def write_list(self, cells: Iterable[Listed], later: int) -> None:
        """Writes `cells.json`; of cells that are the same run, the last one's role stands."""
        write_json(self.list, to_dict(CellList(tuple({cell.id: cell for cell in cells}.values()), later)))

    def read_list(self) -> CellList:
        """What `write_list` wrote.

        Raises:
          UsageError: this is not the folder of a sweep.
        """
        if not self.list.is_file():
            raise UsageError("this is not a sweep's folder: it has no cells.json", where=str(self.path),
                             do="Name the folder that `lm sweep` made, e.g. runs/quick.")  # fmt: skip
        return build(CellList, read_object(self.list), str(self.list))


def last_line(path: Path | None, without: tuple[str, ...] = ()) -> str:
    """The last line of a text file that is not blank and begins with none of `without`; empty where there is none."""
    if path is None or not path.is_file():
        return ""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith(without)), "")
