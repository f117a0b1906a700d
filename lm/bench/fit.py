"""`lm bench fit`: a law with its certificate and 4,000 resamples, against SciPy start by start."""

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
from lm.scaling.fitting.certificate import certify
from lm.scaling.fitting.objective import HUBER, Array
from lm.scaling.fitting.prepare import prepare
from lm.scaling.fitting.solve import minimise
from lm.scaling.laws.power import HOFFMANN

# Besiroglu et al. 2024 (arXiv:2404.10102), the refit of Hoffmann's data: E, A, B, alpha, beta.
PARAMETERS = (1.8172, 482.01, 2085.43, 0.3478, 0.3658)
NOISE = 0.005  # of the log loss
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
    sample: int = 40  # starts, and resamples, that the peer does in a round

    @property
    def name(self) -> str:
        """The size of the table and of the bootstrap."""
        return f"{self.budgets * self.sizes} points, {self.resamples} resamples"


WORKS = (Work(),)


def bench_fit(rounds: int, meter: Meter, work: Work = WORKS[0]) -> tuple[list[Row], dict[str, Any]]:
    """Measures the point fit, the bootstrap, the whole answer and the imports; returns the rows and peers' facts."""
    n, d = coverage.isoflop(work.budgets, work.sizes)
    loss = coverage.Planted(PARAMETERS, n, d, NOISE).losses(np.random.default_rng(0))
    table = pd.DataFrame({"n": n, "d": d, "loss": loss})
    problem, centre, starts = prepare(read.points(table, read.Columns("n", "d", None, "loss")), HOFFMANN, HUBER, {})

    def point() -> tuple[Array, float]:
        solution = minimise(problem, starts, far=True)
        best = int(solution.value.argmin())
        certify(problem, solution, best, starts)
        return solution.theta[best], float(solution.value[best])

    theta, objective = point()
    ours: dict[str, Run] = {
        "point": timed(point),
        "bootstrap": timed(lambda: bootstrap.draw(problem, theta, Bootstrap(work.resamples, Resampling.POINT, 0))),
        "whole": timed(lambda: fit_table(table, n="n", d="d", c=None, bootstrap=work.resamples)),
        **{f"import {who}": timed(functools.partial(_fresh, line)) for who, line in _IMPORTS.items()},
    }
    big_e, big_a, big_b, alpha, beta = HOFFMANN.to_natural(theta, centre)
    answer = [float(x) for x in (np.log(big_a), np.log(big_b), np.log(big_e), alpha, beta)]
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "table.npz"
        np.savez(arrays, n=n, d=d, loss=loss)
        spec = {"arrays": str(arrays), "sample": work.sample, "answer": answer}
        peers = [Peer(of, "scipy_fit.py", sys.executable, {**spec, "of": of}) for of in ("starts", "resamples")]
        with bar("fit", len(peers) + rounds) as progress:
            taken = interleave(ours, peers, rounds=rounds, steps=1, meter=meter, progress=progress)
    facts = {"ours": {"objective": objective, "points": len(loss), "starts": len(starts)}, **taken.facts}
    return _rows(taken, work, len(starts)), facts


def _rows(taken: Taken, work: Work, our_starts: int) -> list[Row]:
    full = {"starts": work.starts, "resamples": work.resamples}
    scaled = {
        of: np.array(taken.seconds[of]) * total / work.sample for of, total in full.items() if of in taken.seconds
    }
    told = f"the peer's time is measured on {work.sample} of them in each round and scaled linearly"

    def row(case: str, ours: str, needs: Sequence[str], note: str) -> Row:
        name = "SciPy L-BFGS-B without gradient"
        lost = [f"{of}: {taken.missing[of]}" for of in needs if of not in scaled]
        return Row(
            case=case,
            dtype="float64",
            unit=Unit.SECONDS,
            ours=taken.seconds[ours],
            peers={} if lost else {name: np.sum([scaled[of] for of in needs], axis=0).tolist()},
            missing={name: "; ".join(lost)} if lost else {},
            note=note,
        )

    return [
        row("point fit and certificate", "point", ["starts"],
            f"ours from {our_starts} starts read off the table, the peer from {work.starts} of a grid; {told}"),
        row(f"{work.resamples} resamples", "bootstrap", ["resamples"], f"each refitted from the answer; {told}"),
        row("whole answer", "whole", ["starts", "resamples"],
            "ours with intervals, IsoFLOP curves and warnings, the peer the two above added; nothing is compiled"),
        Row("import in a fresh interpreter", "", Unit.SECONDS, taken.seconds["import ours"],
            {"NumPy, pandas, SciPy": taken.seconds["import SciPy"]},
            note="with the start of the interpreter; ours with all that the whole answer loads"),
    ]  # fmt: skip


def _fresh(line: str) -> None:
    subprocess.run([sys.executable, "-c", line], check=True)
