"""Bytes of an answer as they come: stop strings found in bytes, characters that are not whole yet held back."""

import codecs
import dataclasses
from collections.abc import Sequence


def first_stop(text: bytes, stops: Sequence[bytes], since: int = 0) -> int | None:
    """Where the earliest stop string begins in `text`, if one is there; `since` bytes are known to hold none."""
    longest = max((len(stop) for stop in stops), default=0)
    found = [at for stop in stops if (at := text.find(stop, max(0, since - longest + 1))) >= 0]
    return min(found, default=None)


@dataclasses.dataclass
class Printer:
    """Turns bytes that come in pieces into text without ever cutting a character."""

    _decoder: codecs.IncrementalDecoder = dataclasses.field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add(self, piece: bytes) -> str:
        """The text that is whole now."""
        return self._decoder.decode(piece)

    def end(self) -> str:
        """What is left, with a replacement character for a cut one."""
        return self._decoder.decode(b"", final=True)
