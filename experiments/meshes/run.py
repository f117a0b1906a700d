"""Losses on every mesh of eight devices, and in 1, 2 and 4 processes, against one device; and the bytes of a device."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.meshes.eight import CASES, CONFIG, MODELS, ROOT, measured
from lm.base.config import build, override, to_dict
from lm.base.files import write_json
from lm.train.config import RunConfig

NUMBERS = ("loss", "grad_norm", "param_norm")
STEPS = 12  # of each run in processes
PROCESSES = (1, 2, 4)


def main() -> None:
    """Writes `results.json` and prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m experiments.meshes", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    found = {"jax": jax.__version__, "meshes": meshes(), "processes": processes()}
    write_json(args.out, found)
    print(as_table(found["meshes"], ("mesh", *NUMBERS, "state", "temporaries")))
    print(as_table(found["processes"], ("processes", "devices", "mesh", *NUMBERS)))


def meshes() -> list[dict[str, Any]]:
    """A row for each mesh: largest relative differences, and the bytes of a device over those of the only one."""
    found, rows = measured(CASES), []
    for name, case in CASES.items():
        here, alone = found[name], found[case.model]
        row = {"mesh": _described(case.axes), **differences(here["rows"], alone["rows"])}
        row |= {of: here[f"{of}_bytes"] / alone[f"{of}_bytes"] for of in ("state", "temporary")}
        rows.append(row)
    return rows


def processes() -> list[dict[str, Any]]:
    """A row for each count of processes, of two devices each, that train one run together."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        draw = np.random.default_rng(0)
        words = ["".join(chr(97 + letter) for letter in draw.integers(0, 8, size)) for size in draw.integers(2, 6, 20)]
        (folder / "text.txt").write_text("\n\n".join(" ".join(draw.choice(words, 40)) for _ in range(40)))
        config = override(
            build(RunConfig, CONFIG),
            [*MODELS["untied"], f"data.corpus={folder / 'text.txt'}", "data.separator=\n\n", "model.vocab_size=257",
             "data.validation_fraction=0.2", f"steps={STEPS}", "log_every=1"],
        )  # fmt: skip
        write_json(folder / "config.json", to_dict(config))
        alone = trained(folder, "alone", 1, 1, {})
        rows = []
        for count in PROCESSES:
            axes = {"data": count, "fsdp": 2}
            here = trained(folder, f"{count}", count, 2, axes)
            row = {"processes": count, "devices": 2 * count, "mesh": _described(axes)}
            rows.append({**row, **differences(here, alone)})
        return rows


def trained(folder: Path, run: str, count: int, devices: int, axes: dict[str, int]) -> list[list[float]]:
    """The numbers of each step of `lm train` in `count` processes of so many devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "lm.cli", "train", "--config", str(folder / "config.json"),
               "--cache", str(folder / "cache"), "--workdir", str(folder / run),
               *(f"--config.mesh.{axis}={size}" for axis, size in axes.items())]  # fmt: skip
    flags = ["--coordinator", address, "--processes", str(count)] if count > 1 else []
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    started = [
        subprocess.Popen([*command, *flags, *(("--process", str(index)) if flags else ())], cwd=ROOT, env=environment)
        for index in range(count)
    ]
    codes = [process.wait() for process in started]
    assert not any(codes), codes
    logged = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    return [[row[name] for name in NUMBERS] for row in logged if row["kind"] == "train"]


def differences(here: Sequence[Sequence[float]], alone: Sequence[Sequence[float]]) -> dict[str, float]:
    """The largest relative difference of each number over the steps."""
    apart = np.max(np.abs(np.asarray(here) / np.asarray(alone) - 1), axis=0)
    return dict(zip(NUMBERS, apart.tolist(), strict=True))


def as_table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """The rows in Markdown."""
    lines = [columns, ["---"] * len(columns), *([_told(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _described(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def _told(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}".removeprefix("0") if value > 1e-2 else f"{value:.0e}"
