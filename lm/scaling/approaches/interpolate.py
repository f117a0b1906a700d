"""IsoFLOP (approach 2) by interpolation: minima of a smooth curve through the losses (Porian et al. 2024)."""

import dataclasses
from typing import Any

import numpy as np

from lm.scaling.approaches import isoflop
from lm.scaling.approaches.curve import Curve, by_size
from lm.scaling.read import Points

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Akima(Curve):
    """Akima's cubic pieces through the logarithm of each size's mean loss; each piece's minimum is solved for exactly.

    It makes no assumption on the shape, so it has no parabola's bias, and more noise: it follows every point.
    """

    def minima(self, x: Array, losses: Array) -> tuple[Array, Array]:
        from scipy.interpolate import Akima1DInterpolator

        sizes, means = by_size(x, losses)
        # Noise of a few degrees of freedom can take a loss below 0, which has no logarithm: such a draw has no minimum.
        possible = np.all(means > 0, axis=1)
        logs = np.log(np.where(possible[:, None], means, 1.0).T)
        cubic, square, slope, value = Akima1DInterpolator(sizes, logs).c  # each [pieces, R]
        with np.errstate(divide="ignore", invalid="ignore"):
            root = np.sqrt(square**2 - 3 * cubic * slope)
            # Of the two forms of the rising zero of the slope the one that subtracts no near-equal numbers.
            t = np.where(square > 0, -slope / (square + root), (root - square) / (3 * cubic))
        inside = (t > 0) & (t < np.diff(sizes)[:, None])
        t = np.where(inside, t, 0.0)
        places = np.concatenate([sizes[:-1, None] + t, np.broadcast_to(sizes[-1], (1, len(losses)))])
        levels = np.concatenate([value + t * (slope + t * (square + t * cubic)), logs[-1:]])
        best = levels.argmin(0)[None]
        place, level = (np.take_along_axis(part, best, 0)[0] for part in (places, levels))
        edge = ~possible | (place <= sizes[0]) | (place >= sizes[-1])
        return np.where(edge, np.nan, place), np.where(edge, np.nan, np.exp(level))


AKIMA = Akima(
    "interpolation",
    without="the lowest loss is at the edge of the sampled sizes",
    doubtful="a lowest loss at the edge of the sampled sizes is not excluded at 95 %",
)


def analyse(found: Points, *, seed: int) -> dict[str, Any]:
    """The same as `isoflop.analyse`, with the minima of Akima's interpolation in place of a parabola's.

    Intervals are of noise draws: the losses get normal noise of the size of the parabolas' pooled residuals (with its
    uncertainty, so t-distributed), which overstates it where the curves are no parabolas.
    """
    return isoflop.analyse(found, seed=seed, curve=AKIMA)


def lines(part: dict[str, Any]) -> list[str]:
    """The analysis as text."""
    return isoflop.lines(part)
