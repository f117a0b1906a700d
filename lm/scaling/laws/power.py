"""Sums of power laws: Hoffmann's surface, Kaplan's single ones, saturating ones, and the law of an optimal setting."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping

import numpy as np

from lm.scaling.laws.base import Array, Law, Logs, Relative

START_SHARES_OF_E = (0.35, 0.65, 0.9)
START_SPLITS = (0.15, 0.4, 0.65, 0.9)
START_EXPONENTS = (0.15, 0.35, 0.7)


@dataclasses.dataclass(frozen=True)
class Term:
    """coefficient / prod(variable ** exponent): one summand of a power-law sum; no powers makes it a constant."""

    coefficient: str
    powers: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class PowerSum(Law):
    """A sum of terms; its derivatives are written out, since most fits are of this family."""

    terms: tuple[Term, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        names = [term.coefficient for term in self.terms]
        names += [exponent for term in self.terms for _, exponent in term.powers]
        return tuple(dict.fromkeys(names))

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(variable for term in self.terms for variable, _ in term.powers))

    @property
    def logged(self) -> Mapping[str, Relative]:
        return {term.coefficient: term.powers for term in self.terms if term.powers}

    @property
    def constants(self) -> tuple[str, ...]:
        return tuple(term.coefficient for term in self.terms if not term.powers)

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        return np.log(functools.reduce(np.add, self._values(theta, logs)))

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        values = self._values(theta, logs)
        total = functools.reduce(np.add, values)
        jacobian = np.zeros((len(theta), len(self.parameters), total.shape[-1]))
        index = self.index
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
        """E a share of the least loss, the remainder split over the terms, exponents small to large."""
        index = self.index
        constant = [term for term in self.terms if not term.powers]
        powers = [term for term in self.terms if term.powers]
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

    def balanced(self, parameters: Array) -> tuple[Array, Array, Array, Array] | None:
        by_variable = {term.powers[0][0]: term for term in self.terms if len(term.powers) == 1}
        if set(by_variable) != {"n", "d"}:
            return None
        log_a, log_b = (np.log(parameters[..., self.index[by_variable[name].coefficient]]) for name in ("n", "d"))
        alpha, beta = (parameters[..., self.index[by_variable[name].powers[0][1]]] for name in ("n", "d"))
        return log_a, alpha, log_b, beta

    def _values(self, theta: Array, logs: Logs) -> list[Array]:
        index = self.index
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


def _saturating(name: str, variable: str) -> PowerSum:
    terms = (Term("E"), Term("A", ((variable, "alpha"),)))
    return PowerSum(name, f"E + A / {variable.upper()}^alpha", "Henighan et al. 2020, eq. 1.1", terms)


def _power(name: str, variable: str, source: str) -> PowerSum:
    return PowerSum(name, f"A / {variable.upper()}^alpha", source, (Term("A", ((variable, "alpha"),)),))


HOFFMANN = PowerSum(
    "hoffmann",
    "E + A / N^alpha + B / D^beta",
    "Hoffmann et al. 2022, eq. 2",
    (Term("E"), Term("A", (("n", "alpha"),)), Term("B", (("d", "beta"),))),
)
TIED = PowerSum(
    "hoffmann_tied",
    "E + A / N^alpha + B / D^alpha",
    "Muennighoff et al. 2023, app. A",
    (Term("E"), Term("A", (("n", "alpha"),)), Term("B", (("d", "alpha"),))),
)
LAWS: tuple[Law, ...] = (
    HOFFMANN,
    TIED,
    _power("kaplan_n", "n", "Kaplan et al. 2020, eq. 1.1"),
    _power("kaplan_d", "d", "Kaplan et al. 2020, eq. 1.2"),
    _power("kaplan_c", "c", "Kaplan et al. 2020, eq. 1.3"),
    _saturating("saturating_n", "n"),
    _saturating("saturating_d", "d"),
    _saturating("saturating_c", "c"),
)
