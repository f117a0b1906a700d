"""A trace of a few steps, for TensorBoard or Perfetto."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lm.base.errors import UsageError

logger = logging.getLogger("lm.train")


def check_span(span: tuple[int, int] | None, steps: int) -> None:
    """Raises a UsageError for a span that begins after the run's last step."""
    if span is not None and span[0] > steps:
        raise UsageError(f"step {span[0]} comes after the run's last, {steps}", where="--profile")


class Profile:
    """Traces the steps `first` to `last` (counted from 1) of a run into a folder.

    Args:
      span: first and last step, as `check_span` lets pass; None: no trace.
      begin: steps that are done already. A resumed run traces what is left of the span.
      steps: of the whole run.
      folder: where the trace goes.
    """

    def __init__(self, span: tuple[int, int] | None, begin: int, steps: int, folder: Path):
        self._folder, self._tracing = folder, False
        self._first, self._last = (0, 0) if span is None else (max(span[0], begin + 1), min(span[1], steps))
        if span is not None and self._first > self._last:
            logger.warning("no trace is written: step %d was done before the run was resumed", span[1])

    def __call__(self, number: int, step: Callable[..., Any], *args: Any) -> Any:
        """Runs `step(*args)`, the step `number`, traced if it lies in the span."""
        if number == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        done = step(*args)
        if number == self._last:
            jax.block_until_ready(done)
            self.close()
        return done

    def close(self) -> None:
        """Writes what has been traced, also when the run stops within the span."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
