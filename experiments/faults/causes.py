"""The faults: each causes one in the run of a `Bench`, and says whether it came before the command had ended."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.faults.bench import STEPS, Bench, mount
from experiments.faults.kill import Command, CpuTime, Ended, Evaluation, FileEvent, Moment, Step
from lm.run.lock import holder

Cause = Callable[[Bench, random.Random], bool]
ROOMY = "size=256m"  # the small disk, when it is not to be full


def signalled(moment: Callable[[Bench, random.Random], Moment], number: int = signal.SIGKILL) -> Cause:
    """The command gets a signal at `moment`."""

    def cause(bench: Bench, draw: random.Random) -> bool:
        ended = bench.command(bench.train, moment(bench, draw), number=number)
        sent = (-number, 130) if number == signal.SIGTERM else (-number,)
        assert ended.code in (0, *sent), ended
        return ended.code in sent

    return cause


def training(bench: Bench, draw: random.Random) -> Moment:
    """Anywhere from the first import to the result, or close behind the dispatch of a step."""
    if draw.random() < 0.5:
        return CpuTime(draw.uniform(0, bench.cpu_seconds))
    return Step(draw.randint(1, STEPS // 3), draw.uniform(0, 0.02))


def checkpointing(bench: Bench, draw: random.Random) -> Moment:
    """At or just behind an operation on a file of a checkpoint."""
    return FileEvent("checkpoints", draw.randint(1, 500), draw.choice((0.0, draw.uniform(0, 0.01))))


def compiling(bench: Bench, draw: random.Random) -> Moment:
    """While the first step is compiled or its program loaded."""
    return Step(1, draw.uniform(0, 0.3))


def evaluating(bench: Bench, draw: random.Random) -> Moment:
    """Within an evaluation."""
    return Evaluation(draw.randint(1, 3), draw.uniform(0, 0.005))


def killed_table(bench: Bench, draw: random.Random) -> bool:
    """Kills `lm table`, or the end of `lm train`, which writes the run's row."""
    name, argv = draw.choice(((bench.table.name, bench.write_table), (bench.run.result.name, bench.train)))
    moment = FileEvent(name, draw.randint(1, 2), draw.choice((0.0, draw.uniform(0, 0.001))))
    ended = bench.command(argv, moment)
    assert bench.table.read_bytes() == bench.whole_table
    return ended.code == -signal.SIGKILL


def damaged(damage: Callable[[Bench, random.Random], None]) -> Cause:
    """The command is killed once it has two checkpoints, and what it left is damaged."""

    def cause(bench: Bench, draw: random.Random) -> bool:
        ended = bench.command(bench.train, Step(draw.randint(STEPS // 3, STEPS // 2)))
        if ended.code == -signal.SIGKILL:
            damage(bench, draw)
        return ended.code == -signal.SIGKILL

    return cause


def checkpoint(change: Callable[[Path, random.Random], None]) -> Cause:
    """A random sealed file of the newest checkpoint is changed."""

    def damage(bench: Bench, draw: random.Random) -> None:
        newest = max(int(path.name) for path in bench.run.checkpoints.iterdir() if path.name.isdigit())
        change(draw.choice(list(_files(Path(bench.run.checkpoints / str(newest) / "state")))), draw)

    return damaged(damage)


def metrics(change: Callable[[Path, random.Random], None]) -> Cause:
    """metrics.jsonl is changed; where no checkpoint agrees with what is left, it is put back as from a backup."""

    def damage(bench: Bench, draw: random.Random) -> None:
        whole = bench.run.metrics.read_bytes()
        change(bench.run.metrics, draw)
        ended = bench.command(bench.train)
        if ended.code:
            _refused(ended, 1, "no checkpoint can be used: ")
            bench.run.metrics.write_bytes(whole)

    return damaged(damage)


def tokens(change: Callable[[Path, random.Random], None]) -> Cause:
    """A token file is changed: refused until the folder is deleted, and so made again."""

    def damage(bench: Bench, draw: random.Random) -> None:
        change(draw.choice(sorted(bench.cache.rglob("*.bin"))), draw)
        _refused(bench.command(bench.train), 1, "Delete the folder and tokenise again")
        shutil.rmtree(bench.cache)

    return damaged(damage)


def flip(path: Path, draw: random.Random) -> None:
    """Another bit somewhere in the file."""
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    """Fewer bytes, at least one."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def half_row(path: Path, draw: random.Random) -> None:
    """Half a line more at the end."""
    with path.open("a") as file:
        file.write('{"kind":"train","step":59,"loss":4.17171717'[: draw.randint(1, 43)])


def full_disk(bench: Bench, draw: random.Random) -> bool:
    """The small disk has hardly any room left after a kill, and the command goes on until that is used up."""
    bench.command(bench.train, Step(draw.randint(1, STEPS // 2)))
    mount(bench.disk, f"remount,size={shutil.disk_usage(bench.disk).used + draw.randint(0, 400_000)}")
    ended = bench.command(bench.train)
    mount(bench.disk, f"remount,{ROOMY}")
    if ended.code:
        _refused(ended, 1, "no space left on the disk")
    return ended.code != 0


def read_only(bench: Bench, draw: random.Random) -> bool:
    """The small disk can only be read after a kill; nothing in it changes."""
    bench.command(bench.train, Step(draw.randint(1, STEPS // 3)))
    before = [path.read_bytes() for path in _files(bench.run.path)]
    mount(bench.disk, "remount,ro")
    ended = bench.command(bench.train)
    mount(bench.disk, "remount,rw")
    _refused(ended, 2, "cannot be a run folder: Read-only file system")
    assert before == [path.read_bytes() for path in _files(bench.run.path)]
    return True


def second_run(bench: Bench, draw: random.Random) -> bool:
    """Another process gives the same command while the first one runs."""
    first = Command(bench.train, bench.folder / "first")
    while first.running and holder(bench.run.path) is None:
        time.sleep(0.01)
    ended = bench.command(bench.train)
    if ended.code:
        _refused(ended, 1, f"process {first.pid} on ")
    assert first.ended().code == 0
    return ended.code != 0


def _refused(ended: Ended, code: int, why: str) -> None:
    assert ended.code == code, ended
    assert why in ended.said.splitlines()[-1], ended
    assert "Traceback" not in ended.said, ended


def _files(folder: Path) -> Iterator[Path]:
    """Those that hold something, in order."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size)
