"""Rating sentence pairs under conditions by a language model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.annotation.questions import (
    Journal,
    Prices,
    Question,
    QuestionRunner,
    build_offers,
    total_tokens,
)
from llmcond.annotation.template import (
    SCALE,
    ChatSettings,
    QuestionTemplate,
    load_template,
    parse_proposal,
    parse_rating,
)
from llmcond.data.datasets import (
    Columns,
    DataOptions,
    RatingScale,
    read_collection,
    read_rows,
)
from llmcond.data.rows import Rows
from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.evaluation.analyses import Agreement, agreement
from llmcond.files import check_output, write_csv
from llmcond.log import log
from llmcond.progress import format_duration
from llmcond.workflows.options.texts import AnnotateOptions

#: Questions of each kind that are asked first, to measure the time and tokens of one.
_N_FIRST = 3
#: The most questions that are asked without the user's consent when there is no terminal.
_MAX_UNCONFIRMED = 100


@dataclass(frozen=True)
class AnnotationResult(Displayed):
    """The result of rating rows by a language model.

    Attributes:
        out: the file that was written.
        model: the name of the language model.
        prompt: the name of the template.
        rows: the number of rows written.
        ill_defined: the number of written rows that the model calls ill-defined.
        unanswered: the number of rows left out because none of their answers can be read.
        questions: the number of questions that this call asked; the others had stored answers.
        tokens_in: the input tokens of these questions; None: the server does not report them.
        tokens_out: the output tokens of these questions; None: the server does not report them.
        cost: the cost of these questions at the given prices; None: unknown.
        agreement: the agreement with the ratings that the rows had; None: they had none.

    Examples:
        >>> from pathlib import Path
        >>> import llmcond
        >>> result = llmcond.AnnotationResult(
        ...     out=Path("rated.csv"), model="my-model", prompt="rate", rows=98, ill_defined=3,
        ...     unanswered=2, questions=100, tokens_in=21_000, tokens_out=400, cost=None,
        ...     agreement=None,
        ... )
        >>> result.to_json()["rows"]
        98
    """

    out: Path
    model: str
    prompt: str
    rows: int
    ill_defined: int
    unanswered: int
    questions: int
    tokens_in: int | None
    tokens_out: int | None
    cost: float | None
    agreement: Agreement | None


def annotate(options: AnnotateOptions) -> AnnotationResult:
    """Write a file of rows rated by a language model, which ``extract`` can read.

    Answers are stored next to the file as they arrive, in ``NAME.answers`` with one JSON object per
    line. The same call continues from there if it was stopped.

    Raises:
        UserError: the options, the data or a template are invalid, the server rejects the request,
            or the user does not agree to the forecast.
        LlmcondError: the server fails.
    """
    fields = {name: _parse_value(text) for name, text in (options.request or {}).items()}
    limits = (options.timeout, options.retries, options.per_minute)
    server = ChatSettings(options.endpoint, options.model, fields, *limits)
    server.check()
    prices = Prices(options.price_in, options.price_out)
    data, out, samples = options.data_options(), Path(options.out), options.samples
    check_output(out, (".csv",), [data.source])
    rate = load_template(options.prompt, "rate")
    pairs, proposals, n_rows = None, list[Question](), options.propose or 0
    if options.propose is None:
        pairs = _read_rows(data, options.split, options.rows, options.seed)
        n_rows = len(pairs)
    else:
        proposals = _propose(options)
    with (
        Journal(out.with_suffix(".answers")) as journal,
        QuestionRunner(server, journal, options.seed, options.concurrency) as asker,
    ):

        def list_rows() -> tuple[Rows, list[Question]]:
            """Return the rows known so far, and the questions that rate them."""
            rows = _proposed_rows(asker, proposals, n_rows) if pairs is None else pairs
            return rows, _make_questions(rate, rows, samples)

        # A few questions of each kind are asked first, for a forecast of the others.
        _ask_readable(asker, proposals[:_N_FIRST])
        _, questions = list_rows()
        _ask_readable(asker, questions[:_N_FIRST])
        n_missing = len(asker.missing_questions(questions))
        remaining = [
            (len(asker.missing_questions(proposals)), proposals[:_N_FIRST]),
            (samples * n_rows - len(questions) + n_missing, questions[:_N_FIRST]),
        ]
        _confirm(asker.forecast(remaining, prices), server, options.yes)
        asker.ask(proposals)
        rows, questions = list_rows()
        asker.ask(questions)
    if not len(rows):
        raise UserError(
            f"{server.model} paired none of the texts. Name another --model, or give other texts."
        )
    if len(rows) < n_rows:
        log.info(
            f"{len(rows):,} of {n_rows:,} rows were proposed; the other texts could not be paired"
        )
    values = [asker.parsed_answer(question) for question in questions]
    ratings = [
        [value for value in values[start : start + samples] if value is not None]
        for start in range(0, len(values), samples)
    ]
    answered = rows.take(np.array(list(map(bool, ratings)), dtype=np.bool_))
    ratings = list(filter(None, ratings))
    model_ratings = np.array(list(map(_mean_rating, ratings)))
    columns: dict[str, Sequence[str]] = {
        **answered.texts,
        "label": list(map(_format_rating, model_ratings)),
        "answers": [" ".join(map(_format_rating, row_ratings)) for row_ratings in ratings],
    }
    if answered.rated.any():
        columns["human"] = list(map(_format_rating, answered.rating))
    write_csv(out, columns, zip(*columns.values(), strict=True))
    unanswered, ill_defined = len(rows) - len(answered), int(np.isnan(model_ratings).sum())
    log.info(f"{len(answered):,} rows, {ill_defined:,} of them ill-defined -> {out}")
    if unanswered:
        log.warning(
            f"{unanswered:,} rows are left out, because none of their answers can be read "
            f"({journal.path}). To ask again, give another --seed."
        )
    tokens = [total_tokens(asker.new_answers, name) for name in ("tokens_in", "tokens_out")]
    return AnnotationResult(
        out=out,
        model=server.model,
        prompt=rate.name,
        rows=len(answered),
        ill_defined=ill_defined,
        unanswered=unanswered,
        questions=len(asker.new_answers),
        tokens_in=tokens[0],
        tokens_out=tokens[1],
        cost=prices.cost(*tokens),
        agreement=agreement(answered, model_ratings) if answered.rated.any() else None,
    )


def _propose(options: AnnotateOptions) -> list[Question]:
    """Return the questions that ask the model to pair texts."""
    template = load_template("propose", "propose")
    texts = read_collection(options.data, options.text, read=options.read_options()).texts
    questions = []
    for sentence, candidates in build_offers(texts, options.propose or 0, options.seed):
        numbered = (f"{number}. {text}" for number, text in enumerate(candidates, 1))
        values = {"sentence": sentence, "others": "\n".join(numbered)}
        parse = partial(parse_proposal, sentence=sentence, candidates=candidates)
        questions.append(Question(template, values, parse))
    return questions


def _proposed_rows(asker: QuestionRunner, proposals: Sequence[Question], n_rows: int) -> Rows:
    """Return the distinct rows of proposals that were answered, at most ``n_rows``."""
    answers = (asker.parsed_answer(question) for question in proposals)
    rows = [*dict.fromkeys(row for answer in answers for row in answer or ())][:n_rows]
    first, second, conditions = ([row[i] for row in rows] for i in range(3))
    ratings, numbers = np.full(len(rows), np.nan), np.arange(1, len(rows) + 1)
    return Rows(first, second, conditions, ratings, numbers, "proposed rows")


def _ask_readable(asker: QuestionRunner, questions: Sequence[Question]) -> None:
    asker.ask(questions)
    asker.check_readable(questions)


def _parse_value(text: str) -> Any:
    """Parse a value as JSON; a text that is not JSON is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError as error:
        raise UserError(f"--request cannot be sent as JSON: {error}. Correct it.") from None


