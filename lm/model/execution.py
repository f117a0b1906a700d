"""What a training step executes and moves, where that is more than the conventions of `accounting` count.

Counts are of products only, as there; bytes are the least that memory must carry.
"""

import dataclasses

from lm.model.accounting import Flops, causal_keys, count_parameters, flops_per_token, patch_flops
from lm.model.config import Dtype, FeedForward, Mixer, ModelConfig, NormPlacement, Remat


@dataclasses.dataclass(frozen=True)
class Products:
    """How an attention executes: products of its backward pass (its forward pass has 2), and whether it leaves out
    the keys that causality masks."""

    backward: int
    causal: bool


def executed_flops_per_token(config: ModelConfig, attention: Products) -> float:
    """FLOPs of products that a step runs for a token of a full window, what rematerialisation repeats included.

    A block that is run again leaves out the products that end it (two of a parallel block) where their results are only
    added to the residual stream: the backward pass does not need them.
    """
    head = 2 * config.d_model * config.vocab_size
    convention = Flops.MATMUL if attention.causal else Flops.MATMUL_FULL
    counted = (flops_per_token(config, convention) - patch_flops(config)) / 3 - head
    pair = _attention_flops(config, attention)  # of the two products, all layers
    matrices = counted - pair
    added = 1 if config.experts is None else config.experts.shared  # chosen experts' results also weigh their gradients
    unneeded = 0
    if config.norm_placement is NormPlacement.PRE:
        unneeded += added * config.d_model * config.d_ff
        attention_ends = config.parallel_block or config.feed_forward is FeedForward.NONE
        if attention_ends and config.mixer is Mixer.ATTENTION:
            unneeded += config.d_model * config.n_head * config.head_width
    again = matrices - 2 * config.n_layer * unneeded if config.remat is Remat.FULL else 0
    passes = 1 + attention.backward / 2 + (config.remat is not Remat.NONE)
    return 3 * (head + matrices) + again + pair * passes + patch_flops(config)


def least_traffic(config: ModelConfig, tokens: int, weight_shards: int, microbatches: int) -> int:
    """Bytes of weights and activations that one device reads and writes for `tokens` tokens, the rest fused away.

    Each product reads its operands and writes its result once, forward, backward for inputs and for weights, and again
    where a block is recomputed; scores stay in the kernel. Optimizer and gradients are not in it.

    Args:
      config: the model.
      tokens: of the device in a step.
      weight_shards: devices that share the weights of a product and the vocabulary.
      microbatches: how often the weights are read anew.
    """
    size = 4 if config.dtype is Dtype.FLOAT32 else 2
    D, F = config.d_model, config.visited * config.d_ff
    mixed = _made(config) + _read(config)
    through = 4 * D + (mixed + config.feed_forward.matrices * F) / weight_shards
    passes = 4 if config.remat is Remat.FULL else 3
    weights = (count_parameters(config).matrices + config.d_model * config.vocab_size) / weight_shards
    logits = 4 * tokens * config.vocab_size / weight_shards * 4  # float32, written and read forward and backward
    return round(size * passes * (tokens * config.n_layer * through + microbatches * weights) + logits)


def least_saved(config: ModelConfig, weight_shards: int) -> float:
    """Bytes a token that all blocks keep for the backward pass at the least, cut over `weight_shards` devices.

    Whole blocks run again: their inputs. Else also what the products made (queries, keys, values or gates, what
    attention adds to the residual stream, the hidden layer), and without recomputation what the last products of a
    sublayer read.
    """
    size = 4 if config.dtype is Dtype.FLOAT32 else 2
    D, F = config.d_model, config.visited * config.d_ff
    hidden = max(config.feed_forward.matrices - 1, 0)
    made = (D if config.mixer is Mixer.ATTENTION else 0) + (_made(config) + hidden * F) / weight_shards
    read = (_read(config) + F) / weight_shards
    kept = {Remat.FULL: D, Remat.DOTS: D + made, Remat.NONE: D + made + read}
    return size * config.n_layer * kept[config.remat]


def _made(config: ModelConfig) -> int:
    """Numbers a token that the first products of a layer's mixer make: queries, keys and values, or gates twice."""
    if config.mixer.recurrent:
        return 2 * config.mixer.gates * config.d_model
    return (config.n_head + 2 * config.kv_heads) * config.head_width


def _read(config: ModelConfig) -> int:
    """Numbers a token that its last product reads: weighted sums, or the state before."""
    return config.n_head * config.head_width


def _attention_flops(config: ModelConfig, attention: Products) -> float:
    keys = causal_keys(config)
    seen = sum(keys) if attention.causal else len(keys) * config.context_length
    return float(4 * config.n_head * config.head_width * seen)
