"""``llmcond train-lora``."""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from llmcond.commands.arguments import (
    SOURCE,
    add_command,
    add_data,
    add_encoder,
    add_run,
    data_options,
    encoder_options,
    key_values,
    print_json,
)
from llmcond.finetune.settings import TuneSettings
from llmcond.options import option_of


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "train-lora",
        "Train an encoder's adapters and a head together; stopped, the same command goes on.",
        _train,
        "llmcond train-lora --model minilm --head none --run runs/tuned",
    )
    add_encoder(parser)
    add_run(parser)
    add_data(parser, f"{SOURCE} (default: the bundled sample)")
    parser.add_argument("--split-seed", type=int, metavar="S", help="as in extract (default: 0)")
    head = parser.add_argument_group("head and inputs")
    head.add_argument(
        "--head",
        metavar="NAME_OR_FILE",
        help="a recipe, its objective included (none: the encoder's own vectors are compared)",
    )
    head.add_argument(
        "--start",
        type=Path,
        metavar="DIR",
        help="begin with a fitted head, e.g. runs/default/heads/mlp@cond, instead of --head",
    )
    head.add_argument("--dim", type=int, metavar="K", help="size of the embeddings")
    head.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="other settings of the recipe or its objective; learning_rate is the head's",
    )
    head.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME_OR_FILE",
        help="templates (default: what suits encoder and head)",
    )
    head.add_argument(
        "--subtract",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="subtract the unconditional embedding (default: no)",
    )
    training = parser.add_argument_group(
        "training", "Defaults may be others where a recipe has a [finetune] table."
    )
    for item in fields(TuneSettings):
        _add_setting(training, item)
    training.add_argument("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    parser.add_argument(
        "--merge", action="store_true", help="write the whole encoder, adapters added to it"
    )


def _train(options: argparse.Namespace) -> None:
    from llmcond.workflows import HeadChoice, train_lora

    settings = {item.name: getattr(options, item.name) for item in fields(TuneSettings)}
    settings = {name: value for name, value in settings.items() if value is not None}
    summary = train_lora(
        options.model,
        encoder_options(options),
        options.run,
        data_options(options, options.split_seed),
        HeadChoice(
            head=options.head,
            start=options.start,
            dim=options.dim,
            changes=key_values(options.set, "--set"),
            prompts=options.prompt,
            subtract=options.subtract,
            seed=options.seed,
        ),
        settings,
        options.merge,
    )
    if options.json:
        print_json(summary)


def _add_setting(group: Any, item: Field[Any]) -> None:
    """Add the flag of a setting; None where it is not given, for a recipe may have another."""
    told, default = option_of(item), item.default
    if told is None:
        return
    flag = f"--{item.name.replace('_', '-')}"
    if isinstance(default, bool):
        text = f"{told.help} (default: {'yes' if default else 'no'})"
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    several = isinstance(default, tuple)
    shown = " ".join(default) if isinstance(default, tuple) else default
    group.add_argument(
        flag,
        nargs="+" if several else None,
        type=told.parse or (str if several else type(default)),
        metavar=told.metavar,
        help=f"{told.help} (default: {shown})",
    )
