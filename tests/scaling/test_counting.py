"""The same runs under every counting rule."""

import json

import numpy as np
import pandas as pd
import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.scaling.checks import counting
from lm.scaling.fit import fit_table
from lm.scaling.laws.power import HOFFMANN
from lm.scaling.pages.describe import describe

EPOCH = (1.8172, 482.01, 2085.43, 0.3478, 0.3658)
PUBLISHED = (1.6934, 406.4, 410.7, 0.33917084, 0.2849083)


def shapes(layers=(4, 6, 8, 12, 16), widths=(128, 192, 256, 384, 512), vocabulary=32_000, length=512) -> pd.DataFrame:
    """Models whose head is most of the small ones, each on five lengths of data, under a law of their own N."""
    layer, width = (np.array(part, float) for part in (layers, widths))
    rows = pd.DataFrame({"n_layer": np.repeat(layer, 5), "d_model": np.repeat(width, 5)})
    rows["vocab_size"], rows["context_length"] = vocabulary, length
    rows["params_nonembedding"] = 12 * rows["n_layer"] * rows["d_model"] ** 2
    rows["params_total"] = rows["params_nonembedding"] + 2 * vocabulary * rows["d_model"]
    rows["tokens"] = np.tile(np.geomspace(2e8, 2e10, 5), len(layer))
    return rows


def losses(rows, n, parameters):
    return HOFFMANN.predict(np.array(parameters), {"n": rows[n].to_numpy(), "d": rows["tokens"].to_numpy()})


def counted(rows, **options):
    return fit_table(
        rows, **{"n": "params_total", "d": "tokens", "c": None, "bootstrap": 0, "counting": True, **options}
    )


def by_rule(result):
    return {row["rule"]: row for row in result.checks["counting"]["rules"]}


@pytest.mark.slow
@pytest.mark.parametrize(("parameters", "local", "limit"), [(EPOCH, 0.774, 0.513), (PUBLISHED, 0.739, 0.456)],
                         ids=["epoch", "hoffmann"])  # fmt: skip
def test_counting_no_embeddings_turns_chinchilla_into_kaplan(parameters, local, limit):
    """Pearce & Song 2024: N_T = N + 47491 N^(1/3), 768 to 1.5e9 parameters, C from 10^12.95 to 10^20.7."""
    sizes = np.geomspace(300, 5e9, 20_001)
    everything = sizes + 47_491 * np.cbrt(sizes)
    rows = []
    for budget in np.logspace(12.95, 20.7, 40):
        curve = HOFFMANN.predict(np.array(parameters), {"n": everything, "d": budget / 6 / sizes})
        near = sizes[curve.argmin()] * np.geomspace(0.8, 1.25, 5)
        rows.append(pd.DataFrame({"params_nonembedding": near, "budget": budget, "tokens": budget / 6 / near}))
    table = pd.concat(rows, ignore_index=True)
    table["params_total"] = table["params_nonembedding"] + 47_491 * np.cbrt(table["params_nonembedding"])
    table["loss"] = losses(table, "params_total", parameters)
    rules = by_rule(counted(table, checks=False))
    # Published as .78 and .74. The optima are no straight line, so that their spacing moves the slope by a thousandth.
    assert rules["kaplan"]["isoflop"]["value"] == pytest.approx(local, abs=1.5e-3)
    assert rules["kaplan"]["spread"] == pytest.approx(1)
    # All parameters counted, the runs lie on the law itself.
    assert rules["6nd"]["a"]["value"] == pytest.approx(limit, abs=1e-3)


def test_the_rule_under_which_a_law_was_planted_finds_it_and_the_others_do_not():
    rows = shapes()
    truth = (1.8, 480.0, 2100.0, 0.40, 0.30)
    rows["loss"] = losses(rows, "params_nonembedding", truth)
    result = counted(rows, bootstrap=100)
    rules = by_rule(result)
    assert list(rules) == [rule.name for rule in counting.RULES]
    assert rules["kaplan"]["a"]["value"] == pytest.approx(0.3 / 0.7, abs=1e-5)
    assert abs(rules["6nd"]["a"]["value"] - 0.3 / 0.7) > 0.05
    assert any("counting rule alone moves a" in warning for warning in result.warnings)
    text = describe(result)
    assert "counting rules (the same runs" in text
    assert "N without embeddings and head" in text


