"""`lm status` and `lm cancel` on folders written by hand, with a Slurm whose answers are written by hand too."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lm.base.errors import RunError, UsageError
from lm.base.files import write_json, write_text
from lm.cli import main
from lm.run.lock import locked
from lm.sweep import status as statuses
from lm.sweep.folder import Listed, SweepFolder
from lm.sweep.status import State, cancel, status

STEPS = 200


@pytest.fixture
def folder(tmp_path) -> SweepFolder:
    """A sweep of six cells: `a` has its result, `b` is half way, the others have not begun."""
    made = SweepFolder(tmp_path / "mini")
    made.write_list([Listed(name, "fit", 1000, STEPS) for name in "abcdef"], later=3)
    write_json(made.run("a").result, {"loss": 2.5})
    rows = [{"kind": "train", "step": step, "loss": 5 - step / 100} for step in (1, 50, 100)]
    rows += [{"kind": "eval", "step": 100, "loss": 9.0}]
    write_text(made.run("b").metrics, "".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "tr')
    write_text(made.run("b").timing, json.dumps({"step": 100, "steps": 50, "seconds": 25.0}) + "\n")
    return made


@pytest.fixture
def queue(folder, tmp_path, monkeypatch) -> Path:
    """Slurm's list, a file of lines; cells `b` to `e` are an array, `f` is a job of its own."""
    for batch, cells in (("mini-001-aaaaaaaa", ["c", "f"]), ("mini-002-bbbbbbbb", list("bcde")),
                         ("mini-010-cccccccc", ["f"])):  # fmt: skip
        write_json(folder.batches / batch / "batch.json", {"cells": cells})
    answers = tmp_path / "squeue.txt"
    for program, does in (("squeue", f'cat "{answers}"'), ("scancel", f'echo "$@" > "{tmp_path}/cancelled.txt"')):
        (tmp_path / "bin" / program).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    answers.write_text(
        "mini-002-bbbbbbbb|7|0|RUNNING|None\n"
        "mini-002-bbbbbbbb|7|1|PENDING|Priority\n"
        "mini-002-bbbbbbbb|7|2|TIMEOUT|TimeLimit\n"
        "mini-001-aaaaaaaa|5|0|CANCELLED|None\n"
        "mini-001-aaaaaaaa|5|1|FAILED|None\n"
        "mini-010-cccccccc|9|N/A|PENDING|BeginTime\n"
    )
    return answers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object, but a list"),
        ('{"cells": [{"id": "a"}], "later": 0}', "the field 'role' is missing"),
    ],
)
def test_a_damaged_list_of_cells_is_refused_with_its_name(folder, capsys, text, said):
    folder.list.write_text(text)
    assert main(["status", str(folder.path)]) == 2
    assert str(folder.list) in (told := capsys.readouterr().err)
    assert said in told


def by_id(folder: SweepFolder) -> dict[str, statuses.CellStatus]:
    return {cell.id: cell for cell in status(folder.path).cells}


def test_a_sweep_that_nobody_is_at_is_done_or_left_with_its_progress(folder):
    cells = by_id(folder)
    assert (cells["a"].state, cells["a"].loss, cells["a"].step) == (State.DONE, 2.5, STEPS)
    assert (cells["b"].state, cells["b"].loss, cells["b"].step) == (State.LEFT, 4.0, 100)
    assert cells["b"].seconds_left is None
    assert {cells[name].state for name in "cdef"} == {State.LEFT}
    assert status(folder.path).totals == {"done": 1, "running": 0, "queued": 0, "failed": 0, "left": 5, "later": 3}


def test_locks_tell_what_runs_here_and_looking_takes_none_of_them(folder):
    write_text(folder.failure("d"), "exit code 1: loss is nan\n")
    with locked(folder.path), locked(folder.run("b").path), locked(folder.run("e").path):
        cells = by_id(folder)
        assert (cells["b"].state, cells["b"].seconds_left) == (State.RUNNING, 50.0)  # 100 steps of half a second
        assert (cells["e"].state, cells["e"].seconds_left) == (State.RUNNING, None)
        assert (cells["d"].state, cells["d"].note) == (State.FAILED, "exit code 1: loss is nan")
        assert cells["c"].state is State.QUEUED
    with locked(folder.path), locked(folder.run("b").path):
        pass


def test_slurms_list_tells_the_newest_job_of_each_cell(folder, queue):
    write_text(folder.batches / "mini-002-bbbbbbbb" / "7_2_0_log.out", "out of luck\nsrun: error: task 0: Killed\n")
    cells = by_id(folder)
    assert (cells["b"].state, cells["b"].job, cells["b"].seconds_left) == (State.RUNNING, "7_0", 50.0)
    assert (cells["c"].state, cells["c"].job, cells["c"].note) == (State.QUEUED, "7_1", "Priority")
    assert (cells["d"].state, cells["d"].note) == (State.FAILED, "TIMEOUT: out of luck")
    assert cells["e"].state is State.FAILED
    assert cells["e"].note.startswith("the job ended without a result: the job wrote nothing under ")
    assert (cells["f"].state, cells["f"].job, cells["f"].note) == (State.QUEUED, "9", "BeginTime")


