"""The command line's side of this room: which benchmark, its table, its file."""

import enum
import time
from pathlib import Path

import rich.console

from lm.base.errors import UsageError
from lm.bench.machine import Meter, facts, load
from lm.bench.rows import show, write


class What(enum.StrEnum):
    """The benchmarks that there are."""

    TRAIN = "train"
    DATA = "data"
    FIT = "fit"


def bench(what: What, json_file: Path | None, peer_python: str | None, rounds: int) -> None:
    """Runs one benchmark, prints its tables and, where asked, writes its rows as JSON.

    Raises:
      UsageError: no rounds, `peer_python` is not a program, or `json_file` cannot be written.
    """
    if rounds < 1:
        raise UsageError(f"{rounds} rounds", where="--rounds", do="Give 1 or more.")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError("its folder does not exist", where=f"--json {json_file}", do="Make it first.")
    begun, before, meter = time.perf_counter(), load(), Meter()
    match what:
        case What.TRAIN:
            from lm.bench.train import bench_train

            rows, peers = bench_train(peer_python, rounds, meter)
        case What.DATA:
            from lm.bench.data import bench_data

            rows, peers = bench_data(rounds, meter)
        case What.FIT:
            from lm.bench.fit import bench_fit

            rows, peers = bench_fit(rounds, meter)
    machine = facts(meter, before, time.perf_counter() - begun)
    console = rich.console.Console()
    show(rows, console)
    console.print(
        f"{machine['machine']}, {machine['threads']} threads, jax {machine['jax']}; {rounds} rounds, "
        f"{machine['wall_seconds']:.0f} s in all; load {machine['load_before']} before and {machine['load_after']} "
        f"after, others used {machine['foreign_cores']} cores while we measured",
        markup=False,
    )
    if json_file is not None:
        write(json_file, what.value, rows, machine, peers)
        console.print(f"rows: {json_file}")
