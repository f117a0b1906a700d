"""Counting models against a reference in dictionaries, and against what they are defined as."""

import collections
import dataclasses
import itertools
import math

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.data.sources import read_documents
from lm.model.count import as_text, costs
from lm.model.counting import FALLBACK, Counting, Counts, count, discounts
from lm.model.score import evaluation_windows, score_windows, stream_of, summarise
from tests.model.variants import logits, parameters, tiny

V = 4
SMOOTHINGS = (None, 0.0, 0.5)


def text(rows: int, length: int, vocabulary: int = V, seed: int = 0) -> np.ndarray:
    """Windows of a chain of order 2 with rare tokens, so that n-grams of count 1, 2, 3 and 4 occur."""
    draw = np.random.default_rng(seed)
    tokens = draw.choice(vocabulary, (rows, length + 1), p=1 / np.arange(1, vocabulary + 1) ** 2 / sum(
        1 / np.arange(1, vocabulary + 1) ** 2))  # fmt: skip
    tokens[:, 2:] = np.where(draw.random((rows, length - 1)) < 0.4, tokens[:, :-2], tokens[:, 2:])
    return tokens


def counted(
    order: int, pseudocount: float | None = None, *, windows: np.ndarray, vocabulary: int = V, **more
) -> Counts:
    config = Counting(vocabulary, windows.shape[1] - 1, order, pseudocount)
    return count(config, windows[:, :-1], windows[:, 1:], **more)


class Reference:
    """The definition, n-gram by n-gram, in dictionaries."""

    def __init__(self, order: int, pseudocount: float | None, windows: np.ndarray, vocabulary: int):
        self.pseudocount, self.vocabulary = pseudocount, vocabulary
        seen = [collections.Counter[tuple[int, ...]]() for _ in range(order + 1)]
        for window in windows.tolist():
            for k, end in itertools.product(range(1, order + 1), range(1, len(window))):
                if end - k + 1 >= 0:
                    seen[k][tuple(window[end - k + 1 : end + 1])] += 1
        self.counts = seen
        if pseudocount is None:  # below the highest order: how many tokens stand before
            behind = [collections.Counter(gram[1:] for gram in longer) for longer in seen[1:]]
            self.counts = [seen[0], *behind[1:], seen[order]]

    def probability(self, context: tuple[int, ...], token: int) -> float:
        lower = 1 / self.vocabulary if not context else None
        below = lower if lower is not None else self.probability(context[1:], token)
        if len(context) + 1 >= len(self.counts):
            return below
        level = self.counts[len(context) + 1]
        after = {gram[-1]: number for gram, number in level.items() if gram[:-1] == context}
        total = sum(after.values())
        if self.pseudocount is not None:
            added = self.pseudocount * self.vocabulary
            return (after.get(token, 0) + added * below) / (total + added) if total + added else below
        if not total:
            return below
        n = collections.Counter(level.values())
        if all(n[c] for c in (1, 2, 3, 4)):
            y = n[1] / (n[1] + 2 * n[2])
            off = [1 - 2 * y * n[2] / n[1], 2 - 3 * y * n[3] / n[2], 3 - 4 * y * n[4] / n[3]]
            off = off if min(off) > 0 else list(FALLBACK)
        else:
            off = list(FALLBACK)
        left = sum(off[min(number, 3) - 1] for number in after.values()) / total
        own = after.get(token, 0)
        return (own - off[min(own, 3) - 1] if own else 0) / total + left * below


@pytest.mark.parametrize("pseudocount", SMOOTHINGS)
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_are_those_of_a_reference_in_dictionaries(order: int, pseudocount: float | None):
    windows, other = text(12, 30), text(3, 30, seed=1)
    model, reference = counted(order, pseudocount, windows=windows), Reference(order, pseudocount, windows, V)
    found = np.exp(model.log_probs(other[:, :-1], other[:, 1:]))
    expected = [
        [reference.probability(tuple(row[max(0, end - order + 1) : end]), row[end]) for end in range(1, len(row))]
        for row in other.tolist()
    ]
    np.testing.assert_allclose(found, expected, atol=1e-12)  # a few dozen roundings of numbers up to 1


def test_a_vocabulary_of_fifty_thousand_and_order_five_are_those_of_the_reference_too():
    vocabulary = 50_257
    windows = text(20, 40, 40) * 1256  # some 40 ids all over the vocabulary: packed, five take 78 bits
    model, reference = counted(5, windows=windows, vocabulary=vocabulary), Reference(5, None, windows, vocabulary)
    row = windows[7].tolist()
    found = np.exp(model.log_probs(windows[7:8, :-1], windows[7:8, 1:]))[0]
    np.testing.assert_allclose(
        found, [reference.probability(tuple(row[max(0, end - 4) : end]), row[end]) for end in range(1, 41)], rtol=1e-12
    )


@pytest.mark.parametrize("pseudocount", SMOOTHINGS)
@pytest.mark.parametrize("order", range(6))
def test_probabilities_sum_to_one_in_every_context_seen_or_not(order: int, pseudocount: float | None):
    if order == 0 and pseudocount is not None:
        return
    model = counted(order, pseudocount, windows=text(4, 20))
    for length in range(order + 1):
        for context in itertools.islice(itertools.product(range(V), repeat=length), 0, None, max(1, 4 ** (length - 3))):
            prob_V = model.distribution(context)
            assert abs(prob_V.sum() - 1) < 1e-12  # float64 sums of V terms
            assert prob_V.min() > 0 or pseudocount == 0


