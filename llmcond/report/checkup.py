"""The report of an encoder check in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmcond.encoders.settings import pooled_tokens
from llmcond.errors import escape_control_characters
from llmcond.files import format_bytes
from llmcond.report.terminal import line_limit, titled_table


def render_checkup(report: Mapping[str, Any], width: int) -> Group:
    """Return the facts, the sample inputs with their pooled tokens, and the memory of a check.

    Args:
        report: the check as JSON.
        width: the width of a line in characters.
    """
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for key, value in _describe_encoder(report):
        facts.add_row(key, Text(escape_control_characters(value)))
    parts: list[RenderableType] = [facts]
    for sample in report["samples"]:
        title = (
            f"sample input, {sample['label']} (prompt {report['prompt']}); ^ marks pooled tokens"
        )
        if sample["label"] == "no instruction":
            title = "sample input without an instruction; ^ marks pooled tokens"
        parts.append(Text(f"\n {title}", style="bold"))
        parts += [Text(f"   {line}") for line in token_lines(sample, width - 4)]
    return Group(*parts, Text(), _memory_table(report))


def _describe_encoder(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    licence = f", {report['licence']}" if report["licence"] else ""
    gated = ", gated" if report["gated"] else ""
    yield "model", f"{report['name']} ({report['source']}{licence}{gated})"
    yield (
        "architecture",
        f"{report['architecture']}, {report['layers']} layers of {report['width']}, "
        f"{report['n_parameters'] / 1e9:.2f} B parameters; no code from the model's repository "
        "is run",
    )
    yield "attention", report["attention"]
    others = f" (or {', '.join(report['other_poolings'])})" if report["other_poolings"] else ""
    yield "pooling", f"{report['pooling']}{others}, over {pooled_tokens(report)}"
    yield "norm", {True: "unit L2", False: "none", None: "as in its files"}[report["normalize"]]
    yield "instruction", report["instruction_format"].replace("\n", "\\n") or "not supported"
    yield (
        "special tokens",
        report["special_tokens"].replace("tokenizer", "as added by its tokenizer"),
    )
    yield "padding", f"{report['padding_side']}, masked"
    yield "length", f"{report['max_length']} tokens" if report["max_length"] else "as in its files"
    if report["dtype"]:
        weights = "" if report["quantize"] == "none" else f", weights in {report['quantize']}"
        yield "computed in", f"{report['dtype']} on {report['device']}{weights}"
    if report["no_float16"]:
        yield "no float16", report["no_float16"]
    for sentence in report["assumed"]:
        yield "assumed", sentence


def token_lines(sample: Mapping[str, Any], width: int) -> list[str]:
    """Return lines of a sample's tokens, each followed by a line that marks pooled tokens."""
    lines: list[str] = []
    tokens, marks = "", ""
    for text, pooled in zip(sample["tokens"], sample["pooled"], strict=True):
        # A token may be a line break, which would shift the marks under the wrong tokens.
        token = escape_control_characters(text).replace("\n", "\\n")
        size = cell_len(token)
        if tokens and cell_len(tokens) + size + 1 > width:
            lines += [tokens, marks]
            tokens, marks = "", ""
        tokens += token + " "
        marks += ("^" if pooled else " ") * size + " "
    return [*lines, tokens, marks]


def _memory_table(report: Mapping[str, Any]) -> Table:
    rows: Sequence[Mapping[str, Any]] = report["memory"]
    title = f"memory; {format_bytes(report['free'])} free on {report['device']}"
    table = titled_table(title, "precision")
    batch = f"+ batch of {rows[0]['batch_tokens']:,} tokens"
    for heading in ("weights", "while loading", batch, "fits"):
        table.add_column(heading, justify="right")
    for row in rows:
        name = row["dtype"] if row["quantize"] == "none" else f"{row['quantize']} ({row['dtype']})"
        sizes = [format_bytes(row[key]) for key in ("weights", "loading", "batch")]
        table.add_row(name, *sizes, "yes" if row["fits"] else "no")
    return table


def show_checkup(report: Mapping[str, Any]) -> None:
    """Print the report of a check."""
    console = Console(highlight=False, width=line_limit() or 120)
    console.print(render_checkup(report, console.width))
