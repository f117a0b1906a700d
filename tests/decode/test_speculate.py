from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from lm.base.errors import UsageError
from lm.decode import speculate as module
from lm.decode import strategy
from lm.decode.generate import Decoder, generate
from lm.decode.loop import Finish
from lm.decode.request import Request
from lm.decode.speculate import judge, speculate
from lm.decode.strategy import RepetitionPenalty, Strategy, Temperature, TopP
from lm.model.config import ModelConfig, Positions
from tests.decode import letters
from tests.model import variants

pytestmark = pytest.mark.slow  # compilations: about a second or more each

PROMPTS = [np.array([10, 4, 4, 7, 1]), np.array([3]), np.array([10, 2, 5, 5, 5, 5, 0, 9, 8]), np.array([10, 6])]
# Below it the test fails; the seeds are fixed, so that a right rule passes always or never.
UNLIKELY = 1e-3
# A wrong rule must be told from the right one with no doubt at all.
IMPOSSIBLE = 1e-12


@pytest.mark.parametrize(
    "changes",
    [{"window": 4}, {"positions": Positions.LEARNED}, pytest.param({}, marks=pytest.mark.full)],
    ids=str,
)
def test_greedy_is_the_targets(changes: dict[str, Any]):
    target = letters.decoder(letters.config(11, n_layer=2, **changes))
    draft = letters.decoder(letters.config(11, **changes))
    request = Request(max_tokens=12)
    found = speculate(target, draft, PROMPTS, request, 3)
    for ours, theirs in zip(found.completions, generate(target, PROMPTS, request), strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
        assert (ours.finish, ours.text) == (theirs.finish, theirs.text)


def test_rows_are_those_alone_though_they_accept_different_counts():
    target, draft = letters.decoder(letters.config(11)), letters.decoder(letters.config(11, d_ff=16))
    request = Request(max_tokens=12, end_ids=(), steps=(Temperature(1.0),))
    together = speculate(target, draft, PROMPTS, request, 3)
    assert len(set(together.passes.tolist())) > 1  # so that rows ran apart
    for row, (prompt, ours) in enumerate(zip(PROMPTS, together.completions, strict=True)):
        alone = speculate(target, draft, [prompt], request, 3, first=row)
        np.testing.assert_array_equal(ours.tokens, alone.completions[0].tokens)
        assert (together.passes[row], together.accepted[row]) == (alone.passes[0], alone.accepted[0])
        nats = letters.log_probs(target.config, prompt, ours.tokens[None])[0]
        np.testing.assert_allclose(ours.log_probs, nats, atol=1e-4)


def test_a_draft_that_is_the_target_is_always_right():
    model = letters.decoder(letters.config(11))
    found = speculate(model, model, PROMPTS, Request(max_tokens=12, end_ids=()), 3)
    assert found.acceptance_rate == 1.0
    # The prompt's pass gives 1 token, two more 4 each, and the last one the 3 that are left, 2 of them drafted.
    np.testing.assert_array_equal(found.passes, 4)
    np.testing.assert_array_equal(found.drafted, 3 + 3 + 2)
    assert found.passes_per_token == 4 / 12


def joint(shape: ModelConfig, prompt: np.ndarray, steps: Strategy, answers: np.ndarray, ends: tuple[int, ...]) -> Any:
    """Probabilities of all answers of G tokens, those after an end token added up, by whole forward passes."""
    N, G = answers.shape
    tokens_NT = np.concatenate([np.broadcast_to(prompt, (N, len(prompt))), answers], axis=1)
    logits_NTV = variants.logits(shape, variants.parameters(shape), jnp.asarray(tokens_NT))
    found = np.zeros(N)
    for place in range(G):
        before = tokens_NT[:, : len(prompt) + place]
        counts_NV = jnp.asarray([np.bincount(row, minlength=shape.vocab_size) for row in before])
        processed_NV = strategy.apply(steps, logits_NTV[:, len(prompt) + place - 1], counts_NV)
        share_NV = np.asarray(jax.nn.softmax(processed_NV), np.float64)
        ended_N = np.isin(answers[:, :place], ends).any(axis=1)
        with np.errstate(divide="ignore"):
            step_N = np.log(share_NV[np.arange(N), answers[:, place]])
        found += np.where(ended_N, np.where(answers[:, place] == 0, 0.0, -np.inf), step_N)
    return np.exp(found)


def p_value(observed: np.ndarray, expected: np.ndarray) -> float:
    """Of Pearson's test, cells of fewer than 5 expected added up (Cochran 1954); 0 where the impossible happened."""
    if observed[expected == 0].any():
        return 0.0
    small = expected < 5
    seen, wanted = (np.append(x[~small], x[small].sum()) for x in (observed, expected))
    keep = wanted > 0
    return float(scipy.stats.chisquare(seen[keep], wanted[keep] * (seen.sum() / wanted.sum())).pvalue)


def drawn(steps: Strategy, ends: tuple[int, ...], count: int = 20_000) -> float:
    """The p-value of the joint distribution of four tokens, of which all but the first are drafted or corrected."""
    target, draft = letters.decoder(letters.config(4)), letters.decoder(letters.config(4, n_kv_head=1))
    prompt, answers = np.array([3, 1, 0]), letters.all_answers(4, 4)
    found = speculate(target, draft, [prompt], Request(4, steps, 1, ends, samples=count), 2)
    assert 0.2 < found.acceptance_rate < 0.9  # both branches of the rule are common
    cells = [np.pad(answer.tokens, (0, 4 - len(answer.tokens))) for answer in found.completions]
    observed = np.bincount(np.stack(cells) @ [64, 16, 4, 1], minlength=256)
    return p_value(observed, count * joint(target.config, prompt, steps, answers, ends))


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        pytest.param((Temperature(1.0),), (), marks=pytest.mark.slow),
        ((RepetitionPenalty(1.5), Temperature(0.7), TopP(0.9)), (3,)),
    ],
    ids=["the model itself", "penalty, temperature, nucleus, end"],
)
def test_answers_are_distributed_as_the_targets(steps: Strategy, ends: tuple[int, ...]):
    assert drawn(steps, ends) > UNLIKELY


