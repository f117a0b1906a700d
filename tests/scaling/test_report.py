import base64
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.scaling.pages import markup, report
from lm.scaling.pages.figures import Drawn
from lm.scaling.pages.finished import read_sweep
from lm.scaling.pages.report import write_report
from lm.scaling.pages.style import Format
from tests.scaling.browser import Page

IMAGES = """Promise.all([...document.images].map(image => image.decode().then(() => [
    image.closest('figure').id, image.naturalWidth, image.naturalHeight, image.getBoundingClientRect().width])))"""


@pytest.fixture(scope="module")
def written(synthetic_sweep, tmp_path_factory) -> Path:
    return write_report(shutil.copytree(synthetic_sweep, tmp_path_factory.mktemp("written") / "sweep"))


@pytest.fixture(scope="module")
def page(written) -> str:
    return written.read_text()


def _words(folder: Path, *figures: Drawn) -> str:
    """The page without the time that drawing takes."""
    return report.page(read_sweep(folder), figures, Format.PNG)


def _change(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _without_images(page: str) -> str:
    return re.sub(r'src="data:[^"]*"', "", page)


@pytest.fixture
def chromium():
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium on this machine (Debian's package 'chromium')")
    return found


@pytest.fixture
def browser(chromium, tmp_path):
    opened = Page(chromium, tmp_path / "profile")
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("image_format", [Format.PNG, Format.SVG])
def test_a_browser_draws_every_figure_and_complains_of_nothing(browser, sweep_copy, image_format):
    browser.open(write_report(sweep_copy, image_format))
    images = browser.evaluate(IMAGES)
    names = ["curves", "isoflop", "surface", "extrapolation", "predicted", "tune", "approaches"]
    assert [name for name, *_ in images] == names
    assert all(min(sizes) > 200 for _, *sizes in images)
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390, "a telephone scrolls tables, not the page"
    light = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.slow
def test_the_browser_test_would_see_a_figure_that_is_not_drawn(browser, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text('<figure id="a"><img src="data:image/png;base64,AAAA"></figure><script>console.log(1)</script>')
    browser.open(broken)
    with pytest.raises(AssertionError, match="exceptionDetails"):
        browser.evaluate(IMAGES)
    assert browser.complaints


@pytest.mark.slow
def test_the_page_needs_nothing_but_itself(page):
    text = _without_images(page)
    assert not re.search(r"<script|<link|<iframe|@import|url\(|https?://|src=", text)
    assert "default-src 'none'" in text


def test_embedded_figures_are_the_files_in_the_folder(page, written):
    embedded = re.findall(r'id="(\w+)">.*?src="data:image/png;base64,([^"]+)"', page)
    assert len(embedded) == 7
    for name, content in embedded:
        assert base64.b64decode(content) == (written.parent / "figures" / f"{name}.png").read_bytes()


def test_warnings_come_before_every_number_and_a_miss_is_one_of_them(sweep_copy):
    _change(sweep_copy, "fit.json", warnings=["<b>E</b> not identified"])
    _change(sweep_copy, "holdout.json", inside=False)
    page = _words(sweep_copy)
    at = page.index("&lt;b&gt;E&lt;/b&gt; not identified")
    assert (
        page.index('role="alert"') < at < page.index("outside its 95 % prediction interval") < page.index('class="law"')
    )
    assert "<b>E</b> not" not in page
    assert "2 warnings" in page


def test_the_answer_is_in_the_text(page, synthetic_sweep):
    fit = json.loads((synthetic_sweep / "fit.json").read_text())
    held_out = json.loads((synthetic_sweep / "holdout.json").read_text())
    for value in fit["parameters"].values():
        assert markup.number(value) in page
    assert f"{held_out['predicted']:.3f}" in page
    assert f"{held_out['measured']:.3f}" in page
    for part in fit["isoflop"]["refused"]:
        assert part["reason"] in page
    for shown in ("flops_matmul", "attention counted causally", "scaled_gradient", fit["provenance"]["table_sha256"]):
        assert shown in page
    cells = (synthetic_sweep / "table.csv").read_text().splitlines()[1:]
    assert all(f"<td>{line.split(',')[0]}</td>" in page for line in cells)


@pytest.mark.parametrize(
    ("lacking", "sentence"),
    [
        ("holdout.json", "has not been tested beyond the cells"),
        ("tune.json", "had no tune stage"),
        ("ladder.json", "No ladder.json"),
    ],
)
def test_a_missing_part_is_said_in_a_sentence(sweep_copy, lacking, sentence):
    (sweep_copy / lacking).unlink()
    assert sentence in _words(sweep_copy)


def test_a_figure_that_is_not_drawn_leaves_its_reason(synthetic_sweep):
    absent = Drawn("tune", "Tune stage", "caption", None, b"", 0.0, "The ladder had none.")
    assert "<h3>Tune stage</h3><p>The ladder had none.</p>" in _words(synthetic_sweep, absent)


def test_a_cell_without_metrics_is_named(sweep_copy):
    cell = next(path for path in sorted(sweep_copy.iterdir()) if path.is_dir() and path.name.startswith("fit"))
    shutil.rmtree(cell)
    assert f"for want of metrics.jsonl: {cell.name}." in _words(sweep_copy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no such sweep folder"),
        (lambda folder: (folder / "table.csv").unlink(), "no run table"),
        (lambda folder: (folder / "table.csv").write_text(""), "not a CSV table"),
        (lambda folder: (folder / "table.csv").write_text("n,d,loss\n1,2,3\n"), "without cell, role, budget"),
        (
            lambda folder: (folder / "table.csv").write_text("cell,role,budget\na,fit,1\n"),
            "the table lacks: params_total",
        ),
        (lambda folder: (folder / "fit.json").unlink(), "has no fit"),
        (lambda folder: (folder / "fit.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "fit.json").write_text("{}"), "is missing"),
        (lambda folder: (folder / "holdout.json").write_text("[1"), "not JSON"),
        (lambda folder: (folder / "holdout.json").write_text("{}"), "without n, d, c, predicted"),
        (lambda folder: (folder / "tune.json").write_text("{}"), "without rows, rule"),
        (lambda folder: (folder / "tune.json").write_text("[1]"), "not a JSON object"),
    ],
)
def test_an_incomplete_folder_is_one_clear_line_and_exit_code_2(sweep_copy, damage, message, capsys):
    damage(sweep_copy)
    assert main(["report", str(sweep_copy)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert str(sweep_copy) in told
    assert told.count("\n") == 1
    assert not (sweep_copy / "report.html").exists()


def test_a_fit_with_a_derived_column_is_refused(sweep_copy):
    fit = json.loads((sweep_copy / "fit.json").read_text())
    fit["provenance"]["columns"]["c"] = None
    (sweep_copy / "fit.json").write_text(json.dumps(fit))
    with pytest.raises(UsageError, match="derived one of n, d and c"):
        read_sweep(sweep_copy)


@pytest.mark.slow
def test_the_command_says_where_the_report_lies_and_pdf_embeds_svg(sweep_copy, capsys):
    assert main(["report", str(sweep_copy), "--format", "pdf"]) == 0
    assert capsys.readouterr().out == f"report: {sweep_copy / 'report.html'}\n"
    assert sorted(path.suffix for path in (sweep_copy / "figures").iterdir()) == [".pdf"] * 7
    assert (sweep_copy / "report.html").read_text().count("data:image/svg+xml;base64,") == 7


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (0.34161, "0.3416"),
        (-0.5, "−0.5"),
        (38357.23, "38,360"),
        (246240, "246,240"),
        (2.4e11, "2.4 × 10<sup>11</sup>"),
        (3e-9, "3 × 10<sup>−9</sup>"),
    ],
)
def test_numbers_read_well(value, shown):
    assert markup.number(value) == shown


def test_the_formula_is_set_with_its_exponents():
    assert markup.formula("E + A / N^alpha + B / D^beta") == "E + A / N<sup>α</sup> + B / D<sup>β</sup>"


def test_a_baseline_stands_among_the_cells_and_the_law_says_nothing_of_it(sweep_copy):
    table = pd.read_csv(sweep_copy / "table.csv")
    counted = table.iloc[:1].assign(cell="counted", role="baseline", params_total=0, flops_matmul=0)
    pd.concat([table, counted]).to_csv(sweep_copy / "table.csv", index=False)
    [row] = re.findall(r"<tr><td>counted</td>.*?</tr>", _words(sweep_copy), re.DOTALL)
    assert "baseline" in row
    assert "nan" not in row
    assert row.count("<td></td>") == 2  # prediction and error
