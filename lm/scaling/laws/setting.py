"""Laws of a setting (learning rate, batch size): the value that minimises the loss is a power law in n and d, or c.

Their exponents have either sign, and what they predict is in the setting's own unit: they are fitted to the optima that
`approaches.setting` reads off a table, never to losses.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import numpy as np

from lm.scaling.laws.base import Array, Law, Logs, Relative

START_EXPONENTS = (-0.7, -0.2, 0.3, 0.8)
STEEPEST = 5.0


@dataclasses.dataclass(frozen=True)
class OptimalSetting(Law):
    """X* = K prod(variable ^ exponent), a positive number in the unit of the setting."""

    powers: tuple[tuple[str, str], ...]

    of_loss = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("K", *(exponent for _, exponent in self.powers))

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(variable for variable, _ in self.powers)

    @property
    def logged(self) -> Mapping[str, Relative]:
        return {"K": self.powers}

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        terms = [theta[..., k, None] * logs[variable] for k, (variable, _) in enumerate(self.powers, start=1)]
        return functools.reduce(np.add, terms, theta[..., 0, None])

    def starts(self, logs: Logs, loss: Array) -> Array:
        """The median setting at the centre of the data, with exponents from falling to rising."""
        slopes = itertools.product(START_EXPONENTS, repeat=len(self.powers))
        return np.array([(np.log(np.median(loss)), *some) for some in slopes])

    def bounds(self, logs: Logs, loss: Array) -> tuple[Array, Array]:
        low, high = super().bounds(logs, loss)
        low[1:], high[1:] = -STEEPEST, STEEPEST
        return low, high

    def _moved(self, parameters: Array, relative: Relative, centre: Mapping[str, float]) -> Array:
        return -super()._moved(parameters, relative, centre)


OPTIMUM_ND = OptimalSetting(
    "optimum_nd", "K N^p D^q", "Li et al. 2025 (Step law), learning rate", (("n", "p"), ("d", "q"))
)
OPTIMUM_N = OptimalSetting("optimum_n", "K N^p", "Porian et al. 2024, learning rate and batch size", (("n", "p"),))
OPTIMUM_D = OptimalSetting("optimum_d", "K D^q", "Li et al. 2025 (Step law), batch size", (("d", "q"),))
OPTIMUM_C = OptimalSetting("optimum_c", "K C^p", "DeepSeek-AI 2024, learning rate and batch size", (("c", "p"),))
LAWS: tuple[OptimalSetting, ...] = (OPTIMUM_ND, OPTIMUM_N, OPTIMUM_D, OPTIMUM_C)
