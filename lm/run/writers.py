"""Where else a run's rows can be watched: TensorBoard events and, when asked for, Weights & Biases."""

import contextlib
import numbers
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from lm.base.config import content_hash
from lm.base.errors import UsageError
from lm.run.folder import RunFolder
from lm.run.record import as_told


class Writer(Protocol):
    """Shows the rows of a run somewhere."""

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Shows the numbers of one row at `step`; anything that is not a number is left out."""

    def close(self) -> None:
        """Hands over what is still held back."""


class TensorBoardWriter:
    """TensorBoard scalars in the run folder, written without TensorFlow; each row is on the disk when `write` returns.

    The events are written by this thread: the queue and thread of tensorboardX's own SummaryWriter would block the run
    for ever once the thread has met a full disk.

    Args:
      folder: the run; events go to its `tensorboard/`.
      first_step: the first step that this process will write. What an earlier process wrote at or after it is not
        shown any more, so a resumed run has one curve.

    Raises:
      RunError: the disk is full (here and in every method).
    """

    def __init__(self, folder: RunFolder, first_step: int = 0):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._folder, self._event = folder.tensorboard, event_pb2.Event
        folder.tensorboard.mkdir(exist_ok=True)
        started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        with self._told():
            # Without the process id, a run resumed within a second would overwrite its own file.
            self._events = EventsWriter(str(folder.tensorboard / "events"), filename_suffix=f".{os.getpid()}")
            self._events.write_event(self._event(wall_time=time.time(), step=first_step, session_log=started))

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        from tensorboardX import summary

        with self._told():
            for name, value in _scalars(row).items():
                event = self._event(wall_time=time.time(), step=step, summary=summary.scalar(name, value))
                self._events.write_event(event)
            self._events.flush()

    def close(self) -> None:
        with self._told():
            self._events.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise as_told(error, self._folder) from error


def import_wandb() -> Any:
    """The package of Weights & Biases, or a UsageError where it is not installed."""
    try:
        import wandb
    except ImportError:
        raise UsageError(
            "the package wandb is not installed", do="In the checkout: pip install -e '.[wandb]'."
        ) from None
    return wandb


class WandbWriter:
    """One Weights & Biases run per run folder, continued on resume; `WANDB_MODE=offline` needs no network.

    Args:
      folder: the run; the local files go to its `wandb/`.
      config: shown beside the curves.
      project: where the run is filed.

    Raises:
      UsageError: the package is not installed.
    """

    def __init__(self, folder: RunFolder, config: Mapping[str, Any], project: str = "lm"):
        wandb = import_wandb()
        identifier = content_hash({"path": str(folder.path.resolve()), "config": config})
        self._run = wandb.init(
            project=project,
            id=identifier,
            name=folder.path.name,
            dir=str(folder.path),
            config=dict(config),
            resume="allow",
        )

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log(_scalars(row), step=step)

    def close(self) -> None:
        self._run.finish()


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and name != "step"
    }
