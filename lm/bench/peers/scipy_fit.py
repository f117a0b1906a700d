"""A scaling law fitted the usual way: SciPy's L-BFGS-B without gradient, start by start, resample by resample.

The objective, Huber of 1e-3 on log residuals with a logsumexp inside, and the grid of 4,500 starts are those of
Hoffmann et al. 2022, appendix D.3; a resample is refitted from the answer alone, the least that one can do.
"""

import itertools
import os

# L-BFGS-B's tiny products wait for a thread pool otherwise, 5 ms an iteration on busy cores: alone the peer is faster.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import scipy
from scipy.optimize import minimize

GRID = tuple(
    itertools.product(
        (0, 5, 10, 15, 20, 25), (0, 5, 10, 15, 20, 25), (-1, -0.5, 0, 0.5, 1), (0, 0.5, 1, 1.5, 2), (0, 0.5, 1, 1.5, 2)
    )
)  # a, b, e, alpha, beta
DELTA = 1e-3


def setup(spec: dict):
    """Reads n, d, loss [points] from `spec["arrays"]`; a step is `spec["sample"]` starts or resamples, as `spec["of"]`.

    The facts hold the objective that the starts of the first step reached.
    """
    arrays = dict(np.load(spec["arrays"]))
    log_n, log_d, log_loss = (np.log(arrays[name]) for name in ("n", "d", "loss"))
    random, count = np.random.default_rng(0), spec["sample"]

    def fit(start, chosen):
        n, d, loss = log_n[chosen], log_d[chosen], log_loss[chosen]

        def objective(theta):
            a, b, e, alpha, beta = theta
            # scipy.special's logsumexp costs many times the sum itself at this size: written out, the peer is faster.
            first, second = a - alpha * n, b - beta * d
            top = np.maximum(np.maximum(first, second), e)
            size = np.abs(top + np.log(np.exp(first - top) + np.exp(second - top) + np.exp(e - top)) - loss)
            return np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA)).sum()

        return minimize(objective, start, method="L-BFGS-B")

    everything = np.arange(len(log_loss))
    order = random.permutation(len(GRID))

    def starts():
        return [fit(GRID[i], everything) for i in itertools.islice(places, count)]

    places = itertools.cycle(order)
    answer = np.array(spec["answer"])
    if spec["of"] == "starts":
        facts = {"objective": float(min(found.fun for found in starts()))}
    else:
        facts = {"objective": float(fit(answer, everything).fun)}

    def run(repeats: int) -> None:
        for _ in range(repeats):
            if spec["of"] == "starts":
                starts()
            else:
                for _ in range(count):
                    fit(answer, random.integers(len(everything), size=len(everything)))

    return {**facts, "scipy": scipy.__version__, "starts_in_full": len(GRID)}, run
