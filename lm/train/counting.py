"""A counting run, top to bottom: data, folder, one pass of counting, evaluation, result."""

import contextlib
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.base.files import is_remote
from lm.data.batches import Batch, Batches
from lm.data.config import VALIDATION
from lm.data.corpus import prepare
from lm.data.tokenizer import load_tokenizer
from lm.model.accounting import Flops, ParameterCounts
from lm.model.counting import Counts, count
from lm.parallel.mesh import MeshConfig, make_mesh
from lm.parallel.processes import Team
from lm.run.counts import save_counts
from lm.run.folder import check_run, open_run
from lm.run.lock import locked
from lm.run.record import MetricsLog, RowLog, read_result, write_result
from lm.train.config import AnyRun, CountingRun, RunConfig
from lm.train.fit import check_vocabulary
from lm.train.identity import identity_of
from lm.train.loop import told, train
from lm.train.recorder import evaluation_row
from lm.train.result import Labels, common_columns
from lm.train.validation import Validation

logger = logging.getLogger("lm.train")


def run(
    config: AnyRun,
    workdir: Path | str,
    *,
    cache: Path | str | None = None,
    labels: Labels = Labels(),
    profile: tuple[int, int] | None = None,
    wandb: bool = False,
    team: Team = Team(),
) -> dict[str, Any]:
    """Trains or counts, whichever `config` is of; see `lm.train.loop.train` and `count_run`.

    Raises:
      UsageError: as they do; or something was asked of a counting run that it has not.
    """
    if isinstance(config, RunConfig):
        return train(config, workdir, cache=cache, labels=labels, profile=profile, wandb=wandb, team=team)
    for asked, what in (
        (profile is not None, "--profile traces training steps"),
        (wandb, "--wandb logs a training curve"),
        (team.count > 1, "several processes share the steps of training"),
        (is_remote(workdir), "object stores are for the checkpoints of training"),
    ):
        if asked:
            raise UsageError(f"{what}, and this run only counts", where=str(workdir), do="Leave it out.")
    return count_run(config, Path(workdir), cache=cache, labels=labels)


def count_run(
    config: CountingRun, workdir: Path, *, cache: Path | str | None = None, labels: Labels = Labels()
) -> dict[str, Any]:
    """Counts what `config` names in the run folder `workdir` and returns its row of the run table.

    What is counted are the batches of a training run of the same data, batch size and steps. A window that would come
    again in a later epoch is counted once: repetition tells counts nothing, and Kneser-Ney's discounts are estimated
    from what was seen once and twice. It takes some 60 bytes of memory a token. Nothing is kept of a run that is
    stopped; the same command begins it again.

    Raises:
      UsageError: the configuration does not fit the data or what the folder holds.
      RunError: a token of probability 0, a full disk, or another process in the folder.
    """
    begun = time.monotonic()
    check_run(workdir, config)
    check_vocabulary(config, load_tokenizer(config.data.tokenizer))
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(workdir))
        corpus = prepare(config.data, Path(cache) if cache else workdir / "data")
        identity = identity_of(config, corpus)
        batches = Batches(
            corpus.parts, config.model.context_length, config.batch_size, config.data.seed, config.data.segment_mask
        )
        folder = open_run(workdir, config, identity)
        stack.enter_context(told(folder, Team()))
        if folder.result.exists():
            logger.info("finished before; nothing to do")
            return read_result(folder)
        metrics = stack.enter_context(MetricsLog(folder.metrics))
        timing = stack.enter_context(RowLog(folder.timing))
        metrics.rewind(None)

        windows = _windows(batches, config.steps)
        counts = count(config.model, windows["inputs"], windows["targets"], windows.get("segments"))
        seconds = time.monotonic() - begun
        tokens = config.steps * config.tokens_per_step
        logger.info("%s different n-grams in %s tokens", f"{counts.stored:,}", f"{windows['targets'].size:,}")
        rate = windows["targets"].size / seconds
        timing.append({"step": config.steps, "steps": config.steps, "seconds": seconds, "tokens_per_second": rate})
        save_counts(Path(folder.checkpoints), config.steps, counts)

        train_loss = _loss(counts, windows, config.eval_tokens)
        metrics.append({"kind": "train", "step": config.steps, "tokens": tokens, "loss": train_loss})
        scores = Validation(config, corpus, make_mesh(MeshConfig()))(counts)
        for name, score in scores.items():
            metrics.append(evaluation_row(config.steps, tokens, name, score))
        wall_seconds = time.monotonic() - begun
        row = common_columns(config, corpus, identity, scores[VALIDATION], wall_seconds, labels) | {
            **_columns(counts),
            "train_loss": train_loss,
            "tokens_per_second": rate,
        }
        write_result(folder, row)
        return row


def _windows(batches: Batches, steps: int) -> Batch:
    """The different rows of the first `steps` batches, in one batch."""
    origins = np.concatenate([np.stack(batches.origins(step)) for step in range(steps)], axis=1)
    _, first = np.unique(origins, axis=1, return_index=True)
    step_W, row_W = np.divmod(np.sort(first), batches.batch_size)
    taken, begins = np.unique(step_W, return_index=True)
    parts = [(batches[int(step)], rows) for step, rows in zip(taken, np.split(row_W, begins[1:]), strict=True)]
    names = [name for name in parts[0][0] if name != "weights"]
    return {name: np.concatenate([batch[name][rows] for batch, rows in parts]) for name in names}


def _loss(counts: Counts, windows: Batch, tokens: int) -> float:
    """Cross-entropy in nats/token of what was counted, over evenly spaced windows of about so many tokens."""
    rows, T = windows["targets"].shape
    chosen = np.linspace(0, rows - 1, max(1, min(rows, tokens // T))).astype(np.int64)
    segments = windows["segments"][chosen] if "segments" in windows else None
    return -float(np.mean(counts.log_probs(windows["inputs"][chosen], windows["targets"][chosen], segments)))


def _columns(counts: Counts) -> dict[str, Any]:
    """The columns of the run table that only training has, in terms of counting: stored counts are its matrices."""
    groups = ParameterCounts(embedding=0, position=0, head=0, matrices=counts.stored, norms=0)
    return {
        "seed": 0,
        **{f"params_{name}": number for name, number in dataclasses.asdict(groups).items()},
        "params_total": groups.total,
        "params_active": counts.config.order,
        "params_nonembedding": groups.nonembedding,
        **dict.fromkeys(("n_layer", "d_model", "n_head", "n_kv_head", "d_ff"), 0),
        "accumulate": 1,
        "skipped": 0,
        "peak_lr": 0.0,
        "warmup_steps": 0,
        **{convention.value: 0 for convention in Flops},
        "lr_fraction": 1.0,
        "decayed": 1,
        "mfu": 0.0,
        "peak_flops": 0.0,
    }
