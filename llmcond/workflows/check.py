"""Checking conditions: which of them are alike, and how well similarities agree with answers."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.errors import (
    UserError,
    escape_control_characters,
    format_count,
    format_list,
    shortened_repr,
)
from llmcond.base.files import as_json, locked, write_csv
from llmcond.base.metrics import Estimate
from llmcond.base.output import Displayed, line_width, log
from llmcond.base.text import (
    condition_json,
    condition_text,
    condition_titles,
    ignored_by,
    shorten,
    without_ignored,
    wordings,
)
from llmcond.data.datasets import (
    Collection,
    label_text,
    open_collection,
    read_collection,
    read_rows,
)
from llmcond.data.readers import read_records
from llmcond.evaluation.analyses import LEAST_TEXTS, sample_texts
from llmcond.evaluation.pair_answers import (
    AnswerScores,
    order_pairs,
    pair_positions,
    rank_pairs,
    score_answers,
    score_labels,
)
from llmcond.options.texts import CheckConditionOptions
from llmcond.prompts.questions import ChatSettings, load_template, parse_rating
from llmcond.runs.embedder import ALIKE, EmbeddingModel, share_of_neighbours
from llmcond.runs.similarity import Vectors, report_foreign_texts

#: The labels of pairs that are the same and different, and of skipped ones, as ``extract`` reads
#: them.
_SAME, _DIFFERENT, _SKIPPED = "5", "1", "-1"
_COLUMNS = "sentence1", "sentence2", "condition", "label"
#: The number of example pairs, and the smallest rank of a pair that is near.
_EXAMPLES, _NEAR = 3, 0.98
#: The name of the ranking without a condition.
PLAIN = "no condition"

#: A function of two texts and a condition; None: the pair is skipped.
Ask = Callable[[str, str, str], bool | None]


@dataclass(frozen=True, slots=True)
class RankingScores:
    """How well one way to compare texts agrees with the answers.

    Attributes:
        name: a wording of the condition, all its wordings, what is ignored, or ``no condition``.
        scores: the AUC and the accuracy, with their intervals.
    """

    name: str
    scores: AnswerScores

    def to_json(self) -> dict[str, Any]:
        """Return the figures as fractions."""
        figures = {
            key: {
                name: round(value, 4) for name, value in as_json(getattr(self.scores, key)).items()
            }
            for key in ("auc", "accuracy")
        }
        return {"name": self.name, **figures, "is_behind": self.scores.is_behind}


@dataclass(frozen=True, slots=True)
class ConditionCheck:
    """The check of a condition on texts.

    Attributes:
        condition: the condition.
        n_texts: the number of distinct texts that were used.
        common: the share of the nearest texts that are the same under each other condition, and
            under ``no condition``; empty if there were too few texts.
        examples: pairs of texts that are near under the condition, and as far as possible without.
        same: the number of pairs whose answer is "the same"; of labels, all pairs.
        different: the number of pairs whose answer is "different".
        skipped: the number of pairs that were shown and not answered.
        rankings: the agreement of each way to compare the texts; empty without both answers.
    """

    condition: str
    n_texts: int
    common: Mapping[str, float]
    examples: Sequence[tuple[str, str]]
    same: int = 0
    different: int = 0
    skipped: int = 0
    rankings: Sequence[RankingScores] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output."""
        return {
            **condition_json(self.condition),
            "texts": self.n_texts,
            "common_neighbours": {name: round(share, 4) for name, share in self.common.items()},
            "examples": [list(pair) for pair in self.examples],
            "same": self.same,
            "different": self.different,
            "skipped": self.skipped,
            "rankings": [ranking.to_json() for ranking in self.rankings],
        }


