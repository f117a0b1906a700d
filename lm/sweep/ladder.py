"""A ladder is data: a base run, a list of cells that differ from it, a tune stage, and a fit fixed beforehand.

Cells are written with a small algebra over lists of points, where a point is a dict of overrides
(`{"model.d_model": 24}`): `chain` puts lists one after another, `product` takes every combination, `zip_` goes through
lists side by side. `sizes` makes points from a rule for depth and width; `isoflop` and `grid` give each one a length.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.base.config import build, load_file, nearest, override, to_dict
from lm.base.errors import UsageError
from lm.model.accounting import Flops, count_parameters, step_flops
from lm.model.counting import describes_counting
from lm.scaling.fitting.objective import objective_named
from lm.scaling.laws import law_named
from lm.scaling.table import NAMES
from lm.train.config import AnyRun, CountingRun, RunConfig, build_run

Point = dict[str, Any]


class Role(enum.StrEnum):
    """What a cell is for; the fit reads `fit` and `repeat`, and the largest run is held out of it.

    A baseline stands in the table beside the others, for comparison at equal data.
    """

    TUNE = "tune"
    FIT = "fit"
    HOLDOUT = "holdout"
    REPEAT = "repeat"
    BASELINE = "baseline"


FITTED = (Role.FIT, Role.REPEAT)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a ladder: leaf overrides of the base, and how long it trains (at most one of three; else the base's).

    Raises:
      UsageError: more than one length.
    """

    overrides: dict[str, Any]
    role: Role = Role.FIT
    budget: float | None = None  # training FLOP under `flops`
    tokens: float | None = None
    tokens_per_parameter: float | None = None  # of all parameters
    flops: Flops = Flops.MATMUL
    warmup: float = 0.05  # share of the steps that the learning rate warms up over, where a length is given

    def __post_init__(self) -> None:
        if sum(length is not None for length in (self.budget, self.tokens, self.tokens_per_parameter)) > 1:
            raise UsageError("more than one of budget, tokens and tokens_per_parameter", where="ladder.cells")
        for name in ("budget", "tokens", "tokens_per_parameter"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be positive", where="ladder.cells")
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup is {self.warmup}; it is a share of the steps", where="ladder.cells")

    def config(self, base: RunConfig) -> AnyRun:
        """The whole run: `base`, overridden, with steps (at least one) and warm-up for the cell's length.

        An override of `model` as a whole may make it a counting one; what that has not is left out of `base`.

        Raises:
          UsageError: an override names no leaf of a run; or counting in a role or of a length that is not for it.
        """
        config = _overridden(base, self.overrides)
        per_step = config.tokens_per_step
        if isinstance(config, CountingRun):
            return self._counting(config)
        if self.budget is not None:
            steps = self.budget / step_flops(config.model, per_step, self.flops)
        elif self.tokens is not None:
            steps = self.tokens / per_step
        elif self.tokens_per_parameter is not None:
            steps = self.tokens_per_parameter * count_parameters(config.model).total / per_step
        else:
            return config
        steps = max(1, round(steps))
        warmup = max(1, round(self.warmup * steps))
        return _overridden(config, {"steps": steps, "optimizer.warmup_steps": warmup})

    def _counting(self, config: CountingRun) -> CountingRun:
        if self.role is not Role.BASELINE:
            raise UsageError(f"a counting model is no point of a law, and its role is {self.role}",
                             where="ladder.cells", do=f"Give it the role '{Role.BASELINE}'.")  # fmt: skip
        for name in ("budget", "tokens_per_parameter"):
            if getattr(self, name) is not None:
                raise UsageError(f"{name} is given, and a counting model has no FLOP and no parameters to begin with",
                                 where="ladder.cells", do="Give tokens.")  # fmt: skip
        if self.tokens is None:
            return config
        return dataclasses.replace(config, steps=max(1, round(self.tokens / config.tokens_per_step)))


@dataclasses.dataclass(frozen=True)
class Tune:
    """A measured stage before the rest: each of its cells (a few sizes, at the lowest budget) at every rate."""

    cells: tuple[Cell, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.cells or not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise UsageError("it needs cells, and rates that are positive", where="ladder.tune")


@dataclasses.dataclass(frozen=True)
class Fit:
    """How the law is fitted; fixed in the ladder file before the held-out run is read."""

    n: str = "params_total"
    d: str = "tokens"
    c: str = "flops_matmul"
    loss: str = "loss"
    law: str = "hoffmann"
    objective: str = "huber_log"
    where: str | None = None
    bootstrap: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "d", "c", "loss"):
            if getattr(self, name) not in NAMES:
                raise UsageError(f"the run table has no column '{getattr(self, name)}'", where=f"ladder.fit.{name}",
                                 do=nearest(getattr(self, name), NAMES))  # fmt: skip
        law_named(self.law)
        objective_named(self.objective)
        if self.bootstrap < 20:
            raise UsageError(f"{self.bootstrap} resamples give no interval", where="ladder.fit.bootstrap",
                             do="Ask for at least 20.")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ladder:
    """A whole sweep."""

    name: str
    base: RunConfig
    cells: tuple[Cell, ...]
    tune: Tune | None = None
    fit: Fit = Fit()

    def __post_init__(self) -> None:
        if not self.cells:
            raise UsageError("it has no cells", where=f"ladder '{self.name}'")
        if sum(cell.role is Role.HOLDOUT for cell in self.cells) > 1:
            raise UsageError(
                "more than one cell is held out",
                where=f"ladder '{self.name}'",
                do="Hold out the largest run, and give the others the role 'fit'.",
            )
        if not any(cell.role in FITTED for cell in self.cells):
            raise UsageError("no cell has the role 'fit'", where=f"ladder '{self.name}'")
        if not self.name or Path(self.name).name != self.name or self.name.startswith("."):
            raise UsageError(f"'{self.name}' cannot name a folder", where="ladder.name")


def load_ladder(path_and_arg: str, overrides: Iterable[str] = ()) -> Ladder:
    """Reads a ladder file (`get_config(arg)`), applies `base.leaf=value` overrides and builds it strictly.

    Raises:
      UsageError: no such file, an unknown field, or a cell that the base configuration does not take.
    """
    ladder = override(build(Ladder, load_file(path_and_arg), "ladder"), overrides, "ladder")
    for cell in ladder.cells:
        cell.config(ladder.base)
    return ladder


def chain(*lists: Sequence[Point]) -> list[Point]:
    """All points of all lists, one list after another."""
    return list(itertools.chain(*lists))


def product(*lists: Sequence[Point]) -> list[Point]:
    """Every combination of one point from each list, merged; the last list turns fastest."""
    return [_merged(points) for points in itertools.product(*lists)]


def zip_(*lists: Sequence[Point]) -> list[Point]:
    """The lists side by side, merged.

    Raises:
      UsageError: the lists differ in length.
    """
    if len({len(points) for points in lists}) > 1:
        raise UsageError(
            f"the lists have {[len(points) for points in lists]} points",
            where="ladder.zip_",
            do="Lists that are zipped are equally long.",
        )
    return [_merged(points) for points in zip(*lists, strict=True)]


def axis(path: str, values: Iterable[Any]) -> list[Point]:
    """One point for each value of one leaf, e.g. `axis("seed", range(3))`."""
    return [{path: value} for value in values]


def sizes(
    widths: Iterable[int],
    *,
    ff_ratio: float,
    depth: int | None = None,
    aspect: float | None = None,
    n_head: int | None = None,
    d_head: int | None = None,
) -> list[Point]:
    """Model shapes from a rule.

    Args:
      widths: D of each shape.
      ff_ratio: F / D; F is rounded to a multiple of 8. 0: no feed-forward.
      depth: layers of every shape, or
      aspect: D / L, rounded to whole layers.
      n_head: heads of every shape, or
      d_head: width of a head.

    Raises:
      UsageError: not exactly one of `depth` and `aspect`, or of `n_head` and `d_head`; heads that do not fill a width.
    """
    if (depth is None) == (aspect is None) or (n_head is None) == (d_head is None):
        raise UsageError("give one of depth and aspect, and one of n_head and d_head", where="ladder.sizes")
    points = []
    for width in widths:
        heads = n_head or width // (d_head or 1)
        if heads == 0 or width % heads or (d_head and heads * d_head != width):
            raise UsageError(f"heads do not fill width {width}", where="ladder.sizes", do="Choose a multiple.")
        points.append({
            "model.n_layer": depth or max(1, round(width / (aspect or 1))),
            "model.d_model": width,
            "model.n_head": heads,
            "model.d_ff": max(8, 8 * round(width * ff_ratio / 8)) if ff_ratio else 0,
        })  # fmt: skip
    return points


def isoflop(shapes: Sequence[Point], budgets: Iterable[float], **cell: Any) -> list[dict[str, Any]]:
    """Every shape at every budget of training FLOP; `cell` sets further fields of `Cell` (`flops`, `role`, ...)."""
    return [{**cell, "budget": budget, "overrides": shape} for budget in budgets for shape in shapes]


def grid(
    shapes: Sequence[Point], lengths: Iterable[float], *, per_parameter: bool, **cell: Any
) -> list[dict[str, Any]]:
    """Every shape (N) at every length (D): tokens, or tokens per parameter where `per_parameter` says so."""
    field = "tokens_per_parameter" if per_parameter else "tokens"
    return [{**cell, field: length, "overrides": shape} for length in lengths for shape in shapes]


def _overridden(base: RunConfig, point: Mapping[str, Any]) -> AnyRun:
    """`base` with the leaves of `point` replaced; built strictly, so a misspelled leaf is an error that names it."""
    values = to_dict(base)
    for path, value in point.items():
        *parents, leaf = path.split(".")
        branch = values
        for name in parents:
            branch = branch.get(name)
            if not isinstance(branch, dict):
                raise UsageError(f"'{path}' is no leaf of a run's configuration", where="ladder.cells")
        branch[leaf] = value
    if describes_counting(values["model"]):
        values = {field.name: values[field.name] for field in dataclasses.fields(CountingRun) if field.name in values}
    return build_run(values, "ladder.cells")


def _merged(points: Iterable[Point]) -> Point:
    return {path: value for point in points for path, value in point.items()}
