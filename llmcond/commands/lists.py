"""Commands that list models, prompts and heads, or check a model before its download."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from llmcond.base.errors import LlmcondError, UserError, escape_control_characters
from llmcond.base.options import option
from llmcond.base.output import log
from llmcond.base.package import bundled_names, pretrained_names
from llmcond.base.system import choose_device
from llmcond.commands.base import Command
from llmcond.encoders import EncoderInput, EncoderOptions, find_model
from llmcond.encoders.checkpoint import find_checkpoint
from llmcond.encoders.resolve import ResolvedEncoder, is_server, resolve, resolve_checkpoint
from llmcond.encoders.server import list_models, probe
from llmcond.encoders.settings import (
    MODELS,
    PADDING_SIDE,
    default_prompt,
    explain_no_float16,
)
from llmcond.encoders.spec import Dtype
from llmcond.encoders.tokenizing import format_text
from llmcond.options.common import DATA, ColumnOptions, EncoderFlags, Split
from llmcond.prompts import load_prompt

_SENTENCE = "Two people ride bicycles up a steep road."
_CONDITION = "the number of people"


def check_model(name: str, options: EncoderOptions) -> tuple[dict[str, Any], LlmcondError | None]:
    """Describe a model, without downloading its weights.

    The settings and the tokenizer of a model on the hub are downloaded. If they cannot be, a model
    from the list of known models is described by its entry there.

    Args:
        name: the model's name on the hub, its folder, or the name of a known model.
        options: the options to encode with.

    Returns:
        The description, and the error that left it incomplete; None if it is complete.

    Raises:
        LlmcondError: the model cannot be read and is not a known one.
    """
    if is_server(name):
        return _check_server(name, options), None
    known, device = find_model(name), choose_device(options.device)
    try:
        checkpoint = find_checkpoint(name, options.revision, options.like)
    except LlmcondError as error:
        if known is None:
            raise
        from llmcond.encoders.inspect import describe_known

        report = describe_known(known, device)
        return {**report, "prompt": None, "samples": [], "complete": False}, error
    resolved = resolve_checkpoint(checkpoint, options, device, identify=False)
    # PyTorch is imported after everything that may be wrong has been reported.
    from llmcond.encoders.inspect import describe, tokenize_inputs

    report = describe(resolved)
    rendered = [asdict(sample) for sample in tokenize_inputs(resolved, _sample_inputs(resolved))]
    sampled = {"prompt": resolved.default_prompt, "samples": rendered}
    return {**report, **sampled, "complete": True}, None


def _sample_inputs(resolved: ResolvedEncoder) -> list[tuple[str, EncoderInput]]:
    """Return inputs that the encoder's default prompt renders, with their labels."""
    prompt = load_prompt(resolved.default_prompt)
    inputs = [
        ("conditional", prompt.conditional.render(_SENTENCE, _CONDITION)),
        ("unconditional", prompt.unconditional.render(_SENTENCE, _CONDITION)),
    ]
    if resolved.identity.instruction_format:
        inputs.append(("no instruction", EncoderInput("", _CONDITION)))
    return inputs


