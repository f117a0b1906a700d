"""What rows and checkpoints add to a training step: blocks of steps with and without them, in turn.

python -m experiments.faults.overhead
"""

import argparse
import contextlib
import dataclasses
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from lm.base.config import build, load_file
from lm.base.files import write_json
from lm.parallel.mesh import make_mesh
from lm.parallel.rules import put_batch
from lm.run.checkpoint import Checkpoints
from lm.run.folder import RunFolder
from lm.run.record import MetricsLog, RowLog, environment
from lm.run.writers import TensorBoardWriter
from lm.train.config import RunConfig
from lm.train.recorder import Recorder
from lm.train.step import fresh_state, make_train_step

RESULTS = Path(__file__).with_name("overhead.json")
CONFIG = "configs/tiny.py"  # the longer a step, the smaller their share: the smallest run with the usual intervals
SHORT = 20  # steps of a block in which each writes a row, or one is saved


def main() -> None:
    """Prints and writes the percentage that rows and checkpoints add, and what one row and one checkpoint cost."""
    parser = argparse.ArgumentParser(prog="python -m experiments.faults.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    config = build(RunConfig, load_file(CONFIG))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        blocks = _blocks(config, RunFolder(Path(folder)), stack)
        wall: dict[str, list[float]] = {name: [] for name in blocks}
        for number in range(args.rounds + 1):
            for name in (list, reversed)[number % 2](blocks):  # a drift of the machine's speed favours neither
                begun = time.perf_counter()
                blocks[name]()
                if number:  # the first compiles
                    wall[name].append(time.perf_counter() - begun)
    steps = config.checkpoint_every
    added = [100 * (full / bare - 1) for full, bare in zip(wall["full"], wall["bare"], strict=True)]
    found = {
        "step_ms": 1e3 * statistics.median(wall["bare"]) / steps,
        "added_percent": statistics.median(added),
        "added_percent_quartiles": statistics.quantiles(added, n=4)[::2],
        "row_ms": 1e3 * _added(wall, "rows") / SHORT,
        "checkpoint_ms": 1e3 * _added(wall, "save"),
    }
    print(found)
    about = {"config": CONFIG, "rounds": args.rounds, "steps_a_block": steps, "log_every": config.log_every,
             "nice": os.nice(0), **environment()}  # fmt: skip
    write_json(args.out, {"date": str(datetime.date.today()), "about": about, **found})


def _added(wall: dict[str, list[float]], name: str) -> float:
    """Seconds that a short block takes more than the bare one of its round, median."""
    return statistics.median(block - bare for block, bare in zip(wall[name], wall["short"], strict=True))


def _blocks(config: RunConfig, folder: RunFolder, stack: contextlib.ExitStack) -> dict[str, Callable[[], None]]:
    """`full`: as many steps as lie between two checkpoints, with rows and one checkpoint; `bare`: without them."""
    mesh = make_mesh(config.mesh)
    step, state = make_train_step(config, mesh), fresh_state(config, mesh)
    rows, window = config.batch_size, config.model.context_length
    tokens_BW = np.random.default_rng(0).integers(0, config.model.vocab_size, (rows, window + 1), dtype=np.int32)
    weights_BT = np.ones((rows, window), np.float32)
    batch = put_batch({"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": weights_BT}, mesh)
    metrics = stack.enter_context(MetricsLog(folder.metrics))
    timing = stack.enter_context(RowLog(folder.timing))
    writer = stack.enter_context(contextlib.closing(TensorBoardWriter(folder)))
    checkpoints = stack.enter_context(
        contextlib.closing(Checkpoints(folder.checkpoints, config.checkpoints_kept, config.checkpoints_kept_every))
    )
    done = 0

    def recorder(every: int) -> Recorder:
        endless = dataclasses.replace(config, log_every=every, steps=10**9)
        return Recorder(endless, metrics, timing, [writer], 0, [])

    def block(steps: int, recorder: Recorder | None = None, *, saves: bool = False) -> Callable[[], None]:
        def run() -> None:
            nonlocal state, done
            for number in range(steps):
                state, device_metrics = step(state, batch, np.float32(1e-3))
                done += 1
                if recorder:
                    recorder.dispatched(done, device_metrics)
                if saves:
                    checkpoints.check()
                    if number == steps // 2:
                        checkpoints.save(done, state, {})
            if recorder:
                recorder.drain()
            checkpoints.wait()
            jax.block_until_ready(state)

        return run

    return {
        "bare": block(config.checkpoint_every),
        "full": block(config.checkpoint_every, recorder(config.log_every), saves=True),
        "short": block(SHORT),
        "rows": block(SHORT, recorder(1)),
        "save": block(SHORT, saves=True),
    }


if __name__ == "__main__":
    main()
