"""A sweep, top to bottom: plan, tune, train the rest, gather the table, fit, predict the held-out run, report."""

import dataclasses
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import rich

from lm.base.config import content_hash, to_dict
from lm.base.errors import LmError, RunError, UsageError
from lm.base.files import write_json, write_text
from lm.base.progress import bar, console
from lm.base.signals import answering
from lm.data.corpus import Corpus, prepare
from lm.model.accounting import count_parameters
from lm.run.lock import locked
from lm.run.record import read_result
from lm.scaling.fit import fit_table
from lm.scaling.laws.power import HOFFMANN
from lm.scaling.pages.describe import describe
from lm.scaling.pages.report import write_report
from lm.scaling.planning.predict import predict
from lm.scaling.result import FitResult
from lm.scaling.table import NAMES
from lm.sweep.folder import Listed, SweepFolder
from lm.sweep.ladder import FITTED, Cell, Fit, Ladder, Role
from lm.sweep.launch import Launcher
from lm.sweep.local import Local, slots
from lm.sweep.plan import Planned, plan_table, planned
from lm.sweep.tune import Rule, fit_rule
from lm.train.config import AnyRun, CountingRun

Row = dict[str, Any]


def sweep(ladder: Ladder, workdir: Path | str, *, launcher: Launcher | None = None, dry_run: bool = False) -> Path:
    """Runs what a ladder still lacks under `<workdir>/<ladder name>/` and returns that folder.

    Finished cells are skipped by content, interrupted ones continue, a failed one does not stop the others.

    Args:
      ladder: the sweep.
      workdir: where the sweep's folder lies.
      launcher: where cells run; None: here, one a core.
      dry_run: print the plan and its estimated cost, and train nothing.

    Raises:
      RunError: cells failed (all others are finished first), or nothing is left to fit.
      KeyboardInterrupt: stopped by SIGINT or SIGTERM. Cells on this machine have saved and ended, jobs go on.
    """
    folder = SweepFolder(Path(workdir) / ladder.name)
    launcher = launcher or Local(slots(None))
    # SIGTERM interrupts as Ctrl-C does: cells then save.
    with locked(folder.path), answering(signal.SIGTERM, signal.default_int_handler):
        corpora = _Corpora(folder.data)
        tune = _tune_cells(ladder, corpora)
        measured = _tune_rows(folder, tune)
        rule = fit_rule(measured) if tune and len(measured) == len(tune) else None
        cells = _cells(ladder, corpora, rule)
        _print_plan(ladder, folder, tune, cells, launcher, corpora)
        if dry_run:
            return folder.path
        write_json(folder.ladder, to_dict(ladder))
        failures = []
        if tune:
            _list(folder, tune if rule is None else [*tune, *cells], later=len(cells) if rule is None else 0)
            failures = _run("tune", ladder.name, folder, tune, launcher)
            cells = _cells(ladder, corpora, _rule(folder, tune))
        _list(folder, [*tune, *cells])
        failures += _run("cells", ladder.name, folder, cells, launcher)
        table = _gather(folder, [*tune, *cells])
        told = f"{len(failures)} of {len(tune) + len(cells)} cells failed: {'; '.join(failures)}"
        try:
            _fit(ladder, folder.path, table)
            print(f"\nreport: {write_report(folder.path)}")
        except LmError as error:
            if not failures:
                raise
            told += f"; the others give no fit: {error.what}"
        if failures:
            raise RunError(told, where=str(folder.path), do="The same command tries them again.")
    return folder.path


class _Corpora:
    """The corpora of a ladder's cells, each prepared once."""

    def __init__(self, cache: Path):
        self._cache = cache
        self._known: dict[str, Corpus] = {}

    def __call__(self, config: AnyRun) -> Corpus:
        key = content_hash(config.data)
        if key not in self._known:
            self._known[key] = prepare(config.data, self._cache)
        return self._known[key]


def _tune_cells(ladder: Ladder, corpora: _Corpora) -> list[Planned]:
    if ladder.tune is None:
        return []
    return planned(
        [
            (dataclasses.replace(cell, role=Role.TUNE), _at_rate(cell.config(ladder.base), rate))
            for cell in ladder.tune.cells
            for rate in ladder.tune.rates
        ],
        corpora,
    )


def _cells(ladder: Ladder, corpora: _Corpora, rule: Rule | None) -> list[Planned]:
    """The cells after the tune stage, at the rates of its rule (of the base while there is none)."""

    def config(cell: Cell) -> AnyRun:
        plain = cell.config(ladder.base)
        if rule is None or "optimizer.peak_lr" in cell.overrides or isinstance(plain, CountingRun):
            return plain
        return _at_rate(plain, rule.rate(count_parameters(plain.model).total))

    return planned([(cell, config(cell)) for cell in ladder.cells], corpora)


def _at_rate(config: AnyRun, rate: float) -> AnyRun:
    if isinstance(config, CountingRun):
        raise UsageError("a counting model has no learning rate to tune", where="ladder.tune", do="Leave it out.")
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, peak_lr=rate))


def _print_plan(
    ladder: Ladder,
    folder: SweepFolder,
    tune: Sequence[Planned],
    cells: Sequence[Planned],
    launcher: Launcher,
    corpora: _Corpora,
) -> None:
    title = f"{ladder.name}: cells"
    if tune:
        rich.print(plan_table(tune, f"{ladder.name}: tune stage"))
        title += "" if all(folder.finished(cell.id) for cell in tune) else " (their rates follow from the tune stage)"
    rich.print(plan_table(cells, title))
    epochs = [
        corpora(config).epochs(config.steps * config.batch_size, config.model.context_length)
        for config in (cell.config for cell in cells)
    ]
    if max(epochs) > 1:
        print(f"{sum(epoch > 1 for epoch in epochs)} cells read the training text more than once, "
              f"at most {max(epochs):.1f} times: the law has no term for repetition")  # fmt: skip
    left = [cell for cell in [*tune, *cells] if not folder.finished(cell.id)]
    flops = sum(cell.flops for cell in left)
    print(f"{len(left)} of {len(tune) + len(cells)} cells to train, {flops:.3g} FLOP, {launcher.outlook(left)}")


