"""A corpus: documents split into training and validation, tokenised once, found again by content.

A document's side of the split is decided by the hash of its own text, so a duplicate is always on the same side and
adding documents moves none.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm.base import config as base_config
from lm.base import files, progress
from lm.base.errors import RunError, UsageError
from lm.data import sources, tokens
from lm.data.batches import count_windows
from lm.data.config import VALIDATION, DataConfig
from lm.data.mixture import Part, shares_of
from lm.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from lm.data.tokens import TokenFile, TokenWriter

_MANIFEST = "corpus.json"
_VERSION = 1  # of the stream's layout and of the split
_BATCH_BYTES = 4_000_000  # of text handed to the tokenizer at once
_BATCH_DOCUMENTS = 4096


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What a run trains on and is measured on.

    `held_out` are the evaluation sets by name: `VALIDATION` of a corpus alone, each part's of a mixture, further ones.
    """

    parts: tuple[Part, ...]
    held_out: dict[str, TokenFile]
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Of the training text, of a mixture with its shares."""
        return self._mixed({part.name: part.file for part in self.parts})

    @property
    def evaluation(self) -> str:
        """The fingerprint of the text that `VALIDATION` scores are of."""
        alone = self.held_out.get(VALIDATION)
        return alone.fingerprint if alone else self._mixed(self.held_out)

    def epochs(self, rows: int, window: int) -> float:
        """How often the part that is read most often is read in so many rows of `window` tokens."""
        return max(float(part.share) * rows / max(1, count_windows(part.file, window)) for part in self.parts)

    def _mixed(self, files: dict[str, TokenFile]) -> str:
        if len(self.parts) == 1:
            return files[self.parts[0].name].fingerprint
        lines = [f"{part.share} {files[part.name].fingerprint}" for part in self.parts]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that determines a folder of token files; its hash names the folder in a cache.

    `contents` are the SHA-256 of the source files in order; `validation_fraction` is None where every document goes
    into one file; `train_bpe` is the vocabulary of a tokenizer trained on the training documents, or None.
    """

    contents: tuple[str, ...]
    separator: str | None
    validation_fraction: float | None
    tokenizer: str | None
    train_bpe: int | None = None
    version: int = _VERSION


def prepare(config: DataConfig, cache: Path) -> Corpus:
    """Opens the corpus that `config` names, tokenising its text into `cache` unless that was done before.

    A corpus folder written by `lm tokenize` is opened as it is. With `validation_fraction` 0 the extra set of the
    name `VALIDATION`, else the first one, is the validation set. Any number of processes may call this at once.

    Raises:
      UsageError: no such text, text that cannot be read, a split with an empty side, a tokenizer or split other than
        the folder's, the same text twice in a mixture, or an extra set that shares documents with the training text.
      RunError: damaged token files, or a full disk.
    """
    if config.validation_fraction == 0 and not config.extra_validation:
        raise UsageError("validation_fraction is 0 and there is no extra_validation", where="config.data",
                         do="Set one of them: a run is measured on text that it does not train on.")  # fmt: skip
    tokenizer = load_tokenizer(config.tokenizer)
    folders = _folders(config, tokenizer, cache)
    shares = shares_of([component.weight for component in config.components])
    parts = tuple(
        Part(component.name, share, TokenFile.open(folder / "train.bin"))
        for component, share, folder in zip(config.components, shares, folders, strict=True)
    )
    for one, other in itertools.combinations(parts, 2):
        if one.file.fingerprint == other.file.fingerprint:
            raise UsageError(f"'{one.name}' and '{other.name}' are the same text", where="config.data.mixture",
                             do="Name it once, with the sum of the weights.")  # fmt: skip
    extra = {}
    for name, source in config.extra_validation.items():
        paths = sources.find_files(source)
        extra[name] = TokenFile.open(_cached(paths, config.separator, None, tokenizer, cache) / "text.bin")
        for part in parts:
            _refuse_overlap(part.file, extra[name], f"extra_validation.{name}")
    if config.validation_fraction > 0:
        split = zip(parts, folders, strict=True)
        held_out = {part.name: TokenFile.open(folder / "validation.bin") for part, folder in split}
    else:
        held_out = {VALIDATION: extra.pop(VALIDATION if VALIDATION in extra else next(iter(extra)))}
    return Corpus(parts, held_out | extra, tokenizer)


def tokenize(
    inputs: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "bytes",
    bpe_vocabulary: int | None = None,
    validation_fraction: float = 0.05,
    separator: str | None = None,
) -> None:
    """Tokenises text into the folder `out`, whole or not at all; the same request again finds it done.

    With `bpe_vocabulary`, a byte-level BPE of that size is trained on the training documents and takes the place of
    `tokenizer`. A tokenizer that is not 'bytes' is kept as `out/tokenizer.json`.

    Raises:
      UsageError: see `prepare`; or `out` holds something else.
    """
    paths = list(itertools.chain(*_find(inputs, separator)))
    known = None if bpe_vocabulary is not None else load_tokenizer(tokenizer)
    recipe = _recipe(paths, separator, validation_fraction, known, bpe_vocabulary)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / _MANIFEST).is_file() or _manifest(out)["key"] != base_config.content_hash(recipe):
            raise UsageError("the folder holds something else", where=str(out), do="Name a new one, or delete it.")
    else:
        _write(paths, recipe, known, out)


