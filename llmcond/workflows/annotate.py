"""Rating sentence pairs by a language model, with a journal of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from llmcond.base.errors import UserError
from llmcond.base.files import check_output, write_csv
from llmcond.base.output import Displayed, log
from llmcond.data.datasets import Columns, DataOptions, RatingScale, read_collection, read_rows
from llmcond.data.rows import Rows
from llmcond.evaluation.analyses import Agreement, agreement
from llmcond.options.texts import AnnotateOptions
from llmcond.prompts.questions import (
    SCALE,
    QuestionTemplate,
    load_template,
    parse_proposal,
    parse_rating,
)
from llmcond.workflows.question_runner import Journal, Question, QuestionRunner, chat_settings

#: Number of candidates for the second sentence in each question.
N_CANDIDATES = 8
#: Number of rows per proposal: one condition of high similarity and one of low similarity.
_ROWS = 2


def build_offers(texts: Sequence[str], rows: int, seed: int) -> list[tuple[str, list[str]]]:
    """Return enough texts for ``rows`` rows, each with the candidates most similar to it.

    The similarity is the cosine of TF-IDF vectors. Each text is offered once, in a random order,
    then each text again with the next most similar texts, until every pair has been offered.

    Args:
        texts: the texts, of which duplicates are ignored.
        rows: number of rows.
        seed: random seed of the order.

    Raises:
        UserError: there are not enough texts for this number of rows.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.neighbors import NearestNeighbors

    texts = list(dict.fromkeys(" ".join(text.split()) for text in texts))
    needed, n = -(-rows // _ROWS), len(texts)
    possible = n * -(-(n - 1) // N_CANDIDATES)
    if needed > possible:
        raise UserError(
            f"--propose is {rows:,}, but {n:,} distinct texts give at most {_ROWS * possible:,} "
            "rows. Ask for fewer rows, or give more texts."
        )
    # Words of one character and symbols count, because some languages have such words.
    words = r"\w+|[^\w\s]"
    vectors = TfidfVectorizer(token_pattern=words).fit_transform(texts)
    order = np.random.default_rng(seed).permutation(n)[:needed]
    n_neighbors = min(n, N_CANDIDATES * -(-needed // n) + 1)
    search = NearestNeighbors(n_neighbors=n_neighbors, metric="cosine").fit(vectors)
    neighbors = search.kneighbors(vectors[order], return_distance=False)
    result = []
    for number in range(needed):
        repetition, position = divmod(number, n)
        others = [texts[j] for j in neighbors[position].tolist() if j != order[position]]
        candidates = others[N_CANDIDATES * repetition : N_CANDIDATES * (repetition + 1)]
        result.append((texts[order[position]], candidates))
    return result


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
    server = chat_settings(options, options.endpoint, "--endpoint")
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
        QuestionRunner.of(server, journal, options) as asker,
    ):

        def list_rows() -> tuple[Rows, list[Question]]:
            """Return the rows known so far, and the questions that rate them."""
            rows = _proposed_rows(asker, proposals, n_rows) if pairs is None else pairs
            return rows, _make_questions(rate, rows, samples)

        # A few questions of each kind are asked first, for a forecast of the others.
        first_proposals = asker.ask_first(proposals)
        _, questions = list_rows()
        first_questions = asker.ask_first(questions)
        n_missing = len(asker.missing_questions(questions))
        remaining = [
            (len(asker.missing_questions(proposals)), first_proposals),
            (samples * n_rows - len(questions) + n_missing, first_questions),
        ]
        asker.confirm(remaining, yes=options.yes)
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
    tokens_in, tokens_out, cost = asker.count_tokens()
    return AnnotationResult(
        out=out,
        model=server.model,
        prompt=rate.name,
        rows=len(answered),
        ill_defined=ill_defined,
        unanswered=unanswered,
        questions=len(asker.new_answers),
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        cost=cost,
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
        Question(template, dict(zip(rows.texts, values, strict=True)), parse_rating, sample=sample)
        for values in zip(*rows.texts.values(), strict=True)
        for sample in range(samples)
    ]


def _mean_rating(ratings: Sequence[float]) -> float:
    """Return the mean of a row's ratings; NaN if more than half of them call it ill-defined."""
    rated = [rating for rating in ratings if not np.isnan(rating)]
    return float(np.mean(rated)) if 2 * len(rated) >= len(ratings) else float("nan")


def _format_rating(rating: float) -> str:
    """Return a rating as text in the format of files: 1 to 5, or -1 for an ill-defined row."""
    scaled = SCALE.unrated if np.isnan(rating) else SCALE.low + rating * (SCALE.high - SCALE.low)
    return f"{scaled:.4g}"
