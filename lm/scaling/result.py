"""What a fit is once it is made: the fields of `fit.json`, read and written."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm.base import files
from lm.base.config import nearest
from lm.base.errors import UsageError
from lm.scaling.laws import law_named

Array = np.ndarray


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
    def from_json(cls, value: Mapping[str, Any]) -> "FitResult":
        """The inverse of `to_json`.

        Raises:
          UsageError: a field is missing or unknown, or parameters or bootstrap samples are not those of the law.
        """
        known, do = {field.name for field in dataclasses.fields(cls)}, "Write it with `lm fit`."
        for name in value:
            if name not in known:
                raise UsageError(f"unknown field '{name}'", where="fit", do=nearest(name, known))
        absent = sorted(known - set(value))
        if absent:
            raise UsageError(f"the field '{absent[0]}' is missing", where="fit", do=do)
        try:
            names = law_named(str(value["law"]), "fit").parameters
            parameters = {name: float(value["parameters"][name]) for name in names}
            samples = np.asarray(value["bootstrap_samples"], np.float64)
        except (TypeError, ValueError, LookupError) as error:
            raise UsageError("parameters or bootstrap samples are damaged", where="fit", do=do) from error
        if len(value["parameters"]) != len(names) or (samples.size and samples.shape[1:] != (len(names),)):
            raise UsageError(
                f"not all is of the parameters of '{value['law']}': {', '.join(names)}", where="fit", do=do
            )
        return cls(**{**value, "parameters": parameters})

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
        try:
            value = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"is not JSON: {error}", where=str(path)) from error
        if not isinstance(value, dict):
            raise UsageError("is not a fit", where=str(path), do="Write one with `lm fit TABLE --out FILE`.")
        try:
            return cls.from_json(value)
        except UsageError as error:
            raise UsageError(error.what, where=str(path), do=error.do) from error

    @property
    def samples(self) -> Array:
        """The kept resampled parameters [K, P]; the estimate alone where there was no bootstrap."""
        estimate = np.array(list(self.parameters.values()))
        return np.array(self.bootstrap_samples) if self.bootstrap_samples else estimate[None]
