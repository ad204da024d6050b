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
    Forecast,
    Journal,
    Offer,
    Prices,
    Question,
    QuestionRunner,
    build_offers,
    proposed_rows,
)
from llmcond.annotation.server import Answer, ChatSettings
from llmcond.annotation.template import (
    SCALE,
    QuestionTemplate,
    load_template,
    parse_proposal,
    parse_rating,
)
from llmcond.data.datasets import (
    Columns,
    DataOptions,
    RatingScale,
    has_column,
    open_collection,
    read_collection,
    read_pairs,
    read_rows,
    text_column,
)
from llmcond.data.rows import Rows
from llmcond.display import Displayed
from llmcond.errors import UserError
from llmcond.evaluation.agreement import Agreement, agreement
from llmcond.files import check_output, write_csv
from llmcond.log import log
from llmcond.metrics import Floats
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


@dataclass(frozen=True)
class _RatingPlan:
    """The rows to rate: pairs that exist, or questions that ask the model to propose pairs.

    Attributes:
        n_rows: the number of rows to rate.
        pairs: the rows, if they exist already; None: the model proposes them.
        offers: the texts that the model pairs.
        questions: the questions that ask for proposals, one for each offer.
    """

    n_rows: int
    pairs: Rows | None = None
    offers: Sequence[Offer] = ()
    questions: Sequence[Question] = ()

    def rows(self, asker: QuestionRunner) -> Rows:
        """Return the rows known so far: the pairs, or the proposals that were answered."""
        if self.pairs is not None:
            return self.pairs
        rows = proposed_rows(
            self.offers, [asker.parsed_answer(question) for question in self.questions]
        )
        return rows.take(np.arange(min(self.n_rows, len(rows))))


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
    data, out = options.data_options(), Path(options.out)
    samples, split, rows, seed = options.samples, options.split, options.rows, options.seed
    check_output(out, (".csv",), [data.source])
    rate = load_template(options.prompt, "rate")
    if options.propose is None:
        pairs = _read_rows(data, split, rows, seed)
        plan = _RatingPlan(len(pairs), pairs)
    else:
        _check_propose(data, split, rows)
        template = load_template(options.propose_prompt, "propose")
        plan = _plan_proposals(template, _read_texts(options), options.propose, seed)
    with (
        Journal(out.with_suffix(".answers")) as journal,
        QuestionRunner(server, journal, seed, options.concurrency) as asker,
    ):
        _ask_first(asker, plan, rate, samples, prices, options.yes)
        asker.ask(plan.questions)
        rows_to_rate = plan.rows(asker)
        questions = _make_questions(rate, rows_to_rate, samples)
        asker.ask(questions)
    if not len(rows_to_rate):
        raise UserError(
            f"{server.model} paired none of the texts. Name another --model, or give other texts."
        )
    if len(rows_to_rate) < plan.n_rows:
        log.info(
            f"{len(rows_to_rate):,} of {plan.n_rows:,} rows were proposed; the other texts could "
            "not be paired"
        )
    values = [asker.parsed_answer(question) for question in questions]
    ratings = [
        [value for value in values[start : start + samples] if value is not None]
        for start in range(0, len(values), samples)
    ]
    answered = np.array([bool(row_ratings) for row_ratings in ratings], dtype=np.bool_)
    answered_rows, ratings = (
        rows_to_rate.take(answered),
        [row_ratings for row_ratings in ratings if row_ratings],
    )
    model_ratings = np.array([_mean_rating(row_ratings) for row_ratings in ratings])
    _write_rows(out, answered_rows, model_ratings, ratings)
    unanswered = int((~answered).sum())
    log.info(
        f"{len(answered_rows):,} rows, {int(np.isnan(model_ratings).sum()):,} of them "
        f"ill-defined -> {out}"
    )
    if unanswered:
        log.warning(
            f"{unanswered:,} rows are left out, because none of their answers can be read "
            f"({journal.path}). To ask again, give another --seed."
        )
    tokens_in, tokens_out = (
        _total_tokens(asker.new_answers, name) for name in ("tokens_in", "tokens_out")
    )
    return AnnotationResult(
        out=out,
        model=server.model,
        prompt=rate.name,
        rows=len(answered_rows),
        ill_defined=int(np.isnan(model_ratings).sum()),
        unanswered=unanswered,
        questions=len(asker.new_answers),
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        cost=prices.cost(tokens_in, tokens_out),
        agreement=agreement(answered_rows, model_ratings) if answered_rows.rated.any() else None,
    )


