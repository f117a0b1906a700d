"""Kills, stops and damages a small run at random moments, runs the same command again, and counts what is lost."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.faults import causes
from experiments.faults.bench import STEPS, Bench, Count, mount
from lm.base.files import write_json
from lm.base.progress import bar
from lm.run.record import environment

RESULTS = Path(__file__).with_name("results.json")


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of fault: so many `times` in all, up to `a_run` in one run before it is let finish and compared."""

    name: str
    cause: causes.Cause
    times: int
    a_run: int = 1
    small_disk: bool = False  # in a file system of its own


def kinds(kills: int, others: int) -> list[Kind]:
    """`kills` kill -9 in all, and `others` of each other fault."""
    saving, table = round(0.3 * kills), round(0.15 * kills)
    term = signal.SIGTERM
    found = [
        Kind("kill -9 in training", causes.signalled(causes.training), kills - saving - table, 6),
        Kind("kill -9 in checkpointing", causes.signalled(causes.checkpointing), saving, 6),
        Kind("kill -9 in writing a table or its row", causes.killed_table, table, 4),
        Kind("SIGTERM in training", causes.signalled(causes.training, term), others, 4),
        Kind("SIGTERM in evaluation", causes.signalled(causes.evaluating, term), others, 4),
        Kind("SIGTERM while the step compiles", causes.signalled(causes.compiling, term), others, 4),
        Kind("flipped bit in the newest checkpoint", causes.checkpoint(causes.flip), others, 2),
        Kind("truncated file in the newest checkpoint", causes.checkpoint(causes.cut), others, 2),
        Kind("flipped bit in metrics.jsonl", causes.metrics(causes.flip), others, 2),
        Kind("truncated metrics.jsonl", causes.metrics(causes.cut), others, 2),
        Kind("half a row more in metrics.jsonl", causes.metrics(causes.half_row), others, 2),
        Kind("flipped bit in a token file", causes.tokens(causes.flip), others, 2),
        Kind("truncated token file", causes.tokens(causes.cut), others, 2),
        Kind("two commands on one folder", causes.second_run, others),
    ]
    if os.geteuid() == 0:  # who else may not mount
        found += [
            Kind("full disk", causes.full_disk, others, 4, small_disk=True),
            Kind("folder that can only be read", causes.read_only, others, 4, small_disk=True),
        ]
    return found


def main() -> None:
    """Writes `results.json` at the end; stopped before, the same command goes on from there."""
    parser = argparse.ArgumentParser(prog="python -m experiments.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all: 55 %% training, 30 %% saving, 15 %% table")
    parser.add_argument("--others", type=int, default=4, help="of each other fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    about: dict[str, object] = {"seed": args.seed, "steps": STEPS, **environment()}
    commit = str(about.pop("commit"))
    unfinished = args.out.with_suffix(".part.json")  # a name of its own: a changed `results.json` is another checkout
    counts = read(unfinished, about)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        print(f"the undisturbed command takes {bench.cpu_seconds:.1f} CPU-seconds", flush=True)
        for kind in kinds(args.kills, args.others):
            count = counts.get(kind.name, Count(commit))
            if count.tried < kind.times and count.commit != commit:
                count = Count(commit)
            counts[kind.name] = count
            for _ in measure(bench, kind, count, args.seed):
                faults = {name: dataclasses.asdict(count) for name, count in counts.items()}
                write_json(unfinished, {"date": str(datetime.date.today()), "about": about, "faults": faults})
            print(f"{count.seconds:6.0f} s  {kind.name}: {dataclasses.asdict(count)}", flush=True)
    unfinished.replace(args.out)
    print("\n".join(table(args.out)))


def measure(bench: Bench, kind: Kind, count: Count, seed: int) -> Iterator[None]:
    """Adds runs to `count` until it has tried often enough, and yields after each."""
    with small_disk(bench.disk) if kind.small_disk else contextlib.nullcontext(), bar(kind.name, kind.times) as shown:
        while count.tried < kind.times:
            begun, draw = time.monotonic(), random.Random(f"{seed} {kind.name} {count.runs_compared}")
            for _ in range(min(kind.a_run, kind.times - count.tried)):
                count.tried += kind.cause(bench, draw)
                shown.update(count.tried, f"{count.bits_changed} bits changed")
            bench.compare(count)
            count.seconds = round(count.seconds + time.monotonic() - begun, 1)
            yield


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own in `folder` while the block runs."""
    mount(folder, causes.ROOMY)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read(path: Path, about: dict[str, object]) -> dict[str, Count]:
    """The counts in `path`; none where there is no such file or it is about something else."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return {name: Count(**count) for name, count in found["faults"].items()} if found.get("about") == about else {}


def table(path: Path) -> Iterator[str]:
    """What `main` wrote to `path`, as a Markdown table."""
    names = ("tried", "runs_compared", "rows_lost", "rows_added", "bits_changed", "files_left")
    yield "| fault | times tried | runs compared | rows lost | rows added | bits changed | files left |"
    yield "|---|---|---|---|---|---|---|"
    for kind, count in json.loads(path.read_text())["faults"].items():
        yield f"| {kind} | {' | '.join(str(count[name]) for name in names)} |"
