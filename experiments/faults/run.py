"""Kills, stops and damages a small run at random moments, runs the same command again, and counts what is lost."""

import argparse
import collections
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from experiments.faults.kill import CpuTime, Ended, FileEvent, Moment, Step, run_command, run_function
from lm.base.files import write_json
from lm.train.restore import load_run

HERE = Path(__file__).parent
STEPS = 60
CONFIG = {
    "model": {"vocab_size": 257, "context_length": 16, "n_layer": 1, "d_model": 16, "n_head": 2, "d_ff": 16},
    "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
    "data": {"separator": "\n\n", "validation_fraction": 0.2},
    "steps": STEPS, "batch_size": 4, "log_every": 4, "eval_every": 7, "eval_tokens": 64, "checkpoint_every": 6,
}  # fmt: skip
FAULTS_A_RUN = 4  # then the run is let finish and compared


@dataclasses.dataclass(frozen=True)
class Bench:
    """A run that nothing disturbs, and the command that makes it in any folder."""

    folder: Path
    unbroken: Path
    cpu: float  # seconds that the whole command takes

    def command(self, run: Path) -> list[str]:
        return ["train", "--config", str(self.folder / "config.json"), "--cache", str(self.folder / "cache"),
                "--workdir", str(run)]  # fmt: skip


@dataclasses.dataclass
class Count:
    """What came of one kind of fault."""

    tried: int = 0
    runs_compared: int = 0
    rows_lost: int = 0
    rows_added: int = 0
    bits_changed: int = 0
    files_left: int = 0


def main() -> None:
    """Writes `results.json` after each kind of fault."""
    parser = argparse.ArgumentParser(prog="python -m experiments.faults", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all: 55 %% training, 30 %% saving, 15 %% table")
    parser.add_argument("--others", type=int, default=8, help="of each other fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    draw, counts = random.Random(args.seed), {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        bench = prepare(Path(folder), draw)
        saving, table = round(0.3 * args.kills), round(0.15 * args.kills)
        kinds: dict[str, Callable[[], Count]] = {
            "kill -9 in training": lambda: signalled(bench, draw, training, args.kills - saving - table),
            "kill -9 in checkpointing": lambda: signalled(bench, draw, checkpointing, saving),
            "kill -9 in writing a table": lambda: killed_tables(bench, draw, table),
            "SIGTERM": lambda: signalled(bench, draw, training, args.others, signal.SIGTERM),
            "flipped bit in the newest checkpoint": lambda: damaged(bench, draw, flip_checkpoint, args.others),
            "truncated file in the newest checkpoint": lambda: damaged(bench, draw, cut_checkpoint, args.others),
            "metrics file cut in its last line": lambda: damaged(bench, draw, cut_metrics, args.others),
        }
        for kind, cause in kinds.items():
            begun = time.monotonic()
            counts[kind] = dataclasses.asdict(cause())
            print(f"{time.monotonic() - begun:6.0f} s  {kind}: {counts[kind]}", flush=True)
            write_json(args.out, {"seed": args.seed, "jax": jax.__version__, "steps": STEPS, "faults": counts})


def prepare(folder: Path, draw: random.Random) -> Bench:
    """The corpus, the configuration and the run that nothing disturbs."""
    vocabulary = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(20)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choices(vocabulary, k=12)) for _ in range(12)))
    config = {**CONFIG, "data": {**CONFIG["data"], "corpus": str(folder / "text.txt")}}  # type: ignore[dict-item]
    write_json(folder / "config.json", config)
    bench = Bench(folder, folder / "unbroken", 0.0)
    finish(bench, folder / "unbroken")  # fills the compilation cache
    shutil.rmtree(folder / "unbroken")
    ended = run_function(_timed, (bench.command(bench.unbroken), str(folder / "cpu")), folder / "said")
    assert ended.code == 0, ended.said
    return dataclasses.replace(bench, cpu=float((folder / "cpu").read_text()))


def signalled(
    bench: Bench, draw: random.Random, moments: Callable[[Bench, random.Random], Moment], times: int,
    number: int = signal.SIGKILL,
) -> Count:  # fmt: skip
    """Sends a signal at random moments of run after run; a command that ended before its moment is not counted."""
    count, run = Count(), bench.folder / "run"
    sent = (-number, 130) if number == signal.SIGTERM else (-number,)
    while count.tried < times:
        for _ in range(min(FAULTS_A_RUN, times - count.tried)):
            ended = run_command(bench.command(run), bench.folder / "said", moments(bench, draw), number)
            count.tried += ended.code in sent
            assert ended.code in (0, *sent), ended
        compare(bench, run, count)
    return count


