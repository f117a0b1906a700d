"""Recurrent layers compute what LSTM and GRU are defined to be, row by row and document by document."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from lm.base.config import build, to_dict
from lm.base.errors import UsageError
from lm.model.accounting import _subjaxprs
from lm.model.config import Dtype, Mixer, ModelConfig, Remat
from lm.model.recurrent import CELLS, FORGET, over_time
from lm.model.transformer import Transformer
from tests.model import variants
from tests.model.variants import recurrent

T, B, D = 7, 3, 5
both = pytest.mark.parametrize("mixer", [Mixer.LSTM, Mixer.GRU])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def one_step(mixer, x, h, c, into, kernel, bias_in, bias_state):
    """The state of one row after one input, gate by gate and in float64; `c` is that of an LSTM."""
    of_input = [x @ into[:, gate] + bias_in[gate] for gate in range(mixer.gates)]
    of_state = [h @ kernel[:, gate] for gate in range(mixer.gates)]
    if mixer is Mixer.LSTM:
        i, f, g, o = (a + b for a, b in zip(of_input, of_state, strict=True))
        c = sigmoid(f + FORGET) * c + sigmoid(i) * np.tanh(g)
        return sigmoid(o) * np.tanh(c), c
    r, z = (sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    n = np.tanh(of_input[2] + r * (of_state[2] + bias_state))
    return (1 - z) * n + z * h, c


@pytest.fixture
def drawn():
    random = np.random.default_rng(0)
    return lambda *shape: random.standard_normal(shape).astype(np.float32)


@both
def test_every_state_is_that_of_a_loop_over_rows_and_gates(mixer, drawn):
    J = mixer.gates
    x_TBD, into, kernel, bias_in = drawn(T, B, D), drawn(D, J, D), drawn(D, J, D), drawn(J, D)
    bias_state, start = drawn(D) if mixer is Mixer.GRU else np.zeros(D), [drawn(B, D) for _ in range(mixer.states)]
    begins_TB = np.random.default_rng(1).random((T, B)) < 0.3
    bias_JD = np.zeros((J, D), np.float32)
    bias_JD[-1] = bias_state
    inputs = np.einsum("TBD,DJK->TBJK", x_TBD, into) + bias_in
    run = jax.jit(partial(over_time, CELLS[mixer]))
    end, h_TBD = run(inputs, kernel, bias_JD, tuple(start), begins_TB)
    for row in range(B):
        first = [part[row] for part in start] + [np.zeros(D)] * (2 - mixer.states)
        h, c = first
        for t in range(T):
            h, c = first if begins_TB[t, row] else (h, c)
            h, c = one_step(mixer, x_TBD[t, row], h, c, into, kernel, bias_in, bias_state)
            # Sums of some ten float32 terms of size 1, through functions that are no steeper than 1, seven times.
            np.testing.assert_allclose(h_TBD[t, row], h, atol=2e-6)
        for ours, wanted in zip(end, (h, c), strict=False):
            np.testing.assert_allclose(ours[row], wanted, atol=2e-6)


@both
def test_forward_and_gradients_are_those_of_pytorch(mixer, drawn):
    torch = pytest.importorskip("torch")
    J, x_TBD, weigh_TBD = mixer.gates, drawn(T, B, D), drawn(T, B, D)
    theirs = {Mixer.LSTM: torch.nn.LSTM, Mixer.GRU: torch.nn.GRU}[mixer](D, D)
    x = torch.tensor(x_TBD, requires_grad=True)
    wanted_TBD, _ = theirs(x)
    (wanted_TBD * torch.tensor(weigh_TBD)).sum().backward()
    numbers = {name: value.detach().numpy() for name, value in theirs.named_parameters()}

    def ours(x_TBD, input_JDD, state_JDD, bias_JD):
        # A gate's rows follow those of the one before, and are what it makes.
        into, kernel = (x.reshape(J, D, D).transpose(2, 0, 1) for x in (input_JDD, state_JDD))
        if mixer is Mixer.LSTM:
            bias_in, bias_state = bias_JD.at[1].add(-FORGET), jnp.zeros((J, D))
        else:
            bias_in = bias_JD.at[2].set(numbers["bias_ih_l0"].reshape(J, D)[2])
            bias_state = jnp.zeros((J, D)).at[2].set(numbers["bias_hh_l0"].reshape(J, D)[2])
        inputs = jnp.einsum("TBD,DJK->TBJK", x_TBD, into) + bias_in[None, None]
        return over_time(CELLS[mixer], inputs, kernel, bias_state, (jnp.zeros((B, D)),) * mixer.states)[1]

    arguments = (x_TBD, numbers["weight_ih_l0"], numbers["weight_hh_l0"],
                 jnp.asarray(numbers["bias_ih_l0"] + numbers["bias_hh_l0"]).reshape(J, D))  # fmt: skip

    @jax.jit
    def with_gradients(*arguments):
        h_TBD, pull = jax.vjp(ours, *arguments)
        return h_TBD, pull(weigh_TBD)[:3]

    h_TBD, gradients = with_gradients(*arguments)
    np.testing.assert_allclose(h_TBD, wanted_TBD.detach().numpy(), atol=1e-5)
    for found, wanted in zip(gradients, (x.grad, theirs.weight_ih_l0.grad, theirs.weight_hh_l0.grad), strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


@both
def test_gradients_are_those_of_finite_differences(mixer, drawn):
    J, begins_TB = mixer.gates, jnp.array([[True, False], [False, True], [False, False]])

    @jax.jit
    def weighed(*numbers):
        end, h_TBD = over_time(CELLS[mixer], *numbers, begins_TB)
        return jnp.sum(jnp.sin(h_TBD)) + sum(jnp.sum(jnp.cos(part)) for part in end)

    numbers = drawn(3, 2, J, 2), drawn(2, J, 2), drawn(J, 2), tuple(drawn(2, 2) for _ in range(mixer.states))
    check_grads(weighed, numbers, order=1, modes=["rev"], atol=1e-2, rtol=1e-2)  # float32 differences


def logits(config, tokens_BT, segments_BT=None):
    return np.asarray(variants.logits(config, variants.parameters(config), tokens_BT, segments_BT))


@both
def test_a_document_is_read_as_if_it_were_alone(mixer):
    config = recurrent(mixer)
    tokens_BT = variants.tokens(config)
    segments_BT = jnp.array([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
    whole_BTV = logits(config, tokens_BT, segments_BT)
    for row, first, end in ((0, 0, 3), (0, 3, 7), (0, 7, 8), (1, 0, 1), (1, 1, 8)):
        # Put at the beginning of a row of the same length: what follows changes nothing.
        alone_BT = np.zeros_like(tokens_BT)
        alone_BT[0, : end - first] = tokens_BT[row, first:end]
        alone_BTV = logits(config, alone_BT, np.zeros_like(segments_BT))
        np.testing.assert_array_equal(alone_BTV[0, : end - first], whole_BTV[row, first:end])
    assert np.abs(whole_BTV - logits(config, tokens_BT)).max() > 1e-3  # and the state does go on without documents


@both
def test_every_earlier_token_is_known_and_no_later_one(mixer):
    config = recurrent(mixer)
    tokens_BT = np.array(variants.tokens(config, rows=1))
    before_TV = logits(config, tokens_BT)[0]
    for at in range(config.context_length):
        changed_BT = tokens_BT.copy()
        changed_BT[0, at] = (changed_BT[0, at] + 1) % config.vocab_size
        after_TV = logits(config, changed_BT)[0]
        np.testing.assert_array_equal(after_TV[:at], before_TV[:at])
        assert (np.abs(after_TV[at:] - before_TV[at:]).max(axis=1) > 1e-6).all()


def scans(jaxpr):
    """Lengths of all loops in a jaxpr, and how many equations there are."""
    lengths, equations = [], 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        lengths += [equation.params["length"]] if equation.primitive.name == "scan" else []
        equations += 1
        for inner in _subjaxprs(equation.params):
            more, count = scans(inner)
            lengths, equations = lengths + more, equations + count
    return sorted(lengths), equations


def test_a_recurrent_pass_is_as_long_as_the_row_and_a_transformers_is_not():
    def traced(config, length):
        params = variants.abstract(config)
        tokens_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return scans(jax.make_jaxpr(Transformer(config).apply)({"params": params}, tokens_BT))

    attending, recurring = variants.tiny(n_layer=3), recurrent(Mixer.LSTM, n_layer=3)
    for length in (16, 64):
        assert traced(attending, length) == ([3], traced(attending, 16)[1])
        assert traced(recurring, length)[0] == [3, length]  # within each layer, a step a position


@pytest.mark.full
@pytest.mark.parametrize(
    ("mixer", "changes"),
    [(Mixer.LSTM, {"remat": Remat.FULL, "unroll_layers": True}), (Mixer.GRU, {"remat": Remat.DOTS})],
    ids=["lstm", "gru"],
)
def test_how_it_is_computed_changes_no_gradient(mixer, changes):
    config = recurrent(mixer)
    params, tokens_BT = variants.parameters(config), variants.tokens(config)

    def gradients(config):
        def loss(params):
            return jnp.mean(jnp.square(jnp.asarray(Transformer(config).apply({"params": params}, tokens_BT))))

        return jax.jit(jax.grad(loss))(params)

    plain = gradients(config)
    assert all(bool(jnp.isfinite(leaf).all()) and bool((leaf != 0).any()) for leaf in jax.tree.leaves(plain))
    for found, wanted in zip(jax.tree.leaves(gradients(variants.replace(config, **changes))),
                             jax.tree.leaves(plain), strict=True):  # fmt: skip
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_an_lstm_begins_by_remembering():
    start, nothing = (jnp.zeros((1, 1)), jnp.ones((1, 1))), jnp.zeros((1, 4, 1))
    _, c_BD = CELLS[Mixer.LSTM](nothing, nothing, start)
    np.testing.assert_allclose(c_BD, sigmoid(FORGET), rtol=1e-6)
    assert sigmoid(FORGET) > 0.7


@pytest.mark.slow
def test_in_bfloat16_the_state_stays_float32():
    config = recurrent(Mixer.LSTM, dtype=Dtype.BFLOAT16, context_length=64)
    exact = variants.replace(config, dtype=Dtype.FLOAT32)
    params, tokens_BT = variants.parameters(exact, 0.1), variants.tokens(config)
    error = variants.logits(config, params, tokens_BT) - variants.logits(exact, params, tokens_BT)
    # bfloat16 rounds by up to 2^-9, a layer's inputs and states some five times, logits of up to 2 once more.
    assert np.abs(error).max() < 2 * 10 * 2**-9
    lengths = np.sqrt(np.mean(np.square(error), axis=(0, 2)))
    assert lengths[-8:].mean() < 2 * lengths[:8].mean()  # it does not grow along the row


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"positions": "rope"}, "mixer is lstm, and positions is not none"),
        ({"n_head": 4}, "mixer is lstm, and n_head is not 1"),
        ({"n_kv_head": 1}, "mixer is lstm, and n_kv_head is not none"),
        ({"d_head": 16}, "mixer is lstm, and d_head is not none"),
        ({"window": 4}, "mixer is lstm, and window is not none"),
        ({"qk_norm": True}, "mixer is lstm, and qk_norm is not false"),
        ({"qkv_bias": False}, "mixer is lstm, and qkv_bias is not none"),
        ({"attention_scale": 1.0}, "mixer is lstm, and attention_scale is not none"),
        ({"attention_softcap": 1.0}, "mixer is lstm, and attention_softcap is not none"),
        ({"feed_forward": "none"}, "feed_forward is none, and d_ff is not 0"),
        ({"feed_forward": "none", "d_ff": 0, "parallel_block": True}, "feed_forward is none, and parallel_block is"),
        (
            {"feed_forward": "none", "d_ff": 0, "bias": False, "experts": {"count": 2, "chosen": 1}},
            "feed_forward is none, and experts is not none",
        ),
        ({"width_scaling": {"base_width": 8, "base_head": 8}}, "base_head is given, and mixer is lstm"),
        ({"d_ff": 0}, "d_ff is 0"),
        ({"mixer": "rnn"}, "'rnn' is not one of them. Known: attention, lstm, gru"),
    ],
)
def test_what_is_about_attention_or_contradicts_is_refused_by_both_names(changes, told):
    with pytest.raises(UsageError, match=told):
        build(ModelConfig, {**to_dict(recurrent(Mixer.LSTM)), **changes})
