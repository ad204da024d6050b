"""The command line: parse, call one verb, print. Heavy libraries are imported by the verbs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llmcond.commands.analyse import add as add_analyse
from llmcond.commands.arguments import (
    SOURCE,
    add_command,
    add_data,
    add_device,
    add_encoder,
    add_encoder_settings,
    add_format,
    add_metric,
    add_run,
    add_split,
    data_options,
    encoder_options,
    key_values,
    print_json,
)
from llmcond.commands.compare import add as add_compare
from llmcond.commands.prompts import add as add_prompts
from llmcond.commands.push import add as add_push
from llmcond.commands.sweep import add as add_sweep
from llmcond.commands.train import add as add_train
from llmcond.errors import (
    DiskFullError,
    LlmcondError,
    UserError,
    is_disk_full,
    nearest,
    printable,
)
from llmcond.log import log_to_terminal
from llmcond.version import __version__


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 2 wrong input, 1 anything else."""
    log_to_terminal()
    try:
        options = _parser().parse_args(arguments)
        options.command(options)
        sys.stdout.flush()
    except LlmcondError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted; what was stored is kept, and the same command resumes.", 1)
    except BrokenPipeError:
        # The reader of a pipe left (`| head`); nothing more can be said on standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if is_disk_full(error):
            return _complain(
                f"the disk is full: {error}. What was stored is kept.", DiskFullError.exit_code
            )
        code = UserError.exit_code if isinstance(error, PermissionError) else LlmcondError.exit_code
        return _complain(f"{error}. What was stored is kept.", code)
    return 0


def _complain(text: str, code: int) -> int:
    sys.stderr.write(f"llmcond: error: {printable(' '.join(text.split()))}\n")
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest legal names."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            legal = [str(choice) for choice in action.choices]
            name = (
                "command" if action.dest == "name" else (action.option_strings or [action.dest])[0]
            )
            raise UserError(
                f"{name} is {value!r}. {nearest(str(value), legal)} Legal: {', '.join(legal)}."
            )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="llmcond",
        allow_abbrev=False,
        description="Condition-aware text embeddings: small heads on frozen LLM encoders.",
        epilog="First steps: `llmcond extract --model minilm`, `llmcond fit-head --head mlp`, "
        "`llmcond evaluate`. Exit codes: 0 done, 2 wrong input, 1 anything else.",
    )
    parser.add_argument("--version", action="version", version=f"llmcond {__version__}")
    commands = parser.add_subparsers(
        dest="name", metavar="COMMAND", required=True, parser_class=_Parser
    )
    _add_extract(commands)
    _add_fit_head(commands)
    add_sweep(commands)
    add_train(commands)
    add_push(commands)
    _add_evaluate(commands)
    add_analyse(commands)
    add_compare(commands)
    _add_similarity(commands)
    _add_embed(commands)
    _add_listings(commands)
    return parser


# -- commands ----------------------------------------------------------------------------------


def _add_extract(commands: Any) -> None:
    parser = add_command(
        commands,
        "extract",
        "Encode a data set's texts under prompts, once, into a run.",
        _extract,
        "llmcond extract --model minilm --data my.csv --prompt concat-sent-cond",
    )
    add_encoder(parser)
    add_run(parser)
    add_data(parser, f"{SOURCE} (default: the run's own data, or the bundled sample)")
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME_OR_FILE",
        help="templates (default: the one that suits the model)",
    )
    parser.add_argument(
        "--store-dtype",
        choices=("float16", "float32"),
        help="type that vectors are stored in (default: float16)",
    )
    parser.add_argument(
        "--split-seed",
        type=int,
        metavar="S",
        help="decides how a single file is split (default: 0)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the work, one a GPU (on a CPU: a share of its cores each)",
    )


def _extract(options: argparse.Namespace) -> None:
    from llmcond.workflows import extract

    summary = extract(
        options.model,
        encoder_options(options),
        options.run,
        data_options(options, options.split_seed),
        options.prompt,
        options.store_dtype,
        options.workers,
    )
    if options.json:
        print_json(summary)


def _add_fit_head(commands: Any) -> None:
    parser = add_command(
        commands,
        "fit-head",
        "Fit a head on a run's training features.",
        _fit_head,
        "llmcond fit-head --head mlp --dim 256 --set epochs=50",
    )
    parser.add_argument(
        "--head",
        required=True,
        metavar="NAME_OR_FILE",
        help="a recipe (`llmcond heads` lists the bundled ones)",
    )
    parser.add_argument(
        "--dim",
        type=int,
        metavar="K",
        help="size of the embeddings (default: the recipe's, at most the features')",
    )
    add_run(parser)
    parser.add_argument("--prompt", metavar="NAME", help="whose features (default: the only one)")
    parser.add_argument(
        "--subtract",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="subtract the unconditional embedding",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="other settings of the recipe",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="of the head in the run (default: RECIPE@PROMPT)"
    )


def _fit_head(options: argparse.Namespace) -> None:
    from llmcond.workflows import fit_head

    summary = fit_head(
        options.run,
        options.head,
        options.dim,
        options.prompt,
        options.subtract,
        options.seed,
        key_values(options.set, "--set"),
        options.name,
    )
    if options.json:
        print_json(summary)


