import contextlib
import dataclasses
import datetime
import json
import logging
import os
import platform
import signal
import subprocess
import sys

import pytest

from lm.base.errors import RunError, UsageError
from lm.run.folder import log_to, open_run
from lm.run.lock import locked

IDENTITY = {"corpus": "c" * 64, "tokenizer": "t" * 64}

HOLD = """
import sys, time
from lm.run.lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@dataclasses.dataclass(frozen=True)
class Optimizer:
    peak_lr: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 10
    checkpoint_every: int = 5
    checkpoints_kept: int = 2
    optimizer: Optimizer = Optimizer()


def test_a_fresh_folder_records_the_whole_configuration_and_is_opened_again(tmp_path):
    folder = open_run(tmp_path / "a" / "run", Config(), IDENTITY)
    recorded = folder.read_config()
    assert recorded["config"]["optimizer"] == {"peak_lr": 1e-3}
    assert recorded["identity"] == IDENTITY
    before = folder.config.read_bytes()
    assert open_run(folder.path, Config(), IDENTITY) == folder
    assert folder.config.read_bytes() == before


def test_a_changed_leaf_is_refused_by_name_and_nothing_is_written(tmp_path):
    folder = open_run(tmp_path, Config(), IDENTITY)
    before = folder.config.read_bytes()
    with pytest.raises(UsageError, match=r"config\.optimizer\.peak_lr: 0\.001 -> 0\.003.*--workdir") as caught:
        open_run(tmp_path, Config(optimizer=Optimizer(3e-3)), IDENTITY)
    assert caught.value.exit_code == 2
    assert folder.config.read_bytes() == before


def test_a_folder_from_before_a_field_came_had_its_default(tmp_path):
    folder = open_run(tmp_path, Config(), IDENTITY)
    recorded = folder.read_config()
    del recorded["config"]["optimizer"]
    folder.config.write_text(json.dumps(recorded))
    with pytest.raises(UsageError, match=r"config\.optimizer\.peak_lr: 0\.001 -> 0\.003"):
        open_run(tmp_path, Config(optimizer=Optimizer(3e-3)), IDENTITY)
    assert open_run(tmp_path, Config(), IDENTITY).read_config()["config"]["optimizer"] == {"peak_lr": 1e-3}


@pytest.mark.parametrize("name", IDENTITY)
def test_a_changed_fingerprint_is_refused_by_name(tmp_path, name):
    open_run(tmp_path, Config(), IDENTITY)
    with pytest.raises(UsageError, match=f"identity.{name}"):
        open_run(tmp_path, Config(), {**IDENTITY, name: "other"})


def test_how_often_checkpoints_are_saved_may_change(tmp_path):
    open_run(tmp_path, Config(), IDENTITY)
    folder = open_run(tmp_path, Config(checkpoint_every=1, checkpoints_kept=9), IDENTITY)
    assert folder.read_config()["config"]["checkpoint_every"] == 1


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        open_run(tmp_path, Config(), IDENTITY)
    assert [child.name for child in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_an_interrupted_start_leaves_is_no_stranger_and_is_removed(tmp_path):
    (tmp_path / ".config.json.x1.part").write_text("{")
    with locked(tmp_path):
        open_run(tmp_path, Config(), IDENTITY)
    assert sorted(child.name for child in tmp_path.iterdir()) == [".lock", "config.json"]


@pytest.mark.parametrize(
    "content",
    [b'{"config": {', b"\xff", b"[]", b'{"config": [], "identity": {}}', b'{"config": {}, "identity": null}',
     b'{"config": {}}'],
)  # fmt: skip
def test_a_broken_record_is_one_line(tmp_path, content):
    folder = open_run(tmp_path, Config(), IDENTITY)
    folder.config.write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        open_run(tmp_path, Config(), IDENTITY)


def test_a_second_process_is_told_who_holds_the_folder_where_and_since_when_until_that_is_killed(tmp_path):
    today = datetime.date.today().isoformat()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(RunError, match=f"process {holder.pid} on {platform.node()}, since {today}"),
            locked(tmp_path),
        ):
            pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with locked(tmp_path):
        pass


def test_a_folder_that_can_only_be_read_is_one_line_and_stays_as_it_is(small_disk):
    open_run(small_disk / "run", Config(), IDENTITY)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (small_disk / "run", small_disk / "new"):
        with pytest.raises(UsageError, match="cannot be a run folder: Read-only file system"), locked(path):
            pass
    assert [child.name for child in (small_disk / "run").iterdir()] == ["config.json"]


def test_a_file_in_the_folders_place_is_one_line(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(UsageError, match="cannot be a run folder"), locked(tmp_path / "run"):
        pass


def test_a_lock_is_free_after_its_block_even_when_that_fails(tmp_path):
    def fail() -> None:
        with locked(tmp_path):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with locked(tmp_path):
        pass


def test_the_log_keeps_what_was_said_before(tmp_path):
    folder = open_run(tmp_path, Config(), IDENTITY)
    logger = logging.getLogger("test_the_log")
    for text in ("first", "second"):
        handler = log_to(folder, logger)
        logger.info(text)
        logger.removeHandler(handler)
        handler.close()
    lines = folder.log.read_text().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["first", "second"]


def test_a_log_on_a_full_disk_loses_lines_without_a_traceback(small_disk, capsys):
    folder = open_run(small_disk / "run", Config(), IDENTITY)
    logger = logging.getLogger("test_a_full_log")
    handler = log_to(folder, logger)
    logger.info("before")
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as filler:
        while filler.write(b"x" * 4096):
            pass
    logger.info("x" * 5000)
    logger.removeHandler(handler)
    handler.close()
    assert "Traceback" not in capsys.readouterr().err
    assert "before" in folder.log.read_text()
