"""What rows and checkpoints add to a training step: blocks of steps with and without them, in turn; CPU and wall time.

python -m experiments.faults.overhead
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from lm.base.config import build
from lm.base.files import write_json
from lm.parallel.mesh import make_mesh
from lm.parallel.rules import put_batch
from lm.run.checkpoint import Checkpoints
from lm.run.folder import RunFolder
from lm.run.record import MetricsLog, RowLog
from lm.run.writers import TensorBoardWriter
from lm.train.config import RunConfig
from lm.train.recorder import Recorder
from lm.train.step import fresh_state, make_train_step

BLOCK = 20  # steps
# About the smallest model of the quick ladder: the longer a step, the smaller their share.
CONFIG = {
    "model": {"vocab_size": 257, "context_length": 64, "n_layer": 2, "d_model": 64, "n_head": 4, "d_ff": 256},
    "optimizer": {"peak_lr": 1e-3, "warmup_steps": 10},
    "steps": 10**9, "batch_size": 16, "log_every": 1,
}  # fmt: skip


def main() -> None:
    """Prints milliseconds a step, a row and a checkpoint, and the percentage that they add at the default intervals."""
    parser = argparse.ArgumentParser(prog="python -m experiments.faults.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("overhead.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        blocks = _blocks(RunFolder(Path(folder)), stack)
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in blocks}
        for number in range(args.rounds + 1):
            for name, block in blocks.items():
                cpu, wall = time.process_time(), time.perf_counter()
                block()
                if number:  # the first compiles
                    spent[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    found = {clock: _costs(spent, index) for index, clock in enumerate(("cpu", "wall"))}
    for clock, costs in found.items():
        print(clock, {name: round(value, 3) for name, value in costs.items()})
    write_json(args.out, {"rounds": args.rounds, "block": BLOCK, "load": os.getloadavg(), **found})


def _costs(spent: dict[str, list[tuple[float, float]]], clock: int) -> dict[str, float]:
    """Medians over the rounds, milliseconds; what is added is each block less the plain one of its round."""
    plain, rows, saves = ([pair[clock] for pair in spent[name]] for name in ("plain", "rows", "checkpoint"))
    step = statistics.median(plain) / BLOCK
    row = statistics.median(with_rows - bare for with_rows, bare in zip(rows, plain, strict=True)) / BLOCK
    save = statistics.median(with_save - bare for with_save, bare in zip(saves, plain, strict=True))
    added = (row / RunConfig.log_every + save / RunConfig.checkpoint_every) / step
    return {"step_ms": 1e3 * step, "row_ms": 1e3 * row, "checkpoint_ms": 1e3 * save, "added_percent": 100 * added}


def _blocks(folder: RunFolder, stack: contextlib.ExitStack) -> dict[str, Callable[[], None]]:
    config = build(RunConfig, CONFIG)
    mesh = make_mesh(config.mesh)
    step, state = make_train_step(config, mesh), fresh_state(config, mesh)
    tokens_BW = np.random.default_rng(0).integers(0, 257, (config.batch_size, 65), dtype=np.int32)
    batch = put_batch({"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:],
                       "weights": np.ones((config.batch_size, 64), np.float32)}, mesh)  # fmt: skip
    metrics = stack.enter_context(MetricsLog(folder.metrics))
    timing = stack.enter_context(RowLog(folder.timing))
    writer = stack.enter_context(contextlib.closing(TensorBoardWriter(folder)))
    checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder.checkpoints, keep=2)))
    recorder, done = Recorder(config, metrics, timing, [writer], 0, []), 0

    def run(*, rows: bool = False, save: bool = False) -> None:
        nonlocal state, done
        for number in range(BLOCK):
            state, device = step(state, batch, np.float32(1e-3))
            done += 1
            if rows:
                recorder.dispatched(done, device)
            if save:
                checkpoints.check()
                if number == 0:
                    checkpoints.save(done, state, {"rows": recorder.interval})
        recorder.drain()
        checkpoints.wait()
        jax.block_until_ready(state)

    return {"plain": run, "rows": lambda: run(rows=True), "checkpoint": lambda: run(save=True)}


if __name__ == "__main__":
    main()
