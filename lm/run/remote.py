"""A run folder on an object store, `gs://bucket/run`.

An object is whole or absent, but it cannot be appended to, and nothing there can be locked. So the run's own files are
written in a local folder and put there whole, and checkpoints go there directly, through Orbax and TensorStore.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from lm.base.errors import RunError, UsageError

# Orbax writes arrays to Google's store; for others its TensorStore path has no driver.
_NEEDED = {"gs": ("gcsfs", "google.cloud.storage")}
LINK = ".remote"  # in the local folder: the address that it stands for
FILES = ("config.json", "metrics.jsonl", "timing.jsonl", "result.json", "log.txt", "tokenizer.json")


def check_remote(url: str) -> None:
    """Raises a UsageError where checkpoints cannot be written to such a URL, or a package for it is missing."""
    scheme = url.partition("://")[0]
    if scheme not in _NEEDED:
        raise UsageError(
            f"checkpoints can be written to a local or mounted folder and to {', '.join(f'{s}://' for s in _NEEDED)}",
            where=url,
            do=f"Mount the {scheme}:// store and name the folder.",
        )
    missing = [name for name in _NEEDED[scheme] if not _installed(name)]
    if missing:
        packages = " ".join(name.replace(".", "-") for name in missing)
        raise UsageError(f"{scheme}:// needs {packages}", where=url, do=f"pip install {packages}.")


@contextlib.contextmanager
def mirrored(url: str, *, read_only: bool = False) -> Iterator[Path]:
    """A local folder that stands for the run folder at `url` while the block runs, with the files that are there.

    At its end the files are put there, unless `read_only`.

    Raises:
      UsageError: as `check_remote`.
      RunError: the store cannot be read.
    """
    check_remote(url)
    with tempfile.TemporaryDirectory(prefix="lm-") as folder:
        local, remote = Path(folder) / epath.Path(url).name, epath.Path(url)
        local.mkdir()
        (local / LINK).write_text(url)
        with _told(url):
            for name in FILES:
                if (remote / name).exists():
                    (local / name).write_bytes((remote / name).read_bytes())
        try:
            yield local
        finally:
            if not read_only:
                publish(local)


def publish(local: Path) -> None:
    """Puts the files of a mirrored folder to where it stands for, each whole; nothing for any other folder.

    Of several processes only the first does.

    Raises:
      RunError: the store cannot be written to.
    """
    import jax  # a command that only looks at folders does without

    url = address(local)
    if url is None or jax.process_index():
        return
    remote = epath.Path(url)
    with _told(url):
        remote.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (local / name).exists():
                (remote / name).write_bytes((local / name).read_bytes())


def address(local: Path) -> str | None:
    """The URL that a local folder stands for; None when it stands for itself."""
    link = local / LINK
    return link.read_text() if link.exists() else None


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"the store cannot be reached: {error}", where=url) from error


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
