"""A Decoder reads every token once, in whatever pieces, knows padding by count alone, and never runs out of slots."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.decode.loop import Finish
from lm.decode.strategy import GREEDY
from lm.model import transformer
from lm.model.cache import EMPTY
from lm.model.score import token_log_probs
from tests.decode.caches import assert_holds_the_same, held
from tests.decode.tiny import CONFIG, decoder, ids, request
from tests.model import variants

pytestmark = pytest.mark.slow  # compilations: about a second or more each

GENERATE = importlib.import_module("lm.decode.generate")  # the room has a function of that name
MIXED = [ids(15), ids(2, 1), ids(11, 2)]


def greedy(prompts, made=None, **changes):
    """Greedy answers to the prompts, in a batch of just so many rows."""
    made, asked = made or decoder(), request(**{"steps": GREEDY, "max_tokens": 12, **changes})
    return made.completions(made.advance(made.start(prompts, asked), asked.max_tokens))


def full_log_probs(prompt, answer, config=CONFIG):
    """Nats of the answer's tokens by the forward pass of training."""
    row_1T = np.concatenate([prompt, answer])[None]
    padded_1T = jnp.asarray(np.pad(row_1T, ((0, 0), (0, config.context_length - row_1T.shape[1]))), jnp.int32)
    logits_1TV = variants.logits(config, variants.parameters(config), padded_1T)
    scores_1T = token_log_probs(logits_1TV[:, :-1], padded_1T[:, 1:])
    return np.asarray(scores_1T)[0, len(prompt) - 1 : row_1T.shape[1] - 1]


@pytest.mark.parametrize("window", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_a_prompt_read_in_chunks_is_the_prompt_read_at_once(window, monkeypatch):
    made = decoder(window=window)
    prompts = [ids(30), ids(13, 1), ids(3, 2)]
    whole = made.prefill(prompts, request(max_tokens=16))
    monkeypatch.setattr(GENERATE, "CHUNK", 8)
    read = made.prefill(prompts, request(max_tokens=16))
    # The same float32 sums of up to 24 terms, in products of other shapes.
    np.testing.assert_allclose(read.logits_BV, whole.logits_BV, atol=1e-5)
    assert_holds_the_same(read.cache, whole.cache)
    kept = [len(held(read.cache, row)[0]) for row in range(3)]
    assert kept == [min(len(prompt), window or 30) for prompt in prompts]


def counting(monkeypatch):
    """A list that gets the number of positions of every pass through the model, on the device, as it runs."""
    passes, recall = [], transformer.recall

    def counted(cache, position_BT, window, fresh):
        jax.debug.callback(lambda count: passes.append(int(count)), jnp.sum(position_BT != EMPTY))
        return recall(cache, position_BT, window, fresh)

    monkeypatch.setattr(transformer, "recall", counted)
    return passes


def drained(passes):
    jax.effects_barrier()
    found = sorted(passes)
    passes.clear()
    return found


def test_token_passes_with_and_without_a_cache(monkeypatch):
    passes = counting(monkeypatch)
    made = decoder(context_length=95)  # of its own: a program that exists already is not traced again
    P, G = 9, 7
    [answer] = greedy([ids(P)], made, max_tokens=G)
    assert drained(passes) == [1] * (G - 1) + [P]  # P + G - 1: the last token is not read
    tokens = list(ids(P))
    for wanted in answer.tokens:
        [one] = greedy([np.array(tokens)], made, max_tokens=1)
        assert one.tokens.tolist() == [wanted]
        tokens.append(wanted)
    alone = drained(passes)
    assert alone == [P + i for i in range(G)]
    assert sum(alone) == G * P + G * (G - 1) // 2
    # A row that has ended is passed by, and so are all once the last one has.
    prompts = [ids(P), ids(4, 1)]
    before = greedy(prompts, made, max_tokens=G)
    drained(passes)
    ended = greedy(prompts, made, max_tokens=G, end_ids=(int(before[0].tokens[2]), int(before[1].tokens[4])))
    assert all(answer.finish is Finish.END for answer in ended)
    assert sum(drained(passes)) == sum(len(p) + len(a.tokens) - 1 for p, a in zip(prompts, ended, strict=True))


def test_padding_is_never_known_by_its_id():
    prompts = [np.zeros(7, np.int32), np.array([0, 5, 0, 0], np.int32), np.full(16, 256, np.int32), ids(5)]
    for prompt, answer in zip(prompts, greedy(prompts), strict=True):
        np.testing.assert_allclose(answer.log_probs, full_log_probs(prompt, answer.tokens), atol=1e-4)
    first, second = greedy([np.zeros(7, np.int32), np.zeros(8, np.int32)])
    assert np.abs(first.log_probs - second.log_probs).max() > 1e-4  # every 0 counts


@pytest.mark.parametrize("window", [None, 5])
def test_rows_of_mixed_lengths_are_each_row_alone(window):
    made = decoder(window=window)
    for prompt, together in zip(MIXED, greedy(MIXED, made), strict=True):
        [alone] = greedy([prompt], made)
        np.testing.assert_array_equal(together.tokens, alone.tokens)
        np.testing.assert_allclose(together.log_probs, alone.log_probs, atol=1e-5)


def test_greedy_tokens_are_those_of_the_full_forward():
    for prompt, answer in zip(MIXED, greedy(MIXED), strict=True):
        tokens = np.concatenate([prompt, answer.tokens])
        padded_1T = np.pad(tokens, (0, CONFIG.context_length - len(tokens)))[None]
        logits_TV = np.asarray(variants.logits(CONFIG, variants.parameters(CONFIG), padded_1T))[0]
        best_G = np.argmax(logits_TV[len(prompt) - 1 : len(tokens) - 1], axis=1)
        np.testing.assert_array_equal(answer.tokens, best_G)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_every_token_of_every_row_has_a_slot_of_its_own_to_the_last(seed):
    made, random = decoder(), np.random.default_rng(seed)
    lengths = [int(n) for n in random.integers(1, 20, 3)]
    asked = request(steps=GREEDY, max_tokens=int(random.integers(4, 17)))
    session = made.start([ids(n, row) for row, n in enumerate(lengths)], asked)
    for turn in range(12):
        session = made.advance(session, asked.max_tokens)
        cache = session.state.cache
        for row, length in enumerate(np.asarray(cache.length_B)):
            # Held once each, none overwritten: the answer's last token alone is not read yet.
            position_S = np.asarray(cache.position_BS)[row]
            assert sorted(position_S[position_S != EMPTY]) == list(range(length))
            assert length == len(session.context[row]) + asked.max_tokens - 1
        assert int(cache.next) <= cache.slots
        room = CONFIG.context_length - int(max(cache.length_B)) - asked.max_tokens
        more = [ids(int(random.integers(0, 6)), 10 * turn + row) for row in range(3)]
        if room < 6:
            break
        session = made.go_on(session, more)
    else:
        pytest.fail("the context was never full")
    with pytest.raises(UsageError, match="none can follow"):
        made.go_on(session, [ids(CONFIG.context_length)] * 3)
