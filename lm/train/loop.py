"""A training run, top to bottom: data, folder, start, steps, result."""

import contextlib
import dataclasses
import functools
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lm.base.config import to_dict
from lm.base.files import is_remote
from lm.base.progress import ConsoleHandler, bar, spoken
from lm.base.signals import answering
from lm.data.batches import Batches
from lm.data.config import VALIDATION
from lm.data.corpus import prepare
from lm.data.tokenizer import load_tokenizer
from lm.model.score import Score
from lm.parallel.mesh import make_mesh
from lm.parallel.processes import Stopped, Team, Vote
from lm.parallel.rules import put_batch, row_block
from lm.run.checkpoint import Checkpoints
from lm.run.folder import RunFolder, check_run, log_to, open_run
from lm.run.lock import locked
from lm.run.record import MetricsLog, NoLog, RowLog, read_result, write_result
from lm.run.remote import mirrored, publish
from lm.run.writers import TensorBoardWriter, WandbWriter, Writer, import_wandb
from lm.train.config import RunConfig
from lm.train.fit import check_mesh, check_vocabulary
from lm.train.identity import identity_of
from lm.train.memory import FittingStep, memory_told, microbatch_counts
from lm.train.optimizer import learning_rate
from lm.train.profile import Profile, check_span
from lm.train.recorder import Recorder
from lm.train.result import Labels, result_row
from lm.train.start import Source, Start, read_source, start
from lm.train.step import make_train_step
from lm.train.validation import Validation

logger = logging.getLogger("lm.train")


