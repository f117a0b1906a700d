"""What every law is: a frozen value that predicts a loss, knows its derivatives and where to start a fit.

A law is fitted in inner coordinates theta: logarithms of its positive coefficients at the centre of the data, exponents
and constants as they are (a logarithm of E would creep towards minus infinity where the best E is 0).
"""

import abc
import dataclasses
from collections.abc import Mapping

import numpy as np

Array = np.ndarray
Logs = Mapping[str, Array]
Relative = tuple[tuple[str, str | None], ...]

EXPONENT_BOUNDS = (1e-3, 5.0)
NUMBER_BOUNDS = (1e-3, 1e6)
REACH = 16.0  # e-folds that a coefficient at the centre of the data may lie from the losses
TINY = 1e-30  # the complex step: far under rounding, so that the derivative has no cancellation


def log_sum(x: Array, y: Array | float) -> Array:
    """log(e^x + e^y) without overflow, for complex values too (the larger by real part leads)."""
    peak = np.maximum(np.real(x), np.real(y))
    return peak + np.log(np.exp(x - peak) + np.exp(y - peak))


@dataclasses.dataclass(frozen=True)
class Law(abc.ABC):
    """A loss in nats/token from n (parameters), d (tokens), c (FLOP) or u (distinct training tokens).

    `parameters` are in natural units (A of A / N^alpha with N in parameters); what is batched has them last: [..., P].
    A subclass says its parameters, its variables and `log_loss`, written so that it takes complex theta.
    """

    name: str
    formula: str
    source: str

    centred = True  # False: logarithms are given as they are, for a law that compares n, d and u with one another
    of_loss = True  # False: what it predicts is the best value of a setting, see `laws.setting`

    @property
    @abc.abstractmethod
    def parameters(self) -> tuple[str, ...]:
        """The names, in the order of every array of parameters."""

    @property
    @abc.abstractmethod
    def variables(self) -> tuple[str, ...]:
        """Which of n, d, c and u are read."""

    @property
    @abc.abstractmethod
    def logged(self) -> Mapping[str, Relative]:
        """The positive parameters that theta holds as logarithms, and what moves them with the centre of the data.

        ("n", "alpha"): a coefficient of n^-alpha; ("n", None): a value of n; nothing: a plain number.
        """

    @property
    def constants(self) -> tuple[str, ...]:
        """Floors of the loss, from 0 on; they may be absent from the data."""
        return tuple(name for name in self.parameters if name == "E")

    @property
    def exponents(self) -> tuple[str, ...]:
        """All other parameters."""
        return tuple(name for name in self.parameters if name not in self.logged and name not in self.constants)

    @abc.abstractmethod
    def log_loss(self, theta: Array, logs: Logs) -> Array:
        """log of the loss [..., points] at inner `theta` [..., P] and centred logarithms (each [points])."""

    @abc.abstractmethod
    def starts(self, logs: Logs, loss: Array) -> Array:
        """Inner starts [S, P] read off the data."""

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        """The log loss [R, points] and its derivatives [R, P, points] for a batch of inner `theta` [R, P]."""
        steps = 1j * TINY * np.eye(theta.shape[-1])
        moved = [self.log_loss(theta + step, logs) for step in steps]
        return moved[0].real, np.stack([value.imag / TINY for value in moved], axis=1)

    def bounds(self, logs: Logs, loss: Array) -> tuple[Array, Array]:
        """Inner lower and upper bounds [P]: coefficients e^16 times the losses either way, constants from 0.

        A value of a variable stays within the data; where `logs` are not centred, coefficients get the room that the
        largest exponent needs.
        """
        low, high = np.empty((2, len(self.parameters)))
        for k, name in enumerate(self.parameters):
            if name in self.logged:
                relative = self.logged[name]
                if not relative:
                    low[k], high[k] = np.log(NUMBER_BOUNDS)
                elif relative[0][1] is None:
                    low[k], high[k] = logs[relative[0][0]].min(), logs[relative[0][0]].max()
                else:
                    shift = EXPONENT_BOUNDS[1] * sum(abs(logs[variable].mean()) for variable, _ in relative)
                    low[k], high[k] = np.log(loss.min()) - REACH - shift, np.log(loss.max()) + REACH + shift
            elif name in self.constants:
                low[k], high[k] = 0.0, loss.max()
            else:
                low[k], high[k] = EXPONENT_BOUNDS
        return low, high

    def predict(self, parameters: Array, table: Mapping[str, Array]) -> Array:
        """The loss [..., points] of natural `parameters` [..., P] at the variables of `table` (each [points])."""
        logs = {name: np.log(np.asarray(table[name], np.float64)) for name in self.variables}
        return np.exp(self.log_loss(self.to_inner(np.asarray(parameters, np.float64), {}), logs))

    def to_inner(self, parameters: Array, centre: Mapping[str, float]) -> Array:
        """Inner theta [..., P] of natural parameters; `centre` holds the means that were taken off the logarithms."""
        theta = np.array(parameters, np.float64)
        for name, relative in self.logged.items():
            theta[..., self.index[name]] = np.log(parameters[..., self.index[name]]) - self._moved(
                parameters, relative, centre
            )
        return theta

    def to_natural(self, theta: Array, centre: Mapping[str, float]) -> Array:
        """Natural parameters [..., P] of inner theta; the inverse of `to_inner`."""
        parameters = np.array(theta, np.float64)
        for name, relative in self.logged.items():
            parameters[..., self.index[name]] = np.exp(
                theta[..., self.index[name]] + self._moved(theta, relative, centre)
            )
        return parameters

    def _moved(self, parameters: Array, relative: Relative, centre: Mapping[str, float]) -> Array:
        moved = np.zeros(parameters.shape[:-1])
        for variable, exponent in relative:
            factor = 1.0 if exponent is None else parameters[..., self.index[exponent]]
            moved = moved + factor * centre.get(variable, 0.0)
        return moved

    def balanced(self, parameters: Array) -> tuple[Array, Array, Array, Array] | None:
        """log A, alpha, log B, beta (each [...]) of A / N^alpha + B / D^beta, which falls and rises with the loss.

        None where no compute-optimal split of a budget follows from the law.
        """
        return None

    @property
    def allocates(self) -> bool:
        """Whether a compute-optimal split of a budget into n and d follows from this law."""
        return self.balanced(np.ones(len(self.parameters))) is not None

    def allocate(self, parameters: Array, budget: Array | float, flops_per_nd: float) -> tuple[Array, Array]:
        """N* and D* [...] that minimise the loss at `budget` = flops_per_nd * n * d (Hoffmann et al. 2022, eq. 4)."""
        terms = self.balanced(parameters)
        if terms is None:
            raise TypeError(f"'{self.name}' allocates nothing")
        log_a, alpha, log_b, beta = terms
        log_g = (np.log(alpha) + log_a - np.log(beta) - log_b) / (alpha + beta)
        log_nd = np.log(np.asarray(budget, np.float64)) - np.log(flops_per_nd)
        log_n = log_g + beta / (alpha + beta) * log_nd
        return np.exp(log_n), np.exp(log_nd - log_n)

    @property
    def index(self) -> dict[str, int]:
        """Where each parameter stands."""
        return {name: k for k, name in enumerate(self.parameters)}
