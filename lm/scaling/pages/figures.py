"""The six figures of a finished sweep, each a function from a `FinishedSweep` to a matplotlib figure."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.base.errors import UsageError
from lm.base.files import atomic
from lm.scaling.laws import law_named
from lm.scaling.pages import style
from lm.scaling.pages.finished import Curve, FinishedSweep
from lm.scaling.pages.style import ACCENT, FITTED, REFUSED, Format
from lm.scaling.planning.predict import predict
from lm.scaling.result import FitResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, TALL = 6.8, 3.6  # inches: two columns of a printed page


class NotDrawn(UsageError):
    """The sweep lacks what this figure shows; `what` is a sentence for the report."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A figure of the report: its file and its bytes for embedding, or the reason why there is none."""

    name: str
    title: str
    caption: str
    path: Path | None
    embedded: bytes
    width: float  # inches
    reason: str


def fitted(fit: FitResult, n: Any, d: Any, c: Any) -> np.ndarray:
    """The fitted law's loss [points] in nats/token at n parameters, d tokens and c FLOP (numbers or [points])."""
    law = law_named(fit.law)
    n, d, c = np.broadcast_arrays(*(np.asarray(value, dtype=float) for value in (n, d, c)))
    return law.predict(np.array([fit.parameters[name] for name in law.parameters]), {"n": n, "d": d, "c": c})


@style.styled
def loss_curves(sweep: FinishedSweep) -> "Figure":
    """Training loss of every cell that is fitted or held out, against tokens and against FLOP.

    Lines are smoothed over tokens, since one step's loss is noisy; a dot is the validation loss at the end.

    Raises:
      NotDrawn: no cell has left its metrics.
    """
    curves = [curve for curve in sweep.curves if curve.role in ("fit", "holdout")]
    if not curves:
        raise NotDrawn("No cell has a metrics.jsonl beside the table, so there are no loss curves")
    figure = style.new_figure(WIDE, TALL)
    by_tokens, by_flops = figure.subplots(1, 2, sharey=True)
    colours = style.size_colours([curve.n for curve in curves])
    ends = [curve.final[2] for curve in curves]
    depth = max(ends) - min(ends) or 0.1 * min(ends)
    top = max(ends) + depth
    by_tokens.set_ylim(min(ends) - 0.15 * depth, top)
    shown: tuple[list[float], list[float]] = ([], [])
    for curve in curves:
        held_out = curve.role == "holdout"
        look = {"color": ACCENT if held_out else colours.to_rgba(curve.n), "lw": 1.6 if held_out else 0.9,
                "zorder": 3 if held_out else 2}  # fmt: skip
        tokens, flops, loss = _smooth(curve)
        for axes, x, end, seen in (
            (by_tokens, tokens, curve.final[0], shown[0]),
            (by_flops, flops, curve.final[1], shown[1]),
        ):
            axes.plot(x, loss, **look)
            axes.plot(end, curve.final[2], "o", ms=3.5, mec="white", mew=0.4, **look)
            seen.extend([*x[loss < top], end])
        if held_out:
            style.beside(by_flops, curve.final[1], curve.final[2], "held out", color=ACCENT, fontsize=8)
    for axes, seen, quantity in ((by_tokens, shown[0], "d"), (by_flops, shown[1], "c")):
        axes.set_xlim(*style.log_limits(seen))
        style.log_axis(axes.xaxis, style.short if quantity == "d" else style.power)
        axes.set_xlabel(style.label(quantity, sweep.columns[quantity]))
    for budget in sorted(set(sweep.table.loc[sweep.table["role"].isin(["fit", "holdout"]), "budget"].dropna())):
        by_flops.axvline(budget, color="#bbbbbb", lw=0.8, ls=(0, (2, 2)), zorder=1)
    by_tokens.set_ylabel("loss (nats/token)")
    by_tokens.set_title("Against tokens")
    by_flops.set_title("Against compute; dashed: budgets")
    style.size_bar(figure, [by_tokens, by_flops], colours, sweep.columns["n"])
    style.footnote(
        figure,
        sweep.columns["c"],
        sweep.columns["n"],
        notes=[
            "Lines: training loss, smoothed over about 10 % of the tokens. Dots: validation loss after the last step."
        ],
    )
    return figure


