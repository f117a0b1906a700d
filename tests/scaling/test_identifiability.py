"""Profile likelihoods against what is known exactly, and optima that are really there."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from lm.scaling import read
from lm.scaling.checks import coverage, identifiability
from lm.scaling.fit import fit_table
from lm.scaling.fitting.fitted import fit_points
from lm.scaling.fitting.objective import objective_named
from lm.scaling.laws import law_named
from lm.scaling.laws.repeated import MUENNIGHOFF
from lm.scaling.pages.describe import describe
from tests.scaling import planted

COLUMNS = read.Columns("n", "d", None, "loss")


def fitted(rows, law="hoffmann", objective="huber_log", pins=None, columns=COLUMNS):
    return fit_points(read.points(rows, columns), law_named(law), objective_named(objective), pins or {})


def test_a_line_gives_the_regression_interval():
    """log L = log A - alpha log N by least squares: the interval is estimate +- t times White's (1980) error."""
    rows = planted.table(noise=0.02).iloc[:40]
    profiles = identifiability.analyse(fitted(rows, "kaplan_n", "log_least_squares"))["profiles"]
    x, y = np.log(rows["n"].to_numpy()), np.log(rows["loss"].to_numpy())
    design = np.stack([np.ones_like(x), -x], axis=1)
    answer = np.linalg.lstsq(design, y, rcond=None)[0]
    inverse = np.linalg.inv(design.T @ design)
    meat = (design.T * (y - design @ answer) ** 2) @ design * 40 / 38
    error = np.sqrt(np.diag(inverse @ meat @ inverse)) * student.ppf(0.975, 38)
    # A quadratic objective: the root of the drop is a straight line, interpolated without error.
    assert profiles["alpha"]["interval"] == pytest.approx([answer[1] - error[1], answer[1] + error[1]], rel=1e-6)
    log_a = np.log(profiles["A"]["interval"])
    assert log_a == pytest.approx([answer[0] - error[0], answer[0] + error[0]], rel=1e-6)


@pytest.mark.parametrize("objective", ["huber_log", "log_least_squares", "log_absolute", "log_asymmetric:2"])
def test_a_well_made_design_bounds_every_parameter_and_holds_the_truth(objective):
    part = identifiability.analyse(fitted(planted.table(seed=3), objective=objective))
    assert part["correlation"] == pytest.approx(0, abs=1e-12)  # every size with every length
    assert part["condition"] > 1
    assert len(part["optima"]) == 1
    assert part["warnings"] == []
    for (name, profile), truth in zip(part["profiles"].items(), planted.PARAMETERS, strict=True):
        low, high = profile["interval"]
        assert low < profile["value"] < high
        # Twice the half-width of a 95 % interval: four standard errors.
        assert abs(np.log(truth / profile["value"])) < 2 * np.log(high / low) / 2 * (1 if objective[4] != "a" else 2), (
            name
        )
        values, drops = np.array(profile["curve"]).T
        assert np.all(np.diff(values) >= 0)
        assert drops.min() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["E", "A", "beta"])
def test_the_profile_is_the_objective_with_the_parameter_pinned(name):
    rows = planted.table(seed=3)
    found = fitted(rows)
    curve = identifiability.analyse(found)["profiles"][name]["curve"]
    drops = [
        fitted(rows, pins={name: curve[k][0]}).certificate.objective - found.certificate.objective for k in (0, -1)
    ]
    # One scale for the whole curve: pinned fits of their own rise in the same ratio.
    assert drops[0] / drops[1] == pytest.approx(curve[0][1] / curve[-1][1], rel=1e-5)


@pytest.mark.slow
def test_what_the_data_do_not_bound_is_said():
    floorless = fitted(planted.table(parameters=(0.0, 12.0, 80.0, 0.08, 0.15), noise=0.01))
    part = identifiability.analyse(floorless)
    assert part["profiles"]["E"]["bounded"] == "bounded above only"
    assert part["profiles"]["E"]["interval"][0] is None
    assert any(warning.startswith("E is bounded above only") for warning in part["warnings"])
    # Tokens far beyond where they tell anything: no exponent of D is in the losses.
    lavish = planted.table(parameters=(1.8, 480.0, 1e-3, 0.35, 0.37))
    part = identifiability.analyse(fitted(lavish))
    assert part["profiles"]["beta"]["bounded"] == "not bounded"
    assert part["profiles"]["B"]["bounded"] == "bounded above only"
    assert part["profiles"]["alpha"]["bounded"] == "bounded"
    assert any(warning.startswith("beta is not bounded") for warning in part["warnings"])
    json.dumps(part, allow_nan=False)


