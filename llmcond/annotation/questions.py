"""Questions to a language model, whose stored answers are not requested again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from filelock import FileLock, Timeout

from llmcond.annotation.server import Answer, ChatClient, ChatSettings, ask_all
from llmcond.annotation.template import Proposal, QuestionTemplate
from llmcond.data.rows import Rows
from llmcond.errors import LlmcondError, UserError, shortened_repr
from llmcond.files import digest_text
from llmcond.progress import CountBar
from llmcond.records import RECORD, check_record

#: Number of candidates for the second sentence in each question.
N_CANDIDATES = 8
#: Number of rows per proposal: one condition of high similarity and one of low similarity.
_ROWS = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """A text, and candidates for the second sentence of its pair.

    Attributes:
        text: the text, which becomes the first sentence.
        candidates: the candidates.
    """

    text: str
    candidates: tuple[str, ...]

    @property
    def values(self) -> dict[str, str]:
        """Values of the template's placeholders."""
        numbered = (f"{number}. {text}" for number, text in enumerate(self.candidates, 1))
        return {"sentence": self.text, "others": "\n".join(numbered)}


def build_offers(texts: Sequence[str], rows: int, seed: int) -> list[Offer]:
    """Return enough offers for ``rows`` rows: each text with the texts most similar to it.

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
        result.append(Offer(texts[order[position]], tuple(candidates)))
    return result


def proposed_rows(offers: Sequence[Offer], proposals: Sequence[Proposal | None]) -> Rows:
    """Return the distinct proposed rows, without ratings.

    Args:
        offers: the offers.
        proposals: the proposal for each offer; None if its answer cannot be parsed.
    """
    unique_rows: dict[tuple[str, str, str], None] = {}
    for offer, proposal in zip(offers, proposals, strict=True):
        if proposal is None or proposal.partner is None:
            continue
        for condition in proposal.conditions:
            unique_rows[offer.text, offer.candidates[proposal.partner], condition] = None
    n = len(unique_rows)
    first, second, conditions = ([row[i] for row in unique_rows] for i in range(3))
    return Rows(first, second, conditions, np.full(n, np.nan), np.arange(1, n + 1), "proposed rows")


@dataclass(frozen=True, slots=True)
class JournalLine(Answer):
    """The required keys of each line."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    key: str


