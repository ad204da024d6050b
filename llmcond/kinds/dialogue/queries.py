"""What follows in dialogues: queries by history length with their candidates, and their ranks.

After h turns, every dialogue that goes on asks for the utterance that really followed (Triple-
Encoders, ACL 2024, section 4.1). Short-term planning asks for it with a goal: an utterance that the
same dialogue reaches g turns later (section 4.2). Both know texts by their positions alone; what
scores them is a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import MatrixLike, as_matrix
from llmcond.data.datasets import Problems
from llmcond.data.queries import QueryRows
from llmcond.data.readers import MissingColumnError, Source, open_source, read_records
from llmcond.errors import UserError, brief
from llmcond.evaluation.ranking import Part, Ranks, measure_each, ranks_among
from llmcond.evaluation.results import Queries
from llmcond.kinds.dialogue.data import Dialogues, Positions, Turns
from llmcond.metrics import METRICS, Floats, Metric, over_strata

#: History lengths of the paper, as far as a split has dialogues that are long enough.
HISTORIES = range(2, 11)
#: Scores that are held at once: 64 MiB of float32.
MOST_SCORES = 2**24


@dataclass(frozen=True)
class Asked:
    """Queries after h turns, which get figures of their own.

    Attributes:
        history: h.
        dialogue: (n,) which dialogue of the split asks.
        contexts: (n, h) its first turns, by the positions of their texts.
    """

    history: int
    dialogue: Positions
    contexts: Positions

    @property
    def name(self) -> str:
        """Return what figures call them."""
        return str(self.history)


@dataclass(frozen=True)
class NextQueries(Asked):
    """Queries that share their candidates.

    Attributes:
        candidates: (c,) positions of texts, of which some may be there more than once.
        answer: (n,) the column of the utterance that followed.
    """

    candidates: Positions
    answer: Positions

    @property
    def repeated(self) -> NDArray[np.bool_]:
        """Return (n,) whether another candidate has the text of the right one.

        Both score the same, so that the rule of ties decides.
        """
        _, which, count = np.unique(self.candidates, return_inverse=True, return_counts=True)
        return np.asarray(count[which[self.answer]] > 1)


def histories_of(data: Dialogues, split: str, asked: Sequence[int] | None = None) -> list[int]:
    """Return the history lengths that a split is asked by, rising.

    Args:
        data: the data set.
        split: of it.
        asked: lengths; None: those of ``HISTORIES`` that two dialogues at least go beyond.

    Raises:
        UserError: a length below 1, or one that fewer than two dialogues go beyond: there is
            nothing to rank.
    """
    lengths = np.sort(data.of(split).lengths)[::-1]
    # The second longest dialogue decides: one candidate is always the first.
    most = int(lengths[1]) - 1 if len(lengths) > 1 else 0
    found = sorted(set(HISTORIES if asked is None else asked))
    if asked is None:
        found = [h for h in found if h <= most]
    if not found or found[0] < 1 or found[-1] > most:
        wrong = next((h for h in found if not 1 <= h <= most), HISTORIES[0])
        longest = " and ".join(map(str, lengths[:2].tolist()))
        raise UserError(
            f"a history of {wrong} turns is asked for: two {split} dialogues at least must go on "
            f"after it, and of {len(lengths):,} the longest have {longest} turns. "
            + (f"Give --history from 1 to {most}." if most else "Name more data.")
        )
    return found


def next_queries(
    data: Dialogues,
    split: str,
    histories: Sequence[int] | None = None,
    pool: Literal["same-depth", "all"] | Positions = "same-depth",
) -> list[NextQueries]:
    """Return the queries of a split by history length, each length with its candidates.

    Args:
        data: the data set.
        split: of it.
        histories: lengths; see :func:`histories_of`, whose errors these are too.
        pool: ``same-depth``: the answers of all queries of the length, as the paper has it;
            ``all``: those of all lengths; or positions of texts, see :func:`own_candidates`.
            Texts that occur twice are there twice.

    Raises:
        UserError: an answer is none of the candidates.
    """
    turns = data.of(split)
    found = [(h, *turns.context(h)) for h in histories_of(data, split, histories)]
    every = np.concatenate([answers for *_, answers in found])
    queries, before = [], 0
    for h, rows, contexts, answers in found:
        column = np.arange(len(rows))
        candidates = answers
        if isinstance(pool, np.ndarray):
            candidates, column = pool, _columns(data, pool, answers)
        elif pool == "all":
            candidates, column = every, before + column
        queries.append(NextQueries(h, rows, contexts, candidates, column))
        before += len(rows)
    return queries


def _columns(data: Dialogues, candidates: Positions, answers: Positions) -> Positions:
    """Return the first column of each answer; a UserError if there is none."""
    distinct, first = np.unique(candidates, return_index=True)
    lacking = answers[~np.isin(answers, distinct)]
    if len(lacking):
        raise UserError(
            f"the candidates lack {len(lacking):,} of {len(answers):,} right answers, the first "
            f"one {brief(data.texts[lacking[0]])}. Add them: a query without its answer has no "
            "rank."
        )
    return np.asarray(first[np.searchsorted(distinct, answers)])


def own_candidates(data: Dialogues, texts: Sequence[str]) -> tuple[Positions, list[str]]:
    """Return (c,) the positions of texts, and the distinct ones that the data set lacks.

    These are numbered after its own: the first one is at ``len(data.texts)``.
    """
    number = {text: i for i, text in enumerate(data.texts)}
    found = [number.setdefault(text, len(number)) for text in map(str.strip, texts)]
    return np.array(found, dtype=np.int64), list(number)[len(data.texts) :]


#: From contexts (n, h) and distinct candidates (c,), positions of texts, to (n, c) scores.
NextScorer = Callable[[Positions, Positions], NDArray[np.floating]]


def rank_next(
    asked: Sequence[NextQueries], score: NextScorer, most_scores: int = MOST_SCORES
) -> Ranks:
    """Return the ranks of all queries, those of the first history length first.

    ``score`` is called with as many queries of one length as ``most_scores`` allow, and always with
    all of their candidates, each text once, so that equal texts tie to the last bit. Candidates
    that do not change between calls are the same array.

    Raises:
        UserError: a score is not finite.
    """
    found: list[Ranks] = []
    last: Positions | None = None
    for one in asked:
        if one.candidates is not last:
            last = one.candidates
            distinct, which = np.unique(last, return_inverse=True)
        block = max(1, most_scores // len(one.candidates))
        for begin in range(0, len(one.dialogue), block):
            rows = slice(begin, begin + block)
            scores = score(one.contexts[rows], distinct)
            found.append(ranks_among(scores[:, which], one.answer[rows]))
    return _joined(found)


def _joined(found: Sequence[Ranks]) -> Ranks:
    return Ranks(
        np.concatenate([own.optimistic for own in found]),
        np.concatenate([own.pessimistic for own in found]),
    )


# -- short-term planning -----------------------------------------------------------------------

#: The paper's lengths of histories, distances of goals and figures, but for histories of 10 turns.
PLAN_HISTORIES, PLAN_DISTANCES = (2, 5), (1, 2, 3, 4)
PLAN_METRICS = tuple(over_strata(METRICS[f"hits@{k}"]) for k in (5, 10, 25, 50))
#: Candidates besides the right one.
POOL_SIZE = 100
#: Queries that are scored at once: their candidates' vectors are pairs with every turn.
PLAN_BLOCK = 256


@dataclass(frozen=True)
class PlanQueries(Asked):
    """Queries of dialogues that reach a goal g turns later.

    Attributes:
        distance: g.
        goals: (n,) its utterance h + g.
        candidates: (n, 1 + c) the utterance that followed, and what else might have.
    """

    distance: int
    goals: Positions
    candidates: Positions

    @property
    def name(self) -> str:
        """Return how figures of these queries are called: ``2+1``."""
        return f"{self.history}+{self.distance}"

    @property
    def left_out(self) -> NDArray[np.bool_]:
        """Return (n, 1 + c) which candidates have the words of the right one: none is wrong."""
        found: NDArray[np.bool_] = self.candidates == self.candidates[:, :1]
        found[:, 0] = False
        return found


#: From turns and h to (n, c): for all dialogues longer than h turns, what might follow these.
Pool = Callable[[Turns, int], Positions]


def plan_queries(
    data: Dialogues,
    split: str,
    pool: Pool,
    histories: Sequence[int] = PLAN_HISTORIES,
    distances: Sequence[int] = PLAN_DISTANCES,
) -> list[PlanQueries]:
    """Return the queries of each history length and distance of the goal.

    Candidates of a dialogue are the same whatever the distance.

    Raises:
        UserError: a number below 1, or no dialogue that long.
    """
    turns, found = data.of(split), []
    longest = int(turns.lengths.max())
    if min(*histories, *distances) < 1 or longest <= max(histories) + max(distances):
        raise UserError(
            f"histories of {max(histories)} turns with goals {max(distances)} turns further need "
            f"dialogues of {max(histories) + max(distances) + 1} turns, and the longest of "
            f"{split} has {longest}. Give --history and --distance from 1, and less far."
        )
    for h in sorted(set(histories)):
        rows, contexts, answers = turns.context(h)
        candidates = np.concatenate([answers[:, None], pool(turns, h)], axis=1)
        for g in sorted(set(distances)):
            own = np.flatnonzero(turns.lengths[rows] > h + g)
            goals = turns.utterances[turns.starts[rows[own]] + h + g]
            found.append(PlanQueries(h, rows[own], contexts[own], g, goals, candidates[own]))
    return found


#: From contexts (n, h), candidates (n, c) and goals (n,), positions of texts, to (n, c) scores.
PlanScorer = Callable[[Positions, Positions, Positions], NDArray[np.floating]]


def rank_plans(asked: Sequence[PlanQueries], score: PlanScorer, block: int = PLAN_BLOCK) -> Ranks:
    """Return the ranks of all queries, in their order; equal texts are not counted as wrong.

    Raises:
        UserError: a score is not finite.
    """
    found = []
    for one in asked:
        for begin in range(0, len(one.dialogue), block):
            rows = slice(begin, begin + block)
            candidates = one.candidates[rows]
            scores = score(one.contexts[rows], candidates, one.goals[rows])
            first = np.zeros(len(candidates), dtype=np.int64)
            found.append(ranks_among(scores, first, one.left_out[rows]))
    return _joined(found)


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The nearest texts to the mean of a context's last two, of other dialogues of the split.

    They are on the topic, and no language model is needed for them.

    Attributes:
        features: (n, d) of all texts.
        size: how many, as far as there are.
    """

    features: MatrixLike
    size: int = POOL_SIZE

    def __call__(self, turns: Turns, h: int, /) -> Positions:
        """See :data:`Pool`; texts of the own dialogue are none of its candidates."""
        texts, which = np.unique(turns.utterances, return_inverse=True)
        vectors = _unit(as_matrix(self.features).read(texts))
        rows, _, _ = turns.context(h)
        own = [np.unique(which[turns.starts[i] : turns.starts[i + 1]]) for i in rows]
        size = min(self.size, len(texts) - max(map(len, own), default=0))
        _check_pool(size)
        found = np.empty((len(rows), size), dtype=np.int64)
        for begin in range(0, len(rows), PLAN_BLOCK):
            block = rows[begin : begin + PLAN_BLOCK]
            last = which[turns.starts[block][:, None] + np.arange(max(h - 2, 0), h)]
            scores = _unit(vectors[last].mean(axis=1)) @ vectors.T
            for number, texts_of in enumerate(own[begin : begin + PLAN_BLOCK]):
                scores[number, texts_of] = -np.inf
            # A stable sort of what may be among them: equal texts in the order of the data.
            order = np.argsort(-scores, axis=1, kind="stable")[:, :size]
            found[begin : begin + PLAN_BLOCK] = texts[order]
        return found