@dataclass(frozen=True)
class ConditionChecks(Displayed):
    """Checks of conditions on some texts.

    Attributes:
        file: the file of the texts, or ``rows in memory``.
        texts: the number of texts.
        encoder: the name of the encoder.
        prompt: the name of the prompt.
        head: the name of the head.
        seed: the random seed that sampled the texts and pairs.
        out: the file of the answers, if any.
        checks: one check for each condition.

    Examples:
        >>> import llmcond
        >>> texts = ["A red car.", "A blue bicycle.", "Two dogs run.", "A cat sleeps."]
        >>> result = llmcond.check_condition(texts=texts, condition=["the colour"])
        >>> result.texts, [check.condition for check in result.checks]
        (4, ['the colour'])
    """

    file: str
    texts: int
    encoder: str
    prompt: str
    head: str
    seed: int
    out: Path | None
    checks: Sequence[ConditionCheck]

    def titles(self) -> list[str]:
        """Return a distinct title for each condition."""
        return condition_titles([check.condition for check in self.checks])

    def neighbour_rows(self) -> list[dict[str, Any]]:
        """Return the common neighbours of each condition, in percent."""
        titles = self.titles()
        return [
            {"condition": title}
            | {
                f"as under {name}": round(100 * check.common[name])
                if name in check.common
                else None
                for name in [*titles, PLAIN]
                if len(titles) > 1 or name == PLAIN
            }
            for title, check in zip(titles, self.checks, strict=True)
            if check.common
        ]

    def example_rows(self) -> list[dict[str, Any]]:
        """Return the examples of each condition."""
        return [
            {"condition": title, "text": shorten(first, 60), "is near to": shorten(second, 60)}
            for title, check in zip(self.titles(), self.checks, strict=True)
            for first, second in check.examples
        ]

    def ranking_rows(self) -> list[dict[str, Any]]:
        """Return the figures of each way to compare the texts, in percent."""
        return [
            {
                "condition": title,
                "texts compared by": ranking.name,
                "AUC": _percent(ranking.scores.auc),
                "accuracy": _percent(ranking.scores.accuracy),
            }
            for title, check in zip(self.titles(), self.checks, strict=True)
            for ranking in check.rankings
        ]

    @override
    def _displayed(self) -> Mapping[str, Any]:
        facts = {name: getattr(self, name) for name in ("file", "texts", "encoder", "head")}
        scores = {"scores": self.ranking_rows()} if self.ranking_rows() else {}
        return {**facts, "checks": self.neighbour_rows(), **scores}


def _percent(figure: Estimate) -> str:
    """Format a fraction with its interval: ``83 [71, 92]``."""
    value, low, high = (f"{100 * part:.0f}" for part in astuple(figure))
    return f"{value} [{low}, {high}]"


def check_condition(options: CheckConditionOptions) -> ConditionChecks:
    """Say which conditions are alike, and measure each by answers about pairs of texts.

    Raises:
        UserError: the texts, a column, a condition, an answer or the file of answers are invalid,
            there are too few texts, there is no terminal to ask in, or the server rejects a
            request.
        LlmcondError: the encoder or the server fails.
    """
    run_folder, conditions = options.resolve_folder(), options.conditions()
    has_questions = options.ask is not False or options.judge is not None
    if options.ask is True and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(
            "--ask asks in a terminal, and this is none. Use --judge or --labels, or pass a "
            "function as ask= in Python."
        )
    labels = _label_columns(options.labels, conditions)
    columns = list(dict.fromkeys([*options.ignore_column, *labels.values()]))
    collection = read_collection(options.texts, options.text, columns, read=options.read_options())
    rows = _sample_rows(collection, [*labels.values()], options.seed)
    texts = [collection.texts[row] for row in rows]
    if (has_questions or labels) and len(texts) < LEAST_TEXTS:
        raise UserError(
            f"{collection.file} has {format_count(len(texts), 'distinct text')}"
            f"{' with a label' if labels else ''}; at least {LEAST_TEXTS} are needed. Give more."
        )
    # An unsuitable file, or a missing package or server, is reported before texts are encoded.
    n_answers = 0 if options.out is None else len(_PairAnswers(Path(options.out)))
    if options.judge is not None and n_answers < options.pairs * len(conditions):
        from llmcond.workflows.question_runner import connect

        with connect(_judge_server(options)):
            pass
    model = EmbeddingModel.find(run_folder, options.head, options.prompt, device=options.device)
    report_foreign_texts(collection.texts, model.encoder.resolved.checkpoint)
    rankings = _embed_all(model, conditions, texts, collection, options)
    checks = _compare_neighbours(conditions, texts, rankings)
    if labels:
        checks = [
            _score_labels(
                check, ranking, [collection.columns[labels[condition]][row] for row in rows]
            )
            for check, ranking, condition in zip(checks, rankings, conditions, strict=True)
        ]
    elif has_questions:
        checks = _score_answers(checks, rankings, texts, options)
    return ConditionChecks(
        file=collection.file,
        texts=len(collection.texts),
        encoder=model.encoder.name,
        prompt=model.view.name,
        head=model.head.reference,
        seed=options.seed,
        out=None if options.out is None else Path(options.out),
        checks=checks,
    )


