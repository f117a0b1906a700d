"""Plans: the numeric optimum against closed forms and published examples, and what a plan says with its numbers."""

import dataclasses
import json
import math

import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.scaling.checks import coverage
from lm.scaling.fit import fit_table
from lm.scaling.laws import LAWS, law_named
from lm.scaling.laws.power import HOFFMANN
from lm.scaling.laws.repeated import MUENNIGHOFF, REPEATED
from lm.scaling.pages.describe_plan import describe_plan
from lm.scaling.planning import optimum
from lm.scaling.planning.optimum import Surface, best, cheapest, near_optimal
from lm.scaling.planning.plan import plan
from lm.scaling.result import FitResult
from tests.scaling import planted

SARDANA = (1.69, 406.4, 410.7, 0.336, 0.283)
# A minimum is located to the root of the rounding of its value (1e-8) over the root of its relative curvature.
RESOLUTION = 1e-6
HOFFMANN_UNROUNDED = (math.exp(0.5267228), math.exp(6.0073404), math.exp(6.0179186), 0.33917084, 0.2849083)
BESIROGLU = (1.81686, 482.00572, 2085.43420, 0.34781, 0.36585)


@pytest.fixture(scope="module")
def fitted() -> FitResult:
    rows = planted.table(coverage.grid(6, 6))
    return fit_table(rows, n="n", d="d", c=None, bootstrap=200, budgets=[1e23])


def surface(*parameters, **more) -> Surface:
    return Surface(HOFFMANN, np.array(parameters, np.float64), 6.0, **more)


@pytest.mark.parametrize("name", [law.name for law in LAWS if law.of_loss and law.allocates])
def test_the_numeric_optimum_is_the_closed_form(name):
    law = law_named(name)
    random = np.random.default_rng(0)
    usual = {"E": 1.7, "A": 450.0, "B": 900.0, "alpha": 0.35, "beta": 0.33, "gamma": 0.9, "N_c": 6e13, "D_c": 2e13,
             "alpha_N": 0.08, "alpha_D": 0.1, "eta": 0.17}  # fmt: skip
    parameters = np.array([usual[part] for part in law.parameters])
    parameters = parameters * np.exp(0.1 * random.standard_normal((30, len(parameters))))
    for budget in (1e16, 5.76e23):
        found = best(Surface(law, parameters, 5.5), budget)
        n, d = law.allocate(parameters, budget, 5.5)
        np.testing.assert_allclose(found.log_n, np.log(n), atol=RESOLUTION)
        np.testing.assert_allclose(found.log_d, np.log(d), atol=RESOLUTION)


def test_two_digits_move_the_optimum_as_published():
    found = best(surface((1.69, 406.4, 410.7, 0.34, 0.28), HOFFMANN_UNROUNDED), 5.76e23)
    ratios = np.exp(found.log_d - found.log_n)
    assert ratios == pytest.approx([92.7, 58.9], abs=0.1)  # one in the last printed digit


@pytest.mark.parametrize(("parameters", "saving"), [
    (SARDANA, 17.45), ((1.69, 406.4, 410.7, 0.34, 0.28), 10.1), (HOFFMANN_UNROUNDED, 16.3), (BESIROGLU, 29.0),
])  # fmt: skip
def test_thirteen_billion_quality_for_two_trillion_served_tokens(parameters, saving):
    """Sardana et al. 2024, figure 1: the quality of a compute-optimal 13B model."""
    _, a, b, alpha, beta = parameters
    d = (beta * b / (alpha * a) * 13e9**alpha) ** (1 / beta)  # where n alpha A / n^alpha = d beta B / d^beta
    loss = float(HOFFMANN.predict(np.array(parameters), {"n": np.array([13e9]), "d": np.array([d])})[0])
    serving = surface(parameters, inference_tokens=2e12)
    found = cheapest(serving, loss)
    before = float(serving.flops(np.log([13e9]), np.log([d]))[0])
    assert 100 * (1 - found.budget[0] / before) == pytest.approx(saving, abs=0.05)  # the printed digits
    if parameters == SARDANA:
        assert np.exp(found.log_n[0]) == pytest.approx(6.97e9, rel=1e-3)
        assert np.exp(found.log_d[0]) == pytest.approx(1.248e12, rel=1e-3)
        assert before - found.budget[0] == pytest.approx(1.692e22, rel=1e-3)


def test_the_cheapest_model_is_the_best_one_at_its_cost_and_nothing_near_is_cheaper():
    serving = surface(planted.PARAMETERS, inference_tokens=1e12)
    found = cheapest(serving, 2.1)
    again = best(serving, found.budget)
    assert math.exp(again.log_loss[0]) == pytest.approx(2.1, rel=1e-12)
    for factor in (0.7, 0.99, 1.01, 1.4):
        log_n = found.log_n[:, None] + math.log(factor)
        log_d = optimum.log_tokens_for(serving, log_n, np.array([[math.log(2.1)]]))
        assert serving.log_loss(log_n, log_d)[0, 0] == pytest.approx(math.log(2.1), abs=1e-12)
        assert serving.flops(log_n, log_d)[0, 0] > found.budget[0]


