"""Text to ids and back: nothing lost, nothing special smuggled in, the same training twice gives the same file."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.base.errors import UsageError
from lm.data.sources import read_documents
from lm.data.tokenizer import END_OF_TEXT, ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer, train_bpe

TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
SENTENCES = [
    f"The {colour} fox saw {n} naïve 犬, and <|endoftext|>!\n" for n in range(40) for colour in ("red", "blue")
]


@pytest.fixture(scope="module")
def gpt2(shared: Path) -> Tokenizer:
    return load_tokenizer(str(shared / "data/gpt2-tokenizer/tokenizer.json"))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(SENTENCES, 320, path)
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def as_json(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    path.write_text(ByteTokenizer().to_json())
    return load_tokenizer(str(path))


@given(TEXT)
def test_bytes_round_trip_any_text(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.encode()
    assert len(ids) == len(text.encode()) == tokenizer.token_bytes[ids].sum()


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_bpe_round_trips_any_text_and_counts_its_bytes(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text.encode()
    assert bpe.token_bytes[ids].sum() == len(text.encode())


@settings(max_examples=50, deadline=None)
@given(text=TEXT)
def test_gpt2_round_trips_any_text_and_counts_its_bytes(gpt2: Tokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text.encode()
    assert gpt2.token_bytes[ids].sum() == len(text.encode())


def test_gpt2_gives_the_published_ids(gpt2: Tokenizer, shared: Path) -> None:
    assert gpt2.encode("Hello, world!").tolist() == [15496, 11, 995, 0]
    assert (gpt2.vocab_size, gpt2.eos_id, gpt2.token_bytes[50256]) == (50257, 50256, 0)
    raw = tokenizers.Tokenizer.from_file(str(shared / "data/gpt2-tokenizer/tokenizer.json"))
    text = (shared / "data/tinyshakespeare/input.txt").read_text()[:20_000]
    assert gpt2.encode(text).tolist() == raw.encode(text).ids


@pytest.mark.slow
def test_gpt2_takes_its_known_number_of_bytes_a_token(gpt2: Tokenizer, shared: Path) -> None:
    text = "\n".join(read_documents(str(shared / "data/gutenberg/val-00000.jsonl.xz")))[:2_000_000]
    # Published as 3.80, which is the first 2 MB; all 25 books together give 3.69.
    assert len(text.encode()) / len(gpt2.encode(text)) == pytest.approx(3.80, abs=0.01)


@pytest.mark.parametrize("name", ["bytes", "bpe", "gpt2"])
def test_text_never_becomes_the_end_of_a_document(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer("bytes") if name == "bytes" else request.getfixturevalue(name)
    text = f"before{END_OF_TEXT}after"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text.encode()
    assert tokenizer.decode([*ids[:3], tokenizer.eos_id]) == tokenizer.decode(ids[:3])


def test_batch_equals_one_by_one(bpe: Tokenizer) -> None:
    for text, ids in zip(SENTENCES, bpe.encode_batch(SENTENCES), strict=True):
        np.testing.assert_array_equal(ids, bpe.encode(text))


def test_the_same_training_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        train_bpe(SENTENCES, 320, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    other = tmp_path / "c.json"
    train_bpe(SENTENCES[:3], 300, other)
    assert load_tokenizer(str(other)).fingerprint != load_tokenizer(str(tmp_path / "a.json")).fingerprint


def test_every_byte_has_a_token(bpe: Tokenizer) -> None:
    singles = {bpe.decode([i]) for i in range(bpe.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles


def word_level(path: Path, *special: str) -> Path:
    vocabulary = {word: i for i, word in enumerate(["▁the", "<0x0A>", "cat", *special])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="cat"))
    tokenizer.save(str(path))
    return path


def test_an_end_that_has_no_common_name_can_be_named(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", "<fin>")
    with pytest.raises(UsageError, match=r"Name it after the path: .*#TOKEN"):
        load_tokenizer(str(path))
    tokenizer = load_tokenizer(f"{path}#<fin>")
    assert tokenizer.eos_id == 3
    with pytest.raises(UsageError, match="'<end>' is not in the vocabulary"):
        load_tokenizer(f"{path}#<end>")


def test_another_token_that_begins_a_document_can_be_named(tmp_path: Path) -> None:
    path = word_level(tmp_path / "tokenizer.json", "</s>", "<begin>")
    plain, both = load_tokenizer(f"{path}#</s>"), load_tokenizer(f"{path}#</s>#<begin>")
    assert (plain.eos_id, plain.bos_id, both.eos_id, both.bos_id) == (3, 3, 3, 4)
    assert plain.fingerprint == load_tokenizer(f"{path}#</s>#</s>").fingerprint != both.fingerprint
    assert load_tokenizer(f"{path}##<begin>").fingerprint == both.fingerprint
    assert both.token_bytes[4] == 0
    with pytest.raises(UsageError, match="'<start>' is not in the vocabulary"):
        load_tokenizer(f"{path}##<start>")


@settings(max_examples=50)
@given(text=TEXT)
def test_bytes_in_a_tokenizer_json_are_the_same_ids(as_json: Tokenizer, text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    assert as_json.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert as_json.decode(as_json.encode(text)) == text.encode()
    assert (as_json.vocab_size, as_json.eos_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    assert as_json.token_bytes.tolist() == tokenizer.token_bytes.tolist()


def test_bytes_of_vocabularies_that_are_not_byte_level(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(word_level(tmp_path / "tokenizer.json", "</s>")))
    assert tokenizer.token_bytes.tolist() == [4, 1, 3, 0]  # " the", a newline, "cat", the end


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path, bpe: HuggingFaceTokenizer) -> None:
    raw = tokenizers.Tokenizer.from_file(str(bpe.path))
    raw.enable_truncation(2)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "t.json"))
    assert load_tokenizer(str(tmp_path / "t.json")).encode(SENTENCES[0]).tolist() == bpe.encode(SENTENCES[0]).tolist()


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such tokenizer"):
        load_tokenizer(str(tmp_path / "absent.json"))
    (tmp_path / "bad.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(UsageError, match=r"not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(UsageError, match="at least 257"):
        train_bpe(SENTENCES, 256, tmp_path / "small.json")