@pytest.mark.parametrize("segmented", [False, True])
def test_scores_are_the_distribution_of_what_stands_before_in_window_and_document(segmented: bool):
    windows = text(4, 20)
    begins = np.array([0, 5, 6, 13])
    segments = np.broadcast_to(np.searchsorted(begins, np.arange(20), side="right"), (4, 20)) if segmented else None
    model = counted(4, windows=windows, segments_WT=segments)
    found = model.log_probs(windows[:, :-1], windows[:, 1:], segments)
    for row, place in itertools.product(range(4), range(20)):
        begin = begins[begins <= place].max() if segmented else 0
        prob_V = model.distribution(windows[row, begin : place + 1])
        assert found[row, place] == pytest.approx(math.log(prob_V[windows[row, place + 1]]), abs=1e-12)


def test_no_n_gram_reaches_across_documents():
    windows = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 0]])
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2]])
    model = counted(3, windows=windows, segments_WT=segments)
    (code, _) = model.tables[2]
    prefixes, last = code // V, code % V
    pairs = model.tables[1][0][prefixes]
    assert {(pair // V, pair % V, token) for pair, token in zip(pairs, last, strict=True)} == {
        (0, 1, 2), (1, 2, 3), (2, 3, 0)}  # fmt: skip
    assert len(counted(3, windows=windows).tables[2][0]) == 4  # and (3, 0, 1)


def test_a_unigram_without_smoothing_is_the_empirical_frequencies():
    windows = text(12, 30)
    expected = np.bincount(windows[:, 1:].ravel(), minlength=V) / windows[:, 1:].size
    np.testing.assert_array_equal(counted(1, 0.0, windows=windows).distribution([]), expected)
    # Kneser-Ney takes at most 1.5 off each of V counts.
    smoothed = counted(1, windows=windows).distribution([])
    np.testing.assert_allclose(smoothed, expected, atol=1.5 * V / windows[:, 1:].size)


def test_the_uniform_model_has_the_vocabulary_as_its_perplexity():
    model = Counts(Counting(257, 16, 0), ())
    stream = stream_of(np.arange(200, dtype=np.uint16), np.array([0]), np.ones(257, np.int32), 256)
    scored = score_windows(Counts.log_probs, model, stream, evaluation_windows(201, 16, 12), 16, batch_size=4)
    # ln 257 is rounded to float32, by 2e-7 at the most.
    assert summarise(scored, stream, 16, 16).perplexity == pytest.approx(257, rel=3e-7)


@pytest.mark.slow
def test_a_bigram_forgets_all_but_the_last_token_and_a_transformer_does_not():
    config = tiny()
    windows = text(2, config.context_length, config.vocab_size)
    model = counted(2, windows=windows, vocabulary=config.vocab_size)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    other_inputs, other_targets = inputs.copy(), targets.copy()
    other_inputs[:, 2] = other_targets[:, 1] = (inputs[:, 2] + 1) % config.vocab_size
    here, there = model.log_probs(inputs, targets), model.log_probs(other_inputs, other_targets)
    np.testing.assert_array_equal(here[:, 3:], there[:, 3:])
    assert np.any(here[:, 1:3] != there[:, 1:3])
    params = parameters(config)
    before, after = logits(config, params, inputs), logits(config, params, other_inputs)
    assert np.all(np.any(np.asarray(before[:, 3:] != after[:, 3:]), axis=-1))


def test_counts_depend_on_windows_and_not_on_their_order():
    windows = text(12, 30)
    for one, other in zip(counted(4, windows=windows).tables, counted(4, windows=windows[::-1]).tables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_higher_order_predicts_held_out_bytes_better(shared):
    books = itertools.islice(read_documents(str(shared / "data/gutenberg/val-00000.jsonl.xz")), 3)
    stream = np.frombuffer("\n".join(books).encode(), np.uint8)[:200_000].astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(stream, 129)[::128]
    seen, held_out = windows[:-300], windows[-300:]
    losses = [
        -counted(order, windows=seen, vocabulary=257).log_probs(held_out[:, :-1], held_out[:, 1:]).mean()
        for order in range(5)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(math.log(257))


def test_discounts_are_those_of_chen_and_goodman_where_they_are_defined():
    numbers = np.repeat([0, 1, 2, 3, 4, 9], [7, 40, 20, 10, 5, 3])
    y = 40 / 80
    expected = [0, 1 - 2 * y * 20 / 40, 2 - 3 * y * 10 / 20, 3 - 4 * y * 5 / 10]
    np.testing.assert_allclose(discounts(numbers), expected, rtol=1e-15)
    for too_few in (np.array([5, 9, 12]), np.repeat([1, 2, 3, 4], [1, 1, 9, 9])):  # the second: 2 - 3 y 9 < 0
        np.testing.assert_array_equal(discounts(too_few), [0, *FALLBACK])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"order": -1}, "order is -1"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"pseudocount": -0.5}, "pseudocount is -0.5"),
        ({"order": 10}, "order 10 looks back over more than context_length 8"),
        ({"order": 0, "pseudocount": 1.0}, "order is 0.* and pseudocount"),
    ],
)
def test_numbers_that_do_not_go_together_are_usage_errors(changes, said):
    with pytest.raises(UsageError, match=said):
        dataclasses.replace(Counting(V, 8, 2), **changes)


def test_costs_bound_the_counts_and_have_no_products():
    windows = text(12, 30)
    found = costs(Counting(V, 30, 4), windows[:, 1:].size)
    stored = counted(4, windows=windows)
    assert stored.stored <= found["parameters"]["total"]
    assert found["parameters"]["order_2"] == V**2
    assert found["parameters"]["active"] == 4
    assert set(found["flops_per_token"].values()) == {0}
    assert "at most V^k" in as_text(found)
