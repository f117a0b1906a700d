"""Each step of a strategy alone and in several orders against NumPy, on logits with ties."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.decode import choose, strategy
from lm.decode.settings import DEFAULT_ORDER, Settings
from lm.decode.strategy import LogitBias, MinP, PresencePenalty, RepetitionPenalty, Temperature, TopK, TopP
from tests.decode import reference

B, V = 16, 29
apply = jax.jit(strategy.apply)
draw = jax.jit(choose.draw)


def logits(seed=0, scale=2.0):
    """Random logits of which many are equal: quarters, both zeros among them."""
    random = np.random.default_rng(seed)
    x_BV = np.round(scale * random.standard_normal((B, V)) * 4) / 4
    x_BV = np.where(x_BV == 0, random.choice([0.0, -0.0], (B, V)), x_BV)
    return x_BV.astype(np.float32)


def counts(seed=0):
    return np.random.default_rng(seed).poisson(0.7, (B, V)).astype(np.int32)


def rows(*numbers, dtype=np.float32):
    """One number a row, each in turn."""
    return np.resize(np.array(numbers, dtype), B)


def usual(temperature=(1.0,), k=(0,), p=(1.0,), min_p=(0.0,)):
    """Temperature and what cuts the tail, a number a row, neutral where none is given: one program for many tests."""
    return Temperature(rows(*temperature)), TopK(rows(*k, dtype=np.int32)), TopP(rows(*p)), MinP(rows(*min_p))


def check(steps, seeds=range(5), tolerance=1e-6):
    """The same tokens are kept, with the same logits: of each product and sum float32 rounds once, 6e-8 relative."""
    for seed in seeds:
        ours_BV = np.asarray(apply(steps, logits(seed), counts(seed)))
        wanted_BV = reference.apply(steps, logits(seed), counts(seed))
        assert np.array_equal(np.isneginf(ours_BV), np.isneginf(wanted_BV))
        np.testing.assert_allclose(ours_BV, wanted_BV, rtol=tolerance, atol=tolerance)


def test_temperature_divides():
    check(usual(temperature=(1.0, 0.5, 2.0, 0.1, 0.0)))


def test_top_k_keeps_exactly_k_and_of_equal_ones_the_first():
    check(usual(k=(0, 1, 2, 3, 5, 17, V - 1, V, V + 1, 1000)))


def test_top_p_keeps_the_crossing_token_and_never_none():
    check(usual(p=(0.0, 1e-8, 1e-3, 0.1, 0.3, 0.5003, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)))


def test_min_p_keeps_what_is_likely_beside_the_likeliest():
    check(usual(min_p=(0.0, 1e-8, 1e-3, 0.05, 0.1, 0.3, 0.5, 0.9, 1.0)))


def penalties(repetition=(1.0,), presence=(0.0,), frequency=(0.0,), bias=None):
    bias = LogitBias.of(bias or {}, V)
    return RepetitionPenalty(rows(*repetition)), PresencePenalty(rows(*presence), rows(*frequency)), bias


def test_penalties_know_the_sign_and_the_count():
    check(penalties(repetition=(1.0, 1.3, 2.0, 0.7)))
    check(penalties(presence=(0.0, 0.5, -0.5), frequency=(0.0, 0.1, 0.1, -0.2)))


def test_a_repetition_penalty_above_1_never_raises_a_logit():
    before_BV = logits()
    after_BV = np.asarray(apply(penalties(repetition=(1.5,)), before_BV, counts()))
    there_BV = counts() > 0
    assert (after_BV <= before_BV).all()
    assert (after_BV < before_BV)[there_BV & (before_BV != 0)].all()
    assert np.array_equal(after_BV[~there_BV], before_BV[~there_BV])


def test_a_bias_of_minus_infinity_forbids():
    check(penalties(bias={0: 1.5, 3: -np.inf, V - 1: -2.0}))


# Powers of two: float32 rounds nothing, so that logits are equal there where they are equal in the reference.
FIRST = penalties((1.0, 2.0), (0.25,), (0.125,), {2: -np.inf, 5: 2.0})
LAST = usual((0.7, 1.0, 2.0, 0.0), (0, 3, 7, 20), (0.9003, 0.4, 1.0), (0.0, 0.1))
ORDERS = {"default": (*FIRST, *LAST), "temperature last": (*FIRST, *LAST[1:], LAST[0]), "backwards": LAST[::-1] + FIRST}


@pytest.mark.parametrize("order", ORDERS)
def test_steps_compose_in_the_order_in_which_they_stand(order):
    # Temperature multiplies what was rounded before: up to seven roundings of numbers up to 20.
    check(ORDERS[order], range(3), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_temperature_0_is_greedy_bit_for_bit(seed):
    x_BV = np.minimum(logits(seed), 2.0)  # many are the highest
    wanted_B = np.argmax(x_BV, axis=1)
    keys_B = jax.random.split(jax.random.key(seed), B)
    assert (np.sum(x_BV == x_BV.max(axis=1, keepdims=True), axis=1) > 1).any()
    beside = usual((0.0,), (0, 5), (1.0, 0.9, 0.5, 1e-8), (0.0, 0.2, 1.0))
    for steps in (usual((0.0,)), beside, beside[::-1], usual(k=(1,)), usual(p=(0.0,)), usual((0.5,), p=(1e-8,))):
        kept_BV = apply(steps, x_BV, counts())
        assert np.array_equal(np.sum(np.asarray(kept_BV) > -np.inf, axis=1), np.ones(B))
        assert np.array_equal(np.asarray(draw(kept_BV, keys_B)), wanted_B)


def test_a_tiny_temperature_is_greedy_but_for_ties():
    for value in (1e-4, 1e-30, 1e-37):
        x_BV = np.asarray(apply(usual((value,), p=(0.99,)), logits(), counts()))
        best_BV = logits() == logits().max(axis=1, keepdims=True)
        assert np.array_equal(x_BV > -np.inf, best_BV)


def kept(steps, shares):
    x_BV = np.full((B, V), -np.inf, np.float32)
    x_BV[:, : len(shares)] = np.log(shares)
    return np.flatnonzero(np.asarray(apply(steps, x_BV, counts()))[0] > -np.inf).tolist()


def test_goldens_of_the_crossing_token():
    assert kept(usual(p=(0.6,)), [0.5, 0.3, 0.15, 0.05]) == [0, 1]
    assert kept(usual(p=(0.85,)), [0.5, 0.3, 0.15, 0.05]) == [0, 1, 2]
    assert kept(usual(p=(0.8,)), [0.4, 0.3, 0.2, 0.1]) == [0, 1, 2]


@pytest.mark.slow
def test_goldens_of_the_order():
    for order, wanted in ((("temperature", "top-p"), [0]), (("top-p", "temperature"), [0, 1])):
        steps = Settings(temperature=0.5, top_p=0.8, order=order).steps(V)
        assert kept(steps, np.exp([3.0, 2.0, 1.0])) == wanted


def test_logits_in_bfloat16_are_filtered_in_float32():
    # Of 5,000 logits in bfloat16 hundreds are equal, and a running sum of their shares in bfloat16 never reaches 1.
    x_BV = jnp.asarray(np.random.default_rng(0).standard_normal((B, 5000)), jnp.bfloat16)
    steps = usual(p=(0.0, 1e-8, 1e-3, 0.5, 0.9, 1.0), k=(40, 0))
    ours_BV = np.asarray(apply(steps, x_BV, counts()))
    wanted_BV = reference.apply(steps, np.asarray(x_BV, np.float32), np.zeros((B, 5000)))
    assert np.array_equal(ours_BV > -np.inf, wanted_BV > -np.inf)


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_with_one_possible_token_keeps_it(order):
    x_BV = np.full((B, V), -np.inf, np.float32)
    left_B = np.arange(B) + 6  # not one that the orders forbid
    x_BV[np.arange(B), left_B] = np.linspace(-5, 5, B)
    kept_BV = np.asarray(apply(ORDERS[order], x_BV, counts()))
    assert not np.isnan(kept_BV).any()
    assert np.array_equal(np.argwhere(kept_BV > -np.inf), np.stack([np.arange(B), left_B], axis=1))
    keys_B = jax.random.split(jax.random.key(0), B)
    assert np.array_equal(np.asarray(draw(kept_BV, keys_B)), left_B)


def test_the_vocabulary_is_never_sorted():
    every = Settings(0.7, 5, 0.9, 0.1, 1.5, 0.5, 0.5, {3: 1.0}).steps(V)

    def token(logits_BV, counts_BV, key_B):
        return choose.draw(strategy.apply(every, logits_BV, counts_BV), key_B)

    text = str(jax.make_jaxpr(token)(logits(), counts(), jax.random.split(jax.random.key(0), B)))
    assert "cumsum" in text
    assert not re.search(r"\b(sort|top_k)\[", text)


def test_rows_do_not_see_each_other():
    steps = usual(k=(9,), p=(0.8003,))
    together_BV, order_B = np.asarray(apply(steps, logits(), counts())), np.random.default_rng(0).permutation(B)
    assert np.array_equal(np.asarray(apply(steps, logits()[order_B], counts())), together_BV[order_B])


def test_settings_are_neutral_by_default_and_saved_as_they_are_in_order():
    neutral = Settings().steps(V)
    assert np.array_equal(np.asarray(apply(neutral, logits(), counts())), logits())
    saved = strategy.as_json(
        Settings(temperature=0.8, top_k=5, repetition_penalty=1.2, logit_bias={3: -np.inf, 4: 1.0},
                 order=("top-k", "bias", "temperature", "repetition")).steps(V)
    )  # fmt: skip
    assert json.loads(json.dumps(saved, allow_nan=False)) == [
        {"step": "TopK", "k": 5},
        {"step": "LogitBias", "bias": {"3": None, "4": 1.0}},
        {"step": "Temperature", "temperature": 0.8},
        {"step": "RepetitionPenalty", "penalty": 1.2},
        {"step": "TopP", "p": 1.0},
        {"step": "MinP", "p": 0.0},
    ]
    assert [step["step"] for step in strategy.as_json(Settings(presence_penalty=1.0).steps(V))] == [
        "PresencePenalty", "Temperature", "TopK", "TopP", "MinP",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": float("nan")}, "top_k is nan"),
        ({"top_p": -1e-9}, "top_p is -1e-09"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"order": ("top-p", "topk")}, "no step 'topk'"),
        ({"top_k": 3, "order": ("top-p",)}, "'top-k' changes something and is named 0 times"),
        ({"top_k": 3, "order": ("top-k", "top-k")}, "named 2 times"),
        ({"logit_bias": {V: 1.0}}, f"no token {V}"),
        ({"logit_bias": {-1: 1.0}}, "no token -1"),
        ({"logit_bias": {0: float("nan")}}, "token 0 is nan"),
        ({"logit_bias": {0: float("inf")}}, "token 0 is inf"),
        ({"logit_bias": dict.fromkeys(range(V), -np.inf)}, "all tokens are forbidden"),
    ],
)
def test_a_number_out_of_range_is_one_clear_error(numbers, told):
    with pytest.raises(UsageError, match=told):
        Settings(**numbers).steps(V)


def test_every_step_has_a_place_in_the_default_order():
    every = Settings(0.5, 2, 0.5, 0.1, 1.1, 0.1, 0.1, {0: 1.0}).steps(V)
    assert len(every) == len(DEFAULT_ORDER) == len({type(step) for step in every})


def test_what_is_greedy_is_known_where_nothing_later_can_forbid_the_highest():
    bias = LogitBias(jnp.zeros(V))
    before, always = strategy.greedy((bias, Temperature(0.0), TopK(3), TopP(0.5), MinP(0.1)))
    assert (before, bool(always)) == ((bias,), True)
    assert bool(strategy.greedy((Temperature(jnp.array([0.0, 1.0])),))[1]) is False
    assert strategy.greedy((Temperature(0.0), bias)) is None
    assert strategy.greedy((TopK(1),)) is None
