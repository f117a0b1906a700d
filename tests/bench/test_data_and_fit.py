"""`lm bench data` and `lm bench fit` on tiny work: who takes part, which way ratios go, what a note owns up to."""

import pytest

from lm.bench.data import Draw, bench_data
from lm.bench.fit import Work, bench_fit
from lm.bench.machine import Meter
from lm.bench.rows import Unit


@pytest.mark.slow
def test_data_has_both_ways_against_both_peers_and_the_limit():
    rows, facts = bench_data(2, Meter(), [Draw(length=8, batch=2, steps=3)], tokens=2000)
    assert [row.case for row in rows] == ["T8 B2 batches[step]", "T8 B2 iterate"]
    for row in rows:
        assert row.unit is Unit.MEGATOKENS_PER_SECOND
        assert row.missing == {}
        assert len(row.peers) == 2
        assert row.share_of_limit == pytest.approx(row.median / row.limit)
    assert rows[0].limit == rows[1].limit
    assert "grain" in next(iter(facts["T8 B2"].values()))


@pytest.mark.slow
def test_fit_scales_what_the_peer_did_to_the_full_amount_and_says_so():
    work = Work(
        budgets=5, sizes=6, resamples=20, starts=20, sample=2, long_budgets=10, long_sizes=400, long_resamples=20
    )
    rows, facts = bench_fit(2, Meter(), work)
    point, resamples, whole, long, *others, imports = rows
    assert all(row.unit is Unit.SECONDS and not row.missing for row in rows)
    assert long.case == "4,000 rows"
    assert {"law gamma", "law repeated"} <= {row.case for row in others}
    assert not any(row.peers for row in others)
    for row, amount in ((point, 20), (resamples, 20), (long, 20)):
        assert str(amount) in row.case + row.note
        assert "scaled linearly" in row.note
    (p,), (r,), (w,) = (list(row.peers.values()) for row in (point, resamples, whole))
    assert w == pytest.approx([a + b for a, b in zip(p, r, strict=True)])
    assert list(imports.peers) == ["NumPy, pandas, SciPy"]
    # SciPy refits the whole table from our answer: it must be a minimum of the same objective.
    assert facts["resamples"]["objective"] == pytest.approx(facts["ours"]["objective"], rel=1e-3)
