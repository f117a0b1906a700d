"""A finished (or interrupted) run back in memory: its configuration, its newest parameters, its tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

from lm.base.config import build
from lm.base.errors import UsageError
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.run.checkpoint import latest_step, load_params
from lm.run.folder import RunFolder
from lm.train.config import RunConfig
from lm.train.step import abstract_state


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """What decoding and scoring need of a run."""

    config: RunConfig
    params: Any
    tokenizer: Tokenizer
    step: int


def load_run(path: Path | str) -> LoadedRun:
    """Loads the newest checkpoint of a run folder onto this machine's devices, replicated over its own mesh.

    Raises:
      UsageError: not a run folder, no checkpoint yet, or the tokenizer's file has changed since.
      RunError: no usable checkpoint.
    """
    folder = RunFolder(Path(path))
    recorded = folder.read_config()
    config = build(RunConfig, recorded["config"])
    step = latest_step(folder.checkpoints)
    if step is None:
        raise UsageError("the run has no checkpoint yet", where=str(folder.path), do="Train it first: lm train.")
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.fingerprint != recorded["identity"]["tokenizer"]:
        raise UsageError("the tokenizer is not the one that the run was trained with", where=config.data.tokenizer)
    mesh = make_mesh(MeshConfig())
    return LoadedRun(config, load_params(folder.checkpoints, abstract_state(config, mesh)["params"]), tokenizer, step)
