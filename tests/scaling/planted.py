"""Planted tables that need no published data: laws with known parameters and known noise."""

import numpy as np
import pandas as pd

from lm.scaling.checks import coverage

PARAMETERS = (1.8, 480.0, 2100.0, 0.35, 0.37)  # E, A, B, alpha, beta: near the published refit


def table(design=None, noise=0.005, seed=0, parameters=PARAMETERS) -> pd.DataFrame:
    n, d = coverage.grid(10, 10) if design is None else design
    planted = coverage.Planted(parameters, n, d, noise)
    return pd.DataFrame({"n": n, "d": d, "loss": planted.losses(np.random.default_rng(seed))})


def own(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows under the names of our own run table."""
    named = rows.rename(columns={"n": "params_total", "d": "tokens"})
    return named.assign(flops_matmul=6 * named["params_total"] * named["tokens"], role="fit", seed=0)
