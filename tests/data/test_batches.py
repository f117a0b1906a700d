"""A batch is a pure function of (seed, step): seek, process count and backend change nothing."""

import hashlib
import itertools
import pickle
from collections import Counter
from math import factorial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.base.errors import UsageError
from lm.data.batches import Batches, window_order
from lm.data.tokenizer import load_tokenizer
from lm.data.tokens import TokenFile, TokenWriter

T = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    path = tmp_path_factory.mktemp("tokens") / "train.bin"
    tokenizer = load_tokenizer("bytes")
    texts = ["".join(chr(33 + (7 * n + i) % 90) for i in range(3 + n % 40)) for n in range(60)]
    with TokenWriter(path, tokenizer) as writer:
        writer.append(texts, tokenizer.encode_batch(texts))
    return TokenFile.open(path)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_rows_are_windows_of_the_file_and_targets_are_the_next_tokens(file: TokenFile) -> None:
    batches = Batches(file, T, 4, seed=0)
    ids = file.array().astype(np.int32)
    for step in (0, 7, 1000):
        batch = batches[step]
        assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
            "inputs": ((4, T), np.int32),
            "targets": ((4, T), np.int32),
            "weights": ((4, T), np.float32),
        }
        assert (batch["weights"] == 1).all()
        for row, window in enumerate(batches.origins(step)[1]):
            np.testing.assert_array_equal(batch["inputs"][row], ids[window * T : window * T + T])
            np.testing.assert_array_equal(batch["targets"][row], ids[window * T + 1 : window * T + T + 1])


