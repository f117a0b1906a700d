"""How every figure of this room looks: colours of ordered sizes, ticks of short logarithmic axes, labels, bytes."""

import enum
import functools
import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.scaling.table import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

ACCENT = "#d55e00"  # vermilion of Okabe and Ito's palette: the held-out run, and nothing else
FITTED = "#333333"  # what a law says
REFUSED = "#a6a6a6"
STYLE = Path(__file__).with_name("figures.mplstyle")
QUANTITIES = {"n": "parameters N", "d": "training tokens D", "c": "training compute C", "loss": "validation loss"}
_ROUND = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 2.0, 3.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))
_MEANINGS = {column.name: column for column in COLUMNS}


class Format(enum.StrEnum):
    """The file format of a figure; SVG and PDF are for papers."""

    PNG = "png"
    SVG = "svg"
    PDF = "pdf"


# Without these each file would carry the date or the version of the library.
_METADATA: dict[Format, dict[str, Any]] = {
    Format.PNG: {"Software": None},
    Format.SVG: {"Date": None, "Creator": None},
    Format.PDF: {"CreationDate": None, "Creator": None, "Producer": None},
}


def styled(draw: Callable[..., "Figure"]) -> Callable[..., "Figure"]:
    """Draws under this room's style and leaves matplotlib's own settings as they were."""

    @functools.wraps(draw)
    def wrapper(*args: Any) -> "Figure":
        import matplotlib.style

        with matplotlib.style.context(["default", STYLE]):
            return draw(*args)

    return wrapper


def render(figure: "Figure", image_format: Format) -> bytes:
    """The figure's file; the same figure gives the same bytes under one version of matplotlib."""
    import matplotlib.style

    buffer = io.BytesIO()
    with matplotlib.style.context(["default", STYLE]):
        figure.savefig(buffer, format=image_format.value, metadata=_METADATA[image_format])
    return buffer.getvalue()


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure in inches, drawn without a display and without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def short(value: float) -> str:
    """A count in three digits and a letter: 23.1k, 1.2M."""
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def power(value: float) -> str:
    """A number as mantissa and power of ten, in mathtext."""
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    leading = "" if mantissa == "1" else rf"{mantissa}\times "
    return rf"${leading}10^{{{int(exponent)}}}$"


def log_axis(axis: "Axis", text: Callable[[float], str], ticks: int = 4) -> None:
    """A logarithmic axis whose ticks (about so many) stay at round numbers however short its range is."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    low, high = sorted(axis.get_view_interval())
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)

    def shown(subs: tuple[float, ...]) -> int:
        places = np.outer(decades, subs)
        return int(np.sum((places >= low) & (places <= high)))

    subs = min(_ROUND, key=lambda candidate: (abs(shown(candidate) - ticks), len(candidate)))
    few = shown(subs) < 2
    axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10]) if few else LogLocator(subs=subs, numticks=20))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_limits(values: Any, margin: float = 0.06) -> tuple[float, float]:
    """The range of positive values with a margin, a share of its length in logarithms."""
    low, high = np.log(np.min(values)), np.log(np.max(values))
    room = max((high - low) * margin, 0.02)
    return float(np.exp(low - room)), float(np.exp(high + room))


def label(quantity: str, column: str) -> str:
    """An axis label: the quantity, the column that it is, the unit."""
    unit = _MEANINGS[column].unit if column in _MEANINGS else {"loss": "nats/token", "c": "FLOP"}.get(quantity, "")
    inside = ", ".join(part for part in (column if column not in ("loss", "tokens") else "",
                                         unit if unit not in ("parameters", "tokens") else "") if part)  # fmt: skip
    return f"{QUANTITIES[quantity]} ({inside})" if inside else QUANTITIES[quantity]


def footnote(figure: "Figure", *columns: str, notes: Sequence[str] = ()) -> None:
    """The conventions of the columns shown, and further notes, in small print below the axes."""
    known = [f"{name}: {_MEANINGS[name].meaning}." for name in columns if name in _MEANINGS]
    characters = int(figure.get_figwidth() * 19)
    lines = [line for text in [*known, *notes] for line in textwrap.wrap(text, characters)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=6.5, color="#777777", linespacing=1.35)


def size_colours(sizes: Any) -> Any:
    """Colours of ordered sizes on a logarithmic scale: dark small, light large, no yellow that vanishes on white."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    colours = ListedColormap(colormaps["viridis"](np.linspace(0.0, 0.8, 256)))
    return ScalarMappable(LogNorm(np.min(sizes) * 0.999, np.max(sizes) * 1.001), colours)


def size_bar(figure: "Figure", axes: Any, colours: "ScalarMappable", column: str) -> None:
    """The colour bar of sizes, with ticks at round numbers."""
    bar = figure.colorbar(colours, ax=axes, aspect=32, fraction=0.04, pad=0.015)
    log_axis(bar.ax.yaxis, short)
    bar.outline.set_visible(False)
    bar.ax.grid(visible=False)
    bar.set_label(label("n", column))


def spread(positions: Sequence[float], gap: float) -> np.ndarray:
    """Moves positions apart, as little as needed, until neighbours are at least `gap` from each other."""
    order = np.argsort(positions)
    sorted_positions = np.asarray(positions, dtype=float)[order]
    offsets = gap * np.arange(len(order))
    # Isotonic regression of positions less their offsets: pools neighbours that would overlap.
    blocks: list[list[float]] = []
    for value in sorted_positions - offsets:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / (blocks[-1][1] + count),
                          blocks[-1][1] + count]  # fmt: skip
    moved = np.concatenate([np.full(int(count), mean) for mean, count in blocks]) + offsets
    result = np.empty_like(moved)
    result[order] = moved
    return result


def beside(axes: "Axes", x: float, y: float, text: str, *, left: bool = False, **style: Any) -> None:
    """A direct label just right (or left) of a point in data coordinates, never clipped by the axes."""
    place = {"xytext": (-6, 0), "ha": "right"} if left else {"xytext": (5, 0)}
    axes.annotate(text, (x, y), textcoords="offset points", va="center", annotation_clip=False, **place, **style)
