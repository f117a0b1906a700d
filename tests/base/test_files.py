import errno
import hashlib
import logging
import os
import stat

import pytest

from lm.base import progress
from lm.base.errors import LmError, RunError, UsageError
from lm.base.files import atomic, sha256_file, write_json, write_text


class StopError(Exception):
    pass


def test_a_block_that_fails_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a" / "b.txt"
    write_text(path, "old")

    def fail() -> None:
        with atomic(path) as file:
            file.write("new")
            file.flush()
            raise StopError

    with pytest.raises(StopError):
        fail()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize("where", ["fsync", "replace", "open"])
def test_a_full_disk_is_said_and_leaves_the_file_as_it_was(tmp_path, monkeypatch, where):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lm.base.files.tempfile.mkstemp" if where == "open" else f"lm.base.files.os.{where}", full)
    with pytest.raises(RunError, match=r"no space left on the disk.*run the same command again"):
        write_json(path, {"a": 2})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        write_text(tmp_path / "file" / "under.txt", "y")


def test_a_folder_or_a_device_in_the_files_place_is_refused_before_any_work(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path, "is a folder"), (tmp_path / "pipe", "is not a regular file")):
        with pytest.raises(UsageError, match=what), atomic(path):
            pytest.fail("the block must not begin")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


def test_nan_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_file_gets_the_rights_that_any_new_file_gets(tmp_path):
    write_text(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("ours", "plain")]
    assert modes[0] == modes[1]


def test_the_hash_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc" * 100_000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_an_error_says_what_where_and_what_to_do_and_knows_its_exit_code():
    assert str(UsageError("wrong", where="here", do="Do this.")) == "here: wrong. Do this."
    assert str(RunError("wrong")) == "wrong"
    assert (UsageError("").exit_code, RunError("").exit_code, LmError("").exit_code) == (2, 1, 1)


def test_a_bar_is_silent_without_a_terminal_and_what_is_logged_is_one_line(capsys):
    logger, handler = logging.getLogger("test_of_the_console"), progress.ConsoleHandler()
    logger.addHandler(handler)
    logger.propagate = False
    with progress.bar("title", 3) as bar:
        bar.update(1, "numbers")
        logger.warning("[/] a long line %s", "x" * 300)
    logger.removeHandler(handler)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"[/] a long line {'x' * 300}\n"
