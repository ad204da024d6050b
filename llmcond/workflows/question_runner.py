"""Questions to a language model, with a journal of its answers, a forecast and a budget."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from llmcond.base.errors import (
    LlmcondError,
    UserError,
    format_list,
    install_command,
    shortened_repr,
)
from llmcond.base.files import digest_text, locked
from llmcond.base.output import ProgressBar, format_duration, log
from llmcond.base.records import check_record
from llmcond.options.texts import ServerOptions
from llmcond.prompts.questions import Answer, ChatSettings, Example, QuestionTemplate

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from llmcond.workflows.chat import ChatClient

#: Number of attempts for a question whose answers cannot be parsed, each with another seed.
ATTEMPTS = 3


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
        self._lock = ExitStack()
        self.answers: dict[str, Answer] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as lock:
            lock.enter_context(locked(self.path))
            self._read()
            self._lock = lock.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

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
        examples: answered questions that the model sees first.
        sample: number of the question among equal questions.
        attempt: number of previous attempts whose answers could not be parsed.
    """

    template: QuestionTemplate
    values: Mapping[str, str]
    parse: Callable[[str], Any]
    examples: Sequence[Example] = ()
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
        prices: prices per million input and output tokens.
        budget: the highest cost of new answers; None: no limit.
    """

    def __init__(
        self,
        settings: ChatSettings,
        journal: Journal,
        seed: int,
        concurrency: int,
        *,
        prices: InAndOut = (None, None),
        budget: float | None = None,
    ) -> None:
        self.settings, self._journal = settings, journal
        self._seed, self._concurrency = seed, concurrency
        self._prices, self._budget = prices, budget
        self._stack = ExitStack()
        self._connection: tuple[BlockingPortal, ChatClient] | None = None
        self.new_answers: list[Answer] = []

    @classmethod
    def of(cls, settings: ChatSettings, journal: Journal, options: ServerOptions) -> Self:
        """Return a runner with the options of a command."""
        prices = options.price_in, options.price_out
        limits = options.seed, options.concurrency
        return cls(settings, journal, *limits, prices=prices, budget=options.budget)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def parsed_answer(self, question: Question) -> Any:
        """Return the parsed answer to a question; None if there is none that can be parsed."""
        return self._look_up(question)[1]

    def missing_questions(self, questions: Iterable[Question]) -> list[Question]:
        """Return the next attempt of each question without an answer that can be parsed.

        A repeated question is listed once.
        """
        attempts = (self._look_up(question)[0] for question in questions)
        return list({self._key(question): question for question in attempts if question}.values())

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
            UserError: the ``openai`` client is not installed, the server rejects a request, it
                cannot be reached, or the budget is spent.
            LlmcondError: the server fails, after all retries.
        """
        while missing := self.missing_questions(questions):
            if self._connection is None:
                self._connection = self._stack.enter_context(connect(self.settings))
            portal, client = self._connection
            with ProgressBar("asking") as bar:
                portal.call(self._ask_all, client, missing, bar)

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
                try:
                    self._check_budget()
                except UserError as error:
                    failures.append(error)
                    return
                values = question.values
                # The seed has 31 bits, because some servers store it in a signed integer.
                numbers = map(str, (self._seed, question.sample, question.attempt))
                seed = int(digest_text(*numbers, size=4), 16) >> 1
                try:
                    answer = await client.ask(question.template, values, seed, question.examples)
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

        # One question at a time, until an answer decides on the form of the others.
        n_alone = 0
        while client.is_open and not failures and n_alone < len(questions):
            n_alone += 1
            await work(1)
        await asyncio.gather(*(work() for _ in range(self._concurrency)))
        if failures:
            raise failures[0]

    def ask_first(self, questions: Sequence[Question]) -> list[Question]:
        """Ask the first few questions, for a forecast of the others, and return them.

        They are about different texts, and have an answer or may still get one.

        Raises:
            UserError: as ``ask``, or none of the answers can be parsed.
            LlmcondError: as ``ask``.
        """
        by_text: dict[tuple[str, ...], Question] = {}
        for question in questions:
            if len(by_text) == _N_FIRST:
                break
            if self._look_up(question) != (None, None):
                by_text.setdefault(tuple(question.values.values()), question)
        first = list(by_text.values())
        self.ask(first)
        self._check_readable(first)
        return first

    def _check_readable(self, questions: Sequence[Question]) -> None:
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

    def count_tokens(self) -> tuple[int | None, int | None, float | None]:
        """Return the new answers' input and output tokens, and cost; None where unknown."""
        counts = [[answer.tokens_in, answer.tokens_out] for answer in self.new_answers]
        tokens_in, tokens_out = (
            None if None in column else sum(column) for column in zip(*counts, [0, 0], strict=True)
        )
        return tokens_in, tokens_out, _compute_cost((tokens_in, tokens_out), self._prices)

    def _check_budget(self, forecast: float = 0.0) -> None:
        """Check that the new answers, and those that a forecast is for, are within the budget."""
        budget = self._budget
        if budget is None:
            return
        cost = self.count_tokens()[2]
        if cost is None or np.isnan(forecast):
            raise UserError(
                f"{self.settings.endpoint} does not count tokens, so that --budget cannot be "
                "checked. Leave it out."
            )
        if cost + forecast > budget or (not forecast and cost >= budget):
            spent = f"with about {forecast:.3g} to come " if forecast else ""
            raise UserError(
                f"the cost of {cost:.3g} {spent}reaches --budget {budget:g}. Raise it: the answers "
                "so far are stored, and the same command resumes."
            )

    def confirm(self, remaining: Sequence[tuple[int, Sequence[Question]]], *, yes: bool) -> None:
        """Log a forecast of the remaining questions, and ask the user to agree.

        Args:
            remaining: for each kind, the number of remaining questions, and some answered ones.
            yes: whether the user agreed beforehand.

        Raises:
            UserError: the user does not agree, there are many questions and no terminal, or the
                forecast exceeds the budget.
        """
        n_questions, summary, seconds, cost = self._forecast(remaining)
        if not n_questions:
            return
        log.info(
            f"to ask: {n_questions:,} questions, {summary}, {format_duration(seconds)}; "
            f"{self.settings.model} at {self.settings.endpoint}"
        )
        self._check_budget(cost)
        if not yes:
            _confirm(n_questions)

    def _forecast(
        self, remaining: Sequence[tuple[int, Sequence[Question]]]
    ) -> tuple[int, str, float, float]:
        """Estimate the remaining questions from answered questions of the same kind.

        Returns:
            The number of questions; their tokens and cost in words; the time in seconds, with
            concurrent requests; and the cost, NaN if it is unknown.
        """
        # Input tokens, output tokens and seconds; NaN if the server does not count the tokens.
        totals, n_questions = np.zeros(3), sum(count for count, _ in remaining)
        answered = []
        for _, examples in remaining:
            stored = [self._journal.answers.get(self._key(question)) for question in examples]
            # A rejected question has no tokens, and says nothing about the others.
            answered.append([answer for answer in stored if answer and answer.tokens_in != 0])
        for (count, _), of_kind in zip(remaining, answered, strict=True):
            # Without an answer to this kind of question, those to the others stand for it.
            answers = of_kind or [*chain(*answered)] or [Answer("", None, None, 0.0)]
            rows = [(a.tokens_in, a.tokens_out, a.seconds) for a in answers]
            totals += count * np.mean(np.array(rows, dtype=float), axis=0) if count else 0
        tokens_in, tokens_out, seconds = totals.tolist()
        seconds /= self._concurrency
        if self.settings.per_minute:
            seconds = max(seconds, 60 * n_questions / self.settings.per_minute)
        if np.isnan(tokens_in + tokens_out):
            return n_questions, "number of tokens unknown", seconds, float("nan")
        cost = _compute_cost((tokens_in, tokens_out), self._prices)
        return (
            n_questions,
            f"about {tokens_in:,.0f} input and {tokens_out:,.0f} output tokens"
            + ("" if cost is None else f", cost about {cost:.3g}"),
            seconds,
            float("nan") if cost is None else cost,
        )

    def _key(self, question: Question) -> str:
        """Return a digest of everything that decides an answer."""
        body = json.dumps(dict(self.settings.request), sort_keys=True)
        number = f"{self._seed} {question.sample} {question.attempt}"
        settings = (self.settings.model, body, number, question.template.digest)
        shown = [part for values, reply in question.examples for part in (*values.values(), reply)]
        return digest_text(*settings, *question.values.values(), *shown)