def test_near_optimal_sizes_lose_exactly_what_was_allowed():
    curve = surface(planted.PARAMETERS)
    found = best(curve, 1e23)
    for end in near_optimal(curve, found, 1e-3):
        loss = curve.log_loss(end[:, None], curve.log_tokens(end[:, None], 1e23))[0, 0]
        assert math.exp(loss - found.log_loss[0]) == pytest.approx(1.001, abs=1e-9)


def test_served_tokens_make_the_model_smaller_and_none_change_nothing():
    plain, little, much = (
        best(surface(planted.PARAMETERS, inference_tokens=tokens), 1e23).log_n[0] for tokens in (0.0, 1e9, 1e13)
    )
    assert much < little < plain
    assert little == pytest.approx(plain, abs=0.01)


def test_enough_distinct_tokens_change_nothing_and_few_are_repeated(fitted):
    free, ample, scarce = (plan(fitted, budgets=[1e24], unique_tokens=u).optima[0] for u in (None, 1e15, 2e10))
    assert free.epochs is None
    # Under the law of repeated data the optimum of fresh tokens is the law's own.
    assert ample.n.value == pytest.approx(free.n.value, rel=RESOLUTION)
    assert ample.epochs.value < 1
    assert scarce.epochs.value > 10
    assert scarce.loss.value > free.loss.value
    parameters = np.array([MUENNIGHOFF[name] for name in REPEATED.parameters])
    curve = Surface(REPEATED, parameters[None], 6.0, unique_tokens=2e10)
    found = best(curve, 1e23)
    for factor in (0.9, 1.1):
        log_n = found.log_n[:, None] + math.log(factor)
        assert curve.log_loss(log_n, curve.log_tokens(log_n, 1e23))[0, 0] > found.log_loss[0]


def test_borrowed_decay_of_repeated_tokens_is_said(fitted):
    assert any("Muennighoff" in warning for warning in plan(fitted, budgets=[1e23], unique_tokens=1e10).warnings)
    joint = {"N_c": 6e13, "D_c": 2e13, "alpha_N": 0.08, "alpha_D": 0.1}
    other = dataclasses.replace(fitted, law="kaplan_joint", parameters=joint, bootstrap_samples=[])
    with pytest.raises(UsageError, match=r"no term for repeated tokens.*hoffmann"):
        plan(other, budgets=[1e23], unique_tokens=1e10)


def test_a_plan_agrees_with_the_fit_and_holds_the_truth(fitted):
    found = plan(fitted, budgets=[1e23]).optima[0]
    (row,) = fitted.derived["optimum"]
    for name in ("n", "d", "tokens_per_parameter", "loss"):
        part = getattr(found, name)
        assert part.value == pytest.approx(row[name]["value"], rel=RESOLUTION)
        assert part.interval == pytest.approx(tuple(row[name]["interval"]), rel=1e-4)  # all 200 resamples are kept
    n, d = HOFFMANN.allocate(np.array(planted.PARAMETERS), 1e23, 6.0)
    assert found.n.interval[0] < n < found.n.interval[1]
    assert found.d.interval[0] < d < found.d.interval[1]
    assert found.near_optimal == pytest.approx(tuple(row["flat"]), rel=RESOLUTION)
    assert found.extrapolation.c == pytest.approx(1e23 / fitted.fitted_range["c"][1])


def test_what_smaller_models_take_is_what_the_law_says(fitted):
    found = plan(fitted, budgets=[1e22]).optima[0]
    estimate = np.array(list(fitted.parameters.values()))
    for row in found.smaller:
        at_budget = {"n": np.array([row.n]), "d": np.array([1e22 / 6 / row.n])}
        assert row.loss == pytest.approx(float(HOFFMANN.predict(estimate, at_budget)[0]), rel=1e-9)
        if row.tokens is None:
            floor = HOFFMANN.predict(estimate, {"n": np.array([row.n]), "d": np.array([1e60])})[0]
            assert floor > found.loss.value
            continue
        same = HOFFMANN.predict(estimate, {"n": np.array([row.n]), "d": np.array([row.tokens])})[0]
        assert same == pytest.approx(found.loss.value, rel=1e-9)
        assert row.extra_training == pytest.approx(6 * row.n * row.tokens / found.training_flops - 1, rel=1e-9)
        whole = 6 * row.n * row.tokens + 2 * row.n * row.served_tokens
        assert whole == pytest.approx(found.training_flops + 2 * found.n.value * row.served_tokens, rel=1e-9)
    assert [row.tokens is None for row in found.smaller] == [False, False, True]


def test_a_loss_gives_the_budget_that_the_budget_gives_the_loss_of(fitted):
    loss = plan(fitted, budgets=[1e23]).optima[0].loss.value
    found = plan(fitted, loss=loss).optima[0]
    assert found.budget.value == pytest.approx(1e23, rel=1e-9)
    assert found.budget.interval[0] < 1e23 < found.budget.interval[1]
    assert found.loss.interval is None


