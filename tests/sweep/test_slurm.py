"""Cells as jobs of a real Slurm with one node: same bits as on this machine, whatever interrupts them."""

import concurrent.futures
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from lm.base.config import build, to_dict
from lm.base.errors import RunError, UsageError
from lm.base.files import write_json
from lm.cli import main
from lm.sweep.folder import SweepFolder
from lm.sweep.ladder import Ladder, grid, sizes
from lm.sweep.launch import Launcher
from lm.sweep.local import Local, slots
from lm.sweep.queue import jobs
from lm.sweep.slurm import Slurm
from lm.sweep.status import CellStatus, State, status
from lm.sweep.sweep import sweep
from tests.sweep.cluster import ask, slurm, wait_for
from tests.train.tiny import corpus

pytestmark = pytest.mark.slow

SMALL, LARGE = sizes([8, 16], ff_ratio=2, depth=1, n_head=2)
LONG = 24  # width of the cell that is interrupted
OF_A_CLOCK = ["wall_seconds", "tokens_per_second", "mfu", "peak_flops"]


@pytest.fixture(scope="module")
def unshared(tmp_path_factory):
    """Slurm is up; a folder that its node does not see."""
    with slurm(tmp_path_factory.mktemp("slurm")) as folder:
        yield folder


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return corpus(tmp_path_factory.mktemp("text"), documents=40, words=40)


def ladder(text: str, *cells: dict, name: str = "mini") -> Ladder:
    long = {"overrides": {**SMALL, "model.d_model": LONG, "steps": 2500, "checkpoint_every": 1000}}
    values = {
        "name": name,
        "base": {
            "model": {"vocab_size": 257, "context_length": 16, "n_layer": 1, "d_model": 8, "n_head": 2, "d_ff": 16},
            "data": {"corpus": text, "separator": "\n\n", "validation_fraction": 0.2},
            "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
            "batch_size": 2,
            "steps": 20,
            "log_every": 10,
            "eval_tokens": 1024,
        },
        "cells": [*(cells or (long, *grid([SMALL, LARGE], [1280], per_parameter=False)))],
        "fit": {"bootstrap": 20},
    }
    return build(Ladder, values)


def failing() -> dict:
    return {"overrides": {"optimizer.peak_lr": 1e30, "optimizer.clip_norm": 0.0}, "tokens": 1280}


def train_cells(ladder: Ladder, workdir: Path, launcher: Launcher) -> None:
    """A sweep of too few cells for a fit, which is said when all are trained and tabled."""
    with pytest.raises(UsageError, match=r"points for 5 parameters of 'hoffmann'"):
        sweep(ladder, workdir, launcher=launcher)


def cell_of_width(folder: Path, width: int) -> str:
    """The cell of the sweep in `folder` with this model width, once its run folder tells it."""
    for path in folder.glob("*/config.json"):
        if json.loads(path.read_text())["config"]["model"]["d_model"] == width:
            return path.parent.name
    return ""


@contextlib.contextmanager
def all_cancelled_on_error() -> Iterator[None]:
    """A test that fails does not wait for its jobs."""
    try:
        yield
    except BaseException:
        ask("scancel", "--user=root")
        raise


def seen(folder: Path, cell: str) -> CellStatus:
    return next(found for found in status(folder).cells if found.id == cell)


@pytest.fixture(scope="module")
def swept(unshared, text, tmp_path_factory) -> tuple[Path, str, str]:
    """A sweep by jobs with a cell that fails and one that is interrupted twice; its folder, that cell, and its end."""
    workdir = tmp_path_factory.mktemp("jobs")
    folder = workdir / "mini"
    cells = [*ladder(text).cells, failing()]
    with concurrent.futures.ThreadPoolExecutor(1) as pool, all_cancelled_on_error():
        running = pool.submit(sweep, ladder(text, *cells), workdir, launcher=Slurm(max_parallel=2))
        wait_for(lambda: cell_of_width(folder, LONG) or running.done(), "the long cell")
        long = cell_of_width(folder, LONG)
        for interrupt in (["scontrol", "requeue"], ["scancel", "--signal=USR2"]):
            before = seen(folder, long).step
            wait_for(lambda: seen(folder, long).step > before, "a step of the long cell")  # noqa: B023
            ask(*interrupt, seen(folder, long).job)
            wait_for(lambda: seen(folder, long).state is State.QUEUED, "the long cell in the queue again")
        with pytest.raises(RunError) as caught:
            running.result()
    return folder, long, str(caught.value)


