"""Token files to batches: a batch is a pure function of (seed, step), the same for any number of processes.

A window is context_length + 1 tokens that start at a multiple of context_length, so that every token of the file but
the first is predicted once an epoch (and fewer than context_length at its end never). Each epoch has its own order of
the windows, computed for any place in it without the others: resume is a seek, and nothing grows with the corpus.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.data.tokens import TokenFile

Batch = dict[str, np.ndarray]

_ORDER_VERSION = 1
_ROUNDS = 12  # of the Feistel network: with 8, orders of five windows are not equally likely
_BLOCK_ROWS = 4096  # windows whose order is computed at once: numpy's cost is per call, not per element
_ENDLESS = 1 << 62


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """This process's rows of every batch: the contiguous block `process_index` of `process_count` of the global ones.

    `batches[step]` is {"inputs", "targets"} int32 [B, T], "weights" float32 [B, T] and, with `segment_mask`,
    "segments" int32 [B, T] that number the documents of each row; B counts this process's rows, T is `context_length`.

    Raises:
      UsageError: fewer tokens than one window, or a batch that does not divide over the processes.
    """

    file: TokenFile
    context_length: int
    batch_size: int
    seed: int
    segment_mask: bool = False
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise UsageError(f"its {self.file.tokens} tokens are fewer than one window of {self.context_length} + 1",
                             where=str(self.file.path), do="Use more text or a shorter context_length.")  # fmt: skip
        if self.batch_size % self.process_count:
            raise UsageError(f"batch_size {self.batch_size} does not divide over {self.process_count} processes",
                             where="config.batch_size")  # fmt: skip
        stride = self.context_length * self.file.dtype.itemsize
        windows_WT = np.lib.stride_tricks.as_strided(
            self.file.array(),
            (self.windows, self.context_length + 1),
            (stride, self.file.dtype.itemsize),
            writeable=False,
        )
        weights_BT = np.ones((self.rows, self.context_length), np.float32)
        weights_BT.flags.writeable = False
        object.__setattr__(self, "_windows_WT", windows_WT)
        object.__setattr__(self, "_weights_BT", weights_BT)
        object.__setattr__(self, "_block", (-1, None))

    @property
    def windows(self) -> int:
        """Windows in an epoch."""
        return (self.file.tokens - 1) // self.context_length

    @property
    def rows(self) -> int:
        """Rows of each batch on this process."""
        return self.batch_size // self.process_count

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that determines the batches; a run resumes only where all of it is as it was."""
        return {
            "order_version": _ORDER_VERSION,
            "seed": self.seed,
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "segment_mask": self.segment_mask,
            "windows": self.windows,
            "text": self.file.fingerprint,
            "tokenizer": self.file.tokenizer,
        }

    def epoch(self, step: int) -> int:
        """The epoch in which the first row of the batch at `step` lies, counted from 0."""
        return step * self.batch_size // self.windows

    def window_indices(self, step: int) -> np.ndarray:
        """The windows [B] that make up this process's rows of the batch at `step`."""
        steps = max(1, _BLOCK_ROWS // self.rows)
        number, place = divmod(step, steps)
        block: tuple[int, np.ndarray] = self._block  # type: ignore[attr-defined]  # one read: threads may replace it
        if block[0] != number:
            first_S1 = np.arange(number * steps, (number + 1) * steps, dtype=np.uint64)[:, None]
            row_B = np.arange(self.process_index * self.rows, (self.process_index + 1) * self.rows, dtype=np.uint64)
            block = (number, window_order(self.seed, self.windows, first_S1 * np.uint64(self.batch_size) + row_B))
            object.__setattr__(self, "_block", block)
        return block[1][place]

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step {step} is negative")
        tokens_BW = self._windows_WT[self.window_indices(step)]  # type: ignore[attr-defined]
        batch: Batch = {
            "inputs": tokens_BW[:, :-1].astype(np.int32),
            "targets": tokens_BW[:, 1:].astype(np.int32),
            "weights": self._weights_BT,  # type: ignore[attr-defined]
        }
        if self.segment_mask:
            batch["segments"] = np.cumsum(batch["inputs"] == self.file.eos_id, axis=1, dtype=np.int32)
        return batch

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """The batches from `start_step` on without end, through Grain."""
        import grain

        # One element is a whole batch: Grain costs about 25 us an element whatever its size. No reading threads: they
        # would hold the interpreter's lock while copying from the map, and the device works ahead of Python anyway.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        iterator = iter(grain.MapDataset.source(_Endless(self)).to_iter_dataset(options))
        iterator.set_state({"next_index": start_step})
        return iterator

    def __reduce__(self) -> tuple[Any, ...]:
        return Batches, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class _Endless:
    """Batches as a Grain source, which needs a length."""

    batches: Batches

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, step: Any) -> Batch:
        return self.batches[int(step)]


def window_order(seed: int, windows: int, places: np.ndarray) -> np.ndarray:
    """The window at each place of the endless order: place // windows is its epoch, each a permutation of its own.

    A Feistel network over the mixed-radix square just above `windows`, walked until it falls inside (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002), keyed by SplitMix64 of (seed, epoch, round). Integers only, so the
    order is the same on every machine and version. `places` and the result are uint64 and int64 of the same shape.
    """
    count = np.uint64(windows)
    epochs, index = np.divmod(places.astype(np.uint64), count)
    keys = _mix(_mix(np.array(seed % (1 << 64), np.uint64)) ^ epochs)
    low = np.uint64(int(np.ceil(np.sqrt(windows))))
    high = np.uint64(-(-windows // int(low)))
    shape = index.shape
    index, keys = index.reshape(-1), keys.reshape(-1)
    outside = np.arange(index.size)
    while outside.size:
        index[outside] = _feistel(index[outside], keys[outside], high, low)
        outside = outside[index[outside] >= count]
    return index.reshape(shape).astype(np.int64)


def _feistel(index: np.ndarray, keys: np.ndarray, high: np.uint64, low: np.uint64) -> np.ndarray:
    left, right = np.divmod(index, low)
    for number in range(0, _ROUNDS, 2):
        left = (left + _mix(right ^ _mix(keys + np.uint64(number)))) % high
        right = (right + _mix(left ^ _mix(keys + np.uint64(number + 1)))) % low
    return left * low + right


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function (Steele, Lea and Flood, 2014): a bijection that spreads every bit."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
