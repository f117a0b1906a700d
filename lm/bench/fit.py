"""`lm bench fit`: laws with their certificate and 4,000 resamples, against SciPy start by start; a long table too."""

import dataclasses
import functools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lm.base.progress import bar
from lm.bench.interleave import Run, Taken, interleave, timed
from lm.bench.machine import Meter
from lm.bench.peer import Peer
from lm.bench.rows import Row, Unit
from lm.scaling import read
from lm.scaling.checks import coverage
from lm.scaling.fit import fit_table
from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import Bootstrap, Resampling
from lm.scaling.fitting.fitted import Fitted, fit_points
from lm.scaling.fitting.objective import HUBER
from lm.scaling.laws import LAWS
from lm.scaling.laws.base import Law
from lm.scaling.laws.power import HOFFMANN

# Besiroglu et al. 2024 (arXiv:2404.10102), the refit of Hoffmann's data: E, A, B, alpha, beta.
PARAMETERS = (1.8172, 482.01, 2085.43, 0.3478, 0.3658)
NOISE = 0.005  # of the log loss
# One law of each other family: every form is fitted by the same solver, in the same design.
OTHERS = tuple({type(law): law for law in reversed(LAWS) if law.of_loss and type(law) is not type(HOFFMANN)}.values())
_IMPORTS = {
    "ours": "import lm.scaling.fit, pandas, scipy.optimize, scipy.special",
    "SciPy": "import numpy, pandas, scipy.optimize, scipy.special",
}


@dataclasses.dataclass(frozen=True)
class Work:
    """The table's design, how much is fitted in full, and how much of it the peer does before it is scaled up."""

    budgets: int = 16
    sizes: int = 15
    resamples: int = 4000
    starts: int = 4500  # of Hoffmann's grid
    other_resamples: int = 400  # of each other law
    sample: int = 40  # starts, and resamples, that the peer does in a round
    long_budgets: int = 100  # of the long table
    long_sizes: int = 1000
    long_resamples: int = 1000
    long_sample: int = 1  # resamples of the long table that the peer does in a round

    @property
    def name(self) -> str:
        """The size of the table and of the bootstrap."""
        return f"{self.budgets * self.sizes} points, {self.resamples} resamples"


WORKS = (Work(),)


def bench_fit(rounds: int, meter: Meter, work: Work = WORKS[0]) -> tuple[list[Row], dict[str, Any]]:
    """Measures the point fit, the bootstrap, the whole answer, other laws, a long table and the imports.

    Returns the rows and the peers' facts.
    """
    found, long = _planted(work.budgets, work.sizes), _planted(work.long_budgets, work.long_sizes)
    table = found.table
    fitted, long_fitted = fit_points(found, HOFFMANN, HUBER, {}), fit_points(long, HOFFMANN, HUBER, {})
    ours: dict[str, Run] = {
        "point": timed(lambda: fit_points(found, HOFFMANN, HUBER, {})),
        "bootstrap": timed(lambda: _resample(fitted, work.resamples)),
        "whole": timed(lambda: fit_table(table, n="n", d="d", c=None, bootstrap=work.resamples)),
        "long": timed(lambda: _resample(fit_points(long, HOFFMANN, HUBER, {}), work.long_resamples)),
        **{f"law {law.name}": timed(functools.partial(_answer, found, law, work.other_resamples)) for law in OTHERS},
        **{f"import {who}": timed(functools.partial(_fresh, line)) for who, line in _IMPORTS.items()},
    }
    with tempfile.TemporaryDirectory() as folder:

        def peer(of: str, one: Fitted, sample: int) -> Peer:
            big_e, big_a, big_b, alpha, beta = one.estimate
            arrays = Path(folder) / f"{len(one.found)}.npz"
            np.savez(arrays, n=one.found.n, d=one.found.d, loss=one.found.loss)
            answer = [float(x) for x in (np.log(big_a), np.log(big_b), np.log(big_e), alpha, beta)]
            spec = {"arrays": str(arrays), "sample": sample, "answer": answer, "of": of.removeprefix("long ")}
            return Peer(of, "scipy_fit.py", sys.executable, spec)

        peers = [
            peer("starts", fitted, work.sample),
            peer("resamples", fitted, work.sample),
            peer("long resamples", long_fitted, work.long_sample),
        ]
        with bar("fit", len(peers) + rounds) as progress:
            taken = interleave(ours, peers, rounds=rounds, steps=1, meter=meter, progress=progress)
    proof = fitted.certificate
    facts = {"ours": {"objective": proof.objective, "points": proof.points, "starts": proof.starts}, **taken.facts}
    return _rows(taken, work, proof.starts), facts


