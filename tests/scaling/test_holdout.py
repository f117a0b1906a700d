import json

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.scaling import read
from lm.scaling.checks import coverage, holdout
from lm.scaling.fitting.bootstrap import Bootstrap, Resampling
from lm.scaling.fitting.objective import objective_named
from lm.scaling.laws import law_named
from tests.scaling import planted

BY_POINT = Bootstrap(0, Resampling.POINT, 0)


def score(rows, law="hoffmann", others=(), objective="huber_log", columns=("n", "d", None), spec=BY_POINT, **options):
    found = read.points(rows, read.Columns(*columns, "loss"))
    laws = [law_named(name) for name in others]
    return holdout.analyse(
        found, law_named(law), laws, objective_named(objective), pins={}, spec=spec, **options
    )  # fmt: skip


def isoflop(noise=0.005, seed=0):
    return planted.table(coverage.isoflop(6, 8), noise=noise, seed=seed)


# Besiroglu et al. 2024: a fit below each cut-off predicts all above; mean and mean absolute error in % of the loss.
PUBLISHED = {
    "huber_log": [(136, 104, None, 0.89), (177, 63, None, 1.00), (217, 23, -0.02, 1.05)],
    "log_least_squares": [(136, 104, None, 1.11), (177, 63, None, 1.12), (217, 23, 0.44, 1.18)],
}


@pytest.mark.parametrize("objective", PUBLISHED)
def test_besiroglu(shared, objective):
    rows = read.read_table(shared / "published-fits" / "besiroglu" / "svg_extracted_data.csv")
    rows = rows.sort_values("loss").iloc[:-5].sort_index()
    found = score(rows, objective=objective, columns=("Model Size", None, "Training FLOP"), cutoffs=[1e20, 3e20, 1e21])
    (entry,) = found["laws"]
    for cut, at, (below, above, mean, absolute) in zip(entry["cuts"], found["cuts"], PUBLISHED[objective], strict=True):
        assert (at["below"], at["above"]) == (below, above)
        # Half a unit of the last printed digit.
        assert cut["mean_absolute_error"] == pytest.approx(absolute, abs=0.005)
        assert mean is None or cut["mean_error"] == pytest.approx(mean, abs=0.005)
        assert cut["certified"]


@pytest.mark.slow
def test_the_planted_law_is_ranked_first_whatever_fits_better_in_sample():
    found = score(isoflop(), "saturating_c", ["hoffmann", "kaplan_c", "hoffmann"])
    names = [entry["law"] for entry in found["laws"]]
    assert sorted(names) == ["hoffmann", "kaplan_c", "saturating_c"]
    assert names[0] == "hoffmann"
    scores = [entry["score"] for entry in found["laws"]]
    assert scores == sorted(scores)
    # The noise of a run is 0.5 %: a right law misses by sqrt(2 / pi) of it and by its own error; the others, which do
    # not read n and d apart, by the depth of the IsoFLOP curves.
    assert 0.3 < scores[0] < 0.5 * scores[1]


def test_the_cut_offs_are_the_upper_budgets_and_nothing_of_a_budget_is_on_both_sides():
    rows = isoflop()
    found = score(rows)
    budgets = np.geomspace(1e18, 1e21, 6)
    assert [cut["flop"] for cut in found["cuts"]] == pytest.approx(list(budgets[2:]))
    assert [(cut["below"], cut["above"]) for cut in found["cuts"]] == [(16, 32), (24, 24), (32, 16), (40, 8)]
    assert found["laws"][0]["cuts"][3]["worst_extrapolation"] == pytest.approx(budgets[5] / budgets[4])


def test_a_grid_without_budgets_is_cut_at_quantiles():
    rows = planted.table(coverage.grid(10, 10)).sample(frac=1, random_state=0)
    found = score(rows)
    assert [cut["below"] for cut in found["cuts"]] == pytest.approx([50, 70, 90], abs=3)


