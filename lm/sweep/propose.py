"""From a plan to a ladder that `lm sweep` runs: next runs, or an IsoFLOP column about N*, in the base ladder's shapes.

The file that is written continues the ladder it names: the same base run, data, cells and sweep folder, with new cells.
"""

import bisect
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.base import files
from lm.base.errors import UsageError
from lm.model.accounting import Flops, count_parameters
from lm.model.config import ModelConfig
from lm.scaling.planning.plan import Plan
from lm.sweep.ladder import Cell, Ladder, Point, load_ladder, sizes

COUNTS = ("params_total", "params_active", "params_nonembedding")  # what the n of our own tables may be
SPACING = 1.6  # between the sizes of a column, as in the default ladder
MOST_SIZES = 25  # in a column: the outermost are then 280 times apart from N*
WIDEST = 2**17
FARTHEST = 2.0  # times the size aimed at

FILE = '''"""Cells that `lm plan` proposed for N* at {budget:.4g} FLOP, after those of the ladder that they continue.

Its name, base run and data are kept: in the same --workdir its finished cells stand, the new ones are trained, and the
law is fitted to all of them. N is counted as {counted}.

    lm sweep {name} --workdir runs
"""

from pathlib import Path

from ml_collections import ConfigDict

from lm.base.config import load_file

BASE = Path(__file__).parent / {base}
ARG = {arg}
CELLS = [
{cells}
]


def get_config(arg: str | None = None) -> ConfigDict:
    base = load_file(f"{{BASE}}:{{arg or ARG}}")
    return ConfigDict({{**base, "cells": [*base["cells"], *CELLS]}})
'''


def write_ladder(plan: Plan, path: Path, base: str, *, column: int = 0) -> int:
    """Writes a ladder file at `path`: the cells of `base` (LADDER[:ARG]), then the plan's next runs and `column` sizes.

    The column is at the plan's largest training budget, its sizes a factor 1.6 apart about N*. Every cell has the
    `nearest_shape` to the size aimed at and the tokens aimed at, in whole steps; the same run again gets another seed.
    Returns how many cells were added.

    Raises:
      UsageError: nothing to write, a file not named .py, a `base` that is no ladder, a size out of its reach, or a file
        that holds anything else: it may be a base, this one's even, or written by hand.
    """
    if path.suffix != ".py":
        raise UsageError("a ladder file ends in .py", where=str(path), do="Name it so.")
    if not 0 <= column <= MOST_SIZES:
        raise UsageError(f"{column} sizes about N*", where="--column", do=f"Give 0 to {MOST_SIZES}.")
    source, _, arg = base.partition(":")
    if not Path(source).is_file():
        raise UsageError("there is no such ladder file", where=source, do="Pass --base LADDER[:ARG].")
    ladder = load_ladder(base)
    counted = plan.columns["n"] if plan.columns["n"] in COUNTS else COUNTS[0]
    largest = max(plan.optima, key=lambda optimum: optimum.training_flops)
    next_runs = plan.next_runs.runs if plan.next_runs else ()
    aimed: list[tuple[float, Point]] = [(run.n, {"tokens": round(run.d)}) for run in next_runs]
    for place in range(column):
        n = (largest.n.value or math.inf) * SPACING ** (place - (column - 1) / 2)
        budget, flops = float(f"{largest.training_flops:.6g}"), _convention(plan.columns["c"], counted)
        aimed.append((n, {"budget": budget, "flops": flops.value}))
    if not aimed:
        raise UsageError("no runs to write", where="--ladder", do="Ask for --next or --column runs.")
    lines, seen = [], Counter[str]()
    for n, length in aimed:
        shape, count = nearest_shape(ladder, n, counted)
        again = seen[json.dumps([shape, length])]
        seen.update([json.dumps([shape, length])])
        seeds = {"seed": ladder.base.seed + again, "data.seed": ladder.base.data.seed + again} if again else {}
        lines.append(f"    # N = {count:,}, {n:.4g} aimed at")
        lines.append(f"    {json.dumps({'overrides': {**shape, **seeds}, **length})},")
    text = FILE.format(
        budget=largest.budget.value,
        counted=counted,
        name=path.name,
        base=json.dumps(Path(os.path.relpath(Path(source).resolve(), path.resolve().parent)).as_posix()),
        arg=json.dumps(arg),
        cells="\n".join(lines),
    )
    if path.is_file() and path.read_bytes() != text.encode():
        raise UsageError("stands already and differs", where=str(path), do="Name another --ladder, or remove it.")
    files.write_text(path, text)
    return len(aimed)


def nearest_shape(ladder: Ladder, n: float, counted: str = COUNTS[0]) -> tuple[Point, int]:
    """The shape by a ladder's own rule whose parameters, as `counted`, are nearest to `n` by ratio, and their number.

    The rule is read off its cells: layers where all have the same, else the median D / L; heads where all have the
    same number, else their width; the median F / D. D grows in steps that keep heads whole and even.

    Raises:
      UsageError: cells that vary in number and width of heads, or no shape within a factor of 2 of `n`.
    """
    models = [cell.config(ladder.base).model for cell in ladder.cells]
    rule, step = _rule([model for model in models if isinstance(model, ModelConfig)], ladder.name)
    widths = range(step, WIDEST, step)

    def shape(width: int) -> Point:
        return sizes([width], **rule)[0]

    def count(width: int) -> int:
        model = Cell(shape(width)).config(ladder.base).model
        assert isinstance(model, ModelConfig)  # as the base is
        return getattr(count_parameters(model), counted.removeprefix("params_"))

    at = min(bisect.bisect_left(widths, n, key=count), len(widths) - 1)
    width = min(widths[max(at - 1, 0)], widths[at], key=lambda width: abs(math.log(count(width) / n)))
    if abs(math.log(count(width) / n)) > math.log(FARTHEST):
        raise UsageError(
            f"the nearest shape to {n:.3g} parameters has {count(width):,} ({width} wide)",
            where=f"ladder '{ladder.name}'",
            do="Choose a --base of about that size.",
        )
    return shape(width), count(width)


def _rule(models: Sequence[ModelConfig], name: str) -> tuple[dict[str, Any], int]:
    """The options of `sizes` that the shapes follow, and the step of their width."""
    depths, heads, head_widths = ({getattr(m, leaf) for m in models} for leaf in ("n_layer", "n_head", "head_width"))
    rule: dict[str, Any] = {"ff_ratio": statistics.median(m.d_ff / m.d_model for m in models)}
    if len(depths) == 1:
        rule["depth"] = depths.pop()
    else:
        rule["aspect"] = statistics.median(m.d_model / m.n_layer for m in models)
    if len(heads) == 1:
        rule["n_head"] = heads.pop()
        return rule, 2 * rule["n_head"]
    if len(head_widths) == 1:
        rule["d_head"] = head_widths.pop()
        return rule, rule["d_head"]
    raise UsageError(
        "its cells vary in number and in width of heads: no rule to go on by",
        where=f"ladder '{name}'",
        do="Pass a --base whose cells keep one of them.",
    )


def _convention(column: str | None, counted: str) -> Flops:
    """The convention of the fit's FLOP: by its column, or 6 n d of what n counts."""
    if column in [convention.value for convention in Flops]:
        return Flops(column)
    return Flops.KAPLAN if counted == "params_nonembedding" else Flops.SIX_ND
