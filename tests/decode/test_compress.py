"""Compression with a model: any bytes come back, within two bits a block, and whatever differs is refused by name."""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from lm import cli
from lm.base.errors import LmError, RunError, UsageError
from lm.data.config import DataConfig
from lm.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, train_bpe
from lm.decode import compress, compress_command, fingerprint, loop
from lm.decode.coder import TOTAL_BITS, information
from lm.decode.compress import Compressor
from lm.decode.container import unpack
from lm.decode.frequencies import find, interval, quantise
from lm.decode.spelling import Speller
from lm.model.config import Dtype, Positions
from lm.run.restore import LoadedModel
from tests.model.variants import logits, parameters, replace, tiny

pytestmark = pytest.mark.slow  # compilations: about a second or more each

CONFIG = tiny(vocab_size=257, n_layer=1)  # of bytes, with a context of 8
BLOCKS = 3  # everywhere: one batch, few compilations
TEXT = "The café is closed — come back tomorrow. ".encode() * 4
RANDOM = np.random.default_rng(0).integers(0, 256, 131, np.uint8).tobytes()


@pytest.fixture(scope="module")
def compressor():
    return Compressor(CONFIG, parameters(CONFIG), ByteTokenizer())


@pytest.fixture(scope="module")
def packed(compressor):
    file, _ = compressor.compress(TEXT, blocks=BLOCKS)
    return file


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["The café is closed, come back tomorrow. " * 3, "nothing of the sort happened"], 300, path)
    return HuggingFaceTokenizer(str(path))


@pytest.fixture
def no_model(monkeypatch):
    def never(*_, **__):
        raise AssertionError("the model ran")

    monkeypatch.setattr(loop, "prefill", never)


DATA = {
    "text": TEXT,
    "random": RANDOM,
    "one symbol": b"\0" * 100,
    "a multiple of the blocks": TEXT[:99],
    "one more": TEXT[:100],
    "as many bytes as blocks": b"abc",
    "not UTF-8": b"\xff\xfe" + TEXT[:40] + b"\xc3",
}


