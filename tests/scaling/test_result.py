"""A fit that was damaged or typed by hand is refused where it is read, by the name of what is wrong."""

import json
import math

import pytest

from lm.base.errors import UsageError
from lm.cli import main
from lm.scaling.checks import coverage
from lm.scaling.fit import fit_table
from lm.scaling.result import FitResult
from tests.scaling import planted


@pytest.fixture(scope="module")
def value() -> dict:
    return fit_table(planted.table(coverage.grid(5, 4)), n="n", d="d", c=None, bootstrap=20, checks=False).to_json()


@pytest.mark.parametrize(("path", "damage", "words"), [
    ("noise", {}, "fit.noise: the field 'residual_sd' is missing"),
    ("noise.seed_sd", -1.0, "seed_sd = -1"),
    ("noise.freedom", 0.0, "freedom = 0"),
    ("noise.freedom", None, "fit.noise.freedom"),
    ("provenance", {}, "fit.provenance: the field 'flops_per_nd' is missing"),
    ("provenance.flops_per_nd", "six", "flops_per_nd: expected float"),
    ("provenance.flops_per_nd", -6, "flops_per_nd = -6"),
    ("provenance.conventions", None, "conventions: expected a sequence"),
    ("provenance.columns", {}, "'columns' has no 'n'"),
    ("fitted_range", {}, "fit.fitted_range: the field 'n' is missing"),
    ("fitted_range.n", 1e9, "fitted_range.n: expected a sequence"),
    ("fitted_range.d", [1e9], "fitted range of d"),
    ("fitted_range.c", [1e20, 1e18], "fitted range of c"),
    ("fitted_range.c", [0, 1e18], "fitted range of c"),
    ("warnings", None, "fit.warnings"),
    ("warnings", [1], "fit.warnings"),
    ("objective", None, "fit.objective"),
    ("objective", {}, "the field 'delta' is missing"),
    ("objective.delta", -1.0, "delta = -1"),
    ("parameters.E", -1.0, "E = -1"),
    ("parameters.A", 0, "A = 0"),
    ("parameters.alpha", 0.0, "alpha = 0"),
    ("parameters.alpha", math.nan, "not a finite number"),
    ("parameters.alpha", True, "parameters.alpha"),
    ("parameters.gamma", 1.0, "not all is of the parameters"),
    ("bootstrap_samples", [[math.nan] * 5], "not a finite number"),
    ("bootstrap_samples", [[1.8, 400.0, -400.0, 0.3, 0.3]], "B = -400"),
    ("intervals.E", [math.inf, None], "not a finite number"),
])  # fmt: skip
def test_damage_is_refused_by_name(value, path, damage, words):
    part, _, leaf = path.partition(".")
    with pytest.raises(UsageError, match=r"^fit") as refused:
        FitResult.from_json(value | {part: value[part] | {leaf: damage} if leaf else damage})
    assert words in str(refused.value)


def test_what_a_fit_may_lack_is_taken(value):
    noise = value["noise"] | {"residual_sd": None, "seed_sd": None}
    old = {name: ends for name, ends in value["fitted_range"].items() if name != "tokens_per_parameter"}
    changes = {"bootstrap_samples": [], "noise": noise, "fitted_range": old, "objective": {"delta": None}}
    changes["parameters"] = value["parameters"] | {"E": 0}
    assert FitResult.from_json(value | changes).parameters["E"] == 0


def test_a_law_of_repeated_data_needs_the_range_of_distinct_tokens(value):
    names = ("E", "A", "B", "alpha", "R_D", "R_N")
    repeated = {"law": "repeated", "parameters": dict.fromkeys(names, 1.0), "bootstrap_samples": []}
    with pytest.raises(UsageError, match="fitted range of u"):
        FitResult.from_json(value | repeated)


def test_the_commands_name_file_and_field(value, tmp_path, capsys):
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(value | {"noise": {"residual_sd": math.nan}}))
    for request in (["predict", "--n", "1e9", "--d", "2e10", "--json"], ["plan", "--budget", "1e23"]):
        assert main([request[0], "--fit", str(path), *request[1:]]) == 2
        told = capsys.readouterr()
        assert f"{path}: fit.noise.residual_sd" in told.err
        assert not told.out