def _planted(budgets: int, sizes: int) -> read.Points:
    """An IsoFLOP table of Hoffmann's law; for laws of repeated data it says that some runs repeat their tokens."""
    n, d = coverage.isoflop(budgets, sizes)
    loss = coverage.Planted(PARAMETERS, n, d, NOISE).losses(np.random.default_rng(0))
    u = d / np.resize([1, 2, 4], len(d))
    return read.points(pd.DataFrame({"n": n, "d": d, "loss": loss, "u": u}), read.Columns("n", "d", None, "loss", "u"))


def _resample(fitted: Fitted, resamples: int) -> None:
    bootstrap.draw(fitted.problem, fitted.theta, Bootstrap(resamples, Resampling.POINT, 0))


def _answer(found: read.Points, law: Law, resamples: int) -> None:
    _resample(fit_points(found, law, HUBER, {}), resamples)


def _rows(taken: Taken, work: Work, our_starts: int) -> list[Row]:
    full = {
        "starts": work.starts / work.sample,
        "resamples": work.resamples / work.sample,
        "long resamples": work.long_resamples / work.long_sample,
    }
    scaled = {of: np.array(taken.seconds[of]) * times for of, times in full.items() if of in taken.seconds}
    told = f"the peer's time is measured on {work.sample} of them in each round and scaled linearly"
    points, long_points = work.budgets * work.sizes, work.long_budgets * work.long_sizes

    def row(case: str, ours: str, needs: Sequence[str], note: str) -> Row:
        name = "SciPy L-BFGS-B without gradient"
        lost = [f"{of}: {taken.missing[of]}" for of in needs if of not in scaled]
        return Row(
            case=case,
            dtype="float64",
            unit=Unit.SECONDS,
            ours=taken.seconds[ours],
            peers={} if lost or not needs else {name: np.sum([scaled[of] for of in needs], axis=0).tolist()},
            missing={name: "; ".join(lost)} if lost else {},
            note=note,
        )

    return [
        row("point fit and certificate", "point", ["starts"],
            f"ours from {our_starts} starts read off the table, the peer from {work.starts} of a grid; {told}"),
        row(f"{work.resamples} resamples", "bootstrap", ["resamples"], f"each refitted from the answer; {told}"),
        row("whole answer", "whole", ["starts", "resamples"],
            "ours with intervals, IsoFLOP curves and warnings, the peer the two above added; nothing is compiled"),
        row(f"{long_points:,} rows", "long", ["long resamples"],
            f"ours a point fit with certificate and {work.long_resamples} resamples, the peer the resamples alone, "
            f"measured on {work.long_sample} of them in each round and scaled linearly"),
        *(row(f"law {law.name}", f"law {law.name}", [],
              f"{law.formula}: point fit, certificate and {work.other_resamples} resamples of the same {points} points")
          for law in OTHERS),
        Row("import in a fresh interpreter", "", Unit.SECONDS, taken.seconds["import ours"],
            {"NumPy, pandas, SciPy": taken.seconds["import SciPy"]},
            note="with the start of the interpreter; ours with all that the whole answer loads"),
    ]  # fmt: skip


def _fresh(line: str) -> None:
    subprocess.run([sys.executable, "-c", line], check=True)