def _add_evaluate(commands: Any) -> None:
    parser = add_command(
        commands,
        "evaluate",
        "Score a run's heads, with zero-shot beside them.",
        _evaluate,
        "llmcond evaluate --head mlp --split dev --json",
    )
    add_run(parser)
    parser.add_argument(
        "--head",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="fitted heads (default: all; none: zero-shot only)",
    )
    add_split(parser)
    add_metric(parser)
    add_data(parser, f"score other rows: {SOURCE}; a single file is scored whole")
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE.csv",
        help="write each row's predicted similarities",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE.html", help="a page to read: charts, texts, settings"
    )
    add_format(parser)
    add_device(parser)


def _evaluate(options: argparse.Namespace) -> None:
    from llmcond.workflows import evaluate

    results = evaluate(
        options.run,
        options.head,
        options.split,
        data_options(options),
        options.predictions,
        options.device,
        options.report,
        options.metric,
    )
    if options.json:
        print_json(results.to_json())
        return
    from llmcond.report.terminal import results_table, show

    show(results_table(results, options.run), options.format)


def _add_similarity(commands: Any) -> None:
    parser = add_command(
        commands,
        "similarity",
        "Compare two sentences under conditions.",
        _similarity,
        "llmcond similarity 'A man rides a horse.' 'A girl cycles.' --condition 'the activity'",
    )
    parser.add_argument("sentence1", metavar="SENTENCE1")
    parser.add_argument("sentence2", metavar="SENTENCE2")
    parser.add_argument(
        "--condition",
        action="append",
        required=True,
        metavar="C",
        help="may be given several times",
    )
    add_format(parser)
    add_run(parser)
    _add_head(parser)


def _add_head(parser: Any) -> None:
    parser.add_argument(
        "--head", metavar="NAME", help="a fitted head (default: the last one; none: zero-shot)"
    )
    parser.add_argument(
        "--prompt", metavar="NAME", help="for zero-shot (default: the run's only one)"
    )
    add_device(parser)


def _similarity(options: argparse.Namespace) -> None:
    from llmcond.log import log
    from llmcond.runs.embedder import describe, load_embedder

    embedder = load_embedder(
        options.run, options.head, prompt=options.prompt, device=options.device
    )
    n = len(options.condition)
    values = embedder.similarity(
        [options.sentence1] * n, [options.sentence2] * n, options.condition
    )
    rows = [
        {"condition": condition, "similarity": round(float(value), 6)}
        for condition, value in zip(options.condition, values, strict=True)
    ]
    about = describe(embedder)
    if options.json:
        print_json({"similarities": rows, **about})
        return
    from llmcond.report.terminal import listing, show

    log.info(f"{about['encoder']}, prompt {about['prompt']}, head {about['head']}")
    show(listing(rows), options.format)


def _add_embed(commands: Any) -> None:
    parser = add_command(
        commands,
        "embed",
        "Write an embedding for each row of a file.",
        _embed,
        "llmcond embed texts.csv --out vectors.parquet --condition 'the activity'",
    )
    parser.add_argument("source", metavar="SRC", help="a .csv, .tsv, .jsonl or .parquet file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".parquet or .npy")
    parser.add_argument("--sentence", default="sentence", metavar="COL", help="(default: sentence)")
    parser.add_argument(
        "--condition",
        metavar="COL_OR_TEXT",
        help="a column, or one condition for every row (default: the column called condition)",
    )
    add_run(parser)
    _add_head(parser)


def _embed(options: argparse.Namespace) -> None:
    from llmcond.workflows import embed_file

    summary = embed_file(
        options.run,
        options.source,
        options.out,
        options.sentence,
        options.condition,
        options.head,
        options.prompt,
        options.device,
    )
    if options.json:
        print_json(summary)


def _add_listings(commands: Any) -> None:
    parser = add_command(
        commands,
        "models",
        "List the encoders that are known by name, or check one before it is downloaded.",
        _models,
        "llmcond models --check nvidia/NV-Embed-v2",
    )
    parser.add_argument(
        "--check",
        metavar="NAME_OR_PATH",
        help="tell what an encoder reads and pools, the memory it needs, and whether it fits here; "
        "downloads its settings and tokenizer only",
    )
    add_encoder_settings(parser.add_argument_group("with --check"))
    add_format(parser)
    add_prompts(commands)
    heads = add_command(
        commands, "heads", "List the bundled head recipes.", _heads, "llmcond heads --json"
    )
    add_format(heads)


def _models(options: argparse.Namespace) -> None:
    from llmcond import listings
    from llmcond.encoders import EncoderOptions

    if options.check is not None:
        _check_model(options)
    elif encoder_options(options) != EncoderOptions():
        raise UserError("these options are about one encoder; name it: --check NAME.")
    elif options.json:
        print_json({"models": listings.models()})
    else:
        from llmcond.report.terminal import listing, show, width

        show(listing(listings.models_in_brief(width())), options.format)


def _check_model(options: argparse.Namespace) -> None:
    from llmcond.workflows import check_model

    report, problem = check_model(options.check, encoder_options(options))
    if options.json:
        print_json({**report, "problem": str(problem) if problem else None})
    else:
        from llmcond.report.checkup import show_checkup

        show_checkup(report)
    if problem is not None:
        raise problem


def _heads(options: argparse.Namespace) -> None:
    from llmcond import listings
    from llmcond.report.terminal import listing, show

    rows = listings.heads()
    if options.json:
        print_json({"heads": rows})
    else:
        show(listing(rows), options.format)
