import dataclasses
import enum
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.base.config import LATER, build, canonical_json, content_hash, differences, load_file, override, to_dict
from lm.base.errors import UsageError


class Kind(enum.StrEnum):
    A = "alpha"
    B = "beta"


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float
    kind: Kind = Kind.A
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    steps: int
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)
    names: dict[str, str] = dataclasses.field(default_factory=dict)
    maybe: Inner | None = None


PLAIN = {"inner": {"rate": 0.1}, "steps": 3}


@given(
    rate=st.floats(allow_nan=False, allow_infinity=False),
    steps=st.integers(),
    sizes=st.lists(st.integers(), max_size=3),
    names=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    maybe=st.booleans(),
)
def test_a_built_configuration_comes_back_from_its_json_as_it_was(rate, steps, sizes, names, maybe):
    inner = Inner(rate, Kind.B, "x" if maybe else None)
    config = Outer(inner, steps, maybe, tuple(sizes), names, inner if maybe else None)
    assert build(Outer, json.loads(canonical_json(config))) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**PLAIN, 3: 3}, ["config: unknown field '3'"]),
        ({**PLAIN, "stps": 3}, ["config: unknown field 'stps'", "'steps'"]),
        ({"inner": {"rate": 0.1, "rte": 1}, "steps": 3}, ["config.inner: unknown field 'rte'", "'rate'"]),
        ({"inner": {"rate": 0.1}}, ["'steps' is missing"]),
        ({**PLAIN, "steps": "3"}, ["config.steps: expected int, got '3'"]),
        ({**PLAIN, "steps": True}, ["config.steps: expected int, got True"]),
        ({**PLAIN, "steps": 2.5}, ["config.steps: expected int, got 2.5"]),
        ({**PLAIN, "inner": {"rate": math.nan}}, ["config.inner.rate: nan is not a finite number"]),
        ({**PLAIN, "steps": math.inf}, ["config.steps: inf is not a finite number"]),
        ({**PLAIN, "inner": 3}, ["config.inner: expected fields of Inner"]),
        ({**PLAIN, "inner": {"rate": 1, "kind": "alhpa"}}, ["config.inner.kind", "'alpha'"]),
        ({**PLAIN, "sizes": 3}, ["config.sizes: expected a sequence"]),
        ({**PLAIN, "sizes": [1, "x"]}, ["config.sizes[1]"]),
        ({**PLAIN, "names": [1]}, ["config.names: expected a mapping"]),
    ],
)
def test_what_does_not_fit_the_fields_is_refused_by_name(values, words):
    with pytest.raises(UsageError) as caught:
        build(Outer, values)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("inner.rate=3e-3", ("inner", "rate", 3e-3)),
        ("inner.kind=beta", ("inner", "kind", Kind.B)),
        ("inner.note=none", ("inner", "note", None)),
        ("inner.note=a=b", ("inner", "note", "a=b")),
        ("steps=1e3", ("steps", 1000)),
        ("steps=9007199254740993", ("steps", 9007199254740993)),  # 2**53 + 1: no way through a float
        ("flag=TRUE", ("flag", True)),
        ("sizes=4,5", ("sizes", (4, 5))),
        ("sizes=[6]", ("sizes", (6,))),
        ('names={"a": "b"}', ("names", {"a": "b"})),
        ("maybe.rate=2", ("maybe", "rate", 2.0)),
    ],
)
def test_an_override_is_parsed_by_the_type_of_its_field(assignment, value):
    found = override(build(Outer, PLAIN), [assignment])
    for name in value[:-1]:
        found = getattr(found, name)
    assert found == value[-1]
    assert type(found) is type(value[-1])


@pytest.mark.parametrize(
    "assignment",
    ["steps", "stps=3", "inner.rat=1", "steps.x=1", "steps=many", "steps=1.5", "steps=nan", "steps=inf",
     "inner.rate=nan", "inner.rate=-inf", "flag=maybe", "sizes=[1", "sizes=a,b", "names={", "inner.kind=gamma",
     "maybe.note=x", "inner=3"],
)  # fmt: skip
def test_an_override_that_does_not_parse_is_a_usage_error(assignment):
    with pytest.raises(UsageError, match="config"):
        override(build(Outer, PLAIN), [assignment])


def test_a_hash_moves_with_every_leaf_and_with_nothing_else():
    base = build(Outer, PLAIN)
    moved = [override(base, [text]) for text in ("inner.rate=0.2", "steps=4", "flag=true", "sizes=1", "inner.note=x")]
    assert len({content_hash(config) for config in [base, *moved]}) == 1 + len(moved)
    assert content_hash({"a": 1, "b": [2.0, None]}) == content_hash({"b": (2.0, None), "a": 1})


def test_a_field_that_came_later_moves_a_hash_only_off_its_default():
    @dataclasses.dataclass(frozen=True)
    class Grown(Inner):
        added: Inner | None = dataclasses.field(default=None, metadata=LATER)

    old, grown = Inner(0.1), Grown(0.1)
    assert content_hash([old]) == content_hash([grown])
    assert content_hash([dataclasses.replace(grown, added=old)]) not in (content_hash([old]), content_hash([grown]))
    assert to_dict(grown) == {**to_dict(old), "added": None}


def test_differences_name_each_leaf_once():
    old, new = to_dict(build(Outer, PLAIN)), to_dict(override(build(Outer, PLAIN), ["inner.rate=0.2", "flag=true"]))
    assert differences(old, new) == ["config.inner.rate: 0.1 -> 0.2", "config.flag: False -> True"]
    assert differences(old, old) == []


def test_a_file_is_evaluated_with_its_argument(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(arg=None):\n    return ConfigDict({'inner': {'rate': 0.1}, 'steps': int(arg or 3)})\n"
    )
    assert build(Outer, load_file(str(path))) == build(Outer, PLAIN)
    assert load_file(f"{path}:7")["steps"] == 7
    (tmp_path / "file.json").write_text(json.dumps(PLAIN))
    assert load_file(str(tmp_path / "file.json")) == PLAIN
    (tmp_path / "file.json").write_text(json.dumps({"config": PLAIN, "identity": {"corpus": "c"}}))
    assert load_file(str(tmp_path / "file.json")) == PLAIN  # what a run folder records


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing.py", None, "there is no such config file"),
        ("a.py", "def get_config(:\n", "line 1 is not Python"),
        ("a.py", "x = 1\n", "defines get_config"),
        ("a.py", "import no_such_module\n", "a.py:1: ModuleNotFoundError: .*no_such_module"),
        ("a.py", "def get_config(arg):\n    return {}[arg]\n", "a.py:2: KeyError"),
        ("a.py", "def get_config(arg):\n    return None\n", "mapping, not None"),
        ("a.json", "{", "not JSON"),
        ("a.py", "import sys\nsys.exit(3)\n", "a.py:2: SystemExit: 3"),
        ("a.py", "x = '\0'\n", "null bytes"),
        ("a.json", "[]", "mapping, not"),
        ("a.json", b'{"a": "\xff"}', "not JSON"),
        ("a.json", '{"config": [], "identity": {}}', "mapping, not"),
        ("a.txt", "x", r"\.py or \.json"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=words) as caught:
        load_file(str(tmp_path / name))
    assert "\n" not in str(caught.value)
