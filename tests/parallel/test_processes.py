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
        assert len(values[0]) > 5 or name == "scored"
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
    text = prepare(config.data, Path(command[command.index("--cache") + 1])).train
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

    killed = Several(2, tmp_path / "killed", *command, str(path), *MESH)
    killed.until(lambda: last_step(path) >= step + 8)
    killed.processes[1].kill()
    assert killed.codes() == [1, -signal.SIGKILL], killed.said()
    assert f"resumed after step {step}" in killed.said()[0]
    assert killed.last_lines()[0].startswith("lm: process 1 of 2 is gone: ")
    assert "Traceback" not in killed.said()[0]

    assert main([*command, str(path)]) == 0
    assert_the_same_run(path, alone)
