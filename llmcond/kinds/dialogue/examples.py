"""The examples of a dialogue run: heads map utterances to roles and rank next turns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from pathlib import PurePosixPath
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import (
    Array,
    ConcatenatedMatrix,
    Matrix,
    MatrixLike,
    Positions,
    as_matrix,
    scale_to_unit_norm,
)
from llmcond.base.errors import UserError, format_count, shortened_repr
from llmcond.base.metrics import METRICS, mean_over_strata
from llmcond.data.datasets import Problems
from llmcond.data.formats import MissingColumnError
from llmcond.data.readers import Source, open_source, read_records
from llmcond.data.rows import QueryRows
from llmcond.evaluation.results import RankedQueries, Ranks, ranks_among
from llmcond.features.store import FeatureStore
from llmcond.features.view import FeatureView
from llmcond.heads import load_recipe
from llmcond.kinds.dialogue.data import Dialogues, TextIndex, Turns, UtteranceInputs
from llmcond.kinds.dialogue.heads import (
    FittedRoleHead,
    TurnArrays,
    fit_turns,
    plan_scores,
    turn_scores,
)
from llmcond.runs.examples import AnyPredictor, RankedExamples
from llmcond.runs.run import Run


def resolve_head(predictor: AnyPredictor, dim: int) -> FittedRoleHead:
    """Return a predictor's head; for zero-shot, a head with the features (n, dim) in all roles."""
    if predictor.is_fitted:
        head: FittedRoleHead = predictor.head
        return head
    recipe = load_recipe("none", "dialogue")
    module: Any = recipe.family(recipe.settings, dim)
    return FittedRoleHead(recipe.kind, module.freeze(), 0)


class UtteranceRoles:
    """Some utterances in their roles, with scores of contexts and candidates.

    Contexts, candidates and goals are given by their positions among all texts.

    Attributes:
        head: head that maps the utterances; its ``score`` compares them.
    """

    def __init__(self, head: FittedRoleHead, vectors: MatrixLike, indices: Positions) -> None:
        """Map utterances to their roles.

        Args:
            head: head that maps them.
            vectors: features of the utterances, (u, d).
            indices: distinct positions of the utterances among all texts, (u,), ascending.
        """
        self.head, self._indices = head, indices
        self._b1, self._b2 = head.before(vectors)
        self._after = head.after(vectors)

    def with_score(self, score: str) -> UtteranceRoles:
        """Return a copy that compares the same vectors by another score."""
        roles = copy.copy(self)
        roles.head = self.head.with_score(score)
        return roles

    def before(self, contexts: Positions) -> tuple[Array, Array]:
        """Return the roles before-1 and before-2 of contexts (n, h), each (n, h, k)."""
        rows = np.searchsorted(self._indices, contexts)
        return self._b1[rows], self._b2[rows]

    def after(self, candidates: Positions) -> Array:
        """Return the role after of candidates (c,), (c, k)."""
        vectors: Array = self._after[np.searchsorted(self._indices, candidates)]
        return vectors

    def scores(self, contexts: Positions, candidates: Positions) -> Array:
        """Return the scores (n, c) of candidates (c,) as the next turns of contexts (n, h)."""
        head, after = self.head, self.after(candidates)
        return turn_scores(*self.before(contexts), after, head.score, head.weights)

    def score_next_turns(
        self, contexts: Positions, candidates: Positions, goals: Positions
    ) -> Array:
        """Return the scores (n, c) of candidates (n, c) as next turns; goals are ignored."""
        distinct = np.unique(candidates)
        scores = self.scores(contexts, distinct)
        return np.take_along_axis(scores, np.searchsorted(distinct, candidates), axis=1)

    def score_plans(self, contexts: Positions, candidates: Positions, goals: Positions) -> Array:
        """Score how likely candidates (n, c) are to lead from contexts (n, h) to goals (n,)."""
        _, before = self.before(candidates)
        return plan_scores(self.before(contexts)[0], before, self.after(goals))

    def score_steps(self, contexts: Positions, candidates: Positions, goals: Positions) -> Array:
        """Score how likely candidates (n, c) alone lead to goals (n,); contexts are ignored."""
        _, before = self.before(candidates)
        return plan_scores(before[:, :0], before, self.after(goals))


