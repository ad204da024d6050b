"""The command line: parse, call one verb, print. Heavy libraries are imported by the verbs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from llmcond.errors import (
    DiskFullError,
    LlmcondError,
    UserError,
    is_disk_full,
    nearest,
    printable,
)
from llmcond.launch import local_rank
from llmcond.version import __version__

DEFAULT_RUN = Path("runs/default")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 2 wrong input, 1 anything else."""
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
    _add_evaluate(commands)
    _add_compare_prompts(commands)
    _add_similarity(commands)
    _add_embed(commands)
    _add_listings(commands)
    return parser


# -- options that commands share ---------------------------------------------------------------


def _add_command(commands: Any, name: str, summary: str, command: Any, example: str) -> Any:
    parser = commands.add_parser(
        name, allow_abbrev=False, help=summary, description=summary, epilog=f"Example: {example}"
    )
    parser.set_defaults(command=command)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )
    return parser


def _add_run(parser: Any) -> None:
    parser.add_argument(
        "--run",
        type=Path,
        default=DEFAULT_RUN,
        metavar="DIR",
        help="folder of this piece of work (default: runs/default)",
    )


def _add_device(parser: Any) -> None:
    parser.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N")


def _add_data(parser: Any, source: str) -> None:
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


_SOURCE = (
    "a .csv, .tsv, .jsonl or .parquet file, a folder with train, dev and test files, or "
    "hf://datasets/OWNER/NAME"
)


def _add_encoder(parser: Any) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME_OR_PATH",
        help="alias, hub name or folder (`llmcond models` lists the known ones)",
    )
    _add_encoder_settings(parser)


def _add_encoder_settings(parser: Any) -> None:
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
    _add_device(parser)
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


def _encoder_options(options: argparse.Namespace) -> Any:
    from llmcond.encoders import EncoderOptions

    values = vars(options)
    template = options.instruction_format
    if template is not None:
        # A shell has no easy way to write a line break.
        values = {**values, "instruction_format": template.replace("\\n", "\n")}
    return EncoderOptions.of(values)


def _data_options(options: argparse.Namespace, split_seed: int | None = None) -> Any:
    from llmcond.datasets import Columns, RatingScale
    from llmcond.workflows import DataOptions

    columns = scale = None
    if options.columns:
        pairs = _pairs(options.columns, "--columns")
        legal = ("sentence1", "sentence2", "condition", "label")
        for name in pairs:
            if name not in legal:
                raise UserError(f"--columns has no {name!r}. {nearest(name, legal)}")
        columns = Columns(**pairs)
    if options.rating_range or options.unrated is not None:
        low, high = options.rating_range or (1.0, 5.0)
        scale = RatingScale(low, high, -1.0 if options.unrated is None else options.unrated)
    return DataOptions(options.data, columns, scale, split_seed)


def _pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (equals and key and value):
            raise UserError(f"{option} is {text!r}; expected NAME=VALUE.")
        pairs[key] = value
    return pairs


def _print_json(value: dict[str, Any]) -> None:
    if local_rank():
        return  # of several processes that were launched together, one prints
    sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


# -- commands ----------------------------------------------------------------------------------


def _add_extract(commands: Any) -> None:
    parser = _add_command(
        commands,
        "extract",
        "Encode a data set's texts under prompts, once, into a run.",
        _extract,
        "llmcond extract --model minilm --data my.csv --prompt concat-sent-cond",
    )
    _add_encoder(parser)
    _add_run(parser)
    _add_data(parser, f"{_SOURCE} (default: the run's own data, or the bundled sample)")
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
        _encoder_options(options),
        options.run,
        _data_options(options, options.split_seed),
        options.prompt,
        options.store_dtype,
        options.workers,
    )
    if options.json:
        _print_json(summary)


def _add_fit_head(commands: Any) -> None:
    parser = _add_command(
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
    _add_run(parser)
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
        _pairs(options.set, "--set"),
        options.name,
    )
    if options.json:
        _print_json(summary)


