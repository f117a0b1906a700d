"""How answers end: end tokens, stop strings over any tokens, lengths, and the edge of the context."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import RunError, UsageError
from lm.data.tokenizer import load_tokenizer, train_bpe
from lm.decode import strategy
from lm.decode.generate import STOP_CHECK, Decoder
from lm.decode.loop import Finish
from lm.decode.request import Full, Request
from lm.decode.settings import Settings
from lm.decode.text import Printer, first_stop, held_back
from tests.decode.tiny import CONFIG, SAMPLED, answers, decoder, ids, request
from tests.model import variants

pytestmark = pytest.mark.slow  # compilations: about a second or more each

PROMPTS = ["abc", "a longer prompt", ""]


def whole():
    """Answers that nothing ends early."""
    return answers(PROMPTS)


def same(ours, wanted, length):
    assert np.array_equal(ours.tokens, wanted.tokens[:length])
    np.testing.assert_array_equal(ours.log_probs, wanted.log_probs[:length])


def test_without_an_end_every_answer_has_the_length_that_was_asked_for():
    for answer in whole():
        assert (len(answer.tokens), answer.finish) == (40, Finish.LENGTH)
        assert len(answer.log_probs) == len(answer.strategy_log_probs) == 40
        assert answer.text == bytes(answer.tokens.tolist())


def test_any_end_token_ends_its_row_alone_and_for_good():
    before = whole()
    # The 6th token of the first row and the 20th of the second, whatever else they end earlier.
    ends = tuple(sorted({int(before[0].tokens[5]), int(before[1].tokens[19])}))
    after = answers(PROMPTS, end_ids=ends)
    places = [next((k for k, token in enumerate(answer.tokens) if token in ends), None) for answer in before]
    assert places[0] is not None
    assert places[0] < places[1]
    for ours, wanted, place in zip(after, before, places, strict=True):
        if place is None:
            assert ours.finish is Finish.LENGTH
            same(ours, wanted, 40)
        else:
            assert ours.finish is Finish.END
            same(ours, wanted, place + 1)  # with the end token, and nothing after it


def test_an_end_token_in_a_prompt_ends_nothing():
    eos = decoder().tokenizer.eos_id
    prompt = np.array([eos, 97, eos, eos], np.int32)
    [ours] = answers([prompt], end_ids=None)
    [wanted] = answers([prompt])
    place = next((k for k, token in enumerate(wanted.tokens) if token == eos), 39)
    assert place > 0
    same(ours, wanted, place + 1)


@pytest.mark.parametrize("at", [0, 1, STOP_CHECK - 2, STOP_CHECK - 1, STOP_CHECK, STOP_CHECK + 5, 36])
def test_a_stop_string_is_found_wherever_it_lies(at):
    # Looks at the text come after tokens 17, 33 and so on: strings on either side, and across.
    before = whole()
    stop = before[0].text[at : at + 4]
    for ours, wanted in zip(answers(PROMPTS, stops=(b"not there", stop)), before, strict=True):
        cut = wanted.text.find(stop)
        if cut < 0:
            assert ours.finish is Finish.LENGTH
            same(ours, wanted, 40)
        else:
            assert (ours.finish, ours.text) == (Finish.STOP, wanted.text[:cut])
            same(ours, wanted, cut + 4)  # the token that completed it is the last


def test_the_earliest_of_several_stop_strings_counts_and_an_end_before_it_more():
    before = whole()[0]
    late, early = before.text[20:23], before.text[8:10]
    assert answers(PROMPTS, stops=(late, early))[0].text == before.text[: before.text.find(early)]
    end = int(before.tokens[4])
    ours = answers(PROMPTS, stops=(late, early), end_ids=(end,))[0]
    assert ours.finish is Finish.END
    same(ours, before, before.tokens.tolist().index(end) + 1)


def test_a_stop_string_over_the_middle_of_bpe_tokens(tmp_path):
    train_bpe(["the theme of the thesis is these three threads there " * 20], 290, tmp_path / "t.json")
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    config = variants.replace(CONFIG, vocab_size=tokenizer.vocab_size)
    made = Decoder(config, variants.parameters(config), tokenizer)
    # Only tokens of several bytes, so that every border lies inside some.
    bias = {i: 0.0 if size > 1 else -np.inf for i, size in enumerate(tokenizer.token_bytes)}
    steps = Settings(logit_bias=bias).steps(config.vocab_size)
    [before] = answers(["the"], made, steps=steps, max_tokens=30)
    pieces = [tokenizer.decode([token]) for token in before.tokens]
    assert all(len(piece) > 1 for piece in pieces)
    stop = pieces[9][-1:] + pieces[10] + pieces[11][:1]
    cut = before.text.find(stop)
    [ours] = answers(["the"], made, steps=steps, max_tokens=30, stops=(stop,))
    assert (ours.finish, ours.text) == (Finish.STOP, before.text[:cut])
    needed = next(k for k in range(31) if stop in b"".join(pieces[:k]))
    same(ours, before, needed)


def test_the_edge_of_the_context_is_an_error_or_an_end_and_never_a_clamp():
    prompts = [ids(90), ids(20)]
    with pytest.raises(UsageError, match=r"prompt 0 fills 90 tokens of context and 40 more .* 96 .* at most 7"):
        answers(prompts)
    cut, other = answers(prompts, full=Full.STOP)
    # 6 places are left, and the last token of an answer needs none.
    assert (cut.finish, len(cut.tokens)) == (Finish.CONTEXT, 7)
    assert (other.finish, len(other.tokens)) == (Finish.LENGTH, 40)
    full = variants.logits(CONFIG, variants.parameters(CONFIG), np.concatenate([ids(90), cut.tokens])[None, :96])
    np.testing.assert_allclose(cut.log_probs, log_softmax(full[0])[89:96, :][np.arange(7), cut.tokens], atol=1e-4)


def log_softmax(logits_TV):
    return np.asarray(jax.nn.log_softmax(jnp.asarray(logits_TV), axis=-1))


def test_log_probabilities_are_those_of_the_full_forward_raw_and_processed():
    settings = Settings(temperature=0.7, top_k=50, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.1)
    steps = settings.steps(CONFIG.vocab_size)
    rows = [ids(5), ids(17, 1)]
    processed = jax.jit(strategy.apply)
    for prompt, answer in zip(rows, answers(rows, steps=steps), strict=True):
        tokens = np.concatenate([prompt, answer.tokens])
        padded_1T = np.pad(tokens, (0, CONFIG.context_length - len(tokens)))[None]
        logits_TV = np.asarray(variants.logits(CONFIG, variants.parameters(CONFIG), padded_1T))[0]
        at_G = len(prompt) - 1 + np.arange(40)
        counts_GV = np.stack([np.bincount(tokens[: at + 1], minlength=257) for at in at_G]).astype(np.int32)
        raw_G = log_softmax(logits_TV[at_G])[np.arange(40), answer.tokens]
        after_G = log_softmax(processed(steps, logits_TV[at_G], counts_GV))[np.arange(40), answer.tokens]
        np.testing.assert_allclose(answer.log_probs, raw_G, atol=1e-4)
        # A temperature of .7 and penalties multiply the difference of the logits by less than 2.
        np.testing.assert_allclose(answer.strategy_log_probs, after_G, atol=2e-4)
        assert (after_G > -np.inf).all()


def test_logits_that_are_not_numbers_are_an_error_and_no_text():
    params = jax.tree.map(lambda x: x * jnp.nan, variants.parameters(CONFIG))
    broken = Decoder(CONFIG, params, decoder().tokenizer)
    with pytest.raises(RunError, match="the logits before token 0 of answer 0 are not numbers"):
        answers(PROMPTS, broken)


def test_an_empty_prompt_of_ids_is_refused_and_an_empty_text_begins_a_document():
    assert len(answers([""])[0].tokens) == 40
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        answers([ids(3), np.array([], np.int32)])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_tokens": 0}, "0 tokens"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is"),
        ({"stops": (b"a", b"")}, "empty"),
        ({"end_ids": (-1,)}, "no token -1"),
        ({"end_ids": (3, 257)}, "no token 257"),
        ({"samples": 0}, "0 samples"),
    ],
)
def test_a_request_out_of_range_is_one_clear_error(changes, told):
    with pytest.raises(UsageError, match=told):
        answers(["a"], **changes)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [([], "no prompt"), ([np.array([257])], "outside the vocabulary"), (["\udc80"], "prompt 0 is not Unicode")],
)
def test_a_prompt_that_is_none_is_one_clear_error(prompts, told):
    with pytest.raises(UsageError, match=told):
        answers(prompts)


def test_a_session_that_has_gone_on_says_so():
    made = decoder()
    first = made.start(made.encode([*PROMPTS, ""]), request())
    newer = made.advance(first, 5)
    with pytest.raises(UsageError, match="gone on already"):
        made.advance(first, 10)
    with pytest.raises(UsageError, match="gone on already"):
        made.completions(first)
    assert all(len(answer.tokens) == 5 for answer in made.completions(newer))


def test_samples_of_a_prompt_depend_on_its_number_and_not_on_its_neighbours():
    first, second = PROMPTS[:2]
    together, mirrored = answers([first, second], samples=2), answers([first, first], samples=2)
    assert len({answer.text for answer in (*together, *mirrored[2:])}) == 6
    assert [answer.text for answer in mirrored[:2]] == [answer.text for answer in together[:2]]
    made = decoder()
    session = made.start(made.encode([second, first]), request(samples=2), first=1)
    piece = made.completions(made.advance(session, 40))
    assert [answer.text for answer in piece[:2]] == [answer.text for answer in together[2:]]


class TestPrinter:
    STOPS = (b"stop", b"tops!")

    def test_what_may_begin_a_stop_string_is_held_back(self):
        assert [held_back(text, self.STOPS) for text in (b"", b"a", b"s", b"as", b"sto", b"tops", b"stx")] == [
            0, 0, 1, 1, 3, 4, 0,
        ]  # fmt: skip

    def test_the_earliest_stop_string_is_found(self):
        assert first_stop(b"a tops! stop", self.STOPS) == 2
        assert first_stop(b"a stops!", self.STOPS) == 2
        assert first_stop(b"sto ps", self.STOPS) is None

    @pytest.mark.parametrize("text", ["naïve — 漢字 🙂 stoic top", "st stx", "ends with sto"])
    def test_pieces_make_the_text_and_never_a_cut_character(self, text):
        whole, printer = text.encode(), Printer(self.STOPS)
        shown = [printer.show(whole[:end], final=False) for end in range(len(whole) + 1)]
        assert "�" not in "".join(shown)
        assert "".join(shown) + printer.show(whole, final=True) == text

    def test_no_part_of_a_stop_string_is_shown(self):
        printer = Printer(self.STOPS)
        assert printer.show(b"abc sto", final=False) == "abc "
        assert printer.show(b"abc ", final=True) == ""  # it was one: the answer ends before it

    def test_a_character_cut_for_good_is_replaced(self):
        printer = Printer()
        assert printer.show("é".encode()[:1], final=False) == ""
        assert printer.show("é".encode()[:1], final=True) == "�"

    def test_replacement_characters_of_a_tokenizer_wait_for_the_whole_character(self):
        printer = Printer()
        assert printer.show("a��".encode(), final=False) == "a"
        assert printer.show("a漢".encode(), final=False) == "漢"


def test_requests_are_values():
    assert dataclasses.replace(Request(steps=SAMPLED), seed=2) == Request(steps=SAMPLED, seed=2)
