import json

import numpy as np
import pandas as pd
import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.scaling.approaches import setting
from lm.scaling.fit import fit_table
from lm.scaling.planning.predict import predict
from lm.scaling.result import FitResult

K, P, Q = 1.8, -0.71, 0.31  # near the published law of the learning rate (Li et al. 2025)
BEND = 0.03  # nats per squared e-fold of the rate


def sweep(sizes=(1e8, 3e8, 1e9, 3e9), lengths=(2e9, 1e10, 5e10), steps=5, noise=0.0, seed=0, batches=(1.0,), bend=BEND):
    """Losses over rates on a grid of factors of two, which is not centred on the planted optimum of any cell."""
    random = np.random.default_rng(seed)
    rows = []
    for n in sizes:
        for d in lengths:
            best = K * n**P * d**Q
            nearest = 2.0 ** np.round(np.log2(best))
            for rate in nearest * 2.0 ** (np.arange(steps) - steps // 2):
                for batch in batches:
                    loss = 1.8 + 480 * n**-0.35 + 2100 * d**-0.37 + bend * np.log(rate / best) ** 2
                    loss += 0.02 * np.log(batch) ** 2 + noise * random.standard_normal()
                    rows.append({"n": n, "d": d, "lr": rate, "batch": batch, "loss": loss})
    return pd.DataFrame(rows)


def fit(rows, **options):
    return fit_table(rows, **{"n": "n", "d": "d", "c": None, "optimum_of": "lr", "bootstrap": 200, **options})


def test_an_exact_parabola_gives_the_planted_law():
    result = fit(sweep(), bootstrap=0)
    assert result.law == "optimum_nd"
    assert result.certificate["passed"], result.warnings
    np.testing.assert_allclose(list(result.parameters.values()), [K, P, Q], rtol=1e-6)
    assert [cell["value"] for cell in result.checks["setting"]["cells"]] == pytest.approx(
        [K * n**P * d**Q for n in (1e8, 3e8, 1e9, 3e9) for d in (2e9, 1e10, 5e10)]
    )


def test_noisy_losses_give_exponents_within_their_errors():
    # Noise of 0.5 mnat moves a vertex by some 0.02 e-folds; 12 cells.
    result = fit(sweep(noise=5e-4, seed=3), bootstrap=400)
    for name, truth in (("p", P), ("q", Q)):
        # Four standard errors: one in 16,000.
        assert abs(result.parameters[name] - truth) < 4 * result.standard_errors[name], name
        low, high = result.intervals[name]
        assert low < result.parameters[name] < high


def test_grid_points_alone_would_miss_what_interpolation_finds():
    # The best tried rate is up to sqrt(2) off: its own regression is off by far more than the interpolated one.
    rows = sweep()
    raw = rows.loc[rows.groupby(["n", "d"])["loss"].idxmin()]
    slopes = np.linalg.lstsq(
        np.stack([np.ones(len(raw)), np.log(raw["n"]), np.log(raw["d"])], axis=1), np.log(raw["lr"]), rcond=None
    )[0]
    assert abs(slopes[1] - P) > 0.01
    assert fit(rows, bootstrap=0).parameters["p"] == pytest.approx(P, abs=1e-6)


def test_other_settings_are_at_their_best():
    result = fit(sweep(batches=(0.5, 1.0, 4.0)), bootstrap=0)
    assert result.parameters["p"] == pytest.approx(P, abs=1e-6)
    assert result.points == 12
    assert fit(sweep(batches=(0.5, 1.0, 4.0)), where="batch == 4.0", bootstrap=0).parameters["q"] == pytest.approx(
        Q, abs=1e-6
    )


@pytest.mark.parametrize(("sizes", "lengths", "law"), [
    ((1e9,), (1e9, 4e9, 1.6e10, 6.4e10), "optimum_d"), ((1e8, 3e8, 1e9, 3e9), (1e10,), "optimum_n"),
])  # fmt: skip
def test_what_does_not_vary_has_no_exponent(sizes, lengths, law):
    result = fit(sweep(sizes, lengths), bootstrap=0)
    assert result.law == law
    json.dumps(result.to_json(), allow_nan=False)
    # Linear in its logarithms: a start may be the exact answer, which is no failure where the others come to it.
    assert result.certificate["passed"], result.warnings
    assert list(result.parameters.values())[1] == pytest.approx(P if law == "optimum_n" else Q, abs=1e-6)


def test_a_fixed_ratio_is_refused_unless_one_variable_is_chosen():
    rows = pd.concat([sweep((n,), (20 * n,)) for n in (1e8, 3e8, 1e9, 3e9)])
    with pytest.raises(UsageError, match="optimum_c"):
        fit(rows)
    # K n^p (20 n)^q with c = 120 n^2: half the sum of the exponents.
    assert fit(rows, law="optimum_c", bootstrap=0).parameters["p"] == pytest.approx((P + Q) / 2, abs=1e-6)


def test_a_least_loss_at_the_edge_is_refused_by_name_and_the_others_are_fitted():
    rows = sweep()
    edge = rows["n"].eq(3e9) & rows["d"].eq(2e9)
    best = rows.loc[edge].sort_values("loss")["lr"].iloc[0]
    result = fit(rows[~edge | (rows["lr"] >= best)], bootstrap=0)
    assert result.points == 11
    (refused,) = result.checks["setting"]["refused"]
    assert (refused["n"], refused["d"]) == (3e9, 2e9)
    assert "edge" in refused["reason"]
    assert any("1 of 12 (n, d)" in warning for warning in result.warnings)
    assert result.parameters["p"] == pytest.approx(P, abs=1e-6)


def test_flat_losses_and_too_few_values_are_refused():
    rows = sweep()
    flat = rows.assign(loss=rows["loss"].where(rows["n"] != 1e8, 3.0))
    refused = fit(flat, bootstrap=0).checks["setting"]["refused"]
    assert {(entry["n"], "edge" in entry["reason"]) for entry in refused} == {(1e8, True)}
    two = rows.groupby(["n", "d"]).head(2)
    with pytest.raises(UsageError, match=r"no \(n, d\) has an optimum of 'lr'.*at least 3"):
        fit(two)
    middle = setting.interpolate(np.array([1.0, 2, 4, 8]), np.array([3.1, 3.0, 3.0, 3.1]))
    assert middle.refusal is None
    assert middle.at == pytest.approx(np.sqrt(8))
    with_noise = setting.interpolate(np.array([1.0, 2, 4, 8, 16]), np.array([3.1, 3.0, 3.05, 2.9, 3.3]))
    assert 4 < with_noise.at < 16


def test_the_near_optimal_range_is_where_losses_are_within_a_quarter_of_a_percent():
    rows = sweep((1e9,), (1e10,), steps=9, bend=0.003)
    (cell,) = setting.optima(_points(rows), "lr")[1]["cells"]
    inside = rows.loc[rows["loss"] <= 1.0025 * rows["loss"].min(), "lr"]
    assert cell["near_range"] == [inside.min(), inside.max()]
    assert 1 < len(inside) < 9
    assert cell["near_range"][0] < cell["value"] < cell["near_range"][1]


def _points(rows):
    from lm.scaling import read

    return read.points(rows, read.Columns("n", "d", None, "loss"))


@pytest.mark.parametrize(("options", "words"), [
    ({"optimum_of": "rate"}, "no column 'rate'"),
    ({"law": "hoffmann"}, "'hoffmann' is a law of a loss"),
    ({"optimum_of": None, "law": "optimum_n"}, "'optimum_n' is a law of the optimum of a setting"),
    ({"cluster": "n"}, "not by a column"),
    ({"compare": True}, "compared on losses"),
    ({"counting": True}, "splits no budget"),
])  # fmt: skip
def test_bad_requests_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        fit(sweep(), **options)


def test_a_setting_that_is_not_positive_is_refused_with_the_rows():
    rows = sweep()
    rows.loc[3, "lr"] = 0.0
    with pytest.raises(UsageError, match="not positive in row 4"):
        fit(rows)


def test_the_command_writes_a_fit_that_predicts_the_setting(tmp_path, capsys):
    sweep(noise=2e-4).to_csv(tmp_path / "rates.csv", index=False)
    out = tmp_path / "lr.json"
    assert main(["fit", str(tmp_path / "rates.csv"), "--n", "n", "--d", "d", "--loss", "loss", "--optimum-of", "lr",
                 "--bootstrap", "50", "--out", str(out)]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    assert "optima of lr: 12 (n, d)" in shown
    assert "IsoFLOP" not in shown
    assert "lr = K N^p D^q" in shown
    result = FitResult.load(out)
    found = predict(result, 1e9, 1e10)
    assert found.mean == pytest.approx(K * 1e9**P * 1e10**Q, rel=0.05)
    assert main(["predict", "--fit", str(out), "--n", "1e9", "--d", "1e10"]) == 0
    shown = capsys.readouterr().out
    assert f"lr {found.mean:.5g}" in shown
    assert "nats" not in shown
    assert json.loads(out.read_text())["provenance"]["columns"]["optimum_of"] == "lr"
