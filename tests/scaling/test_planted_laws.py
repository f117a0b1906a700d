"""Every law is found again from losses that it made itself, and says what it is in other words."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.base.errors import UsageError
from lm.cli import main
from lm.scaling import read
from lm.scaling.checks import coverage
from lm.scaling.fit import fit_table
from lm.scaling.fitting.fitted import fit_points
from lm.scaling.fitting.objective import HUBER
from lm.scaling.laws import LAWS, law_named
from lm.scaling.laws.joint import GAMMA, KAPLAN_JOINT, OVERTRAINING
from lm.scaling.laws.power import HOFFMANN, TIED
from lm.scaling.laws.repeated import MUENNIGHOFF, REPEATED, REPEATED_FREE
from lm.scaling.planning.predict import predict

TRUTHS = {
    "hoffmann": (1.8, 480.0, 2100.0, 0.35, 0.37),
    "hoffmann_tied": (1.8, 480.0, 2100.0, 0.36),
    "kaplan_n": (20.0, 0.076),
    "kaplan_d": (30.0, 0.095),
    "kaplan_c": (30.0, 0.05),
    "saturating_n": (1.7, 400.0, 0.3),
    "saturating_d": (1.7, 400.0, 0.28),
    "saturating_c": (1.7, 3000.0, 0.17),
    "gamma": (1.7, 900.0, 3000.0, 0.40, 0.42, 0.8),
    "kaplan_joint": (6.4e13, 1.8e13, 0.076, 0.103),
    "overtraining": (1.84, 212.0, 367.0, 0.136),
    "repeated": tuple(MUENNIGHOFF.values()),
    "repeated_free": (1.87, 521.0, 2500.0, 0.353, 0.37, 15.0, 5.0),
    "repeated_data": (1.87, 521.0, 1488.0, 0.353, 3.0),
    "repeated_params": (1.87, 521.0, 1488.0, 0.353, 7.0),
    "broken_n": (1.5, 12.0, 0.1, 0.4, 3e8, 0.3),
    "broken_d": (1.5, 30.0, 0.12, 0.5, 2e10, 0.3),
    "broken_c": (1.5, 40.0, 0.07, 0.2, 1e19, 0.5),
    "optimum_nd": (0.5, -0.4, 0.1),
    "optimum_n": (1.0, -0.3),
    "optimum_d": (0.3, -0.2),
    "optimum_c": (1.0, -0.1),
}
SHAPES = [law_named(name) for name in ("gamma", "kaplan_joint", "overtraining", "repeated", "broken_c")]


def table(law, noise=0.0, seed=0, side=10):
    """Losses of the law at side^2 pairs of n and d, the tokens seen 1 to 60 times."""
    n, d = coverage.grid(side, side)
    rows = {"n": n, "d": d, "c": 6 * n * d, "u": d / np.resize(np.geomspace(1, 60, 7), len(d))}
    exact = law.predict(np.array(TRUTHS[law.name]), rows)
    return pd.DataFrame(rows | {"loss": exact * np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))})


def points(rows):
    return read.points(rows, read.Columns("n", "d", "c", "loss", "u"))


def test_every_law_has_a_planted_truth():
    assert set(TRUTHS) == {law.name for law in LAWS}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_an_exact_law_is_found(law):
    fitted = fit_points(points(table(law)), law, HUBER, {})
    assert fitted.certificate.passed, fitted.certificate.failures
    # Residuals are rounding, 1e-16; the worst conditioned law (a break) magnifies it by under 1e6.
    np.testing.assert_allclose(fitted.estimate, TRUTHS[law.name], rtol=1e-8)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_starts_agree_where_the_law_is_in_the_data(law):
    proof = fit_points(points(table(law, 0.003)), law, HUBER, {}).certificate
    assert proof.passed, proof.failures
    assert proof.starts_agreeing >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("law", SHAPES, ids=lambda law: law.name)
def test_intervals_of_a_form_hold_its_truth(law):
    result = fit_table(
        table(law, 0.002, seed=1), law=law.name, n="n", d="d", c="c", bootstrap=60,
        u="u" if "u" in law.variables else None)  # fmt: skip
    assert result.certificate["passed"]
    for name, truth in zip(law.parameters, TRUTHS[law.name], strict=True):
        low, high = result.intervals[name]
        # Twice the 95 % interval to either side: beyond it lies one draw in ten thousand.
        assert 2 * low - result.parameters[name] < truth < 2 * high - result.parameters[name], name
    assert bool(result.derived) == law.allocates
    at = {"u": 1e10} if "u" in law.variables else {}
    found = predict(result, 1e9, 2e10, **at)
    assert found.mean_interval[0] <= found.mean <= found.mean_interval[1]


@pytest.mark.parametrize("law", [GAMMA, KAPLAN_JOINT, OVERTRAINING], ids=lambda law: law.name)
@settings(max_examples=15, deadline=None)
@given(log10_c=st.floats(18, 26), per_nd=st.sampled_from([6.0, 7.5]))
def test_allocation_minimises_the_loss_on_the_budget(law, log10_c, per_nd):
    parameters, budget = np.array(TRUTHS[law.name]), 10.0**log10_c
    n, d = law.allocate(parameters, budget, per_nd)
    assert per_nd * n * d == pytest.approx(budget, rel=1e-12)
    around = n * np.array([0.99, 1.0, 1.01])
    assert law.predict(parameters, {"n": around, "d": budget / per_nd / around}).argmin() == 1


def test_overtraining_is_equation_4_and_the_tied_law():
    e, a, b, eta = TRUTHS["overtraining"]
    n, d = coverage.grid(4, 4)
    per, c = d / n, 6 * n * d
    loss = OVERTRAINING.predict(np.array([e, a, b, eta]), {"n": n, "d": d})
    np.testing.assert_allclose(loss, e + (a * per**eta + b * per**-eta) * c**-eta, rtol=1e-12)
    tied = np.array([e, a * 6**-eta, b * 6**-eta, 2 * eta])
    np.testing.assert_allclose(loss, TIED.predict(tied, {"n": n, "d": d}), rtol=1e-12)
    rows = points(table(TIED, 0.003))
    found, other = (fit_points(rows, law, HUBER, {}) for law in (OVERTRAINING, TIED))
    assert found.certificate.objective == pytest.approx(other.certificate.objective, rel=1e-9)
    for one, two in zip(OVERTRAINING.allocate(found.estimate, 1e24, 6.0), TIED.allocate(other.estimate, 1e24, 6.0),
                        strict=True):  # fmt: skip
        assert float(one) == pytest.approx(float(two), rel=1e-5)  # the optimum is flat to half the digits


def test_gamma_one_is_hoffmann():
    n, d = coverage.grid(4, 4)
    hoffmann = np.array(TRUTHS["hoffmann"])
    np.testing.assert_allclose(
        GAMMA.predict(np.append(hoffmann, 1.0), {"n": n, "d": d}), HOFFMANN.predict(hoffmann, {"n": n, "d": d}),
        rtol=1e-13)  # fmt: skip


def test_kaplans_joint_law_has_his_laws_as_limits():
    n_c, d_c, alpha_n, alpha_d = TRUTHS["kaplan_joint"]
    parameters, one = np.array(TRUTHS["kaplan_joint"]), np.array([1e9])
    much = KAPLAN_JOINT.predict(parameters, {"n": one, "d": np.array([1e30])})
    large = KAPLAN_JOINT.predict(parameters, {"n": np.array([1e30]), "d": one})
    assert float(much[0]) == pytest.approx((n_c / 1e9) ** alpha_n, rel=1e-6)
    assert float(large[0]) == pytest.approx((d_c / 1e9) ** alpha_d, rel=1e-6)


def test_a_broken_law_has_its_exponents_on_either_side():
    law = law_named("broken_c")
    parameters = np.array([1e-12, *TRUTHS["broken_c"][1:]])
    _, _, alpha, beta, at, _ = parameters
    for side, exponent in ((1e-8, alpha), (1e8, beta)):
        one, two = law.predict(parameters, {"c": at * side * np.array([1.0, 10.0])})
        assert np.log10(one / two) == pytest.approx(exponent, rel=1e-4)


def test_data_that_are_never_repeated_follow_the_base_law_until_parameters_are_in_excess():
    published = np.array(list(MUENNIGHOFF.values()))
    n, d = np.array([1e7, 1e8]), np.array([1e11, 1e11])
    loss = REPEATED.predict(published, {"n": n, "d": d, "u": d})
    np.testing.assert_allclose(loss, TIED.predict(published[:4], {"n": n, "d": d}), rtol=1e-14)
    excess = REPEATED.predict(published, {"n": np.array([1e12]), "d": d[:1], "u": d[:1]})
    assert float(excess[0]) > float(TIED.predict(published[:4], {"n": np.array([1e12]), "d": d[:1]})[0])
    free = np.insert(published, 4, published[3])
    rows = {"n": n, "d": d, "u": d / 20}
    np.testing.assert_allclose(REPEATED_FREE.predict(free, rows), REPEATED.predict(published, rows), rtol=1e-14)


@settings(max_examples=20, deadline=None)
@given(st.floats(1.0, 300.0), st.floats(1.1, 3.0))
def test_repeated_tokens_help_less_than_new_ones_and_never_hurt(epochs, more):
    published = np.array(list(MUENNIGHOFF.values()))
    d = 1e9 * epochs
    rows = {"n": np.full(3, 1e8), "d": np.array([d, d * more, d * more]), "u": np.array([1e9, 1e9, more * 1e9])}
    now, repeated, new = REPEATED.predict(published, rows)
    assert new < repeated <= now


def test_without_expm1_a_large_decay_would_look_like_nothing():
    published = np.array(list(MUENNIGHOFF.values()))
    published[4:] = 1e17
    rows = {"n": np.array([1e10]), "d": np.array([1e11]), "u": np.array([1e9])}
    base = TIED.predict(published[:4], rows)
    np.testing.assert_allclose(REPEATED.predict(published, rows), base, rtol=1e-12)


def test_a_decay_that_is_not_in_the_data_fails_the_certificate():
    rows = table(TIED, 0.003, side=6)
    result = fit_table(rows.assign(u=rows["d"]), law="repeated_data", n="n", d="d", c="c", u="u", bootstrap=0)
    assert not result.certificate["passed"]
    assert any("moves no prediction: R_D" in warning for warning in result.warnings)


@pytest.mark.slow
def test_distinct_tokens_are_asked_for_read_and_checked():
    rows = table(REPEATED, 0.003, side=6)
    columns = {"n": "n", "d": "d", "c": "c", "bootstrap": 20}
    with pytest.raises(UsageError, match="--u COL"):
        fit_table(rows, law="repeated", **columns)
    with pytest.raises(UsageError, match="no law that is fitted reads distinct tokens"):
        fit_table(rows, law="hoffmann", u="u", **columns)
    with pytest.raises(UsageError, match="u counts each training token once"):
        fit_table(rows.assign(u=2 * rows["d"]), law="repeated", u="u", **columns)
    result = fit_table(rows, law="repeated", u="u", **columns)
    assert result.derived == {}
    assert result.provenance["columns"]["u"] == "u"
    assert predict(result, 1e9, 2e10) == predict(result, 1e9, 2e10, 2e10)
    assert predict(result, 1e9, 2e10, 1e9).mean > predict(result, 1e9, 2e10).mean
    assert any("u lies 10 times" in told for told in predict(result, 1e9, 2e9, float(rows["u"].min()) / 10).warnings)
    with pytest.raises(UsageError, match="u <= d"):
        predict(result, 1e9, 2e10, 3e10)
    with pytest.raises(UsageError, match="does not read distinct tokens"):
        predict(fit_table(rows, **columns), 1e9, 2e10, 1e10)


def test_the_command_reads_distinct_tokens_and_predicts_with_them(tmp_path, capsys):
    rows, out = tmp_path / "runs.csv", str(tmp_path / "fit.json")
    made = table(law_named("repeated_data"), 0.003, side=7)
    made.to_csv(rows, index=False)
    fit = ["fit", str(rows), "--law", "repeated_data", "--bootstrap", "20", "--out", out]
    assert main([*fit, "--n", "n", "--d", "d", "--u", "u"]) == 0
    assert "R_D" in capsys.readouterr().out
    losses = []
    for distinct in ([], ["--u", "1e9"]):
        assert main(["predict", "--fit", out, "--n", "1e9", "--d", "2e10", "--json", *distinct]) == 0
        losses.append(json.loads(capsys.readouterr().out)["mean"])
    assert losses[0] < losses[1]
    own = made.rename(columns={"n": "params_total", "d": "tokens", "c": "flops_matmul", "u": "tokens_unique"})
    own.to_csv(rows, index=False)
    assert main(fit) == 0
    told = capsys.readouterr().out
    assert "--u tokens_unique" in told
    assert "no term for repetition" not in told


def test_distinct_tokens_beside_a_law_that_does_not_read_them_are_warned_about(tmp_path):
    result = fit_table(
        table(REPEATED, 0.003, side=6), others=["repeated_data"], n="n", d="d", c="c", u="u", bootstrap=0
    )
    assert any("'hoffmann' has no term for repetition" in warning for warning in result.warnings)
    assert not any("no term for repetition" in warning for warning in result.others[0]["warnings"])


def test_the_laws_are_listed(capsys):
    with pytest.raises(SystemExit) as left:
        main(["fit", "--laws"])
    assert left.value.code == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [law.name for law in LAWS]