class DialogueExamples(RankedExamples):
    """The dialogues of a run, with the features of their utterances.

    Attributes:
        texts: the distinct utterances of the data, followed by additional texts.
    """

    fit_head = staticmethod(fit_turns)

    def __init__(
        self,
        run: Run,
        data: Dialogues | None = None,
        extra_texts: Sequence[str] = (),
        store: FeatureStore | None = None,
    ) -> None:
        """Prepare the examples; ``extra_texts`` are additional texts that are ranked."""
        super().__init__(run, data, store)
        self.texts = [*self.data.texts, *extra_texts]
        self._queries = cache(partial(next_queries, self.data))
        self._columns = cache(
            lambda prompt: self._store.lookup(UtteranceInputs(self.texts, prompt))
        )

    def features(self, view: FeatureView) -> Matrix:
        """Return the features of all texts, (n, d)."""
        columns = [self._columns(prompt) for prompt in view.prompts]
        return columns[0] if len(columns) == 1 else ConcatenatedMatrix(columns)

    def roles(self, predictor: AnyPredictor, indices: Positions) -> UtteranceRoles:
        """Return utterances, by distinct positions, in the roles to which a predictor maps them."""
        vectors = self.features(predictor.view).take(indices)
        return UtteranceRoles(resolve_head(predictor, int(vectors.shape[1])), vectors, indices)

    # -- the interface of Examples -------------------------------------------------------------

    @override
    def dim(self, view: FeatureView) -> int:
        return int(self.features(view).shape[1])

    @override
    def arrays(self, view: FeatureView) -> TurnArrays:
        train = self.data.turns_of("train")
        return TurnArrays(self.features(view), train.utterances, train.starts)

    @override
    def ranks(self, predictor: AnyPredictor, split: str, rows: Any = slice(None)) -> Ranks:
        # All queries of a split are ranked: they share their candidates.
        used = np.unique(self.data.turns_of(split).utterances)
        return rank_next(self._queries(split), self.roles(predictor, used).scores)

    @override
    def scored_rows(self, split: str) -> RankedQueries:
        return stack_queries(self._queries(split))

    @override
    def rows(self, split: str) -> QueryRows:
        return query_rows(self.data, split, self._queries(split))

    @override
    def subsets(
        self, split: str, trained_on: Collection[str] = (), others: Sequence[Run] = ()
    ) -> Mapping[str, NDArray[np.bool_]]:
        queries = self._queries(split)
        return {
            f"after {format_count(int(history), 'turn')}": mask
            for history, mask in subset_masks(queries).items()
        }


#: History lengths of the paper; those for which a split has no long dialogues are left out.
HISTORIES = range(2, 11)
#: Maximum number of scores in memory: 64 MiB of float32.
MOST_SCORES = 2**24


@dataclass(frozen=True)
class DialogueQueries:
    """Queries after the same number of turns, which are scored as a subset.

    Attributes:
        history: number of turns, h.
        dialogue: dialogue of each query in the split, (n,).
        contexts: positions of the texts of its first turns, (n, h).
    """

    history: int
    dialogue: Positions
    contexts: Positions

    @property
    def name(self) -> str:
        """The name of the subset in results."""
        return str(self.history)


@dataclass(frozen=True)
class NextQueries(DialogueQueries):
    """Queries for the next turn, which share their candidates.

    Attributes:
        candidates: positions of the candidates' texts, (c,), which may contain duplicates.
        answer: index of the answer in ``candidates``, (n,).
    """

    candidates: Positions
    answer: Positions

    @property
    def repeated(self) -> NDArray[np.bool_]:
        """Whether another candidate has the same text as the answer, (n,).

        Both have the same score, so the rank depends on the rule for ties.
        """
        _, which, count = np.unique(self.candidates, return_inverse=True, return_counts=True)
        return np.asarray(count[which[self.answer]] > 1)


def resolve_histories(
    data: Dialogues,
    split: str,
    histories: Sequence[int] | None = None,
    *,
    can_choose: bool = True,
) -> list[int]:
    """Return the history lengths of a split's queries, in ascending order.

    Args:
        data: the dataset.
        split: split of the dataset.
        histories: history lengths; by default, those of ``HISTORIES`` with at least two longer
            dialogues.
        can_choose: whether the command has the option --history.

    Raises:
        UserError: A length is below 1, or fewer than two dialogues are longer, so that there is
            nothing to rank.
    """
    lengths = np.sort(data.turns_of(split).lengths)[::-1]
    # The second longest dialogue is the limit, because a single candidate always ranks first.
    longest_history = int(lengths[1]) - 1 if len(lengths) > 1 else 0
    selected = sorted(set(HISTORIES if histories is None else histories))
    if histories is None:
        selected = [h for h in selected if h <= longest_history] or [HISTORIES[0]]
    invalid = [h for h in selected if not 1 <= h <= longest_history]
    if invalid:
        longest = " and ".join(map(str, lengths[:2].tolist()))
        raise UserError(
            f"a history of {invalid[0]} turns needs at least two longer {split} dialogues, and of "
            f"{len(lengths):,} the longest have {longest} turns. "
            + (
                f"Give --history from 1 to {longest_history}."
                if can_choose and longest_history
                else "Add longer ones."
            )
        )
    return selected


