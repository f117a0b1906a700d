"""Real processes: the run of one process, whatever becomes of one of them, and on as many others as there are then."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from lm.base.config import build, load_file
from lm.cli import main
from lm.data.batches import Batches
from lm.data.corpus import prepare
from lm.run.lock import locked
from lm.train.config import RunConfig
from tests.parallel.several import Several, assert_same_batches, last_step
from tests.train.conftest import compiled_once  # noqa: F401
from tests.train.tiny import config_file, corpus, rows

pytestmark = pytest.mark.slow

CHANGES = {"steps": 30, "log_every": 4, "eval_every": 7, "checkpoint_every": 6, "batch_size": 8}
MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2")  # data over processes, parameters within each
# Sums over devices come in another order, 30 steps long; Adam divides noise by noise where a gradient is near 0.
TOLERANCE = {"rtol": 1e-3}


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several")
    path = config_file(folder, corpus(folder), **CHANGES)
    return ["train", "--config", str(path), "--cache", str(folder / "cache"), "--workdir"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, command):
    """The run of one process on one device."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert main([*command, str(run)]) == 0
    return run


def assert_the_same_run(run: Path, alone: Path) -> None:
    found, wanted = rows(run), rows(alone)
    assert [(row["kind"], row["step"], row["tokens"]) for row in found] == [
        (row["kind"], row["step"], row["tokens"]) for row in wanted
    ]
    for name in ("loss", "lr", "grad_norm", "param_norm", "bits_per_byte", "scored"):
        values = [[row[name] for row in of if name in row] for of in (found, wanted)]
        assert len(values[0]) >= 5
        np.testing.assert_allclose(*values, **TOLERANCE, err_msg=name)
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, alone)]
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=TOLERANCE["rtol"])
    same = ("cell", "tokens", "corpus", "steps", "flops_matmul", "params_total")
    assert [results[0][name] for name in same] == [results[1][name] for name in same]


def test_two_processes_train_the_run_of_one_on_its_very_batches(tmp_path, command, alone):
    (tmp_path / "kept").mkdir()
    run = Several(2, tmp_path / "said", *command, str(tmp_path / "run"), *MESH, slow=0, KEEP=str(tmp_path / "kept"))
    assert run.codes() == [0, 0], run.said()
    assert_the_same_run(tmp_path / "run", alone)
    config = build(RunConfig, load_file(str(tmp_path / "run" / "config.json")))
    text = prepare(config.data, Path(command[command.index("--cache") + 1])).parts[0].file
    batches = Batches(text, config.model.context_length, config.batch_size, config.data.seed)
    assert_same_batches(tmp_path / "kept", batches, CHANGES["steps"])
    first, second = run.said()
    assert "waiting for 2 processes at localhost:" in first
    assert ", I am 1; up to 300 s" in second
    assert "fresh start" in first
    assert "fresh start" not in second
    assert [bool(process.stdout.read().count("nats/token")) for process in run.processes] == [True, False]
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def test_a_signal_to_one_stops_all_a_death_ends_all_and_one_process_goes_on(tmp_path, command, alone):
    path = tmp_path / "run"
    stopped = Several(2, tmp_path / "stopped", *command, str(path), *MESH)
    stopped.until(lambda: last_step(path) >= 8)
    stopped.processes[1].send_signal(signal.SIGTERM)
    assert stopped.codes() == [130, 130], stopped.said()
    (step,) = [int(line.split()[-1]) for line in stopped.said()[0].splitlines() if "stopped after step" in line]
    assert max(int(child.name) for child in (path / "checkpoints").iterdir()) == step
    assert all(line.endswith("The same command continues where it stopped.") for line in stopped.last_lines())

    killed = Several(2, tmp_path / "killed", *command, str(path))  # on another mesh
    killed.until(lambda: last_step(path) >= step + 8)
    killed.processes[1].kill()
    assert killed.codes() == [1, -signal.SIGKILL], killed.said()
    assert f"resumed after step {step}" in killed.said()[0]
    assert killed.last_lines()[0].startswith("lm: process 1 of 2 is gone: ")
    assert "Traceback" not in killed.said()[0]

    assert main([*command, str(path)]) == 0
    assert_the_same_run(path, alone)


