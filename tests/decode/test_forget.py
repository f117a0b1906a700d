from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.decode.loop import extend
from lm.model.cache import EMPTY, Cache, empty_cache, forget, take_rows
from lm.model.config import CacheDtype, Mixer, Positions
from lm.model.transformer import Transformer
from tests.decode import letters
from tests.model import variants

KNOWN = [np.array([10, 4, 7, 1, 0, 3]), np.array([3, 9]), np.array([1, 2, 3, 4])]
MORE = np.array([[5, 6, 5], [8, 8, 2], [0, 9, 1]])
KEPT = np.array([5, 2, 0])  # one row forgets one token, one none, one everything


def test_what_was_forgotten_is_gone_and_the_rest_is_there():
    cache = filled(letters.config(11), spare=0)
    less = forget(cache, jnp.asarray([5, 9, 0]))
    np.testing.assert_array_equal(less.length_B, KEPT)
    for row, kept in enumerate(KEPT):
        held = np.asarray(less.position_BS)[row]
        np.testing.assert_array_equal(np.sort(held[held != EMPTY]), np.arange(kept))
    assert less.k_LBKSC is cache.k_LBKSC  # nothing is moved


def filled(shape, spare: int) -> Cache:
    cache = empty_cache(shape, len(KNOWN), 16, spare=spare)
    tokens_BT = np.stack([np.pad(row, (8 - len(row), 0)) for row in KNOWN])
    counts_B = jnp.asarray([len(row) for row in KNOWN])
    return step(shape, fresh=True)(variants.parameters(shape), jnp.asarray(tokens_BT), counts_B, cache)[1]


def step(shape, **how):
    return jax.jit(partial(extend, Transformer(shape), **how))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 4])
def test_going_on_after_forgetting_is_never_having_known(window: int | None):
    shape = letters.config(11, window=window)
    # In a window of 4 the row that keeps 5 of 6 tokens needs the one that the newest would have pushed out.
    cache = forget(filled(shape, spare=2), jnp.asarray(KEPT))
    logits_BTV, _ = step(shape)(variants.parameters(shape), jnp.asarray(MORE), jnp.full(3, 3), cache)
    for row, kept in enumerate(KEPT):
        whole = np.concatenate([KNOWN[row][:kept], MORE[row]])
        padded = jnp.asarray(np.pad(whole, (0, 16 - len(whole))), jnp.int32)[None]
        expected_1TV = variants.logits(shape, variants.parameters(shape), padded)
        np.testing.assert_allclose(logits_BTV[row], expected_1TV[0, kept : kept + 3], atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [(CacheDtype.MODEL, {}), (CacheDtype.INT8, {}),
     (CacheDtype.MODEL, {"mixer": Mixer.LSTM, "n_head": 1, "positions": Positions.NONE})],
)  # fmt: skip
def test_rows_are_taken_whole(dtype: CacheDtype, changes):
    shape = letters.config(11, **changes)
    cache = empty_cache(shape, 3, 16, dtype)
    marked = jax.tree.map(lambda x: jnp.arange(x.size).reshape(x.shape).astype(x.dtype), cache)
    taken = take_rows(marked, jnp.array([2, 0, 0, 1]))
    for name in Cache._fields:
        before, after = (jax.tree.leaves(getattr(each, name)) for each in (marked, taken))
        for old, new in zip(before, after, strict=True):
            axis = 0 if name in ("position_BS", "length_B") else 1
            np.testing.assert_array_equal(new, old if name == "next" else np.take(old, [2, 0, 0, 1], axis))
