"""Checkpoints of a run: saved while training goes on, proved whole before they are trusted.

A checkpoint is the folder `<path>/<step>/` with two Orbax items: `state` (the train state, a tree of arrays) and
`meta` (JSON: whatever the caller needs in order to continue), and the seal of `lm.run.integrity`. It is written under
a temporary name and renamed when complete; one that is not kept is removed only after that.
"""

import contextlib
import copy
import dataclasses
import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN, PreservationPolicy

from lm.base.errors import RunError, UsageError, type_and_line
from lm.base.files import disk_full, is_remote
from lm.parallel.processes import POINT_SECONDS, Team
from lm.run import integrity
from lm.run.hearsay import keep_quiet

Tree = TypeVar("Tree")
_log = logging.getLogger(__name__)

keep_quiet()


@dataclasses.dataclass(frozen=True)
class Restored(Generic[Tree]):
    """What a checkpoint gave back, and which newer ones were passed over."""

    step: int
    state: Tree
    meta: dict[str, Any]
    skipped: list[str]  # one line a checkpoint: which and why


class Checkpoints:
    """The checkpoints of one run, written by this process (or by all processes that train the run together).

    Args:
      path: the folder; made when absent. What an interrupted save left in it is removed.
      keep: how many of the newest are kept.
      keep_every: those at multiples of so many steps are kept too; 0: none.
      team: the processes; the first decides which checkpoint is restored.
    """

    def __init__(self, path: Path | epath.Path | str, keep: int, keep_every: int = 0, team: Team = Team()):
        self.path, self._team, self._failed = _absolute(path), team, False
        self._kept: list[PreservationPolicy] = [LatestN(keep)]
        if keep_every:
            self._kept.append(EveryNSteps(keep_every))
        self._manager = self._open()

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Begins to save and returns once the arrays are copied: `state` may be donated to the next step at once.

        A step that is saved already is left as it is: a run's state at a step does not change.

        Raises:
          RunError: an earlier save failed, for instance on a full disk. The checkpoints before it are untouched.
        """
        # Orbax writes the meta later, from another thread: what the caller changes meanwhile must not reach it.
        kept = ocp.args.JsonSave(copy.deepcopy(dict(meta)))
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=kept)
        with self._told():
            if step not in self._manager.all_steps():
                self._manager.save(step, args=items, force=True)

    def check(self) -> None:
        """Raises as `save` if a save that has been going on meanwhile has failed; waits for nothing."""
        # Orbax' own check_for_errors no longer knows of an error that has ended its last thread.
        if not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when everything saved is on the disk. Raises as `save`."""
        with self._told():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and ends the background threads; what a failed save has written is removed. Raises as `save`."""
        try:
            with self._told():
                self._manager.close()
        finally:
            if self._failed and self._team.first:
                for unfinished in self.path.glob("*.orbax-checkpoint-tmp"):
                    unfinished.rmtree(missing_ok=True)

    def restore_latest(
        self, abstract_state: Tree, accept: Callable[[dict[str, Any]], None] | None = None
    ) -> Restored[Tree] | None:
        """The newest checkpoint that is whole, or None when there is none at all.

        Newer ones that are passed over are renamed `<step>.corrupt`, so that the run can save at these steps again.

        Args:
          abstract_state: the tree of `jax.ShapeDtypeStruct`, with shardings, that the state comes back as.
          accept: called with a checkpoint's meta, by process 0 only. A `RunError` that it raises makes the search go on
            to an older one; a `UsageError` ends it.

        Raises:
          UsageError: what `accept` raised.
          RunError: checkpoints exist and none can be used (nothing is renamed then), or the state in them has other
            leaves, shapes or types than `abstract_state`.
        """
        steps = self._team.agreed("the list of checkpoints", _steps(self.path))
        if not steps:
            return None
        found = _newest_whole(self._manager, self.path, steps, accept, self._team)
        state = _read(self._manager, self.path, found.step, abstract_state)
        self._set_aside(found.skipped)
        return Restored(found.step, state, found.meta, list(found.skipped.values()))

    def _set_aside(self, steps: Iterable[int]) -> None:
        if not steps:
            return
        self._manager.close()
        if self._team.first:
            for step in steps:
                aside = self.path / f"{step}.corrupt"
                aside.rmtree(missing_ok=True)
                (self.path / str(step)).rename(aside)
        self._team.agreed("checkpoints set aside")
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        kept = AnyPreservationPolicy(self._kept)
        return _manager(self.path, preservation_policy=kept, cleanup_tmp_directories=True)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turns what Orbax and TensorStore raise from their threads into one line."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self._failed = True
            if _is_disk_full(error):
                raise disk_full(self.path) from error
            raise RunError(f"a checkpoint could not be saved: {type_and_line(error)}", where=str(self.path)) from error


def latest_step(path: Path | epath.Path | str) -> int | None:
    """The newest step that a checkpoint in `path` was completed at, whole or not by now; None without any."""
    return max(_steps(epath.Path(path)), default=None)


def load_params(path: Path | epath.Path | str, abstract_params: Tree, team: Team = Team()) -> tuple[int, Tree]:
    """The step of the newest whole checkpoint in `path` and its tree under `params`; the rest of it is not read.

    A newer checkpoint that is not whole is named in a logged warning; nothing is renamed or written.

    Args:
      path: the `checkpoints` folder of a run, which may be going on.
      abstract_params: the tree of `jax.ShapeDtypeStruct`, with shardings, that the parameters come back as.
      team: the processes that load them together.

    Raises:
      UsageError: there are no checkpoints.
      RunError: none is whole, or the parameters have other leaves, shapes or types than `abstract_params`.
    """
    path = _absolute(path)
    steps = team.agreed("the list of checkpoints", _steps(path))
    if not steps:
        raise UsageError("there is no checkpoint", where=str(path), do="Name a run that has saved one.")
    with _manager(path, read_only=True) as manager:
        found = _newest_whole(manager, path, steps, None, team)
        for line in found.skipped.values():
            _log.warning("%s: %s", path, line)
        return found.step, _read(manager, path, found.step, {"params": abstract_params}, partial=True)["params"]


@dataclasses.dataclass(frozen=True)
class _Found:
    step: int
    meta: dict[str, Any]
    skipped: dict[int, str]


def _newest_whole(
    manager: ocp.CheckpointManager,
    path: epath.Path,
    steps: Iterable[int],
    accept: Callable[[dict[str, Any]], None] | None,
    team: Team,
) -> _Found:
    skipped: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        # Process 0 reads every byte, which takes as long as it takes.
        why = _judged(team, f"the files of checkpoint {step}", integrity.defect, path / str(step), seconds=None)
        if why is None:
            meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            why = None if accept is None else _judged(team, f"the meta of checkpoint {step}", _refusal, accept, meta)
            if why is None:
                return _Found(step, meta, skipped)
        skipped[step] = f"checkpoint {step} is passed over: {why}"
    raise RunError(
        "no checkpoint can be used: " + "; ".join(skipped.values()),
        where=str(path),
        do="Begin again in another folder.",
    )


def _judged(
    team: Team, name: str, judge: Callable[..., str | None], *what: Any, seconds: float | None = POINT_SECONDS
) -> str | None:
    """Process 0 judges, for all: each must go on to the same checkpoint, and only process 0 need see every file."""
    with team.telling():
        why = judge(*what) if team.first else None
    return team.agreed(name, why, seconds=seconds)


def _refusal(accept: Callable[[dict[str, Any]], None], meta: dict[str, Any]) -> str | None:
    try:
        accept(meta)
    except RunError as error:
        return str(error)
    return None


def _read(manager: ocp.CheckpointManager, path: epath.Path, step: int, abstract: Any, *, partial: bool = False) -> Any:
    """Restores the leaves of `abstract`, which must all be there as they are: Orbax would cast a type silently."""
    recorded = _leaves(manager.item_metadata(step)["state"].tree)
    asked = _leaves(abstract)
    wrong = [
        f"{name} is {recorded.get(name, 'missing')}, not {kind}"
        for name, kind in asked.items()
        if recorded.get(name) != kind
    ]
    if not partial:
        wrong += [f"{name} is not expected" for name in recorded if name not in asked]
    if wrong:
        raise RunError(
            "the state in the checkpoint is another: " + "; ".join(wrong[:5]),
            where=str(path / str(step)),
            do="Continue it with the model, optimizer and version of the code that wrote it.",
        )
    restore = ocp.args.PyTreeRestore(
        item=abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=partial
    )
    return manager.restore(step, args=ocp.args.Composite(state=restore))["state"]


def _leaves(tree: Any) -> dict[str, str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
        for path, leaf in leaves
    }


def _absolute(path: Path | epath.Path | str) -> epath.Path:
    return epath.Path(path) if is_remote(path) else epath.Path(Path(path).resolve())


def _manager(path: epath.Path, **options: Any) -> ocp.CheckpointManager:
    sealed = integrity.SealedObjects if is_remote(path) else integrity.SealedPath
    return ocp.CheckpointManager(
        path,
        item_handlers={"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(temporary_path_class=sealed, **options),
    )


def _steps(path: epath.Path) -> list[int]:
    return [int(child.name) for child in path.iterdir() if child.name.isdigit()] if path.is_dir() else []


def _is_disk_full(error: BaseException) -> bool:
    # TensorStore reports the errno only in its text.
    texts = ("No space left on device", "Disk quota exceeded")
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(text in str(error) for text in texts)