#: Questions of each kind that are asked first, to measure the time and tokens of one.
_N_FIRST = 3
#: The most questions that are asked without the user's consent when there is no terminal.
_MAX_UNCONFIRMED = 100


def _confirm(n_questions: int) -> None:
    """Ask the user to agree; see ``QuestionRunner.confirm``."""
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


def _parse_field(text: str) -> Any:
    """Parse a value as JSON; a text that is not JSON is returned as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError as error:
        raise UserError(f"--request cannot be sent as JSON: {error}. Correct it.") from None


def chat_settings(options: ServerOptions, endpoint: str, flag: str) -> ChatSettings:
    """Return the checked settings of the server that a flag names.

    The server is asked for its models only if the options name none.

    Raises:
        UserError: a setting is invalid, or no model is named and the server has not exactly one.
    """
    fields = {name: _parse_field(text) for name, text in (options.request or {}).items()}
    limits = options.timeout, options.retries, options.per_minute
    settings = ChatSettings(endpoint, options.model or "", fields, *limits, flag=flag)
    settings.check()
    if options.model is not None:
        return settings
    with connect(settings) as (portal, client):
        names = portal.call(client.model_names)
    if len(names) != 1:
        listed = f"has {format_list(names, 5)}" if names else "lists no models"
        raise UserError(f"{endpoint} {listed}. Name the model: --model NAME.")
    log.info(f"model: {names[0]}, the only one at {endpoint}")
    return replace(settings, model=names[0])


@contextmanager
def connect(settings: ChatSettings) -> Iterator[tuple[BlockingPortal, ChatClient]]:
    """Yield an event loop, in a thread because notebooks run their own, and a client.

    Raises:
        UserError: the ``openai`` client is not installed, or no server answers.
    """
    try:
        from anyio.from_thread import start_blocking_portal

        from llmcond.workflows.chat import ChatClient
    except ImportError as error:
        raise UserError(
            f"questions to a language model need the openai client: {install_command('annotate')}."
        ) from error
    with start_blocking_portal() as portal:
        client = ChatClient(settings)
        try:
            portal.call(client.check_connection)
            yield portal, client
        finally:
            portal.call(client.close)
