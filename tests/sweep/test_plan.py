"""The plan as it is shown before anything is trained."""

import io

import rich.console

from lm.sweep.ladder import Cell, Role, load_ladder
from lm.sweep.plan import Planned, estimated_seconds, plan_table


def planned_quick() -> list[Planned]:
    ladder = load_ladder("configs/ladders/quick.py")
    counted = Cell({"model": {"vocab_size": 257, "context_length": 64, "order": 5}}, role=Role.BASELINE, tokens=1e6)
    cells = enumerate([*ladder.cells, counted])
    return [Planned(str(i), cell.role, 0.0, cell.config(ladder.base)) for i, cell in cells]


def test_the_plan_of_the_default_ladder_fits_a_terminal_of_80_columns():
    output = io.StringIO()
    rich.console.Console(file=output, width=80).print(plan_table(planned_quick(), "quick"))
    assert "…" not in output.getvalue()
    assert len(output.getvalue().splitlines()) > len(planned_quick())


def test_the_estimate_falls_with_slots_and_rate_but_never_below_the_longest_cell():
    cells = planned_quick()
    one, two = (estimated_seconds(cells, slots, 1e11) for slots in (1, 2))
    assert two == one / 2
    assert estimated_seconds(cells, 1, 2e11) < one
    assert estimated_seconds(cells, 1000, 1e11) == max(estimated_seconds([cell], 1, 1e11) for cell in cells)
