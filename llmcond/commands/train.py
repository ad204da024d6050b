"""``llmcond train-lora``."""

from __future__ import annotations

import argparse
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
from llmcond.errors import UserError
from llmcond.finetune.settings import TuneSettings

#: Options that are settings of the training, by their names there: their values, and their help.
_SETTINGS = {
    "alpha": ("A", "scale of the adapters is A / rank"),
    "adapter_dropout": ("P", "share of the adapters' inputs dropped"),
    "learning_rate": ("LR", "of the encoder; with --rank full 5e-05"),
    "weight_decay": ("W", "of the encoder's matrices"),
    "batch_size": ("N", "rated rows a step"),
    "epochs": ("N", "at most"),
    "warmup": ("SHARE", "of the steps, in which learning rates rise"),
    "schedule": ("NAME", "how they fall: linear, cosine or constant"),
    "clip": ("NORM", "largest norm of the gradients; 0: no clipping"),
    "accumulate": ("N", "parts that a step is computed in, to save memory"),
    "average": ("D", "decay of a running average of the weights; 0: none"),
    "patience": ("N", "evaluations without a better dev score before it stops"),
    "evaluations": ("N", "on dev, an epoch"),
    "checkpoint_steps": ("N", "steps between checkpoints"),
}


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
    training.add_argument(
        "--rank", type=_rank, metavar="R", help="of LoRA, or full: all weights (default: 16)"
    )
    training.add_argument(
        "--target",
        nargs="+",
        metavar="NAME",
        help="projections that get adapters: auto (all), attention, mlp, or names such as q_proj",
    )
    usual = TuneSettings()
    for name, (metavar, text) in _SETTINGS.items():
        default = getattr(usual, name)
        training.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            metavar=metavar,
            help=f"{text} (default: {default})",
        )
    training.add_argument(
        "--encoder-dropout",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the encoder's own dropout, where its config has one (default: yes)",
    )
    training.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compute activations again instead of keeping them: less memory (default: no)",
    )
    training.add_argument("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    parser.add_argument(
        "--merge", action="store_true", help="write the whole encoder, adapters added to it"
    )


def _train(options: argparse.Namespace) -> None:
    from llmcond.workflows import HeadChoice, train_lora

    names = (*_SETTINGS, "rank", "target", "encoder_dropout", "gradient_checkpointing")
    settings = {name: getattr(options, name) for name in names}
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


def _rank(text: str) -> int:
    if text == "full":
        return 0
    if not text.isdecimal() or not int(text):
        raise UserError(f"--rank is {text!r}; expected a number of at least 1, or full.")
    return int(text)
