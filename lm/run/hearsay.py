"""What Orbax and TensorStore say of their own accord: their errors reach the user once, through what was asked.

Orbax reports each phase and each error to absl's logger as well. Where one of several writes fails it lets go of the
others, and closes the event loop that they report to: asyncio and the interpreter then print a traceback for each.

At each save Orbax also asks TensorStore twice how many bytes it has written, for a line of that log. 3.5 KiB of each
answer are never freed (TensorStore 0.1.86).
"""

import logging
import sys

from orbax.checkpoint._src.serialization import tensorstore_utils


def keep_quiet() -> None:
    """From now on such reports and questions are left out; those of others are printed as before."""
    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):
        tensorstore_utils.get_tensorstore_raw_bytes = lambda direction=None: 0
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    told = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            told(unraisable)

    sys.unraisablehook = hook
