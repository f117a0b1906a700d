"""Bytes of an answer as they come: stop strings found in bytes, and what cannot be shown yet held back."""

import codecs
from collections.abc import Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


def first_stop(text: bytes, stops: Sequence[bytes]) -> int | None:
    """Where the earliest stop string begins in `text`, if one is there."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def held_back(text: bytes, stops: Sequence[bytes]) -> int:
    """How many of the last bytes may be the beginning of a stop string, of which there is none whole in `text`."""
    begun = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(begun, default=0)


class Printer:
    """Turns an answer that grows into text that can be shown: no part of a stop string, no part of a character."""

    def __init__(self, stops: Sequence[bytes] = ()):
        self._stops, self._shown = stops, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, text: bytes, *, final: bool) -> str:
        """What is new of the answer `text` so far, which ends before a stop string where it holds one.

        `final` says that nothing follows: then all of it is shown, a replacement character for a cut one.
        """
        end = len(text)
        if not final:
            end -= held_back(text, self._stops)
            # Some tokenizers give one for each byte of a character that is not whole yet.
            while text.endswith(REPLACEMENT, self._shown, end):
                end -= len(REPLACEMENT)
        new = self._decoder.decode(text[self._shown : end], final)
        self._shown = max(self._shown, end)
        return new
