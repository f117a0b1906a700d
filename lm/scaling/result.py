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

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Everything about one fit, in the shape of `fit.json`; every value is plain JSON.

    `derived` maps a name to {value, interval, unit}; `derived["optimum"]` is a list, one entry a budget.
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
    bootstrap_samples: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """The plain JSON form: nested dicts and lists, no NaN (an unbounded end is null)."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FitResult":
        """The inverse of `to_json`.

        Raises:
          UsageError: a field is missing or unknown.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in value:
            if name not in known:
                raise UsageError(f"unknown field '{name}'", where="fit", do=nearest(name, known))
        absent = sorted(known - set(value))
        if absent:
            raise UsageError(f"the field '{absent[0]}' is missing", where="fit", do="Write it with `lm fit`.")
        return cls(**value)

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
        return cls.from_json(value)

    @property
    def samples(self) -> Array:
        """The kept resampled parameters [K, P]; the estimate alone where there was no bootstrap."""
        estimate = np.array(list(self.parameters.values()))
        return np.array(self.bootstrap_samples) if self.bootstrap_samples else estimate[None]
