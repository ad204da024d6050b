"""Questions and their answers: those that are stored already are not asked again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from llmcond.annotation.journal import Journal
from llmcond.annotation.server import Answer, Server, ServerSettings, ask_all
from llmcond.annotation.template import Template
from llmcond.errors import UserError, brief
from llmcond.files import digest_text
from llmcond.progress import CountBar

#: How often a question is asked whose answers cannot be read, each time with another seed.
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a model: a template with texts put in.

    Attributes:
        read: from an answer to what it says; None if it cannot be read.
        sample: its number among questions that are the same.
        attempt: how often it was asked before without an answer that can be read.
    """

    template: Template
    values: Mapping[str, str]
    read: Callable[[str], Any]
    sample: int = 0
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is left to ask, by the mean of what was answered.

    Attributes:
        questions: how many.
        tokens_in, tokens_out: None where the server does not count them.
        cost: in the unit of the prices; None without prices or counts.
        seconds: with as many questions at once as are asked.
    """

    questions: int
    tokens_in: int | None
    tokens_out: int | None
    cost: float | None
    seconds: float

    @property
    def text(self) -> str:
        """Return it for people, without the time."""
        if self.tokens_in is None or self.tokens_out is None:
            told = "tokens unknown"
        else:
            told = f"about {self.tokens_in:,} tokens in and {self.tokens_out:,} out"
        cost = "" if self.cost is None else f", cost about {self.cost:.3g}"
        return f"{self.questions:,} questions, {told}{cost}"


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens each, in any currency; None: unknown."""

    tokens_in: float | None = None
    tokens_out: float | None = None

    def cost(self, tokens_in: float | None, tokens_out: float | None) -> float | None:
        """Return what so many tokens cost; None where a price or a count is unknown."""
        if tokens_in is None or tokens_out is None:
            return None
        if self.tokens_in is None and self.tokens_out is None:
            return None
        return (tokens_in * (self.tokens_in or 0) + tokens_out * (self.tokens_out or 0)) / 1e6


class Asker:
    """Asks a server what a journal does not hold.

    Attributes:
        settings: which model is asked, and how.
        asked: answers that were got since it was made.
    """

    def __init__(
        self, settings: ServerSettings, journal: Journal, seed: int, concurrency: int
    ) -> None:
        self.settings, self._journal = settings, journal
        self._seed, self._concurrency = seed, concurrency
        self._server: Server | None = None
        self.asked: list[Answer] = []

    def value(self, question: Question) -> Any:
        """Return what the answer to a question says; None: not answered, or it cannot be read."""
        return self._look_up(question)[1]

    def missing(self, questions: Iterable[Question]) -> list[Question]:
        """Return what is to be asked next of questions that have no answer that can be read."""
        tried = (self._look_up(question)[0] for question in questions)
        return [question for question in tried if question is not None]

    def _look_up(self, question: Question) -> tuple[Question | None, Any]:
        """Return the attempt to ask next, or else what the stored answer says.

        Both are None where all attempts have failed.
        """
        for attempt in range(ATTEMPTS):
            tried = replace(question, attempt=attempt)
            stored = self._journal.get(self._key(tried))
            if stored is None:
                return tried, None
            value = question.read(stored.text)
            if value is not None:
                return None, value
        return None, None

    def ask(self, questions: Sequence[Question]) -> None:
        """Ask what is missing, and store each answer as it comes.

        What is then still without an answer that can be read has none in all attempts.

        Raises:
            UserError: the server refuses, or cannot be reached.
            LlmcondError: it fails, after all retries.
        """
        while missing := self.missing(questions):
            if self._server is None:
                self._server = Server(self.settings)
                self._server.reach()
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
                    self.asked.append(answer)
                    bar.on_item(number, len(missing))

    def check_readable(self, questions: Sequence[Question]) -> None:
        """Raise a UserError if no answer to questions that were asked can be read."""
        if questions and all(self.value(question) is None for question in questions):
            said = self._journal.get(self._key(questions[0]))
            shown = brief(said.text if said else "", 200)
            raise UserError(
                f"no answer of {self.settings.model} to the first {len(questions)} questions can "
                f"be read; the first one is {shown}. Try another --model or --prompt; what was "
                f"asked and said is in {self._journal.path}."
            )

    def forecast(self, left: Sequence[tuple[int, Sequence[Question]]], prices: Prices) -> Forecast:
        """Return what so many questions will take, by what some alike took, for each kind."""
        tokens: list[float | None] = [0.0, 0.0]
        seconds, total = 0.0, 0
        for count, alike in left:
            stored = [self._journal.get(self._key(question)) for question in alike]
            known = [answer for answer in stored if answer is not None]
            if not count:
                continue
            total += count
            seconds += count * sum(answer.seconds for answer in known) / max(1, len(known))
            for i, name in enumerate(("tokens_in", "tokens_out")):
                counted, before = [getattr(answer, name) for answer in known], tokens[i]
                if before is None or not counted or None in counted:
                    tokens[i] = None
                else:
                    tokens[i] = before + count * sum(counted) / len(counted)
        seconds /= self._concurrency
        if self.settings.per_minute:
            seconds = max(seconds, 60 * total / self.settings.per_minute)
        rounded = [None if one is None else round(one) for one in tokens]
        return Forecast(total, rounded[0], rounded[1], prices.cost(*tokens), seconds)

    def _ask(self, server: Server, question: Question) -> Answer:
        number = digest_text(str(self._seed), str(question.sample), str(question.attempt), size=4)
        # 31 bits, as some servers hold it in a signed integer.
        return server.ask(question.template, question.values, int(number, 16) >> 1)

    def _key(self, question: Question) -> str:
        """Identify all that decides an answer."""
        body = json.dumps(dict(self.settings.request), sort_keys=True)
        number = f"{self._seed} {question.sample} {question.attempt}"
        own = (self.settings.model, body, number, question.template.digest)
        return digest_text(*own, *question.values.values())
