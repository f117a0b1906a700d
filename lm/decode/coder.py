"""An arithmetic coder over integer frequencies, many messages side by side: exact to the bit, byte by byte inside.

A message is a number in [0, 1) that lies in an ever smaller interval [low, low + range): each symbol keeps its share
of the range (Pasco 1976, Rissanen 1976; digits a byte at a time as Martin 1979). Frequencies add up to 2^`TOTAL_BITS`.

Cost. A message takes ceil(-log2 range) bits at its end: less than one bit over the information of its symbols, since
the decoder reads zeros behind the end and messages have their length beside them. Cutting the range to a multiple of
the total loses at most log2(e) 2^(TOTAL_BITS - LEAST_BITS) = 2.2e-8 bits a symbol. So a message is within 2 bits of
its information up to 46 million symbols.
"""

from typing import Self

import numpy as np

TOTAL_BITS = 28
LEAST_BITS = 54  # a range below 2^LEAST_BITS gives off a byte
REGISTER_BITS = 62  # range < 2^62 and low < 2^63 between symbols: uint64 has room for the carry
_KEPT = np.uint64(2**LEAST_BITS - 1)
_LEAST = np.uint64(2**LEAST_BITS)
_BYTE = np.uint64(8)
_TOTAL = np.uint64(TOTAL_BITS)


class Encoder:
    """Encodes one message for each of B rows."""

    def __init__(self, rows: int):
        self._low_B = np.zeros(rows, np.uint64)
        self._range_B = np.full(rows, 2**REGISTER_BITS, np.uint64)
        self._count_B = np.zeros(rows, np.int64)
        self._digit_BN = np.zeros((rows, 64), np.uint16)  # bytes, and in the ninth bit the carry that came later

    def add(self, start_B: np.ndarray, frequency_B: np.ndarray, active_B: np.ndarray | None = None) -> None:
        """Adds a symbol to each row that is active (default: all).

        `start_B` is the sum of the frequencies of all symbols before it, `frequency_B` its own, at least 1; together
        they stay within 2^TOTAL_BITS. Integers of any type.
        """
        start_B, frequency_B = start_B.astype(np.uint64), frequency_B.astype(np.uint64)
        if active_B is not None:  # a symbol of all frequencies says nothing and changes nothing
            start_B = np.where(active_B, start_B, np.uint64(0))
            frequency_B = np.where(active_B, frequency_B, np.uint64(2**TOTAL_BITS))
        share_B = self._range_B >> _TOTAL
        self._low_B += share_B * start_B
        self._range_B = np.where(frequency_B >> _TOTAL, self._range_B, share_B * frequency_B)
        while (small := np.flatnonzero(self._range_B < _LEAST)).size:
            if self._count_B.max() == self._digit_BN.shape[1]:
                self._digit_BN = np.concatenate([self._digit_BN, np.zeros_like(self._digit_BN)], axis=1)
            self._digit_BN[small, self._count_B[small]] = self._low_B[small] >> np.uint64(LEAST_BITS)
            self._low_B[small] = (self._low_B[small] & _KEPT) << _BYTE
            self._range_B[small] <<= _BYTE
            self._count_B[small] += 1

    def finish(self) -> list[np.ndarray]:
        """The messages, an array of bits (uint8 of 0 or 1) a row."""
        return [self._bits_of(row) for row in range(len(self._low_B))]

    def _bits_of(self, row: int) -> np.ndarray:
        low, width = int(self._low_B[row]), int(self._range_B[row])
        # The fewest bits behind which lies a point of the interval: its first multiple of 2^(register - bits).
        bits = next(n for n in range(REGISTER_BITS + 1) if _up(low, REGISTER_BITS - n) < low + width)
        digit_N = self._digit_BN[row, : self._count_B[row]]
        number = int.from_bytes(digit_N.astype(np.uint8).tobytes()) + (
            int.from_bytes((digit_N >> 8).astype(np.uint8).tobytes()) << 8
        )
        number = (number << bits) + (_up(low, REGISTER_BITS - bits) >> (REGISTER_BITS - bits))
        total = 8 * len(digit_N) + bits
        return np.unpackbits(np.frombuffer((number << -total % 8).to_bytes(-(-total // 8)), np.uint8), count=total)


class Decoder:
    """Decodes the messages of `Encoder.finish` symbol by symbol: ask for `targets`, find the symbols, `take` them."""

    def __init__(self, messages: list[np.ndarray]):
        rows, longest = len(messages), max((len(bits) for bits in messages), default=0)
        # Behind the end there are zeros: one register of them, and then the last byte again and again.
        bits_BN = np.zeros((rows, REGISTER_BITS + -(-longest // 8) * 8 + 8), np.uint8)
        for row, bits in zip(bits_BN, messages, strict=True):
            row[: len(bits)] = bits
        weight_N = np.uint64(1) << np.arange(REGISTER_BITS - 1, -1, -1, dtype=np.uint64)
        self._code_B = bits_BN[:, :REGISTER_BITS].astype(np.uint64) @ weight_N
        self._range_B = np.full(rows, 2**REGISTER_BITS, np.uint64)
        self._byte_BN = np.packbits(bits_BN[:, REGISTER_BITS:], axis=1)
        self._count_B = np.zeros(rows, np.int64)

    def targets(self) -> np.ndarray:
        """A number below 2^TOTAL_BITS for each row, int32: its next symbol is the one whose share holds it."""
        share_B = self._range_B >> _TOTAL
        return np.minimum(self._code_B // share_B, np.uint64(2**TOTAL_BITS - 1)).astype(np.int32)

    def take(self, start_B: np.ndarray, frequency_B: np.ndarray) -> Self:
        """Goes behind the symbols; a row whose message has ended may go on, with symbols that mean nothing."""
        share_B = self._range_B >> _TOTAL
        self._code_B -= share_B * start_B.astype(np.uint64)
        self._range_B = np.where(frequency_B >> TOTAL_BITS, self._range_B, share_B * frequency_B.astype(np.uint64))
        while (small := np.flatnonzero(self._range_B < _LEAST)).size:
            place = np.minimum(self._count_B[small], self._byte_BN.shape[1] - 1)
            self._code_B[small] = (self._code_B[small] << _BYTE) | self._byte_BN[small, place]
            self._range_B[small] <<= _BYTE
            self._count_B[small] += 1
        return self


def information(frequency: np.ndarray) -> np.ndarray:
    """-log2 of the probabilities that the frequencies stand for, in bits."""
    return TOTAL_BITS - np.log2(np.asarray(frequency, np.float64))


def _up(number: int, bits: int) -> int:
    """The next multiple of 2^bits."""
    return -(-number >> bits) << bits
