"""Caches: as many slots as are needed, and for caches larger than the model as many as are needed soon."""

import numpy as np
import pytest

from lm.decode.slots import bucket, more_slots, slots_for
from tests.decode.tiny import decoder, ids, request


def test_lengths_share_buckets():
    assert [bucket(n) for n in (0, 1, 16, 17, 512, 513, 1025)] == [16, 16, 16, 32, 512, 1024, 1536]
    assert [slots_for(n) for n in (1, 64, 65, 256)] == [64, 64, 128, 256]


def test_a_cache_that_grows_holds_what_is_needed_and_no_more_than_half_again():
    slots, needed = 64, 1000
    while slots < needed:
        assert slots < more_slots(slots, needed) <= max(slots + slots // 2 + 32, 128)
        slots = more_slots(slots, needed)
    assert slots == slots_for(needed)


@pytest.mark.slow
def test_a_cache_larger_than_the_model_grows_and_changes_nothing():
    made, rows = decoder(), [ids(5, seed) for seed in range(64)]
    asked = request(max_tokens=70)
    growing, whole = made.start(rows, asked), made.start(rows, asked, spare=1)
    assert (growing.state.cache.slots, whole.state.cache.slots) == (64, 128)
    few = made.start(rows[:1], asked)
    assert few.state.cache.slots == 128  # smaller than the model: all at once
    growing, whole = made.advance(growing, 70), made.advance(whole, 70)
    assert growing.state.cache.slots == 128
    for ours, wanted in zip(made.completions(growing), made.completions(whole), strict=True):
        np.testing.assert_array_equal(ours.tokens, wanted.tokens)
        # Sums over more slots of weight zero may be taken in another order.
        np.testing.assert_allclose(ours.log_probs, wanted.log_probs, atol=1e-5)