def _label_columns(columns: Sequence[str], conditions: Sequence[str]) -> dict[str, str]:
    """Return the column of labels of each condition; empty without columns."""
    if columns and len(columns) not in (1, len(conditions)):
        raise UserError(
            f"--labels names {len(columns)} columns for "
            f"{format_count(len(conditions), 'condition')}. Name one column, or one for each "
            "--condition."
        )
    several = columns if len(columns) == len(conditions) else list(columns) * len(conditions)
    return dict(zip(conditions, several, strict=True)) if columns else {}


def _sample_rows(collection: Collection, columns: Sequence[str], seed: int) -> list[int]:
    """Sample distinct texts, of those with a label in each column."""
    for column in columns:
        known = {label_text(cell) for cell in collection.columns[column]} - {""}
        if len(known) < 2:
            raise UserError(
                f"the column {column!r} of {collection.file} has "
                f"{format_count(len(known), 'label')}; at least 2 are needed. Name another one."
            )
    rows = [
        row
        for row in range(len(collection.texts))
        if all(label_text(collection.columns[column][row]) for column in columns)
    ]
    return [rows[i] for i in sample_texts([collection.texts[row] for row in rows], seed)]


#: The names of ways to compare texts, with the vectors. The first one is the first wording of the
#: condition, and the last one has no condition.
_Rankings = Sequence[tuple[str, Vectors]]


def _embed_all(
    model: EmbeddingModel,
    conditions: Sequence[str],
    texts: Sequence[str],
    collection: Collection,
    options: CheckConditionOptions,
) -> Sequence[_Rankings]:
    """Embed texts in each way that is compared: by wordings, ignoring others, and plainly."""

    def embed(condition: str) -> Vectors:
        return model.embed([(text, condition) for text in texts], collection.file)

    rankings: list[list[tuple[str, Vectors]]] = []
    for condition in conditions:
        single = wordings(condition)
        rankings.append([(str(wording), embed(wording)) for wording in single])
        if len(single) > 1:
            rankings[-1].append(("all wordings", embed(without_ignored(condition))))
    # The columns that are ignored also change conditions without a mark, so they come last.
    model.fit_ignored(collection, conditions, options.ignore_column, options.ignore_directions)
    plain = model.embed_with_base(texts)[1]
    for condition, ranking in zip(conditions, rankings, strict=True):
        ignored = [*ignored_by(condition), *options.ignore_column]
        if ignored:
            ranking.append((f"ignoring {', '.join(ignored)}", embed(condition)))
        ranking.append((PLAIN, plain))
    return rankings


def _compare_neighbours(
    conditions: Sequence[str], texts: Sequence[str], rankings: Sequence[_Rankings]
) -> list[ConditionCheck]:
    """Compare the nearest texts under each condition with those under the others, and without."""
    checks = []
    used = [ranking[-2][1] for ranking in rankings]
    plain = rankings[0][-1][1]
    named = dict(zip(condition_titles(conditions), used, strict=True)) | {PLAIN: plain}
    for condition, vectors in zip(conditions, used, strict=True):
        if len(texts) < LEAST_TEXTS:
            checks.append(ConditionCheck(condition, len(texts), {}, []))
            continue
        shares = {
            title: share_of_neighbours(vectors, other, count_nearest(len(texts)))
            for title, other in named.items()
            if other is not vectors
        }
        examples = _find_examples(texts, rank_pairs(vectors), rank_pairs(plain))
        checks.append(ConditionCheck(condition, len(texts), shares, examples))
    return checks


