"""Short answers of a language model about texts under conditions, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from llmcond.base.errors import UserError, format_list
from llmcond.base.output import Displayed, log
from llmcond.base.text import condition_text, without_ignored, wordings
from llmcond.data.answers import COLUMNS, answer_key, read_answers, read_rows, write_rows
from llmcond.data.datasets import read_collection
from llmcond.options.texts import AnswersOptions
from llmcond.prompts.questions import (
    Example,
    example_reply,
    load_template,
    parse_answer,
    parse_presence,
)
from llmcond.workflows.question_runner import Journal, Question, QuestionRunner, chat_settings

#: The most examples of each condition that a question contains.
_MOST_EXAMPLES = 8


@dataclass(frozen=True)
class AnswersResult(Displayed):
    """The result of asking a language model about texts.

    Attributes:
        out: the table that was written.
        model: the name of the language model; None: nothing had to be asked.
        prompt: the name of the template.
        counts: the number of texts with each answer, by condition; the answer is empty for texts
            that do not mention the condition.
        previous: the number of answers that the table had before.
        unanswered: the number of answers that are missing, because none could be read.
        questions: the number of questions that this call put to it; the others had stored answers.
        tokens_in: the input tokens of these questions; None: the server does not report them.
        tokens_out: the output tokens of these questions; None: the server does not report them.
        cost: the cost of these questions at the given prices; None: unknown.

    Examples:
        >>> from pathlib import Path
        >>> import llmcond
        >>> result = llmcond.AnswersResult(
        ...     out=Path("answers.csv"), model="my-model", prompt="answer",
        ...     counts={"the place": {"Paris": 2, "": 1}}, previous=0, unanswered=0, questions=3,
        ...     tokens_in=300, tokens_out=30, cost=None,
        ... )
        >>> result.rows()[0]
        {'condition': 'the place', 'answer': 'Paris', 'texts': 2}
    """

    out: Path
    model: str | None
    prompt: str
    counts: Mapping[str, Mapping[str, int]]
    previous: int
    unanswered: int
    questions: int
    tokens_in: int | None
    tokens_out: int | None
    cost: float | None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each condition and answer, with the number of texts."""
        return [
            {"condition": condition, "answer": answer, "texts": n}
            for condition, counts in self.counts.items()
            for answer, n in counts.items()
        ]

    @override
    def _displayed(self) -> Mapping[str, Any]:
        return self.to_json() | {"counts": self.rows()}


def answers(options: AnswersOptions) -> AnswersResult:
    """Add the missing answers to a table of short answers, one for each text and condition.

    Answers of the model are stored next to the table as they arrive, in ``NAME.answers`` with one
    JSON object per line. The same call continues from there if it was stopped.

    Raises:
        UserError: the options, the texts, the examples, the table or the template are invalid, the
            server rejects the request, the budget is spent, or the user does not agree to the
            forecast.
        LlmcondError: the server fails.
    """
    conditions, out = options.conditions(), Path(options.out)
    templates = {
        "presence": load_template("presence", "presence"),
        "answer": load_template(options.prompt, "answer"),
    }
    examples = _read_examples(options, conditions)
    texts = read_collection(options.texts, options.text, read=options.read_options()).texts
    known = {answer_key(row["text"], row["condition"]) for row in read_rows(out)}
    pairs = {answer_key(t, c): (t, c) for c in conditions for t in texts}
    missing = {key: pair for key, pair in pairs.items() if key not in known}
    previous = len(pairs) - len(missing)
    if previous:
        log.info(
            f"{previous:,} of {len(pairs):,} answers are in {out} already, and stay as they are. "
            "To ask again, name another --out"
        )
    model, n_questions, unanswered = None, 0, 0
    counts: tuple[int | None, int | None, float | None] = 0, 0, None
    if missing:
        settings = chat_settings(options, options.server, "--server")
        model = settings.model

        def make_questions(kind: Literal["presence", "answer"]) -> list[Question]:
            parse = parse_presence if kind == "presence" else parse_answer
            shown = {c: _make_examples(kind, c, examples) for c in conditions}
            return [
                Question(templates[kind], _values(text, c), parse, shown[c])
                for text, c in missing.values()
            ]

        with (
            Journal(out.with_suffix(".answers")) as journal,
            QuestionRunner.of(settings, journal, options) as asker,
        ):
            presence = make_questions("presence") if options.presence else []
            values = make_questions("answer")
            first = [asker.ask_first(questions) for questions in (presence, values)]
            remaining = [len(asker.missing_questions(part)) for part in (presence, values)]
            asker.confirm(list(zip(remaining, first, strict=True)), yes=options.yes)
            asker.ask(presence)
            mentioned = [asker.parsed_answer(one) for one in presence] or [True] * len(values)
            asker.ask([value for value, yes in zip(values, mentioned, strict=True) if yes])
            rows = read_rows(out)  # It may have been edited meanwhile.
            known = {answer_key(row["text"], row["condition"]) for row in rows}
            cells = zip(missing.items(), values, mentioned, strict=True)
            for (key, (text, condition)), question, yes in cells:
                answer = asker.parsed_answer(question) if yes else "" if yes is False else None
                if answer is None:
                    unanswered += 1
                elif key not in known:
                    name = templates["answer"].name
                    written = text, condition_text(condition), answer, model, name
                    rows.append(dict(zip((*COLUMNS, "model", "prompt"), written, strict=True)))
            write_rows(out, rows)
        counts, n_questions = asker.count_tokens(), len(asker.new_answers)
    table = read_answers(out)
    by_condition = {
        condition_text(c): Counter(
            table.answers[key]
            for key, (_, named) in pairs.items()
            if named == c and key in table.answers
        )
        for c in conditions
    }
    empty = sum(counter[""] for counter in by_condition.values())
    log.info(f"{len(pairs) - unanswered:,} answers, {empty:,} of them not mentioned -> {out}")
    if unanswered:
        log.warning(
            f"{unanswered:,} answers are missing, because none of those in {journal.path} can be "
            "used. To ask again, give another --seed, or add the rows"
        )
    return AnswersResult(
        out,
        model,
        templates["answer"].name,
        {name: dict(counter.most_common()) for name, counter in by_condition.items()},
        previous,
        unanswered,
        n_questions,
        *counts,
    )


def _values(text: str, condition: str) -> dict[str, str]:
    """Return the texts of a question's placeholders; several wordings are joined by "or"."""
    return {"text": text, "condition": " or ".join(wordings(without_ignored(condition)))}


def _make_examples(
    kind: Literal["presence", "answer"], condition: str, answers: Mapping[tuple[str, str], str]
) -> Sequence[Example]:
    """Return the first examples of a condition; those without an answer show no value."""
    return [
        (_values(text, condition), example_reply(kind, answer))
        for (text, named), answer in answers.items()
        if named == answer_key("", condition)[1] and (answer or kind == "presence")
    ][:_MOST_EXAMPLES]


def _read_examples(
    options: AnswersOptions, conditions: Sequence[str]
) -> Mapping[tuple[str, str], str]:
    """Return the answers of the table of examples.

    Raises:
        UserError: the table cannot be read, or has no example of any condition.
    """
    if options.examples is None:
        return {}
    table = read_answers(options.examples, strip_html=options.strip_html)
    named = {condition for _, condition in table.answers}
    without = [c for c in map(condition_text, conditions) if answer_key("", c)[1] not in named]
    if len(without) == len(conditions):
        raise UserError(
            f"{table.source} has no example of {format_list(without, 3)}. Name one of these in its "
            "column condition."
        )
    if without:
        log.info(f"{table.source} has no example of {format_list(without, 3)}")
    return table.answers