def training(bench: Bench, draw: random.Random) -> Moment:
    """Anywhere from the first import to the result, or close behind the dispatch of a step."""
    if draw.random() < 0.5:
        return CpuTime(draw.uniform(0, bench.cpu))
    return Step(draw.randint(1, STEPS // 3), draw.uniform(0, 0.02))


def checkpointing(bench: Bench, draw: random.Random) -> Moment:
    """At or just behind an operation on a file of a checkpoint."""
    return FileEvent("checkpoints", draw.randint(1, 500), draw.choice((0.0, draw.uniform(0, 0.01))))


def killed_tables(bench: Bench, draw: random.Random, times: int) -> Count:
    """Kills `lm table` and the end of `lm train`, which write the table and a run's row of it."""
    count, run, table = Count(), bench.folder / "run", bench.folder / "table.csv"
    asked = ["table", str(bench.folder / "unbroken"), "--out", str(table)]
    assert run_command(asked, bench.folder / "said").code == 0
    whole = table.read_bytes()
    moments = itertools.cycle([("table.csv", 1), ("table.csv", 2), ("result.json", 1), ("result.json", 2)])
    while count.tried < times:
        part, number = next(moments)
        argv = asked if part == "table.csv" else bench.command(run)
        moment = FileEvent(part, number, draw.choice((0.0, draw.uniform(0, 0.001))))
        count.tried += run_command(argv, bench.folder / "said", moment).code == -signal.SIGKILL
        assert table.read_bytes() == whole
        if part == "result.json":
            compare(bench, run, count)
    return count


def damaged(bench: Bench, draw: random.Random, damage: Callable[[Path, random.Random], None], times: int) -> Count:
    """Kills runs in their middle and damages what they left."""
    count, run = Count(), bench.folder / "run"
    while count.tried < times:
        ended = run_command(bench.command(run), bench.folder / "said", Step(draw.randint(20, STEPS - 10)))
        assert ended.code == -signal.SIGKILL, ended
        damage(run, draw)
        count.tried += 1
        compare(bench, run, count)
    return count


def newest_file(run: Path, draw: random.Random) -> Path:
    """A random sealed file of the newest checkpoint that is not empty."""
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1)
    return draw.choice(sorted(path for path in (newest / "state").rglob("*") if path.is_file() and path.stat().st_size))


def flip_checkpoint(run: Path, draw: random.Random) -> None:
    """Another bit somewhere in the newest checkpoint."""
    path = newest_file(run, draw)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut_checkpoint(run: Path, draw: random.Random) -> None:
    """Fewer bytes in a file of the newest checkpoint."""
    path = newest_file(run, draw)
    os.truncate(path, draw.randrange(path.stat().st_size))


def cut_metrics(run: Path, draw: random.Random) -> None:
    """Half a line more at the end of metrics.jsonl."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind":"train","step":59,"loss":4.17171717'[: draw.randint(1, 43)])


def finish(bench: Bench, run: Path) -> Ended:
    """The command, undisturbed; it must succeed."""
    ended = run_command(bench.command(run), bench.folder / "said")
    assert ended.code == 0, ended.said
    return ended


def compare(bench: Bench, run: Path, count: Count) -> None:
    """Lets the run finish, adds up how it differs from the undisturbed one, and removes it."""
    finish(bench, run)
    ours, theirs = (collections.Counter((path / "metrics.jsonl").read_bytes().splitlines())
                    for path in (run, bench.unbroken))  # fmt: skip
    count.runs_compared += 1
    count.rows_lost += (theirs - ours).total()
    count.rows_added += (ours - theirs).total()
    count.bits_changed += sum(differing_bits(*pair) for pair in zip(*map(content, (run, bench.unbroken)), strict=True))
    count.files_left += len([*run.rglob("*.part"), *(run / "checkpoints").glob("*tmp*")])
    print(f"         {dataclasses.asdict(count)}", flush=True)
    shutil.rmtree(run)


def content(run: Path) -> Iterator[bytes]:
    """Metrics, final loss and parameters."""
    yield (run / "metrics.jsonl").read_bytes()
    yield repr(json.loads((run / "result.json").read_text())["loss"]).encode()
    for leaf in jax.tree.leaves(jax.device_get(load_run(run).params)):
        yield np.asarray(leaf).tobytes()


def differing_bits(one: bytes, other: bytes) -> int:
    """Bits that differ; each byte more or less counts as eight."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one[:size], np.uint8) ^ np.frombuffer(other[:size], np.uint8)
    return int(np.bitwise_count(differ).sum()) + 8 * abs(len(one) - len(other))


def _timed(argv: list[str], cpu: str) -> None:
    from lm.cli import main

    code = main(argv)
    Path(cpu).write_text(str(time.process_time()))
    sys.exit(code)