def describe(folder: Path) -> str:
    """What is in a folder written by `tokenize`: a line for its tokenizer and one for each token file."""
    found = [TokenFile.open(path) for path in sorted(folder.glob("*.bin"))]
    own = folder / "tokenizer.json"
    spec = own if own.is_file() else _manifest(folder)["tokenizer"]["spec"]
    lines = [f"tokenizer {spec}: {found[0].vocab_size:,} entries, fingerprint {found[0].tokenizer}"]
    for file in found:
        lines.append(
            f"{file.path}: {file.tokens:,} tokens, {file.bytes:,} bytes, {file.bytes / file.tokens:.3f} bytes/token, "
            f"{file.documents:,} documents, fingerprint {file.fingerprint}"
        )
    return "\n".join(lines)


def _cached(
    paths: Sequence[Path], separator: str | None, fraction: float | None, tokenizer: Tokenizer, cache: Path
) -> Path:
    recipe = _recipe(paths, separator, fraction, tokenizer, None)
    folder = cache / base_config.content_hash(recipe)
    if not folder.is_dir():
        _write(paths, recipe, tokenizer, folder)
    return folder


def _recipe(
    paths: Sequence[Path],
    separator: str | None,
    fraction: float | None,
    tokenizer: Tokenizer | None,
    bpe_vocabulary: int | None,
) -> Recipe:
    if fraction is not None and not 0 <= fraction < 1:
        raise UsageError(f"validation_fraction is {fraction}", do="It is a share of the documents, from 0 to below 1.")
    contents = tuple(f"{path.suffix} {files.sha256_file(path)}" for path in paths)
    fingerprint = tokenizer.fingerprint if tokenizer else None
    return Recipe(contents, separator, fraction, fingerprint, bpe_vocabulary)


def _find(inputs: Sequence[str], separator: str | None) -> list[list[Path]]:
    """The files of each input."""
    found = [sources.find_files(source) for source in inputs]
    if separator is not None and not any(map(sources.splits_by_separator, itertools.chain(*found))):
        raise UsageError("a separator splits .txt files, and there is none", where=", ".join(inputs),
                         do="Leave the separator out.")  # fmt: skip
    return found


def settings_of(folder: Path | str) -> tuple[DataConfig, int]:
    """What a run must say to read a folder written by `lm tokenize`: its data configuration and its vocabulary size.

    Raises:
      UsageError: not such a folder.
    """
    folder = Path(folder)
    if not (folder / _MANIFEST).is_file():
        raise UsageError("not a folder of token files", where=str(folder), do="Write one: lm tokenize TEXT --out DIR.")
    manifest = _manifest(folder)
    spec = _spec_of(folder, manifest)
    config = DataConfig(str(folder), spec, validation_fraction=manifest["recipe"]["validation_fraction"])
    return config, load_tokenizer(spec).vocab_size


def _folders(config: DataConfig, tokenizer: Tokenizer, cache: Path) -> list[Path]:
    """The folder of token files of each component: one of `lm tokenize` as it is, or one in the cache."""
    given = [component.corpus for component in config.components]
    raw = [corpus for corpus in given if not (Path(corpus) / _MANIFEST).is_file()]
    found = dict(zip(raw, _find(raw, config.separator) if raw else [], strict=True))
    separated = bool(raw or config.extra_validation)  # by a separator that is not about token files then
    return [
        _cached(found[corpus], config.separator, config.validation_fraction, tokenizer, cache)
        if corpus in found
        else _checked_folder(Path(corpus), config, tokenizer, separated)
        for corpus in given
    ]


def _checked_folder(folder: Path, config: DataConfig, tokenizer: Tokenizer, separated: bool) -> Path:
    manifest = _manifest(folder)
    if manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        raise UsageError(f"tokenised with another tokenizer than '{config.tokenizer}'", where=str(folder),
                         do=f"Set data.tokenizer={_spec_of(folder, manifest)}, or tokenise again.")  # fmt: skip
    recipe = manifest["recipe"]
    if recipe["validation_fraction"] != config.validation_fraction:
        raise UsageError(f"split with validation_fraction {recipe['validation_fraction']}, not "
                         f"{config.validation_fraction}", where=str(folder),
                         do=f"Set data.validation_fraction={recipe['validation_fraction']}.")  # fmt: skip
    if config.separator not in (None, recipe["separator"]) and not separated:
        raise UsageError(f"split by separator {recipe['separator']!r}, not {config.separator!r}", where=str(folder),
                         do="Leave data.separator out.")  # fmt: skip
    return folder


