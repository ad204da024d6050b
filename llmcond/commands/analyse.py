"""``llmcond analyse``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmcond.commands.arguments import add_command, add_format, add_run, add_split, print_json

_WHAT = ("isotropy", "clusters", "conditions", "norms", "examples")


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "analyse",
        "Explain heads: isotropy, condition clusters, unseen conditions, norms, changed rows.",
        _analyse,
        "llmcond analyse --head mlp --what clusters --conditions 4 --out pictures",
    )
    parser.add_argument(
        "--head", nargs="+", action="extend", default=[], metavar="NAME", help="(default: all)"
    )
    parser.add_argument(
        "--what", nargs="+", action="extend", choices=_WHAT, metavar="X", help=", ".join(_WHAT)
    )
    add_run(parser)
    add_format(parser)
    add_split(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for pictures (default: in the run)"
    )
    parser.add_argument(
        "--conditions", type=int, default=3, metavar="N", help="that are clustered (default: 3)"
    )
    parser.add_argument(
        "--sentences", type=int, default=20, metavar="N", help="of each of them (default: 20)"
    )
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="rows that changed most (default: 5)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: 0)")


def _analyse(options: argparse.Namespace) -> None:
    from llmcond.report.analyses import show_analyses
    from llmcond.workflows import analyse

    result = analyse(
        options.run,
        options.head,
        options.split,
        options.what or _WHAT,
        options.out,
        options.conditions,
        options.sentences,
        options.top,
        options.seed,
    )
    if options.json:
        print_json(result)
    else:
        show_analyses(result, options.run, options.format)
