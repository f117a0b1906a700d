"""Errors that a user can act on: what is wrong, where, and what to do."""


class LmError(Exception):
    """A problem told in one line; `exit_code` is what the command line returns for it."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", do: str = ""):
        self.what, self.where, self.do = what, where, do
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}. {do}" if do else line)


def type_and_line(error: BaseException) -> str:
    """An error of somebody else's library in one line: its type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


class UsageError(LmError):
    """The request itself is wrong: a flag, a config field, a file that is not there (exit code 2)."""

    exit_code = 2


class RunError(LmError):
    """The request was fine and the work failed: a full disk, a NaN, a corrupt checkpoint (exit code 1)."""
