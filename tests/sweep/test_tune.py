"""The tune stage's rule, on measured losses whose best rate is known."""

import numpy as np
import pytest

from lm.base.errors import RunError
from lm.sweep.tune import fit_rule

RATES = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]


def rows(sizes, best, rates=RATES):
    """Losses that are parabolas in log rate with their minimum at `best(n)`."""
    return [{"n": n, "peak_lr": rate, "loss": 2.0 + 0.1 * np.log(rate / best(n)) ** 2} for n in sizes for rate in rates]


def test_a_power_law_of_the_best_rate_is_recovered_exactly():
    best = lambda n: 0.1 * n**-0.3  # noqa: E731
    rule = fit_rule(rows([10_000, 30_000, 100_000], best))
    assert rule.exponent == pytest.approx(-0.3, abs=1e-9)  # three exact parabolas: nothing but rounding
    assert rule.rate(1_000_000) == pytest.approx(best(1_000_000), rel=5e-3)  # three significant digits


def test_a_rate_that_does_not_move_gives_one_rate_for_every_size():
    rule = fit_rule(rows([10_000, 30_000, 100_000], lambda n: 3e-3))
    assert rule.rate(10) == rule.rate(1e9) == pytest.approx(3e-3, rel=5e-3)


def test_an_exponent_that_noise_could_make_is_not_carried_up():
    offsets = {10_000: 1.5, 30_000: 0.6, 100_000: 1.4}
    rule = fit_rule(rows(offsets, lambda n: 3e-3 * offsets[n]))
    assert rule.exponent == 0.0
    assert "not told from 0" in rule.text


def test_two_sizes_give_a_rate_and_no_exponent():
    assert fit_rule(rows([10_000, 100_000], lambda n: 0.1 * n**-0.3)).exponent == 0.0


def test_a_best_rate_at_the_edge_is_said():
    rule = fit_rule(rows([10_000, 30_000, 100_000], lambda n: 1e-4))
    assert "edge" in rule.text
    assert rule.rate(10_000) == pytest.approx(1e-3)


def test_no_finished_cell_is_an_error():
    with pytest.raises(RunError, match="no cell of the tune stage"):
        fit_rule([])
