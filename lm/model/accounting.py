"""What a model costs: parameters by group, FLOPs under every named convention, bytes of the decoding cache.

Everything here is a Python integer, so that no count is ever rounded. A product of [m, k] by [k, n] is 2mkn FLOPs; a
lookup costs nothing; norms, activations, softmax and optimizer are not counted by any convention.
"""

import dataclasses
import enum
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from lm.model.config import FeedForward, Mixer, ModelConfig, Norm, NormPlacement, Positions, QkNorm


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
    Flops.SIX_ND: "6 x all active parameters (Hoffmann et al. 2022, C = 6ND)",
    Flops.KAPLAN: "6 x active parameters without embedding, positions and head (Kaplan et al. 2020)",
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
    def nonembedding(self) -> int:
        """Kaplan's N: matrices and norms of the layers, and the final norm."""
        return self.matrices + self.norms


def group_of(path: tuple[str, ...]) -> Group:
    """The group of a parameter, from its path in the tree: ('layers', 'attention', 'out', 'kernel') and the like."""
    match path:
        case ("embedding",):
            return Group.EMBEDDING
        case ("patches", "kernel"):
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


def count_parameters(config: ModelConfig, *, active: bool = False) -> ParameterCounts:
    """The parameters of the `Transformer` of this shape, without building it; `active` ones are those a token uses."""
    D = config.d_model
    stacks = [config] if config.encoder is None else [config.encoder_stack, config]
    return ParameterCounts(
        embedding=(config.vocab_size + (config.patch_width or 0)) * D,
        position=config.position_count * D if config.positions is Positions.LEARNED else 0,
        head=0 if config.tied_embedding else D * config.vocab_size,
        matrices=sum(stack.n_layer * _layer_matrices(stack, active) for stack in stacks),
        norms=sum(_stack_norms(stack) for stack in stacks),
    )


def flops_per_token(config: ModelConfig, convention: Flops) -> int:
    """FLOPs of training on one predicted token of a full window, forward and backward (3 times forward, patches twice).

    A layer's attention in a sliding window is rounded to a whole FLOP under MATMUL; MATMUL_FULL has all T x T, as it is
    computed. What an encoder reads is spread over the tokens that are predicted from it, and the sum is rounded.
    """
    match convention:
        case Flops.SIX_ND:
            return 6 * count_parameters(config, active=True).total
        case Flops.KAPLAN:
            return 6 * count_parameters(config, active=True).nonembedding
        case Flops.MATMUL:
            keys = causal_keys(config)
        case Flops.MATMUL_FULL:
            keys = [Fraction(config.predicted_length)] * len(causal_keys(config))
    # A score and its share of the sum are 2C each.
    attention = sum(round(4 * config.n_head * config.head_width * seen) for seen in keys)
    head = 2 * config.d_model * config.vocab_size
    matrices = config.n_layer * 2 * _layer_matrices(config, active=True)
    source = 0 if config.encoder is None else _source_flops(config)
    return round(3 * (head + matrices + attention + source)) + patch_flops(config)


def patch_flops(config: ModelConfig) -> int:
    """FLOPs a place of mapping patches, which all places are computed with; pixels are not differentiated."""
    return 2 * 2 * (config.patch_width or 0) * config.d_model


def causal_keys(config: ModelConfig) -> list[Fraction]:
    """Keys that a query sees on average, of each layer that attends.

    W (2T - W + 1) / 2T in a sliding window of W of T tokens.
    """
    if config.mixer.recurrent:
        return []
    T = config.predicted_length
    wide = (T if window is None else min(window, T) for window in config.windows)
    return [Fraction(W * (2 * T - W + 1), 2 * T) for W in wide]


def step_flops(config: ModelConfig, tokens: int, convention: Flops) -> int:
    """FLOPs of training on `tokens` predicted tokens in full windows; whole runs count the same way."""
    return tokens * flops_per_token(config, convention)


def kaplan_forward_flops(config: ModelConfig) -> int:
    """Forward FLOPs per token, 2N + 2 n_layer n_ctx d_model (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).

    It is a rule for decoders by themselves.

    N is the non-embedding count of what is active. Unlike `Flops.KAPLAN` it has the context term, which is half of what
    scores and weighted sum cost over the whole T x T when H C = d_model; recurrent layers have none.
    """
    context = 2 * len(causal_keys(config)) * config.context_length * config.d_model
    return 2 * count_parameters(config, active=True).nonembedding + context