def _add_evaluate(commands: Any) -> None:
    parser = _add_command(
        commands,
        "evaluate",
        "Score a run's heads, with zero-shot beside them.",
        _evaluate,
        "llmcond evaluate --head mlp --split dev --json",
    )
    _add_run(parser)
    parser.add_argument(
        "--head",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="fitted heads (default: all; none: zero-shot only)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "dev", "test"),
        help="(default: test if there is one, else dev)",
    )
    _add_data(parser, f"score other rows: {_SOURCE}; a single file is scored whole")
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE.csv",
        help="write each row's predicted similarities",
    )
    _add_device(parser)


def _evaluate(options: argparse.Namespace) -> None:
    from llmcond.workflows import evaluate

    results = evaluate(
        options.run,
        options.head,
        options.split,
        _data_options(options),
        options.predictions,
        options.device,
    )
    _print_results(options, results)


def _add_compare_prompts(commands: Any) -> None:
    parser = _add_command(
        commands,
        "compare-prompts",
        "Compare prompts on the same rows, splits and seed.",
        _compare_prompts,
        "llmcond compare-prompts --model minilm --prompts my/*.toml --heads mlp",
    )
    _add_encoder(parser)
    _add_run(parser)
    _add_data(parser, f"{_SOURCE} (default: the run's own data, or the bundled sample)")
    parser.add_argument(
        "--prompts",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="names or files (default: every bundled one that the model can use)",
    )
    parser.add_argument(
        "--heads",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="recipes to fit beside zero-shot (default: linear mlp; none: none)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "dev", "test"),
        help="(default: test if there is one, else dev)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: 0)")


def _compare_prompts(options: argparse.Namespace) -> None:
    from llmcond.workflows import compare_prompts

    results = compare_prompts(
        options.model,
        _encoder_options(options),
        options.run,
        _data_options(options),
        options.prompts,
        options.heads or ("linear", "mlp"),
        options.split,
        options.seed,
    )
    _print_results(options, results)


def _print_results(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    if options.json:
        _print_json({"results": results})
        return
    from llmcond.report.tables import results_table, show

    show(results_table(results, options.run))


def _add_similarity(commands: Any) -> None:
    parser = _add_command(
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
    _add_run(parser)
    _add_head(parser)


def _add_head(parser: Any) -> None:
    parser.add_argument(
        "--head", metavar="NAME", help="a fitted head (default: the last one; none: zero-shot)"
    )
    parser.add_argument(
        "--prompt", metavar="NAME", help="for zero-shot (default: the run's only one)"
    )
    _add_device(parser)


def _similarity(options: argparse.Namespace) -> None:
    from llmcond.embedder import describe, load_embedder
    from llmcond.report.console import note

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
        _print_json({"similarities": rows, **about})
        return
    from llmcond.report.tables import listing, show

    note(f"{about['encoder']}, prompt {about['prompt']}, head {about['head']}")
    show(listing(rows))


def _add_embed(commands: Any) -> None:
    parser = _add_command(
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
    _add_run(parser)
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
        _print_json(summary)


def _add_listings(commands: Any) -> None:
    parser = _add_command(
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
    _add_encoder_settings(parser.add_argument_group("with --check"))
    for name, summary in (
        ("prompts", "List the bundled prompts."),
        ("heads", "List the bundled head recipes."),
    ):
        _add_command(commands, name, summary, _list, f"llmcond {name} --json")


def _models(options: argparse.Namespace) -> None:
    from llmcond import listings
    from llmcond.encoders import EncoderOptions

    if options.check is not None:
        _check_model(options)
    elif _encoder_options(options) != EncoderOptions():
        raise UserError("these options are about one encoder; name it: --check NAME.")
    elif options.json:
        _print_json({"models": listings.models()})
    else:
        from llmcond.report.tables import listing, show, width

        show(listing(listings.models_in_brief(width())))


def _check_model(options: argparse.Namespace) -> None:
    from llmcond.workflows import check_model

    report, problem = check_model(options.check, _encoder_options(options))
    if options.json:
        _print_json({**report, "problem": str(problem) if problem else None})
    else:
        from llmcond.report.checkup import show_checkup

        show_checkup(report)
    if problem is not None:
        raise problem


def _list(options: argparse.Namespace) -> None:
    from llmcond import listings
    from llmcond.report.tables import listing, show

    rows = getattr(listings, options.name)()
    if options.json:
        _print_json({options.name: rows})
    else:
        show(listing(rows))
