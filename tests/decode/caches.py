"""Two caches compared by what they hold, whichever slots it lies in."""

import numpy as np

from lm.model.cache import EMPTY, Cache, together


def held(cache: Cache, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions in ascending order, and the keys and values of their slots [L, K, n, C]."""
    position_S = np.asarray(cache.position_BS[row])
    order = np.argsort(position_S, kind="stable")
    order = order[position_S[order] != EMPTY]
    k_LBKSC, v_LBKSC = (np.asarray(x_LBKSC) for x_LBKSC in together(cache)[:2])
    return position_S[order], k_LBKSC[:, row][:, :, order], v_LBKSC[:, row][:, :, order]


def assert_holds_the_same(first: Cache, second: Cache) -> None:
    for row in range(len(first.length_B)):
        for ours, wanted in zip(held(first, row), held(second, row), strict=True):
            # The same sums of 16 to 24 float32 terms in products of another shape.
            np.testing.assert_allclose(ours, wanted, atol=1e-5)
    np.testing.assert_array_equal(first.length_B, second.length_B)
