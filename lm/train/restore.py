"""A finished (or interrupted) run back in memory: its configuration, its newest parameters, its tokenizer."""

import dataclasses
from pathlib import Path

from lm.base.config import build
from lm.base.files import is_remote
from lm.parallel.processes import Team
from lm.run.folder import RunFolder
from lm.run.remote import mirrored
from lm.run.restore import LoadedModel, load_model
from lm.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class LoadedRun(LoadedModel):
    """A trained model and the whole configuration of its run."""

    config: RunConfig


def load_run(path: Path | str, team: Team = Team()) -> LoadedRun:
    """As `lm.run.restore.load_model`, with the run's configuration.

    Raises:
      UsageError: not a run folder, no checkpoint yet, or the tokenizer's file has changed since.
      RunError: no usable checkpoint.
    """
    if is_remote(path):
        with mirrored(str(path), read_only=True) as local:
            return load_run(local, team)
    config = build(RunConfig, RunFolder(Path(path)).read_config()["config"])
    loaded = load_model(path, team)
    return LoadedRun(**vars(loaded), config=config)
