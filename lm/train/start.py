"""How a run starts; the four cases are stated here once and tried in this order.

1. Resume: the run folder holds a checkpoint. State, data position and records continue from it, bit for bit.
2. Fine-tune: `init_from` names a run on another corpus. Its parameters are taken, optimizer and step start afresh.
3. Initialise from: the same, on the same corpus.
4. Fresh: parameters are drawn from `config.seed`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from lm.base.config import build, differences
from lm.base.errors import RunError, UsageError
from lm.model.config import ModelConfig
from lm.parallel.processes import Team
from lm.run.checkpoint import Checkpoints, latest_step, load_params
from lm.run.folder import RunFolder
from lm.run.record import MetricsLog, Position
from lm.train.config import RunConfig
from lm.train.step import State, abstract_state, fresh_state


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the loop begins: `how` is a sentence for the log."""

    state: State
    step: int
    how: str
    accumulate: int  # microbatches a step that memory was enough for, or as configured
    rows: Position | None = None  # what the metrics file held then
    interval: Sequence[dict[str, float]] = ()  # metrics of steps since the last row, as in the checkpoint
    wall_seconds: float = 0.0  # spent before
    skipped: Sequence[str] = ()  # newer checkpoints that were passed over, and why


@dataclasses.dataclass(frozen=True)
class Source:
    """What a run takes from the one that it starts from: parameters, and the fingerprint of their corpus."""

    params: Any
    corpus: str | None


def start(
    config: RunConfig,
    mesh: Mesh,
    folder: RunFolder,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
    pipeline: dict,
    source: Source | None,
    corpus: str,
) -> Start:
    """Finds which of the four starts applies and makes its state; `metrics` is left as it is.

    Args:
      source: what `read_source` found.
      corpus: fingerprint of the text that this run trains on.

    Raises:
      UsageError: the data pipeline differs from the checkpoint's.
      RunError: checkpoints exist and none can be used.
    """
    abstract = abstract_state(config, mesh)

    def accept(meta: dict) -> None:
        missing = {"pipeline", "metrics", "interval", "wall_seconds", "accumulate"}.difference(meta)
        if missing:
            raise RunError(f"its meta lacks {', '.join(sorted(missing))}")
        if meta["pipeline"] != pipeline:
            raise UsageError(
                f"the data pipeline changed: {meta['pipeline']} -> {pipeline}",
                where=str(folder.path),
                do="Use another --workdir, or go back to the old settings.",
            )
        metrics.check(Position(**meta["metrics"]))

    restored = checkpoints.restore_latest(abstract, accept=accept)
    if restored is not None:
        meta = restored.meta
        how = f"resumed after step {restored.step}"
        rows = Position(**meta["metrics"])
        rest = (meta["accumulate"], rows, meta["interval"], meta["wall_seconds"])
        return Start(restored.state, restored.step, how, *rest, restored.skipped)
    state = fresh_state(config, mesh)
    if source is None:
        return Start(state, 0, "fresh start", config.accumulate)
    how = "initialised from" if source.corpus == corpus else "fine-tuning on another corpus from"
    return Start({**state, "params": source.params}, 0, f"{how} {config.init_from}", config.accumulate)


def read_source(config: RunConfig, mesh: Mesh, folder: RunFolder, tokenizer: str, team: Team = Team()) -> Source | None:
    """The final parameters of the run that `init_from` names; None without one, and in a folder that has begun.

    Args:
      tokenizer: fingerprint of the one that this run trains with.
      team: the processes that train it; the first says whether it has begun.

    Raises:
      UsageError: it is no finished run, or does not fit this model or tokenizer.
      RunError: none of its checkpoints can be used.
    """
    init_from = config.init_from
    begun = folder.result.exists() or latest_step(folder.checkpoints) is not None
    if init_from is None or team.agreed("whether the run has begun", begun):
        return None
    source = RunFolder(Path(init_from))
    recorded = source.read_config()
    theirs = build(ModelConfig, recorded["config"].get("model", {}), "config.model")
    if recorded["identity"].get("tokenizer") != tokenizer:
        raise UsageError("its tokenizer is another one", where=init_from, do="Train with the same tokenizer.")
    asked = abstract_state(config, mesh)["params"]
    held = abstract_state(dataclasses.replace(config, model=theirs), mesh)["params"]
    changed = differences(_shapes(held), _shapes(asked), "params")
    if changed:
        raise UsageError(
            "its parameters have other shapes than this model's: " + "; ".join(changed[:5]),
            where=init_from,
            do="Give this run the same model.",
        )
    step, params = load_params(source.checkpoints, asked, team)
    last = recorded["config"].get("steps", 0)  # imported parameters were trained elsewhere
    if step != last:
        raise UsageError(
            f"its last whole checkpoint is of step {step}, not of its last step {last}",
            where=init_from,
            do="Let it finish first: a run starts from final parameters.",
        )
    return Source(params, recorded["identity"].get("corpus"))


def _shapes(params: Any) -> Any:
    return traverse_util.flatten_dict(jax.tree.map(lambda leaf: list(leaf.shape), params), sep=".")
