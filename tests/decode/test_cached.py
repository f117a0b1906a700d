"""Decoding with a cache is the forward pass of training: the same logits at every step, from the same slots."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.decode.weights import lay_out
from lm.model.cache import empty_cache, grow
from lm.model.config import CacheDtype, Dtype, FeedForward, Mixer, Norm, Positions
from lm.model.transformer import Transformer
from tests.decode.caches import assert_holds_the_same, held
from tests.model import variants

PROMPT, STEPS = 8, 12
LAYOUTS = ("scan", "unrolled", "unstacked")
GRID = {
    "norm": tuple(Norm),
    "positions": (Positions.LEARNED, Positions.ROPE),
    "n_kv_head": (None, 2, 1),  # of 4 query heads: multi-head, grouped, multi-query
    "qk_norm": (False, True),
    "layout": LAYOUTS,
    "window": (None, 5, 12),  # none; shorter than the prompt; longer, and passed by the answer
    "tied_embedding": (True, False),
    "bias": (False, True),
}
RAGGED = {"even": (PROMPT,) * 3, "ragged": (PROMPT, 5, 1)}


def shape(**changes):
    return variants.tiny(**{"context_length": PROMPT + STEPS, **changes})


def laid(config, layout="unstacked"):
    """The model and parameters of a layout: as trained, one loop unrolled, or layer by layer as decoding has them."""
    if layout == "scan":
        return Transformer(config), variants.parameters(config)
    config = variants.replace(config, unroll_layers=layout == "unrolled")
    return lay_out(config, variants.parameters(config), unstack=layout == "unstacked")


def tokens(rows, length, seed=1, vocabulary=11):
    return np.random.default_rng(seed).integers(0, vocabulary, (rows, length)).astype(np.int32)


def right_aligned(rows_BT, counts, fill=0):
    """The first `counts` tokens of each row, ending on the right."""
    width = max(counts)
    filled = np.full((len(counts), width), fill, np.int32)
    for row, count, given in zip(filled, counts, rows_BT, strict=True):
        row[width - count :] = given[:count]
    return filled


@partial(jax.jit, static_argnames=("model", "fresh", "last"))
def extend(model, params, tokens_BT, count_B, cache, *, fresh=False, last=None):
    return model.apply({"params": params}, tokens_BT, count_B, cache, fresh=fresh, last=last, method=Transformer.extend)


@partial(jax.jit, static_argnames=("model", "steps"))
def greedy(model, params, prompt_BT, count_B, cache, *, steps):
    """Tokens [B, steps] and the logits [B, steps, V] that each was chosen by, one token a call after the prompt."""

    def one(carry, _):
        logits_BTV, cache = carry
        token_B = jnp.argmax(logits_BTV[:, -1], axis=1).astype(jnp.int32)
        after = extend(model, params, token_B[:, None], jnp.ones_like(token_B), cache)
        return after, (token_B, logits_BTV[:, -1])

    begun = extend(model, params, prompt_BT, count_B, cache, fresh=True, last=1)
    _, (token_GB, logits_GBV) = jax.lax.scan(one, begun, None, length=steps)
    return token_GB.T, logits_GBV.swapaxes(0, 1)


def compare_with_full_forward(case):
    case = dict(case)
    layout = case.pop("layout")
    config = shape(**case)
    model, params = laid(config, layout)
    prompt_BT = tokens(3, PROMPT)
    for counts in RAGGED.values():
        cache = empty_cache(config, 3, PROMPT + STEPS)
        # What stands on the left of a row is no token, whatever its id.
        aligned_BT = right_aligned(prompt_BT, counts, fill=7)
        answer_BG, cached_BGV = greedy(model, params, aligned_BT, np.array(counts), cache, steps=STEPS)
        whole_BT = np.zeros((3, PROMPT + STEPS), np.int32)
        for row, (count, prompt, answer) in enumerate(zip(counts, prompt_BT, answer_BG, strict=True)):
            whole_BT[row, : count + STEPS] = np.concatenate([prompt[:count], answer])
        full_BTV = np.asarray(variants.logits(config, variants.parameters(config), whole_BT))
        for row, count in enumerate(counts):
            full_GV = full_BTV[row, count - 1 : count - 1 + STEPS]
            np.testing.assert_allclose(cached_BGV[row], full_GV, atol=1e-4)
            np.testing.assert_array_equal(answer_BG[row], np.argmax(full_GV, axis=1))


LSTM, GRU = (
    {"mixer": mixer, "n_head": 1, "positions": Positions.NONE, "bias": True} for mixer in (Mixer.LSTM, Mixer.GRU)
)


def identify(case):
    return "-".join(f"{name}={value}" for name, value in case.items())


def alternating(k):
    """Two choices that have nothing to do with the cache, in turn over the whole grid of those that have."""
    return {"tied_embedding": k % 2 == 0, "bias": k % 4 < 2}


# What else a cached token goes through: settings that go together, and their layout.
MORE = {**variants.MORE, "layout": tuple({"layout": layout} for layout in LAYOUTS)}
COVERING = variants.pairwise(GRID)
COVERING_MORE = [variants.merged(*row.values()) for row in variants.pairwise(MORE)]
RECURRENT = [
    {**LSTM, **variants.NO_FEED_FORWARD, "layout": "unstacked"},
    {**GRU, "layout": "scan"},
    {**LSTM, "bias": False, "parallel_block": True, "layout": "unrolled"},
    {**GRU, "bias": False, "tied_embedding": False, "layout": "unstacked"},
]
AXES = {name: values for name, values in GRID.items() if name not in alternating(0)}
WHOLE = [
    {**dict(zip(AXES, values, strict=True)), **alternating(k)}
    for k, values in enumerate(itertools.product(*AXES.values()))
]


@pytest.mark.parametrize(
    "case",
    [
        COVERING[0],
        *(pytest.param(case, marks=pytest.mark.slow) for case in [*COVERING[1:], *COVERING_MORE[:3]]),
        *(pytest.param(case, marks=pytest.mark.full) for case in COVERING_MORE[3:]),
        pytest.param(RECURRENT[0], marks=pytest.mark.slow),
        *(pytest.param(case, marks=pytest.mark.full) for case in RECURRENT[1:]),
    ],
    ids=identify,
)
def test_cached_logits_are_those_of_the_full_forward(case):
    compare_with_full_forward(case)


@pytest.mark.full
@pytest.mark.parametrize("case", WHOLE, ids=identify)
def test_cached_logits_are_those_of_the_full_forward_everywhere(case):
    compare_with_full_forward(case)


WINDOWED = {"window": 5, "n_kv_head": 2}
both = pytest.mark.parametrize("changes", [{}, WINDOWED], ids=["all", "window"])
ONE = np.ones(3, np.int32)


def begun(changes, counts=(PROMPT,) * 3, dtype=CacheDtype.MODEL):
    """A model, its parameters, and logits and cache after a prefill of three rows."""
    config = shape(**changes)
    model, params = laid(config)
    prompt_BT, count_B = right_aligned(rows_of_tokens(), counts, fill=7), np.array(counts, np.int32)
    cache = empty_cache(config, 3, PROMPT + STEPS, dtype)
    return model, params, *extend(model, params, prompt_BT, count_B, cache, fresh=True)


def rows_of_tokens():
    return tokens(3, PROMPT + STEPS)


def full_forward(config):
    return np.asarray(variants.logits(config, variants.parameters(config), rows_of_tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("feed_forward", [kind for kind in FeedForward if kind is not FeedForward.NONE])
def test_hidden_units_added_to_a_width_of_whole_pages_change_nothing(feed_forward):
    if jax.default_backend() == "cpu":
        assert laid(shape(d_ff=1024))[0].config.d_ff > 1024
    compare_with_full_forward({"d_ff": 1024, "feed_forward": feed_forward, "bias": True, "layout": "unstacked"})


@pytest.mark.slow
@both
def test_a_prefill_is_so_many_single_steps(changes):
    model, params, logits_BTV, at_once = begun(changes)
    cache = empty_cache(model.config, 3, PROMPT + STEPS)
    for t in range(PROMPT):
        step_B1V, cache = extend(model, params, rows_of_tokens()[:, t : t + 1], ONE, cache)
        np.testing.assert_allclose(step_B1V[:, 0], logits_BTV[:, t], atol=1e-5)
    assert_holds_the_same(cache, at_once)
    assert cache.position_BS.dtype == jnp.int32
    if model.config.window is None:
        np.testing.assert_array_equal(cache.position_BS, at_once.position_BS)  # slot by slot
        assert int(cache.next) == int(at_once.next) == PROMPT


@pytest.mark.parametrize(
    "changes",
    [{}, LSTM, pytest.param(WINDOWED, marks=pytest.mark.slow), pytest.param(GRU, marks=pytest.mark.full)],
    ids=["all", "lstm", "window", "gru"],
)
def test_going_on_with_several_tokens_is_the_full_forward(changes):
    model, params, _, cache = begun(changes, (1, 3, 2))
    full_BTV, at_B = full_forward(shape(**changes)), np.array([1, 3, 2])
    # Rows get different numbers of tokens, none at all among them, with single steps in between.
    for counts in ([3, 1, 4], [4, 0, 2], [1, 1, 1], [1, 0, 1], [0, 4, 1], [4, 4, 4], [1, 1, 1], [2, 3, 1]):
        width = 1 if max(counts) == 1 else 4
        given_BT = np.full((3, width), 7, np.int32)
        for row, count in enumerate(counts):
            given_BT[row, width - count :] = rows_of_tokens()[row, at_B[row] : at_B[row] + count]
        logits_BTV, cache = extend(model, params, given_BT, np.array(counts, np.int32), cache)
        for row, count in enumerate(counts):
            wanted_TV = full_BTV[row, at_B[row] : at_B[row] + count]
            np.testing.assert_allclose(logits_BTV[row, width - count :], wanted_TV, atol=1e-5)
        at_B += counts
        np.testing.assert_array_equal(cache.length_B, at_B)


def test_the_ring_of_a_sliding_window_goes_round_three_times():
    width = WINDOWED["window"]
    model, params, logits_BTV, cache = begun(WINDOWED, (PROMPT, 2, 4))
    full_BTV, at_B = full_forward(shape(**WINDOWED)), np.array([PROMPT, 2, 4])
    assert cache.slots == width
    for _ in range(STEPS):
        for row, count in enumerate(at_B):
            np.testing.assert_allclose(logits_BTV[row, -1], full_BTV[row, count - 1], atol=1e-5)
            np.testing.assert_array_equal(held(cache, row)[0], np.arange(max(0, count - width), count))
        logits_BTV, cache = extend(model, params, rows_of_tokens()[np.arange(3), at_B][:, None], ONE, cache)
        at_B += 1
    assert int(cache.next) >= 3 * width


def test_what_lies_in_the_slots_is_never_touched_again():
    model, params, _, cache = begun({}, (PROMPT, 3, 1))
    before = jax.device_get((cache.k_LBKSC, cache.v_LBKSC))
    for step in range(STEPS):
        _, cache = extend(model, params, tokens(3, 1, seed=step), np.array([1, 0, 1], np.int32), cache)
        now = jax.device_get((cache.k_LBKSC, cache.v_LBKSC))
        for old, new in zip(before, now, strict=True):
            np.testing.assert_array_equal(new[:, :, :, : PROMPT + step], old[:, :, :, : PROMPT + step])
        before = now


def test_more_room_changes_nothing_that_is_held():
    config = shape()
    held_by = begun({}, (PROMPT, 3, 1))[3]
    larger = grow(held_by, config, 32)
    assert larger.slots == 32
    assert grow(larger, config, 20) is larger
    assert_holds_the_same(larger, held_by)
    assert jax.tree.map(jnp.shape, larger) == jax.tree.map(jnp.shape, empty_cache(config, 3, 32))


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.slow
@pytest.mark.parametrize("positions", [Positions.LEARNED, Positions.ROPE])
def test_bfloat16_with_a_cache_is_as_near_to_float32_as_without(positions):
    exact = shape(context_length=320, positions=positions, qk_norm=True)
    config = variants.replace(exact, dtype=Dtype.BFLOAT16)
    rows_BT = tokens(2, 320)
    full_BTV, exact_BTV = (
        np.asarray(variants.logits(of, variants.parameters(exact), rows_BT)) for of in (config, exact)
    )
    model, params = laid(config)
    ours, plain = [], []
    for length in (8, 40, 100, 200, 300):  # beyond 256, positions in bfloat16 would fall together
        prompt_BT = np.pad(rows_BT[:, :length], ((0, 0), (300 - length, 0)))
        cache, count_B = empty_cache(config, 2, 320), np.full(2, length, np.int32)
        logits_BTV, cache = extend(model, params, prompt_BT, count_B, cache, fresh=True, last=1)
        assert cache.k_LBKSC.dtype == cache.v_LBKSC.dtype == jnp.bfloat16
        assert cache.position_BS.dtype == cache.length_B.dtype == cache.next.dtype == jnp.int32
        for t in range(length, length + 4):
            assert logits_BTV.dtype == jnp.float32
            ours.append(logits_BTV[:, 0] - exact_BTV[:, t - 1])
            plain.append(full_BTV[:, t - 1] - exact_BTV[:, t - 1])
            # bfloat16 rounds by up to 2^-9; a logit of up to 4 comes through some ten roundings a layer, which add up
            # like random numbers: 4 sqrt(20) 2^-9 = 0.035 is typical, four times that the bound. Measured: 0.075.
            assert np.abs(logits_BTV[:, 0] - full_BTV[:, t - 1]).max() < 0.14
            logits_BTV, cache = extend(model, params, rows_BT[:, t : t + 1], np.ones(2, np.int32), cache, last=1)
    # The cache adds no rounding of its own: the same errors, up to the order of sums.
    assert rms(ours) < 1.2 * rms(plain)


def dequantised(cache, name):
    scale_LBKS1 = np.asarray(getattr(cache, f"{name}_scale_LBKS"))[..., None]
    return np.asarray(getattr(cache, f"{name}_LBKSC"), np.float32) * scale_LBKS1, scale_LBKS1


@pytest.mark.slow
@both
def test_int8_keeps_keys_and_values_to_half_a_step(changes):
    model, params, _, exact = begun(changes, (PROMPT, 5, 1))
    *_, rough = begun(changes, (PROMPT, 5, 1), CacheDtype.INT8)
    assert rough.k_LBKSC.dtype == rough.v_LBKSC.dtype == jnp.int8
    apart = []
    for step in range(STEPS):
        token_B1 = tokens(3, 1, seed=step)
        wanted_B1V, exact = extend(model, params, token_B1, ONE, exact)
        logits_B1V, rough = extend(model, params, token_B1, ONE, rough)
        apart.append(logits_B1V - wanted_B1V)
    for name in ("k", "v"):
        kept, step_LBKS1 = dequantised(rough, name)
        # Only the first layer's come from the same numbers; later ones have been through rough attention.
        off = np.abs(kept[0] - np.asarray(getattr(exact, f"{name}_LBKSC"))[0])
        assert (off <= step_LBKS1[0] / 2 + 1e-6).all()
        assert off.max() > 1e-4
    # A step is 1/127 of a head's largest number, so that its error is about that of bfloat16, here in keys and values
    # alone. Logits of up to 2.4 were measured to be off by 0.083 at most, 0.01 in the root of the mean square.
    assert np.abs(apart).max() < 0.14
    assert rms(apart) < 0.03
