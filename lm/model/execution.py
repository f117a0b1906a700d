"""What a training step executes and moves, where that is more than the conventions of `accounting` count.

Counts are of products only, as there; bytes are the least that memory must carry.
"""

import dataclasses

from lm.model.accounting import Flops, count_parameters, flops_per_token
from lm.model.config import Dtype, FeedForward, ModelConfig, Remat


@dataclasses.dataclass(frozen=True)
class Products:
    """How an attention executes: products of its backward pass (its forward pass has 2), and whether it leaves out
    the keys that causality masks."""

    backward: int
    causal: bool


def executed_flops_per_token(config: ModelConfig, attention: Products) -> float:
    """FLOPs of products that a step runs for a token of a full window, what rematerialisation repeats included.

    A block that is run again stops at the input of its last product, whose result the backward pass does not need.
    """
    head = 2 * config.d_model * config.vocab_size
    counted = flops_per_token(config, Flops.MATMUL if attention.causal else Flops.MATMUL_FULL) / 3 - head
    pair = _attention_flops(config, attention)  # of the two products, all layers
    matrices = counted - pair
    again = matrices - 2 * config.n_layer * config.d_model * config.d_ff if config.remat is Remat.FULL else 0
    passes = 1 + attention.backward / 2 + (config.remat is not Remat.NONE)
    return 3 * (head + matrices) + again + pair * passes


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
    D, F, C = config.d_model, config.d_ff, config.head_width
    hidden = 2 if config.feed_forward is FeedForward.SWIGLU else 1
    heads = config.n_head + 2 * config.kv_heads
    through = 4 * D + (heads + config.n_head) * C / weight_shards + (hidden + 1) * F / weight_shards
    passes = 4 if config.remat is Remat.FULL else 3
    weights = (count_parameters(config).matrices + config.d_model * config.vocab_size) / weight_shards
    logits = 4 * tokens * config.vocab_size / weight_shards * 4  # float32, written and read forward and backward
    return round(size * passes * (tokens * config.n_layer * through + microbatches * weights) + logits)


def least_saved(config: ModelConfig, weight_shards: int) -> float:
    """Bytes a token that all blocks keep for the backward pass at the least, cut over `weight_shards` devices.

    Whole blocks run again: their inputs. Else also what the products made (queries, keys, values, what attention adds
    to the residual stream, the hidden layer), and without recomputation what the last products of a sublayer read.
    """
    size = 4 if config.dtype is Dtype.FLOAT32 else 2
    D, F, C = config.d_model, config.d_ff, config.head_width
    hidden = 2 if config.feed_forward is FeedForward.SWIGLU else 1
    made = D + ((config.n_head + 2 * config.kv_heads) * C + hidden * F) / weight_shards
    read = (config.n_head * C + F) / weight_shards
    kept = {Remat.FULL: D, Remat.DOTS: D + made, Remat.NONE: D + made + read}
    return size * config.n_layer * kept[config.remat]


def _attention_flops(config: ModelConfig, attention: Products) -> float:
    T = config.context_length
    W = T if config.window is None else min(config.window, T)
    keys = W * (2 * T - W + 1) / (2 * T) if attention.causal else T
    return 4 * config.n_layer * config.n_head * config.head_width * keys