@dataclass(frozen=True, slots=True)
class Drawn:
    """Utterances of other dialogues, drawn without replacement.

    Attributes:
        same_depth: whether to draw only utterances with the same number of turns before them.
        size: how many, as far as there are.
    """

    same_depth: bool
    _: KW_ONLY
    size: int = POOL_SIZE
    seed: int = 0

    def __call__(self, turns: Turns, h: int, /) -> Positions:
        """See :data:`Pool`."""
        rows, _, answers = turns.context(h)
        among, starts, counts = turns.utterances, turns.starts[rows], turns.lengths[rows]
        if self.same_depth:
            among, starts, counts = answers, np.arange(len(rows)), np.ones_like(rows)
        rng = np.random.default_rng([self.seed, h])
        size = min(self.size, len(among) - int(counts.max(initial=0)))
        _check_pool(size)
        found = np.empty((len(rows), size), dtype=np.int64)
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            places = rng.choice(len(among) - count, size, replace=False, shuffle=False)
            found[row] = among[places + count * (places >= start)]
        return found


def _check_pool(size: int) -> None:
    if size < 1:
        raise UserError(
            "there are no candidates besides the right one: no other dialogue has an utterance "
            "for them. Name more data, another pool or a shorter --history."
        )


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class Samples:
    """Candidates from a file, such as what a language model said.

    Attributes:
        name: of the file.
        found: (c,) candidates by the dialogue and the number of turns before them.
        further: distinct texts of it that the data set lacks, numbered after its own.
    """

    name: str
    found: Mapping[tuple[int, int], Positions]
    further: Sequence[str]

    def __call__(self, turns: Turns, h: int, /) -> Positions:
        """See :data:`Pool`. Where a dialogue has fewer, the right one fills up: it is left out.

        Raises:
            UserError: a dialogue without candidates.
        """
        rows, _, answers = turns.context(h)
        lacking = [i for i in rows.tolist() if (i, h) not in self.found]
        if lacking:
            raise UserError(
                f"{self.name} has no candidates after {h} turns for {len(lacking):,} of "
                f"{len(rows):,} dialogues, the first one {turns.ids[lacking[0]]}. Add them, or ask "
                "for another --history."
            )
        own = [self.found[i, h] for i in rows.tolist()]
        found = np.repeat(answers[:, None], max(map(len, own)), axis=1)
        for row, candidates in zip(found, own, strict=True):
            row[: len(candidates)] = candidates
        return found


