import dataclasses
import json
import re
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from lm.base.errors import UsageError
from lm.scaling.pages import figures, figures_approaches, style
from lm.scaling.pages.figures import FIGURES, NotDrawn
from lm.scaling.pages.finished import Curve, FinishedSweep, read_sweep
from lm.scaling.pages.style import Format

DRAW = {name: draw for name, _, draw in (*FIGURES, *figures_approaches.FIGURES)}


@pytest.fixture(scope="module")
def sweep(synthetic_sweep) -> FinishedSweep:
    return read_sweep(synthetic_sweep)


@pytest.fixture(scope="module", params=DRAW)
def figure(request, sweep):
    drawn = DRAW[request.param](sweep)
    FigureCanvasAgg(drawn).draw()
    return drawn


def _tick_labels(axis):
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [label for label in labels if label.get_visible() and label.get_text()]


@pytest.mark.slow
def test_no_text_is_cut_off_at_the_edge(figure):
    all_ticks = {
        label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
    }  # fmt: skip
    shown = [label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _tick_labels(axis)]
    shown += [text for text in figure.findobj(Text) if text not in all_ticks and text.get_visible()]
    shown = [text for text in shown if text.get_text().strip()]
    assert len(shown) > 5
    for text in shown:
        box = text.get_window_extent(figure.canvas.get_renderer())
        # Half a point: ink of a glyph may pass its own advance width.
        assert min(box.x0, box.y0) > -0.5, text
        assert box.x1 < figure.bbox.x1 + 0.5, text
        assert box.y1 < figure.bbox.y1 + 0.5, text


def test_tick_labels_of_an_axis_do_not_overlap_and_are_several(figure):
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [label.get_window_extent(figure.canvas.get_renderer()) for label in _tick_labels(axis)]
            assert len(boxes) != 1, axis.get_label_text()
            assert not any(one.overlaps(other) for one, other in combinations(boxes, 2)), axis.get_label_text()


def test_every_axis_says_its_unit_or_its_column(figure):
    for axes in figure.axes:
        labels = [axes.get_xlabel(), axes.get_ylabel()]
        for label in filter(None, labels):
            assert re.search(r"nats/token|FLOP|params_total|tokens|learning rate|%", label), label
        assert any(labels) or axes.get_title("left") == "Held-out run"


def test_flops_are_named_with_their_convention(sweep):
    figure = DRAW["curves"](sweep)
    assert any("(flops_matmul, FLOP)" in axes.get_xlabel() for axes in figure.axes)
    assert "attention counted causally" in figure.get_supxlabel()


@pytest.mark.parametrize("image_format", Format)
def test_the_same_sweep_gives_the_same_bytes(sweep, image_format):
    one, other = (style.render(DRAW["tune"](sweep), image_format) for _ in range(2))
    assert one == other
    assert one.startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[image_format])


def test_drawing_leaves_the_users_settings_alone(sweep):
    before = dict(matplotlib.rcParams)
    style.render(DRAW["tune"](sweep), Format.PNG)
    assert dict(matplotlib.rcParams) == before


def test_refused_budgets_are_grey_and_say_why(sweep):
    refused = sweep.fit.isoflop["refused"]
    assert refused, "the synthetic sweep has its first budget too small on purpose"
    figure = DRAW["isoflop"](sweep)
    grey = [line for line in figure.axes[0].lines if line.get_color() == style.REFUSED]
    assert len(grey) == len(refused)
    for part in refused:
        assert part["reason"] in " ".join(figure.get_supxlabel().split())


def test_minima_and_parabolas_are_those_of_the_fit(sweep):
    axes = DRAW["isoflop"](sweep).axes[0]
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "D"}
    assert drawn == {(part["n"], part["loss"]) for part in sweep.fit.isoflop["budgets"]}
    curves = [line for line in axes.lines if len(line.get_xdata()) > 50]
    for curve, part in zip(curves, sweep.fit.isoflop["budgets"], strict=True):
        # The parabola's lowest drawn point is at the minimum, to the spacing of 100 drawn points.
        assert curve.get_ydata().min() == pytest.approx(part["loss"], abs=1e-4)


def test_residuals_are_measured_over_fitted(sweep):
    rest = DRAW["surface"](sweep).axes[1]
    drawn = np.asarray(rest.collections[-1].get_offsets())[:, 1]
    n, d, c, loss = (sweep.column(key, "fit", "repeat") for key in ("n", "d", "c", "loss"))
    assert drawn == pytest.approx(100 * (loss / figures.fitted(sweep.fit, n, d, c) - 1))
    # Planted noise is 0.006 of about 2.1 nats: five standard deviations are 1.5 %.
    assert np.abs(drawn).max() < 1.5


