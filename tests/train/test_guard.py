"""Updates that are left out: which ones, what stays as it was, and what a run without faults pays: nothing."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lm.train.loop as loop
from lm.base.errors import RunError
from lm.parallel.rules import put_batch
from lm.train.guard import fresh_guard, judge
from lm.train.restore import load_run
from lm.train.step import abstract_state, fresh_state, make_train_step
from tests.train.test_step import CONFIG, MESH, RATE, batch_of
from tests.train.tiny import corpus, rows, run_config, train_with

SKIPPING = ("on_nan=skip", "on_spike=skip", "spike_window=8")


def judged(config, numbers):
    """Which of (loss, gradient norm) pairs are skipped, spikes, and skipped in a row; and the guard after them."""
    guard, found = fresh_guard(), []
    for loss, norm in numbers:
        _, guard, told = judge(config, guard, {"loss": jnp.float32(loss), "grad_norm": jnp.float32(norm)})
        found.append((int(told["skipped"]), int(told["spike"]), int(told["skipped_in_row"])))
    return found, guard


def steady(count):
    return [(4 + 0.1 * math.sin(i), 1 + 0.1 * math.cos(i)) for i in range(count)]


def test_what_is_not_finite_or_far_above_the_rest_is_skipped_and_leaves_no_trace_in_the_statistic():
    config = run_config("unused", *SKIPPING)
    odd = [(math.nan, 1.0), (4.0, math.inf), (4.0, 9.0), (9.0, 1.0)]
    found, guard = judged(config, [*steady(12), *odd, (4.0, 1.0)])
    assert found[:12] == [(0, 0, 0)] * 12
    assert found[12:] == [(1, 0, 1), (1, 0, 2), (1, 1, 3), (1, 1, 4), (0, 0, 0)]
    _, clean = judged(config, [*steady(12), (4.0, 1.0)])
    assert int(guard["skipped"]) == 4
    for name in ("kept", "loss_mean", "loss_variance", "grad_norm_mean", "grad_norm_variance"):
        assert float(guard[name]) == float(clean[name])


def test_the_statistic_is_the_mean_and_variance_while_the_window_fills():
    config = run_config("unused", *SKIPPING, "spike_window=64")
    numbers = steady(20)
    _, guard = judged(config, numbers)
    # float32 sums of twenty terms
    assert float(guard["loss_mean"]) == pytest.approx(np.mean([loss for loss, _ in numbers]), rel=1e-5)
    assert float(guard["grad_norm_variance"]) == pytest.approx(np.var([norm for _, norm in numbers]), rel=1e-4)


def test_each_is_judged_only_where_it_was_asked_for_and_no_spike_before_half_a_window():
    only_nan = run_config("unused", "on_nan=skip", "spike_window=8")
    assert [skip for skip, _, _ in judged(only_nan, [*steady(8), (99.0, 99.0), (math.nan, 1.0)])[0]][8:] == [0, 1]
    only_spike = run_config("unused", "on_spike=skip", "spike_window=8")
    assert [skip for skip, _, _ in judged(only_spike, [*steady(8), (99.0, 99.0), (math.nan, 1.0)])[0]][8:] == [1, 0]
    stop = run_config("unused", "on_spike=stop", "spike_window=8")
    assert judged(stop, [*steady(8), (99.0, 99.0)])[0][8] == (0, 1, 0)
    assert judged(run_config("unused", *SKIPPING), [*steady(3), (99.0, 99.0)])[0][3] == (0, 0, 0)


def poisoned(batch, factor):
    return {**batch, "weights": batch["weights"] * np.float32(factor)}


def test_a_skipped_step_leaves_parameters_and_moments_bit_for_bit_and_the_next_is_as_if_it_had_not_been():
    config = dataclasses.replace(run_config("unused", *SKIPPING), optimizer=CONFIG.optimizer)
    step, state = make_train_step(config, MESH), fresh_state(config, MESH)
    state, _ = step(state, batch_of(0), RATE)
    before = jax.device_get(state)
    state, metrics = step(state, poisoned(batch_of(1), math.nan), RATE)
    after = jax.device_get(state)
    assert float(metrics["skipped"]) == 1
    assert not np.isfinite(metrics["loss"])
    assert np.isfinite(metrics["param_norm"])
    for name in ("params", "opt_state"):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before[name], after[name])))
    assert (int(after["step"]), int(after["guard"]["skipped"])) == (2, 1)


def test_by_default_there_is_no_guard_and_its_settings_do_not_reach_the_program():
    assert set(abstract_state(CONFIG, MESH)) == {"params", "opt_state", "step"}
    other = dataclasses.replace(CONFIG, spike_window=7, spike_deviations=1.0, skips_in_row=3)
    state, batch = fresh_state(CONFIG, MESH), batch_of(0)
    texts = {make_train_step(config, MESH).lower(state, batch, RATE).as_text() for config in (CONFIG, other)}
    assert len(texts) == 1
    assert "is_finite" not in texts.pop()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("text"))


def poisoning(steps, begin=0):
    """A `put_batch` that makes the weights of these steps NaN."""
    done = begin

    def put(batch, *rest):
        nonlocal done
        done += 1
        return put_batch(poisoned(batch, math.nan) if done in steps else batch, *rest)

    return put


@pytest.mark.slow
def test_a_guarded_run_without_faults_has_the_numbers_of_a_plain_one(tmp_path, text):
    loop.train(run_config(text), tmp_path / "plain")
    row = loop.train(run_config(text, "on_nan=skip", "on_spike=stop"), tmp_path / "guarded")
    assert row["skipped"] == 0
    for ours, theirs in zip(rows(tmp_path / "guarded"), rows(tmp_path / "plain"), strict=True):
        # Another program, whose products are fused otherwise: float32, twelve steps of Adam.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)


@pytest.mark.slow
def test_skipped_updates_are_counted_in_rows_and_result_and_the_same_ones_are_after_a_resume(
    tmp_path, text, monkeypatch
):
    config, run = run_config(text, "on_nan=skip"), tmp_path / "run"
    row = train_with(monkeypatch, "put_batch", poisoning({5, 8, 9}), config, run)
    assert row["skipped"] == 3
    assert [(row["step"], row["skipped"]) for row in rows(run, "train")] == [(1, 0), (3, 0), (6, 1), (9, 2), (12, 0)]
    assert all(math.isfinite(row["loss"]) for row in rows(run, "train"))
    assert json.loads((run / "result.json").read_text())["skipped"] == 3
    assert (run / "log.txt").read_text().count("the update was skipped (loss nan") == 3

    def stop(*_):
        raise KeyboardInterrupt

    poison, calls = poisoning({5, 8, 9}), []

    def until_seven(*args):
        calls.append(0)
        return stop() if len(calls) == 7 else poison(*args)

    with pytest.raises(KeyboardInterrupt):
        train_with(monkeypatch, "put_batch", until_seven, config, tmp_path / "again")
    assert train_with(monkeypatch, "put_batch", poisoning({8, 9}, begin=5), config, tmp_path / "again")["skipped"] == 3
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_too_many_in_a_row_and_a_spike_that_is_to_stop_end_the_run_and_no_checkpoint_holds_them(
    tmp_path, text, monkeypatch
):
    config = run_config(text, "on_nan=skip", "skips_in_row=2")
    with pytest.raises(RunError, match="3 updates in a row were skipped, the last at step 9"):
        train_with(monkeypatch, "put_batch", poisoning({7, 8, 9}), config, tmp_path / "row")

    def surge(batch, *rest):
        surge.calls += 1
        signs = np.where(np.arange(batch["weights"].shape[1]) % 2, np.float32(8), np.float32(-7))
        return put_batch({**batch, "weights": batch["weights"] * signs} if surge.calls == 8 else batch, *rest)

    surge.calls = 0
    config = run_config(text, "on_spike=stop", "spike_window=8", "spike_deviations=3", "checkpoint_every=1")
    with pytest.raises(RunError, match=r"a spike \(loss is .*, grad_norm is .*\) at step 8"):
        train_with(monkeypatch, "put_batch", surge, config, tmp_path / "spike")
    assert load_run(tmp_path / "spike").step == 7
