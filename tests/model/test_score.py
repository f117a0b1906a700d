import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import RunError, UsageError
from lm.model.score import (
    Bos,
    Scored,
    evaluation_windows,
    score_windows,
    sliding_windows,
    stream_of,
    summarise,
    token_log_probs,
)
from lm.model.transformer import Transformer
from tests.model.variants import parameters, tiny

V = 10


def stream(n: int, starts: tuple[int, ...] = (0,), eos_id: int | None = V, width: int = 1):
    ids = np.random.default_rng(0).integers(0, V, n).astype(np.uint16)
    return stream_of(ids, np.array(starts), np.array([width] * V + [0]), eos_id)


def uniform(vocab_size: int):
    return lambda params, inputs, targets, segments: np.full(targets.shape, -math.log(vocab_size), np.float32)


@pytest.mark.slow
def test_gradient_is_softmax_minus_one_hot():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 7)) * 3
    targets = jnp.array([[0, 6, 3], [2, 2, 5]])
    grad = jax.grad(lambda logits: -jnp.sum(token_log_probs(logits, targets)))(logits)
    expected = jax.nn.softmax(logits, axis=-1) - jax.nn.one_hot(targets, 7)
    np.testing.assert_allclose(grad, expected, atol=1e-6)  # a few float32 roundings of numbers below 1


def test_log_softmax_does_not_notice_a_shift():
    logits = jnp.round(jax.random.normal(jax.random.key(0), (1, 2, 5)) * 64) / 64
    targets = jnp.array([[1, 4]])
    # Multiples of 1/64 plus 2^15 are exact in float32, so that the results must be the same bits.
    assert jnp.array_equal(token_log_probs(logits, targets), token_log_probs(logits + 2.0**15, targets))


def test_log_softmax_of_huge_and_impossible_logits():
    logits = jnp.array([[[1e4, 0.0, -jnp.inf]]])
    assert token_log_probs(logits, jnp.array([[0]]))[0, 0] == 0.0
    assert token_log_probs(logits, jnp.array([[1]]))[0, 0] == -1e4
    assert token_log_probs(logits, jnp.array([[2]]))[0, 0] == -jnp.inf


