"""``llmcond prompts show``: show the encoder inputs that a prompt renders for a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmcond.commands.base import Command
from llmcond.encoders import EncoderOptions
from llmcond.errors import UserError, escape_control_characters
from llmcond.options import option
from llmcond.workflows.options.common import DATA, ColumnOptions, EncoderFlags, Split


@dataclass(frozen=True, kw_only=True)
class ShowPrompt(ColumnOptions, EncoderFlags, Command):
    """Show the texts that a prompt renders for a row, and the tokens that an encoder reads."""

    position = 230
    example = "llmcond prompts show my/template.toml --data my.csv --row 17"

    prompt: str = option(flag="", metavar="NAME_OR_FILE", help="prompt to render")
    row: int | None = option(
        None,
        metavar="N",
        help="number of the row in the file, as in error messages (default: the first row of the "
        "split)",
    )
    split: Split | None = option(
        None, help="split of the row (default: train, or for a single file the split of the row)"
    )
    data: Any = option(
        None, metavar="SRC", source=DATA, help=f"{DATA} (default: the bundled sample)"
    )
    split_seed: int | None = option(
        None,
        metavar="S",
        help="random seed that splits a single file into train, dev and test (default: 0)",
    )
    model: str | None = option(
        None,
        metavar="NAME_OR_PATH",
        help="encoder whose tokens are shown: read, pooled and cut (its weights are not loaded)",
    )

    def execute(self) -> dict[str, Any]:
        """Render a row.

        Raises:
            UserError: there is no such prompt, row or model, or encoder options lack a model.
        """
        from llmcond.encoders import resolve
        from llmcond.log import log
        from llmcond.prompts import load_prompt
        from llmcond.prompts.inputs import preview_prompt

        prompt = load_prompt(self.prompt)
        options = self.encoder_options()
        if self.model is None and options != EncoderOptions():
            raise UserError("encoder options need an encoder. Name it with --model NAME.")
        dataset = self.data_options().read()
        resolved = None
        if self.model is not None:
            resolved = resolve(self.model, options, identify=False)
            for assumption in resolved.assumed:
                log.info(f"assumed: {assumption}")
        return preview_prompt(prompt, dataset, self.split, self.row, resolved)

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print the texts and tokens."""
        from rich.console import Console
        from rich.text import Text

        from llmcond.display import line_width

        console = Console(highlight=False)
        for line, style in _lines(result, line_width()):
            # No line breaks are added to a text, so that it can be copied exactly as it is encoded.
            console.print(Text(line, style=style), soft_wrap=True)


def _lines(report: Mapping[str, Any], width: int) -> Iterator[tuple[str, str]]:
    """Yield each line with its style: the prompt and row first, then each input."""
    yield f"prompt {report['prompt']}: {_one_line(report['description'])}", "bold"
    yield f"row {report['row']} of {_one_line(report['file'])}, {report['split']}", ""
    yield f"condition: {_one_line(report['condition'])}", ""
    if report["control"] == "shuffled":
        yield f"the prompt uses that of another row: {_one_line(report['given_condition'])}", ""
    if report["control"] == "left-out":
        yield "the prompt leaves the condition out, and nothing is subtracted", ""
    encoder = report["encoder"]
    if encoder is not None:
        yield (
            f"encoder {_one_line(encoder['name'])}: at most {encoder['max_length']} tokens, "
            f"{encoder['pooling']} pooling; ^ marks pooled tokens",
            "",
        )
    for item in report["inputs"]:
        sentence = "" if item["sentence"] is None else f", sentence {item['sentence']}"
        yield f"\n {item['part']}{sentence}", "bold"
        for key in ("instruction", "context", "text"):
            if item[key] or (key == "context" and item[key] is not None):
                yield f"   {key + ':':<12} {_one_line(item[key]) or '(empty)'}", ""
        if item["router"]:
            yield f"   {'weighted by:':<12} {_one_line(item['router']['text'])}", ""
        if encoder is not None:
            yield from ((f"   {line}".rstrip(), "") for line in _tokens(item, width - 4))


def _tokens(item: Mapping[str, Any], width: int) -> Iterator[str]:
    from llmcond.report.tables import token_lines

    yield from token_lines(item, width)
    pooled = sum(item["pooled"])
    yield f"{item['n_tokens']} tokens, {pooled} pooled"
    if item["cut"]:
        cut = " ".join(_one_line(token) for token in item["cut"])
        yield f"{len(item['cut'])} tokens are cut: {cut}"


def _one_line(text: str) -> str:
    return escape_control_characters(text).replace("\n", "\\n")
