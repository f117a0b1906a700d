"""Constrained decoding: every answer matches, nothing else is forbidden, and it ends in time."""

import dataclasses
import functools
import json
import re

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import regex

from lm.base.errors import UsageError
from lm.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from lm.decode import automaton, constrain
from lm.decode.automaton import DEAD, NEVER, START, over_tokens
from lm.decode.constrain import Constraint
from lm.decode.generate import Decoder, generate
from lm.decode.loop import Finish
from lm.decode.schema import regex_of
from lm.decode.settings import Settings
from lm.decode.slots import bucket
from tests.decode import schemas, tiny
from tests.model import variants

SINGLE = ByteTokenizer()
BYTES = [bytes([byte]) for byte in range(256)]
BOOK = {
    "$defs": {"name": {"type": "string", "minLength": 12, "maxLength": 15}},
    "type": "object",
    "properties": {
        "title": {"$ref": "#/$defs/name"},
        "year": {"type": "integer", "minimum": -500, "maximum": 2030},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["new", "café", None]}, "maxItems": 3},
        "lent": {"type": "boolean"},
    },
    "required": ["title", "year"],
    "additionalProperties": False,
}


@functools.cache
def table(pattern):
    return over_tokens(pattern, BYTES)


def after(table, data, state=START):
    for byte in data:
        state = table.next_SC[state, table.class_V[byte]]
    return state


def accepts(pattern, text):
    data = text if isinstance(text, bytes) else text.encode()
    return table(pattern).distance_S[after(table(pattern), data)] == 0


def walk(table, random, left):
    """A random text of at most `left` tokens: what the loop does, on the host and with every token as likely."""
    state, data = START, b""
    while True:
        yield state, data
        distances = table.distance_S[table.next_SC[state, table.class_V]]
        tokens = np.flatnonzero(distances < left)
        if table.distance_S[state] == 0 and (len(tokens) == 0 or random.random() < 0.05):
            return
        token = random.choice(tokens)  # an empty choice would be an error: every prefix can be completed
        data += BYTES[token]
        state, left = table.next_SC[state, table.class_V[token]], left - 1


