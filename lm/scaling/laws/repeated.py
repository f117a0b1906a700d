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
        at = {name: theta[..., k, None] for name, k in self.index.items()}
        log_a, alpha, log_b, beta = at["A"], at["alpha"], at["B"], at["alpha" if self.tied else "beta"]
        log_n, log_d, log_u = logs["n"], logs["d"], logs["u"]
        if "R_N" in self.decaying:
            best = (np.log(alpha) + log_a - np.log(beta) - log_b + beta * log_u) / alpha
            log_n = _effective(log_n, np.where(np.real(best) < log_n, best, log_n), at["R_N"])
        if "R_D" in self.decaying:
            log_d = _effective(log_d, np.minimum(log_u, log_d), at["R_D"])
        return np.log(at["E"] + np.exp(log_a - alpha * log_n) + np.exp(log_b - beta * log_d))

    def starts(self, logs: Logs, loss: Array) -> Array:
        """The base law's with every pair of decays."""
        means = {name: float(logs[name].mean()) for name in self.base.variables}
        centred = {name: logs[name] - mean for name, mean in means.items()}
        base = self.base.to_inner(self.base.to_natural(self.base.starts(centred, loss), means), {})
        decays = np.log(list(itertools.product(START_DECAYS, repeat=len(self.decaying))))
        return np.hstack([np.repeat(base, len(decays), axis=0), np.tile(decays, (len(base), 1))])


def _effective(log_total: Array, log_unique: Array, log_decay: Array) -> Array:
    """log of U + U R (1 - exp(-(T / U - 1) / R)): what a total T of unique U is worth."""
    decay = np.exp(log_decay)
    # expm1: a difference from 1 rounds to nothing at a large R, which then looks like an optimum.
    return log_unique + np.log(1 - decay * np.expm1(-np.expm1(log_total - log_unique) / decay))


def _law(name: str, what: str, decaying: tuple[str, ...], *, tied: bool = True) -> Repeated:
    formula = f"E + A / N'^alpha + B / D'^{'alpha' if tied else 'beta'}, {what}"
    return Repeated(name, formula, "Muennighoff et al. 2023, app. A", decaying, tied)


BOTH = "N' and D' decayed by R_N and R_D"
REPEATED = _law("repeated", BOTH, ("R_D", "R_N"))
REPEATED_FREE = _law("repeated_free", BOTH, ("R_D", "R_N"), tied=False)
LAWS: tuple[Law, ...] = (
    REPEATED,
    REPEATED_FREE,
    _law("repeated_data", "D' decayed by R_D, N' = N", ("R_D",)),
    _law("repeated_params", "N' decayed by R_N, D' = D", ("R_N",)),
)
