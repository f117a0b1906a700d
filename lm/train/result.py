"""A finished run as one row of the run table."""

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from lm.data.batches import count_windows
from lm.data.corpus import Corpus
from lm.data.mixture import dealt
from lm.model.accounting import Flops, count_parameters, step_flops
from lm.model.score import Score
from lm.parallel.peak import peak_flops
from lm.run.folder import RunFolder
from lm.run.record import environment, versions
from lm.train.config import AnyRun, RunConfig
from lm.train.identity import cell_id
from lm.train.optimizer import lr_fraction


@dataclasses.dataclass(frozen=True)
class Labels:
    """What a ladder says of a cell and the run itself cannot know."""

    sweep: str = ""
    role: str = ""
    budget: float = 0.0


def result_row(
    config: RunConfig,
    corpus: Corpus,
    identity: dict[str, str],
    folder: RunFolder,
    score: Score,
    wall_seconds: float,
    labels: Labels,
    accumulate: int,
    skipped: int,
) -> dict[str, Any]:
    """The row of the run table (`lm.scaling.table`): every number with the convention that its column states.

    Args:
      accumulate: microbatches a step, as run.
      skipped: updates left out.
    """
    model, counts = config.model, count_parameters(config.model)
    tokens = config.steps * config.tokens_per_step
    rates = list(_rates(folder.timing))
    rate = statistics.median(rates) if rates else tokens / wall_seconds
    peak = peak_flops(model.dtype.value)
    return {
        **common_columns(config, corpus, identity, score, wall_seconds, labels),
        "seed": config.seed,
        **{f"params_{group.name}": getattr(counts, group.name) for group in dataclasses.fields(counts)},
        "params_total": counts.total,
        "params_active": count_parameters(model, active=True).total,
        "params_nonembedding": counts.nonembedding,
        "n_layer": model.n_layer,
        "d_model": model.d_model,
        "n_head": model.n_head,
        "n_kv_head": model.kv_heads,
        "d_ff": model.d_ff,
        "accumulate": accumulate,
        "skipped": skipped,
        "peak_lr": config.optimizer.peak_lr,
        "warmup_steps": config.optimizer.warmup_steps,
        **{convention.value: step_flops(model, tokens, convention) for convention in Flops},
        "train_loss": _train_loss(config, folder),
        "lr_fraction": lr_fraction(config.optimizer, config.steps, config.steps - 1),
        "decayed": 1,
        "tokens_per_second": rate,
        "mfu": step_flops(model, 1, Flops.MATMUL) * rate / (peak * jax.device_count()),
        "peak_flops": peak,
    }


def common_columns(
    config: AnyRun, corpus: Corpus, identity: dict[str, str], score: Score, wall_seconds: float, labels: Labels
) -> dict[str, Any]:
    """The columns that every kind of run fills in alike."""
    facts, reads = environment(), _reads(config, corpus)
    return {
        "cell": cell_id(config, identity),
        **dataclasses.asdict(labels),
        "data_seed": config.data.seed,
        "commit": facts["commit"],
        "versions": versions(facts),
        **{name: identity[name] for name in ("corpus", "tokenizer", "evaluation")},
        "mixture": json.dumps({read.name: read.told for read in reads}) if config.data.mixture else "",
        "context_length": config.model.context_length,
        "vocab_size": config.model.vocab_size,
        "tokens": config.steps * config.tokens_per_step,
        "tokens_unique": sum(min(read.tokens, read.epoch_tokens) for read in reads),
        "tokens_per_step": config.tokens_per_step,
        "tokens_processed": config.steps * config.batch_size * config.model.processed_length,
        "steps": config.steps,
        "loss": score.nats_per_token,
        "loss_se": score.standard_error,
        "bits_per_byte": score.bits_per_byte,
        "wall_seconds": wall_seconds,
    }


def _train_loss(config: RunConfig, folder: RunFolder) -> float:
    """Mean over the rows that end in the last tenth of the steps, each weighted by the steps that it stands for."""
    logged = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    rows = [row for row in logged if row["kind"] == "train"]
    begins = [0, *(row["step"] for row in rows[:-1])]
    # A row of nothing but skipped steps may hold "nan".
    weighted = {
        row["step"]: (float(row["loss"]), row["step"] - begin)
        for begin, row in zip(begins, rows, strict=True)
        if row["step"] > 0.9 * config.steps
    }
    losses, steps = zip(*weighted.values(), strict=True)
    return statistics.fmean(losses, weights=steps)


@dataclasses.dataclass(frozen=True)
class _Read:
    """What a run has read of one corpus: tokens predicted, of so many in one pass over its windows."""

    name: str
    share: float
    tokens: int
    epoch_tokens: int

    @property
    def told(self) -> dict[str, float]:
        return {"share": self.share, "tokens": self.tokens, "epochs": self.tokens / self.epoch_tokens}


def _reads(config: AnyRun, corpus: Corpus) -> list[_Read]:
    window, predicted = config.model.context_length, config.model.predicted_length
    rows = dealt([part.share for part in corpus.parts], config.steps * config.batch_size)
    return [
        _Read(part.name, float(part.share), count * predicted, count_windows(part.file, window) * predicted)
        for part, count in zip(corpus.parts, rows, strict=True)
    ]


def _rates(timing: Path) -> Iterator[float]:
    """Tokens a second of each row that can be read: no hash guards the file, and a bad row must not undo a run."""
    for line in timing.read_bytes().splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            yield float(json.loads(line)["tokens_per_second"])