def _read_rows(data: DataOptions, split: str | None, max_rows: int | None, seed: int) -> Rows:
    """Read the rows to rate: all, or ``max_rows`` sampled by the seed, in their original order."""
    columns, scale = Columns(**data.columns), RatingScale(**data.scale)
    rows, _ = read_rows(
        data.source,
        split or "train",
        columns,
        scale,
        reading=data.reading,
        need_ratings="label" in data.columns,
    )
    if max_rows is None or max_rows >= len(rows):
        return rows
    return rows.take(np.sort(np.random.default_rng(seed).permutation(len(rows))[:max_rows]))


def _make_questions(template: QuestionTemplate, rows: Rows, samples: int) -> list[Question]:
    """Return the questions on all rows, where the samples of one row follow each other."""
    return [
        Question(template, dict(zip(rows.texts, values, strict=True)), parse_rating, sample)
        for values in zip(*rows.texts.values(), strict=True)
        for sample in range(samples)
    ]


def _confirm(forecast: tuple[int, str, float], server: ChatSettings, yes: bool) -> None:
    """Log a forecast of the remaining questions, and ask the user to agree.

    Raises:
        UserError: the user does not agree, or there are many questions and no terminal.
    """
    n_questions, summary, seconds = forecast
    if not n_questions:
        return
    log.info(
        f"to ask: {n_questions:,} questions, {summary}, {format_duration(seconds)}; {server.model} "
        f"at {server.endpoint}"
    )
    if yes:
        return
    stored = "the answers so far are stored"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if n_questions > _MAX_UNCONFIRMED:
            raise UserError(
                f"{n_questions:,} questions remain, and there is no terminal to confirm "
                f"them on. Add --yes (from Python: yes=True); {stored}."
            )
        return
    sys.stderr.write("Continue? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError(f"not confirmed. The same command continues later; {stored}.")


def _mean_rating(ratings: Sequence[float]) -> float:
    """Return the mean of a row's ratings; NaN if more than half of them call it ill-defined."""
    rated = [rating for rating in ratings if not np.isnan(rating)]
    return float(np.mean(rated)) if 2 * len(rated) >= len(ratings) else float("nan")


def _format_rating(rating: float) -> str:
    """Return a rating as text in the format of files: 1 to 5, or -1 for an ill-defined row."""
    scaled = SCALE.unrated if np.isnan(rating) else SCALE.low + rating * (SCALE.high - SCALE.low)
    return f"{scaled:.4g}"
