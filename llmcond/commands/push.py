"""``llmcond push``."""

from __future__ import annotations

import argparse
from typing import Any

from llmcond.commands.arguments import add_command, add_run, print_json


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "push",
        "Put a trained encoder and its heads onto the Hugging Face hub; data stays here.",
        _push,
        "llmcond push ada/tuned-encoder --run runs/tuned --private",
    )
    parser.add_argument("repo", metavar="OWNER/NAME", help="made if it is not there")
    add_run(parser)
    parser.add_argument("--private", action="store_true", help="others cannot see it")
    parser.add_argument(
        "--revision", metavar="BRANCH", help="made if it is not there (default: main)"
    )


def _push(options: argparse.Namespace) -> None:
    from llmcond.workflows import push_to_hub

    summary = push_to_hub(options.run, options.repo, options.private, options.revision)
    if options.json:
        print_json(summary)
