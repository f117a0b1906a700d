"""What a minimum is read off: a curve through the losses of one budget over log N or log D, for many losses at once."""

import abc
import dataclasses

import numpy as np

Array = np.ndarray

LEAST_SIZES = 4
SAME_SIZE = 6  # digits of log N or log D


@dataclasses.dataclass(frozen=True)
class Curve(abc.ABC):
    """One way to find the minimum of a budget's losses; `without` says that there is none, `doubtful` maybe none."""

    name: str
    without: str
    doubtful: str

    @abc.abstractmethod
    def minima(self, x: Array, losses: Array) -> tuple[Array, Array]:
        """Places [R] and levels [R] of the minima of `losses` [R, points] over `x` [points]; NaN for none."""

    def refusal(self, x: Array, loss: Array) -> str | None:
        """Why the losses [points] over `x` [points] show no minimum that can be trusted; None when they do."""
        sizes, means = by_size(x, loss[None])
        if len(sizes) < LEAST_SIZES:
            return f"{len(sizes)} size{'s' * (len(sizes) != 1)}: at least {LEAST_SIZES} are needed"
        place = self.minima(x, loss[None])[0][0]
        if np.isnan(place):
            return self.without
        if not x.min() < place < x.max():
            return "the minimum is outside the sampled sizes"
        if means[0].argmin() in (0, len(sizes) - 1):
            return "the lowest loss is at the edge of the sampled sizes"
        residual = residuals(x, loss)
        size = float(np.sqrt(np.sum(residual**2) / max(len(x) - 3, 1)))
        depth = float((loss - residual).max() - PARABOLA.minima(x, loss[None])[1][0])
        if not size < depth:
            return f"residuals ({size:.2g} nats) are as large as the curve is deep ({depth:.2g})"
        return None


@dataclasses.dataclass(frozen=True)
class Parabola(Curve):
    """Least squares of level + curvature * (x - place)^2 (Hoffmann et al. 2022, sec. 3.2)."""

    def minima(self, x: Array, losses: Array) -> tuple[Array, Array]:
        c0, c1, c2 = coefficients(x, losses).T
        with np.errstate(divide="ignore", invalid="ignore"):
            place = np.where(c2 > 0, x.mean() - c1 / (2 * c2), np.nan)
            return place, np.where(c2 > 0, c0 - c1**2 / (4 * c2), np.nan)


PARABOLA = Parabola(
    "parabola",
    without="wrong curvature: the fitted parabola has a maximum",
    doubtful="the curvature is not distinguishable from 0 at 95 %",
)


def coefficients(x: Array, losses: Array) -> Array:
    """Least-squares c0, c1, c2 [R, 3] of c0 + c1 t + c2 t^2 with t = x - mean(x), for `losses` [R, points]."""
    return losses @ np.linalg.pinv(_design(x)).T


def residuals(x: Array, loss: Array) -> Array:
    """What the least-squares parabola leaves of the losses [points]: the measure of noise for every curve."""
    return loss - _design(x) @ coefficients(x, loss[None])[0]


def by_size(x: Array, losses: Array) -> tuple[Array, Array]:
    """The distinct x [S], ascending, and the mean losses [R, S] of the points that share one."""
    order = np.argsort(x, kind="stable")
    _, first, counts = np.unique(np.round(x[order], SAME_SIZE), return_index=True, return_counts=True)
    sizes, means = (np.add.reduceat(part[..., order], first, axis=-1) / counts for part in (x, losses))
    return sizes, means


def _design(x: Array) -> Array:
    t = x - x.mean()
    return np.stack([np.ones_like(t), t, t**2], axis=1)
