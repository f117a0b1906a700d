import numpy as np
import pandas as pd
import pytest

from lm.scaling import read
from lm.scaling.approaches import isoflop

COLUMNS = read.Columns("n", "d", "c", "loss")


def curve(c=1e20, best=1e9, depth=0.1, width=1.4, sizes=7, low=-1.5, high=1.5, noise=0.0, seed=0):
    """loss = 3 + depth * ((log n - log best) / width)^2 on sizes spread over log n."""
    x = np.log(best) + np.linspace(low, high, sizes)
    loss = 3 + depth * ((x - np.log(best)) / width) ** 2
    loss = loss + noise * np.random.default_rng(seed).standard_normal(sizes)
    return pd.DataFrame({"n": np.exp(x), "d": c / 6 / np.exp(x), "c": c, "loss": loss})


def analyse(*curves):
    return isoflop.analyse(read.points(pd.concat(curves, ignore_index=True), COLUMNS), seed=0)


def ladder(exponent=0.5, budgets=5, noise=0.0):
    return [curve(c=c, best=1e9 * (c / 1e20) ** exponent, noise=noise, seed=k)
            for k, c in enumerate(np.geomspace(1e19, 1e22, budgets))]  # fmt: skip


def test_exact_parabolas_give_exact_minima_and_exponents():
    found = analyse(*ladder(0.55))
    assert not found["refused"]
    for row in found["budgets"]:
        assert row["n"] == pytest.approx(1e9 * (row["budget"] / 1e20) ** 0.55, rel=1e-6)
        assert 6 * row["n"] * row["d"] == pytest.approx(row["budget"], rel=1e-6)
        assert row["loss"] == pytest.approx(3.0, abs=1e-9)
        c0, c1, c2 = row["coefficients"]
        n, _, loss = row["points"][0]
        assert c0 + c1 * np.log(n) + c2 * np.log(n) ** 2 == pytest.approx(loss, rel=1e-9)
    assert found["exponents"]["a"]["value"] == pytest.approx(0.55, abs=1e-6)
    assert found["exponents"]["b"]["value"] == pytest.approx(0.45, abs=1e-6)


def test_noise_widens_the_intervals_and_they_hold_the_truth():
    quiet, loud = analyse(*ladder(noise=0.001)), analyse(*ladder(noise=0.005))
    for a, b in zip(quiet["budgets"], loud["budgets"], strict=True):
        assert np.ptp(np.log(b["n_interval"])) > 2 * np.ptp(np.log(a["n_interval"]))
        assert b["n_interval"][0] < b["n"] < b["n_interval"][1]
    assert np.ptp(loud["exponents"]["a"]["interval"]) > np.ptp(quiet["exponents"]["a"]["interval"])


@pytest.mark.slow
def test_minimum_intervals_cover_the_truth():
    held, total = 0, 0
    for seed in range(150):
        found = analyse(*[curve(c=c, best=1e9, noise=0.004, seed=(seed, k)) for k, c in enumerate([1e19, 1e20, 1e21])])
        for row in found["budgets"]:
            held += row["n_interval"][0] <= 1e9 <= row["n_interval"][1]
            total += 1
    assert total > 400
    # 450 curves: a standard error of one point around 95 %.
    assert 0.92 <= held / total <= 0.98


@pytest.mark.parametrize(("rows", "reason"), [
    (curve(sizes=3), "3 sizes"),
    (curve(depth=-0.1), "wrong curvature"),
    (curve(low=0.2, high=3), "outside the sampled sizes"),
    (curve(low=-0.02, high=3, noise=0.001), "sampled sizes"),
], ids=["few", "maximum", "outside", "edge"])  # fmt: skip
def test_budgets_without_a_usable_minimum_are_refused_with_the_reason(rows, reason):
    found = analyse(rows, curve(c=1e22, noise=0.001))
    assert [row["budget"] for row in found["budgets"]] == pytest.approx([1e22])
    assert found["refused"][0]["budget"] == pytest.approx(1e20)
    assert reason in found["refused"][0]["reason"]


def test_residuals_as_large_as_the_curve_are_refused():
    rows = curve(depth=0.002, sizes=7)
    rows["loss"] += 0.04 * np.array([1, -1, 1, -1, 1, -1, 1])
    assert "residuals" in analyse(rows)["refused"][0]["reason"]


def test_an_interval_that_leaves_the_sizes_is_refused():
    reasons = [
        row["reason"] for seed in range(5) for row in analyse(curve(depth=0.02, noise=0.006, seed=seed))["refused"]
    ]
    assert any("leaves the sampled" in reason or "not distinguishable" in reason for reason in reasons)


def test_two_budgets_give_an_exponent_without_an_interval_and_one_gives_none():
    found = analyse(*ladder(budgets=2, noise=0.001))
    assert found["exponents"]["a"]["interval"] is None
    assert "two usable budgets" in found["notes"][0]
    found = analyse(*ladder(budgets=2)[:1])
    assert found["exponents"] == {}
    assert "1 usable budget" in found["notes"][0]


def test_budgets_are_grouped_by_flops_or_by_the_column():
    random = np.random.default_rng(0)
    rows = pd.concat(ladder(), ignore_index=True)
    rows["c"] *= 1 + 0.01 * random.uniform(-1, 1, len(rows))
    codes, budgets = isoflop.group_budgets(read.points(rows, COLUMNS))
    assert len(budgets) == 5
    assert np.bincount(codes).tolist() == [7] * 5
    named = rows.assign(budget=np.repeat([1.0, 2, 3, 4, 5], 7) * 1e20)
    assert isoflop.group_budgets(read.points(named, COLUMNS))[1].tolist() == [1e20, 2e20, 3e20, 4e20, 5e20]
    outside = rows.assign(budget=0.0)
    assert len(isoflop.group_budgets(read.points(outside, COLUMNS))[1]) == 5
