"""The counts of a counting run on disk: a sealed folder in `checkpoints/`, there whole or not at all."""

import shutil
from pathlib import Path

import numpy as np

from lm.base.errors import RunError, UsageError
from lm.base.files import whole_folder
from lm.model.counting import Counting, Counts
from lm.run import integrity
from lm.run.checkpoint import latest_step

_FILE = "counts.npz"
_AGAIN = "Delete the run's result.json and count again: lm train."


def save_counts(path: Path, step: int, counts: Counts) -> None:
    """Writes the counts as the folder `<path>/<step>`; what a killed process or another try left is removed.

    Raises:
      RunError: a full disk, or a folder that cannot be written to; nothing is left then.
    """
    for left in (*path.glob(".*.part"), path / str(step)):
        shutil.rmtree(left, ignore_errors=True)
    with whole_folder(path / str(step)) as part:
        np.savez(part / _FILE, *(array for table in counts.tables for array in table))
        integrity.seal(part)


def read_counts(path: Path, config: Counting) -> tuple[int, Counts]:
    """The step and the counts that `save_counts` wrote into `path`, for the model that they were made for.

    Raises:
      UsageError: there are none.
      RunError: they are damaged.
    """
    step = latest_step(path)
    if step is None:
        raise UsageError("there are no counts", where=str(path), do=_AGAIN)
    folder = path / str(step)
    if defect := integrity.defect(folder):
        raise RunError(f"the counts are damaged: {defect}", where=str(folder), do=_AGAIN)
    with np.load(folder / _FILE) as saved:
        arrays = [saved[name] for name in saved.files]  # codes and counts by turns, level by level
    return step, Counts(config, tuple(zip(arrays[::2], arrays[1::2], strict=True)))
