"""Entry point of the ``llmcond`` command and of ``python -m llmcond``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from llmcond.base.errors import escape_control_characters
from llmcond.cli import run


def main() -> None:
    """Run the command line and exit with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # The caller has closed it (`>&-`).
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    # Users of the command line need a warning's message, but not its file and line in our code.
    warnings.formatwarning = lambda message, *_, **__: (
        f"llmcond: warning: {escape_control_characters(str(message))}\n"
    )
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
