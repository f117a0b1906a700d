import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.decode import loop
from lm.decode.generate import generate
from lm.decode.loop import Finish
from lm.decode.request import Completion, Request
from lm.decode.strategy import RepetitionPenalty, Temperature
from lm.decode.vote import By, best_of, by_prompt, majority_vote
from tests.decode import letters

pytestmark = pytest.mark.slow  # compilations: about a second or more each


def answer(text: str, *log_probs: float) -> Completion:
    nats = np.array(log_probs, np.float32)
    return Completion(np.array([ord(c) for c in text], np.int32), nats, nats, text.encode(), Finish.LENGTH)


def test_the_best_by_total_and_by_mean():
    short, long = answer("a", -1.0), answer("bbb", -0.5, -0.5, -0.5)
    assert best_of([long, short], By.TOTAL) is short
    assert best_of([short, long], By.MEAN) is long
    assert best_of([answer(""), long]) is long  # an answer without tokens is never the best
    first, second = answer("x", -1.0), answer("y", -1.0)
    assert best_of([first, second]) is first


def test_votes_are_counted_by_value_and_ties_go_to_the_larger_probability():
    few, many = answer("7", -0.1), [answer("8 or so", -5.0), answer("8", -6.0)]
    vote = majority_vote([few, *many], lambda a: int(a.text[:1]))
    assert (vote.value, vote.answer, vote.votes) == (8, many[0], {7: 1, 8: 2})
    # 2 against 2: .2 + .2 is more than .3, which was drawn twice and counts once.
    tie = [answer("7", np.log(0.3)), answer("7", np.log(0.3)), answer("8a", np.log(0.2)), answer("8b", np.log(0.2))]
    assert majority_vote(tie, lambda a: int(a.text[:1])).value == 8


def test_answers_without_a_value_have_no_vote():
    answers = [answer("?", -0.1), answer("?", -0.1), answer("3", -9.0)]
    assert majority_vote(answers, lambda a: a.text if a.text.isdigit() else None).value == b"3"
    nobody = majority_vote(answers, lambda a: None)
    assert (nobody.value, nobody.votes, nobody.answer) == (None, {}, answers[0])


def test_no_answer_is_refused():
    with pytest.raises(UsageError, match="no answer"):
        best_of([])
    with pytest.raises(UsageError, match="no answer"):
        majority_vote([], lambda a: 1)


@pytest.mark.parametrize("window", [None, 4])
def test_samples_of_a_prompt_are_those_of_the_prompt_repeated_and_it_is_read_once(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    decoder = letters.decoder(letters.config(11, window=window))
    prompts = [np.array([10, 4, 4, 7, 1, 2]), np.array([3])]
    request = Request(max_tokens=6, steps=(RepetitionPenalty(1.5), Temperature(1.0)), samples=3)
    read = []
    prefill = loop.prefill
    monkeypatch.setattr(loop, "prefill", lambda *args, **more: read.append(args[2].shape) or prefill(*args, **more))
    answers = by_prompt(generate(decoder, prompts, request), 3)
    assert read == [(2, 16)]  # a row a prompt
    assert [len(group) for group in answers] == [3, 3]
    assert len({tuple(a.tokens.tolist()) for a in answers[0]}) > 1
    for prompt, group in zip(prompts, answers, strict=True):
        for found in group:
            nats = letters.log_probs(decoder.config, prompt, found.tokens[None])[0]
            np.testing.assert_allclose(found.log_probs, nats, atol=1e-4)
    fewer = by_prompt(generate(decoder, prompts, Request(6, request.steps, samples=2)), 2)
    for group, part in zip(answers, fewer, strict=True):  # a sample does not depend on how many there are
        for found, same in zip(group, part, strict=False):
            np.testing.assert_array_equal(found.tokens, same.tokens)
