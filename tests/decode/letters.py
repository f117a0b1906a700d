"""Decoders of a handful of letters, small enough that every answer can be listed."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm.data.tokenizer import Tokenizer
from lm.decode.generate import Decoder
from lm.model.config import ModelConfig
from lm.model.score import token_log_probs
from tests.model import variants

ROWS = 64  # of a forward pass


class Letters(Tokenizer):
    """The letters from a on, the last of which ends a document."""

    def __init__(self, count: int, name: str = "letters"):
        self.spec = self.fingerprint = f"{name} {count}"
        self.vocab_size, self.eos_id = count, count - 1
        self.token_bytes = np.array([1] * (count - 1) + [0], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array([ord(letter) - ord("a") for letter in text], np.int32) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> bytes:
        return bytes(ord("a") + int(i) for i in ids if i != self.eos_id)


def config(vocabulary: int, **changes: Any) -> ModelConfig:
    return variants.tiny(**{"vocab_size": vocabulary, "context_length": 32, "n_layer": 1, **changes})


def decoder(shape: ModelConfig, std: float = 0.3) -> Decoder:
    return Decoder(shape, variants.parameters(shape, std), Letters(shape.vocab_size))


def log_probs(shape: ModelConfig, prompt: np.ndarray, answers: np.ndarray, std: float = 0.3) -> np.ndarray:
    """Nats of each token of the answers [N, G] after the prompt, by whole forward passes without a cache."""
    tokens_NT = np.concatenate([np.broadcast_to(prompt, (len(answers), len(prompt))), answers], axis=1)
    # One shape for all that is small: what follows changes nothing (causal), nor do further rows.
    more = max(ROWS - len(answers), 0), shape.context_length - tokens_NT.shape[1]
    padded_NT = jnp.asarray(np.pad(tokens_NT, ((0, more[0]), (0, more[1]))), jnp.int32)
    logits_NTV = variants.logits(shape, variants.parameters(shape, std), padded_NT)
    scores_NT = token_log_probs(logits_NTV[:, :-1], padded_NT[:, 1:])
    return np.asarray(scores_NT)[: len(answers), len(prompt) - 1 : tokens_NT.shape[1] - 1]


@functools.cache
def all_answers(vocabulary: int, length: int) -> np.ndarray:
    return np.array(list(itertools.product(range(vocabulary), repeat=length)), np.int32)
