"""Decoding behind an encoder: the source is read once, and every way to answer is that of the whole forward pass."""

import dataclasses

import jax
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.data.tokenizer import ByteTokenizer
from lm.decode.beam import Beams, beam_search
from lm.decode.compress import Compressor
from lm.decode.generate import Decoder, generate
from lm.decode.request import Full, Request
from lm.decode.speculate import speculate
from lm.model.config import CacheDtype, ModelConfig, Norm, NormPlacement, Positions
from lm.model.parts import Encoder
from lm.model.score import BEFORE
from tests.decode import letters
from tests.model import variants

S, ANSWER = 6, 9
SHAPE = letters.config(11, context_length=S - 1 + ANSWER, encoder=Encoder(2, S))
# Shorter than the source, as long, longer than it, and of one token: rows of one batch.
PROMPTS = [np.array(ids, np.int32) for ids in ([10, 4, 4], [10, 2, 5, 5, 3, 1], [10, 2, 0, 9, 8, 7, 7, 1], [10])]
REQUEST = Request(max_tokens=ANSWER, end_ids=())
CLOSE = 1e-4  # sums of 16 to 24 float32 terms in products of other shapes
VARIANTS = {
    "rope": {"n_layer": 2},
    "learned": {"positions": Positions.LEARNED, "norm": Norm.LAYERNORM, "bias": True, "n_kv_head": 2, "qk_norm": True},
    "post": {"norm_placement": NormPlacement.POST, "positions": Positions.SINUSOIDAL, "tied_embedding": False},
    "parallel": {"parallel_block": True, "positions": Positions.NONE, "attention_softcap": 2.0},
}


def made(config: ModelConfig = SHAPE, **how) -> Decoder:
    return Decoder(config, variants.parameters(config), letters.Letters(config.vocab_size), **how)


def full_logits(config: ModelConfig, prompt: np.ndarray, answer: np.ndarray) -> np.ndarray:
    """The logits [G, V] of each token of an answer, by one forward pass over source and answer."""
    source = prompt[-S:]
    row_T = np.concatenate([np.zeros(S - len(source), np.int32), source, answer, np.zeros(ANSWER - len(answer))])
    segments_T = np.where(np.arange(len(row_T)) < S - len(source), BEFORE, BEFORE + 1)
    row_BT, segments_BT = (np.asarray(x[None, :-1], np.int32) for x in (row_T, segments_T))
    return np.asarray(variants.logits(config, variants.parameters(config), row_BT, segments_BT))[0, : len(answer)]


@pytest.mark.parametrize(
    ("name", "unstack"),
    [
        ("rope", True),
        pytest.param("learned", False, marks=pytest.mark.slow),
        *(pytest.param(name, flag, marks=pytest.mark.full) for name in VARIANTS for flag in (True, False)),
    ],
)
def test_cached_logits_are_those_of_the_full_forward_at_every_step(name: str, unstack: bool):
    config = variants.replace(SHAPE, **VARIANTS[name])
    decoder = made(config, unstack=unstack)
    for prompt, answer in zip(PROMPTS, generate(decoder, PROMPTS, REQUEST), strict=True):
        logits_GV = full_logits(config, prompt, answer.tokens)
        np.testing.assert_array_equal(answer.tokens, np.argmax(logits_GV, axis=1))
        nats_GV = np.asarray(jax.nn.log_softmax(logits_GV))
        np.testing.assert_allclose(answer.log_probs, nats_GV[np.arange(ANSWER), answer.tokens], atol=CLOSE)


@pytest.mark.slow
def test_a_row_of_a_batch_is_the_row_alone_and_int8_is_near():
    decoder = made()
    together = generate(decoder, PROMPTS, REQUEST)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        [alone] = generate(decoder, [prompt], REQUEST)
        np.testing.assert_array_equal(alone.tokens, answer.tokens)
        np.testing.assert_allclose(alone.log_probs, answer.log_probs, atol=CLOSE)
    small = made(cache_dtype=CacheDtype.INT8)
    read, near = (one.prefill(PROMPTS, REQUEST) for one in (decoder, small))
    assert near.cache.source.k_LBKSC.dtype == np.int8
    error = np.abs(np.asarray(read.logits_BV) - np.asarray(near.logits_BV)).max()
    assert 0 < error < 0.1  # half of 1/127 of the largest number of a head, through one layer; logits are of order 3


