import json

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.checks import coverage
from lm.scaling.fit import _fit_warnings, fit_table
from lm.scaling.fitting.bootstrap import Interval, Resampling
from lm.scaling.pages.describe import describe
from lm.scaling.result import FitResult
from tests.scaling import planted


def fit(rows, **options):
    return fit_table(rows, **{"n": "n", "d": "d", "c": None, "bootstrap": 100, **options})


def test_a_planted_law_is_recovered_within_its_errors():
    result = fit(planted.table(seed=4), bootstrap=400)
    assert result.certificate["passed"], result.warnings
    for (name, value), truth in zip(result.parameters.items(), planted.PARAMETERS, strict=True):
        # Four standard errors: one in 16,000.
        assert abs(value - truth) < 4 * result.standard_errors[name], name
        low, high = result.intervals[name]
        assert low < value < high


def test_the_result_survives_json_and_a_file(tmp_path):
    result = fit(planted.table(), others=["hoffmann_tied", "kaplan_n"])
    text = json.dumps(result.to_json(), allow_nan=False)
    assert FitResult.from_json(json.loads(text)) == result
    result.save(tmp_path / "fit.json")
    assert FitResult.load(tmp_path / "fit.json") == result
    assert [other["law"] for other in result.others] == ["hoffmann_tied", "kaplan_n"]
    np.testing.assert_array_equal(result.samples.shape, (100, 5))


def test_contract_fields_are_there():
    result = fit(planted.table(), seed=3, pins={"E": 1.8}, where="n > 1.5e7", command="lm fit runs.csv")
    value = result.to_json()
    assert set(value["objective"]) == {"name", "delta", "over", "value"}
    assert value["points"] == 90
    made = value["provenance"]
    assert made["seed"] == 3
    assert made["pins"] == {"E": 1.8}
    assert made["where"] == "n > 1.5e7"
    assert made["rows"] == 100
    assert made["command"] == "lm fit runs.csv"
    assert len(made["table_sha256"]) == 64
    assert made["bootstrap"] == {"kind": "point", "resamples": 100, "interval": "percentile", "level": 0.95}
    assert {"budgets", "refused", "exponents"} <= set(value["isoflop"])
    assert value["parameters"]["E"] == pytest.approx(1.8, rel=1e-12)


def test_same_seed_same_fit_and_another_seed_another_bootstrap():
    rows = planted.table()
    one, two = fit(rows, seed=1, bootstrap=20), fit(rows, seed=2, bootstrap=20)
    assert one == fit(rows, seed=1, bootstrap=20)
    assert one.parameters == two.parameters
    assert one.bootstrap_samples != two.bootstrap_samples


def test_row_order_does_not_matter_for_the_answer():
    rows = planted.table()
    shuffled = rows.sample(frac=1, random_state=0)
    again = fit(shuffled, bootstrap=0).parameters
    for name, value in fit(rows, bootstrap=0).parameters.items():
        # Sums in another order: the optimum is flat to about half the digits.
        assert again[name] == pytest.approx(value, rel=1e-6)


def test_derived_optima_follow_from_the_parameters():
    result = fit(planted.table(), budgets=[1e20, 1e24])
    alpha, beta = result.parameters["alpha"], result.parameters["beta"]
    assert result.derived["a"]["value"] == pytest.approx(beta / (alpha + beta))
    assert [row["budget"] for row in result.derived["optimum"]] == [1e20, 1e24]
    row = result.derived["optimum"][1]
    assert 6 * row["n"]["value"] * row["d"]["value"] == pytest.approx(1e24)
    assert row["tokens_per_parameter"]["interval"][0] < row["tokens_per_parameter"]["value"]


