"""The figure of all approaches: the compute-optimal size by each, with bands, and how far they lie apart."""

from typing import TYPE_CHECKING, Any

import numpy as np

from lm.scaling.pages import style
from lm.scaling.pages.figures import WIDE, Figures, NotDrawn
from lm.scaling.pages.finished import FinishedSweep
from lm.scaling.pages.style import FITTED
from lm.scaling.result import FitResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette without its vermilion, which is the held-out run's, and its yellow, which vanishes on white.
# The same colour for an approach in every report.
_COLOURS = {
    "1: envelope": "#e69f00",
    "2: parabola in N": "#0072b2",
    "2: parabola in D": "#56b4e9",
    "2: interpolation in N": "#009e73",
    "2: interpolation in D": "#8fd0bc",
    "3: hoffmann": FITTED,
    "3: hoffmann_tied": "#999999",
    "3: gamma": "#cc79a7",
    "3: kaplan_joint": "#8c6bb1",
}


def approaches(sweep: FinishedSweep) -> "Figure":
    """Compute-optimal parameters against compute by every approach, and each over that of the reference law.

    Raises:
      NotDrawn: the fit did not compare approaches.
    """
    return side_by_side(sweep.fit)


@style.styled
def side_by_side(fit: FitResult) -> "Figure":
    """The same from a fit alone.

    Raises:
      NotDrawn: the fit did not compare approaches.
    """
    part = fit.checks.get("compare")
    if part is None:
        raise NotDrawn("The fit did not compare approaches (lm fit --compare)")
    figure = style.new_figure(WIDE, 4.2)
    axes, ratios = figure.subplots(1, 2, width_ratios=(1.5, 1))
    path = np.array(part["path"])
    rows = [row for row in part["approaches"] if None not in row["n_path"]]
    ends = []
    largest = fit.fitted_range["c"][1]
    for row in rows:
        reference = row["approach"] == part["reference"]
        colour = _COLOURS.get(row["approach"], FITTED)
        line = np.array(row["n_path"])
        if all(row["band"]):
            low, high = np.array(row["band"], dtype=float).T
            axes.fill_between(path, low, high, color=colour, alpha=0.16 if reference else 0.08, lw=0)
        axes.plot(path, line, color=colour, lw=1.8 if reference else 1.1, zorder=3 if reference else 2)
        ends.append((row, colour))
    for part_of in fit.isoflop.get("budgets", []) if fit.isoflop else []:
        axes.plot(part_of["budget"], part_of["n"], "D", ms=4, mfc="white", mec=FITTED, mew=0.9, zorder=4)
    axes.axvspan(largest, path[-1], color="#f6f6f6", zorder=0, lw=0)
    axes.set_xlim(path[0], path[-1])
    lines = np.array([row["n_path"] for row in rows], dtype=float)
    axes.set_ylim(*style.log_limits([lines.min() / 1.5, lines.max() * 1.5]))
    style.log_axis(axes.xaxis, style.power)
    style.log_axis(axes.yaxis, style.short)
    columns = fit.provenance["columns"]
    axes.set_xlabel(style.label("c", columns["c"] or "c = 6 n d"))
    axes.set_ylabel(f"compute-optimal {style.label('n', columns['n'] or 'n = c / 6 d')}")
    axes.set_title("Compute-optimal size by each approach")
    _ratios(ratios, ends, part)
    style.footnote(figure, columns["c"] or "", columns["n"] or "", notes=[
        f"Bands and bars: 95 % intervals from the same {part['resamples']} pseudo-tables for all approaches. "
        "Diamonds: minima of single budgets by parabolas. Shaded: beyond every fitted run."])  # fmt: skip
    return figure


FIGURES: Figures = (("approaches", "All approaches", approaches),)


def _ratios(axes: "Axes", ends: list[tuple[dict[str, Any], Any]], part: dict[str, Any]) -> None:
    """Each approach's N* at the farthest compute over the reference's; this names the colours of the lines too."""
    names = []
    for k, (row, colour) in enumerate(ends):
        value, interval = (1.0, None) if row["ratio"] is None else (row["ratio"]["value"], row["ratio"]["interval"])
        if interval is not None:
            axes.plot(interval, [k, k], color=colour, lw=3, alpha=0.4, solid_capstyle="butt")
        axes.plot(value, k, "o", color=colour, ms=5)
        names.append(row["approach"].partition(": ")[2])
    axes.axvline(1, color=FITTED, lw=0.8, zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    style.log_axis(axes.xaxis, "{:g}".format)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"N* over that of {part['reference'][3:]}\nat {style.power(part['disagreement']['budget'])} FLOP")
    axes.set_title("How far they disagree")
