"""What a fit is once it is made: the fields of `fit.json`, read and written."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm.base import files
from lm.base.config import build
from lm.base.errors import UsageError
from lm.scaling.laws import law_named

Array = np.ndarray
READ: dict[str, dict[str, Any]] = {  # what predictions and plans read of the parts that hold more than that
    "objective": {"delta": float | None},
    "noise": {"residual_sd": float | None, "seed_sd": float | None, "freedom": float},
    "fitted_range": {"n": list[float], "d": list[float], "c": list[float]},
    "provenance": {"flops_per_nd": float, "conventions": list[str], "columns": dict[str, str | None]},
}


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Everything about one fit, in the shape of `fit.json`; every value is plain JSON.

    `derived` maps a name to {value, interval, unit}; `derived["optimum"]` is a list, one entry a budget.
    `checks` holds what `lm.scaling.checks` found, by name.
    `bootstrap_samples` are up to 400 resampled parameter vectors, in the order of `parameters`.
    """

    law: str
    formula: str
    objective: dict[str, Any]
    points: int
    parameters: dict[str, float]
    standard_errors: dict[str, float | None]
    intervals: dict[str, list[float | None] | None]
    derived: dict[str, Any]
    certificate: dict[str, Any]
    warnings: list[str]
    provenance: dict[str, Any]
    noise: dict[str, float | None]
    fitted_range: dict[str, list[float]]
    isoflop: dict[str, Any]
    others: list[dict[str, Any]]
    checks: dict[str, Any]
    bootstrap_samples: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """The plain JSON form: nested dicts and lists, no NaN (an unbounded end is null)."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: str = "fit") -> "FitResult":
        """The inverse of `to_json`, checked: a file may be damaged or typed by hand.

        Raises:
          UsageError: a field is missing, unknown or of another type, or a number is none that a fit could have.
        """
        result = build(cls, value, where)
        for part, hints in READ.items():
            given = {name: entry for name, entry in getattr(result, part).items() if name in hints}
            build(dataclasses.make_dataclass(part, hints.items()), given, f"{where}.{part}")
        names = law_named(result.law, where).parameters
        if set(result.parameters) != set(names) or any(len(row) != len(names) for row in result.bootstrap_samples):
            raise UsageError(
                f"not all is of the parameters of '{result.law}': {', '.join(names)}",
                where=where,
                do="Write it with `lm fit`.",
            )
        result = dataclasses.replace(result, parameters={name: result.parameters[name] for name in names})
        for told in result._impossible():
            raise UsageError(told, where=where, do="Write it with `lm fit`.")
        return result

    def _impossible(self) -> Iterator[str]:
        """Each number that no fit has."""
        law = law_named(self.law)
        for name, least in zip(law.parameters, np.vstack([self.estimate, self.samples]).min(0), strict=True):
            signed = name in law.exponents and not law.of_loss
            if not signed and (least < 0 or (least == 0 and name not in law.constants)):
                yield f"{name} = {least:g} among parameters and bootstrap samples is not positive"
        if self.provenance["flops_per_nd"] <= 0:
            yield f"flops_per_nd = {self.provenance['flops_per_nd']:g} is not positive"
        for name in READ["fitted_range"].keys() | set(law.variables):
            ends = self.fitted_range.get(name, [])
            if len(ends) != 2 or not 0 < ends[0] <= ends[1]:
                yield f"the fitted range of {name} is not two positive numbers in order"
        for name, size in (*self.noise.items(), ("delta", self.objective["delta"])):
            if size is not None and (size < 0 or (name == "freedom" and size == 0)):
                yield f"{name} = {size:g} is not positive"
        for name in ("n", "c"):
            if name not in self.provenance["columns"]:
                yield f"'columns' has no '{name}'"

    def save(self, path: Path | str) -> None:
        """Writes `fit.json`, whole or not at all."""
        files.write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path | str) -> "FitResult":
        """Reads what `save` wrote.

        Raises:
          UsageError: no such file, or not a fit.
        """
        path = Path(path)
        if not path.is_file():
            raise UsageError("there is no such fit", where=str(path), do="Write one with `lm fit TABLE --out FILE`.")
        return cls.from_json(files.read_object(path, "Write one with `lm fit TABLE --out FILE`."), f"{path}: fit")

    @property
    def estimate(self) -> Array:
        """The parameters [P], in the law's order."""
        return np.array(list(self.parameters.values()))

    @property
    def samples(self) -> Array:
        """The kept resampled parameters [K, P]; the estimate alone where there was no bootstrap."""
        return np.array(self.bootstrap_samples) if self.bootstrap_samples else self.estimate[None]