def next_queries(
    data: Dialogues,
    split: str,
    histories: Sequence[int] | None = None,
    pool: Literal["same-depth", "all"] | Positions = "same-depth",
) -> list[NextQueries]:
    """Return the queries of a split for each history length, with their candidates.

    Args:
        data: the dataset.
        split: split of the dataset.
        histories: history lengths; see ``resolve_histories``.
        pool: candidates: ``same-depth``, the answers of all queries with the same history length,
            as in the paper; ``all``, the answers of all queries; or positions of texts, see
            ``index_candidates``. Duplicate texts are kept.

    Raises:
        UserError: An answer is not among the candidates, or as for ``resolve_histories``.
    """
    turns = data.turns_of(split)
    contexts_by_length = [
        (h, *turns.contexts(h)) for h in resolve_histories(data, split, histories)
    ]
    all_answers = np.concatenate([answers for *_, answers in contexts_by_length])
    queries, n_before = [], 0
    for h, rows, contexts, answers in contexts_by_length:
        column = np.arange(len(rows))
        candidates = answers
        if isinstance(pool, np.ndarray):
            candidates, column = pool, _find_answer_columns(data, pool, answers)
        elif pool == "all":
            candidates, column = all_answers, n_before + column
        queries.append(NextQueries(h, rows, contexts, candidates, column))
        n_before += len(rows)
    return queries


def _find_answer_columns(data: Dialogues, candidates: Positions, answers: Positions) -> Positions:
    """Return the first index of each answer in the candidates; a UserError if one is missing."""
    distinct, first_columns = np.unique(candidates, return_index=True)
    missing = answers[~np.isin(answers, distinct)]
    if len(missing):
        raise UserError(
            f"the candidates lack {len(missing):,} of {len(answers):,} correct answers, the first "
            f"one {shortened_repr(data.texts[missing[0]])}. Add them: a query without its answer "
            "has no rank."
        )
    return np.asarray(first_columns[np.searchsorted(distinct, answers)])


def index_candidates(data: Dialogues, texts: Sequence[str]) -> tuple[Positions, list[str]]:
    """Return the positions (c,) of texts, and the distinct texts that the dataset lacks.

    The positions of the latter continue those of the dataset, from ``len(data.texts)`` on.
    """
    index = TextIndex(data.texts)
    return index.find(map(str.strip, texts)), index.new


def join_turns(
    queries: Sequence[NextQueries], texts: Sequence[str]
) -> tuple[list[NextQueries], list[str]]:
    """Return queries whose context is one text of all turns, and the texts that are new.

    The newest turn comes first, as in ConveRT, so that an encoder that cuts long texts reads the
    last turns. The positions of new texts continue those of ``texts``.
    """
    index, joined = TextIndex(texts), []
    for subset in queries:
        contexts = ("\n".join(texts[i] for i in reversed(row)) for row in subset.contexts.tolist())
        joined.append(replace(subset, contexts=index.find(contexts)[:, None]))
    return joined, index.new


#: Maps contexts (n, h) and distinct candidates (c,), as positions of texts, to scores (n, c).
NextScorer = Callable[[Positions, Positions], NDArray[np.floating]]


