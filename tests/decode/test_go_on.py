"""Another turn from the cache is the same as one long prompt, whatever ended the answers before."""

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.decode.generate import Decoder
from lm.decode.loop import Finish
from lm.decode.settings import Settings
from lm.decode.strategy import GREEDY
from lm.model.cache import together
from lm.model.config import CacheDtype, Mixer, Positions
from tests.decode.tiny import CONFIG, ROWS, decoder, ids, request
from tests.model import variants

pytestmark = pytest.mark.slow  # compilations: about a second or more each

FIRST = [ids(3), ids(11, 1), ids(7, 2), ids(16, 3)]
SECOND = [ids(9, 4), ids(1, 5), np.array([], np.int32), ids(14, 6)]
KINDS = {
    "model": {},
    "window": {"window": 6},
    "int8": {"cache_dtype": CacheDtype.INT8},
    "window-int8": {"window": 6, "cache_dtype": CacheDtype.INT8},
    "lstm": {"mixer": Mixer.LSTM, "n_head": 1, "positions": Positions.NONE},
}


def two_turns(made, first, second):
    """Answers of the second turn, and the whole of what was before them, a row an array."""
    session = made.advance(made.start(FIRST, first), first.max_tokens)
    before = made.completions(session)
    session = made.advance(made.go_on(session, SECOND, second), second.max_tokens)
    context = [np.concatenate(parts) for parts in zip(FIRST, [a.tokens for a in before], SECOND, strict=True)]
    return before, made.completions(session), [part.astype(np.int32) for part in context]


def in_one(made, context, asked):
    return made.completions(made.advance(made.start(context, asked), asked.max_tokens))


@pytest.mark.parametrize(
    "kind",
    ["model", "window", "window-int8", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("int8", "lstm"))],
)
def test_two_turns_are_one_long_prompt(kind):
    made = decoder(**KINDS[kind])
    # Sampled at first, so that rows end at different lengths: by an end token, or not at all.
    ends = tuple(range(0, 256, 12))
    first = request(max_tokens=16, end_ids=ends, seed=5 if kind == "lstm" else 3)
    before, ours, context = two_turns(made, first, request(max_tokens=16, steps=GREEDY))
    lengths = {len(answer.tokens) for answer in before}
    assert len(lengths) > 2
    assert max(lengths) - min(lengths) > 6  # more than the window: what a row needs has left it
    wanted = in_one(made, context, request(max_tokens=16, steps=GREEDY))
    # int8 rounds a key once, whichever way it came into the cache, but a prompt sees its own keys unrounded.
    tolerance = 1e-4 if "int8" not in kind else 0.1
    for mine, whole in zip(ours, wanted, strict=True):
        if "int8" not in kind:
            assert np.array_equal(mine.tokens, whole.tokens)
        same = int(np.argmin([*(mine.tokens == whole.tokens), False]))
        assert same > 0
        np.testing.assert_allclose(mine.log_probs[:same], whole.log_probs[:same], atol=tolerance)


@pytest.mark.parametrize("kind", ["model", "window", pytest.param("lstm", marks=pytest.mark.full)])
def test_after_a_stop_string_the_next_turn_sees_nothing_beyond_it(kind):
    made = decoder(**KINDS[kind])
    # One answer of 16 without a look at the text; then the same, cut early by what it holds.
    plain = in_one(made, FIRST, request(max_tokens=16))
    stop = plain[0].text[2:4]
    before, ours, context = two_turns(made, request(max_tokens=16, stops=(stop,)), request(max_tokens=16, steps=GREEDY))
    assert (before[0].finish, len(before[0].tokens)) == (Finish.STOP, plain[0].text.find(stop) + 2)
    assert any(answer.finish is Finish.LENGTH for answer in before)
    for mine, whole in zip(ours, in_one(made, context, request(max_tokens=16, steps=GREEDY)), strict=True):
        assert np.array_equal(mine.tokens, whole.tokens)
        np.testing.assert_allclose(mine.log_probs, whole.log_probs, atol=1e-4)


def test_a_row_that_has_ended_stays_as_it_is_while_others_go_on():
    made = decoder()
    ends = tuple(range(0, 256, 12))
    session = made.advance(made.start(FIRST, request(max_tokens=16, end_ids=ends)), 5)
    ended_B = np.asarray(session.state.finish_B) == Finish.END
    assert 0 < ended_B.sum() < ROWS
    cache = together(session.state.cache)
    slots = int(cache.next)
    before = [np.asarray(x) for x in (cache.k_LBKSC[:, ended_B, :, :slots], cache.position_BS[ended_B])]
    answers = made.completions(session)
    session = made.advance(session, 16)
    cache = together(session.state.cache)
    assert int(cache.next) > slots
    for was, now in zip(before, (cache.k_LBKSC[:, ended_B, :, :slots], cache.position_BS[ended_B]), strict=True):
        assert np.array_equal(was, np.asarray(now))
    for was, now, ended in zip(answers, made.completions(session), ended_B, strict=True):
        assert len(now.tokens) == (len(was.tokens) if ended else len(now.tokens))
        assert np.array_equal(now.tokens[: len(was.tokens)], was.tokens)


def test_penalties_of_a_later_turn_know_the_earlier_ones():
    made = decoder()
    # So strong that no token comes twice while there are others.
    steps = Settings(temperature=0.0, presence_penalty=1e4).steps(CONFIG.vocab_size)
    _, ours, context = two_turns(made, request(max_tokens=16), request(max_tokens=16, steps=steps))
    for answer, seen in zip(ours, context, strict=True):
        assert len(set(answer.tokens.tolist())) == 16
        assert not set(answer.tokens.tolist()) & set(seen.tolist())


def test_another_turn_needs_a_prompt_for_each_row_and_room():
    made = decoder()
    session = made.start(FIRST, request(max_tokens=16))
    with pytest.raises(UsageError, match="3 prompts for 4 rows"):
        made.go_on(session, SECOND[:3])
    with pytest.raises(UsageError, match="tokens of context"):
        made.go_on(session, [ids(90)] * 4)


def test_twenty_lengths_and_any_numbers_compile_once_a_bucket():
    from lm.decode import loop

    config = variants.replace(CONFIG, d_ff=20)  # a shape that no other test has compiled
    made = Decoder(config, variants.parameters(config), decoder().tokenizer)
    programs = loop.prefill_program(), loop.begin, loop.advance_program(1)
    before = [program._cache_size() for program in programs]
    random = np.random.default_rng(0)
    for length in range(1, 33, 32 // 20):
        numbers = {"temperature": random.choice([0.0, 0.5, 1, 2.0]), "top_k": random.choice([0, 1, 40, 1000]),
                   "top_p": random.choice([0, 0.3, 0.9, 1, 1.0]), "min_p": random.choice([0, 0.1, 1])}  # fmt: skip
        asked = request(max_tokens=int(random.integers(2, 17)), steps=Settings(**numbers).steps(config.vocab_size),
                        seed=length, end_ids=(length,))  # fmt: skip
        made.advance(made.start([ids(length)], asked), asked.max_tokens)
    # Two buckets of prompts, 16 and 32, with one number of slots, 64.
    assert [program._cache_size() - old for program, old in zip(programs, before, strict=True)] == [2, 1, 1]
