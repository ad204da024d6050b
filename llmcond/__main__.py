"""Entry of the ``llmcond`` command and of ``python -m llmcond``."""

from __future__ import annotations

import sys
import warnings

from llmcond.cli import run
from llmcond.errors import printable


def main() -> None:
    """Run the command line and exit with its code."""
    # A warning is for the user of the command: its place in our code says nothing to them.
    warnings.formatwarning = lambda message, *_, **__: (
        f"llmcond: warning: {printable(str(message))}\n"
    )
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