def cache_bytes(config: ModelConfig, length: int, batch: int, bytes_per_number: int, bytes_per_scale: int = 0) -> int:
    """Bytes of keys and values that decoding keeps for `batch` sequences of `length` tokens, and of states.

    A sliding window keeps no more than its width where all layers have it; int8 has a scale for each key and each value
    of a head. States are float32 whatever the type, and as large at every length. Behind an encoder the tokens are the
    decoder's, and those of the source come on top.
    """
    length = length if config.reach is None else min(length, config.reach)
    length += 0 if config.encoder is None else config.encoder.source_length
    per_head = config.head_width * bytes_per_number + bytes_per_scale
    states = 4 * config.mixer.states * config.d_model
    return config.n_layer * batch * (2 * config.kv_heads * length * per_head + states)


def jaxpr_dot_flops(jaxpr: Any) -> int:
    """FLOPs of all products in a (closed) jaxpr, loop bodies times their length: what `MATMUL_FULL` must equal.

    A product by groups takes each vector to one matrix, whatever a device makes of it.

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
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = numbers.dot_dimension_numbers
        left, made = equation.invars[0].aval.shape, math.prod(equation.outvars[0].aval.shape)
        # Where what is summed is in groups, each has a result of its own, of its part of the sum.
        groups = 1 if numbers.rhs_group_dimensions else equation.invars[2].aval.shape[-1]
        return 2 * made * math.prod(left[axis] for axis in contracted) // groups
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


def _layer_matrices(config: ModelConfig, active: bool) -> int:
    if config.mixer.recurrent:
        mixer = 2 * config.mixer.gates * config.d_model**2
    else:
        mixer = config.attentions * config.d_model * config.head_width * 2 * (config.n_head + config.kv_heads)
    expert, experts = config.feed_forward.matrices * config.d_model * config.d_ff, config.experts
    if experts is None:
        return mixer + expert
    visited = (experts.chosen if active else experts.count) + experts.shared
    return mixer + config.d_model * experts.count + visited * expert


def _stack_norms(config: ModelConfig) -> int:
    """Scales and biases of all layers, and of the norm behind them."""
    norm = 2 * config.d_model if config.bias and config.norm is Norm.LAYERNORM else config.d_model
    around = 2 if config.norm_placement is NormPlacement.SANDWICH else 1  # a sublayer
    sublayers = config.attentions + (config.feed_forward is not FeedForward.NONE)
    norms = around * (1 if config.parallel_block else sublayers)
    last = (config.norm_placement is not NormPlacement.POST) * norm
    return config.n_layer * (norms * norm + _layer_vectors(config)) + last


def _layer_vectors(config: ModelConfig) -> int:
    """Biases of a layer's sublayers, and scales within them."""
    D, H, K, C = config.d_model, config.n_head, config.kv_heads, config.head_width
    if config.mixer.recurrent:
        mixer = config.bias * (config.mixer.gates + (config.mixer is Mixer.GRU)) * D  # a GRU's candidate has two
    else:
        scales = H + K if config.qk_norm_over is QkNorm.HEADS else 2
        attention = config.bias * D + config.qkv_biased * (H + 2 * K) * C + config.qk_norm * scales * C
        mixer = config.attentions * attention
    matrices = config.feed_forward.matrices
    return mixer + ((matrices - 1) * config.d_ff + D if config.bias and matrices else 0)


def _source_flops(config: ModelConfig) -> Fraction:
    """Forward FLOPs for a predicted token of all that has to do with the source, but for matrices counted already.

    The decoder's own keys and values of the source are of its S tokens and not of those that are predicted.
    """
    encoder, D, H, K, C = config.encoder_stack, config.d_model, config.n_head, config.kv_heads, config.head_width
    S, U = config.lead + 1, config.predicted_length
    keys_and_values = config.n_layer * 2 * D * C * 2 * K
    scores = 4 * H * C * S
    read = encoder.n_layer * (2 * _layer_matrices(encoder, active=True) + scores) + keys_and_values
    return Fraction(S * read, U) - keys_and_values + config.n_layer * scores
