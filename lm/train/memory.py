"""Out of device memory: the same global batch in more microbatches, or one line that says what to do."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from lm.base.errors import RunError, UsageError
from lm.train.config import RunConfig
from lm.train.fit import check_mesh

logger = logging.getLogger("lm.train")

_DO = "Set --config.model.remat=full, raise --config.accumulate, lower batch_size or take more devices."


class FittingStep:
    """The train step; its first call takes more microbatches for as long as device memory runs out.

    Only a run of one process does: several would not all see it, and would wait for each other.

    Args:
      make: the step of so many microbatches.
      counts: of microbatches, in the order in which they are tried; see `microbatch_counts`.
      again: makes the state that the run begins with once more, where a failed step has consumed it.
    """

    def __init__(self, make: Callable[[int], Any], counts: Iterator[int], again: Callable[[], Any]):
        self._make, self._counts, self._again = make, counts, again
        self.accumulate = next(counts)
        self._step, self._proved = make(self.accumulate), False

    def lower(self, *arguments: Any) -> Any:
        """As the jitted step's own."""
        return self._step.lower(*arguments)

    def __call__(self, state: Any, batch: dict, lr: Any) -> Any:
        """As the step. Raises a RunError when memory runs out at the last count."""
        while not self._proved:
            try:
                done = jax.block_until_ready(self._step(state, batch, lr))
                self._proved = True
                return done
            except jax.errors.JaxRuntimeError as error:
                count = next(self._counts, None) if jax.process_count() == 1 else None
                if not _is_out_of_memory(error) or count is None:
                    raise
                logger.warning("out of device memory with accumulate=%d, trying %d: %s", self.accumulate, count,
                               _first_line(error))  # fmt: skip
            self.accumulate = count
            self._step = self._make(count)
            leaves = jax.tree.leaves(state)
            if any(leaf.is_deleted() for leaf in leaves):
                for leaf in leaves:  # no room for two states
                    leaf.delete()
                state = self._again()
        return self._step(state, batch, lr)


def microbatch_counts(config: RunConfig, first: int, mesh: Mesh) -> Iterator[int]:
    """`first`, then each at least twice the one before, as far as the rows of a microbatch divide over the mesh.

    On another mesh than the one that needed `first` microbatches, which may not take them, as configured.
    """
    first = first if _fits(config, first, mesh) else config.accumulate
    yield first
    last = first
    for count in range(2 * first, config.batch_size + 1):
        if count >= 2 * last and config.batch_size % count == 0 and _fits(config, count, mesh):
            yield count
            last = count


@contextlib.contextmanager
def memory_told() -> Iterator[None]:
    """Turns what XLA raises when device memory runs out within the block into one line, a RunError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise RunError(f"out of device memory: {_first_line(error)}", do=_DO) from error


def _fits(config: RunConfig, accumulate: int, mesh: Mesh) -> bool:
    try:
        check_mesh(dataclasses.replace(config, accumulate=accumulate), mesh)
    except UsageError:
        return False
    return True


def _is_out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")[:200].rstrip(".")