@style.styled
def isoflop(sweep: FinishedSweep) -> "Figure":
    """Loss against size at each budget, with parabolas, minima and their intervals; refused budgets in grey.

    Raises:
      NotDrawn: the fit has no IsoFLOP part.
    """
    analysis = sweep.fit.isoflop
    if not analysis or not (analysis["budgets"] or analysis["refused"]):
        raise NotDrawn("The sweep has no budgets with several sizes, so there is no IsoFLOP figure")
    figure = style.new_figure(WIDE, TALL)
    axes, optima = figure.subplots(1, 2, width_ratios=(1.75, 1))
    budgets = [part["budget"] for part in (*analysis["budgets"], *analysis["refused"])]
    colours = style.size_colours(budgets)
    ends: list[tuple[float, float, str, Any]] = []
    for part in analysis["budgets"]:
        colour = colours.to_rgba(part["budget"])
        n, _, loss = np.array(part["points"], dtype=float).T
        axes.plot(n, loss, "o", color=colour)
        grid = np.geomspace(n.min(), n.max(), 100)
        parabola = np.polynomial.Polynomial(part["coefficients"])(np.log(grid))
        axes.plot(grid, parabola, color=colour)
        axes.plot(part["n_interval"], [part["loss"]] * 2, color=colour, lw=3.5, alpha=0.35, solid_capstyle="butt")
        axes.plot(part["n"], part["loss"], "D", ms=6, mfc="white", mec=colour, mew=1.4, zorder=4)
        ends.append((n.min(), parabola[0], style.power(part["budget"]), colour))
        low, high = part["n_interval"]
        optima.errorbar(part["budget"], part["n"], yerr=[[part["n"] - low], [high - part["n"]]], color=colour,
                        fmt="D", ms=6, mfc="white", mew=1.4, elinewidth=1.4, capsize=0)  # fmt: skip
    notes = []
    for part in analysis["refused"]:
        rows = sweep.table[(sweep.table["role"] == "fit") & np.isclose(sweep.table["budget"], part["budget"])]
        rows = rows.sort_values(sweep.columns["n"])
        n, loss = (rows[sweep.columns[key]].to_numpy(dtype=float) for key in ("n", "loss"))
        axes.plot(n, loss, "o:", color=REFUSED, lw=0.9)
        if len(rows):
            ends.append((n[0], loss[0], f"{style.power(part['budget'])} refused", REFUSED))
        notes.append(f"Refused: {style.power(part['budget'])} FLOP: {part['reason']}.")
    # A larger budget begins at larger sizes, so the left ends are free of other curves, as the right ends are not.
    axes.set_xlim(left=min((n for n, *_ in ends), default=axes.get_xlim()[0]) / 3)
    style.log_axis(axes.xaxis, style.short)
    _label_ends(axes, ends, left=True)
    axes.set_xlabel(style.label("n", sweep.columns["n"]))
    axes.set_ylabel(style.label("loss", sweep.columns["loss"]))
    axes.set_title(f"Loss at equal compute ({sweep.columns['c']}, FLOP)")
    _optima_line(optima, analysis, sweep)
    style.footnote(figure, sweep.columns["c"], sweep.columns["n"], notes=notes)
    return figure


