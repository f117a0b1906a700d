"""Several corpora in one stream of rows: which corpus a row is of, and which of that corpus' rows it is.

Of the first n rows, the corpora behind the first one get floor(n q), q their share together, and it gets the others;
those floor(n q) are dealt out among them in the same way. So any row is found without the ones before it, and of any
first n rows each of K > 1 corpora has its share of n to less than K - 1 rows (each floor is off by less than one, and
passes on no more than what it got): to less than one row of two corpora.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from lm.data.tokens import TokenFile

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One corpus of a mixture, or the only one: its training text, and its share of the rows."""

    name: str
    share: Fraction
    file: TokenFile


def shares_of(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Each weight over the sum of all, exactly as its decimal digits say: 7 and 3 are 0.7 and 0.3."""
    exact = [Fraction(str(weight)) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def deal(shares: Sequence[Fraction], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The corpus of each row, and its number among that corpus' rows.

    Args:
      shares: of the corpora, summing to 1.
      rows: numbers below 2^62, uint64 of any shape.

    Returns:
      int64 and uint64 of the same shape.
    """
    corpus, number = np.zeros(rows.shape, np.int64), rows
    reached = np.ones(rows.shape, bool)
    for factor in _factors(shares):
        passed = _product(number, factor)
        goes_on = _product(number + np.uint64(1), factor) > passed
        number = np.where(reached, np.where(goes_on, passed, number - passed), number)
        reached &= goes_on
        corpus += reached
    return corpus, number


def dealt(shares: Sequence[Fraction], rows: int) -> tuple[int, ...]:
    """How many of the first `rows` rows each corpus has."""
    counts = []
    for factor in _factors(shares):
        passed = rows * int(factor) >> 64
        counts.append(rows - passed)
        rows = passed
    return (*counts, rows)


def _factors(shares: Sequence[Fraction]) -> list[np.uint64]:
    """For each corpus but the last, the part of what reached it that it passes on, in units of 2^-64.

    Rounded up: where a whole number of rows is passed on, the floor is that number and not the one below.
    """
    left = [sum(shares[place:], Fraction(0)) for place in range(len(shares))]
    parts = [after / before for before, after in itertools.pairwise(left)]
    return [np.uint64(min(-(-part.numerator * 2**64 // part.denominator), 2**64 - 1)) for part in parts]


def _product(number: np.ndarray, factor: np.uint64) -> np.ndarray:
    """floor(number * factor / 2^64) of uint64, exactly, by products of halves."""
    high, low = number >> _HALF, number & _LOW
    factor_high, factor_low = factor >> _HALF, factor & _LOW
    middle = high * factor_low + (low * factor_low >> _HALF)
    return high * factor_high + (middle >> _HALF) + ((middle & _LOW) + low * factor_high >> _HALF)
