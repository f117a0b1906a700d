"""The compiled loop of single tokens: nothing the size of a layer's cache or of a weight is copied at a token."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from lm.decode import loop
from lm.decode.strategy import GREEDY
from lm.decode.weights import lay_out
from lm.model.cache import empty_cache
from tests.model import variants

pytestmark = pytest.mark.slow  # compilations: about a second or more each

SLOTS, WIDTH = 72, 32
ARRAY = re.compile(r"\s*(?:ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* ([\w-]+)\((.*)")
FREE = {"parameter", "get-tuple-element", "bitcast", "tuple", "dynamic-update-slice"}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    """Not here: it is the optimised program that counts."""


def body(config, batch: int) -> list[str]:
    """The instructions of the loop's body, those inside its fusions left out: they make no arrays of their own."""
    model, params = lay_out(config, variants.parameters(config))
    limits = loop.Limits(jnp.array([-1]), jnp.full(batch, 8), jnp.zeros(batch, bool))
    key_B = jax.vmap(jax.random.key)(jnp.arange(batch))
    logits_BV, cache = jnp.zeros((batch, config.vocab_size)), empty_cache(config, batch, SLOTS, apart=True)
    state = jax.eval_shape(functools.partial(loop.begin, room=8), logits_BV, cache, GREEDY, limits, key_B, None)
    until = jnp.asarray(8, jnp.int32)
    text = loop.advance_program(batch).lower(model, params, state, GREEDY, limits, until).compile().as_text()
    # The loop with the most state is that of tokens; the draw has small ones.
    name = max(re.findall(r"(.*) while\(.*body=%?([\w.-]+)", text), key=lambda found: len(found[0]))[1]
    return re.search(rf"^%?{re.escape(name)} .*?\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)[1].splitlines()


@pytest.mark.parametrize(("changes", "batch"), [({}, 1), ({"n_kv_head": 2}, 1), ({}, 2), ({"window": 64}, 1)], ids=str)
def test_no_token_copies_a_layer_of_the_cache_or_a_matrix(changes, batch):
    config = variants.tiny(vocab_size=40, context_length=96, n_layer=2, d_model=WIDTH, n_head=4, **changes)
    slots = min(SLOTS, config.window or SLOTS)
    large = min(batch * config.kv_heads * slots * config.head_width, WIDTH * WIDTH)
    made = []
    for line in body(config, batch):
        found = ARRAY.match(line)
        if found and math.prod(int(n) for n in found[1].split(",") if n) >= large and found[2] not in FREE:
            made.append(line.strip())
    # The write of the new token is in place: a fusion around dynamic-update-slice, two a layer.
    others = [line for line in made if "dynamic-update-slice" not in line]
    assert others == []
    assert len(made) <= 2 * config.n_layer
