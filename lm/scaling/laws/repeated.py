"""Laws of repeated data: tokens seen again, and parameters beyond what the distinct tokens can use, count for less."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

from lm.scaling.laws.base import Array, Law, Logs, Relative
from lm.scaling.laws.power import HOFFMANN, TIED, PowerSum

# As published for C4 (app. A: E 1.87, A 521, B 1488, alpha .353), with the digits of the authors' own script.
# R_D and R_N are a local optimum of their objective over the 182 runs; lower ones exist (R_D 95.4, R_N 1.7).
MUENNIGHOFF = {
    "E": math.exp(0.6254804),
    "A": math.exp(6.255414),
    "B": math.exp(7.3049974),
    "alpha": 0.3526596,
    "R_D": 15.387756,
    "R_N": 5.309743,
}
EVERY_TIED, EVERY_FREE = 7, 19  # of the base law's starts; share no factor with the sides of their grid
FARTHEST = 300.0
START_DECAYS = (1.0, 5.0, 25.0, 125.0)


@dataclasses.dataclass(frozen=True)
class Repeated(Law):
    """E + A / N'^alpha + B / D'^beta with N' and D' the effective parameters and tokens of u distinct tokens.

    D' = u + u R_D (1 - exp(-(d / u - 1) / R_D)): the worth of a repeated token decays with the number of repetitions;
    N' likewise from U_N, the compute-optimal number of parameters of u tokens under the law itself, with R_N.
    `decaying` says which of the two decay, `tied` whether beta is alpha.
    """

    decaying: tuple[str, ...] = ("R_D", "R_N")
    tied: bool = True

    variables = ("n", "d", "u")
    centred = False

    @property
    def base(self) -> PowerSum:
        """The law of data that are never repeated."""
        return TIED if self.tied else HOFFMANN

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.base.parameters, *self.decaying)

    @property
    def logged(self) -> Mapping[str, Relative]:
        return {**self.base.logged, **dict.fromkeys(self.decaying, ())}

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        at = self._named(theta)
        log_n, log_d = logs["n"], logs["d"]
        if "R_N" in self.decaying:
            log_n = _effective(log_n, _usable(_best(at, logs["u"]), log_n), np.exp(at["R_N"]))
        if "R_D" in self.decaying:
            log_d = _effective(log_d, np.minimum(logs["u"], log_d), np.exp(at["R_D"]))
        return np.log(at["E"] + np.exp(at["A"] - at["alpha"] * log_n) + np.exp(at["B"] - at["beta"] * log_d))

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        at = self._named(theta)
        alpha, beta, log_n, log_d = at["alpha"], at["beta"], logs["n"], logs["d"]
        best, by_best = log_n, np.zeros_like(log_n)
        if "R_N" in self.decaying:
            best = _best(at, logs["u"])
            log_n, by_best, by_decay_n = _effective_and_slopes(log_n, _usable(best, log_n), np.exp(at["R_N"]))
        if "R_D" in self.decaying:
            log_d, _, by_decay_d = _effective_and_slopes(log_d, np.minimum(logs["u"], log_d), np.exp(at["R_D"]))
        of_n, of_d = np.exp(at["A"] - alpha * log_n), np.exp(at["B"] - beta * log_d)
        loss = at["E"] + of_n + of_d
        share_n, share_d = of_n / loss, of_d / loss
        through_n = -share_n * by_best  # alpha times what N' gains with U_N, over alpha: U_N hangs on four parameters
        slopes = {
            "E": 1 / loss,
            "A": share_n + through_n,
            "B": share_d - through_n,
            "alpha": -share_n * log_n + through_n * (1 / alpha - best),
            "beta": -share_d * log_d + through_n * (logs["u"] - 1 / beta),
        }
        if "R_N" in self.decaying:
            slopes["R_N"] = -share_n * alpha * by_decay_n
        if "R_D" in self.decaying:
            slopes["R_D"] = -share_d * beta * by_decay_d
        if self.tied:
            slopes["alpha"] = slopes["alpha"] + slopes["beta"]
        return np.log(loss), np.stack([slopes[name] for name in self.parameters], axis=1)

    def _named(self, theta: Array) -> dict[str, Array]:
        at = {name: theta[..., k, None] for name, k in self.index.items()}
        return {"beta": at["alpha"], **at}

    def starts(self, logs: Logs, loss: Array) -> Array:
        """Some of the base law's with every pair of decays."""
        means = {name: float(logs[name].mean()) for name in self.base.variables}
        centred = {name: logs[name] - mean for name, mean in means.items()}
        base = self.base.starts(centred, loss)[:: EVERY_TIED if self.tied else EVERY_FREE]
        base = self.base.to_inner(self.base.to_natural(base, means), {})
        decays = np.log(list(itertools.product(START_DECAYS, repeat=len(self.decaying))))
        return np.hstack([np.repeat(base, len(decays), axis=0), np.tile(decays, (len(base), 1))])


def _best(at: Mapping[str, Array], log_u: Array) -> Array:
    """log U_N: the parameters that are compute-optimal for u tokens which are never repeated."""
    return (np.log(at["alpha"]) + at["A"] - np.log(at["beta"]) - at["B"] + at["beta"] * log_u) / at["alpha"]


def _usable(best: Array, log_n: Array) -> Array:
    """log U_N, no more than log N and not so much less that their ratio overflows."""
    capped = np.where(np.real(best) < log_n, best, log_n)
    return np.where(np.real(capped) > log_n - FARTHEST, capped, log_n - FARTHEST)


def _effective(log_total: Array, log_unique: Array, decay: Array) -> Array:
    """log of U + U R (1 - exp(-(T / U - 1) / R)): what a total T of unique U is worth at decay R."""
    # expm1: a difference from 1 rounds to nothing at a large R, which then looks like an optimum.
    return log_unique + np.log(1 - decay * np.expm1(-np.expm1(log_total - log_unique) / decay))


def _effective_and_slopes(log_total: Array, log_unique: Array, decay: Array) -> tuple[Array, Array, Array]:
    """The same with its derivatives by log U and by log R."""
    repetitions = np.expm1(log_total - log_unique)
    kept = np.exp(-repetitions / decay)
    gain = -decay * np.expm1(-repetitions / decay)
    by_unique = 1 - kept * (1 + repetitions) / (1 + gain)
    return log_unique + np.log(1 + gain), by_unique, (gain - repetitions * kept) / (1 + gain)


def _law(name: str, what: str, decaying: tuple[str, ...], *, tied: bool = True) -> Repeated:
    formula = f"E + A / N'^alpha + B / D'^{'alpha' if tied else 'beta'}, {what}"
    source = "Muennighoff et al. 2023, app. A" + ("" if tied else ", with free exponents")
    return Repeated(name, formula, source, decaying, tied)


BOTH = "N' and D' decayed by R_N and R_D"
REPEATED = _law("repeated", BOTH, ("R_D", "R_N"))
REPEATED_FREE = _law("repeated_free", BOTH, ("R_D", "R_N"), tied=False)
LAWS: tuple[Law, ...] = (
    REPEATED,
    REPEATED_FREE,
    _law("repeated_data", "D' decayed by R_D, N' = N", ("R_D",)),
    _law("repeated_params", "N' decayed by R_N, D' = D", ("R_N",)),
)
