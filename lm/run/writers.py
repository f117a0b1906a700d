"""Where else a run's rows can be watched: TensorBoard events and, when asked for, Weights & Biases."""

import numbers
from collections.abc import Mapping
from typing import Any, Protocol

from lm.base.config import content_hash
from lm.base.errors import UsageError
from lm.run.folder import RunFolder


class Writer(Protocol):
    """Shows the rows of a run somewhere."""

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Shows the numbers of one row at `step`; anything that is not a number is left out."""

    def close(self) -> None:
        """Hands over what is still held back."""


class TensorBoardWriter:
    """TensorBoard scalars in the run folder, written without TensorFlow.

    Args:
      folder: the run; events go to its `tensorboard/`.
      first_step: the first step that this process will write. What an earlier process wrote at or after it is not
        shown any more, so a resumed run has one curve.
    """

    def __init__(self, folder: RunFolder, first_step: int = 0):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=first_step)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        for name, value in _scalars(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


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
        try:
            import wandb
        except ImportError:
            raise UsageError(
                "the package wandb is not installed", do="Install the extra: pip install 'lm[wandb]'."
            ) from None
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
