"""The laws: small frozen values that predict a loss, know their derivatives and where to start a fit.

A law is fitted in inner coordinates theta: logarithms of the coefficients at the centre of the data, exponents and
constants as they are (a logarithm of E would creep towards minus infinity where the best E is 0). Adding a law is
adding a value (or a class) and its line in `LAWS`, in this file.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import numpy as np

from lm.base.config import nearest
from lm.base.errors import UsageError

Array = np.ndarray
Logs = Mapping[str, Array]

START_SHARES_OF_E = (0.35, 0.65, 0.9)
START_SPLITS = (0.15, 0.4, 0.65, 0.9)
START_EXPONENTS = (0.15, 0.35, 0.7)
EXPONENT_BOUNDS = (1e-3, 5.0)


@dataclasses.dataclass(frozen=True)
class Term:
    """coefficient / prod(variable ** exponent): one summand of a power-law sum; no powers makes it a constant."""

    coefficient: str
    powers: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Law:
    """A sum of power-law terms of n (parameters), d (tokens) or c (FLOP), predicting a loss in nats/token.

    `parameters` are in natural units (A of A / N^alpha with N in parameters); what is batched has them last: [..., P].
    """

    name: str
    formula: str
    terms: tuple[Term, ...]
    source: str

    @property
    def parameters(self) -> tuple[str, ...]:
        names = [term.coefficient for term in self.terms]
        names += [exponent for term in self.terms for _, exponent in term.powers]
        return tuple(dict.fromkeys(names))

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variable for term in self.terms for variable, _ in term.powers))

    @property
    def exponents(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(exponent for term in self.terms for _, exponent in term.powers))

    @property
    def constants(self) -> tuple[str, ...]:
        return tuple(term.coefficient for term in self.terms if not term.powers)

    def predict(self, parameters: Array, table: Mapping[str, Array]) -> Array:
        """The loss [..., points] of natural `parameters` [..., P] at the variables of `table` (each [points])."""
        logs = {name: np.log(np.asarray(table[name], np.float64)) for name in self.variables}
        return np.exp(self.log_loss(self.to_inner(np.asarray(parameters, np.float64), {}), logs))

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        """log of the loss [..., points] at inner `theta` [..., P] and centred logarithms (each [points])."""
        return np.log(functools.reduce(np.add, self._values(theta, logs)))

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        """The log loss [R, points] and its derivatives [R, P, points] for a batch of inner `theta` [R, P]."""
        values = self._values(theta, logs)
        total = functools.reduce(np.add, values)
        jacobian = np.zeros((len(theta), len(self.parameters), total.shape[-1]))
        index = self._index
        inverse = 1 / total
        for term, value in zip(self.terms, values, strict=True):
            if not term.powers:
                jacobian[:, index[term.coefficient]] += inverse
                continue
            share = value * inverse
            jacobian[:, index[term.coefficient]] += share
            for variable, exponent in term.powers:
                jacobian[:, index[exponent]] -= share * logs[variable]
        return np.log(total), jacobian

    def starts(self, logs: Logs, loss: Array) -> Array:
        """Inner starts [S, P] read off the data: E a share of the least loss, the remainder split, exponents."""
        index = self._index
        constant = [term for term in self.terms if not term.powers]
        powers = self._scaled
        splits = (
            [(1.0,)]
            if len(powers) == 1
            else [(s, *[(1 - s) / (len(powers) - 1)] * (len(powers) - 1)) for s in START_SPLITS]
        )
        shares = START_SHARES_OF_E if constant else (0.0,)
        found = []
        for share, split, exponents in itertools.product(
            shares, splits, itertools.product(START_EXPONENTS, repeat=len(self.exponents))
        ):
            theta = np.zeros(len(self.parameters))
            for term in constant:
                theta[index[term.coefficient]] = share * loss.min()
            for term, part in zip(powers, split, strict=True):
                theta[index[term.coefficient]] = np.log(part * (np.median(loss) - share * loss.min()))
            for exponent, value in zip(self.exponents, exponents, strict=True):
                theta[index[exponent]] = value
            found.append(theta)
        return np.stack(found)

    def bounds(self, loss: Array) -> tuple[Array, Array]:
        """Inner lower and upper bounds [P]: coefficients e^16 times the losses either way, constants from 0."""
        low = np.full(len(self.parameters), np.log(loss.min()) - 16)
        high = np.full(len(self.parameters), np.log(loss.max()) + 16)
        for term in self.terms:
            if not term.powers:
                low[self._index[term.coefficient]], high[self._index[term.coefficient]] = 0.0, loss.max()
        for exponent in self.exponents:
            low[self._index[exponent]], high[self._index[exponent]] = EXPONENT_BOUNDS
        return low, high

    def to_inner(self, parameters: Array, centre: Mapping[str, float]) -> Array:
        """Inner theta [..., P] of natural parameters; `centre` holds the means that were taken off the logarithms."""
        theta = np.array(parameters, np.float64)
        for term in self._scaled:
            k = self._index[term.coefficient]
            theta[..., k] = np.log(parameters[..., k])
            for variable, exponent in term.powers:
                theta[..., k] -= parameters[..., self._index[exponent]] * centre.get(variable, 0.0)
        return theta

    def to_natural(self, theta: Array, centre: Mapping[str, float]) -> Array:
        """Natural parameters [..., P] of inner theta; the inverse of `to_inner`."""
        parameters = np.array(theta, np.float64)
        for term in self._scaled:
            k = self._index[term.coefficient]
            log_coefficient = theta[..., k]
            for variable, exponent in term.powers:
                log_coefficient = log_coefficient + theta[..., self._index[exponent]] * centre.get(variable, 0.0)
            parameters[..., k] = np.exp(log_coefficient)
        return parameters

    @property
    def allocates(self) -> bool:
        """Whether a compute-optimal split of a budget into n and d follows from this law."""
        return {term.powers[0][0] for term in self.terms if len(term.powers) == 1} == {"n", "d"}

    def allocate(self, parameters: Array, budget: Array | float, flops_per_nd: float) -> tuple[Array, Array]:
        """N* and D* [...] that minimise the loss at `budget` = flops_per_nd * n * d (Hoffmann et al. 2022, eq. 4)."""
        by_variable = {term.powers[0][0]: (term.coefficient, term.powers[0][1]) for term in self.terms if term.powers}
        (big_a, alpha), (big_b, beta) = (
            (parameters[..., self._index[c]], parameters[..., self._index[x]])
            for c, x in (by_variable["n"], by_variable["d"])
        )
        log_g = (np.log(alpha * big_a) - np.log(beta * big_b)) / (alpha + beta)
        log_nd = np.log(np.asarray(budget, np.float64)) - np.log(flops_per_nd)
        log_n = log_g + beta / (alpha + beta) * log_nd
        return np.exp(log_n), np.exp(log_nd - log_n)

    @property
    def _scaled(self) -> tuple[Term, ...]:
        return tuple(term for term in self.terms if term.powers)

    @property
    def _index(self) -> dict[str, int]:
        return {name: k for k, name in enumerate(self.parameters)}

    def _values(self, theta: Array, logs: Logs) -> list[Array]:
        index = self._index
        found = []
        for term in self.terms:
            if not term.powers:
                found.append(theta[..., index[term.coefficient], None])
                continue
            exponent = theta[..., index[term.coefficient], None]
            for variable, power in term.powers:
                exponent = exponent - theta[..., index[power], None] * logs[variable]
            found.append(np.exp(exponent))
        return found


def _saturating(name: str, variable: str, source: str) -> Law:
    return Law(name, f"E + A / {variable.upper()}^alpha", (Term("E"), Term("A", ((variable, "alpha"),))), source)


def _power(name: str, variable: str, source: str) -> Law:
    return Law(name, f"A / {variable.upper()}^alpha", (Term("A", ((variable, "alpha"),)),), source)


HOFFMANN = Law(
    "hoffmann",
    "E + A / N^alpha + B / D^beta",
    (Term("E"), Term("A", (("n", "alpha"),)), Term("B", (("d", "beta"),))),
    "Hoffmann et al. 2022, eq. 2",
)
TIED = Law(
    "hoffmann_tied",
    "E + A / N^alpha + B / D^alpha",
    (Term("E"), Term("A", (("n", "alpha"),)), Term("B", (("d", "alpha"),))),
    "Muennighoff et al. 2023, app. A",
)

LAWS: tuple[Law, ...] = (
    HOFFMANN,
    TIED,
    _power("kaplan_n", "n", "Kaplan et al. 2020, eq. 1.1"),
    _power("kaplan_d", "d", "Kaplan et al. 2020, eq. 1.2"),
    _power("kaplan_c", "c", "Kaplan et al. 2020, eq. 1.3"),
    _saturating("saturating_n", "n", "Henighan et al. 2020, eq. 1.1"),
    _saturating("saturating_d", "d", "Henighan et al. 2020, eq. 1.1"),
    _saturating("saturating_c", "c", "Henighan et al. 2020, eq. 1.1"),
)


def law_named(name: str, where: str = "--law") -> Law:
    """The law of that name; a refusal says that it was asked for `where`.

    Raises:
      UsageError: no such law; the nearest is named.
    """
    for law in LAWS:
        if law.name == name:
            return law
    raise UsageError(f"there is no law '{name}'", where=where, do=nearest(name, [law.name for law in LAWS]))
