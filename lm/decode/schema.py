"""A JSON schema as a regular expression of documents that are valid under it.

Every text that matches is valid JSON and valid under the schema; not every valid document matches. Properties come in
the schema's order and no others are written, one space at most follows a comma or colon and none stands elsewhere,
numbers have at most 15 digits, and strings escape only what must be, characters beyond ASCII being written as they are.
A keyword that could not be held is refused, never passed over.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lm.base.errors import UsageError

COMMA, COLON = ", ?", ": ?"
CHARACTER = r'([^"\\\x00-\x1f]|\\["\\/bfnrt])'
INTEGER = "(0|-?[1-9][0-9]{0,14})"
NUMBER = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?"

_ANNOTATIONS = {"$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
                "deprecated", "readOnly", "writeOnly"}  # fmt: skip
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_OF_VALUES: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
                              "boolean": bool, "null": type(None)}  # fmt: skip


def regex_of(schema: Any) -> str:
    """The regular expression of a JSON schema, given as parsed JSON.

    Raises:
      UsageError: a keyword or type that is not supported, recursion, or a schema that nothing satisfies.
    """
    return _Converter(schema).value(schema, "#", ())


class _Converter:
    def __init__(self, root: Any):
        self.root = root

    def value(self, schema: Any, at: str, inside: tuple[str, ...]) -> str:
        """`at` is where in the document, `inside` the references that are being followed."""
        if not isinstance(schema, Mapping):
            raise UsageError(f"{json.dumps(schema)} says nothing of what to write", where=f"schema {at}")
        given = {key: schema[key] for key in schema if key not in _ANNOTATIONS}
        if "$ref" in given:
            _only(given, {"$ref"}, at)
            return self._reference(given["$ref"], at, inside)
        if "const" in given or "enum" in given:
            return self._listed(given, at)
        if "anyOf" in given:
            _only(given, {"anyOf"}, at)
            parts = [self.value(part, f"{at}/anyOf/{i}", inside) for i, part in enumerate(given["anyOf"])]
            return _either(parts)
        types = given.pop("type", None)
        if isinstance(types, str):
            types = [types]
        if not types:
            raise _unsupported(next(iter(given), None), at)
        for kind in types:
            if kind not in _KEYWORDS:
                raise UsageError(f"there is no type {json.dumps(kind)}", where=f"schema {at}")
        _only(given, set().union(*(_KEYWORDS[kind] for kind in types)), at)
        return _either([self._of_type(kind, given, at, inside) for kind in types])

    def _of_type(self, kind: str, given: Mapping[str, Any], at: str, inside: tuple[str, ...]) -> str:
        if kind == "object":
            return self._object(given, at, inside)
        if kind == "array":
            if "items" not in given:
                raise UsageError("an array needs 'items'", where=f"schema {at}")
            item = self.value(given["items"], f"{at}/items", inside)
            return rf"\[{_repeated(item, COMMA, *_counts(given, 'minItems', 'maxItems', at))}\]"
        if kind == "string":
            return f'"{CHARACTER}{_braces(*_counts(given, "minLength", "maxLength", at))}"'
        if kind == "integer":
            return _integer(given, at)
        return {"number": NUMBER, "boolean": "(true|false)", "null": "null"}[kind]

    def _reference(self, name: Any, at: str, inside: tuple[str, ...]) -> str:
        where = f"schema {at}"
        if name in inside:
            raise UsageError(f"the reference {json.dumps(name)} contains itself: recursion is not supported",
                             where=where)  # fmt: skip
        if not isinstance(name, str) or not name.startswith("#"):
            raise UsageError(f"the reference {json.dumps(name)} is not within the schema", where=where)
        found = self.root
        for part in name.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise UsageError(f"the reference {json.dumps(name)} leads nowhere", where=where)
            found = found[part]
        return self.value(found, name, (*inside, name))

    def _listed(self, given: Mapping[str, Any], at: str) -> str:
        _only(given, {"const", "enum", "type"}, at)
        values = [given["const"]] if "const" in given else given["enum"]
        kinds = given.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        # A Boolean is an int in Python and not in JSON.
        fitting = [
            value for value in values
            if not kinds or any(isinstance(value, _OF_VALUES[kind]) and (kind == "boolean" or (value is not True
                                and value is not False)) for kind in kinds)
        ]  # fmt: skip
        if not fitting:
            raise _impossible("none of the listed values is of the type", at)
        return _either([_escaped(json.dumps(value, ensure_ascii=False, separators=(",", ":"))) for value in fitting])

    def _object(self, given: Mapping[str, Any], at: str, inside: tuple[str, ...]) -> str:
        if "properties" not in given:
            raise UsageError("an object needs 'properties'", where=f"schema {at}")
        properties, required = given["properties"], set(given.get("required", ()))
        if missing := required - set(properties):
            raise UsageError(f"the required property {json.dumps(min(missing))} has no schema", where=f"schema {at}")
        members = [
            _escaped(json.dumps(name, ensure_ascii=False)) + COLON + self.value(part, f"{at}/properties/{name}", inside)
            for name, part in properties.items()
        ]
        optional = [name not in required for name in properties]
        first = next((i for i, is_optional in enumerate(optional) if not is_optional), None)
        later = [f"({COMMA}{member})" + "?" * left_out for member, left_out in zip(members, optional, strict=True)]
        if first is not None:
            before = "".join(f"({member}{COMMA})?" for member in members[:first])
            return r"\{" + before + members[first] + "".join(later[first + 1 :]) + r"\}"
        starts = [members[i] + "".join(later[i + 1 :]) for i in range(len(members))]
        return r"\{" + _either([*starts, ""]) + r"\}"


def _integer(given: Mapping[str, Any], at: str) -> str:
    """Integers between bounds."""
    bounds = {key: given[key] for key in _KEYWORDS["integer"] if key in given}
    for key, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, int) or abs(bound) >= 10**15:
            raise UsageError(f"{key} must be an integer of at most 15 digits", where=f"schema {at}")
    if not bounds:
        return INTEGER
    largest = 10**15 - 1
    low = max(given.get("minimum", -largest), given.get("exclusiveMinimum", -largest - 1) + 1)
    high = min(given.get("maximum", largest), given.get("exclusiveMaximum", largest + 1) - 1)
    if low > high:
        raise _impossible(f"no integer is at least {low} and at most {high}", at)
    parts = []
    if low < 0:
        parts.append("-" + _either(_between(max(1, -high), -low)))
    if high >= 0:
        parts += _between(max(0, low), high)
    return _either(parts)


def _between(low: int, high: int) -> list[str]:
    """Patterns for the decimal numbers from `low` to `high`, 0 <= low <= high, without leading zeros."""
    found: list[str] = []
    while low <= high:
        # The largest block of equal leading digits that begins at `low`: its last n digits are free.
        free = 0
        while (low % 10 ** (free + 1) == 0 and low + 10 ** (free + 1) - 1 <= high
               and len(str(low)) == len(str(low + 10 ** (free + 1) - 1)) and low > 0):  # fmt: skip
            free += 1
        step = 10**free
        last = low // step % 10
        blocks = min(9 - last, (high - low + 1) // step - 1)
        head = str(low // step // 10) if low // step >= 10 else ""
        found.append(f"{head}[{last}-{last + blocks}]" + (f"[0-9]{{{free}}}" if free else ""))
        low += (blocks + 1) * step
    return found


def _counts(given: Mapping[str, Any], least: str, most: str, at: str) -> tuple[int, int | None]:
    low, high = given.get(least, 0), given.get(most)
    for key, count in ((least, low), (most, high)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise UsageError(f"{key} must be a whole number", where=f"schema {at}")
    if high is not None and low > high:
        raise _impossible(f"{least} is {low} and {most} is {high}", at)
    return low, high


def _braces(low: int, high: int | None) -> str:
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"


def _repeated(item: str, separator: str, low: int, high: int | None) -> str:
    if high == 0:
        return ""
    more = f"({separator}{item}){_braces(max(low - 1, 0), None if high is None else high - 1)}"
    return f"({item}{more})" + "?" * (low == 0)


def _either(parts: Iterable[str]) -> str:
    return "(" + "|".join(parts) + ")"


def _escaped(text: str) -> str:
    return re.sub(r"[^\w\s\"<>=,:;'`~@%&!_/-]", lambda found: "\\" + found[0] if found[0].isascii() else found[0], text)


def _only(given: Iterable[str], allowed: set[str], at: str) -> None:
    for key in given:
        if key not in allowed:
            raise _unsupported(key, at)


def _unsupported(key: str | None, at: str) -> UsageError:
    if key is None:
        return UsageError("a schema that allows anything says nothing of what to write", where=f"schema {at}")
    return UsageError(f"the keyword '{key}' is not supported here", where=f"schema {at}")


def _impossible(why: str, at: str) -> UsageError:
    return UsageError(f"nothing satisfies the schema: {why}", where=f"schema {at}")
