"""Progress of long work on the terminal: time left and whatever numbers the work wants to show."""

import contextlib
import logging
from collections.abc import Iterator

import rich.console
import rich.progress

console = rich.console.Console(stderr=True)


class ConsoleHandler(logging.Handler):
    """Shows what a logger says, a line a record, above any progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def spoken(handler: logging.Handler) -> Iterator[logging.Logger]:
    """Sends what the package's loggers say to `handler`, and to those that are added in the block, and nowhere else.

    Some libraries give the root logger a handler, which would say everything twice.
    """
    package = logging.getLogger("lm")
    before = package.handlers, package.propagate
    package.handlers, package.propagate = [handler], False
    try:
        yield package
    finally:
        for added in package.handlers:
            added.close()
        package.handlers, package.propagate = before


class Bar:
    """One line of progress; `advance` moves it and replaces the numbers shown beside it."""

    def __init__(self, progress: rich.progress.Progress, task: rich.progress.TaskID):
        self._progress, self._task = progress, task

    def update(self, completed: int, numbers: str = "") -> None:
        self._progress.update(self._task, completed=completed, numbers=numbers)


@contextlib.contextmanager
def bar(title: str, total: int, *, shown: bool = True) -> Iterator[Bar]:
    """A progress bar with elapsed time and time left; silent when standard error is not a terminal."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[numbers]}"),
    )
    shown = shown and console.is_terminal
    # Rich forgets after 30 s how fast it went: too soon for steps of minutes.
    with rich.progress.Progress(*columns, console=console, disable=not shown, speed_estimate_period=3600) as progress:
        yield Bar(progress, progress.add_task(title, total=total, numbers=""))
