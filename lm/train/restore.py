"""A finished (or interrupted) run back in memory: its configuration, its newest parameters, its tokenizer."""

import dataclasses
from pathlib import Path
from typing import Any

from lm.base.config import build
from lm.base.errors import UsageError
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.run.checkpoint import load_params
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
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.fingerprint != recorded["identity"].get("tokenizer"):
        raise UsageError("the tokenizer is not the one that the run was trained with", where=config.data.tokenizer)
    mesh = make_mesh(MeshConfig())
    step, params = load_params(folder.checkpoints, abstract_state(config, mesh)["params"])
    return LoadedRun(config, params, tokenizer, step)
