"""What the machine is, and what else it was doing while we measured."""

import datetime
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from lm.run.record import environment

_PROC = Path("/proc")


class Meter:
    """Measures, over a `with` block, how many cores other people's programs used.

    Ours are this process and `watched` (further process ids, with the children they have waited for). Only Linux tells;
    elsewhere the answer is None.
    """

    def __init__(self) -> None:
        self.watched: list[int] = [os.getpid()]
        self._foreign, self._seconds = 0.0, 0.0

    def __enter__(self) -> Self:
        self._begun, self._busy, self._own = time.perf_counter(), _busy_seconds(), _own_seconds(self.watched)
        return self

    def __exit__(self, *_: object) -> None:
        busy, own = _busy_seconds(), _own_seconds(self.watched)
        self._seconds += time.perf_counter() - self._begun
        self._foreign += (busy - self._busy) - (own - self._own)

    @property
    def foreign_cores(self) -> float | None:
        """Cores that others kept busy, on average over all blocks; None where the system does not say."""
        if not self._seconds or not (_PROC / "stat").exists():
            return None
        return max(0.0, self._foreign / self._seconds)


def facts(meter: Meter, load_before: Sequence[float], seconds: float) -> dict[str, Any]:
    """The environment (versions, processor, devices, threads, commit), the date, the load before and after."""
    foreign = meter.foreign_cores
    return {
        **environment(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load_before": list(load_before),
        "load_after": load(),
        "foreign_cores": None if foreign is None else round(foreign, 3),
        "wall_seconds": round(seconds, 1),
    }


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes; empty where the system keeps none."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


def _busy_seconds() -> float:
    """CPU seconds of all programs since the machine started, idle and waiting left out."""
    try:
        fields = (_PROC / "stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, soft = (int(field) for field in fields[:7])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _own_seconds(pids: Sequence[int]) -> float:
    total = 0
    for pid in pids:
        try:
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(field) for field in fields[11:13])
    return total / os.sysconf("SC_CLK_TCK") if total else 0.0
