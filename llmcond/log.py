"""Messages for people: one logger, which the command line prints on standard error."""

from __future__ import annotations

import logging
from functools import cache
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
    """Print the package's messages on standard error, as the command line does."""
    if not any(isinstance(handler, _TerminalHandler) for handler in log.handlers):
        log.addHandler(_TerminalHandler())
        log.setLevel(logging.INFO)
        log.propagate = False
