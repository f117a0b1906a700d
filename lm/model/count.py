"""`lm count`: what a model and its run cost, every number beside its convention."""

import dataclasses
import textwrap
from fractions import Fraction
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.model.accounting import (
    Flops,
    cache_bytes,
    count_parameters,
    flops_per_token,
    jaxpr_dot_flops,
    kaplan_forward_flops,
    step_flops,
)
from lm.model.config import ModelConfig, Remat
from lm.model.counting import Counting
from lm.model.score import predicted, token_log_probs
from lm.model.transformer import Transformer, abstract_variables

CACHE_NUMBERS = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}  # bytes a number and a scale
_CONVENTIONS = {
    "parameters": "each trained number once; a tied table is in embedding; norms = scales and all biases; "
    "nonembedding = matrices + norms; active = what a token uses, of experts the chosen and shared",
    "flops_per_token": "training = forward + backward, a token that bears loss, of a full window; a lookup is free, a "
    "tied head is not",
    "flops_per_processed_token": "the same FLOPs over all positions that layers read, of an encoder and of its decoder",
    **{convention.value: convention.meaning for convention in Flops},
    "kaplan_forward": "forward only, 2N + 2 n_layer n_ctx d_model with N = active nonembedding (Kaplan et al. 2020), "
    "of a decoder by itself",
    "cache_bytes": "keys and values of one sequence: 2 x layers x key-value heads x head width x tokens x bytes; a "
    "sliding window of all layers keeps its width of tokens; int8 has a float32 scale for every head width of numbers; "
    "recurrent layers keep float32 states at any length, a token adds nothing; an encoder's source is kept whole",
    "run_flops": "tokens of the whole run x flops_per_token",
    "tokens": "those that bear loss; processed = positions that layers read, of which an encoder's bear none",
}
_COUNTING_CONVENTIONS = {
    "parameters": "stored counts, one for each different n-gram seen: at most V^k and at most one a token of the run, "
    "level 1 all V; how many there are is known once the text is counted: params_total of result.json; active = the "
    "counts that the probability of one token is made of, one an order",
    "flops_per_token": "every convention counts products, of which there are none: tables are looked up",
    "cache_bytes": "the order - 1 newest tokens, int32, whatever the context",
    "run_flops": "none",
}


def costs(config: ModelConfig | Counting, tokens: int) -> dict[str, Any]:
    """All counts of a model that is trained on `tokens` tokens, as JSON-able integers with their conventions.

    Args:
      config: the model.
      tokens: that bear loss, in full windows.
    """
    if isinstance(config, Counting):
        return _counting_costs(config, tokens)
    counts, active = count_parameters(config), count_parameters(config, active=True)
    T, processed = config.predicted_length, config.processed_length
    flops = {convention.value: flops_per_token(config, convention) for convention in Flops}
    kept = {"float32": CACHE_NUMBERS["float32"]} if config.mixer.recurrent else CACHE_NUMBERS

    def held(length: int, sizes: tuple[int, int]) -> int:
        return cache_bytes(config, length, 1, *sizes)

    return {
        "parameters": dataclasses.asdict(counts)
        | {"total": counts.total, "active": active.total, "nonembedding": counts.nonembedding},
        "flops_per_token": flops | ({"kaplan_forward": kaplan_forward_flops(config)} if config.encoder is None else {}),
        "flops_per_processed_token": {name: round(Fraction(value * T, processed)) for name, value in flops.items()},
        "cache_bytes": {
            name: {"per_token": held(1, sizes) - held(0, sizes), "at_context": held(T, sizes)}
            for name, sizes in kept.items()
        },
        "context_length": config.context_length,
        "tokens": tokens,
        "tokens_processed": tokens // T * processed,
        "run_flops": {convention.value: step_flops(config, tokens, convention) for convention in Flops},
        "conventions": _CONVENTIONS,
    }


def _counting_costs(config: Counting, tokens: int) -> dict[str, Any]:
    V, orders = config.vocab_size, range(1, config.order + 1)
    most = {f"order_{k}": V if k == 1 else min(V**k, tokens) for k in orders}
    none = {convention.value: 0 for convention in Flops}
    return {
        "parameters": most | {"total": sum(most.values()), "active": config.order},
        "flops_per_token": none | {"kaplan_forward": 0},
        "flops_per_processed_token": none,
        "cache_bytes": {"int32": {"per_token": 0, "at_context": 4 * max(0, config.order - 1)}},
        "context_length": config.context_length,
        "tokens": tokens,
        "tokens_processed": tokens,
        "run_flops": none,
        "conventions": _COUNTING_CONVENTIONS,
    }


def as_text(counted: dict[str, Any]) -> str:
    """`costs` as aligned lines for people."""
    lines, conventions = [], counted["conventions"]
    processed = ["flops_per_processed_token"] if counted["tokens_processed"] != counted["tokens"] else []
    for title in ("parameters", "flops_per_token", *processed, "run_flops"):
        lines += _wrapped(f"{title.replace('_', ' ')}: {conventions[title]}", "")
        for name, value in counted[title].items():
            lines += _wrapped(f"  {name:18}{value:>30,}  {conventions.get(name, '')}", " " * 52)
        lines.append("")
    lines += _wrapped(f"cache bytes: {conventions['cache_bytes']}", "")
    context = f"at {counted['context_length']:,} tokens"
    lines += [
        f"  {name:18}{size['per_token']:>15,} a token {size['at_context']:>18,} {context}"
        for name, size in counted["cache_bytes"].items()
    ]
    lines += ["", f"tokens of the run: {counted['tokens']:,} that bear loss, {counted['tokens_processed']:,} processed"]
    if "traced_flops_per_token" in counted:
        lines.append(f"flops_matmul_full summed over the traced step: {counted['traced_flops_per_token']:,} a token")
    return "\n".join(lines)


def traced_flops_per_token(config: ModelConfig) -> int:
    """`flops_matmul_full` of a predicted token, summed over every product in the traced loss and gradient of a window.

    Nothing is computed, so that any size can be traced. Rematerialisation is left out: what it repeats is no
    part of any convention.
    """
    model = Transformer(dataclasses.replace(config, remat=Remat.NONE))
    tokens_BT = jax.ShapeDtypeStruct((1, config.context_length), jnp.int32)
    width = config.patch_width
    patches_BTP = None if width is None else jax.ShapeDtypeStruct((*tokens_BT.shape, width), jnp.float32)
    params = nn.unbox(abstract_variables(config))

    def loss(params: Any, inputs_BT: jax.Array, targets_BT: jax.Array, patches_BTP: jax.Array | None) -> jax.Array:
        logits_BTV = jnp.asarray(model.apply(params, inputs_BT, None, patches_BTP))
        return -jnp.mean(token_log_probs(logits_BTV, predicted(logits_BTV, targets_BT)))

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(params, tokens_BT, tokens_BT, patches_BTP)
    return round(Fraction(jaxpr_dot_flops(jaxpr), config.predicted_length))


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, 118, subsequent_indent=indent, drop_whitespace=True) or [""]