@style.styled
def surface(sweep: FinishedSweep) -> "Figure":
    """The fitted law as one line a size against the fitted cells, and what it leaves over in per cent."""
    n, d, c, loss = (sweep.column(quantity, "fit", "repeat") for quantity in ("n", "d", "c", "loss"))
    figure = style.new_figure(WIDE, 4.4)
    axes, rest = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    colours = style.size_colours(n)
    limits = style.log_limits(d)
    grid = np.geomspace(*limits, 100)
    for size in np.unique(n):
        axes.plot(
            grid,
            fitted(sweep.fit, size, grid, sweep.fit.provenance["flops_per_nd"] * size * grid),
            color=colours.to_rgba(size),
            lw=1,
        )
    residuals = 100 * (loss / fitted(sweep.fit, n, d, c) - 1)
    axes.scatter(d, loss, color=colours.to_rgba(n), s=20, zorder=3, edgecolor="white", linewidth=0.5)
    rest.vlines(d, 0, residuals, color=colours.to_rgba(n), lw=1)
    rest.scatter(d, residuals, color=colours.to_rgba(n), s=20, zorder=3, edgecolor="white", linewidth=0.5)
    rest.axhline(0, color=FITTED, lw=0.8)
    reach = 1.15 * np.abs(residuals).max()
    rest.set_ylim(-reach, reach)
    axes.set_xlim(*limits)
    style.log_axis(axes.xaxis, style.short)
    room = 0.06 * np.ptp(loss)
    axes.set_ylim(loss.min() - room, loss.max() + room)
    axes.set_ylabel(style.label("loss", sweep.columns["loss"]))
    rest.set_ylabel("measured over\nfitted (%)")
    rest.set_xlabel(style.label("d", sweep.columns["d"]))
    axes.set_title("The fitted law at each size, and the cells it was fitted to")
    style.size_bar(figure, [axes, rest], colours, sweep.columns["n"])
    style.footnote(figure, sweep.columns["n"], sweep.columns["d"], sweep.columns["loss"])
    return figure


@style.styled
def extrapolation(sweep: FinishedSweep) -> "Figure":
    """The law along its own compute-optimal path through the held-out design, with its band, and what was measured.

    Raises:
      NotDrawn: no run was held out, or the fit has no bootstrap to make a band from.
    """
    held_out = sweep.holdout
    if held_out is None:
        raise NotDrawn("The sweep held no run out, so nothing was extrapolated to")
    if not sweep.fit.bootstrap_samples:
        raise NotDrawn("The fit has no bootstrap samples, so the extrapolation has no band")
    n, c, loss = (sweep.column(quantity, "fit", "repeat") for quantity in ("n", "c", "loss"))
    share = _allocation_exponent(sweep.fit)
    limits = style.log_limits([*c, held_out["c"]])
    grid = np.geomspace(*limits, 60)
    path_n = held_out["n"] * (grid / held_out["c"]) ** share
    path_d = held_out["d"] * (grid / held_out["c"]) ** (1 - share)
    path = [predict(sweep.fit, at_n, at_d) for at_n, at_d in zip(path_n, path_d, strict=True)]
    figure = style.new_figure(WIDE, TALL)
    axes, close = figure.subplots(1, 2, width_ratios=(3.2, 1))
    colours = style.size_colours(n)
    axes.fill_between(grid, *np.array([at.prediction_interval for at in path]).T, color=FITTED, alpha=0.1, lw=0)
    axes.fill_between(grid, *np.array([at.mean_interval for at in path]).T, color=FITTED, alpha=0.2, lw=0)
    axes.plot(grid, [at.mean for at in path], color=FITTED)
    axes.scatter(c, loss, color=colours.to_rgba(n), s=20, zorder=3, edgecolor="white", linewidth=0.5)
    axes.plot(held_out["c"], held_out["measured"], "o", color=ACCENT, ms=5.5, mec="white", mew=0.5, zorder=5)
    axes.annotate("held out", (held_out["c"], held_out["measured"]), xytext=(-7, -7), textcoords="offset points",
                  ha="right", color=ACCENT, fontsize=8)  # fmt: skip
    axes.axvspan(c.max() * 1.02, limits[1], color="#f6f6f6", zorder=0, lw=0)
    axes.set_xlim(*limits)
    style.log_axis(axes.xaxis, style.power)
    axes.set_xlabel(style.label("c", sweep.columns["c"]))
    axes.set_ylabel(style.label("loss", sweep.columns["loss"]))
    axes.set_title("Along the law's compute-optimal path")
    style.size_bar(figure, axes, colours, sweep.columns["n"])
    _close_up(close, held_out)
    style.footnote(figure, sweep.columns["c"], notes=[
        f"Line: the law where N grows as C to the power {share:.2f}, through the held-out design; cells lie off it "
        "as far as their sizes do. Bands and bars: 95 % intervals, dark of the mean, light of one new run. "
        "Shaded: beyond every fitted cell."])  # fmt: skip
    return figure