def test_flops_of_a_shape():
    rows = shapes().assign(loss=3.0)
    found = fit_points_of(rows)
    n, d = rows["params_nonembedding"] + rows["vocab_size"] * rows["d_model"], rows["tokens"]
    pairs = rows["n_layer"] * rows["d_model"]
    rules = {rule.name: counting.recount(found, rule) for rule in counting.RULES}
    np.testing.assert_allclose(rules["head"].c, 6 * n * d)
    np.testing.assert_allclose(rules["full"].c, 6 * n * d + 12 * pairs * 512 * d)
    np.testing.assert_allclose(rules["causal"].c, 6 * n * d + 6 * pairs * 513 * d)
    np.testing.assert_allclose(rules["full_embeddings"].n, rows["params_total"])
    # Without their column the non-embedding parameters follow from the shape, with 4 D hidden units where none is told.
    plain = fit_points_of(rows.drop(columns="params_nonembedding"))
    np.testing.assert_allclose(counting.recount(plain, counting.RULES[1]).n, rows["params_nonembedding"])
    # Our own table has counted both kinds of attention itself.
    own = fit_points_of(rows.assign(flops_matmul=1e20, flops_matmul_full=2e20))
    assert {float(c) for c in counting.recount(own, counting.RULES[3]).c} == {1e20}
    assert {float(c) for c in counting.recount(own, counting.RULES[5]).c} == {2e20}


def fit_points_of(rows):
    from lm.scaling import read

    return read.points(rows, read.Columns("params_total", "tokens", None, "loss"))


def test_columns_that_are_missing_are_named():
    rows = shapes()
    rows["loss"] = HOFFMANN.predict(
        np.array(EPOCH), {"n": rows["params_total"].to_numpy(), "d": rows["tokens"].to_numpy()}
    )
    stranger = rows[["params_total", "tokens", "loss"]].rename(columns={"params_total": "n"})
    with pytest.raises(UsageError, match="Add columns of the shapes") as refusal:
        counted(stranger, n="n")
    assert str(refusal.value).count("no column 'n_layer'") == 1
    some = counted(rows.drop(columns=["context_length"]), checks=False)
    assert list(by_rule(some)) == ["6nd", "kaplan", "head"]
    refused = some.checks["counting"]["refused"]
    assert {row["rule"] for row in refused} == {"causal", "causal_embeddings", "full", "full_embeddings"}
    assert all("context_length" in row["reason"] for row in refused)
    with pytest.raises(UsageError, match="splits no budget"):
        counted(rows, law="kaplan_n")


def test_a_damaged_shape_is_refused_with_its_row():
    rows = shapes()
    rows["loss"] = HOFFMANN.predict(
        np.array(EPOCH), {"n": rows["params_total"].to_numpy(), "d": rows["tokens"].to_numpy()}
    )
    rows.loc[2, "vocab_size"] = -1
    reasons = [row["reason"] for row in counted(rows, checks=False).checks["counting"]["refused"]]
    assert any("not positive in row 3" in reason and "vocab_size" in reason for reason in reasons)


def test_lm_fit_counting_writes_and_prints_the_rules(tmp_path, capsys):
    rows = shapes()
    rows["loss"] = losses(rows, "params_total", EPOCH)
    rows.to_csv(tmp_path / "runs.csv", index=False)
    words = [
        "fit",
        str(tmp_path / "runs.csv"),
        "--n",
        "params_total",
        "--d",
        "tokens",
        "--bootstrap",
        "20",
        "--counting",
    ]
    assert main([*words, "--out", str(tmp_path / "fit.json")]) == 0
    made = json.loads((tmp_path / "fit.json").read_text())["checks"]["counting"]
    assert [row["rule"] for row in made["rules"]] == [rule.name for rule in counting.RULES]
    assert "counting rules (the same runs" in capsys.readouterr().out
    rows[["params_total", "tokens", "loss"]].to_csv(tmp_path / "runs.csv", index=False)
    assert main(words) == 2
    assert "there is no column 'n_layer'" in capsys.readouterr().err
