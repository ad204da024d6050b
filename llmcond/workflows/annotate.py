"""Rating sentence pairs by a language model, with a journal of its answers."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from filelock import FileLock, Timeout

from llmcond.base.errors import LlmcondError, UserError, install_command, shortened_repr
from llmcond.base.files import check_output, digest_text, write_csv
from llmcond.base.output import Displayed, ProgressBar, format_duration, log
from llmcond.base.records import check_record
from llmcond.data.datasets import Columns, DataOptions, RatingScale, read_collection, read_rows
from llmcond.data.rows import Rows
from llmcond.evaluation.analyses import Agreement, agreement
from llmcond.options.texts import AnnotateOptions
from llmcond.prompts.questions import (
    SCALE,
    Answer,
    ChatSettings,
    QuestionTemplate,
    load_template,
    parse_proposal,
    parse_rating,
)

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from llmcond.workflows.chat import ChatClient

#: Number of attempts for a question whose answers cannot be parsed, each with another seed.
ATTEMPTS = 3
#: Number of candidates for the second sentence in each question.
N_CANDIDATES = 8
#: Number of rows per proposal: one condition of high similarity and one of low similarity.
_ROWS = 2


@dataclass(frozen=True, slots=True)
class JournalLine(Answer):
    """The required keys of each line."""

    key: str


class Journal:
    """The file of answers, as a context manager that locks it; the file is created when needed.

    Attributes:
        path: the file.
        answers: the stored answers by the keys of their questions.

    Raises:
        UserError: another process writes the file, or it cannot be written.
        LlmcondError: a line of the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
        self.answers: dict[str, Answer] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another process writes {self.path}. Wait until it has finished, or name another "
                "--out."
            ) from error
        try:
            self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _read(self) -> None:
        if not self.path.is_file():
            return
        text = self.path.read_bytes()
        complete = text.rfind(b"\n") + 1
        for number, line in enumerate(text[:complete].split(b"\n")[:-1], 1):
            source = f"{self.path} line {number}"
            try:
                values = dict(json.loads(line))
            except (TypeError, ValueError, RecursionError) as error:
                raise LlmcondError(f"{source} was damaged. Remove the line.") from error
            answer = check_record(values, JournalLine, source, "Remove the line.")
            self.answers[answer.key] = answer
        if complete < len(text):  # A process was killed while it wrote the last line.
            os.truncate(self.path, complete)

    def add(self, key: str, answer: Answer, about: Mapping[str, Any]) -> None:
        """Store an answer, with information about its question for readers of the file."""
        line = json.dumps({"key": key, **about, **asdict(answer)}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(f"{line}\n")
        self.answers[key] = answer


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a model.

    Attributes:
        template: template of the question.
        values: texts for the template's placeholders.
        parse: function that parses an answer; it returns None if that is impossible.
        sample: number of the question among equal questions.
        attempt: number of previous attempts whose answers could not be parsed.
    """

    template: QuestionTemplate
    values: Mapping[str, str]
    parse: Callable[[str], Any]
    sample: int = 0
    attempt: int = 0


#: Numbers of input and output tokens, or their prices per million; None: unknown.
InAndOut = tuple[float | None, float | None]


def _compute_cost(tokens: InAndOut, prices: InAndOut) -> float | None:
    """Return the cost of tokens; None if a count is unknown, or both prices are."""
    if None in tokens or prices == (None, None):
        return None
    return sum((n or 0) * (price or 0) for n, price in zip(tokens, prices, strict=True)) / 1e6


class QuestionRunner:
    """Asks a server all questions that a journal has no answers to; a context manager.

    Attributes:
        settings: settings of the server and the model.
        new_answers: answers that this object has received.

    Args:
        settings: settings of the server and the model.
        journal: journal of previous answers, to which answers are added.
        seed: random seed of the questions.
        concurrency: number of concurrent requests.
    """

    def __init__(
        self, settings: ChatSettings, journal: Journal, seed: int, concurrency: int
    ) -> None:
        self.settings, self._journal = settings, journal
        self._seed, self._concurrency = seed, concurrency
        self._stack = ExitStack()
        self._connection: tuple[BlockingPortal, ChatClient] | None = None
        self.new_answers: list[Answer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def parsed_answer(self, question: Question) -> Any:
        """Return the parsed answer to a question; None if there is none that can be parsed."""
        return self._look_up(question)[1]

    def missing_questions(self, questions: Iterable[Question]) -> list[Question]:
        """Return the next attempt of each question without an answer that can be parsed."""
        attempts = (self._look_up(question)[0] for question in questions)
        return [question for question in attempts if question is not None]

    def _look_up(self, question: Question) -> tuple[Question | None, Any]:
        """Return the attempt to ask next and None, or None and the parsed answer.

        Both are None if all attempts have failed.
        """
        for attempt in range(ATTEMPTS):
            next_attempt = replace(question, attempt=attempt)
            stored = self._journal.answers.get(self._key(next_attempt))
            if stored is None:
                return next_attempt, None
            value = question.parse(stored.text)
            if value is not None:
                return None, value
        return None, None

    def ask(self, questions: Sequence[Question]) -> None:
        """Ask all missing questions, and store each answer when it arrives.

        If a question then still has no answer that can be parsed, all of its attempts have failed.

        Raises:
            UserError: the ``openai`` client is not installed, the server rejects a request, or it
                cannot be reached.
            LlmcondError: the server fails, after all retries.
        """
        while missing := self.missing_questions(questions):
            portal, client = self._connection or self._connect()
            with ProgressBar("asking") as bar:
                portal.call(self._ask_all, client, missing, bar)

    def _connect(self) -> tuple[BlockingPortal, ChatClient]:
        """Return an event loop, in a thread because notebooks run their own, and a client."""
        try:
            from anyio.from_thread import start_blocking_portal

            from llmcond.workflows.chat import ChatClient
        except ImportError as error:
            raise UserError(
                "rating with a language model needs the openai client: "
                f"{install_command('annotate')}."
            ) from error
        portal = self._stack.enter_context(start_blocking_portal())
        client = ChatClient(self.settings)
        self._stack.callback(portal.call, client.close)
        portal.call(client.check_connection)
        self._connection = portal, client
        return portal, client

    async def _ask_all(
        self, client: ChatClient, questions: Sequence[Question], bar: ProgressBar
    ) -> None:
        """Ask questions concurrently, and store their answers.

        After an error, no further question is asked. Answers that are still under way are stored
        before the error is raised, because they have been paid for.
        """
        remaining, failures, n_before = iter(questions), list[Exception](), len(self.new_answers)

        async def work(count: int | None = None) -> None:
            for question in islice(remaining, count):
                if failures:
                    return
                values = question.values
                # The seed has 31 bits, because some servers store it in a signed integer.
                numbers = map(str, (self._seed, question.sample, question.attempt))
                seed = int(digest_text(*numbers, size=4), 16) >> 1
                try:
                    answer = await client.ask(question.template, values, seed)
                except Exception as error:
                    failures.append(error)
                    return
                about = {
                    "model": self.settings.model,
                    "prompt": question.template.name,
                    "asked": dict(values),
                    "sample": question.sample,
                }
                self._journal.add(self._key(question), answer, about)
                self.new_answers.append(answer)
                bar.on_item(len(self.new_answers) - n_before, len(questions))

        # The first question goes alone, because it decides on the form of the others.
        await work(1)
        await asyncio.gather(*(work() for _ in range(self._concurrency)))
        if failures:
            raise failures[0]

    def check_readable(self, questions: Sequence[Question]) -> None:
        """Check that the answer to at least one question can be parsed.

        Raises:
            UserError: no answer can be parsed.
        """
        if questions and all(self.parsed_answer(question) is None for question in questions):
            answer = self._journal.answers.get(self._key(questions[0]))
            shown = shortened_repr(answer.text if answer else "", 200)
            raise UserError(
                f"no answer of {self.settings.model} to the first {len(questions)} questions can "
                f"be read; the first one is {shown}. Try another --model or --prompt; "
                f"{self._journal.path} has the questions and answers."
            )

    def forecast(
        self, remaining: Sequence[tuple[int, Sequence[Question]]], prices: InAndOut
    ) -> tuple[int, str, float]:
        """Estimate the remaining questions from answered questions of the same kind.

        Args:
            remaining: for each kind, the number of remaining questions, and some answered ones.
            prices: prices of tokens.

        Returns:
            The number of questions; their tokens and cost in words; and the time in seconds, with
            concurrent requests.
        """
        # Input tokens, output tokens and seconds; NaN if the server does not count the tokens.
        totals, n_questions = np.zeros(3), sum(count for count, _ in remaining)
        for count, examples in remaining:
            stored = [self._journal.answers.get(self._key(question)) for question in examples]
            answers = [answer for answer in stored if answer] or [Answer("", None, None, 0.0)]
            rows = [(a.tokens_in, a.tokens_out, a.seconds) for a in answers]
            totals += count * np.mean(np.array(rows, dtype=float), axis=0) if count else 0
        tokens_in, tokens_out, seconds = totals.tolist()
        seconds /= self._concurrency
        if self.settings.per_minute:
            seconds = max(seconds, 60 * n_questions / self.settings.per_minute)
        if np.isnan(tokens_in + tokens_out):
            return n_questions, "number of tokens unknown", seconds
        cost = _compute_cost((tokens_in, tokens_out), prices)
        return (
            n_questions,
            f"about {tokens_in:,.0f} input and {tokens_out:,.0f} output tokens"
            + ("" if cost is None else f", cost about {cost:.3g}"),
            seconds,
        )

    def _key(self, question: Question) -> str:
        """Return a digest of everything that decides an answer."""
        body = json.dumps(dict(self.settings.request), sort_keys=True)
        number = f"{self._seed} {question.sample} {question.attempt}"
        settings = (self.settings.model, body, number, question.template.digest)
        return digest_text(*settings, *question.values.values())


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
    prices = options.price_in, options.price_out
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
    counts = [[answer.tokens_in, answer.tokens_out] for answer in asker.new_answers]
    tokens_in, tokens_out = (
        None if None in column else sum(column) for column in zip(*counts, [0, 0], strict=True)
    )
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
        cost=_compute_cost((tokens_in, tokens_out), prices),
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
