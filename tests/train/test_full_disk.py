"""A disk that fills up while a run saves: one line, nothing lost, and the same command goes on once there is room."""

import subprocess

import pytest

from lm.cli import main
from lm.train.loop import train
from tests.train.tiny import config_file, corpus, run_config


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on_where_there_is_room(tmp_path, small_disk, capsys):
    text, run = corpus(tmp_path), small_disk / "run"
    changes = {"steps": 30, "checkpoint_every": 1, "checkpoints_kept": 30}
    command = ["train", "--config", str(config_file(tmp_path, text, **changes)), "--cache", str(tmp_path / "cache"),
               "--workdir", str(run)]  # fmt: skip
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "no space left on the disk. Free some and run the same command again" in said.splitlines()[-1]
    assert not (run / "result.json").exists()
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
    assert main(command) == 0
    assert "resumed after step" in capsys.readouterr().err
    train(run_config(text, "steps=30"), tmp_path / "unbroken")
    assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "unbroken" / "metrics.jsonl").read_bytes()