def _check_server(name: str, options: EncoderOptions) -> dict[str, Any]:
    """Describe an encoder behind a server, which computes one short text."""
    resolved = resolve(name, options)
    identity, full_name = resolved.identity, resolved.checkpoint.name
    samples = [
        {"label": label, "text": str(format_text(item, identity.instruction_format, full_name))}
        for label, item in _sample_inputs(resolved)
    ]
    return {
        "name": full_name,
        "dim": len(probe(full_name)),
        "normalize": identity.normalize,
        "instruction_format": identity.instruction_format,
        "assumed": [*resolved.assumed],
        "server_models": list_models(full_name),
        "prompt": resolved.default_prompt,
        "samples": samples,
        "complete": True,
    }


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

    example = "llmcond models --check nvidia/NV-Embed-v2"
    formats = True

    check: str | None = option(
        None,
        metavar="NAME_OR_PATH",
        help="encoder to report on: what it reads and pools, the memory it needs, and whether it "
        "fits this machine; downloads only its settings and tokenizer; a server (ADDRESS#NAME) is "
        "sent one short text",
    )

    def execute(self) -> Models:
        """List the known encoders, or check one.

        Raises:
            UserError: encoder options are given without ``check``.
        """
        options = self.encoder_options()
        if self.check is not None:
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
            from llmcond.base.output import Table, log

            Table.of_rows(models_in_brief()).print(form)
            log.info(
                "bundled models, encoders with a LoRA adapter: "
                f"{', '.join(pretrained_names())}. The first is the default for embedding texts if "
                "you have no run of your data"
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
            "dtypes": [
                dtype
                for dtype in get_args(Dtype)
                if dtype != "float16" or not explain_no_float16(model, model.architecture)
            ],
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


@dataclass(frozen=True, kw_only=True)
class Prompts(Command):
    """List the bundled prompts, or show the encoder inputs that a prompt renders for a row.

    The first table lists the prompts of encoders, the second one those that `annotate` sends to a
    language model.
    """

    example = "llmcond prompts show concat-sent-cond --row 3 --model minilm"
    formats = True

    def execute(self) -> dict[str, Any]:
        """Return the prompts of encoders and those of ``annotate``, one row each."""
        from llmcond.prompts import load_prompt
        from llmcond.prompts.questions import bundled_templates

        rows = []
        for prompt in map(load_prompt, bundled_names("prompts")):
            about = {name: getattr(prompt, name) for name in ("name", "description", "control")}
            for prefix, part in ("", prompt.conditional), ("unconditional_", prompt.unconditional):
                for name in ("instruction", "context", "text", "router"):
                    about[f"{prefix}{name}"] = getattr(part, name)
            rows.append({**about, "source": prompt.source})
        return {
            "prompts": rows,
            "annotate": [template.to_json() for template in bundled_templates()],
        }

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print two tables; in a terminal without the texts, which ``prompts show`` prints."""
        from llmcond.base.output import Table

        brief = ("name", "description") if form == "table" else ()
        Table.of_rows(result["prompts"], brief).print(form)
        Table.of_rows(result["annotate"], ("name", "kind", "description")).print(form)


@dataclass(frozen=True, kw_only=True)
class ShowPrompt(ColumnOptions, EncoderFlags, Command):
    """Show the texts that a prompt renders for a row, and the tokens that an encoder reads."""

    example = "llmcond prompts show my/template.toml --data my.csv --row 17"

    prompt: str = option(flag="", metavar="NAME_OR_FILE", help="prompt to render")
    row: int | None = option(
        None,
        help="number of the row in the file, as in error messages (default: the first row of the "
        "split)",
    )
    split: Split | None = option(
        None, help="split of the row (default: train, or for a single file the split of the row)"
    )
    data: Any = option(None, source=DATA, help=f"{DATA} (default: the bundled sample)")
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
        from llmcond.base.output import log
        from llmcond.encoders import resolve
        from llmcond.prompts import load_prompt
        from llmcond.prompts.template import list_fields, preview_prompt

        prompt = load_prompt(self.prompt)
        options = self.encoder_options()
        if self.model is None and options != EncoderOptions():
            raise UserError("encoder options need an encoder. Name it with --model NAME.")
        dataset = replace(self.data_options(), extra=list_fields([prompt])).read()
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

        from llmcond.base.output import line_width

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


@dataclass(frozen=True, kw_only=True)
class Heads(Command):
    """List the bundled head recipes, or the fitted heads of a run."""

    example = "llmcond heads --run runs/mine --default mlp@concat-sent-cond"
    formats = True

    run: str | Path | None = option(
        None, metavar="DIR", help="run whose heads are listed (default: list the bundled recipes)"
    )
    default: str | None = option(
        None,
        needs="--run DIR",
        help="with --run: make this head the run's default head (until then: the head with the "
        "best dev score, if that is better than the score of zero-shot)",
    )

    def execute(self) -> dict[str, Any]:
        """Return the recipes or heads, one row each.

        Raises:
            UserError: there is no such run or head, or ``default`` is given without ``run``.
        """
        return {"heads": self._bundled() if self.run is None else self._fitted(Path(self.run))}

    def _bundled(self) -> list[dict[str, Any]]:
        from llmcond.heads.recipes import load_recipe
        from llmcond.tasks import TASKS

        rows = []
        for task in TASKS:
            for recipe in (load_recipe(name, task) for name in bundled_names("heads", task)):
                settings = " ".join(f"{k}={v}" for k, v in asdict(recipe.settings).items())
                about = {"name": recipe.name, "task": task, "kind": recipe.kind}
                about |= {"description": recipe.description, "settings": settings}
                rows.append({**about, "source": recipe.source})
        return rows

    def _fitted(self, folder: Path) -> list[dict[str, Any]]:
        from llmcond.runs import dev_score, open_any_run

        run = open_any_run(folder)
        if self.default is not None:
            run.set_default_head(self.default)
        default = run.default_head()
        records = {name: run.head_record(name) for name in run.head_names()}
        if default is not None and default[0] not in records:
            log.info(f"the run's default is zero-shot, {default[0]}: {default[1]}")
        return [
            {
                "name": name,
                "kind": record["kind"],
                "dim": record["dim_out"],
                f"dev_{run.dev_metric}": dev_score(record, run.dev_metric),
                "fitted_on": record["data"]["source"],
                "taken": default[1] if default and default[0] == name else "",
            }
            for name, record in records.items()
        ]

    def show(self, result: dict[str, Any], form: str) -> None:
        """Print a table; in a terminal without the recipes' settings, which ``--json`` prints."""
        from llmcond.base.output import Table

        brief = form == "table" and self.run is None
        keys = ("name", "task", "description") if brief else ()
        Table.of_rows(result["heads"], keys).print(form)