def _spec_of(folder: Path, manifest: dict[str, Any]) -> str:
    own = folder / "tokenizer.json"
    return str(own) if own.is_file() else manifest["tokenizer"]["spec"]


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["recipe"]["version"] != _VERSION:
            raise UsageError(f"written by version {manifest['recipe']['version']} of the format, this is {_VERSION}",
                             where=str(path), do="Tokenise again.")  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"damaged: {error!r}", where=str(path), do="Delete the folder and tokenise again.") from error
    return manifest


def _refuse_overlap(train: TokenFile, held_out: TokenFile, where: str) -> None:
    shared = len(set(train.document_digests).intersection(held_out.document_digests))
    if shared:
        raise UsageError(f"{shared} of its {held_out.documents} documents are training documents too", where=where,
                         do="Take them out of one of the two.")  # fmt: skip


def _write(paths: Sequence[Path], recipe: Recipe, known: Tokenizer | None, folder: Path) -> None:
    try:
        with files.whole_folder(folder) as part:
            _fill(paths, recipe, known, part)
    except OSError:
        if not (folder / _MANIFEST).is_file():  # else somebody was faster, and his is as whole
            raise


def _fill(paths: Sequence[Path], recipe: Recipe, known: Tokenizer | None, part: Path) -> None:
    tokenizer = known or _train(paths, recipe, part / "tokenizer.json")
    if known and known.spec != "bytes":
        shutil.copyfile(known.spec.partition("#")[0], part / "tokenizer.json")
    _write_tokens(paths, recipe, tokenizer, part)
    manifest = {
        "key": base_config.content_hash(recipe),
        "recipe": base_config.to_dict(recipe),
        # A trained one is named by where it ends up, not by the folder that is about to be renamed.
        "tokenizer": {"spec": known.spec if known else "tokenizer.json", "fingerprint": tokenizer.fingerprint},
        "sources": [path.name for path in paths],
    }
    files.write_json(part / _MANIFEST, manifest)


def _train(paths: Sequence[Path], recipe: Recipe, path: Path) -> Tokenizer:
    assert recipe.train_bpe is not None
    texts = (text for text in _documents(paths, recipe, "reading") if not _held_out(text, recipe.validation_fraction))
    train_bpe(texts, recipe.train_bpe, path)
    return load_tokenizer(str(path))


def _write_tokens(paths: Sequence[Path], recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> None:
    if recipe.validation_fraction is None:
        names = ["text"]
    else:
        names = ["train", "validation"] if recipe.validation_fraction else ["train"]
    smallest = 1.0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(TokenWriter(folder / f"{name}.bin", tokenizer)) for name in names]
        for texts in _batches(_documents(paths, recipe, "tokenising")):
            ids = tokenizer.encode_batch(texts)
            sides = [_held_out(text, recipe.validation_fraction) for text in texts]
            smallest = min(smallest, *(_position(text) for text in texts))
            for side, writer in enumerate(writers):
                chosen = [i for i, held_out in enumerate(sides) if held_out == side]
                writer.append([texts[i] for i in chosen], [ids[i] for i in chosen])
        _refuse_empty(writers, paths, recipe, smallest)


def _refuse_empty(writers: Sequence[TokenWriter], paths: Sequence[Path], recipe: Recipe, smallest: float) -> None:
    total = sum(writer.documents for writer in writers)
    where = f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0])
    if total == 0:
        raise UsageError("there is no text in it", where=where)
    if all(writer.documents for writer in writers):
        return
    fraction, empty = recipe.validation_fraction, "training" if not writers[0].documents else "validation"
    if total > 1 and empty == "validation":
        do = f"Hold out more (validation_fraction {smallest * 1.01 + 1e-3:.3f} holds out at least one), "
    else:
        do = "Split it with a separator, "
    raise UsageError(f"validation_fraction {fraction} of {total} document(s) leaves no {empty} document", where=where,
                     do=do + "or set validation_fraction 0 and name an extra validation text.")  # fmt: skip


def _documents(paths: Sequence[Path], recipe: Recipe, verb: str) -> Iterator[str]:
    size = 0
    with progress.bar(verb, total=len(paths)) as bar:
        for done, path in enumerate(paths):
            for text in sources.read_file(path, recipe.separator):
                size += len(text)
                bar.update(done, f"files, {size / 1e6:.1f} M characters")
                yield text
        bar.update(len(paths), f"files, {size / 1e6:.1f} M characters")


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _position(text: str) -> float:
    """Where a document lies in [0, 1) by its own text; those below `validation_fraction` are held out."""
    return int(tokens.digest(text.encode()), 16) / 2.0**64


def _held_out(text: str, fraction: float | None) -> bool:
    return fraction is not None and _position(text) < fraction