def rank_next(
    queries: Sequence[NextQueries], score: NextScorer, most_scores: int = MOST_SCORES
) -> Ranks:
    """Return the ranks of all queries, in their order.

    ``score`` is called with as many queries of one history length as ``most_scores`` allows, and
    with all of their candidates. Each text is scored once, so that equal texts tie bit for bit. If
    the candidates do not change between calls, the same array is passed.

    Raises:
        UserError: A score is not finite.
    """
    ranks: list[Ranks] = []
    last_candidates: Positions | None = None
    for subset in queries:
        if subset.candidates is not last_candidates:
            last_candidates = subset.candidates
            distinct, inverse = np.unique(last_candidates, return_inverse=True)
        block = max(1, most_scores // len(subset.candidates))
        for begin in range(0, len(subset.dialogue), block):
            rows = slice(begin, begin + block)
            scores = score(subset.contexts[rows], distinct)
            ranks.append(ranks_among(scores[:, inverse], subset.answer[rows]))
    return _concatenate_ranks(ranks)


def _concatenate_ranks(ranks: Sequence[Ranks]) -> Ranks:
    return Ranks(
        np.concatenate([item.optimistic for item in ranks]),
        np.concatenate([item.pessimistic for item in ranks]),
    )


# -- short-term planning -----------------------------------------------------------------------

#: The paper's history lengths (except 10 turns), distances of goals and metrics.
PLAN_HISTORIES, PLAN_DISTANCES = (2, 5), (1, 2, 3, 4)
PLAN_METRICS = tuple(mean_over_strata(METRICS[f"hits@{k}"]) for k in (5, 10, 25, 50))
#: Number of candidates in addition to the answer.
POOL_SIZE = 100
#: Number of queries that are scored at once; each candidate forms a pair with every turn.
PLAN_BLOCK = 256


@dataclass(frozen=True)
class PlanQueries(DialogueQueries):
    """Queries of dialogues that reach a goal g turns later.

    Attributes:
        distance: distance of the goal, g.
        goals: goal of each query, the utterance at h + g, (n,).
        candidates: candidates of each query, (n, 1 + c), of which the first is the answer.
    """

    distance: int
    goals: Positions
    candidates: Positions

    @property
    def name(self) -> str:
        """The name of the subset in results, such as ``2+1``."""
        return f"{self.history}+{self.distance}"

    @property
    def left_out(self) -> NDArray[np.bool_]:
        """Mask (n, 1 + c) of the candidates that have the answer's text, which are left out."""
        same_text: NDArray[np.bool_] = self.candidates == self.candidates[:, :1]
        same_text[:, 0] = False
        return same_text


#: Maps turns and h to candidates (n, c): for all dialogues longer than h turns, the positions of
#: texts that might follow.
CandidatePoolFunction = Callable[[Turns, int], Positions]


def plan_queries(
    data: Dialogues,
    split: str,
    pool: CandidatePoolFunction,
    histories: Sequence[int] = PLAN_HISTORIES,
    distances: Sequence[int] = PLAN_DISTANCES,
) -> list[PlanQueries]:
    """Return the queries for each history length and distance of the goal.

    The candidates of a dialogue do not depend on the distance.

    Raises:
        UserError: A number is below 1, or no dialogue is long enough.
    """
    turns, queries = data.turns_of(split), []
    longest = int(turns.lengths.max())
    if min(*histories, *distances) < 1 or longest <= max(histories) + max(distances):
        raise UserError(
            f"histories of {max(histories)} turns with goals {max(distances)} turns later need "
            f"dialogues of {max(histories) + max(distances) + 1} turns, and the longest of "
            f"{split} has {longest}. Give smaller values of --history and --distance, from 1."
        )
    for h in sorted(set(histories)):
        rows, contexts, answers = turns.contexts(h)
        candidates = np.concatenate([answers[:, None], pool(turns, h)], axis=1)
        for g in sorted(set(distances)):
            rows_with_goal = np.flatnonzero(turns.lengths[rows] > h + g)
            goals = turns.utterances[turns.starts[rows[rows_with_goal]] + h + g]
            with_goal = (array[rows_with_goal] for array in (rows, contexts, candidates))
            dialogue, context, pool_of_context = with_goal
            queries.append(PlanQueries(h, dialogue, context, g, goals, pool_of_context))
    return queries


#: Maps contexts (n, h), candidates (n, c) and goals (n,), as positions of texts, to scores (n, c).
PlanScorer = Callable[[Positions, Positions, Positions], NDArray[np.floating]]


def rank_plans(queries: Sequence[PlanQueries], score: PlanScorer, block: int = PLAN_BLOCK) -> Ranks:
    """Return the ranks of all queries, in their order, without candidates that equal the answer.

    Raises:
        UserError: A score is not finite.
    """
    ranks = []
    for subset in queries:
        for begin in range(0, len(subset.dialogue), block):
            rows = slice(begin, begin + block)
            candidates = subset.candidates[rows]
            scores = score(subset.contexts[rows], candidates, subset.goals[rows])
            first = np.zeros(len(candidates), dtype=np.int64)
            ranks.append(ranks_among(scores, first, subset.left_out[rows]))
    return _concatenate_ranks(ranks)


@dataclass(frozen=True, slots=True)
class RetrievedPool:
    """The texts of other dialogues of the split that are nearest to a context's last two turns.

    Texts are compared with the mean of the two turns. These candidates are on the topic of the
    dialogue, and need no language model.

    Attributes:
        features: features of all texts, (n, d).
        size: maximum number of candidates.
    """

    features: MatrixLike
    size: int = POOL_SIZE

    def __call__(self, turns: Turns, h: int, /) -> Positions:
        """Return the candidates, without texts of the same dialogue."""
        texts, text_of_turn = np.unique(turns.utterances, return_inverse=True)
        vectors = scale_to_unit_norm(as_matrix(self.features).read(texts))
        rows, _, _ = turns.contexts(h)
        dialogue_texts = [
            np.unique(text_of_turn[turns.starts[i] : turns.starts[i + 1]]) for i in rows
        ]
        size = min(self.size, len(texts) - max(map(len, dialogue_texts), default=0))
        _check_pool_size(size)
        candidates = np.empty((len(rows), size), dtype=np.int64)
        for begin in range(0, len(rows), PLAN_BLOCK):
            block = rows[begin : begin + PLAN_BLOCK]
            last = text_of_turn[turns.starts[block][:, None] + np.arange(max(h - 2, 0), h)]
            scores = scale_to_unit_norm(vectors[last].mean(axis=1)) @ vectors.T
            for row, texts_of in enumerate(dialogue_texts[begin : begin + PLAN_BLOCK]):
                scores[row, texts_of] = -np.inf
            # The sort is stable, so that equal scores are in the order of the data.
            order = np.argsort(-scores, axis=1, kind="stable")[:, :size]
            candidates[begin : begin + PLAN_BLOCK] = texts[order]
        return candidates


@dataclass(frozen=True, slots=True)
class RandomPool:
    """Utterances of other dialogues, sampled without replacement.

    Attributes:
        same_depth: whether to sample only utterances with the same number of turns before them.
        size: maximum number of candidates.
        seed: random seed.
    """

    same_depth: bool
    _: KW_ONLY
    size: int = POOL_SIZE
    seed: int = 0

    def __call__(self, turns: Turns, h: int, /) -> Positions:
        """Return the candidates; see ``CandidatePoolFunction``."""
        rows, _, answers = turns.contexts(h)
        pool, starts, counts = turns.utterances, turns.starts[rows], turns.lengths[rows]
        if self.same_depth:
            pool, starts, counts = answers, np.arange(len(rows)), np.ones_like(rows)
        rng = np.random.default_rng([self.seed, h])
        size = min(self.size, len(pool) - int(counts.max(initial=0)))
        _check_pool_size(size)
        candidates = np.empty((len(rows), size), dtype=np.int64)
        for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            positions = rng.choice(len(pool) - count, size, replace=False, shuffle=False)
            candidates[row] = pool[positions + count * (positions >= start)]
        return candidates


def _check_pool_size(size: int) -> None:
    if size < 1:
        raise UserError(
            "there are no candidates in addition to the answer, because no other dialogue has a "
            "suitable utterance. Give more data, another pool or a shorter --history."
        )


@dataclass(frozen=True)
class SamplePool:
    """Candidates from a file, such as texts that a language model generated.

    Attributes:
        name: name of the file.
        positions: positions of the candidates' texts, (c,), by the dialogue and the number of turns
            before them.
        extra_texts: distinct texts of the file that the dataset lacks; their positions continue
            those of the dataset.
    """

    name: str
    positions: Mapping[tuple[int, int], Positions]
    extra_texts: Sequence[str]

    def __call__(self, turns: Turns, h: int, /) -> Positions:
        """Return the candidates; see ``CandidatePoolFunction``.

        Dialogues with fewer candidates than others are padded with the answer, whose duplicates
        are left out of the ranking.

        Raises:
            UserError: A dialogue has no candidates.
        """
        rows, _, answers = turns.contexts(h)
        missing = [i for i in rows.tolist() if (i, h) not in self.positions]
        if missing:
            raise UserError(
                f"{self.name} has no candidates after {h} turns for {len(missing):,} of "
                f"{len(rows):,} dialogues, the first one {turns.ids[missing[0]]}. Add them, or "
                "choose another --history."
            )
        samples = [self.positions[i, h] for i in rows.tolist()]
        padded = np.repeat(answers[:, None], max(map(len, samples)), axis=1)
        for row, candidates in zip(padded, samples, strict=True):
            row[: len(candidates)] = candidates
        return padded


def read_samples(source: Any, data: Dialogues, split: str) -> SamplePool:
    """Read candidates of dialogues: rows of ``dialogue``, ``history`` and ``candidates``.

    ``dialogue`` is an id, or the number of the dialogue's row in its file (from 1) if it has no id.
    ``history`` is a number of turns, and ``candidates`` is a list of texts. Rows of the same
    dialogue and history are combined.

    Raises:
        UserError: A column is missing, an id does not match exactly one dialogue of the split, a
            history is not a number of turns, or candidates are not texts.
    """
    opened, turns = open_source(source), data.turns_of(split)
    rows: dict[str, list[int]] = {}
    for i, key in enumerate(turns.ids):
        rows.setdefault(key, []).append(i)
    index = TextIndex(data.texts)
    samples: dict[tuple[int, int], list[Positions]] = {}
    for file in opened.files:
        problems = Problems(PurePosixPath(file).name)
        for line, record in enumerate(_read_sample_rows(opened, file), 1):
            key, h, texts = str(record["dialogue"]), record["history"], record["candidates"]
            matching_rows = rows.get(key, [])
            if len(matching_rows) != 1:
                quantity = "several" if matching_rows else "no"
                problems.add(
                    line, f"{quantity} {split} dialogues have the id {shortened_repr(key)}"
                )
            if type(h) is not int or h < 1:
                problems.add(line, f"history is {shortened_repr(h)}, not a number of turns from 1")
            if not isinstance(texts, list) or not texts:
                problems.add(line, f"candidates is {shortened_repr(texts)}, not a list of texts")
                continue
            stripped = [
                problems.text(line, f"candidate {column}", text).strip()
                for column, text in enumerate(texts, 1)
            ]
            if matching_rows and isinstance(h, int):
                samples.setdefault((matching_rows[0], h), []).append(index.find(stripped))
        problems.raise_if_any()
    arrays = {key: np.concatenate(positions) for key, positions in samples.items()}
    return SamplePool(opened.name, arrays, index.new)


def _read_sample_rows(source: Source, file: str) -> Iterator[dict[str, Any]]:
    try:
        yield from read_records(source, file, ["dialogue", "history", "candidates"])
    except MissingColumnError as error:
        raise UserError(f"{error.finding} Expected dialogue, history and candidates.") from error


# -- metrics -----------------------------------------------------------------------------------


def stack_queries(queries: Sequence[DialogueQueries]) -> RankedQueries:
    """Return the dialogue and the stratum (the subset) of each query."""
    dialogue = np.concatenate([subset.dialogue for subset in queries])
    stratum = np.repeat(np.arange(len(queries)), [len(subset.dialogue) for subset in queries])
    return RankedQueries(dialogue, "dialogues", stratum)


def subset_masks(queries: Sequence[DialogueQueries]) -> dict[str, NDArray[np.bool_]]:
    """Return the mask, (n,), of each subset of queries, by its name."""
    stratum = stack_queries(queries).rating
    return {subset.name: stratum == number for number, subset in enumerate(queries)}


def query_rows(
    data: Dialogues, split: str, queries: Sequence[NextQueries] | Sequence[PlanQueries]
) -> QueryRows:
    """Return queries in readable form: dialogue, history, the last two turns and the answer.

    ``turn_before`` is empty after a single turn. Queries of planning also have the goal and its
    distance.
    """
    ids = data.turns_of(split).ids
    heading, texts = ["dialogue", "history"], ["turn_before", "last_turn", "answer"]
    if isinstance(queries[0], PlanQueries):
        heading, texts = [*heading, "distance"], [*texts, "goal"]
    columns: dict[str, list[str]] = {name: [] for name in (*heading, *texts)}

    def add(name: str, positions: Positions) -> None:
        columns[name] += (data.texts[i] for i in positions.tolist())

    for subset in queries:
        n = len(subset.dialogue)
        columns["dialogue"] += (ids[i] for i in subset.dialogue.tolist())
        columns["history"] += [str(subset.history)] * n
        if isinstance(subset, PlanQueries):
            columns["distance"] += [str(subset.distance)] * n
            add("goal", subset.goals)
            add("answer", subset.candidates[:, 0])
        else:
            add("answer", subset.candidates[subset.answer])
        if subset.history > 1:
            add("turn_before", subset.contexts[:, -2])
        else:
            columns["turn_before"] += [""] * n
        add("last_turn", subset.contexts[:, -1])
    return QueryRows(columns, heading, texts, group_column="history")
