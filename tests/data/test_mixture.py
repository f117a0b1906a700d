"""A mixture keeps its weights over any stretch, reads each corpus as it would be read alone, and is as repeatable."""

import itertools
import json
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.base.config import build, content_hash
from lm.base.errors import UsageError
from lm.data.batches import Batches
from lm.data.config import DataConfig
from lm.data.corpus import prepare, tokenize
from lm.data.mixture import Part, deal, dealt, shares_of
from lm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from lm.data.tokens import TokenFile, TokenWriter

T = 8
WEIGHTS = (0.5, 0.3, 0.2)

weights = st.lists(st.one_of(st.integers(1, 1000), st.floats(1e-6, 1e6)), min_size=1, max_size=6)


def write_tokens(path: Path, letter: str, documents: int, tokenizer: Tokenizer | None = None) -> TokenFile:
    """Documents of one letter and their number: every window says which corpus it is of."""
    tokenizer = tokenizer or ByteTokenizer()
    texts = [f"{letter}{n}" * 3 for n in range(documents)]
    with TokenWriter(path, tokenizer) as writer:
        writer.append(texts, tokenizer.encode_batch(texts))
    return TokenFile.open(path)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Part, ...]:
    folder = tmp_path_factory.mktemp("mixture")
    return tuple(
        Part(name, share, write_tokens(folder / f"{name}.bin", name, size))
        for name, share, size in zip("abc", shares_of(WEIGHTS), (40, 9, 3), strict=True)
    )


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@settings(max_examples=30, deadline=None)
@given(weights, st.integers(0, 2**61))
def test_any_first_rows_hold_the_weights_to_less_than_the_stated_bound(weights: list[float], start: int) -> None:
    shares = shares_of(weights)
    bound = max(1, len(shares) - 1)
    for first in (0, start):
        corpus, number = deal(shares, np.arange(first, first + 300, dtype=np.uint64))
        counts = np.array(dealt(shares, first), dtype=object)
        for row, (own, place) in enumerate(zip(corpus, number, strict=True), first):
            assert place == counts[own]  # numbered without a gap: no row of a corpus is left out or comes twice
            counts[own] += 1
            assert all(abs(count - (row + 1) * share) < bound for count, share in zip(counts, shares, strict=True))
        assert tuple(counts) == dealt(shares, first + 300)


def test_whole_periods_hold_the_weights_exactly() -> None:
    shares = shares_of([7, 2, 0.5, 0.5])
    assert shares == (Fraction(7, 10), Fraction(1, 5), Fraction(1, 20), Fraction(1, 20))
    for periods in (1, 3, 10**12):
        assert dealt(shares, 20 * periods) == (14 * periods, 4 * periods, periods, periods)


def test_each_corpus_is_read_in_its_own_order_through_its_own_epochs(parts: tuple[Part, ...]) -> None:
    mixed = Batches(parts, T, 5, seed=3)
    alone = [Batches(part.file, T, 1, seed=3) for part in parts]
    at = [0] * len(parts)
    for step in range(60):
        for row, corpus in enumerate(mixed.origins(step)[0]):
            np.testing.assert_array_equal(mixed[step]["inputs"][row], alone[corpus][at[corpus]]["inputs"][0])
            at[corpus] += 1
    assert tuple(at) == dealt([part.share for part in parts], 300)
    assert at[2] > 3 * mixed.windows[2]  # the smallest one went round several times


def test_a_mixture_of_one_is_the_corpus_alone(parts: tuple[Part, ...]) -> None:
    one, alone = Batches((Part("a", Fraction(1), parts[0].file),), T, 4, 1), Batches(parts[0].file, T, 4, 1)
    assert one.fingerprint == alone.fingerprint
    assert all(same(one[step], alone[step]) for step in (0, 5, 10**6))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_batches_of_one(parts: tuple[Part, ...], processes: int) -> None:
    whole = Batches(parts, T, 8, 3, segment_mask=True)
    shared = [Batches(parts, T, 8, 3, True, index, processes) for index in range(processes)]
    for step in (0, 1, 511, 512, 12_345):  # blocks of origins end at other steps in each of them
        batches = [part[step] for part in shared]
        joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        assert same(joined, whole[step])
    assert all(part.fingerprint == whole.fingerprint for part in shared)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6), st.integers(1, 9))
def test_any_step_at_any_time_is_the_same(parts: tuple[Part, ...], steps: list[int], batch_size: int) -> None:
    used = pickle.loads(pickle.dumps(Batches(parts, T, batch_size, 5)))
    for step in steps:
        assert same(used[step], Batches(parts, T, batch_size, 5)[step])


def test_grain_gives_the_batches_of_random_access_from_any_step(parts: tuple[Part, ...]) -> None:
    batches = Batches(parts, T, 4, seed=1)
    for step, batch in enumerate(itertools.islice(batches.iterate(37), 30), 37):
        assert same(batch, batches[step])


def test_the_fingerprint_names_each_corpus_its_share_and_its_place(parts: tuple[Part, ...]) -> None:
    base = Batches(parts, T, 4, 0).fingerprint
    others = [
        parts[:2],
        (parts[1], parts[0], parts[2]),
        tuple(Part(part.name, share, part.file) for part, share in zip(parts, shares_of([5, 2, 3]), strict=True)),
    ]
    assert len({json.dumps(Batches(other, T, 4, 0).fingerprint) for other in others} | {json.dumps(base)}) == 4
    assert json.loads(json.dumps(base)) == base  # it comes back from a checkpoint as JSON


