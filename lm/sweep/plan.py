"""What a ladder will run: each cell resolved, named by content, and with what it costs."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import rich.box
import rich.table

from lm.base.config import to_dict
from lm.data.corpus import Corpus
from lm.model.accounting import Flops, count_parameters, step_flops
from lm.sweep.ladder import Cell, Role
from lm.train.config import AnyRun, RunConfig
from lm.train.identity import cell_id, identity_of

STARTUP_SECONDS = 6.0  # imports, compilation and evaluation of a small cell on the machine of docs/diary.md
SHARE_OF_MATMUL = 0.3  # of the measured matmul rate that small cells reach there


@dataclasses.dataclass(frozen=True)
class Planned:
    """One cell, ready to run."""

    id: str
    role: Role
    budget: float
    config: AnyRun

    @property
    def values(self) -> dict[str, Any]:
        """The whole configuration as plain values."""
        return to_dict(self.config)

    @property
    def flops(self) -> int:
        """Training FLOP, every product counted (`flops_matmul`)."""
        return step_flops(self.config.model, self.tokens, Flops.MATMUL) if isinstance(self.config, RunConfig) else 0

    @property
    def n(self) -> int:
        """All parameters; 0 for counts, whose number is not known beforehand."""
        return count_parameters(self.config.model).total if isinstance(self.config, RunConfig) else 0

    @property
    def tokens(self) -> int:
        """Tokens predicted in training."""
        return self.config.steps * self.config.tokens_per_step


def planned(cells: Iterable[tuple[Cell, AnyRun]], corpus_of: Callable[[AnyRun], Corpus]) -> list[Planned]:
    """Names each cell by its content; of cells that are the same run, the first is kept."""
    found: dict[str, Planned] = {}
    for cell, config in cells:
        name = cell_id(config, identity_of(config, corpus_of(config)))
        found.setdefault(name, Planned(name, cell.role, cell.budget or 0.0, config))
    return list(found.values())


def estimated_seconds(cells: Iterable[Planned], slots: int, matmul_flops: float) -> float:
    """Seconds for `cells` on `slots` slots, from a measured matmul rate (FLOP/s of one slot) and typical overheads."""
    cells = list(cells)
    work = [STARTUP_SECONDS + cell.flops / (SHARE_OF_MATMUL * matmul_flops) for cell in cells]
    return max([sum(work) / slots, *work])


def plan_table(cells: Iterable[Planned], title: str) -> rich.table.Table:
    """The plan for the terminal: a row a cell."""
    table = rich.table.Table(title=title, box=rich.box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for heading in ("role", "L x D", "parameters", "tokens", "D/N", "steps", "FLOP", "lr"):
        table.add_column(heading, justify="left" if heading == "role" else "right", no_wrap=True)
    for cell in cells:
        if isinstance(cell.config, RunConfig):
            model, rate = cell.config.model, f"{cell.config.optimizer.peak_lr:.3g}"
            shape, n, ratio = f"{model.n_layer} x {model.d_model}", f"{cell.n:,}", f"{cell.tokens / cell.n:.1f}"
        else:
            shape, n, ratio, rate = f"order {cell.config.model.order}", "", "", ""
        table.add_row(
            cell.role.value, shape, n, f"{cell.tokens:,}", ratio, f"{cell.config.steps:,}", f"{cell.flops:.2e}", rate
        )
    return table
