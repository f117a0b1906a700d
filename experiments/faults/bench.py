"""A small run that nothing disturbs, the commands that make it again, and how another differs from it."""

import collections
import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from experiments.faults.kill import Ended, Moment, run_command, run_function
from lm.base.files import write_json
from lm.run.folder import RunFolder
from lm.train.restore import load_run

STEPS = 60
CONFIG = {
    "model": {"vocab_size": 257, "context_length": 16, "n_layer": 1, "d_model": 16, "n_head": 2, "d_ff": 16},
    "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
    "data": {"separator": "\n\n", "validation_fraction": 0.2},
    "steps": STEPS, "batch_size": 4, "log_every": 4, "eval_every": 7, "eval_tokens": 64, "checkpoint_every": 6,
}  # fmt: skip


@dataclasses.dataclass
class Count:
    """What came of one kind of fault, at one commit."""

    commit: str
    tried: int = 0
    runs_compared: int = 0
    rows_lost: int = 0
    rows_added: int = 0
    bits_changed: int = 0
    files_left: int = 0
    seconds: float = 0.0


class Bench:
    """The folder of an experiment: the corpus, the undisturbed run, and the run that faults come to.

    Args:
      folder: an empty one. All processes share a compilation cache in it.
    """

    def __init__(self, folder: Path):
        self.folder, self.said, self.cache, self.disk = folder, folder / "said", folder / "cache", folder / "disk"
        self.run, self.table = RunFolder(self.disk / "run"), folder / "table.csv"
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.disk.mkdir()
        draw = random.Random(0)
        vocabulary = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(20)]
        (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choices(vocabulary, k=12)) for _ in range(12)))
        data = {**CONFIG["data"], "corpus": str(folder / "text.txt")}  # type: ignore[dict-item]
        write_json(folder / "config.json", {**CONFIG, "data": data})
        self.finish()  # fills the compilation cache
        shutil.rmtree(self.run.path)
        ended = run_function(_timed, (self.train, str(folder / "cpu")), self.said)
        assert ended.code == 0, ended.said
        self.cpu_seconds = float((folder / "cpu").read_text())  # that the whole command takes
        self.run.path.rename(folder / "unbroken")
        self.expected = list(_content(folder / "unbroken"))
        assert self.command(self.write_table).code == 0
        self.whole_table = self.table.read_bytes()

    @property
    def train(self) -> list[str]:
        """The command that begins the run or goes on with it."""
        return ["train", "--config", str(self.folder / "config.json"), "--cache", str(self.cache),
                "--workdir", str(self.run.path)]  # fmt: skip

    @property
    def write_table(self) -> list[str]:
        """The command that writes the table of the undisturbed run."""
        return ["table", str(self.folder / "unbroken"), "--out", str(self.table)]

    def command(self, argv: list[str], moment: Moment | None = None, **options: int) -> Ended:
        """Runs one of them, as `run_command`."""
        return run_command(argv, self.said, moment, **options)

    def finish(self) -> None:
        """Runs `train` undisturbed; it must succeed."""
        ended = self.command(self.train)
        assert ended.code == 0, ended.said

    def compare(self, count: Count) -> None:
        """Lets the run finish, adds up how it differs from the undisturbed one, and removes it."""
        self.finish()
        found = list(_content(self.run.path))
        ours, theirs = (collections.Counter(content[0].splitlines()) for content in (found, self.expected))
        count.runs_compared += 1
        count.rows_lost += (theirs - ours).total()
        count.rows_added += (ours - theirs).total()
        count.bits_changed += sum(_differing_bits(*pair) for pair in zip(found, self.expected, strict=True))
        count.files_left += len([*self.run.path.rglob("*.part"), *self.run.checkpoints.glob("*tmp*")])
        shutil.rmtree(self.run.path)


def mount(folder: Path, options: str) -> None:
    """Mounts a tmpfs on `folder`, or changes the options of the one that is there."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def _content(run: Path) -> Iterator[bytes]:
    """Metrics, final loss and parameters."""
    yield RunFolder(run).metrics.read_bytes()
    yield repr(json.loads(RunFolder(run).result.read_text())["loss"]).encode()
    for leaf in jax.tree.leaves(jax.device_get(load_run(run).params)):
        yield np.asarray(leaf).tobytes()


def _differing_bits(one: bytes, other: bytes) -> int:
    """Bits that differ; each byte more or less counts as eight."""
    size = min(len(one), len(other))
    differ = np.frombuffer(one[:size], np.uint8) ^ np.frombuffer(other[:size], np.uint8)
    return int(np.bitwise_count(differ).sum()) + 8 * abs(len(one) - len(other))


def _timed(argv: list[str], cpu: str) -> None:
    from lm.cli import main

    code = main(argv)
    Path(cpu).write_text(str(time.process_time()))
    sys.exit(code)
