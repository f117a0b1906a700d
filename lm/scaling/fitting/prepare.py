"""From checked points to a problem that a solver can take: pins, centres, starts, and designs that are refused."""

import math
from collections.abc import Mapping

import numpy as np

from lm.base.config import nearest
from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.fitting.objective import Array, Objective
from lm.scaling.fitting.solve import Problem
from lm.scaling.laws.base import Law

COLLINEAR = 0.99


def prepare(
    found: read.Points, law: Law, objective: Objective, pins: Mapping[str, float]
) -> tuple[Problem, dict[str, float], Array]:
    """The centred problem, its centre, and starts [S, P] that hold the pinned values.

    Raises:
      UsageError: an unknown or impossible pin, too few points, or a design that cannot tell the exponents apart.
    """
    for name, value in pins.items():
        if name not in law.parameters:
            raise UsageError(f"{law.name} has no parameter '{name}'", where="--pin", do=nearest(name, law.parameters))
        signed = name in law.exponents and not law.of_loss
        if not (0 < value < math.inf or (signed and math.isfinite(value))):
            raise UsageError(f"{name}={value:g} is not positive", where="--pin")
        if name in law.constants and value >= found.loss.min():
            raise UsageError(
                f"{name}={value:g} is not below the smallest loss ({found.loss.min():.6g}), which it is the floor of",
                where="--pin",
                do="Pin a smaller value.",
            )
    free = np.array([name not in pins for name in law.parameters])
    if not free.any():
        raise UsageError("all parameters are pinned: nothing is left to fit", where="--pin", do="Leave one free.")
    if len(found) <= free.sum():
        raise UsageError(
            f"{len(found)} points for {free.sum()} parameters of '{law.name}'",
            where="table",
            do="Add runs, or fit a law with fewer parameters.",
        )
    _check_design(found, law)
    raw = {name: np.log(found.variable(name)) for name in law.variables}
    means = {name: float(raw[name].mean()) if law.centred else 0.0 for name in law.variables}
    # A pinned coefficient is a number at N = 1: it stays fixed only where the logarithms are not centred.
    centre = dict.fromkeys(means, 0.0) if set(law.logged) & set(pins) else means
    logs = {name: raw[name] - centre[name] for name in law.variables}
    middle = {name: raw[name] - means[name] for name in law.variables}
    starts = law.to_inner(law.to_natural(law.starts(middle, found.loss), means), centre)
    low, high = law.bounds(logs, found.loss)
    for k, name in enumerate(law.parameters):
        if name in pins:
            starts[:, k] = np.log(pins[name]) if name in law.logged else pins[name]
            if not low[k] <= starts[0, k] <= high[k]:
                least, most = (math.exp(end) if name in law.logged else end for end in (low[k], high[k]))
                raise UsageError(
                    f"{name}={pins[name]:g} is outside {least:.4g} to {most:.4g}, where a fit looks for it",
                    where="--pin",
                    do="Pin a value inside.",
                )
            low[k] = high[k] = starts[0, k]
    return Problem(law, objective, logs, np.log(found.loss), low, high, free), centre, np.unique(starts, axis=0)


def _check_design(found: read.Points, law: Law) -> None:
    for variable in dict.fromkeys(name for relative in law.logged.values() for name, _ in relative):
        if np.ptp(np.log(found.variable(variable))) < read.SAME:
            raise UsageError(
                f"every run has the same {variable}: its exponent is not in the data",
                where="table",
                do="Fit a law that does not use it.",
            )
    if not {"n", "d"} <= set(law.variables):
        return
    correlation = float(np.corrcoef(np.log(found.n), np.log(found.d))[0, 1])
    if abs(correlation) > COLLINEAR:
        design = "one compute budget" if correlation < 0 else "a fixed ratio of tokens to parameters"
        raise UsageError(
            f"log N and log D have correlation {correlation:.4f} ({design}): their exponents cannot be told apart",
            where="table",
            do="Add runs off that line, or fit a law of one variable"
            + (": --law saturating_n." if law.of_loss else ": --law optimum_n, optimum_d or optimum_c."),
        )
