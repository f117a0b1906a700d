import logging
import math

import pytest

from lm.base.errors import RunError
from lm.model.score import Bos, Score
from lm.model.transformer import expected_first_loss
from lm.run.record import MetricsLog, RowLog
from lm.train.recorder import Recorder
from tests.train.tiny import rows, run_config

EXPECTED = expected_first_loss(run_config("unused").model)


class Scalar:
    """A device scalar that says when it is fetched."""

    def __init__(self, value: float, name: str, events: list[str]):
        self._value, self._name, self._events = value, name, events

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("fetched before it was asked for")

    def __float__(self) -> float:
        return self._value


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A recorder in `tmp_path`, the events "dispatch k" and "fetch k" in their order, and a way to give it losses."""
    events: list[str] = []

    def device_get(metrics):
        events.append(f"fetch {metrics['loss']._name}")
        return metrics

    monkeypatch.setattr("lm.train.recorder.jax.device_get", device_get)

    def make(config, losses, interval=(), step=0):
        with MetricsLog(tmp_path / "metrics.jsonl") as metrics, RowLog(tmp_path / "timing.jsonl") as timing:
            recorder = Recorder(config, metrics, timing, [], step, interval)
            for number, loss in enumerate(losses, start=step + 1):
                events.append(f"dispatch {number}")
                named = {name: Scalar(loss, str(number), events) for name in ("loss", "grad_norm", "param_norm")}
                recorder.dispatched(number, named)
            recorder.drain()
        return recorder

    return make, events, tmp_path


def test_a_step_is_fetched_only_after_the_next_one_has_been_dispatched(record):
    make, events, _ = record
    make(run_config("unused", "steps=8", "log_every=3"), [EXPECTED] * 8)
    for step in range(1, 8):
        assert events.index(f"fetch {step}") > events.index(f"dispatch {step + 1}")
    between = events[events.index("dispatch 2") : events.index("dispatch 4")]
    assert between == ["dispatch 2", "fetch 1", "dispatch 3"]  # nothing is fetched where no row is due


def test_a_row_is_the_mean_since_the_row_before_and_an_interval_may_come_from_a_checkpoint(record):
    make, _, folder = record
    config = run_config("unused", "steps=8", "log_every=3")
    make(config, [EXPECTED, 2.0, 4.0, 1.0, 2.0, 6.0, 5.0, 7.0])
    found = {row["step"]: row["loss"] for row in rows(folder)}
    assert found == {1: EXPECTED, 3: 3.0, 6: 3.0, 8: 6.0}
    (folder / "metrics.jsonl").unlink()
    make(config, [2.0, 6.0, 5.0, 7.0], [{"loss": 1.0, "grad_norm": 1.0, "param_norm": 1.0}], step=4)
    assert {row["step"]: row["loss"] for row in rows(folder)} == {6: 3.0, 8: 6.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_gets_its_row_and_ends_the_run(record, bad):
    make, _, folder = record
    with pytest.raises(RunError, match=f"loss is {bad}.* at step 5.*Lower peak_lr") as caught:
        make(run_config("unused", "steps=8", "log_every=3"), [EXPECTED, 2.0, 4.0, 1.0, bad, 6.0, 5.0, 7.0])
    assert caught.value.exit_code == 1
    assert [(row["step"], row["loss"]) for row in rows(folder)][-1] == (5, str(bad))


@pytest.mark.parametrize(("first", "warned"), [(EXPECTED, False), (EXPECTED + 0.7, False), (EXPECTED + 0.8, True),
                                               (EXPECTED - 0.3, True)])  # fmt: skip
def test_a_first_loss_far_from_that_of_random_parameters_is_warned_of(record, caplog, first, warned):
    make, _, _ = record
    with caplog.at_level(logging.WARNING, "lm.train"):
        make(run_config("unused"), [first])
    assert ("the first loss is" in caplog.text) == warned
    if warned:
        assert "look at the initialisation" in caplog.text


def test_the_first_loss_of_a_run_that_starts_from_another_is_no_surprise(record, caplog):
    make, _, _ = record
    make(run_config("unused", "init_from=other"), [1.0])
    assert caplog.text == ""


def test_an_evaluation_takes_no_time_from_the_steps(record, monkeypatch):
    make, _, folder = record
    clock = iter([10.0, 13.0, 113.0, 116.0])
    monkeypatch.setattr("lm.train.recorder.time.monotonic", lambda: next(clock))
    config = run_config("unused", "steps=9", "log_every=3")
    recorder = make(config, [EXPECTED, 2.0, 2.0])  # rows at steps 1 and 3, at 10 s and 13 s
    with MetricsLog(folder / "metrics.jsonl") as metrics, RowLog(folder / "timing.jsonl") as timing:
        recorder._metrics, recorder._timing = metrics, timing
        recorder.evaluation(3, "validation", Score(1.0, 0.1, 2.7, 1.4, 2.0, 8, 8, 1, 8, 8, Bos.END_OF_TEXT))
        for step in (4, 5, 6):
            recorder.dispatched(step, {"loss": 2.0, "grad_norm": 2.0, "param_norm": 2.0})
        monkeypatch.setattr("lm.train.recorder.jax.device_get", lambda metrics: metrics)
        recorder.drain()
    text = (folder / "timing.jsonl").read_text().splitlines()
    assert ['"seconds":3.0' in line for line in text] == [True, True]
