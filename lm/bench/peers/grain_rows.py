"""A token file through Grain the plain way: one element a row, shuffled, repeated, batched."""

import itertools

import grain
import numpy as np


class Rows:
    """Windows of T + 1 tokens at multiples of T, as inputs and targets."""

    def __init__(self, path: str, length: int):
        self._tokens, self._length = np.memmap(path, np.uint16, mode="r"), length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index):
        start = int(index) * self._length
        window_W = self._tokens[start : start + self._length + 1].astype(np.int32)
        return {"inputs": window_W[:-1], "targets": window_W[1:]}


def setup(spec: dict):
    """Opens the file at `spec["path"]`; one step is one batch. `threads` None stands for Grain's default options."""
    dataset = grain.MapDataset.source(Rows(spec["path"], spec["length"])).shuffle(0).repeat().batch(spec["batch"])
    options = None if spec["threads"] is None else grain.ReadOptions(spec["threads"], 0)
    iterator = iter(dataset.to_iter_dataset(options))

    def run(count: int) -> None:
        for _ in itertools.islice(iterator, count):
            pass

    run(50)
    return {"grain": getattr(grain, "__version__", "unknown")}, run
