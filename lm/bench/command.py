"""The command line's side of this room: which benchmark, its table, its file."""

import enum
import time
from pathlib import Path

import rich.console

from lm.base.errors import UsageError
from lm.bench.machine import Meter, facts, load
from lm.bench.rows import chosen, show, write


class What(enum.StrEnum):
    """The benchmarks that there are."""

    TRAIN = "train"
    DATA = "data"
    FIT = "fit"
    DECODE = "decode"


def bench(what: What, json_file: Path | None, peer_python: str | None, rounds: int, only: str = "") -> None:
    """Runs one benchmark, prints its tables and, where asked, writes its rows as JSON.

    Of its cases those are measured whose name holds `only`.

    Raises:
      UsageError: no rounds, no such case, `peer_python` is not a program, or `json_file` cannot be written.
    """
    if rounds < 1:
        raise UsageError(f"{rounds} rounds", where="--rounds", do="Give 1 or more.")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError("its folder does not exist", where=f"--json {json_file}", do="Make it first.")
    begun, before, meter = time.perf_counter(), load(), Meter()
    match what:
        case What.TRAIN:
            from lm.bench.train import SHAPES, bench_train

            rows, peers = bench_train(peer_python, rounds, meter, chosen(SHAPES, only))
        case What.DATA:
            from lm.bench.data import DRAWS, bench_data

            rows, peers = bench_data(rounds, meter, chosen(DRAWS, only))
        case What.FIT:
            from lm.bench.fit import WORKS, bench_fit

            rows, peers = bench_fit(rounds, meter, *chosen(WORKS, only))
        case What.DECODE:
            from lm.bench.decode import CASES, bench_decode

            rows, peers = bench_decode(peer_python, rounds, meter, chosen(CASES, only))
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
