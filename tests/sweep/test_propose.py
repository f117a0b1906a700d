"""From a plan to a ladder: what is written loads, plans and holds cells of about the size and length proposed."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest

from lm.base.config import build
from lm.base.errors import UsageError
from lm.cli import main
from lm.data.corpus import tokenize
from lm.model.accounting import Flops, count_parameters, step_flops
from lm.scaling.fit import fit_table
from lm.scaling.planning.plan import plan
from lm.scaling.result import FitResult
from lm.sweep.ladder import FITTED, Ladder, load_ladder
from lm.sweep.propose import nearest_shape, write_ladder

TRUTH = {"E": 1.05, "A": 18.3, "B": 29.5, "alpha": 0.34, "beta": 0.28}


def counts(ladder: Ladder, cell) -> tuple[int, int, int]:
    """Parameters, tokens and FLOP (every product) of a cell."""
    config = cell.config(ladder.base)
    tokens = config.steps * config.tokens_per_step
    return count_parameters(config.model).total, tokens, step_flops(config.model, tokens, Flops.MATMUL)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> str:
    """The default ladder of a small text of one's own, as `lm plan --base` takes it."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n\n".join(f"document {i} of some words {i * i}" for i in range(90)))
    tokenize([str(folder / "text.txt")], folder / "mine", validation_fraction=0.2, separator="\n\n")
    return f"configs/ladders/quick.py:{folder / 'mine'}"


@pytest.fixture(scope="module")
def fit_file(tmp_path_factory, quick):
    """A fit of that ladder's cells with planted losses."""
    ladder = load_ladder(quick)
    n, d, c = np.array([counts(ladder, cell) for cell in ladder.cells if cell.role in FITTED], float).T
    exact = TRUTH["E"] + TRUTH["A"] * n ** -TRUTH["alpha"] + TRUTH["B"] * d ** -TRUTH["beta"]
    loss = exact * np.exp(0.004 * np.random.default_rng(0).standard_normal(len(n)))
    rows = pd.DataFrame({"params_total": n, "tokens": d, "flops_matmul": c, "loss": loss})
    path = tmp_path_factory.mktemp("fit") / "fit.json"
    fit_table(rows, bootstrap=200).save(path)
    return path