def test_other_tokenizers_are_refused(parts: tuple[Part, ...], tmp_path: Path) -> None:
    train_bpe(["abc"], 260, tmp_path / "t.json")
    other = write_tokens(tmp_path / "d.bin", "d", 9, load_tokenizer(str(tmp_path / "t.json")))
    with pytest.raises(UsageError, match=r"different tokenizers.*Tokenise all with one"):
        Batches((parts[0], Part("d", Fraction(1), other)), T, 4, 0)


def texts(folder: Path) -> dict[str, str]:
    """Three files of a hundred documents each, by name."""
    found = {}
    for letter in "abc":
        path = folder / f"{letter}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{letter} {n}"}) + "\n" for n in range(100)))
        found[letter] = str(path)
    return found


def data_config(sources: dict[str, str], weights: tuple[float, ...] = WEIGHTS, **changes: object) -> DataConfig:
    mixture = [
        {"name": name, "corpus": corpus, "weight": weight}
        for (name, corpus), weight in zip(sources.items(), weights, strict=True)
    ]
    return build(DataConfig, {"mixture": mixture, "validation_fraction": 0.2, **changes})


def test_a_mixture_is_prepared_part_by_part_and_its_fingerprint_has_no_path(tmp_path: Path) -> None:
    sources = texts(tmp_path)
    (tmp_path / "d.txt").write_text("else")
    further = {"further": str(tmp_path / "d.txt")}
    corpus = prepare(data_config(sources, extra_validation=further), tmp_path / "cache")
    assert [(part.name, part.share) for part in corpus.parts] == list(zip("abc", shares_of(WEIGHTS), strict=True))
    assert list(corpus.held_out) == ["a", "b", "c", "further"]
    alone = prepare(DataConfig(corpus=sources["a"], validation_fraction=0.2), tmp_path / "cache")
    assert corpus.parts[0].file.path == alone.parts[0].file.path
    assert corpus.held_out["a"].path == alone.held_out["validation"].path
    moved = {name: str(Path(path).rename(tmp_path / f"moved-{name}.jsonl")) for name, path in sources.items()}
    again = prepare(data_config(moved, (5, 3, 2)), tmp_path / "cache")
    assert (again.fingerprint, again.evaluation) == (corpus.fingerprint, corpus.evaluation)
    others = [prepare(data_config(moved, weights), tmp_path / "cache") for weights in ((5, 2, 3), (3, 5, 2))]
    assert len({other.fingerprint for other in (corpus, alone, *others)}) == 4
    assert len({other.evaluation for other in (corpus, alone, *others)}) == 4


def test_token_folders_and_text_mix(tmp_path: Path) -> None:
    sources = texts(tmp_path)
    tokenize([sources["a"]], tmp_path / "tokens", validation_fraction=0.2)
    (tmp_path / "b.txt").write_text("\n".join(f"b {n}" for n in range(100)))
    mixed = {"a": str(tmp_path / "tokens"), "b": str(tmp_path / "b.txt"), "c": sources["c"]}
    corpus = prepare(data_config(mixed, separator="\\n"), tmp_path / "cache")
    assert corpus.parts[0].file.path == tmp_path / "tokens" / "train.bin"
    assert [part.file.documents + corpus.held_out[part.name].documents for part in corpus.parts] == [100] * 3


def test_a_configuration_without_a_mixture_is_named_as_before() -> None:
    assert content_hash(DataConfig()) == content_hash({
        "corpus": "stdlib", "tokenizer": "bytes", "validation_fraction": 0.05, "separator": None,
        "extra_validation": {}, "segment_mask": False, "seed": 0,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "changes", "said"),
    [
        ((0.0, 1, 1), {}, r"weight of 'a' is 0\.0; it must be above 0"),
        ((1, -2, 1), {}, r"weight of 'b' is -2\.0"),
        ((1, float("nan"), 1), {}, "is not a finite number"),
        ((1, 1, 1), {"corpus": "books.txt"}, "corpus 'books.txt' and a mixture both say"),
        ((1, 1, 1), {"extra_validation": {"b": "x"}}, "'b' names 2 texts"),
        ((1, 1, 1), {"extra_validation": {"validation": "x"}}, "'validation' names 2 texts"),
    ],
)
def test_a_mixture_that_contradicts_itself_is_refused(
    weights: tuple[float, ...], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        data_config(dict.fromkeys("abc", "text"), weights, **changes)


def test_a_mixture_with_a_name_twice_is_refused() -> None:
    twice = {"mixture": [{"name": "a", "corpus": path, "weight": 1} for path in ("x", "y")]}
    with pytest.raises(UsageError, match="'a' names 2 texts"):
        build(DataConfig, twice)


def test_what_cannot_be_mixed_is_refused(tmp_path: Path) -> None:
    sources, cache = texts(tmp_path), tmp_path / "cache"
    with pytest.raises(UsageError, match=r"absent: there is no such file or folder"):
        prepare(data_config(sources | {"b": "absent"}), cache)
    with pytest.raises(UsageError, match="'a' and 'b' are the same text"):
        prepare(data_config(sources | {"b": sources["a"]}), cache)
    with pytest.raises(UsageError, match=r"extra_validation\.d: \d+ of its 100 documents are training documents too"):
        prepare(data_config(sources, extra_validation={"d": sources["c"]}), cache)
    tokenize([sources["b"]], tmp_path / "tokens", bpe_vocabulary=260, validation_fraction=0.2)
    with pytest.raises(UsageError, match="tokenised with another tokenizer than 'bytes'"):
        prepare(data_config(sources | {"b": str(tmp_path / "tokens")}), cache)
