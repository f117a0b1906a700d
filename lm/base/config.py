"""Strict configuration: `ml_collections` files in, frozen dataclasses out.

A config file defines `get_config(arg: str | None) -> ConfigDict`. It is resolved against frozen dataclasses whose
fields carry the types and the visible defaults; an unknown or missing field is an error that names it and the nearest
known one. Overrides (`--config.optimizer.peak_lr=3e-3`) are parsed by the type of the field that they replace.
"""

import dataclasses
import difflib
import enum
import hashlib
import importlib.util
import json
import math
import traceback
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ml_collections

from lm.base.errors import LmError, UsageError

T = TypeVar("T")

LATER = {"later": True}
"""Metadata of a field that came after runs had been named: at its default it leaves hashes as they were."""


def load_file(path_and_arg: str) -> dict[str, Any]:
    """Evaluates `path[:arg]` and returns what its `get_config(arg)` says, as plain nested dicts.

    A `.json` path is read as an already resolved configuration and takes no argument; it may be a run's `config.json`.

    Raises:
      UsageError: the file is missing, is not Python (or JSON), has no `get_config`, or its code fails.
    """
    path_text, _, arg = path_and_arg.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise UsageError(
            "there is no such config file", where=path_text, do="Name a file with get_config(arg), or a .json."
        )
    if path.suffix == ".json":
        return _mapping(_recorded(_parse_json(path.read_bytes(), path_text)), path_text)
    spec = importlib.util.spec_from_file_location(f"lm_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError("a config file must end in .py or .json", where=path_text)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UsageError("a config file defines get_config(arg)", where=path_text, do="See configs/llama.py.")
        config = module.get_config(arg or None)
    except SyntaxError as error:
        place = "it" if error.lineno is None else f"line {error.lineno}"
        raise UsageError(f"{place} is not Python: {error.msg}", where=path_text) from error
    except LmError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's own code raises
        line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)][-1:]
        where = ":".join([path_text, *map(str, line)])
        raise UsageError(f"{type(error).__name__}: {error}", where=where) from error
    return _mapping(config.to_dict() if isinstance(config, ml_collections.ConfigDict) else config, path_text)


def build(cls: type[T], values: Mapping[str, Any], where: str = "config") -> T:
    """Builds the frozen dataclass `cls` from nested mappings, strictly.

    Raises:
      UsageError: an unknown field (with the nearest known one), a missing field, or a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls))}
    for name in values:
        if name not in fields:
            raise _unknown(name, fields, where)
    built = {}
    for name, field in fields.items():
        if name in values:
            built[name] = _convert(values[name], hints[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(f"the field '{name}' is missing", where=where, do=f"{cls.__name__} needs it.")
    return cls(**built)


def override(config: T, assignments: Iterable[str], where: str = "config") -> T:
    """Applies `leaf.path=value` assignments to a built dataclass, each value parsed by its field's type.

    Raises:
      UsageError: an unknown leaf, or a value that does not parse as the field's type.
    """
    values = to_dict(config)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError(f"'{assignment}' has no value", where=where, do="Write --config.leaf=value.")
        _assign(values, type(config), path.split("."), text, where)
    return build(type(config), values, where)


def to_dict(config: Any, *, whole: bool = True) -> Any:
    """The plain JSON-able form of a built configuration: nested dicts, lists, numbers, strings, booleans, None.

    Not `whole`, it lacks the fields marked `LATER` that have their default.
    """

    def plain(value: Any) -> Any:
        return to_dict(value, whole=whole)

    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = {f: getattr(config, f.name) for f in dataclasses.fields(config)}
        return {f.name: plain(x) for f, x in values.items() if whole or f.metadata != LATER or x != f.default}
    if isinstance(config, enum.Enum):
        return config.value
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items()}
    if isinstance(config, tuple | list):
        return [plain(value) for value in config]
    return config


def canonical_json(value: Any) -> str:
    """One text per value: sorted keys, no spaces, full-precision floats, no `LATER` defaults. NaN is refused."""
    return json.dumps(to_dict(value, whole=False), sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(value: Any, length: int = 12) -> str:
    """The first `length` hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def differences(old: Any, new: Any, where: str = "config") -> list[str]:
    """The leaves in which two plain configurations differ, as `path: old -> new` lines."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        names = list(dict.fromkeys([*old, *new]))
        return [line for name in names for line in differences(old.get(name), new.get(name), f"{where}.{name}")]
    return [] if old == new else [f"{where}: {old!r} -> {new!r}"]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an error message: the nearest known name, or the list of them when none is near."""
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known)}."