def test_a_fit_without_resamples_has_values_no_intervals_and_a_warning(fitted):
    bare = dataclasses.replace(fitted, bootstrap_samples=[])
    found = plan(bare, budgets=[1e23])
    assert found.optima[0].n.interval is None
    assert found.optima[0].n.value == plan(fitted, budgets=[1e23]).optima[0].n.value
    assert any("no bootstrap samples" in warning for warning in found.warnings)


def test_a_failed_certificate_comes_first_and_two_digits_are_told(fitted):
    worried = dataclasses.replace(
        fitted,
        parameters=fitted.parameters | {"alpha": 0.34},
        warnings=["THE FIT IS NOT CERTIFIED: gradient", "E not identified: its interval reaches 0"],
    )
    warnings = plan(worried, budgets=[1e23]).warnings
    assert warnings[0].startswith("THE FIT IS NOT CERTIFIED")
    assert warnings[1].startswith("E not identified")
    assert "ANOTHER FIT'S" in warnings[2]  # the samples are of the alpha before
    assert "alpha=0.34 has two digits" in warnings[3]
    assert not any("digits" in warning for warning in plan(fitted, budgets=[1e23]).warnings)


@pytest.mark.parametrize(("asked", "words"), [
    ({}, "either budgets or one loss"),
    ({"budgets": [1e23], "loss": 2.0}, "either budgets or one loss"),
    ({"budgets": [-1.0]}, "--budget"),
    ({"budgets": [math.nan]}, "--budget"),
    ({"budgets": [math.inf]}, "--budget"),
    ({"budgets": [1.0]}, "pay for no model"),
    ({"budgets": [1e23], "inference_tokens": -1.0}, "--inference-tokens"),
    ({"budgets": [1e23, 1e24, 1e23]}, "same budget twice"),
    ({"budgets": [1e13], "inference_tokens": 1e13}, "pay for no model"),
    ({"budgets": [1e23], "unique_tokens": -1.0}, "--unique-tokens"),
    ({"loss": 0.0}, "--loss"),
    ({"loss": 1.5}, r"below what the law can reach.*\(E = 1\.8"),
    ({"loss": 1.9, "unique_tokens": 1e9}, "on 1e.09 distinct tokens"),
])  # fmt: skip
def test_impossible_requests_are_refused(fitted, asked, words):
    with pytest.raises(UsageError, match=words):
        plan(fitted, **asked)


def test_what_changes_nothing_is_taken_in_silence(fitted):
    plain = plan(fitted, budgets=[1e23])
    assert plan(fitted, budgets=[1e23], inference_tokens=0.0) == dataclasses.replace(plain, inference_tokens=0.0)
    assert plan(fitted, budgets=[1e23], unique_tokens=1e30).warnings == plain.warnings
    # The table's smallest model sees eight times the tokens of the optimum at the same budget.
    (optimum,) = plain.optima
    for share, repeated in ((8.1, False), (7.9, True)):
        warnings = plan(fitted, budgets=[1e23], unique_tokens=share * optimum.d.value).warnings
        assert any("Muennighoff" in warning for warning in warnings) == repeated


def test_intervals_are_spoken_of_where_there_are_some(fitted):
    assert "intervals: 95 %" in describe_plan(plan(fitted, budgets=[1e23]))
    without = plan(dataclasses.replace(fitted, bootstrap_samples=[]), budgets=[1e23])
    assert "intervals: 95 %" not in describe_plan(without)


def test_a_law_that_allocates_nothing_is_refused_with_those_that_do(fitted):
    single = dataclasses.replace(fitted, law="saturating_c", parameters={"E": 1.0, "A": 9.0, "alpha": 0.1})
    with pytest.raises(UsageError, match=r"'saturating_c' allocates nothing.*hoffmann"):
        plan(dataclasses.replace(single, bootstrap_samples=[]), budgets=[1e23])


def test_the_command_prints_warnings_first_and_json_that_is_plain(fitted, tmp_path, capsys):
    path = tmp_path / "fit.json"
    fitted.save(path)
    request = ["plan", "--fit", str(path), "--budget", "1e15", "--budget", "1e24", "--inference-tokens", "1e12"]
    assert main([*request, "--unique-tokens", "1e12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_plain = next(k for k, line in enumerate(lines) if not line.startswith("WARNING"))
    for words in ("how repeated tokens count", "at 1e+15 FLOP c lies"):
        assert any(words in line for line in lines[:first_plain])
    assert not any(line.startswith("WARNING") for line in lines[first_plain:])
    for words in ("N* ", "tokens/parameter", "epochs", "N*/8", "saves", "next runs", "expected"):
        assert words in "\n".join(lines)
    assert main([*request, "--next", "2", "--next-budget", "1e20", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["budget"]["value"] for entry in found["optima"]] == [1e15, 1e24]
    assert len(found["next_runs"]["runs"]) == 2
    assert sum(run["c"] for run in found["next_runs"]["runs"]) <= 1e20 * (1 + 1e-9)
    for wrong in (["--budget", "-1"], ["--budget", "1e24", "--next", "-1"], ["--budget", "1e24", "--ladder", "x.py"],
                  ["--budget", "1e24", "--next-budget", "1"], ["--loss", "0.5"]):  # fmt: skip
        assert main(["plan", "--fit", str(path), *wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
