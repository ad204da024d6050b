"""Messages for users: one logger, printed on standard error.

Messages are printed by the command line and in interactive sessions and notebooks of Python. The
level of the logger decides what is shown: at WARNING or above, neither notes nor progress.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from typing_extensions import override

from llmcond.errors import escape_control_characters
from llmcond.system import local_rank

if TYPE_CHECKING:
    from rich.console import Console

#: The logger of all messages. Applications can set its level and handlers.
log = logging.getLogger("llmcond")


@cache
def console() -> Console:
    """Return the console for standard error; of processes launched together, only one prints."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True, quiet=local_rank() > 0)


class _TerminalHandler(logging.Handler):
    """Handler that prints messages on standard error, as plain text."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        level = "warning: " if record.levelno >= logging.WARNING else ""
        console().print(
            f"{level}{escape_control_characters(record.getMessage())}", markup=False, emoji=False
        )


def log_to_terminal() -> None:
    """Print the package's messages on standard error, and keep a level that the user has set."""
    if not any(isinstance(handler, _TerminalHandler) for handler in log.handlers):
        log.addHandler(_TerminalHandler())
        log.setLevel(log.level or logging.INFO)
        log.propagate = False


def shows_bars() -> bool:
    """Return whether to show progress bars: in terminals and notebooks, unless silenced."""
    in_notebook = console().is_jupyter and find_spec("ipywidgets") is not None
    return log.level <= logging.INFO and (console().is_terminal or in_notebook)


if hasattr(sys, "ps1"):  # Python runs interactively, or in a notebook.
    log_to_terminal()
