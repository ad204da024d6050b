"""``llmcond compare-prompts``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmcond.commands.arguments import (
    SOURCE,
    add_command,
    add_data,
    add_encoder,
    add_fits,
    add_format,
    add_metric,
    add_run,
    add_split,
    data_options,
    encoder_options,
    key_values,
    print_json,
)


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "compare-prompts",
        "Compare prompts on the same rows, splits, seeds and heads, with paired evidence.",
        _compare_prompts,
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp --report page.html",
    )
    add_encoder(parser)
    add_run(parser)
    add_data(parser, f"{SOURCE} (default: the run's own data, or the bundled sample)")
    parser.add_argument(
        "--prompts",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="names or files (default: every bundled one that the model can use)",
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="what the others are compared with (default: the one that suits the model)",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="recipes to fit beside zero-shot (default: linear mlp; none: none)",
    )
    parser.add_argument(
        "--plain", action="store_true", help="fit heads without subtraction as well"
    )
    add_fits(parser, "settings of the recipes, for all heads that have them")
    add_split(parser)
    add_metric(parser)
    add_format(parser)
    parser.add_argument(
        "--report", type=Path, metavar="FILE.html", help="a page to read: charts, texts, settings"
    )


def _compare_prompts(options: argparse.Namespace) -> None:
    from llmcond.workflows import CompareOptions, compare_prompts

    compared = compare_prompts(
        options.model,
        encoder_options(options),
        options.run,
        data_options(options),
        CompareOptions(
            prompts=options.prompts,
            baseline=options.baseline,
            heads=options.heads or ("linear", "mlp"),
            changes=key_values(options.set, "--set"),
            seeds=options.seeds,
            plain=options.plain,
            split=options.split,
            workers=options.workers,
            metrics=options.metric,
        ),
        options.report,
    )
    if options.json:
        print_json(compared.to_json())
        return
    from llmcond.report.comparisons import comparison_table, summary
    from llmcond.report.terminal import say, show

    say(summary(compared.results, compared.baseline), options.format)
    bars = options.format == "table"  # elsewhere characters do not stand in line
    table = comparison_table(compared.results, compared.baseline, options.run, bars=bars)
    show(table, options.format)