@style.styled
def tuning(sweep: FinishedSweep) -> "Figure":
    """Loss against peak learning rate at each size of the tune stage, and the rate that the rule gives each.

    Raises:
      NotDrawn: the ladder had no tune stage.
    """
    if sweep.tune is None:
        raise NotDrawn("The ladder had no tune stage, so no learning rates were compared")
    n, rate, loss = (np.array([row[key] for row in sweep.tune["rows"]], float) for key in ("n", "peak_lr", "loss"))
    rule = sweep.tune["rule"]
    figure = style.new_figure(0.72 * WIDE, TALL)
    axes = figure.subplots()
    colours = style.size_colours(n)
    ends = []
    chosen = []
    for size in np.unique(n):
        rows = np.flatnonzero(n == size)
        rows = rows[np.argsort(rate[rows])]
        axes.plot(rate[rows], loss[rows], "o-", color=colours.to_rgba(size))
        ends.append((rate[rows][-1], loss[rows][-1], f"N = {style.short(size)}", colours.to_rgba(size)))
        at = rule["coefficient"] * size ** rule["exponent"]
        chosen.append(at)
        axes.plot(at, 0, "^", ms=8, mfc="white", mec=colours.to_rgba(size), mew=1.4, zorder=4, clip_on=False,
                  transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_xlim(*style.log_limits([*rate, *chosen]))
    style.log_axis(axes.xaxis, "{:g}".format)
    _label_ends(axes, ends)
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel(style.label("loss", sweep.columns["loss"]))
    axes.set_title("Tune stage; on the axis: the rate that the rule gives")
    style.footnote(figure, notes=[f"Rule: {rule['text'].rstrip('.')}."])
    return figure


@style.styled
def predicted_measured(sweep: FinishedSweep) -> "Figure":
    """Measured against predicted loss of every fitted and repeated cell and of the held-out run."""
    figure = style.new_figure(0.66 * WIDE, TALL)
    axes = figure.subplots()
    n, d, c, loss = (sweep.column(quantity, "fit", "repeat") for quantity in ("n", "d", "c", "loss"))
    predicted = fitted(sweep.fit, n, d, c)
    colours = style.size_colours(n)
    values = np.concatenate([predicted, loss])
    if sweep.holdout is not None:
        interval = sweep.holdout["prediction_interval"]
        values = np.concatenate([values, interval, [sweep.holdout["measured"]]])
    room = 0.06 * np.ptp(values)
    limits = np.array([values.min() - room, values.max() + room])
    axes.fill_between(limits, 0.99 * limits, 1.01 * limits, color=FITTED, alpha=0.08, lw=0)
    axes.plot(limits, limits, color=FITTED, lw=0.9)
    axes.scatter(predicted, loss, color=colours.to_rgba(n), s=20, zorder=3, edgecolor="white", linewidth=0.5)
    if sweep.holdout is not None:
        axes.plot(interval, [sweep.holdout["measured"]] * 2, color=ACCENT, lw=1.4, zorder=4)
        axes.plot(sweep.holdout["predicted"], sweep.holdout["measured"], "o", color=ACCENT, ms=6, zorder=5)
        axes.annotate("held out", (interval[1], sweep.holdout["measured"]), xytext=(5, 0), color=ACCENT, va="center",
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set_xlim(*limits)
    axes.set_ylim(*limits)
    axes.set_box_aspect(1)
    axes.set_xlabel("predicted loss (nats/token)")
    axes.set_ylabel(f"measured {style.label('loss', sweep.columns['loss'])}")
    axes.set_title("Every cell; band: within 1 %")
    style.size_bar(figure, axes, colours, sweep.columns["n"])
    return figure


Figures = tuple[tuple[str, str, Callable[[FinishedSweep], "Figure"]], ...]
FIGURES: Figures = (
    ("curves", "Loss curves", loss_curves),
    ("isoflop", "IsoFLOP parabolas", isoflop),
    ("surface", "The fitted law against the data", surface),
    ("extrapolation", "Extrapolation to the held-out run", extrapolation),
    ("predicted", "Predicted against measured", predicted_measured),
    ("tune", "Tune stage", tuning),
)


def write_figures(
    sweep: FinishedSweep, figures: Figures = FIGURES, image_format: Format = Format.PNG
) -> Iterator[Drawn]:
    """Draws each of `figures` into `figures/` of the sweep's folder; one that cannot be drawn carries the reason.

    What is embedded is the file itself, but SVG beside PDF, which a browser shows in no image.
    """
    for name, title, draw in figures:
        caption = (draw.__doc__ or "").splitlines()[0]
        try:
            figure = draw(sweep)
        except NotDrawn as reason:
            yield Drawn(name, title, caption, None, b"", 0.0, f"{reason.what}.")
            continue
        path = sweep.folder / "figures" / f"{name}.{image_format.value}"
        content = style.render(figure, image_format)
        with atomic(path, "wb") as file:
            file.write(content)
        embedded = style.render(figure, Format.SVG) if image_format is Format.PDF else content
        yield Drawn(name, title, caption, path, embedded, figure.get_figwidth(), "")


def _smooth(curve: Curve, width: float = 0.1, places: int = 80) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, FLOP and loss [places]: a line fitted around each place, weighted by a Gaussian in log tokens."""
    logs = np.log(curve.tokens)
    at = np.linspace(logs[0], logs[-1], places)
    away = logs - at[:, None]
    weights = np.exp(-0.5 * (away / width) ** 2)
    total, first, second = (np.sum(weights * away**power, axis=1) for power in (0, 1, 2))
    # A ridge of a hundredth of the width keeps a place with a single row near it from a slope of its own.
    tilted = weights * (second[:, None] + total[:, None] * (0.01 * width) ** 2 - first[:, None] * away)
    loss = tilted @ curve.loss / tilted.sum(axis=1)
    return np.exp(at), np.interp(at, logs, curve.flops), loss


def _allocation_exponent(fit: FitResult) -> float:
    """a of N* proportional to C^a under the law; a law that allocates nothing is drawn at constant tokens/parameter."""
    return float(fit.derived["a"]["value"]) if law_named(fit.law).allocates else 0.5


def _close_up(axes: "Axes", held_out: dict[str, Any]) -> None:
    axes.plot([0, 0], held_out["prediction_interval"], color=FITTED, alpha=0.25, lw=11, solid_capstyle="butt")
    axes.plot([0, 0], held_out["mean_interval"], color=FITTED, alpha=0.45, lw=11, solid_capstyle="butt")
    axes.plot(0, held_out["predicted"], "_", color=FITTED, ms=16, mew=1.6)
    axes.plot(0, held_out["measured"], "o", color=ACCENT, ms=5.5, mec="white", mew=0.5)
    error = f"{held_out['error_percent']:+.2f} %".replace("-", "−")
    ends = [
        (0.12, held_out["predicted"], f"predicted\n{held_out['predicted']:.4f}", FITTED),
        (0.12, held_out["measured"], f"measured\n{held_out['measured']:.4f}\n{error}", ACCENT),
    ]
    _label_ends(axes, ends, gap=0.15)
    axes.set_xlim(-0.25, 1)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("Held-out run")


def _label_ends(
    axes: "Axes", ends: list[tuple[float, float, str, Any]], gap: float = 0.055, left: bool = False
) -> None:
    low, high = axes.get_ylim()
    heights = style.spread([end[1] for end in ends], gap * (high - low))
    for (x, _, text, colour), y in zip(ends, heights, strict=True):
        style.beside(axes, x, y, text, left=left, color=colour, fontsize=8)


def _optima_line(axes: "Axes", analysis: dict[str, Any], sweep: FinishedSweep) -> None:
    axes.set_title("Minima")
    if analysis["exponents"]:
        power = analysis["exponents"]["a"]
        grid = np.geomspace(*style.log_limits([part["budget"] for part in analysis["budgets"]]), 20)
        axes.plot(grid, power["coefficient"] * grid ** power["value"], color=FITTED, lw=0.9, zorder=1)
        axes.set_title(rf"Minima: $N^{{*}} \propto C^{{\,{power['value']:.2f}}}$")
    axes.set_xlabel(style.label("c", sweep.columns["c"]).replace(" (", "\n("))
    axes.set_ylabel(style.label("n", sweep.columns["n"]))
    style.log_axis(axes.xaxis, style.power, ticks=2)
    style.log_axis(axes.yaxis, style.short)
