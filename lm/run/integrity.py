"""A seal on each checkpoint: the hashes of its files, committed together with it.

Neither Orbax nor TensorStore notices a flipped bit in an array's bytes: the array is restored with another number in
it. The seal is written into the temporary folder before Orbax renames it, so a checkpoint that has a name has a seal.
"""

import asyncio
import json
from pathlib import Path

from orbax.checkpoint.path import atomicity

from lm.base.files import sha256_file, write_json

NAME = "integrity.json"
# Orbax writes these after the seal, and restores without them.
_WRITTEN_AFTER = ("_CHECKPOINT_METADATA", "commit_success.txt", NAME)


class SealedPath(atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary folder, sealed just before it takes its final name."""

    async def finalize(self) -> None:
        if self.get_final().name.isdigit():  # a whole step; Orbax finishes each item in it by this class as well
            await asyncio.to_thread(seal, Path(self.get()))
        await super().finalize()


def seal(folder: Path) -> None:
    """Writes `integrity.json`: the SHA-256 of every file in `folder`."""
    write_json(folder / NAME, _hashes(folder))


def defect(folder: Path) -> str | None:
    """What differs between `folder` and its seal, told in a few words; None when nothing does."""
    try:
        sealed = json.loads((folder / NAME).read_text())
        found = _hashes(folder)
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


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): sha256_file(path)
        for path in files
        if path.parent != folder or path.name not in _WRITTEN_AFTER
    }
