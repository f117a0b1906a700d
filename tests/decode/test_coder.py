"""The arithmetic coder alone: whatever the frequencies, nothing is lost and hardly a bit is wasted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.decode.coder import TOTAL_BITS, Decoder, Encoder, information

TOTAL = 2**TOTAL_BITS


def table(weights: list[int]) -> np.ndarray:
    """Frequencies in about the ratios of `weights`, at least 1 each, TOTAL together."""
    spare = TOTAL - len(weights)
    frequency = np.array([1 + weight * spare // max(sum(weights), 1) for weight in weights], np.int64)
    frequency[np.argmax(frequency)] += TOTAL - frequency.sum()
    return frequency


def encode(tables: list[np.ndarray], rows: list[list[int]]) -> list[np.ndarray]:
    """Symbol `at` of every row by table `at`; rows may have different lengths."""
    encoder = Encoder(len(rows))
    for at, frequency in enumerate(tables):
        symbol_B = np.array([row[at] if at < len(row) else 0 for row in rows])
        start_B = (np.cumsum(frequency) - frequency)[symbol_B]
        encoder.add(start_B, frequency[symbol_B], np.array([at < len(row) for row in rows]))
    return encoder.finish()


def decode(tables: list[np.ndarray], messages: list[np.ndarray]) -> np.ndarray:
    decoder, found = Decoder(messages), []
    for frequency in tables:
        upto = np.cumsum(frequency)
        symbol_B = np.searchsorted(upto, decoder.targets(), side="right")
        decoder.take((upto - frequency)[symbol_B], frequency[symbol_B])
        found.append(symbol_B)
    return np.array(found).reshape(len(tables), len(messages)).T


def bits(tables: list[np.ndarray], row: list[int]) -> float:
    return float(sum(information(frequency[symbol]) for frequency, symbol in zip(tables, row, strict=False)))


def assert_exact(tables: list[np.ndarray], rows: list[list[int]]) -> list[np.ndarray]:
    messages = encode(tables, rows)
    for row, message, found in zip(rows, messages, decode(tables, messages), strict=True):
        assert found[: len(row)].tolist() == row
        # The claim is 1 bit and 2.2e-8 a symbol; the sum of logarithms is itself rounded.
        assert len(message) < bits(tables, row) + 1 + 1e-6
    return messages


@st.composite
def messages(draw: st.DrawFn) -> tuple[list[np.ndarray], list[list[int]]]:
    weight = st.one_of(st.integers(0, 3), st.integers(0, 2**40))
    weights = draw(st.lists(st.lists(weight, min_size=1, max_size=9), max_size=60))
    rows = draw(st.integers(1, 4))
    symbols = [[draw(st.integers(0, len(part) - 1)) for part in weights] for _ in range(rows)]
    return [table(part) for part in weights], [row[: draw(st.integers(0, len(row)))] for row in symbols]


@given(messages())
@settings(max_examples=80, deadline=None)
def test_rows_of_any_length_come_back_within_a_bit_of_their_information(case):
    assert_exact(*case)


def test_symbols_drawn_from_their_frequencies_cost_the_entropy():
    random = np.random.default_rng(0)
    frequency = table([2**part for part in range(12)])
    rows = [random.choice(12, 5000, p=frequency / TOTAL).tolist() for _ in range(3)]
    assert_exact([frequency] * 5000, rows)


@pytest.mark.parametrize(("symbol", "most"), [(0, 1), (1, 28 * 400 + 1)])
def test_extreme_skew(symbol, most):
    (message,) = assert_exact([np.array([TOTAL - 1, 1])] * 400, [[symbol] * 400])
    assert len(message) <= most


def test_a_symbol_of_all_frequencies_costs_nothing():
    (message,) = assert_exact([np.array([TOTAL])] * 1000, [[0] * 1000])
    assert len(message) == 0


def test_no_symbols_and_no_rows():
    assert [len(message) for message in encode([], [[], []])] == [0, 0]
    assert encode([], []) == []
    assert Decoder([]).targets().shape == (0,)


@pytest.mark.parametrize("last", [0, 2])
def test_carries_run_through_everything_written(last):
    # The middle share lies across one half: all bytes so far are 0x7f 0xff ... until the last symbol settles it.
    frequency = np.array([TOTAL // 2 - 1, 2, TOTAL // 2 - 1])
    assert_exact([frequency] * 41, [[1] * 40 + [last], [1] * 41, [0] + [2] * 39 + [last]])


def test_a_wrong_message_decodes_to_something_without_an_error():
    random = np.random.default_rng(1)
    tables = [table(random.integers(0, 100, 7).tolist()) for _ in range(300)]
    found = decode(tables, [random.integers(0, 2, 50, np.uint8), np.ones(700, np.uint8)])
    assert found.min() >= 0
    assert found.max() <= 6
