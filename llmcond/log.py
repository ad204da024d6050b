"""Messages for people: one logger, which is printed on standard error where people look at it.

That is the command line, and Python's interactive sessions and notebooks. The logger's level
decides: at WARNING or above neither notes nor progress are shown.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from llmcond.errors import printable
from llmcond.system import local_rank

if TYPE_CHECKING:
    from rich.console import Console

#: Every message of the package; an application sets its level or handlers as of any logger.
log = logging.getLogger("llmcond")


@cache
def console() -> Console:
    """Return the console of standard error; of processes launched together, one prints."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=local_rank() > 0)


class _TerminalHandler(logging.Handler):
    """Prints messages on standard error, as plain text."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, on one line if it was one."""
        level = "warning: " if record.levelno >= logging.WARNING else ""
        console().print(f"{level}{printable(record.getMessage())}", markup=False, emoji=False)


def log_to_terminal() -> None:
    """Print the package's messages on standard error; a level that the user set stays."""
    if not any(isinstance(handler, _TerminalHandler) for handler in log.handlers):
        log.addHandler(_TerminalHandler())
        log.setLevel(log.level or logging.INFO)
        log.propagate = False


def shows_bars() -> bool:
    """Return whether progress is shown as bars: in terminals and notebooks, unless silenced."""
    in_notebook = console().is_jupyter and find_spec("ipywidgets") is not None
    return log.level <= logging.INFO and (console().is_terminal or in_notebook)


if hasattr(sys, "ps1"):  # an interactive session or a notebook
    log_to_terminal()
