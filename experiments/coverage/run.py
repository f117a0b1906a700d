"""Measures how often 95 % intervals hold the truth, over designs, sizes, resamplings and kinds of interval."""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np

from lm.base.files import write_json
from lm.scaling.checks import coverage
from lm.scaling.fitting.bootstrap import Resampling

PARAMETERS = (1.8, 480.0, 2100.0, 0.35, 0.37)  # E, A, B, alpha, beta: near the refit of Besiroglu et al. 2024
NOISE = 0.005  # of the log loss, between runs
ROW_NOISE = 0.002  # of the log loss, between the rows of one run, where there are several
ROWS_A_RUN = 3  # at d, d / 2 and d / 4
DESIGNS = {
    "IsoFLOP": (coverage.isoflop, {15: (3, 5), 40: (5, 8), 100: (10, 10), 240: (16, 15)}),  # budgets, sizes
    "N x D": (coverage.grid, {15: (5, 3), 40: (8, 5), 100: (10, 10), 240: (16, 15)}),  # sizes, lengths
}


def main() -> None:
    """Writes what is measured to `--out`: by default the file that `lm fit` reads."""
    parser = argparse.ArgumentParser(prog="python -m experiments.coverage", description=__doc__)
    parser.add_argument("--replicates", type=int, default=400)
    parser.add_argument("--resamples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(coverage.__file__).with_name(coverage.MEASURED))
    args = parser.parse_args()
    begin, rows = time.process_time(), []
    for (design, (make, sizes)), kinds in itertools.product(
        DESIGNS.items(), ((Resampling.POINT, Resampling.RESIDUAL), (Resampling.CLUSTER,))
    ):
        for points, shape in sizes.items():
            planted = plant(*make(*shape), clustered=kinds == (Resampling.CLUSTER,))
            budget = 10 * float(planted.table["c"].max())
            measured = coverage.measure(
                planted, kinds, replicates=args.replicates, resamples=args.resamples, seed=args.seed, budget=budget
            )
            for (kind, interval), held in measured.items():
                row: dict[str, Any] = {
                    "points": points, "design": design, "resampling": kind.value, "interval": interval.value,
                    "held": {name.replace(f"@{budget:.6g}", "@10C"): share for name, share in held.items()},
                }  # fmt: skip
                rows.append(row)
                ends = min(held.values()), max(held.values())
                print(f"{time.process_time() - begin:6.0f} s  {points:4d} {design:8} {kind.value:9} {interval.value:11}"
                      f" {ends[0]:.3f} to {ends[1]:.3f}", flush=True)  # fmt: skip
    write_json(
        args.out,
        {
            "law": "hoffmann", "parameters": list(PARAMETERS), "objective": "huber_log", "noise": NOISE,
            "row_noise": ROW_NOISE, "rows_a_run": ROWS_A_RUN, "replicates": args.replicates,
            "resamples": args.resamples, "seed": args.seed, "rows": rows,
        },
    )  # fmt: skip


def plant(n: np.ndarray, d: np.ndarray, *, clustered: bool) -> coverage.Planted:
    """The planted law at runs of n, d (each [points]); clustered, each run has three rows with a noise of its own."""
    if not clustered:
        return coverage.Planted(PARAMETERS, n, d, NOISE)
    seen = d / 2.0 ** np.arange(ROWS_A_RUN)[:, None]
    runs = np.tile(np.arange(len(n)), ROWS_A_RUN)
    return coverage.Planted(
        PARAMETERS, np.tile(n, ROWS_A_RUN), seen.ravel(), ROW_NOISE, clusters=runs, run_noise=NOISE
    )  # fmt: skip
