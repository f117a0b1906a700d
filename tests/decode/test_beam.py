import itertools

import jax
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.decode.beam import Beams, LengthForm, _choose, beam_search
from lm.decode.generate import Full, Request, generate
from lm.decode.loop import Finish
from lm.decode.strategy import Temperature
from lm.model.config import CacheDtype
from tests.decode import letters

V, G = 4, 5
SMALL = letters.config(V)
PROMPT = np.array([3, 1, 0], np.int32)
# Sums of a few float32 log-probabilities of two programs, cached and not: some 1e-6 each.
CLOSE = 1e-4


def brute_force(alpha: float, form: LengthForm, ends: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
    """Every answer of at most G tokens with its score, best first."""
    nats = letters.log_probs(SMALL, PROMPT, letters.all_answers(V, G))
    found = {}
    for tokens, row in zip(letters.all_answers(V, G).tolist(), nats, strict=True):
        n = next((place + 1 for place, token in enumerate(tokens) if token in ends), G)
        penalty = ((5 + n) / 6) ** alpha if form is LengthForm.GNMT else n**alpha
        found[tuple(tokens[:n])] = float(row[:n].sum()) / penalty
    return sorted(((score, tokens) for tokens, score in found.items()), reverse=True)


@pytest.mark.parametrize("ends", [(), (2,), (0, 2)], ids=["no end", "one end", "two ends"])
@pytest.mark.parametrize("form", LengthForm)
def test_full_width_finds_what_listing_every_answer_finds(form: LengthForm, ends: tuple[int, ...]):
    decoder = letters.decoder(SMALL)
    for alpha in (-1.0, 0.0, 0.6, 1.0, 3.0):
        wanted = brute_force(alpha, form, ends)[:8]
        beams = Beams(V ** (G - 1), best=8, length_alpha=alpha, form=form)
        [found] = beam_search(decoder, [PROMPT], Request(max_tokens=G, end_ids=ends), beams)
        assert [tuple(answer.completion.tokens.tolist()) for answer in found] == [tokens for _, tokens in wanted]
        np.testing.assert_allclose([answer.score for answer in found], [score for score, _ in wanted], atol=CLOSE)


def test_alpha_changes_the_answer_and_so_does_its_sign():
    # Otherwise the test above could pass with a penalty that is never applied.
    for form in LengthForm:
        best = {tuple(tokens for _, tokens in brute_force(alpha, form, (2,))[:8]) for alpha in (-1.0, 0.0, 3.0)}
        assert len(best) == 3


@pytest.mark.parametrize("window", [None, 6])
def test_scores_are_those_of_the_full_forward_pass_and_rows_are_those_alone(window: int | None):
    shape = letters.config(11, window=window)
    decoder = letters.decoder(shape)
    prompts = [np.array([10, 4, 4, 7, 1]), np.array([3]), np.array([10, 2, 5, 5, 5, 5, 0, 9, 8])]
    request, beams = Request(max_tokens=7), Beams(3, best=3, length_alpha=0.7)
    together = beam_search(decoder, prompts, request, beams)
    for prompt, answers in zip(prompts, together, strict=True):
        [alone] = beam_search(decoder, [prompt], request, beams)
        assert [a.completion.tokens.tolist() for a in answers] == [a.completion.tokens.tolist() for a in alone]
        assert sorted((a.score for a in answers), reverse=True) == [a.score for a in answers]
        for answer in answers:
            tokens = answer.completion.tokens
            nats = letters.log_probs(shape, prompt, tokens[None])[0]
            np.testing.assert_allclose(answer.completion.log_probs, nats, atol=CLOSE)
            np.testing.assert_allclose(answer.score, nats.sum() / ((5 + len(tokens)) / 6) ** 0.7, atol=CLOSE)
            assert answer.completion.finish is (Finish.END if tokens[-1] == 10 else Finish.LENGTH)
            assert 10 not in tokens[:-1]


def without_cache(prompt: np.ndarray, width: int, length: int) -> np.ndarray:
    """Beam search by whole forward passes over every continuation, without end tokens."""
    paths = np.zeros((1, 0), np.int32)
    for _ in range(length):
        paths = np.array([[*path, token] for path, token in itertools.product(paths.tolist(), range(11))], np.int32)
        totals = letters.log_probs(letters.config(11), prompt, paths).sum(axis=1)
        paths = paths[np.argsort(-totals, kind="stable")[:width]]
    return paths


def test_beams_with_a_cache_are_beams_without():
    prompt = np.array([10, 4, 7])
    [found] = beam_search(letters.decoder(letters.config(11)), [prompt], Request(6, end_ids=()), Beams(4, best=4))
    np.testing.assert_array_equal([a.completion.tokens for a in found], without_cache(prompt, 4, 6))


def test_one_beam_is_greedy():
    decoder = letters.decoder(letters.config(11))
    prompts = [np.array([10, first]) for first in range(8)]
    request = Request(max_tokens=12)
    greedy = generate(decoder, prompts, request)
    beams = beam_search(decoder, prompts, request, Beams(1))
    assert {answer.finish for answer in greedy} == {Finish.END, Finish.LENGTH}  # both ways to end are compared
    for expected, [found] in zip(greedy, beams, strict=True):
        np.testing.assert_array_equal(found.completion.tokens, expected.tokens)
        assert (found.completion.finish, found.completion.text) == (expected.finish, expected.text)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("form", LengthForm)
def test_early_stop_changes_no_answer(form: LengthForm, alpha: float):
    decoder = letters.decoder(letters.config(11))
    prompts = [np.array([10, first]) for first in range(8)]
    early, late = (
        beam_search(decoder, prompts, Request(max_tokens=12), Beams(3, 2, alpha, form, early_stop=stop))
        for stop in (True, False)
    )
    for one, other in zip(early, late, strict=True):
        assert [(a.completion.tokens.tolist(), a.score) for a in one] == [
            (a.completion.tokens.tolist(), a.score) for a in other
        ]