def _plan_proposals(
    template: QuestionTemplate, texts: Sequence[str], n_rows: int, seed: int
) -> _RatingPlan:
    row_offers = build_offers(texts, n_rows, seed)
    questions = [
        Question(
            template, offer.values, partial(parse_proposal, n_candidates=len(offer.candidates))
        )
        for offer in row_offers
    ]
    return _RatingPlan(n_rows, None, row_offers, questions)


def _ask_first(
    asker: QuestionRunner,
    plan: _RatingPlan,
    rate: QuestionTemplate,
    samples: int,
    prices: Prices,
    yes: bool,
) -> None:
    """Ask a few questions of each kind, log a forecast for the others, and ask for consent.

    Raises:
        UserError: none of the first answers can be read, or the user does not agree.
    """
    first_proposals = plan.questions[:_N_FIRST]
    asker.ask(first_proposals)
    asker.check_readable(first_proposals)
    questions = _make_questions(rate, plan.rows(asker), samples)
    first_ratings = questions[:_N_FIRST]
    asker.ask(first_ratings)
    asker.check_readable(first_ratings)
    rated = len(questions) - len(asker.missing_questions(questions))
    remaining = [
        (len(asker.missing_questions(plan.questions)), first_proposals),
        (samples * plan.n_rows - rated, first_ratings),
    ]
    _confirm(asker.forecast(remaining, prices), asker.settings, yes)


def _parse_value(text: str) -> Any:
    """Parse a value as JSON; a text that is not JSON is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError as error:
        raise UserError(f"--request cannot be sent as JSON: {error}. Correct it.") from None


def _check_propose(data: DataOptions, split: str | None, rows: int | None) -> None:
    options = {
        "--columns, --rating-range or --unrated": data.columns or data.scale,
        "--split": split,
        "--rows": rows,
    }
    for option, value in options.items():
        if value:
            raise UserError(
                f"{option} is for existing rows, but --propose makes rows from texts. Leave it out."
            )


def _read_rows(data: DataOptions, split: str | None, max_rows: int | None, seed: int) -> Rows:
    """Read the rows to rate: all, or ``max_rows`` sampled by the seed, in their original order."""
    columns, scale = Columns(**data.columns), RatingScale(**data.scale)
    if "label" in data.columns:
        rows, _ = read_rows(data.source, split or "train", columns, scale, reading=data.reading)
    else:
        rows = read_pairs(data.source, split or "train", columns, scale, data.reading)
    if max_rows is None or max_rows >= len(rows):
        return rows
    return rows.take(np.sort(np.random.default_rng(seed).permutation(len(rows))[:max_rows]))


def _read_texts(options: AnnotateOptions) -> list[str]:
    source = open_collection(options.data, options.read_options(), options.text)
    column = text_column(partial(has_column, source), options.text)
    return read_collection(source, column).texts


def _make_questions(template: QuestionTemplate, rows: Rows, samples: int) -> list[Question]:
    """Return the questions on all rows, where the samples of one row follow each other."""
    columns = zip(*rows.texts.values(), strict=True)
    texts = [dict(zip(rows.texts, values, strict=True)) for values in columns]
    return [
        Question(template, values, parse_rating, sample)
        for values in texts
        for sample in range(samples)
    ]


def _confirm(forecast: Forecast, server: ChatSettings, yes: bool) -> None:
    """Log a forecast of the remaining questions, and ask the user to agree.

    Raises:
        UserError: the user does not agree, or there are many questions and no terminal.
    """
    if not forecast.questions:
        return
    log.info(
        f"to ask: {forecast.summary}, {format_duration(forecast.seconds)}; {server.model} at "
        f"{server.endpoint}"
    )
    if yes:
        return
    stored = "the answers so far are stored"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        if forecast.questions > _MAX_UNCONFIRMED:
            raise UserError(
                f"{forecast.questions:,} questions remain, and there is no terminal to confirm "
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


def _total_tokens(answers: Sequence[Answer], name: str) -> int | None:
    """Return the total of a token count; None if the server does not report it."""
    counts = [getattr(answer, name) for answer in answers]
    return None if None in counts else sum(counts)


def _write_rows(
    path: Path, rows: Rows, model_ratings: Floats, answered_ratings: Sequence[Sequence[float]]
) -> None:
    answers = [" ".join(map(_format_rating, row_ratings)) for row_ratings in answered_ratings]
    columns = {**rows.texts, "label": list(map(_format_rating, model_ratings)), "answers": answers}
    if rows.rated.any():
        columns["human"] = list(map(_format_rating, rows.rating))
    write_csv(path, columns, zip(*columns.values(), strict=True))
