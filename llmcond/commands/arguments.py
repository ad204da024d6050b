"""Options that several commands of the command line share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmcond.errors import UserError, nearest
from llmcond.system import local_rank

DEFAULT_RUN = Path("runs/default")


def add_command(commands: Any, name: str, summary: str, command: Any, example: str) -> Any:
    """Add a command; ``command`` is called with what was parsed."""
    parser = commands.add_parser(
        name, allow_abbrev=False, help=summary, description=summary, epilog=f"Example: {example}"
    )
    parser.set_defaults(command=command)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
    return parser


def add_split(parser: Any) -> None:
    """Add ``--split``."""
    parser.add_argument(
        "--split",
        choices=("train", "dev", "test"),
        help="whose rows (default: test if there is one, else dev)",
    )


def add_fits(parser: Any, settings: str) -> None:
    """Add how many fits there are, and how: ``--seeds``, ``--set`` and ``--workers``."""
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="fits of each, by seeds 0 to N-1"
    )
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=settings
    )
    parser.add_argument("--workers", type=int, metavar="N", help="fits at a time (default: cores)")


def add_format(parser: Any) -> None:
    """Add ``--format``."""
    parser.add_argument(
        "--format",
        default="table",
        choices=("table", "markdown", "latex"),
        help="of the table: for a terminal, a Markdown page or a paper (default: table)",
    )


def add_metric(parser: Any) -> None:
    """Add ``--metric``."""
    parser.add_argument(
        "--metric",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE.py:NAME",
        help="metrics of your own beside Spearman, Pearson and accuracy",
    )


def add_run(parser: Any) -> None:
    """Add ``--run``."""
    parser.add_argument(
        "--run",
        type=Path,
        default=DEFAULT_RUN,
        metavar="DIR",
        help="folder of this piece of work (default: runs/default)",
    )


def add_device(parser: Any) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N")


def add_data(parser: Any, source: str) -> None:
    """Add ``--data`` and how it is read."""
    parser.add_argument("--data", metavar="SRC", help=source)
    parser.add_argument(
        "--columns",
        nargs="+",
        action="extend",
        metavar="NAME=COLUMN",
        help="other column names, for sentence1, sentence2, condition and label",
    )
    parser.add_argument(
        "--rating-range",
        nargs=2,
        type=float,
        metavar=("LOW", "HIGH"),
        help="range of the ratings, mapped to 0 to 1 (default: 1 5)",
    )
    parser.add_argument(
        "--unrated", type=float, metavar="LABEL", help="label of unrated rows (default: -1)"
    )


SOURCE = (
    "a .csv, .tsv, .jsonl or .parquet file, a folder with train, dev and test files, or "
    "hf://datasets/OWNER/NAME"
)


def add_encoder(parser: Any) -> None:
    """Add ``--model`` and the settings of an encoder."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME_OR_PATH",
        help="alias, hub name or folder (`llmcond models` lists the known ones)",
    )
    add_encoder_settings(parser)


def add_encoder_settings(parser: Any) -> None:
    """Add what decides how an encoder computes."""
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the hub")
    parser.add_argument(
        "--like",
        metavar="NAME",
        help="a known model whose settings this one has: for copies and fine-tuned ones",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto: the fastest that the device computes natively",
    )
    parser.add_argument(
        "--quantize",
        default="none",
        choices=("none", "8bit", "4bit"),
        help="weights in 8 or 4 bit (needs llmcond[quantize])",
    )
    add_device(parser)
    parser.add_argument(
        "--attention", choices=("bidirectional", "causal"), help="default: the model's own"
    )
    parser.add_argument(
        "--max-tokens-per-batch",
        type=int,
        metavar="N",
        help="token budget of one forward pass (default: by the device and its memory)",
    )
    parser.add_argument(
        "--share-prefixes",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute what several inputs begin with once, where that is exact: for causal "
        "encoders that pool the last token",
    )
    parser.add_argument(
        "--pooling",
        choices=("cls", "mean", "last", "pooler", "latent"),
        help="default: the model's own",
    )
    parser.add_argument(
        "--pool-over",
        choices=("all", "text"),
        help="pool all tokens, or the text's without its instruction; default: the model's own",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="unit L2 norm; default: the model's own",
    )
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens of an input")
    parser.add_argument(
        "--instruction-format",
        metavar="TEXT",
        help=r"how an instruction is put before a text, e.g. "
        r"'Instruct: {instruction}\nQuery: {text}'",
    )
    parser.add_argument(
        "--special-tokens",
        metavar="TEXT",
        help="tokens around every input, e.g. '<s> {text} </s>', or: tokenizer (as it adds them)",
    )


def encoder_options(options: argparse.Namespace) -> Any:
    """Return the settings of an encoder that were given."""
    from llmcond.encoders import EncoderOptions

    values = vars(options)
    template = options.instruction_format
    if template is not None:
        # A shell has no easy way to write a line break.
        values = {**values, "instruction_format": template.replace("\\n", "\n")}
    return EncoderOptions.of(values)


def data_options(options: argparse.Namespace, split_seed: int | None = None) -> Any:
    """Return where rows are read, and how."""
    from llmcond.data.datasets import Columns, DataOptions, RatingScale

    columns = scale = None
    if options.columns:
        given = key_values(options.columns, "--columns")
        legal = ("sentence1", "sentence2", "condition", "label")
        for name in given:
            if name not in legal:
                raise UserError(f"--columns has no {name!r}. {nearest(name, legal)}")
        columns = Columns(**given)
    if options.rating_range or options.unrated is not None:
        low, high = options.rating_range or (1.0, 5.0)
        scale = RatingScale(low, high, -1.0 if options.unrated is None else options.unrated)
    return DataOptions(options.data, columns, scale, split_seed)


def key_values(texts: Sequence[str], option: str) -> dict[str, str]:
    """Return NAME=VALUE texts as a dictionary.

    Raises:
        UserError: a text of another form.
    """
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise UserError(f"{option} is {text!r}; expected NAME=VALUE.")
        pairs[key] = value
    return pairs


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on standard output, once of processes launched together."""
    if local_rank():
        return  # of several processes that were launched together, one prints
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")
