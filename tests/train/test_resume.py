"""A stopped run, started again by the same command, writes what a run never stopped writes, bit for bit."""

import json
import os
import random
import signal

import jax
import numpy as np
import pytest

import lm.train.loop as loop
from lm.base.errors import RunError, UsageError
from lm.run import integrity
from lm.train.restore import load_run
from tests.train.tiny import before_step, corpus, rows, run_config, train_with

pytestmark = pytest.mark.slow  # compilations: about a second or more each

# 12 documents of 12 words are 31 windows of 16 tokens or so: 30 steps of 4 go through them four times, most epochs
# ending within a step. Rows are due every 4 steps and checkpoints every 5: intervals straddle checkpoints.
OVERRIDES = ("steps=30", "log_every=4", "eval_every=7", "checkpoint_every=5")


class KilledError(Exception):
    pass


def kill():
    raise KilledError


def outcome(run):
    return (run / "metrics.jsonl").read_bytes(), jax.device_get(load_run(run).params)


def same(one, other):
    assert one[0] == other[0]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one[1], other[1])))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, text):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    loop.train(run_config(text, *OVERRIDES), run)
    return run


def test_the_run_goes_through_its_text_several_times(unbroken, text):
    result = json.loads((unbroken / "result.json").read_text())
    assert result["tokens"] > 3 * result["tokens_unique"]
    assert [row["step"] for row in rows(unbroken, "eval")] == [7, 14, 21, 28, 30]
    assert [row["step"] for row in rows(unbroken, "train")] == [1, 4, 8, 12, 16, 20, 24, 28, 30]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_stopped_at_seeded_steps_again_and_again(tmp_path, monkeypatch, unbroken, text, seed):
    draw, run, config = random.Random(seed), tmp_path / "run", run_config(text, *OVERRIDES)
    for _ in range(3):
        with pytest.raises(KilledError):
            train_with(monkeypatch, "put_batch", before_step(draw.randint(1, 9), kill), config, run)
        with open(run / "metrics.jsonl", "a") as file:  # what a killed process may leave
            file.write('{"kind":"train","st')
    loop.train(config, run)
    same(outcome(run), outcome(unbroken))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_where_it_is_and_the_run_goes_on(tmp_path, monkeypatch, unbroken, text, number):
    run, config = tmp_path / "run", run_config(text, *OVERRIDES)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        train_with(monkeypatch, "put_batch", before_step(13, lambda: os.kill(os.getpid(), number)), config, run)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert load_run(run).step == 13
    assert not (run / "result.json").exists()
    loop.train(config, run)
    assert "resumed after step 13" in (run / "log.txt").read_text()
    same(outcome(run), outcome(unbroken))


def test_a_second_signal_does_not_wait_and_loses_nothing(tmp_path, monkeypatch, unbroken, text):
    run, config = tmp_path / "run", run_config(text, *OVERRIDES)

    def twice():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        train_with(monkeypatch, "put_batch", before_step(13, twice), config, run)
    assert load_run(run).step == 10
    loop.train(config, run)
    same(outcome(run), outcome(unbroken))


def test_where_rows_are_fetched_changes_no_train_row(tmp_path, unbroken, text):
    run = tmp_path / "run"
    loop.train(run_config(text, "steps=30", "log_every=4", "checkpoint_every=3"), run)
    assert rows(run, "train") == rows(unbroken, "train")
    assert rows(run, "eval") == rows(unbroken, "eval")[-1:]


def flip_a_bit(checkpoint):
    largest = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def empty_the_meta(checkpoint):
    (checkpoint / "meta" / "metadata").write_text("{}")
    integrity.seal(checkpoint)


@pytest.mark.parametrize("damage", [flip_a_bit, empty_the_meta])
def test_a_corrupt_checkpoint_is_passed_over_and_said(tmp_path, monkeypatch, capsys, unbroken, text, damage):
    run, config = tmp_path / "run", run_config(text, *OVERRIDES)
    with pytest.raises(KilledError):
        train_with(monkeypatch, "put_batch", before_step(13, kill), config, run)
    damage(run / "checkpoints" / "10")
    capsys.readouterr()
    loop.train(config, run)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("checkpoint 10 is passed over")
    assert said[1] == "resumed after step 5"
    same(outcome(run), outcome(unbroken))


def test_another_data_pipeline_is_refused_with_both_fingerprints(tmp_path, monkeypatch, text):
    run, config = tmp_path / "run", run_config(text, *OVERRIDES)
    with pytest.raises(KilledError):
        train_with(monkeypatch, "put_batch", before_step(8, kill), config, run)
    with monkeypatch.context() as patch:
        patch.setattr("lm.data.batches._ORDER_VERSION", "another")
        with pytest.raises(UsageError, match=r"the data pipeline changed: .*order_version.* -> .*another"):
            loop.train(config, run)
    loop.train(config, run)


def test_metrics_shorter_than_every_checkpoint_are_refused_and_nothing_is_lost(tmp_path, monkeypatch, text):
    run, config = tmp_path / "run", run_config(text, *OVERRIDES)
    with pytest.raises(KilledError):
        train_with(monkeypatch, "put_batch", before_step(13, kill), config, run)
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole.splitlines(keepends=True)[0])
    with pytest.raises(RunError, match=r"no checkpoint can be used: .*truncated metrics file"):
        loop.train(config, run)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["10", "5"]
    (run / "metrics.jsonl").write_bytes(whole)  # as from a backup
    loop.train(config, run)


def test_a_finished_run_is_left_as_it_is(tmp_path, unbroken, text):
    def files():
        names = ("config.json", "metrics.jsonl", "timing.jsonl", "result.json")
        return {name: (unbroken / name).read_bytes() for name in names}

    before = files()
    row = loop.train(run_config(text, *OVERRIDES), unbroken)
    assert row == json.loads(before["result.json"])
    assert files() == before


def test_a_run_stopped_between_its_last_checkpoint_and_its_result_only_needs_the_result(tmp_path, monkeypatch, text,
                                                                                       unbroken):  # fmt: skip
    run, config = tmp_path / "run", run_config(text, *OVERRIDES)
    with pytest.raises(KilledError):
        train_with(monkeypatch, "write_result", lambda *_: kill(), config, run)
    with (run / "timing.jsonl").open("ab") as timing:
        timing.write(b"junk \xff\n[]\n")
    row = loop.train(config, run)
    assert "resumed after step 30" in (run / "log.txt").read_text()
    assert row["loss"] == json.loads((unbroken / "result.json").read_text())["loss"]
    assert row["wall_seconds"] > 0
    same(outcome(run), outcome(unbroken))