@pytest.mark.slow
def test_new_runs_lie_in_their_prediction_interval_as_often_as_it_says():
    inside = [cut["inside"] for seed in range(6) for cut in score(isoflop(seed=seed))["laws"][0]["cuts"][2:]]
    # 6 tables, 16 and 8 runs each; runs of one table share the error of its fit.
    assert 0.88 <= np.mean(inside) <= 0.99


def test_a_run_that_reaches_above_the_cut_off_is_not_fitted_below_it():
    rows = isoflop()
    # Each run has an earlier row, at the tokens of the budget below.
    early = rows.assign(d=rows["d"] / 4, run=np.arange(len(rows)))
    table = early.assign(d=rows["d"]).merge(early, how="outer").sort_values(["d", "run"])
    clusters = read.cluster_codes(table, "run")
    found = score(table, spec=Bootstrap(0, Resampling.CLUSTER, 0, clusters))
    c = 6 * table["n"].to_numpy() * table["d"].to_numpy()
    for cut in found["cuts"]:
        reached = table.loc[c >= cut["flop"], "run"]
        assert cut["below"] == int((~table["run"].isin(reached)).sum())
        assert cut["below"] < int((c < cut["flop"]).sum())


def test_computes_that_differ_by_rounding_are_on_one_side():
    n = np.geomspace(1e7, 1e9, 9)
    one = planted.table((n, 1e18 / 6 / n))
    assert len(np.unique(6 * one["n"] * one["d"])) > 1
    with pytest.raises(UsageError, match="one compute budget: nothing to hold out"):
        score(one, "saturating_n", ["kaplan_n"])
    # Three budgets of three runs are too few to be cut as budgets: the quantiles of compute lie among equal ones.
    c = np.repeat([1e18, 1e19, 1e20], 3)
    three = planted.table((np.tile(n[::4], 3), c / 6 / np.tile(n[::4], 3)))
    cuts = score(three, "kaplan_n")["cuts"]
    assert {cut["below"] for cut in cuts} <= {3, 6}


def test_too_few_points_below_every_cut_off_are_refused():
    with pytest.raises(UsageError, match="no cut-off of compute leaves 10 points below it"):
        score(planted.table(coverage.isoflop(2, 5)).iloc[:9])


def test_a_law_that_a_cut_off_cannot_fit_is_listed_last_with_the_reason():
    below, above = (np.full(12, 1e8), np.geomspace(1e9, 8e9, 12)), coverage.grid(4, 4)
    n, d = np.concatenate([below[0], above[0] * 100]), np.concatenate([below[1], above[1]])
    rows = planted.table((n, d))
    # Below the cut-off all runs have one size: an exponent in n is not in those data.
    found = score(rows, "hoffmann", ["saturating_d"], cutoffs=[5e18])
    assert [entry["law"] for entry in found["laws"]] == ["saturating_d", "hoffmann"]
    assert found["laws"][1]["score"] is None
    assert "same n" in found["laws"][1]["cuts"][0]["refused"]
    assert any("refused: every run has the same n" in line for line in holdout.lines(found))


@pytest.mark.slow
def test_lm_fit_prints_and_keeps_the_scores(tmp_path, capsys):
    isoflop().to_csv(tmp_path / "runs.csv", index=False)
    out = tmp_path / "fit.json"
    told = ["fit", str(tmp_path / "runs.csv"), "--n", "n", "--d", "d", "--bootstrap", "20", "--out", str(out)]
    assert main([*told, "--holdout", "hoffmann_tied,kaplan_c"]) == 0
    shown = capsys.readouterr().out
    assert "hold-out by compute, huber_log" in shown
    assert "is not checked" in shown  # no column names corpus, tokenizer or evaluation set
    kept = json.loads(out.read_text())["checks"]["holdout"]
    assert {entry["law"] for entry in kept["laws"]} == {"hoffmann", "hoffmann_tied", "kaplan_c"}
    assert main([*told, "--holdout", "hofmann"]) == 2
    assert "no law 'hofmann'" in capsys.readouterr().err
    assert {law.name for law in holdout.default_forms(law_named("kaplan_n"))} == {
        name for name in holdout.FORMS if "optimum" not in name
    }
