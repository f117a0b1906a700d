"""One tiny model of bytes for the tests of text: random parameters, so that answers vary and every token may come."""

import functools

import numpy as np

from lm.data.tokenizer import ByteTokenizer
from lm.decode.generate import Decoder
from lm.decode.request import Request
from lm.decode.settings import Settings
from lm.model.config import CacheDtype
from tests.model import variants

CONFIG = variants.tiny(vocab_size=257, context_length=96, n_layer=1)
ROWS = 4
SAMPLED = Settings(temperature=1.0, top_p=0.9).steps(CONFIG.vocab_size)


@functools.cache
def decoder(cache_dtype=CacheDtype.MODEL, **changes):
    config = variants.replace(CONFIG, **changes)
    return Decoder(config, variants.parameters(config), ByteTokenizer(), cache_dtype=cache_dtype)


def request(**changes):
    """Sampled, not greedy: a greedy answer of a random model repeats itself."""
    return Request(**{"max_tokens": 40, "steps": SAMPLED, "seed": 3, "end_ids": (), **changes})


def answers(prompts, made=None, **changes):
    """Answers to at most `ROWS` prompts; a smaller batch is filled up, so that one program serves many tests."""
    made = made or decoder()
    asked = request(**changes)
    filled = [*prompts, *prompts[-1:] * (ROWS // max(asked.samples, 1) - len(prompts))]
    session = made.advance(made.start(made.encode(filled), asked), asked.max_tokens)
    return made.completions(session)[: len(prompts) * asked.samples]


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
