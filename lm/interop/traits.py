"""Traits of a model that config.json spreads over several fields or says in other numbers than we do."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm.base.errors import UsageError
from lm.interop.fields import Fields
from lm.model.config import ModelConfig
from lm.model.parts import Experts, Slowdown

# Our fields of `RopeScaling` and theirs, by kind.
_SLOWED = {
    Slowdown.LINEAR: {"factor": "factor"},
    Slowdown.LLAMA3: {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_context": "original_max_position_embeddings",
    },
}
_SLIDING = {True: "sliding_attention", False: "full_attention"}


class InnerWidth:
    """GPT-2's `n_inner`: left out or null it is four times the width."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        inner = fields.number("n_inner", None)
        return {"d_ff": 4 * found["d_model"] if inner is None else inner}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"n_inner": model.d_ff}


class WholeHeads:
    """A width that is a multiple of the heads, also where `head_dim` is given: transformers refuses others here."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        if found["d_model"] % found["n_head"]:
            raise UsageError(
                f"hidden_size {found['d_model']} is no multiple of num_attention_heads {found['n_head']}",
                where=fields.where,
            )
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}


class Biases:
    """Llama's biases: of all projections or of none."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        attention, feed_forward = fields.take("attention_bias", False), fields.take("mlp_bias", False)
        if attention != feed_forward:
            raise UsageError(
                f"attention_bias is {attention!r} and mlp_bias is {feed_forward!r}",
                where=fields.where,
                do="Supported: both or neither.",
            )
        return {"bias": bool(attention)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"attention_bias": model.bias, "mlp_bias": model.bias}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions, in the old fields (`rope_theta`, `rope_scaling`) or the new one (`rope_parameters`)."""

    base: float = 10_000.0  # where config.json says none

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        told = dict(fields.take("rope_scaling", None) or {})
        for name, value in (fields.take("rope_parameters", None) or {}).items():
            if told.setdefault(name, value) != value:
                raise UsageError(f"rope_scaling and rope_parameters differ in {name}", where=fields.where)
        bases = [base for base in (fields.take("rope_theta", None), told.pop("rope_theta", None)) if base is not None]
        if len(set(bases)) > 1:
            raise UsageError(f"rope_theta is {bases[0]} and {bases[1]} in rope_parameters", where=fields.where)
        rotary = Fields(told, f"{fields.where}: rope_parameters")
        for outer in (fields, rotary):
            outer.one_of("partial_rotary_factor", (1.0, None))
        older = rotary.take("type", "default")
        kind = rotary.take("rope_type", older)
        scaling = None
        if kind != "default":
            if kind not in list(Slowdown):
                raise fields.refusal("rope_type", kind, " or ".join(["'default'", *map(repr, map(str, Slowdown))]))
            names = _SLOWED[Slowdown(kind)]
            scaling = {"kind": kind, **{ours: rotary.number(theirs) for ours, theirs in names.items()}}
        rotary.end(frozenset())
        return {"rope_base": bases[0] if bases else self.base, "rope_scaling": scaling}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        scaling = None
        if model.rope_scaling is not None:
            names = _SLOWED[model.rope_scaling.kind]
            scaling = {theirs: getattr(model.rope_scaling, ours) for ours, theirs in names.items()}
            scaling = {"rope_type": model.rope_scaling.kind.value, **scaling}
        return {"rope_theta": model.rope_base, "rope_scaling": scaling}


@dataclasses.dataclass(frozen=True)
class Window:
    """A sliding window that all layers have (Mistral): null for none."""

    default: int | None

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        width = fields.take("sliding_window", self.default)
        if not isinstance(width, int | None):
            raise fields.refusal("sliding_window", width, "a number of tokens, or null")
        return {"window": width}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"sliding_window": model.window}


class SwitchedWindow:
    """A window that Qwen switches on for the layers from `max_window_layers` on."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        used, width = fields.take("use_sliding_window", False), fields.take("sliding_window", 4096)
        first = fields.number("max_window_layers", 28)
        sliding = [bool(used) and width is not None and layer >= first for layer in range(found["n_layer"])]
        said, kinds = fields.take("layer_types", None), [_SLIDING[slides] for slides in sliding]
        if said not in (None, kinds):
            raise UsageError(
                f"layer_types is {said!r}; by use_sliding_window and max_window_layers it is {kinds!r}",
                where=fields.where,
            )
        return _windows(sliding, width)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        full = [width is None for width in model.windows]
        return {
            "use_sliding_window": model.window is not None,
            "sliding_window": model.window,
            "max_window_layers": full.index(False) if False in full else model.n_layer,
        }


class WindowByLayer:
    """A window of some layers, named one by one; unnamed it is every other one, from the first on (Gemma 2)."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        width = fields.take("sliding_window", 4096)
        L = found["n_layer"]
        kinds = fields.take("layer_types", None) or [_SLIDING[layer % 2 == 0] for layer in range(L)]
        if len(kinds) != L or not {*kinds} <= {*_SLIDING.values()}:
            raise fields.refusal("layer_types", kinds, f"{L} of {' and '.join(_SLIDING.values())}")
        return _windows([kind == _SLIDING[True] and width is not None for kind in kinds], width)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        kinds = [_SLIDING[width is not None] for width in model.windows]
        return {"sliding_window": model.window, "layer_types": kinds}


def _windows(sliding: list[bool], width: Any) -> dict[str, Any]:
    """Our fields for a window in these layers: their pattern is as short as it repeats."""
    if not any(sliding):
        return {}
    L = len(sliding)
    period = next(n for n in range(1, L + 1) if all(sliding[i] == sliding[i % n] for i in range(L)))
    return {"window": width, "window_layers": tuple(sliding[:period])}


class ScaledLikeGemma:
    """Gemma's token vectors are sqrt(D) times those in the table, and its scores have a scale of their own."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        scalar = fields.number("query_pre_attn_scalar", 256)
        if scalar <= 0:
            raise fields.refusal("query_pre_attn_scalar", scalar, "a number above 0")
        return {"embedding_scale": found["d_model"] ** 0.5, "attention_scale": scalar**-0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        scale = model.attention_scale
        return {"query_pre_attn_scalar": model.head_width if scale is None else round(scale**-2)}


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Experts: how many, how many a token visits, whether their weights sum to 1 (without a field for it they do)."""

    count: str  # of the two names that there are for it, the family's own
    normalised: str | None = None

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        counts = {fields.number(name, None) for name in ("num_experts", "num_local_experts")} - {None}
        if len(counts) != 1:
            raise UsageError(f"{self.count} is {' and '.join(map(str, counts)) or 'missing'}", where=fields.where)
        experts = {"count": counts.pop(), "chosen": fields.number("num_experts_per_tok")}
        if self.normalised is not None:
            experts["normalised"] = fields.take(self.normalised, False)
        return {"experts": experts}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        experts = model.experts or Experts(1, 1)
        written = {self.count: experts.count, "num_experts_per_tok": experts.chosen}
        return written if self.normalised is None else {**written, self.normalised: experts.normalised}
