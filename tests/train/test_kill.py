"""kill -9 at seeded moments, in a process of its own: the same command ends with the very same bytes."""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from lm.cli import main
from lm.train.restore import load_run
from tests.train.tiny import config_file, corpus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    path = config_file(folder, corpus(folder), steps=90, log_every=4, eval_every=7, checkpoint_every=6)
    return ["train", "--config", str(path), "--cache", str(folder / "cache"), "--workdir"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, command):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    assert main([*command, str(run)]) == 0
    return (run / "metrics.jsonl").read_bytes(), jax.device_get(load_run(run).params)


def start(command, run):
    # Steps of a few milliseconds would all be over between two looks: each waits a little.
    slow = (
        "import sys, time, lm.train.loop as loop; put = loop.put_batch\n"
        "def slowly(*args):\n    time.sleep(0.03)\n    return put(*args)\n"
        "loop.put_batch = slowly\nfrom lm.cli import main\nsys.exit(main())"
    )
    return subprocess.Popen([sys.executable, "-c", slow, *command, str(run)], stderr=subprocess.PIPE, text=True)


def length(run) -> int:
    return (run / "metrics.jsonl").stat().st_size if (run / "metrics.jsonl").exists() else 0


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_seeded_moments_again_and_again(tmp_path, command, unbroken, seed):
    draw, run = random.Random(seed), tmp_path / "run"
    kills = 0
    for share in sorted(draw.uniform(0.02, 0.95) for _ in range(4)):
        process = start(command, run)
        target = share * len(unbroken[0])
        while process.poll() is None and length(run) < target:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 3  # the last may come after the end
    assert main([*command, str(run)]) == 0
    assert (run / "metrics.jsonl").read_bytes() == unbroken[0]
    again = jax.device_get(load_run(run).params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again, unbroken[1])))
    assert not list(run.rglob("*.part"))
    assert not list((run / "checkpoints").glob("*tmp*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_saves_says_how_to_continue_and_ends_with_130(tmp_path, command, unbroken, number):
    run = tmp_path / "run"
    process = start(command, run)
    while process.poll() is None and length(run) < 0.3 * len(unbroken[0]):
        time.sleep(0.002)
    os.kill(process.pid, number)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "lm train: interrupted. The same command continues where it stopped."
    assert "stopped after step" in said
    assert "Traceback" not in said
    assert main([*command, str(run)]) == 0
    assert (run / "metrics.jsonl").read_bytes() == unbroken[0]