def test_the_test_fails_where_the_rule_takes_the_draft_before_the_strategy(monkeypatch: pytest.MonkeyPatch):
    def unprocessed(p_BTV: jax.Array, q_BTV: jax.Array, *more: jax.Array) -> tuple[jax.Array, jax.Array]:
        raw_BTV = q_BTV**0.5  # undoes a temperature of .5
        return judge(p_BTV, raw_BTV / raw_BTV.sum(axis=2, keepdims=True), *more)

    module._advance.clear_cache()
    monkeypatch.setattr(module, "judge", unprocessed)
    try:
        assert drawn((Temperature(0.5),), ()) < IMPOSSIBLE
    finally:
        module._advance.clear_cache()


def always_accept(p_BTV: jax.Array, q_BTV: jax.Array, draft_BT: jax.Array, *_: jax.Array) -> Any:
    return judge(p_BTV, q_BTV, draft_BT, jnp.zeros(draft_BT.shape), jnp.zeros(draft_BT.shape, bool))


def no_residual(p_BTV: jax.Array, q_BTV: jax.Array, *more: jax.Array) -> Any:
    first_B, _ = judge(p_BTV, q_BTV, *more)
    return first_B, jnp.take_along_axis(p_BTV, first_B[:, None, None], axis=1)[:, 0]


@pytest.mark.parametrize(("rule", "right"), [(judge, True), (always_accept, False), (no_residual, False)])
def test_the_rule_alone_with_fixed_distributions(rule: Any, right: bool):
    # Two drafts and 16 tokens, rare ones and impossible ones among them on either side.
    random, count = np.random.default_rng(0), 100_000
    p_TV, q_TV = random.dirichlet(np.full(16, 0.3), 3), random.dirichlet(np.full(16, 0.3), 2)
    p_TV[0, :3], q_TV[0, 2:5] = 0, 0
    p_TV, q_TV = (x / x.sum(axis=1, keepdims=True) for x in (p_TV, q_TV))
    draft_BT = np.stack([random.choice(16, count, p=q) for q in q_TV], axis=1)
    p_BTV, q_BTV = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (count, *x.shape)) for x in (p_TV, q_TV))
    uniform_BT = jnp.asarray(random.random((count, 2)), jnp.float32)
    first_B, weight_BV = rule(p_BTV, q_BTV, jnp.asarray(draft_BT), uniform_BT, jnp.ones((count, 2), bool))
    upto_BV = np.cumsum(np.asarray(weight_BV, np.float64), axis=1)
    final_B = (upto_BV <= random.random((count, 1)) * upto_BV[:, -1:]).sum(axis=1)
    token_B = np.where(np.asarray(first_B) == 0, final_B, draft_BT[:, 0])
    found = p_value(np.bincount(token_B, minlength=16), count * p_TV[0])
    assert found > UNLIKELY if right else found < IMPOSSIBLE


def test_stop_strings_end_an_answer():
    target, draft = letters.decoder(letters.config(11)), letters.decoder(letters.config(11, d_ff=16))
    [whole] = generate(target, PROMPTS[:1], Request(max_tokens=24, end_ids=()))
    assert len(whole.text) > 2
    stop = whole.text[-2:]  # the answer ends where it first occurs
    request = Request(max_tokens=24, end_ids=(), stops=(stop,))
    [ours], [theirs] = (
        speculate(target, draft, PROMPTS[:1], request, 3).completions,
        generate(target, PROMPTS[:1], request),
    )
    assert (ours.text, ours.finish) == (theirs.text, Finish.STOP)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)


def test_unfit_drafts_are_refused():
    shape = letters.config(11)
    target = letters.decoder(shape)
    other = Decoder(shape, variants.parameters(shape), letters.Letters(11, "others"))
    padded = letters.config(12)
    wider = Decoder(padded, variants.parameters(padded), letters.Letters(11))
    short = letters.decoder(letters.config(11, context_length=8))
    for draft, message in ((other, "another tokenizer"), (wider, "a vocabulary of 12"), (short, "context of 8 tokens")):
        with pytest.raises(UsageError, match=message):
            speculate(target, draft, PROMPTS, Request(12))
    with pytest.raises(UsageError, match="draft_tokens: 0 tokens"):
        speculate(target, target, PROMPTS, Request(12), 0)
