"""What a model costs: parameters by group, FLOPs under every named convention, bytes of the decoding cache.

Everything here is a Python integer, so that no count is ever rounded. A product of [m, k] by [k, n] is 2mkn FLOPs; a
lookup costs nothing; norms, activations, softmax and optimizer are not counted by any convention.
"""

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from lm.model.config import FeedForward, ModelConfig, Norm, Positions


class Group(enum.StrEnum):
    """The groups that parameters are counted in; their names are columns of the run table after `params_`."""

    EMBEDDING = "embedding"
    POSITION = "position"
    HEAD = "head"
    MATRICES = "matrices"
    NORMS = "norms"


class Flops(enum.StrEnum):
    """Conventions for the FLOPs of training; the values are columns of the run table, which defines them."""

    SIX_ND = "flops_6nd"
    KAPLAN = "flops_kaplan"
    MATMUL = "flops_matmul"
    MATMUL_FULL = "flops_matmul_full"

    @property
    def meaning(self) -> str:
        """The convention in words."""
        return _MEANINGS[self]


_MEANINGS = {
    Flops.SIX_ND: "6 x all parameters (Hoffmann et al. 2022, C = 6ND)",
    Flops.KAPLAN: "6 x parameters without embedding, positions and head (Kaplan et al. 2020)",
    Flops.MATMUL: "every product forward and backward with the head, attention counted causally",
    Flops.MATMUL_FULL: "the same with the whole T x T of attention: what a plain implementation executes",
}


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Trained numbers by group; each is in exactly one, a tied table in `embedding`."""

    embedding: int
    position: int
    head: int
    matrices: int
    norms: int  # normalisation scales and all biases

    @property
    def total(self) -> int:
        """Every trained number once."""
        return self.embedding + self.position + self.head + self.nonembedding

    @property
    def active(self) -> int:
        """Parameters used for a token: all of them in a dense model."""
        return self.total

    @property
    def nonembedding(self) -> int:
        """Kaplan's N: matrices and norms of the layers, and the final norm."""
        return self.matrices + self.norms


def group_of(path: tuple[str, ...]) -> Group:
    """The group of a parameter, from its path in the tree: ('layers', 'attention', 'out', 'kernel') and the like."""
    match path:
        case ("embedding",):
            return Group.EMBEDDING
        case ("position", "embedding"):
            return Group.POSITION
        case ("head",):
            return Group.HEAD
        case (*_, "kernel"):
            return Group.MATRICES
        case (*_, "scale" | "bias"):
            return Group.NORMS
    raise ValueError(f"no parameter of the transformer is called {'/'.join(path)}")


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """The parameters of the `Transformer` of this shape, without building it."""
    D, F, C, L = config.d_model, config.d_ff, config.head_width, config.n_layer
    norm_biases = config.bias and config.norm is Norm.LAYERNORM
    norm = 2 * D if norm_biases else D
    biases = (config.n_head + 2 * config.kv_heads) * C + D + _hidden_matrices(config) * F + D if config.bias else 0
    qk_scales = 2 * C if config.qk_norm else 0
    return ParameterCounts(
        embedding=config.vocab_size * D,
        position=config.context_length * D if config.positions is Positions.LEARNED else 0,
        head=0 if config.tied_embedding else D * config.vocab_size,
        matrices=L * _layer_matrices(config),
        norms=L * (2 * norm + biases + qk_scales) + norm,
    )


def flops_per_token(config: ModelConfig, convention: Flops) -> int:
    """FLOPs of training on one token of a full window, forward and backward (three times forward).

    Attention in a sliding window is rounded to a whole FLOP under MATMUL; MATMUL_FULL has all T x T, as it is computed.
    """
    match convention:
        case Flops.SIX_ND:
            return 6 * count_parameters(config).total
        case Flops.KAPLAN:
            return 6 * count_parameters(config).nonembedding
        case Flops.MATMUL:
            # A query sees W (2T - W + 1) / 2T keys on average, (T + 1) / 2 where the window W is all of T; a score and
            # its share of the sum are 2C each.
            T = config.context_length
            W = T if config.window is None else min(config.window, T)
            attention = round(2 * config.n_head * config.head_width * W * (2 * T - W + 1) / T)
        case Flops.MATMUL_FULL:
            attention = 4 * config.n_head * config.head_width * config.context_length
    head = 2 * config.d_model * config.vocab_size
    return 3 * (head + config.n_layer * (2 * _layer_matrices(config) + attention))


def step_flops(config: ModelConfig, tokens: int, convention: Flops) -> int:
    """FLOPs of training on `tokens` tokens in windows of `context_length`; whole runs count the same way."""
    return tokens * flops_per_token(config, convention)


def kaplan_forward_flops(config: ModelConfig) -> int:
    """Forward FLOPs per token, 2N + 2 n_layer n_ctx d_model (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).

    N is the non-embedding count. Unlike `Flops.KAPLAN` it has the context term, which is half of what scores and
    weighted sum cost over the whole T x T when H C = d_model.
    """
    context = 2 * config.n_layer * config.context_length * config.d_model
    return 2 * count_parameters(config).nonembedding + context


def cache_bytes(config: ModelConfig, length: int, batch: int, bytes_per_number: int, bytes_per_scale: int = 0) -> int:
    """Bytes of keys and values that decoding keeps for `batch` sequences of `length` tokens.

    A sliding window keeps no more than its width; int8 has a scale for each key and each value of a head.
    """
    length = length if config.window is None else min(length, config.window)
    per_head = config.head_width * bytes_per_number + bytes_per_scale
    return 2 * config.n_layer * config.kv_heads * length * batch * per_head


def jaxpr_dot_flops(jaxpr: Any) -> int:
    """FLOPs of all `dot_general` in a (closed) jaxpr, loop bodies times their length: what `MATMUL_FULL` must equal.

    Raises:
      ValueError: a `while` loop (its length is not in the jaxpr) or a `cond` whose branches differ in cost.
    """
    return sum(_equation_flops(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _equation_flops(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    inner = [jaxpr_dot_flops(jaxpr) for jaxpr in _subjaxprs(params)]
    if name == "while" and any(inner):
        raise ValueError("a while loop with products has no static FLOP count")
    if name == "cond":
        if len(set(inner)) > 1:
            raise ValueError(f"the branches of a cond cost {inner} FLOPs: no single count")
        return inner[0]
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _subjaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield item


def _hidden_matrices(config: ModelConfig) -> int:
    return 2 if config.feed_forward is FeedForward.SWIGLU else 1


def _layer_matrices(config: ModelConfig) -> int:
    attention = config.d_model * config.head_width * 2 * (config.n_head + config.kv_heads)
    return attention + (_hidden_matrices(config) + 1) * config.d_model * config.d_ff
