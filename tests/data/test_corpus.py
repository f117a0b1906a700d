"""A corpus: nothing on both sides of the split, written once and whole, and never read with the wrong tokenizer."""

import errno
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.base.errors import LmError, RunError, UsageError
from lm.data import corpus as corpus_module
from lm.data.config import DataConfig
from lm.data.corpus import Corpus, describe, prepare, tokenize
from lm.data.tokenizer import load_tokenizer, train_bpe
from lm.data.tokens import TokenFile

POEMS = [f"Poem {n}\n" + "la " * (n % 7) + chr(0x4E00 + n) for n in range(200)]


def write(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


@pytest.fixture
def poems(tmp_path: Path) -> str:
    return write(tmp_path / "poems.jsonl", POEMS)


def documents_of(file: TokenFile, corpus: Corpus) -> list[str]:
    ids = file.array()
    ends = [*file.document_starts[1:], file.tokens - 1]
    return [
        corpus.tokenizer.decode(ids[start + 1 : end]).decode()
        for start, end in zip(file.document_starts, ends, strict=True)
    ]


def test_the_stream_holds_every_document_between_ends(poems: str, tmp_path: Path) -> None:
    corpus = prepare(DataConfig(corpus=poems, validation_fraction=0.2), tmp_path / "cache")
    train, held_out = documents_of(corpus.parts[0].file, corpus), documents_of(corpus.held_out["validation"], corpus)
    assert sorted(train + held_out) == sorted(POEMS)
    assert train == [text for text in POEMS if text in train]  # order is kept
    for file, texts in ((corpus.parts[0].file, train), (corpus.held_out["validation"], held_out)):
        ids = file.array()
        assert ids.dtype == np.uint16
        assert ids[-1] == corpus.tokenizer.eos_id
        np.testing.assert_array_equal(np.flatnonzero(ids == corpus.tokenizer.eos_id)[:-1], file.document_starts)
        assert file.bytes == sum(len(text.encode()) for text in texts)
        assert file.tokens == len(ids) == file.bytes + file.documents + 1
        assert file.tokenizer == corpus.tokenizer.fingerprint
    # 200 draws at 0.2: mean 40, standard deviation 5.7; four of those.
    assert abs(len(held_out) - 40) < 23


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(POEMS[:12]), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_duplicates_never_straddle_the_split(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("split")
    config = DataConfig(corpus=write(folder / "a.jsonl", documents), validation_fraction=fraction)
    try:
        corpus = prepare(config, folder / "cache")
    except UsageError as error:
        assert "leaves no" in str(error)  # noqa: PT017 - both outcomes are right, a third is not
        return
    train, held_out = corpus.parts[0].file, corpus.held_out["validation"]
    assert not set(documents_of(train, corpus)) & set(documents_of(held_out, corpus))
    assert train.documents + held_out.documents == len(documents)


def test_adding_documents_moves_none_across_the_split(tmp_path: Path) -> None:
    few = prepare(
        DataConfig(corpus=write(tmp_path / "few.jsonl", POEMS[:100]), validation_fraction=0.3), tmp_path / "c"
    )
    all_ = prepare(DataConfig(corpus=write(tmp_path / "all.jsonl", POEMS), validation_fraction=0.3), tmp_path / "c")
    assert set(few.held_out["validation"].document_digests) <= set(all_.held_out["validation"].document_digests)
    assert set(few.parts[0].file.document_digests) <= set(all_.parts[0].file.document_digests)


def test_the_second_preparation_reads_the_first_ones_files(poems: str, tmp_path: Path) -> None:
    config = DataConfig(corpus=poems)
    first = prepare(config, tmp_path / "cache")
    stamp = first.parts[0].file.path.stat().st_mtime_ns
    Path(poems).touch()  # content names the cache, not time or place
    moved = Path(poems).rename(tmp_path / "moved.jsonl")
    again = prepare(DataConfig(corpus=str(moved)), tmp_path / "cache")
    assert again.parts[0].file.path == first.parts[0].file.path
    assert again.parts[0].file.path.stat().st_mtime_ns == stamp
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize("change", ["text", "fraction", "tokenizer"])
def test_whatever_changes_tokens_makes_other_files(poems: str, tmp_path: Path, change: str) -> None:
    config = DataConfig(corpus=poems, validation_fraction=0.2)
    before = prepare(config, tmp_path / "cache")
    other = DataConfig(corpus=poems, validation_fraction=0.2)
    if change == "text":
        write(Path(poems), [*POEMS, "one more"])
    elif change == "fraction":
        other = DataConfig(corpus=poems, validation_fraction=0.4)
    else:
        train_bpe(POEMS, 300, tmp_path / "t.json")
        other = DataConfig(corpus=poems, validation_fraction=0.2, tokenizer=str(tmp_path / "t.json"))
    after = prepare(other, tmp_path / "cache")
    assert after.parts[0].file.path != before.parts[0].file.path
    # The fingerprint is of the text: the same text under another tokenizer is the same corpus.
    assert (after.fingerprint == before.fingerprint) == (change == "tokenizer")


def test_several_processes_prepare_at_once(poems: str, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from lm.data.config import DataConfig; from lm.data.corpus import prepare\n"
        "print(prepare(DataConfig(corpus=sys.argv[1]), Path(sys.argv[2])).parts[0].file.path)"
    )
    command = [sys.executable, "-c", program, poems, str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {process.communicate()[0] for process in started}
    assert [process.returncode for process in started] == [0] * 4
    assert len(answers) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing half-written is left beside it


def test_a_failure_in_the_middle_leaves_nothing(poems: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(poems).open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UsageError, match="line 201"):
        prepare(DataConfig(corpus=poems), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus_module, "_refuse_empty", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenize([write(Path(poems), POEMS)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_extra_sets_are_tokenised_whole_and_apart(poems: str, tmp_path: Path) -> None:
    novel = write(tmp_path / "novel.jsonl", ["Chapter 1", "Chapter 2"])
    corpus = prepare(DataConfig(corpus=poems, extra_validation={"novel": novel}), tmp_path / "cache")
    assert documents_of(corpus.held_out["novel"], corpus) == ["Chapter 1", "Chapter 2"]
    only = prepare(
        DataConfig(corpus=poems, validation_fraction=0, extra_validation={"novel": novel}), tmp_path / "cache"
    )
    assert documents_of(only.parts[0].file, only) == POEMS
    assert documents_of(only.held_out["validation"], only) == ["Chapter 1", "Chapter 2"]
    assert set(only.held_out) == {"validation"}


def test_epochs_are_of_windows_whatever_part_of_them_is_predicted(poems: str, tmp_path: Path) -> None:
    corpus = prepare(DataConfig(corpus=poems), tmp_path / "cache")
    windows = (corpus.parts[0].file.tokens - 1) // 32
    assert corpus.epochs(3 * windows, 32) == 3


def test_an_extra_set_that_was_trained_on_is_refused(poems: str, tmp_path: Path) -> None:
    leak = write(tmp_path / "leak.jsonl", ["new", *POEMS])
    with pytest.raises(UsageError, match=r"extra_validation\.leak: \d+ of its 201 documents are training documents"):
        prepare(DataConfig(corpus=poems, extra_validation={"leak": leak}), tmp_path / "cache")


def test_a_split_with_an_empty_side_says_how_to_mend_it(tmp_path: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_text("first part\n\nsecond part\n\nthird part\n\nfourth part")
    with pytest.raises(UsageError, match=r"leaves no .* document.* separator, or set validation_fraction 0"):
        prepare(DataConfig(corpus=str(one)), tmp_path / "cache")
    several = DataConfig(corpus=str(one), separator=r"\n\n", validation_fraction=1e-6)
    with pytest.raises(UsageError, match=r"validation_fraction 0\.\d+ holds out at least one") as caught:
        prepare(several, tmp_path / "cache")
    advised = float(str(caught.value).split("(validation_fraction ")[1].split()[0])
    corpus = prepare(DataConfig(corpus=str(one), separator=r"\n\n", validation_fraction=advised), tmp_path / "cache")
    assert corpus.held_out["validation"].documents >= 1


def test_empty_text_and_bad_requests_are_refused(poems: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    cache = tmp_path / "cache"
    with pytest.raises(UsageError, match=r"empty\.txt: there is no text in it"):
        prepare(DataConfig(corpus=str(tmp_path / "empty.txt")), cache)
    with pytest.raises(UsageError, match=r"validation_fraction is 1\.5"):
        prepare(DataConfig(corpus=poems, validation_fraction=1.5), cache)
    with pytest.raises(UsageError, match="no extra_validation"):
        prepare(DataConfig(corpus=poems, validation_fraction=0), cache)
    with pytest.raises(UsageError, match=r"a separator splits \.txt files, and there is none"):
        prepare(DataConfig(corpus=poems, separator="--"), cache)
    with pytest.raises(UsageError, match="no such file or folder"):
        prepare(DataConfig(corpus=str(tmp_path / "absent")), cache)


def test_a_tokenised_folder_is_opened_with_its_own_tokenizer_and_split_only(poems: str, tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    tokenize([poems], out, bpe_vocabulary=300, validation_fraction=0.2)
    right = DataConfig(corpus=str(out), tokenizer=str(out / "tokenizer.json"), validation_fraction=0.2)
    corpus = prepare(right, tmp_path / "cache")
    train, held_out = corpus.parts[0].file, corpus.held_out["validation"]
    assert sorted(documents_of(train, corpus) + documents_of(held_out, corpus)) == sorted(POEMS)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UsageError, match=r"another tokenizer than 'bytes'.*Set data\.tokenizer=.*tokenizer\.json"):
        prepare(DataConfig(corpus=str(out), validation_fraction=0.2), tmp_path / "cache")
    with pytest.raises(UsageError, match=r"Set data\.validation_fraction=0\.2"):
        prepare(DataConfig(corpus=str(out), tokenizer=right.tokenizer), tmp_path / "cache")
    with pytest.raises(UsageError, match=r"split by separator None, not '--'"):
        prepare(
            DataConfig(corpus=str(out), tokenizer=right.tokenizer, validation_fraction=0.2, separator="--"),
            tmp_path / "cache",
        )


def test_a_bpe_is_trained_on_training_documents_only_and_twice_alike(tmp_path: Path) -> None:
    words = [f"{text} {'qzx' * 40}" if n % 3 == 0 else text for n, text in enumerate(POEMS)]
    held_out = prepare(
        DataConfig(corpus=write(tmp_path / "a.jsonl", words), validation_fraction=0.2), tmp_path / "cache"
    ).held_out["validation"]
    # The same training documents, other validation documents: the tokenizer must not see the difference.
    kept = [text for text in words if corpus_module._position(text) >= 0.2]
    assert len(kept) + held_out.documents == len(words)
    other = [f"zzz {n}" for n in range(50) if corpus_module._position(f"zzz {n}") < 0.2]
    for name, texts in (("a", words), ("b", words), ("c", kept + other)):
        tokenize(
            [write(tmp_path / f"{name}.jsonl", texts)], tmp_path / name, bpe_vocabulary=320, validation_fraction=0.2
        )
    contents = {(tmp_path / name / "tokenizer.json").read_bytes() for name in "abc"}
    assert len(contents) == 1


def test_a_folder_with_something_else_is_not_overwritten(poems: str, tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    out.mkdir()  # an empty one may be filled
    tokenize([poems], out)
    before = describe(out)
    tokenize([poems], out)
    assert describe(out) == before
    with pytest.raises(UsageError, match="holds something else"):
        tokenize([poems], out, validation_fraction=0.3)
    with pytest.raises(UsageError, match="holds something else"):
        tokenize([poems], tmp_path)
    assert describe(out) == before


@pytest.mark.parametrize("damage", ["short", "ids", "bit", "gone", "sidecar", "field", "manifest"])
def test_damaged_files_are_one_clear_line(poems: str, tmp_path: Path, damage: str) -> None:
    out = tmp_path / "tokens"
    tokenize([poems], out)
    ids, sidecar = out / "train.bin", out / "train.json"
    if damage == "short":
        ids.write_bytes(ids.read_bytes()[:-3])
    elif damage == "ids":  # of the right size, and none of the vocabulary's
        ids.write_bytes(ids.read_bytes()[:-2] + b"\xff\xff")
    elif damage == "bit":  # another id of the vocabulary
        content = bytearray(ids.read_bytes())
        content[-4] ^= 1
        ids.write_bytes(content)
    elif damage == "gone":
        ids.unlink()
    elif damage == "sidecar":
        sidecar.write_text(sidecar.read_text()[:50])
    elif damage == "field":
        sidecar.write_text("{}")
    else:
        (out / "corpus.json").write_text("{}")
    with pytest.raises(RunError, match="Delete the folder and tokenise again") as caught:
        prepare(DataConfig(corpus=str(out)), tmp_path / "cache")
    assert str(out) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_said_and_leaves_nothing(poems: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="no space left on the disk"):
        prepare(DataConfig(corpus=poems), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_place_that_cannot_be_written_is_said(poems: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LmError, match="cannot be written"):
        prepare(DataConfig(corpus=poems), tmp_path / "file" / "cache")


def test_a_token_file_pickles_as_its_path(poems: str, tmp_path: Path) -> None:
    file = prepare(DataConfig(corpus=poems), tmp_path / "cache").parts[0].file
    file.array()
    content = pickle.dumps(file)
    assert len(content) < 500
    np.testing.assert_array_equal(pickle.loads(content).array(), file.array())


def test_large_vocabularies_take_four_bytes(poems: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("bytes")
    monkeypatch.setattr(type(tokenizer), "vocab_size", 65_537)
    file = prepare(DataConfig(corpus=poems), tmp_path / "cache").parts[0].file
    assert file.array().dtype == np.uint32
    assert file.path.stat().st_size == 4 * file.tokens


@pytest.mark.slow
def test_gutenberg_under_gpt2_has_its_known_size(shared: Path, tmp_path: Path) -> None:
    tokenize(
        [str(shared / "data/gutenberg/val-*.jsonl.xz")],
        tmp_path / "tokens",
        tokenizer=str(shared / "data/gpt2-tokenizer/tokenizer.json"),
        validation_fraction=0.2,
    )
    files = [TokenFile.open(tmp_path / "tokens" / name) for name in ("train.bin", "validation.bin")]
    assert sum(file.documents for file in files) == 25
    assert sum(file.bytes for file in files) == 3_918_351  # as published with the shard
    # 1,061,499 tokens of text as the library counts them book by book, an end before each book and one after each file.
    assert sum(file.tokens for file in files) == 1_061_499 + 25 + 2
