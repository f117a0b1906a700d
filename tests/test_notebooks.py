"""Every notebook runs from top to bottom in a clean kernel: on planted truth, published data or a run of its own."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.scaling.synthetic import write_sweep

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
SCREEN = 40  # lines


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def _lines(cell) -> int:
    """Lines of text that a cell put out; a figure counts none."""
    streams = [output["text"] for output in cell.outputs if output.output_type == "stream"]
    values = [output["data"].get("text/plain", "") for output in cell.outputs if "data" in output]
    return sum(len(text.splitlines()) for text in [*streams, *values])


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_notebooks_are_stored_without_outputs_and_in_short_cells(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert max(len(cell.source.splitlines()) for cell in code) <= 12


@pytest.mark.slow
def test_notebooks_run_and_no_output_is_longer_than_a_screen(notebook, tmp_path, monkeypatch, request):
    if any("LM_SHARED" in cell.source for cell in notebook.cells):
        monkeypatch.setenv("LM_SHARED", str(request.getfixturevalue("shared")))
    monkeypatch.setenv("LM_SWEEP", str(write_sweep(tmp_path / "sweep")))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert max(_lines(cell) for cell in code) <= SCREEN
    assert not any(output.get("name") == "stderr" for cell in code for output in cell.outputs)
    for cell in code:
        drawn = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        draws = cell.source.startswith("figures.") or "plt.subplots(" in cell.source
        assert len(drawn) == draws, cell.source
    assert _lines(code[-1]) > 0
