"""Traits of a model that config.json spreads over several fields or says in other numbers than we do."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm.base.errors import UsageError
from lm.interop.fields import Fields
from lm.model.config import ModelConfig


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
        if kind != "default":
            raise fields.refusal("rope_type", kind, "'default'")
        rotary.end(frozenset())
        return {"rope_base": bases[0] if bases else self.base}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"rope_theta": model.rope_base, "rope_scaling": None}


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
    """A window that Qwen switches on for the layers from `max_window_layers` on: here for all layers or none."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        used, width = fields.take("use_sliding_window", False), fields.take("sliding_window", 4096)
        first = fields.number("max_window_layers", 28)
        L = found["n_layer"]
        sliding = [bool(used) and width is not None and layer >= first for layer in range(L)]
        kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
        said = fields.take("layer_types", None)
        if said is not None and said != kinds:
            raise UsageError(
                f"layer_types is {said!r}, that use_sliding_window {used!r} and max_window_layers {first!r} contradict",
                where=fields.where,
            )
        if len(set(sliding)) > 1:
            raise fields.refusal("max_window_layers", first, f"0 (all layers slide) or {L} (none does)")
        return {"window": width if sliding[0] else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        slides = model.window is not None
        return {
            "use_sliding_window": slides,
            "sliding_window": model.window,
            "max_window_layers": 0 if slides else model.n_layer,
        }