def test_a_law_of_compute_alone_is_drawn_too(sweep):
    other = sweep.fit.others[0]
    fit = dataclasses.replace(
        sweep.fit, law=other["law"], parameters=other["parameters"], derived={}, bootstrap_samples=[]
    )
    alone = dataclasses.replace(sweep, fit=fit)
    assert DRAW["surface"](alone).axes
    with pytest.raises(NotDrawn, match="no bootstrap"):
        DRAW["extrapolation"](alone)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("extrapolation", {"holdout": None}),
        ("tune", {"tune": None}),
        ("curves", {"curves": ()}),
    ],
)
def test_a_missing_part_is_a_sentence_and_no_figure(sweep, name, change):
    with pytest.raises(NotDrawn) as caught:
        DRAW[name](dataclasses.replace(sweep, **change))
    assert " " in caught.value.what


def test_without_isoflop_there_is_no_isoflop_figure(sweep):
    without = dataclasses.replace(sweep, fit=dataclasses.replace(sweep.fit, isoflop={}))
    with pytest.raises(NotDrawn, match="no budgets"):
        DRAW["isoflop"](without)


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=12),
    st.floats(0.01, 2),
)
def test_spread_keeps_the_order_and_the_gap_and_moves_nothing_that_has_room(positions, gap):
    moved = style.spread(positions, gap)
    order = np.argsort(positions, kind="stable")
    assert np.all(np.diff(np.sort(moved)) >= gap - 1e-9)
    assert np.all(np.diff(moved[order]) >= -1e-9) or len(set(positions)) < len(positions)
    if np.all(np.diff(np.sort(positions)) >= gap):
        assert moved == pytest.approx(positions)


@pytest.mark.parametrize("start", [1.0, 2.05, 3.3, 7.9])
@pytest.mark.parametrize("ratio", [1.1, 1.5, 3, 12, 300, 1e5, 1e8])
def test_logarithmic_axes_have_two_to_nine_ticks_of_different_names_at_any_range(start, ratio):
    axes = style.new_figure(3, 3).subplots()
    axes.set_xlim(start * 1e11, start * 1e11 * ratio)
    style.log_axis(axes.xaxis, style.power)
    low, high = axes.get_xlim()
    inside = [style.power(tick) for tick in axes.get_xticks() if low <= tick <= high]
    assert 2 <= len(set(inside)) == len(inside) <= 9


def test_smoothing_keeps_a_power_of_tokens_as_it_is():
    tokens = np.geomspace(1e4, 1e6, 200)
    curve = Curve("cell", "fit", 1e4, tokens, 6e4 * tokens, 5 - 0.2 * np.log(tokens), (1e6, 6e10, 2.2))
    at, flops, loss = figures._smooth(curve)
    assert loss == pytest.approx(5 - 0.2 * np.log(at), abs=0.002)  # the ridge leans on the curve at its two ends
    assert flops == pytest.approx(6e4 * at, rel=0.001)  # interpolated between rows


def test_a_last_line_without_its_end_is_left_out_and_a_broken_one_before_it_is_told(sweep_copy):
    cell = next(path for path in sorted(sweep_copy.iterdir()) if path.is_dir() and path.name.startswith("fit"))
    metrics = cell / "metrics.jsonl"
    whole = metrics.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    trained = sum(row["kind"] == "train" for row in rows)
    metrics.write_text(whole + '{"kind":"train","st')
    curve = next(curve for curve in read_sweep(sweep_copy).curves if curve.cell == cell.name)
    assert len(curve.tokens) == trained
    metrics.write_text('{"kind":"tra\n' + whole)
    with pytest.raises(UsageError, match=r"line 1 is not JSON.*Delete the cell's folder"):
        read_sweep(sweep_copy)


def test_a_loss_that_was_not_finite_leaves_no_gap_in_the_reading(sweep_copy):
    cell = next(path for path in sorted(sweep_copy.iterdir()) if path.is_dir() and path.name.startswith("fit"))
    with (cell / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"train","step":9999,"tokens":9999,"loss":"nan","lr":0.0}\n')
    curve = next(curve for curve in read_sweep(sweep_copy).curves if curve.cell == cell.name)
    assert np.isfinite(curve.loss).all()
