"""How a run starts; the four cases are stated here once and tried in this order.

1. Resume: the run folder holds a checkpoint. State, data position and records continue from it, bit for bit.
2. Fine-tune: `init_from` names a run on another corpus. Its parameters are taken, optimizer and step start afresh.
3. Initialise from: the same, on the same corpus.
4. Fresh: parameters are drawn from `config.seed`.
"""

import dataclasses
from pathlib import Path

from jax.sharding import Mesh

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
        how = "; ".join([*restored.skipped, f"resumed after step {restored.step}"])
        return Start(restored.state, restored.step, how, restored.meta["interval"], restored.meta["wall_seconds"])
    metrics.rewind(None)
    if config.init_from is None:
        return Start(fresh_state(config, mesh), 0, "fresh start", [], 0.0)
    source = RunFolder(Path(config.init_from)).read_config()["identity"]
    if source["tokenizer"] != identity["tokenizer"]:
        raise UsageError("its tokenizer is another one", where=config.init_from, do="Train with the same tokenizer.")
    params = load_params(RunFolder(Path(config.init_from)).checkpoints, abstract["params"])
    state = {**fresh_state(config, mesh), "params": params}
    how = "initialised from" if source["corpus"] == identity["corpus"] else "fine-tuning on another corpus from"
    return Start(state, 0, f"{how} {config.init_from}", [], 0.0)
