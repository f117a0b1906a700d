"""Any bytes as tokens, so that the tokens give back exactly those bytes."""

import re

import numpy as np

from lm.base.errors import UsageError
from lm.data.tokenizer import Tokenizer


class Speller:
    """Turns bytes into tokens with a tokenizer that has a token for each byte.

    Text is encoded as text. Bytes that are not UTF-8, and text that the tokenizer would change (one that normalises),
    are spelled byte by byte.

    Raises:
      UsageError: some byte has no token of its own.
    """

    def __init__(self, tokenizer: Tokenizer):
        ids = {tokenizer.decode([i]): i for i in np.flatnonzero(tokenizer.token_bytes == 1).tolist()}
        missing = [byte for byte in range(256) if bytes([byte]) not in ids]
        if missing:
            raise UsageError(
                f"{len(missing)} of 256 bytes have no token of their own, 0x{missing[0]:02x} first",
                where="tokenizer",
                do="Only a model of bytes or of a byte-level BPE can spell every file.",
            )
        self._tokenizer = tokenizer
        self._id_of_byte = np.array([ids[bytes([byte])] for byte in range(256)], np.int32)

    def tokens(self, data: bytes) -> np.ndarray:
        """Tokens (int32) that decode to exactly `data`, cut at any place too."""
        if self._tokenizer.token_bytes.max() == 1:
            return self._byte_by_byte(data)
        parts = re.split("([\udc80-\udcff]+)", data.decode("utf-8", errors="surrogateescape"))
        texts = parts[::2]  # what stands between them is not UTF-8
        ids = [np.zeros(0, np.int32)] * len(parts)
        for place, encoded in enumerate(self._tokenizer.encode_batch(texts)):
            text = texts[place].encode()
            exact = self._tokenizer.decode(encoded) == text
            ids[2 * place] = encoded if exact else self._byte_by_byte(text)
        for place, strange in enumerate(parts[1::2]):
            ids[2 * place + 1] = self._byte_by_byte(strange.encode(errors="surrogateescape"))
        return np.concatenate(ids)

    def _byte_by_byte(self, data: bytes) -> np.ndarray:
        return self._id_of_byte[np.frombuffer(data, np.uint8)]
