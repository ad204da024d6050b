"""``llmcond sweep``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmcond.commands.arguments import (
    add_command,
    add_fits,
    add_format,
    add_metric,
    add_run,
    add_split,
    key_values,
    print_json,
)
from llmcond.errors import UserError


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "sweep",
        "Fit heads for every combination of settings and seeds; resumes, in one table.",
        _sweep,
        "llmcond sweep --head mlp linear --vary dim=64,128,256 --seeds 3 --plot dim.png",
    )
    parser.add_argument(
        "--head", nargs="+", action="extend", required=True, metavar="NAME_OR_FILE", help="recipes"
    )
    parser.add_argument(
        "--vary",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=V,V",
        help="a setting of the recipe (dim, rank, learning_rate, temperature, ...) and its values",
    )
    add_run(parser)
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="whose features; several joined by + stand side by side (default: the only one)",
    )
    parser.add_argument(
        "--subtract",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="subtract the unconditional embedding",
    )
    add_fits(parser, "other settings, for all fits")
    add_split(parser)
    add_metric(parser)
    add_format(parser)
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="picture of Spearman against the first setting with several numbers (.png, .svg)",
    )
    parser.add_argument(
        "--plot-steps",
        type=Path,
        metavar="FILE",
        help="picture of Spearman on dev against steps of training (.png, .svg)",
    )


def _sweep(options: argparse.Namespace) -> None:
    from llmcond.report.sweeps import check_plot, plot_settings, plot_steps, sweep_table
    from llmcond.workflows import sweep

    named = [text.partition("=")[0] for text in options.vary]
    if len(set(named)) < len(named):
        raise UserError(
            f"--vary names a setting twice: {', '.join(named)}. Give all its values once."
        )
    vary = {key: text.split(",") for key, text in key_values(options.vary, "--vary").items()}
    several = [options.head, options.prompt or (), *vary.values()]
    if options.seeds == 1 and all(len(set(values)) <= 1 for values in several):
        raise UserError(
            "there is nothing to vary. Give several values (--vary dim=64,128,256), heads, prompts "
            "or --seeds."
        )
    plots = [path for path in (options.plot, options.plot_steps) if path is not None]
    if len({path.absolute() for path in plots}) < len(plots):
        raise UserError(f"--plot and --plot-steps both name {plots[0]}. Name two files.")
    for path in plots:
        check_plot(path)
    swept = sweep(
        options.run,
        options.head,
        vary,
        prompts=options.prompt or (None,),
        subtract=options.subtract,
        changes=key_values(options.set, "--set"),
        seeds=options.seeds,
        split=options.split,
        workers=options.workers,
        metrics=options.metric,
    )
    if options.plot is not None:
        plot_settings(swept.results, options.plot)
    if options.plot_steps is not None:
        plot_steps(swept.results, options.plot_steps)
    if options.json:
        print_json(swept.to_json())
        return
    from llmcond.report.terminal import show

    show(sweep_table(swept.results, options.run), options.format)
