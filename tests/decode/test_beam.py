import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import RunError, UsageError
from lm.decode import beam
from lm.decode.beam import Beams, LengthForm, Rules, beam_search
from lm.decode.generate import Decoder, generate
from lm.decode.loop import Finish
from lm.decode.request import Full, Request
from lm.decode.strategy import Temperature
from lm.model.config import CacheDtype
from tests.decode import letters
from tests.model import variants

pytestmark = pytest.mark.slow  # compilations: about a second or more each

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
    shape = letters.config(11, window=window, n_layer=2)
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


def answers(decoder: Decoder, prompts: list[np.ndarray], beams: Beams) -> list[list[tuple[list[int], float]]]:
    found = beam_search(decoder, prompts, Request(max_tokens=12), beams)
    return [[(answer.completion.tokens.tolist(), answer.score) for answer in row] for row in found]


def test_early_stop_changes_no_answer():
    decoder = letters.decoder(letters.config(11))
    prompts = [np.array([10, first]) for first in range(8)]
    for form, alpha, best in itertools.product(LengthForm, (-1.0, 0.0, 0.5, 1.0, 3.0), (1, 3)):
        early, late = (answers(decoder, prompts, Beams(3, best, alpha, form, early_stop=on)) for on in (True, False))
        assert early == late


def test_early_stop_stops_early(monkeypatch: pytest.MonkeyPatch):
    # The decoder's rows end long before the limit: what was searched says when the loop ended.
    searches = []
    monkeypatch.setattr(beam, "_answers", lambda decoder, search: searches.append(search))
    decoder = letters.decoder(letters.config(11))
    # Which first token's answer settles early differs with the rounding of random parameters: some of them do.
    for early_stop, first in itertools.product((True, False), range(10)):
        beam_search(decoder, [np.array([10, first])], Request(12, end_ids=(3, 7)), Beams(3, 1, early_stop=early_stop))
    steps = [int(search.step) for search in searches]
    assert min(steps[:10]) < 12
    assert steps[10:] == [12] * 10


def test_a_better_answer_of_the_same_length_as_the_limit_waits_for_its_bound():
    # The bound with the wrong length, as if the next token were the last, stops too soon for a large alpha.
    decoder = letters.decoder(letters.config(11))
    prompts = [np.array([10, first]) for first in range(8)]
    lengths = {len(row[0][0]) for row in answers(decoder, prompts, Beams(3, 1, 3.0, LengthForm.POWER))}
    assert max(lengths) == 12


@pytest.mark.parametrize("cache_dtype", CacheDtype)
def test_int8_scales_go_with_their_beams(cache_dtype: CacheDtype):
    shape = letters.config(11)
    decoder = Decoder(shape, variants.parameters(shape), letters.Letters(11), cache_dtype=cache_dtype)
    [found] = beam_search(decoder, [np.array([10, 4, 7])], Request(8), Beams(4, best=4))
    for answer in found:
        nats = letters.log_probs(shape, np.array([10, 4, 7]), answer.completion.tokens[None])[0]
        # int8 keys and values shift logits of this model by some hundredths; keys of another beam by whole units.
        np.testing.assert_allclose(answer.completion.log_probs, nats, atol=0.2)


def test_the_context_is_a_limit():
    decoder = letters.decoder(letters.config(11))
    prompt = np.resize(np.array([10, 4, 7]), 29)
    with pytest.raises(UsageError, match="Ask for at most 4"):
        beam_search(decoder, [prompt], Request(8), Beams(2))
    [[cut]] = beam_search(decoder, [prompt], Request(8, end_ids=(), full=Full.STOP), Beams(2))
    assert (len(cut.completion.tokens), cut.completion.finish) == (4, Finish.CONTEXT)
    [[none]] = beam_search(decoder, [np.resize(prompt, 33)], Request(8, full=Full.STOP), Beams(2))
    assert (len(none.completion.tokens), none.completion.finish, none.score) == (0, Finish.CONTEXT, 0.0)


def test_the_vocabulary_is_never_sorted():
    decoder = letters.decoder(letters.config(11))
    read = decoder.prefill([np.array([10, 4])], Request(4))
    rules = Rules(read.limits, jnp.ones(18), jnp.asarray(True))
    text = str(jax.make_jaxpr(lambda read: beam._begin(read, rules, room=16, width=1, best=1))(read))
    assert "top_k" in text
    assert not re.search(r"\bsort\[", text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 0}, "beams: 0 beams"),
        ({"width": 2, "best": 3}, "best: the best 3 of 2"),
        ({"width": 2, "best": 0}, "best: the best 0 of 2"),
        ({"length_alpha": float("nan")}, "length_alpha: nan"),
    ],
)
def test_wrong_numbers_are_refused(wrong: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Beams(**wrong)


@pytest.mark.parametrize("wrong", [{"steps": (Temperature(0.7),)}, {"stops": (b"a",)}, {"samples": 2}], ids=str)
def test_what_a_search_has_not_is_refused(wrong: dict[str, Any]):
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}: beam search"):
        beam_search(letters.decoder(letters.config(11)), [PROMPT], Request(4, **wrong))


def test_logits_that_are_not_numbers_are_an_error():
    shape = letters.config(11)
    params = {**variants.parameters(shape), "embedding": jnp.full((11, 16), jnp.nan)}
    with pytest.raises(RunError, match="not numbers"):
        beam_search(Decoder(shape, params, letters.Letters(11)), [PROMPT], Request(4))
