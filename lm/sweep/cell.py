"""One cell as a process of its own: `python -m lm.sweep.cell ORDER.json`, started by a runner of this room."""

import ctypes
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.base.config import build
from lm.base.errors import LmError
from lm.base.freed import keep_freed_memory
from lm.parallel.launcher import find
from lm.parallel.processes import joined
from lm.train.config import build_run
from lm.train.counting import run
from lm.train.result import Labels

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


@dataclasses.dataclass(frozen=True)
class Order:
    """What a runner asks of a cell's process."""

    config: dict[str, Any]  # a RunConfig as plain values
    workdir: str
    cache: str
    labels: dict[str, Any]
    cores: tuple[int, ...] = ()  # the process keeps to these; XLA then makes that many threads


def main(arguments: Sequence[str]) -> int:
    """Carries out the order in the file that is named; returns what `lm train` would."""
    order = read_order(Path(arguments[0]))
    _die_with_parent()
    if order.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, order.cores)
    return carry_out(order)


def read_order(path: Path) -> Order:
    """The order that a runner wrote."""
    return build(Order, json.loads(path.read_text()), "order")


def carry_out(order: Order) -> int:
    """Trains the cell; returns what `lm train` would."""
    keep_freed_memory()
    try:
        config, labels = build_run(order.config), Labels(**order.labels)
        with joined(find()) as team:
            run(config, order.workdir, cache=order.cache, labels=labels, team=team)
    except LmError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted after a checkpoint", file=sys.stderr)
        return 130
    return 0


def _die_with_parent() -> None:
    """A killed sweep leaves no cell behind that would hold its run folder's lock."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
