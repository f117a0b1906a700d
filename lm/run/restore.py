"""A run's newest parameters with their model and tokenizer: all that reading or writing text needs."""

import dataclasses
from pathlib import Path
from typing import Any

from lm.base.config import build
from lm.base.errors import UsageError
from lm.base.files import is_remote
from lm.data.config import DataConfig
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.model.config import ModelConfig
from lm.model.counting import Counting, Counts, describes_counting
from lm.model.transformer import abstract_variables
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.processes import Team
from lm.parallel.rules import placed
from lm.run.checkpoint import load_params
from lm.run.counts import read_counts
from lm.run.folder import RunFolder
from lm.run.remote import mirrored


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters (float32, stacked), its tokenizer, and the training step that they are of."""

    model: ModelConfig
    data: DataConfig
    params: Any
    tokenizer: Tokenizer
    step: int


@dataclasses.dataclass(frozen=True)
class LoadedCounts:
    """A counting model with its counts, its tokenizer, and the step that they go up to."""

    model: Counting
    data: DataConfig
    params: Counts
    tokenizer: Tokenizer
    step: int


def load_model(path: Path | str, team: Team = Team()) -> LoadedModel:
    """As `load`, where it is a model with parameters.

    Raises:
      UsageError: as `load`, or the run has only counted.
      RunError: no usable checkpoint.
    """
    loaded = load(path, team)
    if isinstance(loaded, LoadedCounts):
        raise UsageError("this run holds counts of n-grams and no parameters", where=str(path),
                         do="Counts are for `lm eval` and for sampling by `lm generate`.")  # fmt: skip
    return loaded


def load(path: Path | str, team: Team = Team()) -> LoadedModel | LoadedCounts:
    """Loads the newest checkpoint of a run folder, local or gs://, onto the devices of `team`, each the whole.

    Raises:
      UsageError: not a run folder, no checkpoint yet, or the tokenizer's file has changed since.
      RunError: no usable checkpoint.
    """
    if is_remote(path):
        with mirrored(str(path), read_only=True) as local:
            return load(local, team)
    folder = RunFolder(Path(path))
    recorded = folder.read_config()
    described = recorded["config"].get("model", {})
    data = build(DataConfig, recorded["config"].get("data", {}), "config.data")
    tokenizer = _tokenizer(folder, data.tokenizer)
    if tokenizer.fingerprint != recorded["identity"].get("tokenizer"):
        raise UsageError("the tokenizer is not the one that the run was trained with", where=tokenizer.spec)
    if describes_counting(described):
        counting = build(Counting, described, "config.model")
        step, counts = read_counts(Path(folder.checkpoints), counting)
        return LoadedCounts(counting, data, counts, tokenizer, step)
    model = build(ModelConfig, described, "config.model")
    step, params = load_params(
        folder.checkpoints, placed(abstract_variables(model), make_mesh(MeshConfig()))["params"], team
    )
    return LoadedModel(model, data, params, tokenizer, step)


def _tokenizer(folder: RunFolder, spec: str) -> Tokenizer:
    """A file of the run folder itself where it has one of that name, as an imported run does; else as it is named."""
    own = folder.path / spec
    return load_tokenizer(str(own) if Path(str(own).partition("#")[0]).is_file() else spec)
