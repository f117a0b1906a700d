"""Broken power laws: the exponent goes from one value to another about a break."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

from lm.scaling.laws.base import EXPONENT_BOUNDS, Array, Law, Logs, Relative, log_sum

SHARPNESS_BOUNDS = (0.02, 5.0)
START_SHARES_OF_E = (0.0, 0.4, 0.7, 0.9)
START_BREAKS = (0.2, 0.4, 0.6, 0.8)
START_SHARPNESS = (0.1, 0.4, 1.0)


@dataclasses.dataclass(frozen=True)
class Broken(Law):
    """E + A X^-alpha (1 + (X / X_1)^(1 / f_1))^-((beta - alpha) f_1), X the variable n, d or c.

    The loss above E falls as X^-alpha well before the break X_1 and as X^-beta well after it; the turn takes about f_1
    e-folds to either side. The paper's b, c_0, d_1, c_1 are A, alpha, X_1, beta - alpha; both exponents are positive
    here, so that a loss which rises is not fitted. X_1 stays within the data: a break beyond them cannot be seen.
    """

    variable: str

    parameters = ("E", "A", "alpha", "beta", "X_1", "f_1")

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.variable,)

    @property
    def logged(self) -> Mapping[str, Relative]:
        return {"A": ((self.variable, "alpha"),), "X_1": ((self.variable, None),), "f_1": ()}

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        e, log_a, alpha, beta, log_break, log_f = np.moveaxis(theta[..., None], -2, 0)
        x, f = logs[self.variable], np.exp(log_f)
        turn = f * log_sum((x - log_break) / f, 0.0)
        return np.log(e + np.exp(log_a - alpha * x - (beta - alpha) * turn))

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        e, log_a, alpha, beta, log_break, log_f = np.moveaxis(theta[..., None], -2, 0)
        past, f = logs[self.variable] - log_break, np.exp(log_f)
        soft = log_sum(past / f, 0.0)
        turn, turned = f * soft, np.exp(past / f - soft)
        power = np.exp(log_a - alpha * logs[self.variable] - (beta - alpha) * turn)
        loss = e + power
        share = power / loss
        bent = share * (beta - alpha)
        slopes = [1 / loss, share, share * (turn - logs[self.variable]), -share * turn]
        slopes += [bent * turned, bent * (past * turned - turn)]
        return np.log(loss), np.stack(slopes, axis=1)

    def starts(self, logs: Logs, loss: Array) -> Array:
        """Two straight lines through log(loss - E), for each share of E and place of the break."""
        x, found = logs[self.variable], []
        for share, quantile in itertools.product(START_SHARES_OF_E, START_BREAKS):
            e, at = share * loss.min(), np.quantile(x, quantile)
            design = np.stack([np.ones_like(x), -x, -np.maximum(x - at, 0)], axis=1)
            log_a, alpha, change = np.linalg.lstsq(design, np.log(loss - e), rcond=None)[0]
            beta = alpha + change
            alpha, beta = np.clip([alpha, beta], 0.01, EXPONENT_BOUNDS[1])
            found += [(e, log_a, alpha, beta, at, math.log(f)) for f in START_SHARPNESS]
        return np.array(found)

    def bounds(self, logs: Logs, loss: Array) -> tuple[Array, Array]:
        low, high = super().bounds(logs, loss)
        low[-1], high[-1] = np.log(SHARPNESS_BOUNDS)
        return low, high


def _broken(variable: str) -> Broken:
    name = variable.upper()
    formula = f"E + A {name}^-alpha (1 + ({name} / X_1)^(1 / f_1))^-((beta - alpha) f_1)"
    return Broken(f"broken_{variable}", formula, "Caballero et al. 2023, eq. 1 with one break", variable)


LAWS: tuple[Law, ...] = tuple(_broken(variable) for variable in ("n", "d", "c"))