def train(
    config: RunConfig,
    workdir: Path | str,
    *,
    cache: Path | str | None = None,
    labels: Labels = Labels(),
    profile: tuple[int, int] | None = None,
    wandb: bool = False,
    team: Team = Team(),
) -> dict[str, Any]:
    """Trains `config` in the run folder `workdir`, or continues what is there, and returns its row of the run table.

    Args:
      config: the whole run.
      workdir: the run folder; gs://bucket/run is one on an object store, which nothing can lock (`lm.run.remote`).
      cache: where raw text is tokenised to; default `<workdir>/data`.
      labels: what the run table says of the run's place in a ladder.
      profile: first and last step (counted from 1) of a trace written to `<workdir>/profile`.
      wandb: also log to Weights & Biases.
      team: the processes that train the run together (`lm.parallel.processes`). Process 0 alone writes what lies in
        `workdir`, but for the arrays of checkpoints, and what it decides holds for all.

    Raises:
      UsageError: the configuration does not fit the data, the devices or what the folder holds.
      RunError: NaN, a spike, a full disk, too little device memory, another process in the folder, no usable
        checkpoint.
      KeyboardInterrupt: stopped by SIGINT or SIGTERM to any process, after a checkpoint.
    """
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(memory_told())
        workdir = stack.enter_context(mirrored(str(workdir))) if is_remote(workdir) else Path(workdir)
        # Devices and data, and a folder that agrees with both; what can be refused is refused before any writing.
        check_run(workdir, config)
        check_span(profile, config.steps)
        if wandb:
            import_wandb()
        mesh = make_mesh(config.mesh)
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_vocabulary(config, tokenizer)
        check_mesh(config, mesh)
        source = read_source(config, mesh, RunFolder(workdir), tokenizer.fingerprint, team)
        with team.first_alone("the corpus"):
            if team.first:
                stack.enter_context(locked(workdir))
            corpus = prepare(config.data, Path(cache) if cache else RunFolder(workdir).data)
        identity = identity_of(config, corpus)
        team.same("run", {"config": to_dict(config), "identity": identity})
        batches = Batches(
            corpus.parts,
            config.model.context_length,
            config.batch_size,
            config.data.seed,
            config.data.segment_mask,
            *row_block(mesh, config.mesh.rules),
        )
        validation = Validation(config, corpus, mesh)
        folder = open_run(workdir, config, identity) if team.first else RunFolder(workdir)
        stack.enter_context(told(folder, team))
        finished = read_result(folder) if team.first and folder.result.exists() else None
        if finished := team.agreed("what is finished", finished):
            logger.info("finished before; nothing to do")
            return finished
        metrics = stack.enter_context(MetricsLog(folder.metrics) if team.first else NoLog(folder.metrics))
        timing = stack.enter_context(RowLog(folder.timing) if team.first else NoLog(folder.timing))
        checkpoints = Checkpoints(folder.checkpoints, config.checkpoints_kept, config.checkpoints_kept_every, team)
        stack.enter_context(contextlib.closing(checkpoints))

        # Start: resume, fine-tune, initialise from, or fresh.
        def begun_with(source: Source | None) -> Start:
            return start(config, mesh, folder, checkpoints, metrics, batches.fingerprint, source, corpus.fingerprint)

        begin = begun_with(source)
        metrics.rewind(begin.rows)
        for line in begin.skipped:
            logger.warning(line)
        logger.info(begin.how)
        trace = stack.enter_context(
            contextlib.closing(Profile(profile if team.first else None, begin.step, config.steps, workdir / "profile")),
        )
        writers: list[Writer] = []
        if team.first:
            writers.append(stack.enter_context(contextlib.closing(TensorBoardWriter(folder, begin.step + 1))))
        if wandb and team.first:
            watched = WandbWriter(folder, folder.read_config()["config"])
            writers.append(stack.enter_context(contextlib.closing(watched)))
        recorder = Recorder(config, metrics, timing, writers, begin.step, begin.interval)

        stopped = stack.enter_context(_stop_signals())

        def evaluate(step: int, params) -> dict[str, Score]:
            scores = validation(params, functools.partial(_stop_if, stopped, team))
            for name, score in scores.items():
                recorder.evaluation(step, name, score)
            return scores

        # Steps. A checkpoint is of before its step's evaluation, with which a resumed run therefore begins.
        state = begin.state
        train_step = FittingStep(
            lambda accumulate: make_train_step(dataclasses.replace(config, accumulate=accumulate), mesh),
            microbatch_counts(config, begin.accumulate, mesh),
            lambda: begun_with(read_source(config, mesh, folder, tokenizer.fingerprint)).state,
        )
        progress = stack.enter_context(bar(workdir.name, config.steps, shown=team.first))
        stack.enter_context(team.telling())
        any_stopped = Vote(team, mesh)
        rows = batches.iterate(begin.step)
        if _evaluates(config, begin.step):
            evaluate(begin.step, state["params"])
        for step in range(begin.step + 1, config.steps + 1):
            lr = np.float32(learning_rate(config.optimizer, config.steps, step - 1))
            batch = put_batch(next(rows), mesh, config.mesh.rules)
            if step == begin.step + 1:
                team.compiled(train_step, state, batch, lr)
            state, device_metrics = trace(step, train_step, state, batch, lr)
            checkpoints.check()
            recorder.dispatched(step, device_metrics)
            stop = any_stopped(bool(stopped))
            progress.update(step, recorder.numbers)
            saves = step % config.checkpoint_every == 0 or step == config.steps
            if not (saves or _evaluates(config, step) or stop):
                continue
            recorder.drain()
            meta = {
                "pipeline": batches.fingerprint,
                "metrics": dataclasses.asdict(metrics.position()),
                "interval": recorder.interval,
                "wall_seconds": begin.wall_seconds + time.monotonic() - begun,
                "accumulate": train_step.accumulate,
            }
            if saves:
                publish(workdir)  # a checkpoint needs the rows before it
                checkpoints.save(step, state, meta)
            if _evaluates(config, step):
                with contextlib.suppress(Stopped):
                    evaluate(step, state["params"])
                stop = any_stopped(bool(stopped)) or stop
            if stop:
                publish(workdir)
                checkpoints.save(step, state, meta)
                logger.info("stopped after step %d", step)
                raise Stopped

        # Result.
        score = evaluate(config.steps, state["params"])[VALIDATION]
        checkpoints.wait()
        row: dict[str, Any] = {}
        if team.first:
            wall_seconds = begin.wall_seconds + time.monotonic() - begun
            skipped = int(state["guard"]["skipped"]) if config.guarded else 0
            accumulate = train_step.accumulate
            row = result_row(config, corpus, identity, folder, score, wall_seconds, labels, accumulate, skipped)
            write_result(folder, row)
        return team.agreed("the result", row)


def _stop_if(stopped: list[int], team: Team) -> None:
    # Several processes would not stop before the same batch: they finish their evaluation.
    if stopped and team.count == 1:
        raise Stopped


def _evaluates(config: RunConfig, step: int) -> bool:
    """Whether an evaluation comes after `step`, with further steps behind it."""
    return bool(config.eval_every) and 0 < step < config.steps and step % config.eval_every == 0


@contextlib.contextmanager
def told(folder: RunFolder, team: Team) -> Iterator[None]:
    """Sends what the package's loggers say to the run's log and to the terminal; of several processes, the first's."""
    with spoken(ConsoleHandler() if team.first else logging.NullHandler()) as package:
        if team.first:
            log_to(folder, package)
        yield


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in a list, so that the loop can save first; a second one does not wait for that."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    with answering(signal.SIGINT, receive), answering(signal.SIGTERM, receive):
        yield received
