"""A seal on each checkpoint: the hashes of its files, committed together with it.

Neither Orbax nor TensorStore notices a flipped bit in an array's bytes: the array is restored with another number in
it. The seal is written into the temporary folder before Orbax renames it, so a checkpoint that has a name has a seal.
"""

import asyncio
import json
import os
from collections.abc import Iterator

from etils import epath
from orbax.checkpoint.path import atomicity

from lm.base.files import sha256_file, write_json

NAME = "integrity.json"
# Orbax writes these after the seal, and restores without them.
_WRITTEN_AFTER = ("_CHECKPOINT_METADATA", "commit_success.txt", NAME)


class SealedPath(atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder, sealed just before it takes its final name."""

    async def finalize(self) -> None:
        await _seal_step(self.get(), self.get_final())
        await super().finalize()


class SealedObjects(atomicity.CommitFileTemporaryPath):
    """The same where nothing can be renamed: sealed just before the object that says that all are there."""

    async def finalize(self) -> None:
        await _seal_step(self.get(), self.get_final())
        await super().finalize()


async def _seal_step(folder: epath.Path, final: epath.Path) -> None:
    if final.name.isdigit():  # a whole step; Orbax finishes each item in it by these classes as well
        await asyncio.to_thread(seal, folder)


def seal(folder: os.PathLike[str]) -> None:
    """Writes `integrity.json`: the SHA-256 of every file in `folder`."""
    path = epath.Path(folder)
    write_json(path / NAME, _hashes(path))


def defect(folder: os.PathLike[str]) -> str | None:
    """What differs between `folder` and its seal, told in a few words; None when nothing does."""
    path = epath.Path(folder)
    try:
        sealed = json.loads((path / NAME).read_text())
        found = _hashes(path)
    except (OSError, ValueError) as error:
        return f"its {NAME} cannot be read ({error.__class__.__name__})"
    if not isinstance(sealed, dict) or not sealed:
        return f"its {NAME} is not a list of files"
    for name in sorted(sealed.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in sealed:
            return f"{name} is not in its {NAME}"
        if sealed[name] != found[name]:
            return f"{name} has changed"
    return None


def _hashes(folder: epath.Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in sorted(_files(folder))
        if path.parent != folder or path.name not in _WRITTEN_AFTER
    }


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for child in folder.iterdir():
        if child.is_dir():
            yield from _files(child)
        else:
            yield child