def test_plan_writes_a_ladder_that_sweep_takes(quick, fit_file, tmp_path, capsys):
    path = tmp_path / "ladders" / "next.py"
    command = ["plan", "--fit", str(fit_file), "--budget", "3e12", "--ladder", str(path), "--base", quick]
    assert main([*command, "--column", "5", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert f"written: {path}, 8 cells after those of {quick}" in told.err
    assert len(path.read_text().splitlines()) < 50
    base, ladder = load_ladder(quick), load_ladder(str(path))
    old = len(base.cells)
    assert dataclasses.replace(ladder, cells=ladder.cells[:old]) == base
    added = [counts(ladder, cell) for cell in ladder.cells[old:]]
    optimum, proposed = found["optima"][0]["n"]["value"], found["next_runs"]["runs"]
    sizes = [run["n"] for run in proposed] + [optimum * 1.6**k for k in (-2, -1, 0, 1, 2)]
    for n, (counted, _, _) in zip(sizes, added, strict=True):
        # Widths are multiples of 4: half a step of a model 16 wide or wider moves n by at most a fifth.
        assert abs(math.log(counted / n)) < math.log(1.25)
    for run, (_, tokens, _) in zip(proposed, added[:3], strict=True):
        assert abs(tokens - run["d"]) <= ladder.base.tokens_per_step / 2  # whole steps
    for _, _, flops in added[3:]:
        assert flops == pytest.approx(3e12, rel=1e-3)  # a thousand steps and more, rounded
    assert main(["sweep", str(path), "--workdir", str(tmp_path / "runs"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{counted:,}" in shown for counted, _, _ in added)
    assert not list((tmp_path / "runs").glob("*/*/result.json"))


def test_the_same_run_again_has_another_seed(quick, fit_file, tmp_path):
    found = plan(FitResult.load(fit_file), budgets=[3e12], next_count=2)
    twice = dataclasses.replace(found.next_runs, runs=(found.next_runs.runs[0],) * 3)
    write_ladder(dataclasses.replace(found, next_runs=twice), tmp_path / "next.py", quick)
    ladder = load_ladder(str(tmp_path / "next.py"))
    configs = [cell.config(ladder.base) for cell in ladder.cells[-3:]]
    assert [config.seed for config in configs] == [0, 1, 2]
    assert [config.data.seed for config in configs] == [0, 1, 2]


@pytest.mark.parametrize("counted", ["params_total", "params_nonembedding"])
def test_the_nearest_shape_is_no_farther_than_its_neighbours(quick, counted):
    ladder = load_ladder(quick)
    for n in (1e4, 3.3e4, 2e5, 5e7):
        shape, count = nearest_shape(ladder, n, counted)
        assert shape["model.n_layer"] == 2
        assert shape["model.n_head"] == 2
        for step in (-4, 4):
            width = shape["model.d_model"] + step
            other = dataclasses.replace(ladder.base.model, d_model=width, d_ff=4 * width)
            neighbour = getattr(count_parameters(other), counted.removeprefix("params_"))
            assert abs(math.log(count / n)) <= abs(math.log(neighbour / n))


def ladder_of(*shapes) -> Ladder:
    leaves = ("model.d_model", "model.n_layer", "model.n_head")
    cells = [{"overrides": dict(zip(leaves, shape, strict=True))} for shape in shapes]
    base = {"model": {"vocab_size": 257, "context_length": 16, "n_layer": 1, "d_model": 8, "n_head": 2, "d_ff": 32},
            "optimizer": {"peak_lr": 1e-2, "warmup_steps": 1}, "batch_size": 2, "steps": 10}  # fmt: skip
    return build(Ladder, {"name": "x", "base": base, "cells": cells})


def test_depth_follows_a_constant_aspect_and_heads_a_constant_width():
    shape, _ = nearest_shape(ladder_of((64, 2, 4), (128, 4, 8)), 1e7)
    assert shape["model.n_layer"] == round(shape["model.d_model"] / 32)
    assert shape["model.n_head"] == shape["model.d_model"] / 16


def test_what_cannot_be_written_is_told(quick, fit_file, tmp_path, capsys):
    with pytest.raises(UsageError, match="no rule to go on by"):
        nearest_shape(ladder_of((64, 2, 4), (128, 4, 4), (120, 4, 10)), 1e6)
    with pytest.raises(UsageError, match="nearest shape"):
        nearest_shape(load_ladder(quick), 100)
    request = ["plan", "--fit", str(fit_file), "--budget", "3e12"]
    for more, words in (
        (["--ladder", str(tmp_path / "x.py")], "--base"),
        (["--column", "3"], "--ladder"),
        (["--ladder", str(tmp_path / "x.txt"), "--base", quick], "ends in .py"),
        (["--ladder", str(tmp_path / "x.py"), "--base", "absent.py"], "Pass --base"),
        (["--ladder", str(tmp_path / "x.py"), "--base", quick, "--column", "26"], "0 to 25"),
        (["--ladder", str(tmp_path / "x.py"), "--base", quick, "--column", "-1"], "0 to 25"),
        (["--ladder", str(tmp_path / "x.py"), "--base", quick, "--next", "0"], "no runs to write"),
    ):
        assert main([*request, *more]) == 2
        told = capsys.readouterr()
        assert words in told.err
        assert not told.out
    assert not (tmp_path / "x.py").exists()


def test_no_file_is_replaced_by_another(quick, fit_file, tmp_path, capsys):
    path, by_hand = tmp_path / "next.py", tmp_path / "hand.py"
    by_hand.write_text("CELLS = []\n")
    request = ["plan", "--fit", str(fit_file), "--budget", "3e12", "--ladder"]
    for _ in range(2):  # the same again is no loss
        assert main([*request, str(path), "--base", quick]) == 0
    written = path.read_text()
    for more in ([str(by_hand), "--base", quick], [str(path), "--base", str(path)]):
        assert main([*request, *more]) == 2
        assert "stands already and differs" in capsys.readouterr().err
    assert (path.read_text(), by_hand.read_text()) == (written, "CELLS = []\n")
