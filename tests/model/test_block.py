"""Where a layer normalises, and which layers have the window, against the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.model.attention import Plain, SelfAttention
from lm.model.block import Block
from lm.model.config import NormPlacement
from lm.model.feedforward import PositionWise
from lm.model.positions import rotation
from tests.model.variants import logits, parameters, tiny, tokens


def rms(x_BTD, scale):
    return x_BTD / jnp.sqrt(jnp.mean(x_BTD**2, axis=-1, keepdims=True) + 1e-5) * scale[None, None, :]


def defined(config, layer, x_BTD, attention, feed_forward):
    """The layer as its docstring has it."""

    def norm(name, x):
        return rms(x, layer[name]["scale"])

    if config.parallel_block:
        h = norm("norm", x_BTD)
        return x_BTD + attention(h) + feed_forward(h)
    for name, f in (("attention", attention), ("feed_forward", feed_forward)):
        match config.norm_placement:
            case NormPlacement.PRE:
                x_BTD = x_BTD + f(norm(f"{name}_norm", x_BTD))
            case NormPlacement.POST:
                x_BTD = norm(f"{name}_norm", x_BTD + f(x_BTD))
            case NormPlacement.OUTPUT:
                x_BTD = x_BTD + norm(f"{name}_out_norm", f(x_BTD))
            case NormPlacement.SANDWICH:
                x_BTD = x_BTD + norm(f"{name}_out_norm", f(norm(f"{name}_norm", x_BTD)))
    return x_BTD


@pytest.mark.parametrize(
    "changes", [*({"norm_placement": p} for p in NormPlacement), {"parallel_block": True}], ids=str
)
def test_a_layer_normalises_where_it_says(changes):
    config = tiny(n_layer=1, **changes)
    layer = jax.tree.map(lambda leaf: leaf[0], parameters(config)["layers"])
    x_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 16), np.float32))
    turn = rotation(jnp.arange(4)[None, :], config.head_width, config.rope_base)
    seen = Plain().sees(4, None, None)

    def attention(h_BTD):
        return SelfAttention(config).apply({"params": layer["attention"]}, h_BTD, turn, seen, None)[0]

    def feed_forward(h_BTD):
        return PositionWise(config).apply({"params": layer["feed_forward"]}, h_BTD)

    expected = jax.jit(lambda x: defined(config, layer, x, attention, feed_forward))(x_BTD)
    (found, _), _ = jax.jit(Block(config).apply)({"params": layer}, (x_BTD, None), turn, (seen,))
    np.testing.assert_allclose(found, expected, atol=1e-5)  # the same operations, fused otherwise


def test_layers_have_the_window_in_turn():
    config = tiny(window=2, window_layers=(True, False), n_layer=2)
    assert config.windows == (2, None)
    params, x_BT = parameters(config), tokens(config, rows=1)
    changed_BT = x_BT.at[0, 0].set((x_BT[0, 0] + 1) % config.vocab_size)

    def reached(*silent):
        """Which positions' logits the first token moves, where attention of some layers writes nothing."""
        out = params["layers"]["attention"]["out"]["kernel"]
        kernel = out.at[jnp.array(silent, int)].set(0.0) if silent else out
        attention = {**params["layers"]["attention"], "out": {"kernel": kernel}}
        quiet = {**params, "layers": {**params["layers"], "attention": attention}}
        moved = logits(config, quiet, x_BT) != logits(config, quiet, changed_BT)
        return np.flatnonzero(np.any(moved[0], axis=-1)).tolist()

    assert reached() == list(range(8))
    assert reached(1) == [0, 1]
    assert reached(0) == list(range(8))


def test_a_window_that_holds_everything_may_be_anywhere():
    plain, x_BT = tiny(n_layer=3), tokens(tiny())
    mixed = tiny(n_layer=3, window=8, window_layers=(False, True))
    np.testing.assert_allclose(
        logits(mixed, parameters(plain), x_BT), logits(plain, parameters(plain), x_BT), atol=1e-5
    )
