"""How a run starts; the four cases are stated here once and tried in this order.

1. Resume: the run folder holds a checkpoint. State, data position and records continue from it, bit for bit.
2. Fine-tune: `init_from` names a run on another corpus. Its parameters are taken, optimizer and step start afresh.
3. Initialise from: the same, on the same corpus.
4. Fresh: parameters are drawn from `config.seed`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from lm.base.config import build, differences
from lm.base.errors import UsageError
from lm.run.checkpoint import Checkpoints, load_params
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
    skipped: list[str]  # newer checkpoints that were passed over, and why
    interval: list[dict[str, float]]  # metrics of steps since the last row, as in the checkpoint
    wall_seconds: float  # spent before


def start(
    config: RunConfig,
    mesh: Mesh,
    folder: RunFolder,
    checkpoints: Checkpoints,
    metrics: MetricsLog,
    pipeline: dict,
    identity: dict,
) -> Start:
    """Finds which of the four starts applies and carries it out; `metrics` is rewound to match.

    Raises:
      UsageError: the data pipeline differs from the checkpoint's, or `init_from` does not fit this model.
      RunError: checkpoints exist and none can be used.
    """
    abstract = abstract_state(config, mesh)

    def accept(meta: dict) -> None:
        if meta["pipeline"] != pipeline:
            raise UsageError(
                f"the data pipeline changed: {meta['pipeline']} -> {pipeline}",
                where=str(folder.path),
                do="Use another --workdir, or go back to the old settings.",
            )
        metrics.check(Position(**meta["metrics"]))

    restored = checkpoints.restore_latest(abstract, accept=accept)
    if restored is not None:
        metrics.rewind(Position(**restored.meta["metrics"]))
        meta = restored.meta
        how = f"resumed after step {restored.step}"
        return Start(restored.state, restored.step, how, restored.skipped, meta["interval"], meta["wall_seconds"])
    metrics.rewind(None)
    if config.init_from is None:
        return Start(fresh_state(config, mesh), 0, "fresh start", [], [], 0.0)
    state, same_corpus = _from_run(config.init_from, config, mesh, identity)
    how = "initialised from" if same_corpus else "fine-tuning on another corpus from"
    return Start(state, 0, f"{how} {config.init_from}", [], [], 0.0)


def _from_run(init_from: str, config: RunConfig, mesh: Mesh, identity: dict) -> tuple[State, bool]:
    """A fresh state with the final parameters of another run, and whether that run was trained on the same corpus."""
    source = RunFolder(Path(init_from))
    recorded = source.read_config()
    theirs = build(RunConfig, recorded["config"])
    if recorded["identity"]["tokenizer"] != identity["tokenizer"]:
        raise UsageError("its tokenizer is another one", where=init_from, do="Train with the same tokenizer.")
    asked = abstract_state(config, mesh)["params"]
    changed = differences(_shapes(abstract_state(theirs, mesh)["params"]), _shapes(asked), "params")
    if changed:
        raise UsageError(
            "its parameters have other shapes than this model's: " + "; ".join(changed[:5]),
            where=init_from,
            do="Give this run the same model.",
        )
    step, params = load_params(source.checkpoints, asked)
    if step != theirs.steps:
        raise UsageError(
            f"its last whole checkpoint is of step {step}, not of its last step {theirs.steps}",
            where=init_from,
            do="Let it finish first: a run starts from final parameters.",
        )
    return {**fresh_state(config, mesh), "params": params}, recorded["identity"]["corpus"] == identity["corpus"]


def _shapes(params: Any) -> Any:
    return traverse_util.flatten_dict(jax.tree.map(lambda leaf: list(leaf.shape), params), sep=".")
