"""What rows and checkpoints add to a training step: blocks of steps with and without them, in turn.

python -m experiments.faults.overhead
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
OFTEN = 10  # times as often as configured, so that what they add stands out; it is divided by as much


def main() -> None:
    """Prints and writes the percentage that rows and checkpoints add to a step, and what one of each costs."""
    parser = argparse.ArgumentParser(prog="python -m experiments.faults.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    config = build(RunConfig, load_file(CONFIG))
    steps, rows = config.checkpoint_every // OFTEN, config.checkpoint_every // config.log_every
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        blocks = _blocks(config, steps, RunFolder(Path(folder)), stack)
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in blocks}
        for number in range(args.rounds + 1):
            # From the front and from behind: a drift of the machine's speed favours none.
            for name in (list, reversed)[number % 2](blocks):
                begun = time.perf_counter(), time.process_time()
                blocks[name]()
                if number:  # the first compiles
                    spent[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    about = {"config": CONFIG, "rounds": args.rounds, "steps_a_block": steps, "load": os.getloadavg(), **environment()}
    found = {clock: _costs(*(np.array(spent[name])[:, column] for name in ("bare", "rows", "full")), steps, rows)
             for column, clock in enumerate(("wall", "cpu"))}  # fmt: skip
    print(*found.items(), sep="\n")
    write_json(args.out, {"date": str(datetime.date.today()), "about": about, **found})


def _costs(bare: np.ndarray, with_rows: np.ndarray, full: np.ndarray, steps: int, rows: int) -> dict[str, Any]:
    """Medians over the rounds; each round's blocks are compared with each other."""
    added = 100 * (full / bare - 1) / OFTEN
    return {
        "step_ms": 1e3 * float(np.median(bare)) / steps,
        "row_ms": 1e3 * float(np.median(with_rows - bare)) / rows,
        "checkpoint_ms": 1e3 * float(np.median(full - with_rows)),
        "added_percent": float(np.median(added)),
        "added_percent_quartiles": np.quantile(added, (0.25, 0.75)).tolist(),
    }


def _blocks(
    config: RunConfig, steps: int, folder: RunFolder, stack: contextlib.ExitStack
) -> dict[str, Callable[[], None]]:
    """Three blocks of so many steps: bare, with rows, and full: with rows and one checkpoint."""
    mesh = make_mesh(config.mesh)
    step, state = make_train_step(config, mesh), fresh_state(config, mesh)
    batch_size, window = config.batch_size, config.model.context_length
    tokens_BW = np.random.default_rng(0).integers(0, config.model.vocab_size, (batch_size, window + 1), dtype=np.int32)
    weights_BT = np.ones((batch_size, window), np.float32)
    batch = put_batch({"inputs": tokens_BW[:, :-1], "targets": tokens_BW[:, 1:], "weights": weights_BT}, mesh)
    metrics = stack.enter_context(MetricsLog(folder.metrics))
    timing = stack.enter_context(RowLog(folder.timing))
    writer = stack.enter_context(contextlib.closing(TensorBoardWriter(folder)))
    checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder.checkpoints, config.checkpoints_kept)))
    often = dataclasses.replace(config, log_every=config.log_every // OFTEN, steps=10**9)
    recorder, done = Recorder(often, metrics, timing, [writer], 0, []), 0

    def run(rows: bool, saves: bool) -> None:
        nonlocal state, done
        for number in range(steps):
            state, device_metrics = step(state, batch, np.float32(1e-3))
            done += 1
            if rows:
                recorder.dispatched(done, device_metrics)
            if saves:
                checkpoints.check()
                if number == steps // 2:
                    recorder.drain()
                    checkpoints.save(done, state, {"interval": recorder.interval})
        recorder.drain()
        checkpoints.wait()
        jax.block_until_ready(state)

    return {name: functools.partial(run, *what) for name, what in
            {"bare": (False, False), "rows": (True, False), "full": (True, True)}.items()}  # fmt: skip


if __name__ == "__main__":
    main()