def read_samples(source: Any, data: Dialogues, split: str) -> Samples:
    """Read candidates of dialogues: rows of ``dialogue``, ``history`` and ``candidates``.

    A dialogue is named by its id, or where it has none by the number of its row in its file, from
    1; the history is a number of turns, and the candidates are a list of texts. Rows of the same
    dialogue and history add up.

    Raises:
        UserError: a missing column, a dialogue that the split lacks or that is two, a history that
            is no number, candidates that are no texts.
    """
    opened, turns = open_source(source), data.of(split)
    rows: dict[str, list[int]] = {}
    for i, key in enumerate(turns.ids):
        rows.setdefault(key, []).append(i)
    number = {text: i for i, text in enumerate(data.texts)}
    found: dict[tuple[int, int], list[int]] = {}
    for file in opened.files:
        problems = Problems(PurePosixPath(file).name)
        for line, record in enumerate(_sample_records(opened, file), 1):
            key, h, texts = str(record["dialogue"]), record["history"], record["candidates"]
            same = rows.get(key, [])
            if len(same) != 1:
                many = "several" if same else "no"
                problems.add(line, f"{many} {split} dialogues have the id {brief(key)}")
            if type(h) is not int or h < 1:
                problems.add(line, f"history is {brief(h)}, not a number of turns from 1")
            if not isinstance(texts, list) or not texts:
                problems.add(line, f"candidates is {brief(texts)}, not a list of texts")
                continue
            own = [
                problems.text(line, f"candidate {place}", text).strip()
                for place, text in enumerate(texts, 1)
            ]
            places = [number.setdefault(text, len(number)) for text in own]
            if same and isinstance(h, int):
                found.setdefault((same[0], h), []).extend(places)
        problems.raise_if_any()
    arrays = {key: np.array(own, dtype=np.int64) for key, own in found.items()}
    return Samples(opened.name, arrays, list(number)[len(data.texts) :])