def _unknown(name: str, known: Iterable[str], where: str) -> UsageError:
    return UsageError(f"unknown field '{name}'", where=where, do=nearest(name, known))


def _assign(values: dict[str, Any], cls: Any, path: list[str], text: str, where: str) -> None:
    name, rest = path[0], path[1:]
    hints = typing.get_type_hints(cls)
    if name not in hints:
        raise _unknown(name, hints, where)
    kind = _without_none(hints[name])
    if not rest:
        values[name] = _parse(text, hints[name], f"{where}.{name}")
        return
    if not dataclasses.is_dataclass(kind):
        raise UsageError(f"'{name}' has no fields of its own", where=where)
    if values.get(name) is None:
        values[name] = {}
    _assign(values[name], kind, rest, text, f"{where}.{name}")


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint


def _parse(text: str, hint: Any, where: str) -> Any:
    """Reads command-line text as the field's type; sequences are JSON lists or comma-separated."""
    kind = _without_none(hint)
    if kind is not hint and text.lower() in ("none", "null"):
        return None
    if typing.get_origin(kind) in (tuple, list):
        items = _parse_json(text, where) if text.startswith("[") else [part for part in text.split(",") if part]
        item_kind = typing.get_args(kind)[0]
        return [_parse(item, item_kind, where) if isinstance(item, str) else item for item in items]
    if dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict:
        return _parse_json(text, where)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise UsageError(f"'{text}' is not true or false", where=where)
        return text.lower() in ("true", "1")
    if kind in (int, float):
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise UsageError(f"'{text}' is not a number", where=where)
        if kind is int and number != int(number):
            raise UsageError(f"'{text}' is not a whole number", where=where)
        return int(text) if kind is int and text.lstrip("+-").isdigit() else kind(number)
    return text


def _recorded(value: Any) -> Any:
    """The configuration inside what a run folder records, which holds fingerprints too; else `value` itself."""
    return value["config"] if isinstance(value, dict) and value.keys() == {"config", "identity"} else value


def _parse_json(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", where=where) from None


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"a configuration is a mapping, not {value!r}", where=where)
    return dict(value)


def _convert(value: Any, hint: Any, where: str) -> Any:
    kind = _without_none(hint)
    if value is None and kind is not hint:
        return None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(f"expected fields of {kind.__name__}, got {value!r}", where=where)
        return build(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            raise UsageError(
                f"'{value}' is not one of them", where=where, do=nearest(str(value), [member.value for member in kind])
            ) from None
    origin = typing.get_origin(kind)
    if origin in (tuple, list):
        if not isinstance(value, tuple | list):
            raise UsageError(f"expected a sequence, got {value!r}", where=where)
        item_kind = typing.get_args(kind)[0]
        return origin(_convert(item, item_kind, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UsageError(f"expected a mapping, got {value!r}", where=where)
        item_kind = typing.get_args(kind)[1]
        return {key: _convert(item, item_kind, f"{where}.{key}") for key, item in value.items()}
    return _scalar(value, kind, where)


def _scalar(value: Any, kind: Any, where: str) -> Any:
    if kind in (int, float) and isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{value} is not a finite number", where=where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value == int(value):
        return int(value)
    if kind is Any or (isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool))):
        return value
    raise UsageError(f"expected {getattr(kind, '__name__', kind)}, got {value!r}", where=where)
