"""Every way in gives the same documents, and every unreadable one says which file and line."""

import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.base.errors import UsageError
from lm.data import sources
from lm.data.sources import find_files, read_documents, read_file

DOCUMENTS = ["one\r\nline", "zwei Ünïcode 犬", "three\n\nparagraphs"]


def jsonl(documents: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "id": 1}).encode() + b"\n" for text in documents)


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(DOCUMENTS) + b"\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS)))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(jsonl(DOCUMENTS)))
    pq.write_table(pa.table({"text": DOCUMENTS, "other": [1, 2, 3]}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet"):
        assert list(read_documents(str(tmp_path / name))) == DOCUMENTS, name
    (tmp_path / "a.txt").write_bytes(DOCUMENTS[0].encode())
    assert list(read_documents(str(tmp_path / "a.txt"))) == DOCUMENTS[:1]


def test_folders_and_globs_are_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a.txt", "c.txt", "b/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "notes.rst").write_text("not text for training")
    assert list(read_documents(str(tmp_path))) == ["a.txt", "b/1.txt", "b/2.txt", "c.txt"]
    assert list(read_documents(str(tmp_path / "*.txt"))) == ["a.txt", "c.txt"]


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="|"), min_size=1, max_size=20), max_size=8),
    st.integers(1, 9),
)
def test_a_separator_splits_text_wherever_the_chunks_end(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("split") / "a.txt"
    path.write_bytes("||".join(documents).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_CHUNK", chunk)
        assert list(read_file(path, "||")) == [text for text in documents if not text.isspace()]


def test_a_newline_in_a_separator_may_be_spelled_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n\n\n")
    assert list(read_documents(str(tmp_path / "a.txt"), r"\n\n")) == ["one", "two"]


BAD = {
    "a.txt": (b"fine\nfine\n\xff\xfe", r"a\.txt, line 3: byte 0xff is not UTF-8"),
    "b.jsonl": (jsonl(DOCUMENTS) + b'{"text": ', r"b\.jsonl, line 4: not JSON"),
    "c.jsonl": (b'{"body": "x"}\n', r"c\.jsonl, line 1: no \"text\" with a string in it \(found: body\)"),
    "d.jsonl": (b'{"text": 3}\n', r"d\.jsonl, line 1: no \"text\""),
    "e.jsonl": (b"[1]\n", r"e\.jsonl, line 1: no \"text\""),
    "f.jsonl": (b'{"text": "\\ud800"}\n', r"f\.jsonl, line 1: half of a surrogate"),
    "g.jsonl": (b'{"text": "\xe9"}\n', r"g\.jsonl, line 1: byte 0xe9 is not UTF-8"),
    "h.jsonl.gz": (gzip.compress(jsonl(DOCUMENTS))[:-9], r"h\.jsonl\.gz: the compressed file is damaged"),
    "i.jsonl.xz": (lzma.compress(jsonl(DOCUMENTS))[:-20], r"i\.jsonl\.xz: the compressed file is damaged"),
    "j.jsonl.gz": (b"plain", r"j\.jsonl\.gz: the compressed file is damaged"),
    "k.parquet": (b"PAR1 not really", r"k\.parquet: not a whole parquet file"),
    "l.csv": (b"a,b", r"l\.csv: unknown kind of text file"),
}


@pytest.mark.parametrize("name", BAD)
def test_unreadable_text_says_where(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        list(read_documents(str(tmp_path / name)))


def test_invalid_utf8_behind_a_separator_says_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n--\nthree\nfour \xff\n")
    with pytest.raises(UsageError, match=r"a\.txt, line 5"):
        list(read_documents(str(tmp_path / "a.txt"), "--"))


def test_parquet_without_text_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r'no column "text" \(found: body\)'):
        list(read_documents(str(tmp_path / "a.parquet")))
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="row 1"):
        list(read_documents(str(tmp_path / "b.parquet")))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        find_files(str(tmp_path / "absent.txt"))
    with pytest.raises(UsageError, match="the glob matches no file"):
        find_files(str(tmp_path / "*.txt"))
    with pytest.raises(UsageError, match="the folder holds no text"):
        find_files(str(tmp_path))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="the separator is empty"):
        list(read_documents(str(tmp_path), ""))


def test_a_file_that_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr("os.access", lambda *_: False)  # the superuser may read whatever its mode says
    with pytest.raises(UsageError, match=r"a\.txt: the file may not be read"):
        find_files(str(tmp_path))


def test_the_standard_library_is_real_text_without_tests_and_tables() -> None:
    files = find_files("stdlib")
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py", "_base.py"} <= names
    folders = {part for path in files for part in path.parts}
    assert not folders & {"test", "tests", "encodings", "pydoc_data", "idlelib", "site-packages", "dist-packages"}
    assert not any(name.startswith("_sysconfigdata") for name in names)
    documents = list(read_documents("stdlib"))
    assert len(documents) == len(set(documents))
    assert sum(len(text) for text in documents) > 5e6
    assert documents == list(read_documents("stdlib"))