def test_jobs_give_the_bits_of_the_local_launcher_though_one_was_requeued_twice(swept, text, tmp_path):
    folder, long, _ = swept
    log = (folder / long / "log.txt").read_text()
    assert log.count("stopped after step") == log.count("resumed after step") == 2
    train_cells(ladder(text), tmp_path, Local(slots(1)))
    ours, theirs = (pd.read_csv(path / "table.csv").drop(columns=OF_A_CLOCK) for path in (folder, tmp_path / "mini"))
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    for cell in ours["cell"]:
        rows = [(path / cell / "metrics.jsonl").read_bytes() for path in (folder, tmp_path / "mini")]
        assert rows[0] == rows[1]


def test_a_failed_cell_is_told_with_its_last_line_and_loses_no_other(swept):
    folder, _, end = swept
    assert "1 of 4 cells failed" in end
    assert "is nan at step" in end or "is inf at step" in end
    found = status(folder)
    assert found.totals == {"done": 3, "running": 0, "queued": 0, "failed": 1, "left": 0, "later": 0}
    (failed,) = [cell for cell in found.cells if cell.state is State.FAILED]
    assert failed.note.startswith("FAILED: ")
    assert failed.note in end


def test_two_processes_find_each_other_and_train_the_same_cell(swept, text, tmp_path):
    cells = grid([LARGE], [1280], per_parameter=False)
    train_cells(ladder(text, *cells), tmp_path, Slurm(options=("ntasks-per-node=2",)))
    (pair,) = pd.read_csv(tmp_path / "mini" / "table.csv").to_dict("records")
    table = pd.read_csv(swept[0] / "table.csv").set_index("cell")
    assert "processes=2" in pair["versions"]
    assert pair["loss"] == pytest.approx(table.loc[pair["cell"], "loss"], rel=1e-5)  # float32 sums in another order


def test_an_interrupted_wait_leaves_jobs_that_are_found_again_and_can_be_cancelled(unshared, text, tmp_path, capsys):
    folder = tmp_path / "later"
    waiting = ladder(text, *grid([SMALL, LARGE], [1280], per_parameter=False), name="later")
    write_json(tmp_path / "ladder.json", to_dict(waiting))
    command = [sys.executable, "-m", "lm.cli", "sweep", str(tmp_path / "ladder.json"), "--workdir", str(tmp_path),
               "--launcher", "slurm", "--slurm", "begin=now+1hour"]  # fmt: skip

    def queued() -> int:
        return sum(job.alive for job in jobs(SweepFolder(folder)).values())

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: queued() == 2 or first.poll() is not None, "two jobs")
    first.send_signal(signal.SIGTERM)  # as Ctrl-C, which a shell keeps from what it starts in the background
    said = first.communicate()[1]
    assert first.returncode == 130, said
    assert f"`lm cancel {folder}`" in said
    assert status(folder).totals["queued"] == 2

    second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert second.stderr.readline().strip() == "2 cells are queued or running already"
    assert len(ask("squeue", "--noheader", "--array", "--format=%i")) == 2
    assert main(["cancel", str(folder)]) == 0
    assert "2 jobs cancelled" in capsys.readouterr().out
    second.communicate()
    assert second.returncode == 130
    wait_for(lambda: queued() == 0, "the end of the jobs")
    assert status(folder).totals["left"] == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"partition": "nope"}, "sbatch: invalid partition specified: nope"),
        ({"options": ("colour=red",)}, "sbatch: unrecognized option '--colour=red'"),
        ({"time": "soon"}, "sbatch: Invalid --time specification"),
    ],
)
def test_what_sbatch_refuses_is_one_line_and_leaves_nothing(unshared, text, tmp_path, options, told):
    with pytest.raises(UsageError) as caught:
        sweep(ladder(text), tmp_path, launcher=Slurm(**options))
    assert str(caught.value).startswith(told)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "mini" / "slurm").iterdir())


def test_a_folder_that_the_node_does_not_share_is_named(unshared, text):
    with pytest.raises(RunError, match=r"no cell finished\. See the failures above"):
        sweep(ladder(text, failing()), unshared, launcher=Slurm())
    (cell,) = status(unshared / "mini").cells
    assert cell.state is State.FAILED
    assert (
        f"wrote nothing under {unshared / 'mini' / 'slurm'}. Is it on a file system that the nodes mount" in cell.note
    )