@settings(max_examples=60, deadline=None)
@given(batch_size=st.integers(1, 50), seed=st.integers(-(2**63), 2**64), epochs=st.integers(1, 4))
def test_every_window_comes_once_an_epoch(file: TokenFile, batch_size: int, seed: int, epochs: int) -> None:
    batches = Batches(file, T, batch_size, seed)
    (windows,) = batches.windows
    steps = -(-epochs * windows // batch_size)
    order = np.concatenate([batches.origins(step)[1] for step in range(steps)])[: epochs * windows]
    for epoch in order.reshape(epochs, windows):
        assert sorted(epoch) == list(range(windows))


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
def test_the_order_of_any_number_of_windows_is_a_permutation(windows: int, seed: int, epoch: int) -> None:
    places = np.arange(windows, dtype=np.uint64) + np.uint64(epoch * windows)
    assert sorted(window_order(seed, windows, places)) == list(range(windows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(window_order(seed, 97, np.arange(97, dtype=np.uint64) + np.uint64(97 * epoch)))

    orders = {order(seed, epoch) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("windows", [2, 3, 4, 5])
def test_all_orders_of_few_windows_are_equally_likely(windows: int) -> None:
    epochs = 12_000
    rows = window_order(1, windows, np.arange(windows * epochs, dtype=np.uint64)).reshape(epochs, windows)
    counts = np.array(list(Counter(map(tuple, rows)).values()))
    kinds = factorial(windows)
    assert len(counts) == kinds
    # Chi squared over its degrees of freedom: mean 1, standard deviation sqrt(2 / degrees); four of those above.
    assert ((counts - epochs / kinds) ** 2 / (epochs / kinds)).sum() / (kinds - 1) < 1 + 4 * np.sqrt(2 / (kinds - 1))


def test_neighbours_in_the_file_are_not_neighbours_in_the_order() -> None:
    windows, epochs = 500, 200
    rows = window_order(2, windows, np.arange(windows * epochs, dtype=np.uint64)).reshape(epochs, windows)
    adjacent = (np.diff(rows, axis=1) == 1).sum()
    assert abs(adjacent - epochs) < 4 * np.sqrt(epochs)  # a random order has one adjacent pair on average, Poisson


@pytest.mark.parametrize("segment_mask", [False, True])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_batches_of_one(file: TokenFile, processes: int, segment_mask: bool) -> None:
    whole = Batches(file, T, 8, 3, segment_mask)
    parts = [Batches(file, T, 8, 3, segment_mask, index, processes) for index in range(processes)]
    for step in (0, 1, whole.windows[0] // 8, 12_345):  # the third crosses the end of an epoch
        batches = [part[step] for part in parts]
        joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        assert same(joined, whole[step])
    assert all(part.fingerprint == whole.fingerprint for part in parts)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.integers(0, 10**9), min_size=1, max_size=10), batch_size=st.integers(1, 9))
def test_any_step_at_any_time_is_the_same(file: TokenFile, steps: list[int], batch_size: int) -> None:
    used, seed = Batches(file, T, batch_size, 5), 5
    for step in steps:
        assert same(used[step], Batches(file, T, batch_size, seed)[step])


@pytest.mark.parametrize("start", [0, 1, 37, 5000])
def test_grain_gives_the_batches_of_random_access_from_any_step(file: TokenFile, start: int) -> None:
    batches = Batches(file, T, 4, seed=1, segment_mask=True)
    for step, batch in enumerate(itertools.islice(batches.iterate(start), 30), start):
        assert same(batch, batches[step])


def test_the_order_is_the_one_that_earlier_runs_used(file: TokenFile) -> None:
    order = window_order(17, 12_345, np.arange(100_000, dtype=np.uint64))
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()[:16] == "0eb8c32a81a9c751"
    batches = Batches(file, T, 4, seed=17)
    content = b"".join(batches[step]["targets"].astype("<i4").tobytes() for step in range(200))
    assert hashlib.sha256(content).hexdigest()[:16] == "38090fb5f04749d2"


def test_segments_number_the_documents_of_a_row(file: TokenFile) -> None:
    batches = Batches(file, 64, 3, seed=0, segment_mask=True)
    begins = set(file.document_starts.tolist()) | {file.tokens - 1}
    crossings = 0
    for step in range(20):
        batch = batches[step]
        for row, window in enumerate(batches.origins(step)[1]):
            expected, segment = [], 0
            for place in range(window * 64, window * 64 + 64):
                segment += place in begins
                expected.append(segment)
            assert batch["segments"][row].tolist() == expected
            crossings += segment
        assert batch["segments"].dtype == np.int32
    assert crossings > 20  # the text of this test has several documents a window


def test_the_fingerprint_names_what_determines_the_order(file: TokenFile) -> None:
    base = Batches(file, T, 4, 0).fingerprint
    others = [
        Batches(file, T + 1, 4, 0),
        Batches(file, T, 5, 0),
        Batches(file, T, 4, 1),
        Batches(file, T, 4, 0, segment_mask=True),
    ]
    for other in others:
        assert other.fingerprint != base
    assert Batches(file, T, 4, 0, False, 1, 2).fingerprint == base


def test_batches_pickle_without_their_tokens(file: TokenFile) -> None:
    batches = Batches(file, T, 4, 0, True, 1, 2)
    content = pickle.dumps(batches)
    assert len(content) < 1000
    assert same(pickle.loads(content)[9], batches[9])


def test_what_cannot_be_batched_is_refused(file: TokenFile) -> None:
    with pytest.raises(UsageError, match=f"its {file.tokens} tokens are fewer than one window of 5000"):
        Batches(file, 5000, 4, 0)
    with pytest.raises(UsageError, match="batch_size 4 does not divide over 3 processes"):
        Batches(file, T, 4, 0, process_count=3)
    with pytest.raises(IndexError, match="negative"):
        Batches(file, T, 4, 0)[-1]


def test_a_single_window_is_enough(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    with TokenWriter(tmp_path / "a.bin", tokenizer) as writer:
        writer.append(["abc"], tokenizer.encode_batch(["abc"]))
    batches = Batches(TokenFile.open(tmp_path / "a.bin"), 4, 3, 0)
    assert batches[5]["inputs"].tolist() == [[256, 97, 98, 99]] * 3
    assert batches[5]["targets"].tolist() == [[97, 98, 99, 256]] * 3
