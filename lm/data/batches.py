"""Token files to batches: a batch is a pure function of (seed, step), the same for any number of processes.

A window is context_length + 1 tokens that start at a multiple of context_length, so that every token of the file but
the first is predicted once an epoch (and fewer than context_length at its end never). Each epoch has its own order of
the windows, computed for any place in it without the others: resume is a seek, and nothing grows with the corpus.
In a mixture each corpus is read in the order that it has alone, through its own epochs.
"""

import dataclasses
import functools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from lm.base.errors import UsageError
from lm.data.mixture import Part, deal
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
      UsageError: fewer tokens than one window, a batch that does not divide over the processes, or parts of a mixture
        that are not of one tokenizer.
    """

    text: TokenFile | tuple[Part, ...]  # one file, or the parts of a mixture
    context_length: int
    batch_size: int
    seed: int
    segment_mask: bool = False
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        if len({part.file.tokenizer for part in self.parts}) > 1:
            raise UsageError("the parts of the mixture are tokenised with different tokenizers",
                             where=", ".join(str(part.file.path) for part in self.parts),
                             do="Tokenise all with one.")  # fmt: skip
        if self.batch_size % self.process_count:
            raise UsageError(f"batch_size {self.batch_size} does not divide over {self.process_count} processes",
                             where="config.batch_size")  # fmt: skip
        for part, windows in zip(self.parts, self.windows, strict=True):
            if windows < 1:
                raise UsageError(
                    f"its {part.file.tokens} tokens are fewer than one window of {self.context_length} + 1",
                    where=str(part.file.path),
                    do="Use more text or a shorter context_length.",
                )
        object.__setattr__(self, "_block", (-1, None, None))

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """The corpora that the rows are of."""
        return self.text if isinstance(self.text, tuple) else (Part("", Fraction(1), self.text),)

    @functools.cached_property
    def windows(self) -> tuple[int, ...]:
        """Windows in an epoch of each corpus."""
        return tuple(count_windows(part.file, self.context_length) for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows of each batch on this process."""
        return self.batch_size // self.process_count

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that determines the batches; a run resumes only where all of it is as it was."""
        told: dict[str, Any] = {
            "order_version": _ORDER_VERSION,
            "seed": self.seed,
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "segment_mask": self.segment_mask,
            "windows": list(self.windows),
            "text": [part.file.fingerprint for part in self.parts],
            "tokenizer": self.parts[0].file.tokenizer,
        }
        if len(self.parts) == 1:
            return told | {"windows": told["windows"][0], "text": told["text"][0]}
        return told | {"shares": [str(part.share) for part in self.parts]}

    def origins(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The corpus of each of this process's rows [B] of the batch at `step`, and which window of it the row is."""
        corpus_B, window_B = self._origins(step)
        return np.zeros_like(window_B) if corpus_B is None else corpus_B, window_B

    def _origins(self, step: int) -> tuple[np.ndarray | None, np.ndarray]:
        """As `origins`; there is nothing to say of the corpus where it is the only one."""
        steps = max(1, _BLOCK_ROWS // self.rows)
        number, place = divmod(step, steps)
        block: tuple[int, Any, Any] = self._block  # type: ignore[attr-defined]  # one read: threads may replace it
        if block[0] != number:
            first_S1 = np.arange(number * steps, (number + 1) * steps, dtype=np.uint64)[:, None]
            row_B = np.arange(self.process_index * self.rows, (self.process_index + 1) * self.rows, dtype=np.uint64)
            block = (number, *self._origins_of(first_S1 * np.uint64(self.batch_size) + row_B))
            object.__setattr__(self, "_block", block)
        return None if block[1] is None else block[1][place], block[2][place]

    def _origins_of(self, row_SB: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        if len(self.parts) == 1:
            return None, window_order(self.seed, self.windows[0], row_SB)
        corpus_SB, number_SB = deal([part.share for part in self.parts], row_SB)
        window_SB = np.empty(row_SB.shape, np.int64)
        for corpus, windows in enumerate(self.windows):
            own_SB = corpus_SB == corpus
            window_SB[own_SB] = window_order(self.seed, windows, number_SB[own_SB])
        return corpus_SB, window_SB

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step {step} is negative")
        corpus_B, window_B = self._origins(step)
        tokens_BW = self._texts[0][window_B] if corpus_B is None else self._gathered(corpus_B, window_B)
        batch: Batch = {
            "inputs": tokens_BW[:, :-1].astype(np.int32),
            "targets": tokens_BW[:, 1:].astype(np.int32),
            "weights": self._weights_BT,
        }
        if self.segment_mask:
            eos_id = self.parts[0].file.eos_id
            batch["segments"] = np.cumsum(batch["inputs"] == eos_id, axis=1, dtype=np.int32)
        return batch

    def _gathered(self, corpus_B: np.ndarray, window_B: np.ndarray) -> np.ndarray:
        tokens_BW = np.empty((self.rows, self.context_length + 1), self._texts[0].dtype)
        for corpus, text_NW in enumerate(self._texts):
            own_B = corpus_B == corpus
            tokens_BW[own_B] = text_NW[window_B[own_B]]
        return tokens_BW

    @functools.cached_property
    def _texts(self) -> list[np.ndarray]:
        """Each file as its overlapping windows."""
        found = []
        for part, windows in zip(self.parts, self.windows, strict=True):
            size = part.file.dtype.itemsize
            shape, strides = (windows, self.context_length + 1), (self.context_length * size, size)
            found.append(np.lib.stride_tricks.as_strided(part.file.array(), shape, strides, writeable=False))
        return found

    @functools.cached_property
    def _weights_BT(self) -> np.ndarray:
        weights_BT = np.ones((self.rows, self.context_length), np.float32)
        weights_BT.flags.writeable = False
        return weights_BT

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


def count_windows(file: TokenFile, context_length: int) -> int:
    """Windows in an epoch of one file."""
    return (file.tokens - 1) // context_length


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
