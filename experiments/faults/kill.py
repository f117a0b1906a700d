"""A signal at a chosen moment of a real `lm` command, in a process forked from a server that has imported everything.

No moment depends on how busy the machine is, so few kills come too early or too late to count.
"""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["lm.cli", "lm.train.loop", "lm.scaling.command", "experiments.faults.kill"])

# What Python tells its audit hooks of files; what TensorStore writes lies between these.
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


@dataclasses.dataclass(frozen=True)
class CpuTime:
    """When the process has used so many CPU seconds."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Step:
    """`delay` seconds after the `number`-th batch of this process (counted from 1) goes to the device."""

    number: int
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`delay` seconds after the `number`-th evaluation of this process (counted from 1) begins."""

    number: int
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class FileEvent:
    """`delay` seconds after the `number`-th file event (counted from 1) at a path that holds `part`."""

    part: str
    number: int
    delay: float = 0.0


Moment = CpuTime | Step | Evaluation | FileEvent


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status (negative: by that signal) and what it wrote to standard error."""

    code: int
    said: str


class Command:
    """`lm ARGV`, begun in a process of its own, which gets the signal `number` at `moment`.

    Args:
      said: a file for standard error.
    """

    def __init__(self, argv: Sequence[str], said: Path, moment: Moment | None = None, number: int = signal.SIGKILL):
        self._said, self._process = said, _begun(_command, (list(argv), moment, number), said)

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def ended(self) -> Ended:
        """How it ended, once it has."""
        return _ended(self._process, self._said)


def run_command(argv: Sequence[str], said: Path, moment: Moment | None = None, number: int = signal.SIGKILL) -> Ended:
    """Runs a `Command` to its end."""
    return Command(argv, said, moment, number).ended()


def run_function(function: Callable[..., None], arguments: tuple, said: Path) -> Ended:
    """Calls a function of a module in a process of its own; `said` is a file for standard error."""
    return _ended(_begun(function, arguments, said), said)


def _begun(function: Callable[..., None], arguments: tuple, said: Path) -> BaseProcess:
    process = _FORK.Process(target=_child, args=(function, arguments, str(said)))
    process.start()
    return process


def _ended(process: BaseProcess, said: Path) -> Ended:
    process.join()
    assert process.exitcode is not None
    return Ended(process.exitcode, said.read_text())


def _child(function: Callable[..., None], arguments: tuple, said: str) -> None:
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 2)
    function(*arguments)


def _command(argv: list[str], moment: Moment | None, number: int) -> None:
    if moment is not None:
        _arm(moment, number)
    from lm.cli import main

    sys.exit(main(argv))


def _arm(moment: Moment, number: int) -> None:
    def send() -> None:
        os.kill(os.getpid(), number)

    def after(delay: float) -> None:
        if delay == 0:
            send()
            return
        timer = threading.Timer(delay, send)
        timer.daemon = True
        timer.start()

    def signalling(function: Callable[..., Any], number: int, delay: float) -> Callable[..., Any]:
        calls = itertools.count(1)

        def call(*args: Any) -> Any:
            if next(calls) == number:
                after(delay)
            return function(*args)

        return call

    match moment:
        case CpuTime(seconds):

            def watch() -> None:
                while time.process_time() < seconds:
                    time.sleep(0.001)
                send()

            threading.Thread(target=watch, daemon=True).start()
        case Step(count, delay):
            import lm.train.loop as loop

            loop.put_batch = signalling(loop.put_batch, count, delay)
        case Evaluation(count, delay):
            import lm.train.validation as validation

            validation.score_windows = signalling(validation.score_windows, count, delay)
        case FileEvent(part, count, delay):
            events = itertools.count(1)

            def hook(event: str, arguments: tuple) -> None:
                if event in _EVENTS and part in str(arguments[0]) and next(events) == count:
                    after(delay)

            sys.addaudithook(hook)