@pytest.mark.slow
def test_the_decoder_answers_as_far_as_it_was_trained():
    decoder = made()
    with pytest.raises(UsageError, match=f"{ANSWER + 1} more are asked for: over the {ANSWER} of the model"):
        generate(decoder, PROMPTS, dataclasses.replace(REQUEST, max_tokens=ANSWER + 1))
    cut = generate(decoder, PROMPTS, dataclasses.replace(REQUEST, max_tokens=ANSWER + 1, full=Full.SHORTER))
    assert {len(answer.tokens) for answer in cut} == {ANSWER}


@pytest.mark.slow
def test_another_turn_has_the_newest_tokens_as_its_source():
    decoder, short = made(), dataclasses.replace(REQUEST, max_tokens=4)
    session = decoder.advance(decoder.start(PROMPTS, short), 4)
    before = decoder.completions(session)
    more = [np.array([3, 1], np.int32)] * len(PROMPTS)
    after = decoder.completions(decoder.advance(decoder.go_on(session, more, REQUEST), ANSWER))
    context = [np.concatenate([p, a.tokens, m]) for p, a, m in zip(PROMPTS, before, more, strict=True)]
    for ours, whole in zip(after, generate(decoder, context, REQUEST), strict=True):
        np.testing.assert_array_equal(ours.tokens, whole.tokens)
        np.testing.assert_allclose(ours.log_probs, whole.log_probs, atol=CLOSE)


@pytest.mark.slow
def test_beams_and_samples_share_a_source():
    decoder = made()
    for prompt, answers in zip(PROMPTS, beam_search(decoder, PROMPTS, REQUEST, Beams(3, best=3)), strict=True):
        assert len(answers) == 3
        for answer in answers:
            tokens = answer.completion.tokens
            nats_GV = np.asarray(jax.nn.log_softmax(full_logits(SHAPE, prompt, tokens)))
            np.testing.assert_allclose(answer.score, nats_GV[np.arange(ANSWER), tokens].sum(), atol=ANSWER * CLOSE)
    twice = generate(decoder, PROMPTS, dataclasses.replace(REQUEST, samples=2))
    once = generate(decoder, PROMPTS, REQUEST)
    assert [a.tokens.tolist() for a in twice] == [a.tokens.tolist() for a in once for _ in range(2)]


@pytest.mark.full
def test_a_draft_has_an_encoder_too_or_is_refused():
    target, draft = made(), made(variants.replace(SHAPE, d_ff=16, encoder=Encoder(1, S - 2), context_length=20))
    found = speculate(target, draft, PROMPTS, REQUEST, 3)
    for ours, theirs in zip(found.completions, generate(target, PROMPTS, REQUEST), strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    plain = made(variants.replace(SHAPE, encoder=None))
    for pair, told in (((target, plain), "the target has an encoder"), ((plain, target), "the draft has an encoder")):
        with pytest.raises(UsageError, match=f"{told} and the .* has none"):
            speculate(*pair, PROMPTS, REQUEST, 3)


@pytest.mark.full
def test_what_is_compressed_comes_back():
    config = variants.tiny(vocab_size=257, n_layer=1, encoder=Encoder(1, 3))
    compressor, text = Compressor(config, variants.parameters(config), ByteTokenizer()), b"The cafe is closed." * 3
    file, report = compressor.compress(text, blocks=3)
    assert compressor.decompress(file) == text
    assert report.payload_bits <= report.quantised_bits + 2 * 3
    with pytest.raises(UsageError, match="4 is not between 1 and the source length 3"):
        compressor.compress(text, overlap=4)
