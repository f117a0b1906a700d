"""Where the time of decoding goes: compiling, reading prompts, choosing tokens."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax.monitoring
import numpy as np

from lm.decode.generate import Session

_COMPILING = "/jax/core/compile/"  # what JAX calls tracing, lowering and compiling in its reports of durations


@dataclasses.dataclass
class Clock:
    """Seconds of compiling, of prefill (first tokens included) and of the loop, and the tokens that the loop chose."""

    compile: float = 0.0
    prefill: float = 0.0
    loop: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows a second in the loop, prefill and compiling left out; 0 where it chose none."""
        return self.tokens / self.loop if self.tokens else 0.0

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Counts the block as the loop, compiling apart: for what reads prompts and answers in one."""
        with compile_seconds() as compiled:
            began = time.perf_counter()
            yield
            seconds = time.perf_counter() - began
        self.compile += compiled.total
        self.loop += seconds - compiled.total

    def follow(self, sessions: Iterator[Session]) -> Iterator[Session]:
        """The same sessions, of which the first comes after prefill; what happens between them is not counted."""
        before, prefill = 0, True
        while True:
            with compile_seconds() as compiled:
                began = time.perf_counter()
                if (session := next(sessions, None)) is None:
                    return
                taken = int(np.sum(session.state.taken_B))  # waits for the device
                seconds = time.perf_counter() - began - compiled.total
            self.compile += compiled.total
            if prefill:
                self.prefill += seconds
            else:
                self.loop += seconds
                self.tokens += taken - before
            before, prefill = taken, False
            yield session


class Spans:
    """Spans of time, some inside others."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def add(self, event: str, duration_secs: float, **_: str | int) -> None:
        """One that ends now."""
        if event.startswith(_COMPILING):
            end = time.perf_counter()
            # Programs are traced within others: an outer span ends later and takes the place of those in it.
            self._spans = [span for span in self._spans if span[0] < end - duration_secs] + [(end - duration_secs, end)]

    @property
    def total(self) -> float:
        """Seconds covered."""
        return sum(end - begin for begin, end in self._spans)


@contextlib.contextmanager
def compile_seconds() -> Iterator[Spans]:
    """Counts what this process compiles inside the block."""
    spans = Spans()
    jax.monitoring.register_event_duration_secs_listener(spans.add)
    try:
        yield spans
    finally:
        jax.monitoring.unregister_event_duration_listener(spans.add)
