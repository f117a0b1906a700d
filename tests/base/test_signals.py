"""Ctrl-C and SIGTERM end a command's work at once, except where Python would be harmed or would not hear."""

import os
import signal
import sys
import time

import pytest

from lm.base.signals import answering, interruptible

SIGNALS = (signal.SIGINT, signal.SIGTERM)
both = pytest.mark.parametrize("number", SIGNALS, ids=str)


def wait():
    """For what must come, with a deadline far beyond its 50 ms."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)
    raise AssertionError("no interrupt came")


@both
def test_a_signal_interrupts_and_afterwards_is_answered_as_before(number):
    before = [signal.getsignal(n) for n in (*SIGNALS, signal.SIGALRM)]
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), number)
        wait()
    assert [signal.getsignal(n) for n in (*SIGNALS, signal.SIGALRM)] == before


@both
def test_an_import_is_finished_first(number, tmp_path, monkeypatch):
    (tmp_path / "interrupted_module.py").write_text(
        f"import os\nos.kill(os.getpid(), {int(number)})\nfor _ in range(1000):\n    pass\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), interruptible():
        import interrupted_module

        assert interrupted_module.whole
        wait()
    del sys.modules["interrupted_module"]


@both
def test_what_a_finaliser_would_swallow_comes_after_it(number):
    class Kept:
        def __del__(self):
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt), interruptible():
        Kept()
        wait()


@both
def test_who_answers_inside_by_then_is_asked(number, tmp_path, monkeypatch):
    (tmp_path / "asked_module.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked = []
    with interruptible():
        import asked_module  # noqa: F401

        with answering(number, lambda *_: asked.append(1)):
            until = time.monotonic() + 60
            while not asked and time.monotonic() < until:
                time.sleep(0.01)
    assert asked
    del sys.modules["asked_module"]


def test_an_ignored_interrupt_stays_ignored():
    with answering(signal.SIGINT, signal.SIG_IGN), interruptible():
        os.kill(os.getpid(), signal.SIGINT)