def _list(folder: SweepFolder, cells: Iterable[Planned], later: int = 0) -> None:
    folder.write_list([Listed(cell.id, cell.role.value, cell.n, cell.config.steps) for cell in cells], later)


def _run(title: str, name: str, folder: SweepFolder, cells: Sequence[Planned], launcher: Launcher) -> list[str]:
    """Trains the cells that have no result yet; returns a line for each that failed."""
    waiting = [cell for cell in cells if not folder.finished(cell.id)]
    failures, spent, total = [], 0, sum(cell.flops for cell in waiting)
    with bar(title, total) as progress:
        for number, outcome in enumerate(launcher.run(folder, name, waiting), start=1):
            cell = outcome.cell
            spent += cell.flops
            what = f"[{number}/{len(waiting)}] {cell.id} {cell.role.value} N={cell.n:,} D={cell.tokens:,}"
            if outcome.why:
                failures.append(f"{cell.id} ({outcome.why})")
                write_text(folder.failure(cell.id), f"{outcome.why}\n")
                console.print(f"{what} FAILED: {outcome.why}", highlight=False, style="red")
            else:
                row = _result(folder, cell)
                console.print(f"{what} loss {row['loss']:.4f} in {row['wall_seconds']:.0f} s", highlight=False)
            progress.update(spent, f"{number} of {len(waiting)} cells")
    return failures


def _result(folder: SweepFolder, cell: Planned) -> Row:
    return read_result(folder.run(cell.id))


def _tune_rows(folder: SweepFolder, tune: Sequence[Planned]) -> list[Row]:
    finished = [_result(folder, cell) for cell in tune if folder.finished(cell.id)]
    return [{"n": row["params_total"], "peak_lr": row["peak_lr"], "loss": row["loss"]} for row in finished]


def _rule(folder: SweepFolder, tune: Sequence[Planned]) -> Rule:
    rows = _tune_rows(folder, tune)
    rule = fit_rule(rows)
    write_json(folder.tune, {"rows": rows, "rule": dataclasses.asdict(rule)})
    print(f"tune: {rule.text}")
    return rule


def _gather(folder: SweepFolder, cells: Iterable[Planned]) -> pd.DataFrame:
    """Writes and returns `table.csv`: a row a finished cell; one that serves twice has the role it has last.

    Raises:
      RunError: no cell has finished.
    """
    rows = {
        cell.id: {**_result(folder, cell), "role": cell.role.value, "budget": cell.budget}
        for cell in cells
        if folder.finished(cell.id)
    }
    if not rows:
        raise RunError("no cell finished", where=str(folder.path), do="See the failures above.")
    table = pd.DataFrame(list(rows.values()), columns=list(NAMES))
    write_text(folder.table, table.to_csv(index=False))
    return table


def _fit(ladder: Ladder, folder: Path, table: pd.DataFrame) -> None:
    """Fits what the ladder fixed beforehand, then, and only then, reads the held-out run."""
    plan = ladder.fit
    where = " or ".join(f"role == '{role.value}'" for role in FITTED)
    result = fit_table(
        table, n=plan.n, d=plan.d, c=plan.c, loss=plan.loss, law=plan.law, objective=plan.objective,
        where=f"({where}) and ({plan.where})" if plan.where else where, bootstrap=plan.bootstrap, seed=plan.seed,
        compare=plan.law == HOFFMANN.name, command=f"lm sweep: ladder '{ladder.name}'",
    )  # fmt: skip
    result.save(folder / "fit.json")
    print(f"\n{describe(result)}")
    held_out = table[table["role"] == Role.HOLDOUT.value]
    if len(held_out):
        _judge(result, plan, held_out.iloc[0], folder)


def _judge(result: FitResult, plan: Fit, row: pd.Series, folder: Path) -> None:
    """Predicts the held-out run and writes and prints what was measured beside it."""
    found = predict(result, float(row[plan.n]), float(row[plan.d]))
    measured = float(row[plan.loss])
    low, high = found.prediction_interval
    verdict = {
        "n": float(row[plan.n]),
        "d": float(row[plan.d]),
        "c": float(row[plan.c]),
        "predicted": found.mean,
        "mean_interval": list(found.mean_interval),
        "prediction_interval": [low, high],
        "measured": measured,
        "error_percent": 100 * (measured / found.mean - 1),
        "inside": low <= measured <= high,
    }
    write_json(folder / "holdout.json", verdict)
    place = "inside" if verdict["inside"] else "OUTSIDE"
    mean_low, mean_high = found.mean_interval
    print(
        f"\nheld-out run, N = {verdict['n']:,.0f}, D = {verdict['d']:,.0f}, {verdict['c']:.3g} FLOP "
        f"({found.extrapolation.c:.2g} times the largest fitted):\n"
        f"  predicted {found.mean:.4f} nats/token; 95 %: mean in [{mean_low:.4f}, {mean_high:.4f}], "
        f"one run in [{low:.4f}, {high:.4f}]\n"
        f"  measured  {measured:.4f} nats/token: {verdict['error_percent']:+.2f} %, {place} the prediction interval"
    )