@pytest.mark.parametrize("name", DATA)
def test_bytes_come_back_within_two_bits_a_block(compressor, name):
    file, report = compressor.compress(DATA[name], blocks=BLOCKS)
    assert compressor.decompress(file) == DATA[name]
    assert report.payload_bits <= report.quantised_bits + 2 * BLOCKS
    assert len(file) == report.header_bytes + -(-report.payload_bits // 8)
    assert report.tokens == report.size == len(DATA[name])


@pytest.mark.parametrize("data", [b"", b"x"])
def test_the_shortest_files(compressor, data):
    file, report = compressor.compress(data)
    assert compressor.decompress(file) == data
    assert report.blocks == len(data)


def test_the_same_bytes_give_the_same_file(compressor, packed):
    again = Compressor(CONFIG, parameters(CONFIG), ByteTokenizer())
    assert again.compress(TEXT, blocks=BLOCKS)[0] == packed


def test_information_is_that_of_whole_windows(compressor):
    """Where the context is full, windows begin `overlap` tokens back; each token is predicted once."""
    overlap, T = 4, CONFIG.context_length
    _, report = compressor.compress(TEXT, blocks=BLOCKS, overlap=overlap)
    expected = 0.0
    for part in np.array_split(np.frombuffer(TEXT, np.uint8).astype(np.int32), BLOCKS):
        inputs = np.concatenate([[256], part[:-1]])
        for start in range(0, len(part), T - overlap + 1):
            known = 0 if start == 0 else overlap - 1
            window = np.resize(inputs[start : start + T], T)[None]
            log_probs = jax.nn.log_softmax(logits(CONFIG, parameters(CONFIG), jnp.asarray(window)))[0]
            places = np.arange(known, min(T, len(part) - start))
            expected -= float(np.sum(log_probs[places, part[start + places]])) / np.log(2)
    # Float32 logits of two programs; the sum has 180 terms of some 10 bits.
    assert report.model_bits == pytest.approx(expected, rel=1e-5)
    assert report.quantised_bits == pytest.approx(report.model_bits, rel=1e-5)


KINDS = [
    {"dtype": Dtype.BFLOAT16}, {"positions": Positions.LEARNED}, {"window": 3, "n_kv_head": 1}, {"context_length": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "overlap"),
    [
        pytest.param(changes, overlap, marks=[] if (kind % 2 == 0) == (overlap is None) else pytest.mark.full)
        for kind, changes in enumerate(KINDS)
        for overlap in (1, None)
    ],
    ids=str,
)
def test_every_kind_of_model(changes, overlap):
    config = replace(CONFIG, **changes)
    compressor = Compressor(config, parameters(config), ByteTokenizer())
    file, report = compressor.compress(RANDOM, blocks=BLOCKS, overlap=overlap)
    assert compressor.decompress(file) == RANDOM
    assert report.payload_bits <= report.quantised_bits + 2 * BLOCKS


def test_a_larger_model_vocabulary_and_a_byte_level_bpe(bpe):
    config = tiny(n_layer=1, vocab_size=bpe.vocab_size + 5)
    compressor = Compressor(config, parameters(config), bpe)
    data = TEXT + b"\xff\x00\xc3" + b"nothing of the sort" + b"\xe2\x82"
    file, report = compressor.compress(data, blocks=BLOCKS)
    assert compressor.decompress(file) == data
    assert report.tokens < report.size
    assert report.payload_bits <= report.quantised_bits + 2 * BLOCKS


def test_spelling(bpe, tmp_path):
    spelled = Speller(bpe).tokens(TEXT)
    assert spelled.tolist() == bpe.encode(TEXT.decode()).tolist()
    for data in (RANDOM, b"\xff", b"", b"caf\xc3", b"<|endoftext|>"):
        assert bpe.decode(Speller(bpe).tokens(data)) == data
    changed = json.loads(bpe.path.read_text())
    changed["normalizer"] = {"type": "NFC"}
    path = tmp_path / "nfc.json"
    path.write_text(json.dumps(changed))
    normalising = HuggingFaceTokenizer(str(path))
    apart = "cafe\u0301".encode()
    assert normalising.decode(normalising.encode(apart.decode())) != apart
    assert normalising.decode(Speller(normalising).tokens(apart)) == apart


def test_a_tokenizer_of_words_is_refused(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": 2, "[UNK]": 3}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(UsageError, match="254 of 256 bytes have no token of their own, 0x00 first"):
        Speller(HuggingFaceTokenizer(str(tmp_path / "words.json")))


@pytest.mark.parametrize(("changes", "message"), [({"blocks": 0}, "blocks"), ({"overlap": 9}, "1 and the context")])
def test_numbers_out_of_range(compressor, changes, message):
    with pytest.raises(UsageError, match=message):
        compressor.compress(TEXT, **changes)


def test_logits_that_are_not_finite_are_told():
    config = replace(CONFIG, tied_embedding=False)
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, parameters(config))
    with pytest.raises(RunError, match="no probability"):
        Compressor(config, params, ByteTokenizer()).compress(TEXT, blocks=BLOCKS)


def nudged():
    return jax.tree.map(lambda leaf: leaf * 1.001, parameters(CONFIG))


def test_another_model_tokenizer_or_machine_is_refused_before_decoding(compressor, packed, bpe, no_model, monkeypatch):
    with pytest.raises(UsageError, match=r"model: '\w{12}\.\.\.' -> '\w{12}\.\.\.'"):
        Compressor(CONFIG, nudged(), ByteTokenizer()).decompress(packed)
    with pytest.raises(UsageError, match=r"tokenizer: '\w{12}\.\.\.' -> '\w{12}\.\.\.'"):
        config = tiny(n_layer=1, vocab_size=bpe.vocab_size)
        Compressor(config, parameters(config), bpe).decompress(packed)
    here = fingerprint.platform_facts()
    monkeypatch.setattr(compress, "platform_facts", lambda: here | {"threads": "96", "jaxlib": "9.9.9"})
    with pytest.raises(UsageError, match=r"jaxlib: '.*' -> '9.9.9'.*threads: '.*' -> '96'.*--force"):
        compressor.decompress(packed)


def test_forced_onto_other_probabilities_the_checks_tell(packed):
    with pytest.raises(RunError, match="block 1, 2, 3 of 3 did not decode to what was compressed"):
        Compressor(CONFIG, nudged(), ByteTokenizer()).decompress(packed, force=True)


def test_forced_onto_another_machine_that_computes_the_same(compressor, packed, monkeypatch):
    monkeypatch.setattr(compress, "platform_facts", lambda: {"machine": "another"})
    assert compressor.decompress(packed, force=True) == TEXT


def test_every_flipped_bit_is_found_before_decoding_and_its_block_named(compressor, packed, no_model):
    container = unpack(packed, "file")
    payload_at = len(packed) - -(-container.payload_bits // 8)
    ends = np.cumsum([len(bits) for bits in container.messages])
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 128 >> bit % 8
        with pytest.raises(LmError) as told:
            unpack(bytes(damaged), "file")
        place = bit - 8 * payload_at
        if 0 <= place < ends[-1]:
            assert f"damaged in block {np.searchsorted(ends, place, side='right') + 1} of 3" in str(told.value)


def test_damage_of_any_kind_is_one_error(packed):
    random = np.random.default_rng(0)
    for _ in range(500):
        damaged = np.frombuffer(packed, np.uint8).copy()
        places = random.integers(4, len(damaged), random.integers(2, 12))
        damaged[places] ^= random.integers(1, 256, len(places), np.uint8)
        if damaged.tobytes() != packed:
            with pytest.raises(LmError):
                unpack(damaged.tobytes(), "file")


def test_truncated_and_prolonged_files(packed):
    for length in range(len(packed)):
        with pytest.raises(LmError):
            unpack(packed[:length], "file")
    with pytest.raises(RunError, match="truncated"):
        unpack(packed[:-1], "file")
    with pytest.raises(RunError, match="1 bytes behind its end"):
        unpack(packed + b"\0", "file")


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08 not ours", TEXT])
def test_other_files_are_refused(content):
    with pytest.raises(UsageError, match="was not written by"):
        unpack(content, "file")


def test_another_version_of_the_format_is_refused(packed):
    with pytest.raises(UsageError, match="version 2 of the format"):
        unpack(packed[:4] + b"\2\0" + packed[6:], "file")


# Frequencies


def logits_of(kind: str, size: int) -> np.ndarray:
    random = np.random.default_rng(size)
    scales = {"equal": 0.0, "near": 1e-3, "model": 3.0, "skewed": 60.0}
    row = scales[kind] * random.standard_normal((2, size), np.float32)
    row[1, -1] = 1e4 if kind == "skewed" else row[1, -1]
    return row


@pytest.mark.parametrize("kind", ["equal", "near", "model", "skewed"])
@pytest.mark.parametrize("size", [1, 50_257])
def test_frequencies_are_whole_and_cost_what_is_stated(kind, size):
    row_BV = logits_of(kind, size)
    frequency_BV = np.asarray(quantise(jnp.asarray(row_BV)), np.int64)
    assert (frequency_BV >= 1).all()
    assert (frequency_BV.sum(axis=1) == 2**TOTAL_BITS).all()
    exact_BV = np.exp(row_BV.astype(np.float64) - row_BV.max(axis=1, keepdims=True))
    exact_BV /= exact_BV.sum(axis=1, keepdims=True)
    entropy_B = -np.sum(exact_BV * np.log2(np.maximum(exact_BV, 1e-300)), axis=1)
    loss_B = np.sum(exact_BV * information(frequency_BV), axis=1) - entropy_B
    # The ones of all tokens and the scale, and 1e-6 for exp in float32; never below the entropy, but for rounding.
    assert (loss_B <= -np.log2(1 - size / 2**TOTAL_BITS) + 1.4e-6 + 1e-6).all()
    assert (loss_B >= -1e-9).all()


def test_the_token_found_is_the_one_whose_share_holds_the_target():
    frequency_BV = quantise(jnp.asarray(logits_of("model", 257)))
    upto_BV = np.cumsum(frequency_BV, axis=1)
    for token in (0, 1, 100, 256):
        start_B, own_B = (np.asarray(x) for x in interval(frequency_BV, np.full(2, token, np.int32)))
        assert (start_B == upto_BV[:, token] - own_B).all()
        for target_B in (start_B, start_B + own_B - 1):
            found = zip(find(frequency_BV, target_B), (np.full(2, token), start_B, own_B), strict=True)
            assert all(np.array_equal(got, expected) for got, expected in found)


# Commands


@pytest.fixture
def lm(monkeypatch, capsys):
    loaded = LoadedModel(CONFIG, DataConfig(), parameters(CONFIG), ByteTokenizer(), 7)
    monkeypatch.setattr(compress_command, "load_model", lambda _: loaded)

    def run(*arguments):
        code = cli.main([*map(str, arguments), "--checkpoint", "run"])
        return code, capsys.readouterr()

    return run


def test_commands_there_and_back(lm, tmp_path):
    source, packed_path = tmp_path / "a.txt", tmp_path / "a.txt.lmz"
    source.write_bytes(TEXT)
    code, told = lm("compress", source, "--blocks", BLOCKS, "--compare")
    assert code == 0
    for name in ("lm", "lm + its parameters", "gzip -9", "bzip2 -9", "xz -9e", "zstd", "exact model"):
        assert name in told.out
    assert lm("decompress", packed_path)[0] == 2  # a.txt is there already
    code, told = lm("decompress", packed_path, "--out", tmp_path / "b.txt")
    assert code == 0
    assert (tmp_path / "b.txt").read_bytes() == TEXT
    source.unlink()
    assert lm("decompress", packed_path)[0] == 0
    assert source.read_bytes() == TEXT


def test_json_of_an_empty_file(lm, tmp_path):
    (tmp_path / "empty").touch()
    code, told = lm("compress", tmp_path / "empty", "--json", "--compare")
    row = json.loads(told.out)
    assert code == 0
    assert row["size"] == row["payload_bits"] == 0
    assert set(row["others"]) == set(compress_command.OTHERS)
    assert lm("compress", tmp_path / "empty", "--compare")[0] == 0


def test_a_damaged_file_leaves_nothing_behind(lm, tmp_path, packed):
    path = tmp_path / "a.lmz"
    path.write_bytes(packed[:-1] + bytes([packed[-1] ^ 128]))
    code, told = lm("decompress", path)
    assert code == 1
    assert "a.lmz: is damaged in block 3 of 3" in told.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.lmz"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compress", "missing"), "there is no such file"),
        (("compress", "."), "is a folder"),
        (("compress", "a.txt", "--out", "a.txt"), "is the input itself"),
        (("compress", "a.txt", "--overlap", "0"), "overlap"),
        (("decompress", "a.txt"), "does not end in .lmz"),
        (("decompress", "a.txt", "--out", "b"), "was not written by `lm compress`"),
    ],
)
def test_wrong_requests(lm, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(TEXT)
    code, told = lm(*arguments)
    assert code == 2
    assert message in told.err
    assert "Traceback" not in told.err


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(compress_command.importlib, "import_module", missing)
    assert compress_command.OTHERS["zstd --ultra -22"](TEXT) is None
    report = argparse.Namespace(size=len(TEXT), parameter_bytes=4)
    assert "missing" in compress_command.comparison(report, 10, {"zstd --ultra -22": None})
