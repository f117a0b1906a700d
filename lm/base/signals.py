"""What SIGINT and SIGTERM do to work that is going on."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def answering(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A signal is answered so until the block ends; in another thread than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


# Where a KeyboardInterrupt is lost: finalisers and callbacks of the garbage collector (of jax, of hypothesis). In an
# import it leaves modules of C half made, and the process crashes later.
_DEAF = ("_xla_gc_callback", "gc_callback", "__del__")
_RETRY_SECONDS = 0.05


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt in the block, a moment later where it would not get out unharmed.

    Whoever answers them inside is asked again then. SIGINT that the process was started to ignore stays ignored.
    """
    waiting: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _deaf(frame):
            waiting.append(number)
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)
            return
        raise KeyboardInterrupt

    def again(_: int, __: FrameType | None) -> None:
        signal.raise_signal(waiting[-1])

    with contextlib.ExitStack() as stack:
        stack.enter_context(answering(signal.SIGALRM, again))
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                stack.enter_context(answering(number, interrupt))
        try:
            yield
        finally:
            if waiting:
                signal.setitimer(signal.ITIMER_REAL, 0)


def _deaf(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_code.co_name in _DEAF:
            return True
        frame = frame.f_back
    return False
