"""The run folder: what lies where, who may continue it, and its log."""

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from lm.base.config import build, differences, to_dict
from lm.base.errors import UsageError
from lm.base.files import read_object, write_json
from lm.run import remote

MAY_CHANGE = ("checkpoint_every", "checkpoints_kept", "checkpoints_kept_every", "mesh")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """One run on disk; every other room asks here for a path."""

    path: Path

    @property
    def config(self) -> Path:
        """The whole resolved configuration, and the fingerprints of what the run reads."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """A row per logged step and per evaluation: only what the same run gives again, bit for bit."""
        return self.path / "metrics.jsonl"

    @property
    def timing(self) -> Path:
        """Everything that a clock said."""
        return self.path / "timing.jsonl"

    @property
    def result(self) -> Path:
        """The run's row of the run table, written when it has finished."""
        return self.path / "result.json"

    @property
    def checkpoints(self) -> epath.Path:
        """Orbax checkpoints, a folder a step; on the object store that the folder stands for, if it does for one."""
        return epath.Path(remote.address(self.path) or self.path) / "checkpoints"

    @property
    def data(self) -> Path:
        """Token files, where the run was given raw text and no other cache."""
        return self.path / "data"

    @property
    def log(self) -> Path:
        """What was said on the way, with the time."""
        return self.path / "log.txt"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    def read_config(self) -> dict[str, Any]:
        """What `config.json` holds: `{"config": ..., "identity": ...}`.

        Raises:
          UsageError: the file is missing or is not such JSON.
        """
        if not self.config.is_file():
            raise UsageError("this is not a run folder: it has no config.json", where=str(self.path))
        recorded = read_object(self.config)
        for name in ("config", "identity"):
            if not isinstance(recorded.get(name), dict):
                raise UsageError(f"not the record of a run: it holds no '{name}'", where=str(self.config))
        return recorded


def check_run(path: Path | str, config: Any) -> None:
    """Sees that `open_run` could use the folder `path` for `config`, before anything is written into it.

    Raises:
      UsageError: as `open_run`, as far as that is known before the corpus has been read.
    """
    folder = RunFolder(Path(path))
    if folder.config.exists():
        _refuse_changes(folder, config, None)
    elif folder.path.is_dir():
        _refuse_strangers(folder)


def open_run(path: Path | str, config: Any, identity: Mapping[str, str]) -> RunFolder:
    """Makes the run folder `path`, or checks that an existing one holds this very run.

    Args:
      path: the folder; made when absent.
      config: the resolved configuration, a dataclass or plain nested dicts.
      identity: fingerprints of what the run reads (corpus, tokenizer, ...), by name.

    Only when checkpoints are saved, which are kept, and the mesh may differ from what the folder records
    (`MAY_CHANGE`): they change no number, but for the last bits of float32 on another mesh. The file then takes the new
    values. The caller holds the folder's lock: what an interrupted write left there is removed.

    Raises:
      UsageError: another leaf or fingerprint differs (each is listed), or the folder holds something else.
    """
    folder = RunFolder(Path(path))
    asked = {"config": to_dict(config), "identity": dict(identity)}
    folder.path.mkdir(parents=True, exist_ok=True)
    for left in folder.path.glob(".*.part"):  # by a process that was killed as it wrote: the lock says that none does
        left.unlink()
    if not folder.config.exists():
        _refuse_strangers(folder)
        write_json(folder.config, asked)
        return folder
    if _refuse_changes(folder, config, asked["identity"]) != asked:
        write_json(folder.config, asked)
    return folder


def _refuse_changes(folder: RunFolder, config: Any, identity: dict[str, str] | None) -> dict[str, Any]:
    """What the folder records, where it is of this configuration and, unless not known yet, this identity."""
    recorded = folder.read_config()
    then = recorded["config"]
    if dataclasses.is_dataclass(config):  # a field that came after the folder had its default there
        with contextlib.suppress(UsageError):  # a run of another kind differs in what it has
            then = to_dict(build(type(config), then, str(folder.config)))
    changed = differences(_numbers(then), _numbers(to_dict(config)), "config")
    if identity is not None:
        changed += differences(recorded["identity"], identity, "identity")
    if changed:
        raise UsageError(
            "this folder holds a run of another configuration or corpus: " + "; ".join(changed),
            where=str(folder.path),
            do="Use another --workdir, or the configuration that the folder was made with.",
        )
    return recorded


def log_to(folder: RunFolder, logger: logging.Logger) -> logging.Handler:
    """Appends `logger`'s records (INFO and above) to `log.txt`, each with date and time; returns the handler."""
    handler = _LogFile(folder.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.INFO)
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    return handler


class _LogFile(logging.FileHandler):
    """Its lines are lost where the disk is full: a row or a checkpoint ends the run then, in one line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def _numbers(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in MAY_CHANGE}


def _refuse_strangers(folder: RunFolder) -> None:
    # A lock, the leavings of an interrupted write (both hidden), a log and token files may come before config.json.
    strangers = sorted(
        child.name
        for child in folder.path.iterdir()
        if not child.name.startswith(".") and child not in (folder.log, folder.data)
    )
    if strangers:
        raise UsageError(
            f"the folder has no config.json but holds {', '.join(strangers[:3])}",
            where=str(folder.path),
            do="Choose an empty or new --workdir.",
        )
