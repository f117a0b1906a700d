"""The study of all kinds of models, as small as it goes."""

import math
import sys

import pytest

from experiments.models import run


@pytest.mark.full
def test_every_kind_of_model_has_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["models", "--quick", "--workdir", str(tmp_path)])
    run.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows] == ["model", *run.COUNTING, *run.NEURAL]
    uniform = float(rows[1][6].split(",")[0])
    assert uniform >= math.log2(run.VOCABULARY)  # the end of a document is predicted too, and is no byte


def test_trainings_take_the_same_flops():
    """To half a step, which is at most a quarter of a per cent of 5e11 FLOP."""
    for model in run.NEURAL.values():
        steps = [run.steps_of(model, flops) for flops in (5e11, 1e12)]
        assert abs(steps[1] / steps[0] - 2) < 0.01
