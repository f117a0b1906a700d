import numpy as np
import pytest

from lm.base.errors import UsageError
from lm.scaling.fit import fit_table
from lm.scaling.fitting.bootstrap import Bootstrap, Resampling
from tests.scaling import planted


@pytest.mark.parametrize("resamples", [-1, 1, 19])
def test_too_few_resamples_are_refused_wherever_they_are_asked_for(resamples):
    with pytest.raises(UsageError, match="at least 20"):
        Bootstrap(resamples, Resampling.POINT, 0)
    with pytest.raises(UsageError, match="at least 20"):
        fit_table(planted.table(), n="n", d="d", c=None, bootstrap=resamples)
    assert Bootstrap(0, Resampling.POINT, 0).resamples == 0
