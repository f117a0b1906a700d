"""SIGTERM, really sent, while a run compiles and evaluates: it saves, ends, and goes on to the very same bytes."""

import itertools
import logging
import os
import signal

import jax
import numpy as np
import pytest

import lm.train.loop as loop
import lm.train.validation as validation
from lm.train.restore import load_run
from tests.train.tiny import corpus, rows, run_config

pytestmark = pytest.mark.slow

# Four batches an evaluation (`small_batches`).
OVERRIDES = ("steps=8", "log_every=3", "eval_every=4", "checkpoint_every=100", "eval_tokens=64")


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(validation, "BATCH_TOKENS", 16)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, text):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "BATCH_TOKENS", 16)
        loop.train(run_config(text, *OVERRIDES), run)
    return run


def same(run, unbroken):
    assert (run / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    ours, theirs = (jax.device_get(load_run(path).params) for path in (run, unbroken))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, ours, theirs)))


def evaluating(monkeypatch, batches, *at):
    """Sends SIGTERM while the batches of evaluation with these numbers, counted from 1, are scored; counts all."""
    make, calls = validation.log_prob_fn, itertools.count(1)

    def log_prob_fn(*args):
        scored = make(*args)

        def log_probs(*batch):
            number = next(calls)
            batches.append(number)
            if number in at:
                terminate()
            return scored(*batch)

        return log_probs

    monkeypatch.setattr(validation, "log_prob_fn", log_prob_fn)


def test_during_an_evaluation_it_is_left_at_once_and_made_again_by_the_resumed_run(
    tmp_path, monkeypatch, text, unbroken
):
    run, config, batches = tmp_path / "run", run_config(text, *OVERRIDES), []
    with monkeypatch.context() as patch:
        evaluating(patch, batches, 1)
        with pytest.raises(KeyboardInterrupt):
            loop.train(config, run)
    assert batches == [1]
    assert load_run(run).step == 4
    assert rows(run, "eval") == []
    with monkeypatch.context() as patch:  # again, in the evaluation that the resumed run begins with
        evaluating(patch, batches, 2)
        with pytest.raises(KeyboardInterrupt):
            loop.train(config, run)
    assert batches == [1, 1, 2]
    assert load_run(run).step == 4
    loop.train(config, run)
    assert "stopped after step 4" in (run / "log.txt").read_text()
    same(run, unbroken)


def test_during_the_last_evaluation_nothing_is_trained_again(tmp_path, monkeypatch, text, unbroken):
    run, config, batches = tmp_path / "run", run_config(text, *OVERRIDES, "eval_every=0"), []
    with monkeypatch.context() as patch:
        evaluating(patch, batches, 1)
        with pytest.raises(KeyboardInterrupt):
            loop.train(config, run)
    assert load_run(run).step == 8
    assert not (run / "result.json").exists()
    loop.train(config, run)
    assert "resumed after step 8" in (run / "log.txt").read_text()
    assert rows(run) == [row for row in rows(unbroken) if (row["kind"], row["step"]) != ("eval", 4)]


def test_while_the_step_compiles_the_first_step_is_saved(tmp_path, text, unbroken):
    run, config = tmp_path / "run", run_config(text, *OVERRIDES)

    class Terminate(logging.Handler):
        sent = 0

        def emit(self, record):
            if "Compiling jit(step)" in record.getMessage():
                self.sent += 1
                terminate()

    handler, logger = Terminate(), logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(handler)
    try:
        with jax.log_compiles(), pytest.raises(KeyboardInterrupt):
            loop.train(config, run)
    finally:
        logger.removeHandler(handler)
    assert handler.sent == 1
    assert load_run(run).step == 1
    loop.train(config, run)
    same(run, unbroken)
