"""Ladders as data: the algebra of points, sizes from a rule, lengths from budgets, strictness."""

import json

import pytest

from lm.base.config import build, to_dict
from lm.base.errors import UsageError
from lm.data.corpus import prepare, tokenize
from lm.model.accounting import Flops, count_parameters, step_flops
from lm.sweep.cell import Order, carry_out
from lm.sweep.ladder import Cell, Ladder, Role, axis, chain, grid, isoflop, load_ladder, product, sizes, zip_
from lm.sweep.local import slots
from lm.train.config import CountingRun, RunConfig

BASE = {
    "model": {"vocab_size": 257, "context_length": 16, "n_layer": 1, "d_model": 8, "n_head": 2, "d_ff": 32},
    "optimizer": {"peak_lr": 1e-2, "warmup_steps": 1},
    "batch_size": 2,
    "steps": 10,
}


@pytest.fixture
def base() -> RunConfig:
    return build(RunConfig, BASE)


def test_product_takes_every_combination_and_the_last_list_turns_fastest():
    points = product(axis("seed", [0, 1]), axis("steps", [5, 6, 7]))
    assert [(p["seed"], p["steps"]) for p in points] == [(0, 5), (0, 6), (0, 7), (1, 5), (1, 6), (1, 7)]


def test_chain_and_zip_keep_order_and_zip_refuses_unequal_lists():
    assert chain(axis("seed", [1]), axis("seed", [2, 3])) == axis("seed", [1, 2, 3])
    assert zip_(axis("seed", [1, 2]), axis("steps", [3, 4])) == [{"seed": 1, "steps": 3}, {"seed": 2, "steps": 4}]
    with pytest.raises(UsageError, match="equally long"):
        zip_(axis("seed", [1]), axis("steps", [3, 4]))


def test_sizes_follow_the_rule():
    by_aspect = sizes([64, 128], ff_ratio=4, aspect=32, d_head=16)
    assert [p["model.n_layer"] for p in by_aspect] == [2, 4]
    assert [p["model.n_head"] for p in by_aspect] == [4, 8]
    assert [p["model.d_ff"] for p in by_aspect] == [256, 512]
    assert all(p["model.n_head"] == 2 for p in sizes([12, 20], ff_ratio=4, depth=2, n_head=2))
    assert all(p["model.d_ff"] == 0 for p in sizes([12, 20], ff_ratio=0, depth=2, n_head=1))  # no feed-forward
    for wrong in (
        {"depth": 2, "aspect": 4, "n_head": 2},
        {"depth": 2},
        {"depth": 2, "d_head": 7},
        {"depth": 2, "n_head": 5},
    ):
        with pytest.raises(UsageError):
            sizes([64], ff_ratio=4, **wrong)


@pytest.mark.parametrize("flops", list(Flops))
def test_an_isoflop_cell_spends_its_budget_under_its_own_convention(base, flops):
    budget = 3e9
    for cell in isoflop(sizes([8, 16], ff_ratio=4, depth=1, n_head=2), [budget], flops=flops.value):
        config = build(Cell, cell).config(base)
        spent = step_flops(config.model, config.steps * config.tokens_per_step, flops)
        one_step = step_flops(config.model, config.tokens_per_step, flops)
        assert abs(spent - budget) <= one_step / 2  # whole steps, rounded
        assert config.optimizer.warmup_steps == max(1, round(0.05 * config.steps))


def test_a_grid_is_n_times_d(base):
    shapes = sizes([8, 16], ff_ratio=4, depth=1, n_head=2)
    cells = [build(Cell, cell) for cell in grid(shapes, [640, 1280], per_parameter=False)]
    assert [cell.config(base).steps for cell in cells] == [20, 20, 40, 40]
    ratios = [build(Cell, cell).config(base) for cell in grid(shapes, [3.0], per_parameter=True)]
    for config in ratios:
        tokens = 3.0 * count_parameters(config.model).total
        assert abs(config.steps * config.tokens_per_step - tokens) <= config.tokens_per_step / 2


def test_a_misspelled_leaf_is_named_with_the_nearest_known_one(base):
    with pytest.raises(UsageError, match=r"d_modle.*Did you mean 'd_model'"):
        Cell({"model.d_modle": 8}).config(base)
    with pytest.raises(UsageError, match="no leaf"):
        Cell({"mdoel.d_model": 8}).config(base)