@hypothesis.given(st.integers(2, 60), st.integers(1, 20), st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_every_token_is_scored_once_with_enough_context(n: int, window: int, data):
    stride = data.draw(st.integers(1, window))
    seen = stream_of(np.arange(1, n, dtype=np.uint16), np.array([0]), np.ones(n, int), eos_id=0)
    shapes = set()

    def context(params, inputs_BT, targets_BT, segments_BT):  # tokens are their own indices
        shapes.add(inputs_BT.shape)
        assert segments_BT is None
        return targets_BT - inputs_BT[:, :1]

    scored = score_windows(context, None, seen, sliding_windows(n, window, stride), window, batch_size=3)
    assert np.array_equal(scored.indices, np.arange(1, n))
    assert np.all(scored.log_probs >= np.minimum(scored.indices, window - stride + 1))
    assert np.all(scored.log_probs <= window)
    assert shapes == {(3, window)}


@hypothesis.given(st.integers(2, 500), st.integers(1, 20), st.integers(1, 30))
@hypothesis.settings(max_examples=60, deadline=None)
def test_evaluation_windows_are_whole_and_apart(n: int, window: int, count: int):
    starts = evaluation_windows(n, window, count)
    whole = (n - 1) // window
    assert len(starts) == max(1, min(count, whole))
    assert np.all(np.diff(starts) >= window)
    if whole:
        assert starts[-1] + window <= n - 1
        gaps = np.diff(np.append(starts, whole * window))
        assert gaps.max() - gaps.min() <= window  # evenly, in whole windows


@pytest.mark.slow
def test_window_pass_equals_the_training_loss():
    config = tiny(vocab_size=V + 1)
    params, T = parameters(config), config.context_length
    text = stream(5 * T)
    model = Transformer(config)

    def log_probs(params, inputs, targets, segments):
        return token_log_probs(model.apply({"params": params}, inputs, segments), targets)

    scored = score_windows(jax.jit(log_probs), params, text, sliding_windows(5 * T + 1, T, T), T, batch_size=2)
    inputs, targets = (x.astype(np.int32).reshape(5, T) for x in (text.tokens[:-1], text.tokens[1:]))
    loss = -jnp.mean(jax.jit(log_probs)(params, inputs, targets, None))
    # The same windows in batches of another shape: float32 sums of 16 to 24 terms in another order.
    np.testing.assert_allclose(summarise(scored, text, T, T).nats_per_token, loss, rtol=1e-5)


def test_document_mask_scores_each_document_alone():
    config = tiny(vocab_size=V + 1, context_length=16)
    params, model = parameters(config), Transformer(config)
    log_probs = jax.jit(lambda p, x, y, s: token_log_probs(model.apply({"params": p}, x, s), y))
    first, second = stream(6).tokens, stream(9).tokens
    joined = stream_of(np.concatenate([first, second]), np.array([0, 7]), np.ones(V + 1, int), V)
    together = score_windows(log_probs, params, joined, np.array([0]), 16, 1, segment_mask=True)
    alone = score_windows(log_probs, params, stream(9), np.array([0]), 16, 1, segment_mask=True)
    np.testing.assert_allclose(together.log_probs[7:], alone.log_probs, atol=1e-5)  # another row of the same sums
    crossing = score_windows(log_probs, params, joined, np.array([0]), 16, 1)
    assert np.max(np.abs(crossing.log_probs[7:] - alone.log_probs)) > 1e-3


def test_uniform_model_has_perplexity_v():
    score = summarise_all(uniform(V), stream(37))
    assert score.perplexity == pytest.approx(V, rel=1e-6)  # ln V in float32
    assert score.bits_per_token == pytest.approx(math.log2(V), rel=1e-6)


def test_pairs_of_bytes_cost_eight_bits_a_byte():
    score = summarise_all(uniform(65_536), stream(37, width=2))
    assert score.bits_per_byte == pytest.approx(8, rel=1e-6)
    assert score.bits_per_token == pytest.approx(2 * score.bits_per_byte, rel=1e-12)
    assert (score.tokens, score.bytes) == (37, 74)


def test_end_of_text_is_put_in_front_once():
    assert stream(5).bos is Bos.END_OF_TEXT
    assert np.array_equal(stream(5, (0, 3)).document_starts, [0, 4])
    again = stream_of(stream(5).tokens, np.array([0]), np.ones(V + 1, int), V)
    assert np.array_equal(again.tokens, stream(5).tokens)
    without = summarise_all(uniform(V), stream(5, eos_id=None))
    assert (without.tokens, without.bytes, without.bos) == (4, 4, Bos.NONE)
    with_it = summarise_all(uniform(V), stream(5))
    assert (with_it.tokens, with_it.bytes, with_it.bos) == (5, 5, Bos.END_OF_TEXT)


def test_standard_error_is_clustered_by_document():
    text = stream(12, (0, 4, 8))  # end of text before the first: indices 1-4, 5-8, 9-12 of equal loss
    losses = np.repeat([1.0, 2.0, 6.0], 4)
    score = summarise(Scored(np.arange(1, 13), -losses), dataclasses.replace(text, document_starts=[0, 4, 8]), 4, 4)
    assert score.nats_per_token == pytest.approx(3.0)
    assert score.documents == 3
    assert score.standard_error == pytest.approx(np.std([1.0, 2.0, 6.0], ddof=1) / math.sqrt(3))
    assert summarise_all(uniform(V), stream(12)).standard_error is None


def test_nothing_to_score_and_bad_windows_are_usage_errors():
    with pytest.raises(UsageError, match="no token to score"):
        stream(1, eos_id=None)
    with pytest.raises(UsageError, match="no token to score"):
        stream(0)
    with pytest.raises(UsageError, match="stride 5 is not between 1 and the window 4"):
        sliding_windows(10, 4, 5)
    with pytest.raises(UsageError, match="the window is 0"):
        sliding_windows(10, 0, 1)


def test_broken_parameters_are_said():
    with pytest.raises(RunError, match="token 1 is nan"):
        summarise_all(lambda params, inputs, targets, segments: np.full(targets.shape, np.nan), stream(4))


def summarise_all(log_prob_fn, text):
    starts = sliding_windows(len(text.tokens), 4, 4)
    return summarise(score_windows(log_prob_fn, None, text, starts, 4, batch_size=2), text, 4, 4)