@pytest.mark.full
def test_from_four_processes_to_two_to_one_after_the_death_of_process_0(tmp_path, command, alone):
    path = tmp_path / "run"
    four = Several(4, tmp_path / "four", *command, str(path))
    four.until(lambda: last_step(path) >= 8)
    four.processes[0].kill()
    assert four.codes() == [-signal.SIGKILL, 1, 1, 1], four.said()
    for line in four.last_lines()[1:]:
        assert line.startswith("lm: process 0 of 4 is gone: ")

    (tmp_path / "kept").mkdir()
    two = Several(2, tmp_path / "two", *command, str(path), *MESH, KEEP=str(tmp_path / "kept"))
    two.until(lambda: last_step(path) >= 20)
    two.processes[0].send_signal(signal.SIGTERM)
    assert two.codes() == [130, 130], two.said()
    assert "resumed after step 6" in two.said()[0]

    assert main([*command, str(path)]) == 0
    assert_the_same_run(path, alone)


@pytest.mark.full
def test_an_error_in_one_process_ends_all_with_its_message(tmp_path, command):
    run = Several(2, tmp_path / "said", *command, str(tmp_path / "run"), FAIL_1="5")
    assert run.codes() == [1, 1], run.said()
    told = "here: no space left on the disk"
    assert run.last_lines() == [f"lm: process 1 of 2 ended: {told}", f"lm: {told}"]
    assert not any("Traceback" in text for text in run.said())


@pytest.mark.full
def test_a_loss_that_is_not_a_number_ends_all(tmp_path, command):
    wild = ("--config.optimizer.peak_lr=1e30", "--config.optimizer.clip_norm=0")
    run = Several(2, tmp_path / "said", *command, str(tmp_path / "run"), *wild)
    assert run.codes() == [1, 1], run.said()
    assert all(" is nan" in line or " is inf" in line for line in run.last_lines()), run.last_lines()


@pytest.mark.full
def test_a_folder_in_use_is_refused_to_all(tmp_path, command):
    with locked(tmp_path / "run"):
        run = Several(2, tmp_path / "said", *command, str(tmp_path / "run"))
        assert run.codes() == [1, 1], run.said()
    assert all("is working in this run folder" in line for line in run.last_lines())


@pytest.mark.full
def test_processes_of_different_configurations_are_told_what_differs(tmp_path, command):
    run = Several(2, tmp_path / "said", *command, str(tmp_path / "run"), MORE_1="--config.steps=31")
    assert run.codes() == [2, 2], run.said()
    assert "was given something else than process 0: run.config.steps: 30 -> 31" in run.last_lines()[0]


@pytest.mark.full
def test_evaluation_in_two_processes_is_that_of_one(tmp_path, capsys, alone):
    text = tmp_path / "text.txt"
    words = ("abc abd", "bad cab", "fed hgf", "aaa aba", "gab hag", "cde fgh", "bcd ded")
    text.write_text("\n\n".join(word * 115 for word in words))  # 353 windows of 16: nothing divides them
    command = ["eval", "--checkpoint", str(alone), "--text", str(text), "--separator", "\n\n", "--json"]
    assert main(command) == 0
    wanted = json.loads(capsys.readouterr().out)
    run = Several(2, tmp_path / "said", *command)
    out = run.processes[0].communicate()[0]
    assert run.codes() == [0, 0], run.said()
    found = json.loads(out[out.index("{") :])
    # float32 log-probabilities from batches of another shape; the standard error is of small differences of them.
    numbers = [name for name, value in wanted.items() if isinstance(value, float)]
    assert [found[name] for name in numbers] == pytest.approx([wanted[name] for name in numbers], rel=1e-5)
    assert {**found, **{name: wanted[name] for name in numbers}} == wanted
    assert "nats_per_token" not in run.processes[1].stdout.read()