def test_the_kind_of_resampling_is_named():
    rows = planted.table()
    assert fit(rows).provenance["bootstrap"]["kind"] == "point"
    assert fit(rows, resampling=Resampling.RESIDUAL).provenance["bootstrap"]["kind"] == "residual"
    assert fit(rows.assign(run=np.arange(100) // 2), cluster="run").provenance["bootstrap"]["kind"] == "cluster"
    with pytest.raises(UsageError, match="cluster"):
        fit(rows, resampling=Resampling.CLUSTER)


@pytest.mark.slow
def test_clusters_of_copies_widen_the_interval():
    # Five copies of each point are no new information: by point the errors shrink by sqrt(5), by cluster they must not.
    rows = planted.table(seed=9)
    copies = rows.loc[rows.index.repeat(5)].assign(run=np.repeat(np.arange(100), 5))
    alone = fit(rows, bootstrap=300).standard_errors["alpha"]
    by_point = fit(copies, bootstrap=300).standard_errors["alpha"]
    by_cluster = fit(copies, bootstrap=300, cluster="run").standard_errors["alpha"]
    assert by_cluster == pytest.approx(alone, rel=0.25)
    assert by_point < 0.65 * alone


@pytest.mark.parametrize("interval", list(Interval))
def test_interval_kinds_hold_the_estimate_and_are_named(interval):
    result = fit(planted.table(seed=6), interval=interval, bootstrap=300)
    assert result.provenance["bootstrap"]["interval"] == interval.value
    for name, (low, high) in result.intervals.items():
        assert low < result.parameters[name] < high


@pytest.mark.slow
def test_e_that_is_not_in_the_data_is_said_so():
    # A law without E, over a narrow range: nothing holds E above 0.
    rows = planted.table(noise=0.03, parameters=(1e-6, 100.0, 60.0, 0.25, 0.2), seed=2)
    result = fit(rows, bootstrap=200)
    assert any(warning.startswith("E not identified") for warning in result.warnings)
    assert result.certificate["passed"]
    assert result.certificate["on_bound"] == ["E"]
    assert any("E not identified" in warning for warning in fit(rows, bootstrap=0).warnings)
    assert not any(warning.startswith("E not identified") for warning in fit(planted.table()).warnings)
    assert not any("E not identified" in warning for warning in fit(rows, pins={"E": 0.5}).warnings)


def test_a_design_that_cannot_tell_the_exponents_apart_is_refused():
    rows = planted.table()
    fixed_ratio = rows.assign(d=20 * rows["n"])
    with pytest.raises(UsageError, match="fixed ratio"):
        fit(fixed_ratio)
    with pytest.raises(UsageError, match="one compute budget"):
        fit(rows.assign(d=1e21 / rows["n"]))
    assert fit(fixed_ratio, law="saturating_n").law == "saturating_n"
    with pytest.raises(UsageError, match="every run has the same d"):
        fit(rows.assign(d=1e10))


def test_too_few_points_are_refused():
    with pytest.raises(UsageError, match="5 points for 5 parameters"):
        fit(planted.table().iloc[[0, 13, 37, 58, 91]])


@pytest.mark.parametrize(("pins", "told"), [
    ({"alpha": 1e300}, "alpha=1e\\+300 is outside 0.001 to 5"), ({"beta": 100.0}, "outside 0.001 to 5"),
    ({"A": 1e300}, "outside"), ({"A": 1e-300}, "outside"), ({"alpha": 1e-300}, "outside"),
])  # fmt: skip
def test_a_pin_where_no_fit_would_look_is_refused(pins, told):
    with pytest.raises(UsageError, match=told):
        fit(planted.table(), pins=pins)


def test_one_bad_row_is_named():
    rows = planted.table()
    assert not any("far from the fit" in warning for warning in fit(rows, bootstrap=0).warnings)
    rows.loc[7, "n"] = 1e23
    (told,) = [warning for warning in fit(rows, bootstrap=0).warnings if "far from the fit" in warning]
    assert "row 8;" in told
    exact = planted.table(noise=0.0)
    for objective in ("huber_log", "log_absolute"):
        assert not any("far from" in warning for warning in fit(exact, objective=objective, bootstrap=0).warnings)


@pytest.mark.parametrize("budget", [1.0, 5.9, 1e40, 1e300, -1.0, np.nan])
def test_a_budget_that_pays_for_nothing_or_for_more_than_there_is_is_refused(budget):
    with pytest.raises(UsageError, match="--budget"):
        fit(planted.table(), budgets=[budget])


@pytest.mark.slow
def test_losses_without_a_law_end_in_warnings_and_not_in_runtime_warnings(recwarn):
    rows = planted.table(coverage.grid(6, 5))
    rows["loss"] = 3 + 0.5 * np.random.default_rng(0).random(30)
    result = fit(rows, budgets=[1e12, 1e39], checks=False)
    assert not [told for told in recwarn if issubclass(told.category, RuntimeWarning)]
    for row in result.derived["optimum"]:
        for name in ("n", "d"):
            assert row[name]["value"] >= 1
            assert row[name]["interval"][0] >= 1
        assert None not in row["loss"]["interval"]


def test_an_optimum_at_one_parameter_is_none():
    result = fit(planted.table(), budgets=[10.0], bootstrap=0)
    assert any(warning.startswith("no optimum at 10 FLOP") for warning in result.warnings)
    assert "intervals: none" in describe(result)


@pytest.mark.parametrize(("options", "flag"), [
    ({"others": ["optimum_n"]}, "--others: 'optimum_n'"), ({"holdout": ["kaplan_n", "optimum_n"]}, "--holdout: "),
    ({"law": "optimum_n"}, "--law: "), ({"law": "kaplan_n", "counting": True}, "--counting: "),
])  # fmt: skip
def test_a_law_that_does_not_fit_the_question_is_blamed_on_its_flag(options, flag, monkeypatch):
    monkeypatch.setattr("lm.scaling.fit.fit_points", None)  # said before any fit
    with pytest.raises(UsageError, match=flag):
        fit(planted.table(), **options)


ALL_PINNED = dict(zip(("E", "A", "B", "alpha", "beta"), planted.PARAMETERS, strict=True))


@pytest.mark.parametrize("pins", [{"Z": 1.0}, {"E": -1.0}, {"E": np.nan}, {"E": 100.0}, ALL_PINNED])
def test_bad_pins_are_refused(pins):
    with pytest.raises(UsageError, match="--pin"):
        fit(planted.table(), pins=pins)


def test_an_exponent_typed_with_two_digits_is_warned_about():
    assert any("two digits" in warning for warning in fit(planted.table(), pins={"alpha": 0.34}, bootstrap=0).warnings)
    exact = fit(planted.table(), pins={"alpha": 0.33917084}, bootstrap=0)
    assert not any("two digits" in warning for warning in exact.warnings)


def test_seed_noise_comes_from_repeated_points():
    rows = planted.table(coverage.grid(6, 5))
    assert fit(rows).noise["seed_sd"] is None
    random = np.random.default_rng(0)
    repeated = rows.loc[rows.index.repeat(20)].reset_index(drop=True)
    exact = coverage.Planted(planted.PARAMETERS, repeated["n"].to_numpy(), repeated["d"].to_numpy(), 0.004)
    repeated["loss"] = exact.losses(random)
    result = fit(repeated, bootstrap=20)
    # 570 degrees of freedom: the standard error of a standard deviation is 3 %.
    assert result.noise["seed_sd"] == pytest.approx(0.004, rel=0.12)
    assert result.noise["residual_sd"] == pytest.approx(0.004, rel=0.12)


def test_description_puts_warnings_first_and_names_the_objective():
    text = describe(fit(planted.table(coverage.grid(5, 4)), objective="log_least_squares"))
    lines = text.splitlines()
    assert lines[0].startswith("WARNING")
    first_plain = next(k for k, line in enumerate(lines) if not line.startswith("WARNING"))
    assert not any(line.startswith("WARNING") for line in lines[first_plain:])
    assert "log_least_squares" in text
    assert "certificate holds" in text


def test_a_failed_certificate_is_said_first(monkeypatch):
    from lm.scaling.fitting import solve

    monkeypatch.setattr(solve, "MAX_ITERATIONS", 1)
    result = fit(planted.table().assign(steps=10), bootstrap=0)
    assert not result.certificate["passed"]
    assert result.warnings[0].startswith("THE FIT IS NOT CERTIFIED")


def test_an_exact_law_is_certified_and_found():
    for objective in ("huber_log", "log_least_squares", "log_absolute"):
        result = fit(planted.table(noise=0.0), objective=objective, bootstrap=0)
        assert result.certificate["passed"], result.warnings
        np.testing.assert_allclose(list(result.parameters.values()), planted.PARAMETERS, rtol=1e-6)


@pytest.mark.parametrize(("lost", "resamples", "distrusted"), [
    (11, 1000, False), (49, 1000, False), (51, 1000, True), (1, 20, False), (2, 20, True),
])  # fmt: skip
def test_lost_resamples_are_counted_and_only_many_are_distrusted(lost, resamples, distrusted):
    found = read.points(planted.table(), read.Columns("n", "d", None, "loss"))
    (warning,) = _fit_warnings(found, [], lost, resamples)
    assert f"{lost} of {resamples} resamples did not converge" in warning
    assert ("not to be trusted" in warning) == distrusted


@pytest.mark.parametrize("damage", [
    {"law": "kaplan_n"}, {"law": "hofmann"}, {"law": None}, {"parameters": {"E": 1.8}}, {"parameters": {}},
    {"parameters": None}, {"bootstrap_samples": [[1.0, 2.0]]}, {"bootstrap_samples": [1.0]}, {"bootstrap_samples": "x"},
])  # fmt: skip
def test_a_fit_whose_parameters_are_not_the_laws_is_refused(damage):
    value = fit(planted.table(coverage.grid(5, 4)), bootstrap=20).to_json()
    with pytest.raises(UsageError, match=r"^fit"):
        FitResult.from_json(value | damage)
    sorted_value = value | {"parameters": dict(sorted(value["parameters"].items()))}
    assert list(FitResult.from_json(sorted_value).parameters) == ["E", "A", "B", "alpha", "beta"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"law": "hoffmann"}'])
def test_files_that_are_no_fit_are_refused(tmp_path, text):
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=str(path)):
        FitResult.load(path)
    with pytest.raises(UsageError, match="no such fit"):
        FitResult.load(tmp_path / "absent.json")


@pytest.mark.slow
@pytest.mark.parametrize("design", ["isoflop", pytest.param("grid", marks=pytest.mark.full)])
def test_intervals_cover_the_truth(design):
    n, d = {"grid": coverage.grid, "isoflop": coverage.isoflop}[design](10, 10)
    measured = coverage.measure(
        coverage.Planted(planted.PARAMETERS, n, d, 0.005), [Resampling.POINT],
        replicates=400, resamples=400, seed=0, budget=10 * float((6 * n * d).max()))  # fmt: skip
    for name, share in measured[Resampling.POINT, Interval.PERCENTILE].items():
        assert 0.92 <= share <= 0.98, (name, share)
