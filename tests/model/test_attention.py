import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.attention import Scoring, attend, attend_cached, causal_mask
from lm.model.positions import document_positions, rotate, rotation


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_worked_example():
    q_BTHC = jnp.zeros((1, 1, 1, 64)).at[0, 0, 0, 0].set(2.0)
    k_BSKC = jnp.zeros((1, 3, 1, 64)).at[0, :, 0, 0].set(jnp.array([12.0, 3.0, 1.0]))  # dot products 24, 6, 2
    v_BSKC = jnp.eye(3, 64)[None, :, None, :]
    weights = attend(q_BTHC, k_BSKC, v_BSKC, jnp.ones((1, 1, 3), bool))[0, 0, 0, :3]
    np.testing.assert_allclose(weights, [0.855, 0.090, 0.055], atol=5e-4)  # three printed digits
    # A key that comes later weighs nothing, and the others share what it had.
    causal = attend(q_BTHC, k_BSKC, v_BSKC, jnp.array([[[True, True, False]]]))[0, 0, 0, :3]
    np.testing.assert_allclose(causal, [0.855 / 0.945, 0.090 / 0.945, 0.0], atol=5e-4)
    assert causal[2] == 0.0


@pytest.mark.slow
def test_masked_keys_weigh_exactly_nothing():
    q, k, v = (random(2, 5, 4, 8, seed=seed) for seed in range(3))
    mask = causal_mask(5, None)
    before = attend(q, k, v, mask)
    after = attend(q, k.at[:, 3:].set(1e30), v.at[:, 3:].set(-1e30), mask)
    assert jnp.array_equal(before[:, :3], after[:, :3])
    assert not jnp.array_equal(before[:, 3:], after[:, 3:])


@pytest.mark.slow
def test_query_without_keys_gives_zero_and_finite_gradients():
    q, k, v = (random(1, 3, 2, 4, seed=seed) for seed in range(3))
    mask = causal_mask(3, None).at[0, 1].set(False)
    out = attend(q, k, v, mask)
    assert jnp.all(out[0, 1] == 0.0)
    assert jnp.all(out[0, 2] != 0.0)
    grads = jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v, mask) ** 2), argnums=(0, 1, 2))(q, k, v)
    assert all(jnp.all(jnp.isfinite(grad)) for grad in grads)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_equal_repeated_keys(kv_heads: int):
    q = random(2, 6, 4, 8)
    k, v = random(2, 6, kv_heads, 8, seed=1), random(2, 6, kv_heads, 8, seed=2)
    grouped = attend(q, k, v, causal_mask(6, None))
    repeated = attend(q, *(jnp.repeat(x, 4 // kv_heads, axis=2) for x in (k, v)), causal_mask(6, None))
    np.testing.assert_allclose(grouped, repeated, atol=1e-6)  # sums of 6 to 8 float32 terms of order 1


def test_scores_are_scaled_and_capped_before_the_softmax():
    q, k, v = (3 * random(1, 5, 2, 4, seed=seed) for seed in range(3))
    scoring, mask = Scoring(scale=0.7, softcap=2.0), causal_mask(5, None)
    expected = np.zeros((1, 5, 2, 4))
    for head in range(2):
        for t in range(5):
            raw = np.array([float(q[0, t, head] @ k[0, s, head]) * 0.7 for s in range(t + 1)])
            weights = np.exp(2.0 * np.tanh(raw / 2.0))
            expected[0, t, head] = (weights / weights.sum()) @ np.asarray(v[0, : t + 1, head])
    np.testing.assert_allclose(attend(q, k, v, mask, scoring), expected, atol=1e-5)
    cached = attend_cached(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask, scoring)
    np.testing.assert_allclose(cached, expected, atol=1e-5)
    last = attend_cached(q[:, -1:], k.swapaxes(1, 2), v.swapaxes(1, 2), mask[:, -1:], scoring)
    np.testing.assert_allclose(last, expected[:, -1:], atol=1e-5)
    assert np.abs(attend(q, k, v, mask, Scoring(scale=0.7)) - expected).max() > 0.1


def test_weights_of_a_query_sum_to_one():
    q, k = random(2, 7, 2, 4), random(2, 7, 2, 4, seed=1) * 30
    out = attend(q, k, jnp.ones((2, 7, 2, 4)), causal_mask(7, None))
    np.testing.assert_allclose(out, 1.0, atol=1e-6)


def test_documents_do_not_see_each_other():
    segments_BT = jnp.array([[1, 1, 2, 2, 2]])
    expected = np.tril(np.ones((5, 5), bool))
    expected[2:, :2] = False
    assert np.array_equal(causal_mask(5, segments_BT)[0], expected)


def test_a_sliding_window_is_so_many_keys_wide_itself_included():
    expected = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], bool)
    assert np.array_equal(causal_mask(4, None, window=2)[0], expected)
    assert np.array_equal(causal_mask(4, None, window=1)[0], np.eye(4, dtype=bool))
    expected[2, 1] = False
    assert np.array_equal(causal_mask(4, jnp.array([[1, 1, 2, 2]]), window=2)[0], expected)


def test_positions_restart_in_each_document():
    segments_BT = jnp.array([[3, 3, 4, 4, 4, 9], [1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 4]])
    expected = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 1]]
    assert np.array_equal(document_positions(segments_BT), expected)


def test_rotation_keeps_norms_and_depends_on_the_offset_only():
    q, k = random(1, 6, 2, 16), random(1, 6, 2, 16, seed=1)

    def turned(x, first):
        return rotate(x, rotation(first + jnp.arange(6)[None, :], 16, 10_000.0))

    np.testing.assert_allclose(jnp.linalg.norm(turned(q, 5), axis=-1), jnp.linalg.norm(q, axis=-1), rtol=1e-6)
    near = jnp.einsum("BTHC,BSHC->BHTS", turned(q, 0), turned(k, 0))
    far = jnp.einsum("BTHC,BSHC->BHTS", turned(q, 100), turned(k, 100))
    np.testing.assert_allclose(near, far, atol=1e-4)  # an angle of 100 is known to 100 * 2^-24, times norms of 4
    moved = jnp.einsum("BTHC,BSHC->BHTS", turned(q, 1), turned(k, 0))
    assert jnp.max(jnp.abs(moved - near)) > 0.1


def test_position_zero_is_not_turned():
    x = random(1, 1, 2, 8)
    assert jnp.array_equal(rotate(x, rotation(jnp.zeros((1, 1), jnp.int32), 8, 10_000.0)), x)
