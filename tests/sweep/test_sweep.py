"""A whole sweep in small: plan, tune, cells in processes, table, fit, held-out run, report; and what happens when cells
fail, processes are killed, or the ladder grows."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from lm.base.config import build
from lm.base.errors import RunError
from lm.base.files import write_json
from lm.scaling.table import NAMES
from lm.sweep.ladder import Ladder, grid, sizes
from lm.sweep.sweep import sweep

SHAPES = sizes([8, 16], ff_ratio=2, depth=1, n_head=2)
LENGTHS = (1280, 2560, 5120, 10240)
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "ran",
    "to",
    "see",
    "what",
    "dogs",
    "had",
    "done",
    "with",
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """Forty documents of random words."""
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choices(WORDS, k=draw.randrange(40, 160))))
    return folder


def ladder_values(texts: Path) -> dict:
    return {
        "name": "mini",
        "base": {
            "model": {"vocab_size": 257, "context_length": 16, "n_layer": 1, "d_model": 8, "n_head": 2, "d_ff": 16},
            "data": {"corpus": str(texts), "validation_fraction": 0.2},
            "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
            "batch_size": 2,
            "steps": 20,
            "log_every": 10,
            "checkpoint_every": 20,
            "eval_tokens": 1024,
        },
        "tune": {"cells": grid(SHAPES[:1], [1280], per_parameter=False), "rates": [1e-2, 3e-2]},
        "cells": [
            *grid(SHAPES, LENGTHS, per_parameter=False),
            *grid(SHAPES[1:], [20480], per_parameter=False, role="holdout"),
        ],
        "fit": {"bootstrap": 50},
    }


@pytest.fixture(scope="module")
def finished(texts, tmp_path_factory) -> tuple[Ladder, Path]:
    """The mini ladder, run whole."""
    ladder, workdir = build(Ladder, ladder_values(texts)), tmp_path_factory.mktemp("runs")
    sweep(ladder, workdir)
    return ladder, workdir


def results(workdir: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in (workdir / "mini").glob("*/result.json")}


@pytest.mark.slow
def test_a_sweep_ends_with_a_table_a_fit_a_verdict_and_a_report(finished):
    folder = finished[1] / "mini"
    table = pd.read_csv(folder / "table.csv")
    assert list(table.columns) == list(NAMES)
    assert table["role"].value_counts().to_dict() == {"fit": 8, "tune": 1, "holdout": 1}
    assert table["loss"].between(0.5, 6.0).all()
    fit = json.loads((folder / "fit.json").read_text())
    assert fit["points"] == 8
    verdict = json.loads((folder / "holdout.json").read_text())
    held_out = table[table["role"] == "holdout"].iloc[0]
    assert verdict["measured"] == held_out["loss"]
    assert verdict["inside"] == (
        verdict["prediction_interval"][0] <= held_out["loss"] <= verdict["prediction_interval"][1]
    )
    rule = json.loads((folder / "tune.json").read_text())["rule"]
    others = table[table["role"] != "tune"]
    assert (others["peak_lr"] == float(f"{rule['coefficient']:.3g}")).all()
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_same_command_again_trains_nothing_and_fits_the_same(finished):
    ladder, workdir = finished
    before, fit = results(workdir), (workdir / "mini" / "fit.json").read_bytes()
    sweep(ladder, workdir)
    assert results(workdir) == before
    assert (workdir / "mini" / "fit.json").read_bytes() == fit


@pytest.mark.slow
def test_a_cell_added_later_runs_alone(finished, texts):
    _, workdir = finished
    before = results(workdir)
    values = ladder_values(texts)
    values["cells"] += grid(SHAPES[:1], [1920], per_parameter=False)
    sweep(build(Ladder, values), workdir)
    after = results(workdir)
    assert len(after) == len(before) + 1
    assert {cell: after[cell] for cell in before} == before


@pytest.mark.slow
def test_the_fit_does_not_depend_on_the_held_out_run(finished):
    ladder, workdir = finished
    folder = workdir / "mini"
    sweep(ladder, workdir)
    fit = json.loads((folder / "fit.json").read_text())
    (held_out,) = [path for path in folder.glob("*/result.json") if json.loads(path.read_text())["role"] == "holdout"]
    original = held_out.read_text()
    held_out.write_text(json.dumps({**json.loads(original), "loss": 1.0}))
    try:
        sweep(ladder, workdir)
        again = json.loads((folder / "fit.json").read_text())
        assert json.loads((folder / "holdout.json").read_text())["measured"] == 1.0
    finally:
        held_out.write_text(original)
    assert again["parameters"] == fit["parameters"]
    assert again["intervals"] == fit["intervals"]


@pytest.mark.slow
def test_a_failing_cell_is_named_and_the_others_finish(texts, tmp_path):
    values = ladder_values(texts)
    del values["tune"]
    doomed = {"overrides": {"optimizer.peak_lr": 1e30, "optimizer.clip_norm": 0.0}, "tokens": 1280}
    values["cells"] = [doomed, *grid(SHAPES, LENGTHS[:3], per_parameter=False)]
    with pytest.raises(RunError, match=r"1 of 7 cells failed: \w+ \(exit code 1.* is (nan|inf)") as caught:
        sweep(build(Ladder, values), tmp_path)
    assert caught.value.exit_code == 1
    assert len(results(tmp_path)) == 6
    assert len(pd.read_csv(tmp_path / "mini" / "table.csv")) == 6


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_cell_behind_and_continues(texts, tmp_path):
    values = ladder_values(texts)
    del values["tune"]
    values["cells"] = grid(SHAPES, [5120, 10240, 20480], per_parameter=False)
    write_json(tmp_path / "ladder.json", values)
    command = [sys.executable, "-m", "lm.cli", "sweep", str(tmp_path / "ladder.json"), "--workdir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not results(tmp_path):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1.0)  # the kernel ends the children when it has reaped the parent
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and _runs_in(int(pid), tmp_path)]
    before = results(tmp_path)
    assert len(before) < 6
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = results(tmp_path)
    assert len(after) == 6
    assert {cell: after[cell] for cell in before} == before


def test_a_dry_run_prints_the_plan_and_trains_nothing(texts, tmp_path, capsys):
    sweep(build(Ladder, ladder_values(texts)), tmp_path, dry_run=True)
    printed = capsys.readouterr().out
    assert "11 of 11 cells to train" in printed
    assert "minutes" in printed
    assert not list(tmp_path.glob("mini/*/result.json"))
    assert not (tmp_path / "mini" / "ladder.json").exists()


def _runs_in(pid: int, folder: Path) -> bool:
    try:
        return str(folder) in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
