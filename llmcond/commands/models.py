"""``llmcond models``: list the known encoders, or check one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from llmcond.bundled import pretrained_names
from llmcond.commands.base import Command
from llmcond.encoders import EncoderOptions
from llmcond.encoders.known import MODELS, PADDING_SIDE, default_prompt
from llmcond.encoders.spec import Dtype
from llmcond.errors import LlmcondError, UserError
from llmcond.options import option
from llmcond.workflows.options.common import EncoderFlags


@dataclass(frozen=True)
class Models:
    """The known encoders, or a report on one encoder.

    Attributes:
        rows: one row per known encoder; empty with ``--check``.
        report: report on the checked encoder.
        problem: error that cut the report short; None if it is complete.
    """

    rows: Sequence[Mapping[str, Any]] = ()
    report: Mapping[str, Any] | None = None
    problem: LlmcondError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints."""
        if self.report is None:
            return {"models": list(self.rows), "bundled": pretrained_names()}
        return {**self.report, "problem": str(self.problem) if self.problem else None}


@dataclass(frozen=True, kw_only=True)
class ListModels(EncoderFlags, Command):
    """List the encoders that are known by name, or check an encoder before downloading it."""

    position = 210
    example = "llmcond models --check nvidia/NV-Embed-v2"
    formats = True

    check: str | None = option(
        None,
        metavar="NAME_OR_PATH",
        help="encoder to report on: what it reads and pools, the memory it needs, and whether it "
        "fits this machine; downloads only its settings and tokenizer",
    )

    def execute(self) -> Models:
        """List the known encoders, or check one.

        Raises:
            UserError: encoder options are given without ``check``.
        """
        options = self.encoder_options()
        if self.check is not None:
            from llmcond.workflows.check import check_model

            return Models(
                report=(checked := check_model(self.check, options))[0], problem=checked[1]
            )
        if options != EncoderOptions():
            raise UserError("encoder options need an encoder to check. Name it with --check NAME.")
        return Models(models())

    def show(self, result: Models, form: str) -> None:
        """Print a table, or the report."""
        if result.report is not None:
            from llmcond.report.tables import show_checkup

            show_checkup(result.report)
        else:
            from llmcond.display import Table
            from llmcond.log import log

            Table.of_rows(models_in_brief()).print(form)
            log.info(
                f"bundled models, minilm with a LoRA adapter: {', '.join(pretrained_names())}. The "
                "first is the default for embedding texts if you have no run of your data"
            )

    def failed(self, result: Models) -> LlmcondError | None:
        """Return the error that cut the report short, or None."""
        return result.problem


def models() -> list[dict[str, Any]]:
    """Return one row per known encoder."""
    return [
        {
            "name": model.name,
            "repo": model.repo,
            "n_parameters": model.n_parameters,
            "dim": model.dim,
            **{name: value for name, value in model.all_settings.items() if name != "pooling"},
            "pooling": model.poolings[0],
            "poolings": list(model.poolings),
            "padding_side": PADDING_SIDE,
            "default_prompt": default_prompt(
                model.all_settings["instruction_format"], model.poolings[0]
            ),
            "dtypes": [d for d in get_args(Dtype) if d != "float16" or not model.no_float16],
            "gated": model.gated,
            "licence": model.licence,
        }
        for model in MODELS
    ]


def models_in_brief() -> list[dict[str, Any]]:
    """Return the properties in which known encoders differ, as texts for a table."""
    return [
        {
            "name": row["name"],
            "size": f"{row['n_parameters'] / 1e9:.2f} B",
            "dim": row["dim"],
            "attention": row["attention"],
            "pooling": ", ".join(row["poolings"]),
            "length": row["max_length"],
            "instruction": "yes" if row["instruction_format"] else "no",
            "licence": row["licence"] + (" (gated)" if row["gated"] else ""),
        }
        for row in models()
    ]