def count_nearest(n: int) -> int:
    """Return how many of n texts count as the nearest ones: a tenth, and at most ten.

    Of few texts, most of ten would be the same by chance.
    """
    return min(n // 10, 10)


def _find_examples(
    texts: Sequence[str], under: NDArray[np.float64], without: NDArray[np.float64]
) -> list[tuple[str, str]]:
    """Return pairs of texts that are near by one ranking and far by another, each text once."""
    first, second = pair_positions(len(texts))
    near = np.flatnonzero(under > _NEAR)
    examples, used = list[tuple[str, str]](), set[int]()
    for pair in near[np.argsort(without[near], kind="stable")]:
        both = {int(first[pair]), int(second[pair])}
        if not used & both and len(examples) < _EXAMPLES:
            used |= both
            examples.append((texts[first[pair]], texts[second[pair]]))
    return examples


def report_alike(conditions: Sequence[str], vectors: Sequence[Vectors]) -> None:
    """Log a sentence for each two conditions under which the nearest texts are the same.

    Args:
        conditions: the conditions.
        vectors: (n, d) vectors of the same texts under each condition.
    """
    if len(vectors) < 2 or len(vectors[0]) < LEAST_TEXTS:
        return
    for (first, x), (second, y) in combinations(
        zip(condition_titles(conditions), vectors, strict=True), 2
    ):
        share = share_of_neighbours(x, y, count_nearest(len(x)))
        if share > ALIKE:
            log.info(alike_sentence(first, second, share))


def alike_sentence(condition: str, other: str, share: float) -> str:
    """Say that a condition has nearly the same neighbours as another one, or as no condition."""
    if other == PLAIN:
        return (
            f"{condition!r} changes little in these texts: {share:.0%} of the nearest texts are "
            "the same without a condition"
        )
    return (
        f"{condition!r} and {other!r} are alike in these texts: {share:.0%} of the nearest texts "
        "are the same"
    )


def summarise(result: ConditionChecks) -> list[str]:
    """Return the result in sentences: alike conditions, examples, and the best way to compare."""
    sentences, titles = list[str](), result.titles()
    for number, (title, check) in enumerate(zip(titles, result.checks, strict=True)):
        if not check.common:
            sentences.append(
                f"{title}: {check.n_texts} distinct texts are too few to compare their neighbours; "
                f"give at least {LEAST_TEXTS}."
            )
        sentences += [
            f"{alike_sentence(title, other, share)}."
            for other, share in check.common.items()
            if share > ALIKE and other not in titles[:number]
        ]
        sentences += _describe_scores(title, check)
    if not any(check.same or check.different for check in result.checks):
        sentences.append(
            "Whether a condition works cannot be seen from this: answer pairs (--ask), let a "
            "language model answer them (--judge), or name a column of labels (--labels)."
        )
    return sentences


def _describe_scores(title: str, check: ConditionCheck) -> list[str]:
    """Return a sentence on the answers, and one on the best way to compare."""
    n = check.same + check.different
    if not n + check.skipped:
        return []
    counts = f"{title}: {format_count(n, 'pair')}, {check.same:,} of them the same"
    if check.skipped:
        counts += f", and {check.skipped} skipped"
    if not check.rankings:
        return [f"{counts}; figures need pairs that are the same, and pairs that are not."]
    best = max(check.rankings, key=lambda ranking: ranking.scores.auc.value)
    tied = [one.name for one in check.rankings if not one.scores.is_behind and one is not best]
    doubt = f", but is not clearly above {format_list(tied, 5)}" if tied else ""
    return [f"{counts}. {best.name!r} has the highest AUC{doubt}."]


# -- answers -----------------------------------------------------------------------------------


class _PairAnswers:
    """Answers about pairs under conditions, which are written to a file after each one.

    Args:
        path: the file; None: the answers are in memory only.

    Raises:
        UserError: the file is not a table of answers, or has columns or labels that writing it
            would lose.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._answers: dict[tuple[str, str, str], bool | None] = {}
        if path is not None and path.is_file():
            rows, _ = read_rows(path)
            source = open_collection(path)
            columns = next(read_records(source, source.files[0], None))
            is_known = np.isnan(rows.rating) | np.isin(rows.rating, (0, 1))
            if set(columns) != set(_COLUMNS) or not is_known.all():
                raise UserError(
                    f"{path} has other columns or labels than answers of check-condition "
                    f"({', '.join(_COLUMNS)}; {_SAME}, {_DIFFERENT} and {_SKIPPED}), which would "
                    "be lost. Name another --out."
                )
            for first, second, condition, rating in zip(
                rows.sentence1, rows.sentence2, rows.condition, rows.rating, strict=True
            ):
                answer = None if np.isnan(rating) else bool(rating > 0.5)
                self._answers[first, second, condition] = answer

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, question: tuple[str, str, str]) -> bool:
        return self._key(question) in self._answers

    def get(self, question: tuple[str, str, str]) -> bool | None:
        """Return an answer; None if there is none, or the pair was skipped."""
        return self._answers.get(self._key(question))

    def _key(self, question: tuple[str, str, str]) -> tuple[str, str, str]:
        """Return the key of a question, whose texts may be stored in the other order."""
        first, second, condition = question
        swapped = (second, first, condition)
        return swapped if swapped in self._answers else question

    def add(self, answers: Mapping[tuple[str, str, str], bool | None]) -> None:
        """Add answers, and write the file."""
        self._answers |= answers
        if self._path is None:
            return
        labels = {True: _SAME, False: _DIFFERENT, None: _SKIPPED}
        rows = [(*question, labels[answer]) for question, answer in self._answers.items()]
        write_csv(self._path, _COLUMNS, rows)


@contextmanager
def _open_answers(path: Path | None) -> Iterator[_PairAnswers]:
    """Open the table of answers, which no other process can write meanwhile."""
    if path is None:
        yield _PairAnswers(None)
        return
    with locked(path):
        yield _PairAnswers(path)


def _score_answers(
    checks: Sequence[ConditionCheck],
    rankings: Sequence[_Rankings],
    texts: Sequence[str],
    options: CheckConditionOptions,
) -> list[ConditionCheck]:
    """Ask about pairs of texts, and score every ranking by the answers."""
    first, second = pair_positions(len(texts))
    ranks = [[rank_pairs(vectors) for _, vectors in ranking] for ranking in rankings]
    samples = [order_pairs(each[0], each[-1], options.seed)[: options.pairs] for each in ranks]
    # The first wording names the condition, so that answers hold whatever else is compared.
    names = [condition_text(wordings(check.condition)[0]) for check in checks]
    questions = [
        [(texts[first[pair]], texts[second[pair]], name) for pair in pairs.tolist()]
        for pairs, name in zip(samples, names, strict=True)
    ]
    with _open_answers(None if options.out is None else Path(options.out)) as table:
        n_before = len(table)
        try:
            if options.judge is not None:
                _ask_judge([one for each in questions for one in each], table, options)
            else:
                ask = _ask_in_terminal if options.ask is True else options.ask
                _ask_all(questions, table, ask)
        except KeyboardInterrupt:
            sys.stderr.write("\n" if options.ask is True else "")
            log.info("stopped; the figures are of the answers so far")
    if options.out is not None:
        log.info(
            f"{format_count(len(table) - n_before, 'new answer')}, {len(table):,} in all -> "
            f"{options.out}; the same command continues"
        )
    scored: list[ConditionCheck] = []
    for check, each, pairs, pair_questions in zip(checks, ranks, samples, questions, strict=True):
        answers = [table.get(one) for one in pair_questions]
        known = [i for i, answer in enumerate(answers) if answer is not None]
        same = sum(answers[i] is True for i in known)
        skipped = sum(one in table for one in pair_questions) - len(known)
        scores: list[AnswerScores] = []
        if 0 < same < len(known):
            yes = [bool(answers[i]) for i in known]
            scores = score_answers(each, pairs[known], yes, options.seed)
        named = _name_scores(rankings[len(scored)], scores)
        counted = replace(check, same=same, different=len(known) - same, skipped=skipped)
        scored.append(replace(counted, rankings=named))
    return scored


def _name_scores(ranking: _Rankings, scores: Sequence[AnswerScores]) -> list[RankingScores]:
    """Name the scores of each ranking; there may be none."""
    return [RankingScores(name, one) for (name, _), one in zip(ranking, scores, strict=False)]


def _score_labels(
    check: ConditionCheck, ranking: _Rankings, labels: Sequence[Any]
) -> ConditionCheck:
    """Score every ranking by the labels of the texts, on all pairs."""
    names = np.array([label_text(label) for label in labels], dtype=object)
    first, second = pair_positions(len(names))
    same = names[first] == names[second]
    n_same, n_different = int(same.sum()), int((~same).sum())
    scores: list[AnswerScores] = []
    if n_same and n_different:
        scores = score_labels([rank_pairs(vectors) for _, vectors in ranking], names)
    named = _name_scores(ranking, scores)
    return replace(check, same=n_same, different=n_different, rankings=named)


def _ask_all(
    questions: Sequence[Sequence[tuple[str, str, str]]], table: _PairAnswers, ask: Any
) -> None:
    """Ask a person or a function about the pairs of each condition that are not in the table."""
    for pair_questions in questions:
        for number, question in enumerate(pair_questions, 1):
            if question in table:
                continue
            if ask is _ask_in_terminal:
                heading = f"{question[2]}: pair {number} of {len(pair_questions)}"
                sys.stderr.write(f"\n{escape_control_characters(heading)}\n")
            answer = ask(*question)
            if not (answer is None or isinstance(answer, bool | np.bool_)):
                raise UserError(
                    f"ask returned {shortened_repr(answer)}; expected True, False or None."
                )
            table.add({question: None if answer is None else bool(answer)})


_KEYS = {"y": True, "yes": True, "n": False, "no": False, "s": None, "skip": None}


def _ask_in_terminal(first: str, second: str, condition: str) -> bool | None:
    """Show a pair in the terminal, and return the answer.

    Raises:
        KeyboardInterrupt: the user quits, or the input ends.
    """
    for name, text in (("A", first), ("B", second)):
        words = escape_control_characters(" ".join(text.split()))
        lines = textwrap.wrap(words, max(line_width() - 5, 20)) or [""]
        sys.stderr.write(f"  {name}  " + "\n     ".join(lines) + "\n")
    while True:
        sys.stderr.write("Same in this respect? [y]es/[n]o/[s]kip/[q]uit ")
        sys.stderr.flush()
        line = sys.stdin.readline()
        key = line.strip().lower()
        if not line or key in ("q", "quit"):
            raise KeyboardInterrupt
        if key in _KEYS:
            return _KEYS[key]
        sys.stderr.write(f"{shortened_repr(key, 20)} is no answer. Type y, n, s or q.\n")


def _judge_server(options: CheckConditionOptions) -> ChatSettings:
    return ChatSettings(str(options.judge), str(options.judge_model), {}, flag="--judge")


def _ask_judge(
    questions: Sequence[tuple[str, str, str]], table: _PairAnswers, options: CheckConditionOptions
) -> None:
    """Let a language model rate the pairs, and store its ratings as answers.

    Raises:
        UserError: the server rejects a request, or none of its answers can be read.
        LlmcondError: the server fails.
    """
    from llmcond.workflows.question_runner import Journal, Question, QuestionRunner

    missing = [question for question in questions if question not in table]
    template = load_template("rate", "rate")
    pair_questions = [
        Question(
            template,
            dict(zip(("sentence1", "sentence2", "condition"), one, strict=True)),
            parse_rating,
        )
        for one in missing
    ]
    path = Path(str(options.out)).with_suffix(".answers")
    with (
        Journal(path) as journal,
        QuestionRunner(_judge_server(options), journal, options.seed, 4) as runner,
    ):
        try:
            runner.ask(pair_questions)
        finally:
            ratings = [runner.parsed_answer(question) for question in pair_questions]
            rated = {
                question: None if np.isnan(rating) else bool(rating > 0.5)
                for question, rating in zip(missing, ratings, strict=True)
                if rating is not None
            }
            if rated:
                table.add(rated)
    unread = sum(rating is None for rating in ratings)
    if missing and unread == len(missing):
        raise UserError(
            f"no answer of {options.judge_model} can be read; {path} has the questions and the "
            "answers. Name another --judge-model."
        )
    if unread:
        log.warning(f"{format_count(unread, 'answer')} of {len(missing)} cannot be read ({path})")