def test_the_cells_own_last_line_comes_before_the_jobs(folder, queue):
    write_text(folder.batches / "mini-002-bbbbbbbb" / "7_2_0_log.out", "submitit INFO - Starting\n")
    assert by_id(folder)["d"].note == "TIMEOUT: submitit INFO - Starting"
    write_text(folder.output("d"), "step 3\nno space left on the disk\n\n")
    assert by_id(folder)["d"].note == "TIMEOUT: no space left on the disk"


def test_a_silent_slurm_is_said_and_the_rest_is_shown(folder, queue, tmp_path, capsys, monkeypatch):
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\necho 'squeue: error: Connection refused' >&2; exit 1\n")
    assert main(["status", str(folder.path)]) == 0
    printed = capsys.readouterr().out
    assert "squeue: Connection refused; queued and running jobs are not known" in printed
    assert "1 done" in printed
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no squeue on the PATH" in status(folder.path).warning
    with pytest.raises(UsageError, match="there is no squeue"):
        cancel(folder.path)


def test_the_table_and_the_json_say_the_same(folder, queue, capsys):
    assert main(["status", str(folder.path)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "6 cells: 1 done, 1 running, 2 queued, 2 failed; 3 more follow the tune stage"
    assert "100/200" in printed
    assert "0:00:50" in printed
    assert main(["status", str(folder.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["totals"] == {"done": 1, "running": 1, "queued": 2, "failed": 2, "left": 0, "later": 3}
    assert found["cells"][1] == {
        "id": "b", "role": "fit", "n": 1000, "state": "running", "step": 100, "steps": STEPS, "loss": 4.0,
        "seconds_left": 50.0, "job": "7_0", "note": "",
    }  # fmt: skip


def test_cancel_names_the_jobs_that_are_alive_and_no_other(folder, queue, tmp_path):
    assert cancel(folder.path) == ["3 jobs cancelled"]
    assert sorted((tmp_path / "cancelled.txt").read_text().split()) == ["7_0", "7_1", "9"]


def test_cancel_tells_the_process_of_this_machine_to_end(folder):
    code = (
        "import sys, signal, time; from lm.run.lock import locked; signal.signal(15, signal.default_int_handler)\n"
        "with locked(sys.argv[1]):\n    print('at work', flush=True)\n    time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    assert process.stdout.readline() == "at work\n"
    assert cancel(folder.path) == [f"process {process.pid} has ended; its cells saved first"]
    assert process.wait() in (130, -signal.SIGINT)
    assert cancel(folder.path) == []


def test_cancel_ends_nothing_on_another_machine(folder, monkeypatch):
    with locked(folder.path):
        monkeypatch.setattr(platform, "node", lambda: "elsewhere")
        with pytest.raises(
            RunError, match=rf"process {os.getpid()} on .* is working on this sweep\. End it there first"
        ):
            cancel(folder.path)


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_a_folder_of_no_sweep_is_refused(command, tmp_path, capsys):
    assert main([command, str(tmp_path)]) == 2
    assert "this is not a sweep's folder" in capsys.readouterr().err


def test_status_needs_no_jax(folder):
    code = "import sys; from lm.cli import main; main(['status', sys.argv[1]]); sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(folder.path)], check=True, capture_output=True)


def test_jobs_named_by_a_comma_are_not_taken_apart(folder):
    from lm.sweep.queue import new_batch

    assert "," not in new_batch(folder, "a,b c|d", ["x"]).name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--partition", "gpu"], "--partition: says how Slurm runs cells. Add --launcher slurm"),
        (["--launcher", "slurm", "--jobs", "2"], "--jobs: is for cells on this machine. Say --max-parallel"),
        (["--launcher", "slurm", "--max-parallel", "0"], "--max-parallel: 0 is less than 1"),
        (["--launcher", "slurm", "--slurm", "partition=gpu"], "'partition' has a flag of its own. Use --partition."),
        (["--launcher", "slurm", "--slurm", "array=1-3"], "'array' is set for every sweep. Leave it out."),
        (["--launcher", "slurm", "--slurm", "q os=low"], "'q os=low' is no option of sbatch"),
        (["--launcher", "slurm"], "there is no sbatch on the PATH. Go to a login node"),
    ],
)
def test_a_wrong_request_for_slurm_costs_one_line(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["sweep", "configs/ladders/quick.py", "--workdir", str(tmp_path / "runs"), *arguments]) == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_missing_submitit_is_named(monkeypatch, tmp_path):
    from lm.sweep.slurm import Slurm

    (tmp_path / "sbatch").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"needs the package submitit.*pip install"):
        Slurm()
