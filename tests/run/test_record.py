import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.base.errors import RunError
from lm.run.folder import RunFolder
from lm.run.record import MetricsLog, Position, RowLog, environment, read_result, versions, write_result
from lm.scaling.table import NAMES

APPEND = """
import sys
from lm.run.record import MetricsLog
log = MetricsLog(sys.argv[1])
step = 0
while True:
    log.append({"step": step, "text": "x" * 5000})
    step += 1
"""


@settings(max_examples=30, deadline=None)  # each example opens a file, whose time a busy disk sets
@given(st.lists(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False)), max_size=5))
def test_floats_come_back_exactly(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("log") / "m.jsonl"
    with MetricsLog(path) as log:
        for row in rows:
            log.append(row)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


def test_numbers_that_are_not_finite_are_strings_in_valid_json(tmp_path):
    with RowLog(tmp_path / "m") as log:
        log.append({"loss": math.nan, "norms": [math.inf, -math.inf, 1.0]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads((tmp_path / "m").read_text(), parse_constant=refuse)
    assert row == {"loss": "nan", "norms": ["inf", "-inf", 1.0]}
    assert math.isnan(float(row["loss"]))


def test_a_position_is_the_length_and_hash_of_the_file(tmp_path):
    with MetricsLog(tmp_path / "m") as log:
        for step in range(3):
            log.append({"step": step})
            content = log.path.read_bytes()
            assert log.position() == Position(len(content), hashlib.sha256(content).hexdigest())


def test_rows_written_again_after_a_rewind_give_the_same_bytes(tmp_path):
    rows = [{"step": step, "loss": 1 / (step + 3)} for step in range(6)]
    with MetricsLog(tmp_path / "straight") as log:
        for row in rows:
            log.append(row)
        end = log.position()
    with MetricsLog(tmp_path / "broken") as log:
        for row in rows[:2]:
            log.append(row)
        saved = log.position()
        for row in rows[2:5]:
            log.append(row)
    with MetricsLog(tmp_path / "broken") as log:
        log.rewind(saved)
        for row in rows[2:]:
            log.append(row)
        assert log.position() == end
    assert (tmp_path / "broken").read_bytes() == (tmp_path / "straight").read_bytes()


def test_rewinding_to_nothing_starts_afresh(tmp_path):
    with MetricsLog(tmp_path / "m") as log:
        log.append({"step": 1})
        log.rewind(None)
        assert log.position() == Position(0, hashlib.sha256(b"").hexdigest())


def test_a_truncated_file_is_refused_and_left_alone(tmp_path):
    with MetricsLog(tmp_path / "m") as log:
        for step in range(3):
            log.append({"step": step})
        saved = log.position()
    os.truncate(tmp_path / "m", saved.bytes - 10)
    with MetricsLog(tmp_path / "m") as log:
        left = log.path.read_bytes()
        assert left == b'{"step":0}\n{"step":1}\n'
        with pytest.raises(RunError, match="truncated metrics file"):
            log.rewind(saved)
        assert log.path.read_bytes() == left


def test_a_changed_byte_is_refused(tmp_path):
    with MetricsLog(tmp_path / "m") as log:
        log.append({"step": 7})
        saved = log.position()
    (tmp_path / "m").write_bytes(b'{"step":8}\n')
    with MetricsLog(tmp_path / "m") as log, pytest.raises(RunError, match="changed metrics file"):
        log.check(saved)


@pytest.mark.parametrize("seed", range(3))
def test_after_kill_9_the_file_holds_whole_rows_in_order(tmp_path, seed):
    path = tmp_path / "m"
    process = subprocess.Popen([sys.executable, "-c", APPEND, str(path)])
    try:
        # A busy machine takes its time over the imports, and the first row itself is written in parts.
        deadline = time.monotonic() + 300
        while not (path.exists() and b"\n" in path.read_bytes()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(random.Random(seed).uniform(0, 0.03))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with MetricsLog(path) as log:
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == list(range(len(steps)))
        assert len(steps) > 0
        content = path.read_bytes()
        assert log.position() == Position(len(content), hashlib.sha256(content).hexdigest())


def test_a_half_written_last_row_is_cut_on_opening(tmp_path):
    (tmp_path / "m").write_bytes(b'{"step":0}\n{"ste')
    with RowLog(tmp_path / "m") as log:
        log.append({"step": 1})
    assert (tmp_path / "m").read_bytes() == b'{"step":0}\n{"step":1}\n'


def test_a_full_disk_is_one_line_and_leaves_whole_rows(small_disk):
    with MetricsLog(small_disk / "m") as log:

        def fill() -> None:
            for step in range(1000):
                log.append({"step": step, "text": "x" * 3000})

        with pytest.raises(RunError, match="no space left"):
            fill()
        content = log.path.read_bytes()
        assert content.endswith(b'"}\n')
        assert log.position() == Position(len(content), hashlib.sha256(content).hexdigest())


def test_the_result_has_the_tables_columns_in_its_order(tmp_path):
    folder = RunFolder(tmp_path)
    write_result(folder, {name: float(i) for i, name in reversed(list(enumerate(NAMES)))} | {"loss": math.nan})
    row = json.loads(folder.result.read_text())
    assert tuple(row) == NAMES
    assert row["loss"] == "nan"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
def test_a_damaged_result_is_one_line(tmp_path, content):
    folder = RunFolder(tmp_path)
    row = dict.fromkeys(NAMES, 1)
    write_result(folder, row)
    assert read_result(folder) == row
    folder.result.write_bytes(content)
    with pytest.raises(RunError, match=r"result\.json: the result is damaged. Delete it"):
        read_result(folder)


def test_an_unknown_or_missing_column_is_named_and_nothing_is_written(tmp_path):
    folder = RunFolder(tmp_path)
    row = dict.fromkeys(NAMES, 1)
    with pytest.raises(RunError, match=r"'losss'.*'loss'"):
        write_result(folder, row | {"losss": 1})
    with pytest.raises(RunError, match="lacks wall_seconds"):
        write_result(folder, {name: 1 for name in NAMES if name != "wall_seconds"})
    assert not folder.result.exists()


def test_the_environment_says_everything_that_bit_identity_depends_on():
    facts = environment()
    assert all(isinstance(value, str) for value in facts.values())
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["threads"] == str(len(os.sched_getaffinity(0)))
    text = versions(facts)
    assert facts["commit"] not in text
    assert {part.split("=")[0] for part in text.split("; ")} == set(facts) - {"commit"}
