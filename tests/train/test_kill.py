"""kill -9 at seeded moments, in a process of its own: the same command ends with the very same bytes."""

import json
import random
import signal

import jax
import numpy as np
import pytest

from experiments.faults.kill import FileEvent, Step, run_command
from lm.cli import main
from lm.train.restore import load_run
from tests.train.tiny import config_file, corpus

pytestmark = pytest.mark.slow

STEPS = 90


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    path = config_file(folder, corpus(folder), steps=STEPS, log_every=4, eval_every=7, checkpoint_every=6)
    return ["train", "--config", str(path), "--cache", str(folder / "cache"), "--workdir"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, command):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    assert main([*command, str(run)]) == 0
    return run


def same(run, unbroken):
    assert (run / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    ours, theirs = (jax.device_get(load_run(path).params) for path in (run, unbroken))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, ours, theirs)))
    assert not list(run.rglob("*.part"))
    assert not list((run / "checkpoints").glob("*tmp*"))


def test_killed_at_seeded_moments_of_training_and_of_saving_again_and_again(tmp_path, command, unbroken):
    draw, run = random.Random(0), tmp_path / "run"
    moments = [
        Step(draw.randint(2, STEPS // 4), draw.uniform(0, 0.02)),
        FileEvent("checkpoints", draw.randint(100, 400)),
        Step(draw.randint(2, STEPS // 4), draw.uniform(0, 0.02)),
        FileEvent("checkpoints", draw.randint(100, 400), draw.uniform(0, 0.01)),
    ]
    for moment in moments:
        ended = run_command([*command, str(run)], tmp_path / "said", moment)
        assert ended.code == -signal.SIGKILL, (moment, ended.said)
    assert main([*command, str(run)]) == 0
    same(run, unbroken)


def test_killed_while_a_table_is_written_the_old_one_stays_and_the_new_one_has_each_row_once(tmp_path, unbroken):
    runs, table = tmp_path / "runs", tmp_path / "table.csv"
    for cell in ("one", "two"):
        (runs / cell).mkdir(parents=True)
        for name in ("config.json", "result.json", "metrics.jsonl"):
            (runs / cell / name).write_bytes((unbroken / name).read_bytes())
        row = json.loads((runs / cell / "result.json").read_text())
        (runs / cell / "result.json").write_text(json.dumps({**row, "cell": cell}))
    asked = ["table", str(runs), "--out", str(table)]
    assert main(asked) == 0
    whole = table.read_bytes()
    assert whole.count(b"\n") == 3
    table.write_text("of before\n")
    written = random.Random(0).randint(1, 2)  # the temporary file is opened, then renamed
    assert run_command(asked, tmp_path / "said", FileEvent("table.csv", written)).code == -signal.SIGKILL
    assert table.read_text() == "of before\n"
    assert main(asked) == 0
    assert table.read_bytes() == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_saves_says_how_to_continue_and_ends_with_130(tmp_path, command, unbroken, number):
    run = tmp_path / "run"
    ended = run_command([*command, str(run)], tmp_path / "said", Step(30), number)
    assert ended.code == 130, ended.said
    assert ended.said.splitlines()[-1] == "lm train: interrupted. The same command continues where it stopped."
    assert "stopped after step" in ended.said
    assert "Traceback" not in ended.said
    assert main([*command, str(run)]) == 0
    same(run, unbroken)
