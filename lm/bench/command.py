"""The command line's side of this room: which benchmark, its table, its file."""

import enum
import time
from pathlib import Path

import rich.console

from lm.bench.machine import Meter, facts, load
from lm.bench.rows import show, write


class What(enum.StrEnum):
    """The benchmarks that there are."""

    TRAIN = "train"


def bench(what: What, json_file: Path | None, peer_python: str | None, rounds: int) -> None:
    """Runs one benchmark, prints its tables and, where asked, writes its rows as JSON.

    Raises:
      UsageError: `peer_python` is not a program.
    """
    begun, before, meter = time.perf_counter(), load(), Meter()
    if what is What.TRAIN:
        from lm.bench.train import bench_train

        rows, peers = bench_train(peer_python, rounds, meter)
    machine = facts(meter, before, time.perf_counter() - begun)
    console = rich.console.Console()
    show(rows, console)
    console.print(
        f"{machine['machine']}, {machine['threads']} threads, jax {machine['jax']}; load {machine['load_before']} before "
        f"and {machine['load_after']} after, others used {machine['foreign_cores']} cores while we measured; "
        f"{rounds} rounds, {machine['wall_seconds']:.0f} s in all"
    )
    if json_file is not None:
        write(json_file, what.value, rows, machine, peers)
        console.print(f"rows: {json_file}")
