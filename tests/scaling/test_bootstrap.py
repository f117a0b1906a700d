import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.scaling import read
from lm.scaling.checks import coverage
from lm.scaling.fit import fit_table
from lm.scaling.fitting import bootstrap
from lm.scaling.fitting.bootstrap import Bootstrap, Interval, Resampling, draw
from lm.scaling.fitting.fitted import fit_points
from lm.scaling.fitting.objective import HUBER
from lm.scaling.laws.power import HOFFMANN
from tests.scaling import planted


@pytest.mark.parametrize("resamples", [-1, 1, 19])
def test_too_few_resamples_are_refused_wherever_they_are_asked_for(resamples):
    with pytest.raises(UsageError, match="at least 20"):
        Bootstrap(resamples, Resampling.POINT, 0)
    with pytest.raises(UsageError, match="at least 20"):
        fit_table(planted.table(), n="n", d="d", c=None, bootstrap=resamples)
    assert Bootstrap(0, Resampling.POINT, 0).resamples == 0


def of_few(rows, **options):
    told = fit_table(rows, **{"n": "n", "d": "d", "c": None, "bootstrap": 200, "checks": False, **options})
    warned = [warning for warning in told.warnings if "hold the truth" in warning or "held the truth" in warning]
    return warned, [part["told"] for name, part in told.checks.items() if name == "coverage"]


def test_a_fit_of_few_points_is_told_how_often_such_intervals_hold_the_truth():
    (by_point,), _ = of_few(planted.table(coverage.isoflop(5, 8)))
    where = "(about 40 points, IsoFLOP, hoffmann, huber_log, by point, percentile)"
    assert by_point.startswith(f"40 points: in such a design {where} 95 % intervals held the truth in 97 to 99 %")
    # As promised: said, and no warning.
    warned, (few,) = of_few(planted.table(coverage.grid(6, 3)), interval=Interval.BCA)
    assert not warned
    assert "about 15 points, N x D, hoffmann, huber_log, by point, bca" in few
    assert of_few(planted.table(coverage.grid(10, 10))) == ([], [])
    assert of_few(planted.table(coverage.grid(6, 3)), bootstrap=0) == ([], [])


@pytest.mark.parametrize(("options", "reason"), [
    ({"law": "kaplan_n"}, "for the law kaplan_n"), ({"objective": "log_absolute"}, "for the objective log_absolute"),
    ({"objective": "huber_log:1e-2"}, "for the objective huber_log"), ({"pins": {"E": 1.8}}, "with pins"),
    ({"bootstrap": 20}, "with under 200 resamples"),
])  # fmt: skip
def test_coverage_that_was_not_measured_is_not_told(options, reason):
    (told,), kept = of_few(planted.table(coverage.grid(6, 3)), **options)
    assert f"is not measured {reason}" in told
    assert not kept


def test_coverage_is_not_told_of_a_fit_that_is_not_certified():
    rows = planted.table(coverage.grid(6, 3)).assign(loss=3.0)
    (told,), _ = of_few(rows)
    assert "is not measured for a fit that is not certified" in told


def test_clusters_count_not_rows():
    rows = planted.table(coverage.isoflop(10, 12))
    _, (told,) = of_few(rows.assign(run=np.arange(120) // 3), cluster="run")
    assert told.startswith("40 clusters: in such a design (about 40 clusters, IsoFLOP, hoffmann, huber_log, by cluster")


def test_measured_coverage_is_what_is_promised_from_a_hundred_points_up():
    # The acceptance of the study: each parameter and derived quantity, within what 400 replicates can tell.
    measured = coverage.measured()
    assert measured["replicates"] == 400
    for row in measured["rows"]:
        if row["points"] >= coverage.MANY:
            for name, share in row["held"].items():
                assert 0.92 <= share <= 0.98, (row["design"], row["resampling"], row["interval"], name)


def test_a_long_table_is_solved_in_pieces_to_the_same_answer(monkeypatch):
    from lm.scaling.fitting import solve

    found = read.points(planted.table(coverage.grid(20, 20)), read.Columns("n", "d", None, "loss"))
    whole = fit_points(found, HOFFMANN, HUBER, {})
    monkeypatch.setattr(solve, "PIECE", 64)
    monkeypatch.setattr(solve, "THIN", 200)
    pieces = fit_points(found, HOFFMANN, HUBER, {})
    assert pieces.certificate.passed
    assert pieces.certificate.starts == whole.certificate.starts
    # Sums in another order: the optimum is flat to about half the digits.
    np.testing.assert_allclose(pieces.estimate, whole.estimate, rtol=1e-6)
    spec = Bootstrap(30, Resampling.POINT, 0)
    some = draw(pieces.problem, pieces.theta, spec).theta
    monkeypatch.setattr(bootstrap, "COUNTS_AT_ONCE", 7 * len(found))
    np.testing.assert_array_equal(draw(pieces.problem, pieces.theta, spec).theta, some)