def test_one_length_a_cell_and_one_held_out_cell_a_ladder(base):
    with pytest.raises(UsageError, match="more than one of"):
        Cell({}, budget=1e9, tokens=100)
    with pytest.raises(UsageError, match="more than one cell is held out"):
        Ladder("x", base, (build(Cell, {"overrides": {}, "role": "holdout"}),) * 2)
    with pytest.raises(UsageError, match="cannot name a folder"):
        Ladder("a/b", base, (Cell({}),))
    with pytest.raises(UsageError, match="cannot name a folder"):
        Ladder("..", base, (Cell({}),))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"fit": {"law": "hofman"}}, "hofman"),
        ({"fit": {"n": "params_totl"}}, "Did you mean 'params_total'"),
        ({"fit": {"objective": "zz"}}, "zz"),
        ({"fit": {"bootstrap": -1}}, "resamples"),
        ({"cells": [{"overrides": {}, "budget": -5.0}]}, "must be positive"),
        ({"cells": [{"overrides": {}, "tokens": 100, "warmup": 5.0}]}, "share of the steps"),
        ({"cells": [{"overrides": {}, "role": "tune"}]}, "no cell has the role 'fit'"),
        ({"tune": {"cells": [{"overrides": {}}], "rates": [0.0]}}, "rates that are positive"),
        ({"tune": {"cells": [], "rates": [1e-3]}}, "it needs cells"),
    ],
)
def test_what_is_wrong_with_a_ladder_is_said_before_anything_is_trained(wrong, said):
    with pytest.raises(UsageError, match=said):
        build(Ladder, {"name": "x", "base": BASE, "cells": [{"overrides": {}}], **wrong})


def test_fewer_than_one_cell_at_once_is_refused():
    with pytest.raises(UsageError, match="--jobs"):
        slots(0)


def test_the_quick_ladder_is_what_its_text_says():
    ladder = load_ladder("configs/ladders/quick.py")
    fitted = [cell for cell in ladder.cells if cell.role == "fit"]
    budgets = sorted({cell.budget for cell in fitted})
    assert [sum(cell.budget == budget for cell in fitted) for budget in budgets] == [5, 5, 5, 5]
    (held_out,) = [cell for cell in ladder.cells if cell.role == "holdout"]
    assert held_out.budget == 2.5 * budgets[-1]
    assert all(cell.config(ladder.base).steps >= 1000 for cell in ladder.cells)


def test_overrides_reach_the_base_and_unknown_ones_are_refused():
    assert load_ladder("configs/ladders/quick.py", ["base.data.seed=7"]).base.data.seed == 7
    with pytest.raises(UsageError, match="nmae"):
        load_ladder("configs/ladders/quick.py", ["nmae=x"])


def test_the_quick_ladder_takes_a_folder_of_tokens_and_keeps_its_sizes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {i} of some words {i * i}" for i in range(60)))
    tokenize([str(text)], tmp_path / "mine", bpe_vocabulary=300, validation_fraction=0.2, separator="\n\n")
    ladder = load_ladder(f"configs/ladders/quick.py:{tmp_path / 'mine'}")
    assert ladder.name == "quick-mine"
    assert ladder.base.model.vocab_size == prepare(ladder.base.data, tmp_path / "cache").tokenizer.vocab_size
    default = load_ladder("configs/ladders/quick.py")
    for mine, theirs in zip(ladder.cells, default.cells, strict=True):
        n, usual = (
            count_parameters(cell.config(of.base).model).total for cell, of in ((mine, ladder), (theirs, default))
        )
        assert abs(n / usual - 1) < 0.2  # widths are multiples of 4


def test_a_folder_that_holds_no_tokens_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a folder of token files"):
        load_ladder(f"configs/ladders/quick.py:{tmp_path}")


COUNTED = {"model": {"vocab_size": 257, "context_length": 16, "order": 3}}


def test_a_cell_that_counts_takes_from_the_base_what_it_shares_with_it(base):
    config = Cell(COUNTED | {"data.seed": 3}, role=Role.BASELINE, tokens=640).config(base)
    assert isinstance(config, CountingRun)
    assert (config.steps, config.batch_size, config.data.seed, config.model.order) == (20, 2, 3, 3)
    assert Cell(COUNTED, role=Role.BASELINE).config(base).steps == 10


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ({}, "no point of a law, and its role is fit.*'baseline'"),
        ({"role": Role.BASELINE, "budget": 1e9}, "budget is given.*Give tokens"),
        ({"role": Role.BASELINE, "tokens_per_parameter": 20.0}, "tokens_per_parameter is given"),
    ],
)
def test_what_counting_has_not_is_refused_by_name(base, cell, said):
    with pytest.raises(UsageError, match=said):
        Cell(COUNTED, **cell).config(base)


def test_a_counting_cell_is_carried_out_as_any_other(base, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"document {i} of some words {i * i}" for i in range(60)))
    data = {"data.corpus": str(tmp_path / "text.txt"), "data.separator": "\n\n", "data.validation_fraction": 0.2}
    config = Cell(COUNTED | data, role=Role.BASELINE, tokens=640).config(base)
    labels = {"sweep": "x", "role": "baseline", "budget": 0.0}
    assert carry_out(Order(to_dict(config), str(tmp_path / "run"), str(tmp_path / "cache"), labels)) == 0
    row = json.loads((tmp_path / "run/result.json").read_bytes())
    assert (row["role"], row["tokens"], row["flops_matmul"]) == ("baseline", 640, 0)