def _sample_records(source: Source, file: str) -> Iterator[dict[str, Any]]:
    try:
        yield from read_records(source, file, ["dialogue", "history", "candidates"])
    except MissingColumnError as error:
        raise UserError(f"{error.found} Expected dialogue, history and candidates.") from error


# -- figures -----------------------------------------------------------------------------------


def queries_of(asked: Sequence[Asked]) -> Queries:
    """Return what ranks are told for: each query's dialogue, and what it is asked with."""
    dialogue = np.concatenate([one.dialogue for one in asked])
    stratum = np.repeat(np.arange(len(asked)), [len(one.dialogue) for one in asked])
    return Queries(dialogue, "dialogues", stratum)


def query_rows(
    data: Dialogues, split: str, asked: Sequence[NextQueries] | Sequence[PlanQueries]
) -> QueryRows:
    """Return queries as readers see them: their dialogue and place in it, and the nearest turns.

    ``turn_before`` the last one is empty where there is a single one. Goals have
    columns where there are goals.
    """
    ids = data.of(split).ids
    heading, texts = ["dialogue", "history"], ["turn_before", "last_turn", "answer"]
    if isinstance(asked[0], PlanQueries):
        heading, texts = [*heading, "distance"], [*texts, "goal"]
    columns: dict[str, list[str]] = {name: [] for name in (*heading, *texts)}

    def add(name: str, positions: Positions) -> None:
        columns[name] += (data.texts[i] for i in positions.tolist())

    for one in asked:
        n = len(one.dialogue)
        columns["dialogue"] += (ids[i] for i in one.dialogue.tolist())
        columns["history"] += [str(one.history)] * n
        if isinstance(one, PlanQueries):
            columns["distance"] += [str(one.distance)] * n
            add("goal", one.goals)
            add("answer", one.candidates[:, 0])
        else:
            add("answer", one.candidates[one.answer])
        if one.history > 1:
            add("turn_before", one.contexts[:, -2])
        else:
            columns["turn_before"] += [""] * n
        add("last_turn", one.contexts[:, -1])
    return QueryRows(columns, heading, texts, by="history")


def figures(
    asked: Sequence[Asked], systems: Sequence[Floats], metrics: Sequence[Metric]
) -> tuple[list[Part], dict[str, list[Part]]]:
    """Measure systems on all queries, and on those of each history length (and distance).

    Intervals are by bootstrap over dialogues, all queries of one together.

    Args:
        asked: queries, as they were ranked.
        systems: (seeds, m) ranks of each.
        metrics: what is computed.

    Returns:
        For each system its figures, and by the queries' name those of each system.
    """
    queries = queries_of(asked)
    group, stratum = queries.pair, queries.rating
    parts = {
        one.name: measure_each(systems, group, metrics, chosen=stratum == number)
        for number, one in enumerate(asked)
    }
    return measure_each(systems, group, metrics, stratum=stratum), parts