def agrees_with_another_engine(table, pattern, state, data):
    """What the table allows next is what the partial matches of the `regex` module allow, byte by byte."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    assert (table.distance_S[state] == 0) == bool(pattern.fullmatch(text))
    for byte in range(0x80):
        allowed = table.next_SC[state, table.class_V[byte]] != DEAD
        assert allowed == bool(pattern.fullmatch(text + chr(byte), partial=True)), (text, byte)


def check_schemas(count, seed):
    random = np.random.default_rng(seed)
    for _ in range(count):
        given = schemas.schema(random)
        expression = regex_of(given)
        made, other = over_tokens(expression, BYTES), regex.compile(expression)
        assert np.all(made.distance_S[1:] != NEVER)
        shortest = int(made.distance_S[START])
        for extra in (0, 3, 60):
            for state, data in walk(made, random, shortest + extra):
                if random.random() < 0.15:
                    agrees_with_another_engine(made, other, state, data)
            assert len(data) <= shortest + extra
            jsonschema.validate(json.loads(data), given)
        for separators in ((",", ":"), (", ", ": ")):
            document = json.dumps(schemas.document(given, random), ensure_ascii=False, separators=separators)
            if "enum" not in str(given) and "const" not in str(given):  # listed values are written in one way
                assert made.distance_S[after(made, document.encode())] == 0, (given, document)


def test_random_schemas_every_walk_is_valid_and_the_next_bytes_are_those_of_another_engine():
    check_schemas(50, seed=0)


@pytest.mark.full
def test_a_thousand_random_schemas():
    check_schemas(1000, seed=1)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    texts = ['{"title": "café", "year": 1999, "tags": ["new", null]}', "über 😀 the theme then", "true false null"] * 9
    train_bpe(texts, 320, path)
    return load_tokenizer(str(path))


@functools.cache
def decoder_of(tokenizer):
    config = variants.tiny(vocab_size=tokenizer.vocab_size + 3, context_length=128, n_layer=1)
    return Decoder(config, variants.parameters(config), tokenizer)


def answers(decoder, request):
    """Answers to two prompts, in batches of one size: one program serves all tests of a decoder."""
    return generate(decoder, ["a", "{"], dataclasses.replace(request, samples=8))


def test_tokens_of_many_bytes_do_what_their_bytes_do(bpe):
    expression = regex_of(BOOK)
    pieces = [bpe.decode([token]) for token in range(bpe.vocab_size)]
    assert max(map(len, pieces)) > 3
    tokens, single = over_tokens(expression, pieces), table(expression)
    for token, piece in enumerate(pieces):
        wanted = after(single, piece, np.arange(len(single.next_SC))) if piece else DEAD
        assert np.all(tokens.next_SC[:, tokens.class_V[token]] == wanted), piece
    assert np.all(tokens.distance_S <= single.distance_S)


@pytest.mark.parametrize("over", ["bytes", pytest.param("bpe", marks=pytest.mark.slow)])
def test_every_answer_is_valid_at_any_temperature_and_length(over, bpe):
    decoder = decoder_of(SINGLE if over == "bytes" else bpe)
    constraint = Constraint.of_schema(BOOK)
    shortest = constraint.over(decoder.tokenizer, decoder.config.vocab_size).shortest
    ends = set()
    for temperature in (0.0, 0.7, 1.5):
        for tokens in (shortest, shortest + 5, bucket(shortest)):
            asked = tiny.request(
                max_tokens=tokens,
                steps=Settings(temperature=temperature).steps(decoder.config.vocab_size),
                constraint=constraint,
                end_ids=None,
            )
            for answer in answers(decoder, asked):
                jsonschema.validate(json.loads(answer.text), BOOK)
                ends.add(answer.finish)
    assert ends == {Finish.END}  # the closing brace, after which nothing can follow
    with pytest.raises(UsageError, match=f"shortest answer under the constraint has {shortest} tokens"):
        generate(decoder, ["a"], tiny.request(max_tokens=shortest - 1, constraint=constraint))


def test_an_end_token_comes_only_where_the_text_is_complete_and_the_limit_too():
    decoder = decoder_of(SINGLE)
    wanted = tiny.request(constraint=Constraint("([ab]c)+"), max_tokens=41, end_ids=None)
    ended = answers(decoder, wanted)  # at an odd limit the end is all that fits
    cut = answers(decoder, dataclasses.replace(wanted, max_tokens=40, end_ids=()))
    assert all(re.fullmatch(b"([ab]c)+", answer.text) for answer in [*ended, *cut])
    assert all(answer.tokens[-1] == SINGLE.eos_id and answer.finish is Finish.END for answer in ended)
    assert all(len(answer.tokens) == 40 and answer.finish is Finish.LENGTH for answer in cut)


def test_only_the_strategys_log_probabilities_know_of_the_constraint():
    answer, *_ = answers(decoder_of(SINGLE), tiny.request(constraint=Constraint("abcabc")))
    assert answer.text == b"abcabc"
    assert np.all(answer.strategy_log_probs == 0)  # each token is the only one
    assert np.all(answer.log_probs < -0.1)


def test_the_mask_leaves_allowed_logits_as_they_are():
    machine = Constraint("[ab]c?").over(ByteTokenizer(), 260)
    logits_BV = jnp.asarray(np.random.default_rng(0).normal(size=(3, 260)), jnp.float32)
    state_B = jnp.full(3, START, jnp.int32).at[1].set(constrain.move(machine, jnp.array([START]), jnp.array([97]))[0])
    masked_BV = np.asarray(constrain.mask(machine, state_B, logits_BV, jnp.array([256]), jnp.array([2, 2, 0])))
    allowed = [np.flatnonzero(np.isfinite(row)).tolist() for row in masked_BV]
    assert allowed == [[97, 98], [99, 256], []]
    assert np.array_equal(masked_BV[:2, 97:100][np.isfinite(masked_BV[:2, 97:100])],
                          np.array([logits_BV[0, 97], logits_BV[0, 98], logits_BV[1, 99]]))  # fmt: skip


@pytest.mark.slow
def test_each_turn_matches_anew():
    decoder = decoder_of(SINGLE)
    asked = tiny.request(constraint=Constraint("[0-9]{3}"), max_tokens=8)
    session = decoder.advance(decoder.start(decoder.encode(["a", "bb"]), asked), 8)
    session = decoder.advance(decoder.go_on(session, [np.array([98]), np.array([98])]), 8)
    assert all(re.fullmatch(b"[0-9]{3}", answer.text) for answer in decoder.completions(session))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("a|ab", ["a", "ab"], ["", "b", "abb"]),
        ("[^a]z", ["éz", "€z", "😀z"], ["az", "é"]),
        ("(?i)key[-_]?\\d{2,3}", ["KEY-12", "key_123"], ["key1", "key-1234"]),
        ("a(?!b).", ["ac", "aé"], ["ab"]),
        (".", ["\x7f", "\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"],
         ["\n", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf",
          b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\x80"]),
        (regex_of({"type": "number"}), ["0", "-1.5", "12e-3", "1E+20"], ["1.2.3", "01", ".5", "1.", "-", "+1", "NaN"]),
        (regex_of({"type": "integer"}), ["0", "-7", "10"], ["-0", "007", "1.0", "1e3"]),
        (regex_of({"type": "string", "maxLength": 2}), ['""', '"é😀"', r'"\"\\"', r'"\n"'],
         ['"abc"', '"""', '"\n"', r'"\x"', r'"\"', '"']),
        (regex_of({"const": {"a.b": [1, "x|y", "(é)"]}}), ['{"a.b":[1,"x|y","(é)"]}'], ['{"axb":[1,"x|y","(é)"]}']),
    ],
)  # fmt: skip
def test_languages(pattern, good, bad):
    assert [text for text in good if not accepts(pattern, text)] == []
    assert [text for text in bad if accepts(pattern, text)] == []


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-5, 1234), (17, 1999), (-999, -3), (100, 1000), (-1, 0), (9, 10)])
def test_bounds_of_integers(low, high):
    expression = re.compile(regex_of({"type": "integer", "minimum": low, "exclusiveMaximum": high + 1}))
    assert [n for n in range(-2100, 2100) if expression.fullmatch(str(n))] == list(range(low, high + 1))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(?<=a)b", "lookback"),
        (r"(a)\1", "Group references"),
        ("(?R)", "not a regular expression"),
        ("^a$", r"cannot be held: '\^'"),
        (r"\ba", r"\\b"),
        ("(a", "not a regular expression"),
        ("a{3,1}", "not a regular expression"),
        ("(?=a)b", "no text matches"),
        ("", "only the empty text"),
        ("a{2000}", "2000 repetitions"),
    ],
)
def test_expressions_that_cannot_be_held(pattern, told):
    with pytest.raises(UsageError, match=told):
        over_tokens(pattern, BYTES)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"$ref": "#"}, "recursion"),
        ({"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"}, "recursion"),
        ({"$ref": "#/$defs/y"}, "leads nowhere"),
        ({"$ref": "other.json"}, "not within the schema"),
        ({"type": "string", "pattern": "a"}, "#: the keyword 'pattern'"),
        ({"type": "object", "properties": {"a": {"type": "number", "multipleOf": 2}}}, "properties/a: .*multipleOf"),
        ({"oneOf": [{"type": "null"}]}, "oneOf"),
        ({"type": "array"}, "needs 'items'"),
        ({"type": "object"}, "needs 'properties'"),
        ({"type": "object", "properties": {}, "required": ["a"]}, '\'?"a" has no schema'),
        ({"type": "text"}, 'no type "text"'),
        ({}, "allows anything"),
        (True, "says nothing"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "nothing satisfies"),
        ({"type": "integer", "minimum": 0.5}, "must be an integer"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "nothing satisfies"),
        ({"type": "string", "maxLength": -1}, "whole number"),
        ({"enum": ["a"], "type": "integer"}, "nothing satisfies"),
        ({"enum": []}, "nothing satisfies"),
    ],
)
def test_schemas_that_cannot_be_held(given, told):
    with pytest.raises(UsageError, match=told):
        regex_of(given)


def test_other_bad_input(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="no such schema"):
        Constraint.of_schema_file(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        Constraint.of_schema_file(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="would cut"):
        tiny.request(constraint=Constraint("a"), stops=(b"x",))
    with pytest.raises(UsageError, match="end token 97 is text"):
        generate(decoder_of(SINGLE), ["x"], tiny.request(constraint=Constraint("ab"), end_ids=(97,)))
    with pytest.raises(UsageError, match="cannot write"):
        over_tokens("ab", [b"a", b""])
    monkeypatch.setattr(automaton, "LARGEST_TABLE", 100)
    with pytest.raises(UsageError, match="over 100 entries"):
        over_tokens("[ab]{30}c", BYTES)
