"""Entry point of the ``llmcond`` command and of ``python -m llmcond``."""

from __future__ import annotations

import sys
import warnings

from llmcond.base.errors import escape_control_characters
from llmcond.cli import run


def main() -> None:
    """Run the command line and exit with its code."""
    # Users of the command line need a warning's message, but not its file and line in our code.
    warnings.formatwarning = lambda message, *_, **__: (
        f"llmcond: warning: {escape_control_characters(str(message))}\n"
    )
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
