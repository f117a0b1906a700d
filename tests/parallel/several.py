"""`lm` in several processes of this machine, two virtual devices each."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lm.data.batches import Batches

ROOT = Path(__file__).parents[2]
DEADLINE = 1800  # seconds: to wait, on a busy machine, for what happens in a few on a quiet one

# Steps of a few milliseconds would all be over between two looks; what reaches the devices is kept for comparison.
_WORKER = """
import itertools, os, sys, time
import numpy as np
import lm.train.loop as loop
from lm.base.errors import RunError
from lm.cli import main
put, keep, fail = loop.put_batch, os.environ.get("KEEP"), int(os.environ.get("FAIL", 0))
calls = itertools.count(1)
def slowly(*args):
    time.sleep(float(os.environ["SLOW"]))
    call, placed = next(calls), put(*args)
    if call == fail:
        raise RunError("no space left on the disk", where="here")
    if keep:
        rows = {f"{name}:{shard.index[0].start or 0}": np.asarray(shard.data)
                for name, array in placed.items() for shard in array.addressable_shards}
        np.savez(f"{keep}/{call - 1}-{os.getpid()}.npz", **rows)
    return placed
loop.put_batch = slowly
sys.exit(main([*sys.argv[1:], *os.environ.get("MORE", "").split()]))
"""


class Several:
    """`lm` started in `count` processes; each says what it says to a file."""

    def __init__(self, count: int, folder: Path, *command: str, slow: float = 0.05, **environment: str):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["--coordinator", address, "--processes", str(count), "--peer-timeout", str(DEADLINE)]
        shared = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "SLOW": str(slow),
            **{name: value for name, value in environment.items() if "_" not in name},
        }
        self.files = [folder / f"{index}.txt" for index in range(count)]
        self.processes = []
        for index, path in enumerate(self.files):
            own = {name.removesuffix(f"_{index}"): value for name, value in environment.items()}
            with path.open("w") as said:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", _WORKER, *command, *flags, "--process", str(index)],
                        stdout=subprocess.PIPE, stderr=said, text=True, cwd=ROOT, env={**shared, **own},
                    )
                )  # fmt: skip

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for `condition` while all processes live."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                self._kill()
                raise AssertionError(self.said())
            time.sleep(0.01)

    def codes(self) -> list[int]:
        """Exit codes, once all have ended."""
        try:
            return [process.wait(DEADLINE) for process in self.processes]
        finally:
            self._kill()

    def said(self) -> list[str]:
        """What each process has said on standard error."""
        return [path.read_text() for path in self.files]

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def last_lines(self) -> list[str]:
        """The last line of each process."""
        return [(text.splitlines() or [""])[-1] for text in self.said()]


def assert_same_batches(folder: Path, batches: Batches, steps: int) -> None:
    """Sees that the rows kept in `folder` make up, bit for bit, each batch of one process."""
    for step in range(steps):
        whole = {name: np.full_like(rows, -1) for name, rows in batches[step].items()}
        for path in folder.glob(f"{step}-*.npz"):
            for key, rows in np.load(path).items():
                name, _, start = key.partition(":")
                whole[name][int(start) : int(start) + len(rows)] = rows
        for name, rows in batches[step].items():
            np.testing.assert_array_equal(whole[name], rows, err_msg=f"{name} at step {step}")


def last_step(run: Path) -> int:
    """The step of the newest row of metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)