def test_pinned_parameters_have_no_profile():
    assert list(identifiability.analyse(fitted(planted.table(), pins={"E": 1.8, "A": 480.0}))["profiles"]) == [
        "B",
        "alpha",
        "beta",
    ]


def test_points_on_the_law_have_no_profile():
    part = identifiability.analyse(fitted(planted.table(noise=0.0)))
    assert part["profiles"] == {}
    assert "the points lie on the law" in "\n".join(identifiability.lines(part))


def test_the_fit_says_it_and_can_be_told_not_to():
    options = {"n": "n", "d": "d", "c": None, "bootstrap": 20}
    result = fit_table(planted.table(), **options)
    assert {"identifiability", "influence", "sensitivity"} <= set(result.checks)
    text = describe(result)
    assert text.index("95 % profile likelihood") < text.index("influence:") < text.index("delta sweep")
    assert text.index("delta sweep") < text.index("IsoFLOP")
    assert not {"identifiability", "influence", "sensitivity"} & set(
        fit_table(planted.table(), checks=False, **options).checks
    )


def test_the_flat_optimum_is_where_the_loss_is_within_a_thousandth():
    result = fit_table(planted.table(), n="n", d="d", c=None, bootstrap=0, checks=False, budgets=[1e20, 1e24])
    law, values = law_named("hoffmann"), np.array(list(result.parameters.values()))
    for row in result.derived["optimum"]:
        n = np.array(row["flat"])
        losses = law.predict(values, {"n": n, "d": row["budget"] / (6 * n)})
        np.testing.assert_allclose(losses, 1.001 * row["loss"]["value"], rtol=1e-9)
        assert n[0] < row["n"]["value"] < n[1]


def test_muennighoffs_optima(shared):
    """The published 15.39, 5.31 is a local optimum of its own objective; R_D has no upper bound in the data."""
    rows = read.read_table(shared / "published-fits" / "datablations" / "datablations_fit182.csv")
    pins = {name: value for name, value in MUENNIGHOFF.items() if name not in ("R_D", "R_N")}
    columns = read.Columns("params", "tokens", None, "val_loss", "unique_tokens")
    part = identifiability.analyse(fitted(rows, "repeated", pins=pins, columns=columns))
    optima = {(round(found["parameters"]["R_D"], 1), found["objective"]) for found in part["optima"]}
    for decay, objective in ((95.4, 0.0158046625), (47.0, 0.0158073786), (160.7, 0.0158112893), (15.4, 0.0158259321)):
        assert any(at == decay and value == pytest.approx(objective, rel=1e-8) for at, value in optima), decay
    assert part["profiles"]["R_D"]["bounded"] == "bounded below only"
    assert part["profiles"]["R_N"]["bounded"] == "bounded"
    assert any("R_D is bounded below only" in warning for warning in part["warnings"])
    assert any("other optima are as good" in warning and "15.37" in warning for warning in part["warnings"])


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["huber_log", "log_least_squares"])
def test_profile_intervals_hold_the_truth(objective):
    n, d = coverage.grid(10, 10)
    replicates, held = 120, np.zeros(5)
    problem = None
    for seed in range(replicates):
        rows = pd.DataFrame({"n": n, "d": d, "loss": planted.table(seed=seed + 1000)["loss"]})
        if problem is None:
            problem = fitted(rows, objective=objective)
        # The starts are those of the first table: what is tested is the interval, not the search.
        points = dataclasses.replace(problem.problem, log_loss=np.log(rows["loss"].to_numpy()))
        solution = identifiability.minimise(points, problem.theta[None], far=True)
        again = dataclasses.replace(problem, problem=points, solution=solution, theta=solution.theta[0])
        shapes, _ = identifiability.profiles(again, [again.theta])
        for k, (shape, truth) in enumerate(zip(shapes.values(), planted.PARAMETERS, strict=True)):
            low, high = shape.interval
            held[k] += (low is None or low <= truth) and (high is None or truth <= high)
    # 120 replicates have a standard error of 2 points around 95 %: three of them below, and nothing too wide.
    assert np.all(held / replicates > 0.89), held / replicates
    assert np.mean(held / replicates) < 0.985
