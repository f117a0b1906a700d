import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from lm.cli import main
from lm.scaling.table import NAMES
from tests.scaling import planted


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs.csv"
    planted.table().to_csv(path, index=False)
    return path


def test_fit_then_predict(runs, tmp_path, capsys):
    out = tmp_path / "fit.json"
    command = ["fit", str(runs), "--n", "n", "--d", "d", "--loss", "loss", "--bootstrap", "60", "--pin", "E=1.8",
               "--where", "n > 1e7", "--objective", "huber_log:1e-2", "--seed", "2", "--out", str(out)]  # fmt: skip
    assert main(command) == 0
    assert "certificate holds" in capsys.readouterr().out
    value = json.loads(out.read_text())
    assert value["objective"]["delta"] == 1e-2
    assert value["parameters"]["E"] == pytest.approx(1.8)
    assert main(["predict", "--fit", str(out), "--n", "1e9", "--d", "2e10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction_interval"][0] < found["mean"] < found["prediction_interval"][1]


def test_own_table_needs_no_flags_and_keeps_the_holdout_out(tmp_path, capsys):
    rows = planted.own(planted.table())
    rows.loc[[98, 99], "role"] = ["holdout", "tune"]
    rows.to_csv(tmp_path / "table.csv", index=False)
    assert main(["fit", str(tmp_path / "table.csv"), "--bootstrap", "20", "--out", str(tmp_path / "fit.json")]) == 0
    assert "columns of our own run table" in capsys.readouterr().out
    assert json.loads((tmp_path / "fit.json").read_text())["points"] == 98


@pytest.mark.parametrize(("arguments", "words"), [
    (["absent.csv"], "no such table"),
    (["{runs}", "--n", "nn", "--d", "d"], "Did you mean 'n'"),
    (["{runs}"], "params_total"),
    (["{runs}", "--n", "n"], "two of"),
    (["{runs}", "--n", "n", "--d", "d", "--law", "hofman"], "hoffmann"),
    (["{runs}", "--n", "n", "--d", "d", "--objective", "l1"], "no objective"),
    (["{runs}", "--n", "n", "--d", "d", "--pin", "E"], "NAME=VALUE"),
    (["{runs}", "--n", "n", "--d", "d", "--pin", "Q=1"], "no parameter 'Q'"),
    (["{runs}", "--n", "n", "--d", "d", "--pin", "E=1", "--pin", "E=2"], "'E' is pinned twice"),
    (["{runs}", "--n", "n", "--d", "d", "--cluster", "run"], "no column 'run'"),
    (["{runs}", "--n", "n", "--d", "d", "--where", "n >"], "does not evaluate"),
    (["{runs}", "--n", "n", "--d", "d", "--bootstrap", "-1"], "resamples"),
    (["{runs}", "--n", "n", "--d", "d", "--bootstrap", "1"], "at least 20"),
    (["{runs}", "--n", "n", "--d", "d", "--others", "kaplan_n,zz"], "--others: there is no law 'zz'"),
    (["{runs}", "--n", "n", "--d", "d", "--budget", "-1"], "budget"),
    (["{runs}", "--n", "n", "--d", "d", "--seed", "-1"], "seed"),
    (["{runs}", "--n", "n", "--d", "d", "--out", "{folder}"], "is a folder"),
])  # fmt: skip
def test_bad_requests_end_in_one_line_and_exit_code_2(runs, tmp_path, capsys, arguments, words):
    out = tmp_path / "fit.json"
    assert main(["fit", "--out", str(out), *[part.format(runs=runs, folder=tmp_path) for part in arguments]]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.slow
def test_neither_jax_nor_flax_nor_orbax_is_loaded(runs, tmp_path):
    out = str(tmp_path / "fit.json")
    fit = ["fit", str(runs), "--n", "n", "--d", "d", "--bootstrap", "20", "--out", out]
    predict = ["predict", "--fit", out, "--n", "1e9", "--d", "1e10"]
    program = (
        f"import sys; from lm.cli import main; assert main({fit}) == 0 and main({predict}) == 0\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'orbax', 'optax', 'grain', 'matplotlib'}\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & heavy\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)


def test_what_has_nothing_to_override_is_said_once(runs, capsys):
    assert main(["fit", str(runs), "--config.seed=1"]) == 2
    assert capsys.readouterr().err.count("lm fit:") == 1


def test_predict_refuses_in_one_line_without_a_doubled_name(runs, tmp_path, capsys):
    out = tmp_path / "fit.json"
    assert main(["fit", str(runs), "--n", "n", "--d", "d", "--bootstrap", "20", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["predict", "--fit", str(out), "--n", "1e-300", "--d", "1e-300"]) == 2
    assert capsys.readouterr().err == "lm predict: c=0 is not a positive number\n"


def finished(folder, cell, **values):
    run = folder / cell
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    row = {"zebra": 1, "loss": 3.0, "cell": cell, "tokenizer": "aa", "params_total": 1000, **values}
    (run / "result.json").write_text(json.dumps(row))


def test_table_joins_in_the_declared_order_and_names_the_unfinished(tmp_path, capsys):
    finished(tmp_path / "one", "c1")
    finished(tmp_path / "two", "c2", loss=2.5)
    finished(tmp_path / "two-again", "c2", loss=2.5)
    (tmp_path / "one" / "c3").mkdir()
    (tmp_path / "one" / "c3" / "config.json").write_text("{}")
    out = tmp_path / "table.csv"
    assert main(["table", str(tmp_path), "--out", str(out)]) == 0
    assert "unfinished" in capsys.readouterr().err
    table = pd.read_csv(out)
    assert table["cell"].tolist() == ["c1", "c2"]
    known = [name for name in table.columns if name in NAMES]
    assert table.columns.tolist() == [*sorted(known, key=NAMES.index), "zebra"]
    np.testing.assert_array_equal(table["loss"], [3.0, 2.5])


def test_table_gives_a_cell_that_serves_twice_the_role_and_place_of_the_sweeps_own_table(tmp_path, capsys):
    for cell in ("12", "34", "56"):
        finished(tmp_path / "sweep", cell, role="tune", budget=1e9)
    (tmp_path / "sweep" / "table.csv").write_text("cell,role,budget\n56,tune,1e9\n12,fit,2e9\n")
    assert main(["table", str(tmp_path / "sweep"), "--out", str(tmp_path / "joined.csv")]) == 0
    table = pd.read_csv(tmp_path / "joined.csv", dtype={"cell": str})
    assert table["cell"].tolist() == ["56", "12", "34"]
    assert table["role"].tolist() == ["tune", "fit", "tune"]
    assert table["budget"].tolist() == [1e9, 2e9, 1e9]


def test_table_refuses_mixed_fingerprints_unless_asked(tmp_path, capsys):
    finished(tmp_path, "c1")
    finished(tmp_path, "c2", tokenizer="bb")
    assert main(["table", str(tmp_path)]) == 2
    assert "never compared" in capsys.readouterr().err
    assert main(["table", str(tmp_path), "--mixed"]) == 0


@pytest.mark.parametrize("kind", ["absent", "empty", "broken", "bare"])
def test_table_of_nothing_is_refused(tmp_path, capsys, kind):
    folder = tmp_path / "sweep"
    if kind != "absent":
        folder.mkdir()
    if kind in ("broken", "bare"):
        finished(folder, "c0")
        finished(folder, "c1")
        (folder / "c1" / "result.json").write_text("{" if kind == "broken" else "{}")
    assert main(["table", str(folder)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert ("c1/result.json: is damaged" in told) == (kind in ("broken", "bare"))
