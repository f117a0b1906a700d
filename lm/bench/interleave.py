"""Measuring in turn: ours, each peer, the limit, and again, so that what disturbs one disturbs all."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm.base.progress import Bar
from lm.bench.machine import Meter
from lm.bench.peer import Peer, PeerMissing, RunningPeer, running

Run = Callable[[int], float]  # steps -> seconds


@dataclasses.dataclass
class Taken:
    """Seconds per step of each contestant, sample i from round i; peers that were missing, with the reason; facts."""

    seconds: dict[str, list[float]]
    missing: dict[str, str]
    facts: dict[str, dict[str, Any]]

    def rates(self, per_step: float, names: Sequence[str]) -> dict[str, list[float]]:
        """`per_step` (tokens, say) per second, of those of `names` that took part."""
        return {name: [per_step / s for s in self.seconds[name]] for name in names if name in self.seconds}

    def missing_of(self, names: Sequence[str]) -> dict[str, str]:
        """Those of `names` that did not take part."""
        return {name: self.missing[name] for name in names if name in self.missing}


def interleave(
    ours: Mapping[str, Run],
    peers: Sequence[Peer],
    *,
    rounds: int,
    steps: int,
    meter: Meter,
    progress: Bar,
    accept: Callable[[Peer, Mapping[str, Any]], str] = lambda peer, facts: "",
) -> Taken:
    """Sets up all peers, then lets everyone do `steps` steps in each of `rounds` rounds.

    `accept` looks at what a peer said of itself and returns why it is no fair peer, or nothing. A peer that fails is
    left out from then on and named in `missing`; ours failing is an error.
    """
    taken = Taken({name: [] for name in ours}, {}, {})
    contestants: dict[str, Run] = dict(ours)
    with contextlib.ExitStack() as stack:
        started: list[tuple[Peer, RunningPeer]] = []
        for peer in peers:
            try:
                started.append((peer, stack.enter_context(running(peer))))
            except PeerMissing as reason:
                taken.missing[peer.name] = str(reason)
        # They import and compile side by side, mostly on one core each; nothing is measured before all are ready.
        for number, (peer, process) in enumerate(started):
            progress.update(number, f"setting up {peer.name}")
            try:
                facts = process.ready()
            except PeerMissing as reason:
                taken.missing[peer.name] = str(reason)
                continue
            refusal = accept(peer, facts)
            if refusal:
                taken.missing[peer.name] = refusal
                continue
            taken.facts[peer.name], taken.seconds[peer.name] = facts, []
            contestants[peer.name] = process.run
            meter.watched.append(process.pid)
        with meter:
            for number in range(rounds):
                for name, run in list(contestants.items()):
                    progress.update(len(peers) + number, name)
                    try:
                        taken.seconds[name].append(run(steps) / steps)
                    except PeerMissing as reason:
                        taken.missing[name] = str(reason)
                        del taken.seconds[name], contestants[name]
    return taken


def timed(once: Callable[[], Any], warm_up: int = 0) -> Run:
    """A run that does `once` so many times and says how long it took; `warm_up` times are done, unmeasured, before."""

    def run(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            once()
        return time.perf_counter() - begun

    run(warm_up)
    return run
