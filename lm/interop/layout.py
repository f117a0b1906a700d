"""A layout: how a family of published models names its numbers, in config.json and in its tensors.

A layout is a table; `read` and `write` turn a config.json into our configuration and back. A model of ours can be
written in a layout exactly when reading what was written gives it back, so nothing else says which layouts fit.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Protocol

from lm.base.config import build, differences, to_dict
from lm.base.errors import UsageError
from lm.interop.fields import IDLE, REQUIRED, Fields
from lm.model.config import Dtype, ModelConfig, Positions


class Trait(Protocol):
    """A part of the function that is spread over several fields, on one side or the other."""

    def read(self, fields: Fields, found: Mapping[str, Any]) -> dict[str, Any]:
        """Our fields from theirs; `found` holds what was read before.

        Raises:
          UsageError: values that are not supported or contradict each other.
        """

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Their fields from ours."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `count` equal parts of the last axis of a module's arrays."""

    module: str
    index: int
    count: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """One family.

    Attributes:
      model_type: as in config.json.
      architecture: the class with a head; `base` is the one without.
      names: our fields that are one of theirs, with its name.
      ours: our fields that are the same in every model of the family.
      modules: our modules and what they are called there; those of layers behind `prefix` and `layers`, the others
        behind `prefix` alone. A {} stands for the number of the layer, a second one for that of the expert.
      prefix: of all names but the head's; checkpoints of the base class lack it.
      defaults: values of `names` that may be left out; of all others none is guessed.
      fixed: fields that must have one of these values; the first is the default.
      traits: all that is no plain renaming.
      idle: further fields that change nothing.
      buffers: a pattern of tensors that are no parameters.
      transposed: whether matrices are [outputs, inputs] (the head always is).
      scale_offset: what is added to a stored norm scale.
    """

    model_type: str
    architecture: str
    base: str
    names: Mapping[str, str]
    ours: Mapping[str, Any]
    modules: Mapping[str, str | Part]
    prefix: str
    layers: str
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    traits: tuple[Trait, ...] = ()
    idle: frozenset[str] = frozenset()
    buffers: str = r".*\.rotary_emb\.inv_freq"
    transposed: bool = True
    scale_offset: float = 0.0

    def read(self, values: Mapping[str, Any], where: str) -> ModelConfig:
        """Our configuration of the model that a config.json describes, in its own type of numbers.

        Raises:
          UsageError: a field that is missing, unknown, not supported or contradicts another.
        """
        fields = Fields(values, where)
        fields.one_of("model_type", (self.model_type,))
        self._check_architectures(fields)
        found = dict(self.ours)
        for ours, theirs in self.names.items():
            found[ours] = fields.number(theirs, self.defaults.get(theirs, REQUIRED))
        for name, supported in self.fixed.items():
            fields.one_of(name, supported)
        for trait in self.traits:
            found |= trait.read(fields, found)
        found["dtype"] = dtype_of(values, where)
        fields.end(IDLE | self.idle)
        try:
            return build(ModelConfig, found, where)
        except UsageError as error:
            field = error.where.removeprefix(where).strip(".")  # "config.model" where no single one is wrong
            what = f"{field}: {error.what}" if field in found else error.what
            raise UsageError(self._in_their_words(what), where=where, do=self._in_their_words(error.do)) from error

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """A config.json; `read` tells whether it says all of `model`."""
        resolved = dataclasses.replace(model, n_kv_head=model.kv_heads, d_head=model.head_width)
        written: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        written |= {theirs: getattr(resolved, ours) for ours, theirs in self.names.items()}
        written |= {name: supported[0] for name, supported in self.fixed.items()}
        for trait in self.traits:
            written |= trait.write(model)
        return written

    def lost(self, model: ModelConfig) -> list[str]:
        """What this layout cannot say of `model`, a line each; empty where it can be written so."""
        try:
            again = self.read(self.write(model), self.model_type)
        except UsageError as error:
            return [f"{error.what} {error.do}".strip()]
        return differences(_function_of(model), _function_of(again), "model")

    def _check_architectures(self, fields: Fields) -> None:
        value = fields.take("architectures", None)
        if value not in (None, [self.architecture], [self.base]):
            raise fields.refusal("architectures", value, f"[{self.architecture!r}]")

    def _in_their_words(self, text: str) -> str:
        return re.sub(r"\w+", lambda word: self.names.get(word[0], word[0]), text)


def dtype_of(values: Mapping[str, Any], where: str) -> Dtype:
    """The type that a config.json says its model computes in; float16 becomes float32.

    Raises:
      UsageError: another type, or two that differ.
    """
    said = {values[name] for name in ("dtype", "torch_dtype") if values.get(name) is not None}
    if len(said) > 1:
        raise UsageError(f"dtype is {values['dtype']!r} and torch_dtype is {values['torch_dtype']!r}", where=where)
    name = said.pop() if said else "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"dtype is {name!r}", where=where, do="Supported: float32, bfloat16, float16.")
    return Dtype.BFLOAT16 if name == "bfloat16" else Dtype.FLOAT32


def _function_of(model: ModelConfig) -> dict[str, Any]:
    """What a model computes, without how it begins and how it is run."""
    told = to_dict(model)
    for name in ("init_std", "unroll_layers", "remat", "dtype", "window_layers"):
        del told[name]
    if model.positions is not Positions.ROPE:
        del told["rope_base"]
    for name in ("balance_loss", "router_z_loss"):
        (told["experts"] or {}).pop(name, None)
    return {
        **told,
        "n_kv_head": model.kv_heads,
        "d_head": model.head_width,
        "window": model.windows,
        "qkv_bias": model.qkv_biased,
        "attention_scale": model.head_width**-0.5 if model.attention_scale is None else model.attention_scale,
    }