class Journal:
    """The file of answers, as a context manager that locks it; the file is created when needed.

    Raises:
        UserError: another process writes the file, or it cannot be written.
        LlmcondError: a line of the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
        self._answers: dict[str, Answer] = {}

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
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise LlmcondError(f"{source} was damaged. Remove the line.") from error
            if not isinstance(values, dict):
                raise LlmcondError(
                    f"{source} was damaged: it is not a JSON object. Remove the line."
                )
            check_record(values, JournalLine, source, "Remove the line.")
            tokens = values["tokens_in"], values["tokens_out"]
            self._answers[values["key"]] = Answer(values["text"], *tokens, values["seconds"])
        if complete < len(text):  # A process was killed while it wrote the last line.
            os.truncate(self.path, complete)

    def get(self, key: str) -> Answer | None:
        """Return the answer of a key; None if the question has not been answered yet."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer, about: Mapping[str, Any]) -> None:
        """Store an answer, with information about its question for readers of the file."""
        line = json.dumps({"key": key, **about, **asdict(answer)}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.write(f"{line}\n")
        self._answers[key] = answer


#: Number of attempts for a question whose answers cannot be parsed, each with another seed.
ATTEMPTS = 3


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


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast of remaining questions, estimated from the mean of previous answers.

    Attributes:
        questions: number of remaining questions.
        tokens_in, tokens_out: numbers of tokens; None if the server does not count them.
        cost: cost in the unit of the prices; None without prices or counts.
        seconds: time in seconds, with concurrent requests.
    """

    questions: int
    tokens_in: int | None
    tokens_out: int | None
    cost: float | None
    seconds: float

    @property
    def summary(self) -> str:
        """Summary for the user, without the time."""
        if self.tokens_in is None or self.tokens_out is None:
            tokens = "number of tokens unknown"
        else:
            tokens = f"about {self.tokens_in:,} input and {self.tokens_out:,} output tokens"
        cost = "" if self.cost is None else f", cost about {self.cost:.3g}"
        return f"{self.questions:,} questions, {tokens}{cost}"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per million input and output tokens, in any currency; None if they are unknown."""

    tokens_in: float | None = None
    tokens_out: float | None = None

    def cost(self, tokens_in: float | None, tokens_out: float | None) -> float | None:
        """Return the cost of tokens; None if a count is unknown, or both prices are."""
        if tokens_in is None or tokens_out is None:
            return None
        if self.tokens_in is None and self.tokens_out is None:
            return None
        return (tokens_in * (self.tokens_in or 0) + tokens_out * (self.tokens_out or 0)) / 1e6


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
        self._server: ChatClient | None = None
        self.new_answers: list[Answer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

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
            stored = self._journal.get(self._key(next_attempt))
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
            UserError: the server rejects a request, or cannot be reached.
            LlmcondError: the server fails, after all retries.
        """
        while missing := self.missing_questions(questions):
            if self._server is None:
                self._server = ChatClient(self.settings)
                self._server.check_connection()
            ask = partial(self._ask, self._server)
            with CountBar("asking") as bar:
                answered = ask_all(ask, missing, min(self._concurrency, len(missing)))
                for number, (question, answer) in enumerate(answered, 1):
                    about = {
                        "model": self.settings.model,
                        "prompt": question.template.name,
                        "asked": dict(question.values),
                        "sample": question.sample,
                    }
                    self._journal.add(self._key(question), answer, about)
                    self.new_answers.append(answer)
                    bar.on_item(number, len(missing))

    def check_readable(self, questions: Sequence[Question]) -> None:
        """Check that the answer to at least one question can be parsed.

        Raises:
            UserError: no answer can be parsed.
        """
        if questions and all(self.parsed_answer(question) is None for question in questions):
            answer = self._journal.get(self._key(questions[0]))
            shown = shortened_repr(answer.text if answer else "", 200)
            raise UserError(
                f"no answer of {self.settings.model} to the first {len(questions)} questions can "
                f"be read; the first one is {shown}. Try another --model or --prompt; "
                f"{self._journal.path} has the questions and answers."
            )

    def forecast(
        self, remaining: Sequence[tuple[int, Sequence[Question]]], prices: Prices
    ) -> Forecast:
        """Estimate the remaining questions from answered questions of the same kind.

        Args:
            remaining: for each kind, the number of remaining questions, and some answered ones.
            prices: prices of tokens.
        """
        tokens: list[float | None] = [0.0, 0.0]
        seconds, total = 0.0, 0
        for count, examples in remaining:
            stored = [self._journal.get(self._key(question)) for question in examples]
            answers = [answer for answer in stored if answer is not None]
            if not count:
                continue
            total += count
            seconds += count * sum(answer.seconds for answer in answers) / max(1, len(answers))
            for i, name in enumerate(("tokens_in", "tokens_out")):
                counts, subtotal = [getattr(answer, name) for answer in answers], tokens[i]
                if subtotal is None or not counts or None in counts:
                    tokens[i] = None
                else:
                    tokens[i] = subtotal + count * sum(counts) / len(counts)
        seconds /= self._concurrency
        if self.settings.per_minute:
            seconds = max(seconds, 60 * total / self.settings.per_minute)
        rounded = [None if n_tokens is None else round(n_tokens) for n_tokens in tokens]
        return Forecast(total, rounded[0], rounded[1], prices.cost(*tokens), seconds)

    def _ask(self, server: ChatClient, question: Question) -> Answer:
        number = digest_text(str(self._seed), str(question.sample), str(question.attempt), size=4)
        # The seed has 31 bits, because some servers store it in a signed integer.
        return server.ask(question.template, question.values, int(number, 16) >> 1)

    def _key(self, question: Question) -> str:
        """Return a digest of everything that decides an answer."""
        body = json.dumps(dict(self.settings.request), sort_keys=True)
        number = f"{self._seed} {question.sample} {question.attempt}"
        settings = (self.settings.model, body, number, question.template.digest)
        return digest_text(*settings, *question.values.values())
