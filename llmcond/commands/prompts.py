"""``llmcond prompts``, and ``llmcond prompts show``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from llmcond.commands.arguments import (
    SOURCE,
    add_command,
    add_data,
    add_encoder_settings,
    add_format,
    data_options,
    encoder_options,
    print_json,
)
from llmcond.errors import UserError, printable


def add(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "prompts",
        "List the bundled prompts, or show what one makes of a row.",
        _list,
        "llmcond prompts show concat-sent-cond --row 3 --model minilm",
    )
    add_format(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    _add_show(actions)


def _add_show(actions: Any) -> None:
    summary = "Show the exact texts that a prompt makes of a row, and the tokens an encoder reads."
    show = actions.add_parser(
        "show",
        allow_abbrev=False,
        help=summary,
        description=summary,
        epilog="Example: llmcond prompts show my/template.toml --data my.csv --row 17",
    )
    show.set_defaults(command=_show)
    show.add_argument(
        "--json",
        action="store_true",
        # Not False, which would take back what `llmcond prompts --json show NAME` has said.
        default=argparse.SUPPRESS,
        help="print one JSON object on standard output",
    )
    show.add_argument("prompt", metavar="NAME_OR_FILE", help="a template")
    show.add_argument(
        "--row",
        type=int,
        metavar="N",
        help="its number in the file, as messages name it (default: the first of the split)",
    )
    show.add_argument(
        "--split",
        choices=("train", "dev", "test"),
        help="(default: train, or of a single file the split that has the row)",
    )
    add_data(show, f"{SOURCE} (default: the bundled sample)")
    show.add_argument(
        "--split-seed",
        type=int,
        metavar="S",
        help="decides how a single file is split (default: 0)",
    )
    encoder = show.add_argument_group("the encoder's tokens (its weights are not loaded)")
    encoder.add_argument(
        "--model", metavar="NAME_OR_PATH", help="show what this encoder reads, pools and cuts"
    )
    add_encoder_settings(encoder)


def _list(options: argparse.Namespace) -> None:
    from llmcond import listings
    from llmcond.report.terminal import listing, show

    rows = listings.prompts()
    if options.json:
        print_json({"prompts": rows})
    else:
        show(listing(rows), options.format)


def _show(options: argparse.Namespace) -> None:
    from llmcond.encoders import EncoderOptions, resolve
    from llmcond.log import log
    from llmcond.prompts import load_prompt
    from llmcond.prompts.preview import prompt_on_row

    prompt = load_prompt(options.prompt)
    if options.model is None and encoder_options(options) != EncoderOptions():
        raise UserError("these options are about an encoder; name it: --model NAME.")
    dataset = data_options(options, options.split_seed).read()
    resolved = None
    if options.model is not None:
        resolved = resolve(options.model, encoder_options(options), identify=False)
        for assumption in resolved.assumed:
            log.info(f"assumed: {assumption}")
    report = prompt_on_row(prompt, dataset, options.split, options.row, resolved)
    if options.json:
        print_json(report)
    else:
        _print(report)


def _print(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    from llmcond.report.terminal import width

    console = Console(highlight=False)
    for line, style in _lines(report, width()):
        # A text is one line here, however long: what is copied from it is what the encoder reads.
        console.print(Text(line, style=style), soft_wrap=True)


def _lines(report: Mapping[str, Any], width: int) -> Iterator[tuple[str, str]]:
    """Return lines with their style: what is shown, then each input."""
    yield f"prompt {report['prompt']}: {_one_line(report['description'])}", "bold"
    yield f"row {report['row']} of {_one_line(report['file'])}, {report['split']}", ""
    yield f"condition: {_one_line(report['condition'])}", ""
    if report["control"] == "shuffled":
        yield f"given instead, from another row: {_one_line(report['given_condition'])}", ""
    if report["control"] == "left-out":
        yield "the condition is left out, and nothing is subtracted", ""
    encoder = report["encoder"]
    if encoder is not None:
        yield (
            f"read by {_one_line(encoder['name'])}: at most {encoder['max_length']} tokens, "
            f"{encoder['pooling']} pooling; ^ is pooled",
            "",
        )
    for item in report["inputs"]:
        whose = "" if item["sentence"] is None else f", sentence {item['sentence']}"
        yield f"\n {item['part']}{whose}", "bold"
        for key in ("instruction", "context", "text"):
            if item[key] or (key == "context" and item[key] is not None):
                yield f"   {key + ':':<12} {_one_line(item[key]) or '(empty)'}", ""
        if encoder is not None:
            yield from ((f"   {line}".rstrip(), "") for line in _tokens(item, width - 4))


def _tokens(item: Mapping[str, Any], width: int) -> Iterator[str]:
    from llmcond.report.checkup import drawn

    yield from drawn(item, width)
    pooled = sum(item["pooled"])
    yield f"{item['n_tokens']} tokens, {pooled} pooled"
    if item["cut"]:
        cut = " ".join(_one_line(token) for token in item["cut"])
        yield f"{len(item['cut'])} of them are cut: {cut}"


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n")
