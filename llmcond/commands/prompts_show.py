"""``llmcond prompts show``: the inputs that a prompt gives for a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmcond.commands.base import Command
from llmcond.encoders import EncoderOptions
from llmcond.errors import UserError, printable
from llmcond.options import option
from llmcond.workflows.options.common import DATA, Split, WithColumns, WithEncoderSettings


@dataclass(frozen=True, kw_only=True)
class ShowPrompt(WithColumns, WithEncoderSettings, Command):
    """Show the exact texts that a prompt gives for a row, and the tokens an encoder reads."""

    position = 230
    example = "llmcond prompts show my/template.toml --data my.csv --row 17"

    prompt: str = option(flag="", metavar="NAME_OR_FILE", help="a template")
    row: int | None = option(
        None,
        metavar="N",
        help="its number in the file, as messages name it (default: the first of the split)",
    )
    split: Split | None = option(
        None, help="(default: train, or of a single file the split that has the row)"
    )
    data: Any = option(
        None, metavar="SRC", source=DATA, help=f"{DATA} (default: the bundled sample)"
    )
    split_seed: int | None = option(
        None, metavar="S", help="seed that splits a single file (default: 0)"
    )
    model: str | None = option(
        None,
        metavar="NAME_OR_PATH",
        help="show what this encoder reads, pools and truncates (its weights are not loaded)",
    )

    def execute(self) -> dict[str, Any]:
        """Render a row."""
        from llmcond.encoders import resolve
        from llmcond.log import log
        from llmcond.prompts import load_prompt
        from llmcond.prompts.preview import prompt_on_row

        prompt = load_prompt(self.prompt)
        options = self.encoder_options()
        if self.model is None and options != EncoderOptions():
            raise UserError("these options are about an encoder; name it: --model NAME.")
        dataset = self.data_options().read()
        resolved = None
        if self.model is not None:
            resolved = resolve(self.model, options, identify=False)
            for assumption in resolved.assumed:
                log.info(f"assumed: {assumption}")
        return prompt_on_row(prompt, dataset, self.split, self.row, resolved)

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print the texts and tokens."""
        from rich.console import Console
        from rich.text import Text

        from llmcond.report.terminal import width

        console = Console(highlight=False)
        for line, style in _lines(result, width()):
            # A text is one line, however long: what is copied from it is what the encoder reads.
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
        if item["router"]:
            yield f"   {'weighted by:':<12} {_one_line(item['router']['text'])}", ""
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
