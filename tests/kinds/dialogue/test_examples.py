"""Queries, candidate pools and ranks of dialogues, checked by hand and against loops."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcond.base.errors import UserError
from llmcond.kinds.dialogue.data import Dialogues, Turns
from llmcond.kinds.dialogue.examples import (
    RandomPool,
    RetrievedPool,
    next_queries,
    plan_queries,
    rank_next,
    rank_plans,
    read_samples,
)

#: Seven texts. The first, "x", occurs in all dialogues but one and twice as the third turn.
TEXTS = ("x", "a", "b", "c", "d", "e", "f")
DIALOGUES = [[1, 2, 0, 3], [0, 4, 0], [5, 6], [2, 0, 6, 1, 5]]


@pytest.fixture
def data() -> Dialogues:
    turns = Turns.from_lists(DIALOGUES, ["p", "q", "r", "s"])
    return Dialogues("made", TEXTS, {"train": turns, "test": turns})


@pytest.fixture(scope="module")
def random_dialogues() -> Dialogues:
    """Return 40 dialogues of 3 to 9 turns, some of whose utterances are the same."""
    rng = np.random.default_rng(0)
    dialogues = [rng.integers(120, size=length).tolist() for length in rng.integers(3, 10, size=40)]
    turns = Turns.from_lists(dialogues, [str(i) for i in range(40)])
    return Dialogues("made", [f"t{i}" for i in range(120)], {"test": turns})


def test_candidates_are_answers_of_history_or_of_all(data):
    two, three = next_queries(data, "test", [3, 2])
    assert (two.history, two.dialogue.tolist()) == (2, [0, 1, 3])
    assert two.contexts.tolist() == [[1, 2], [0, 4], [2, 0]]
    assert two.candidates.tolist() == [0, 0, 6]
    assert two.answer.tolist() == [0, 1, 2]
    assert two.repeated.tolist() == [True, True, False]
    assert (three.candidates.tolist(), three.dialogue.tolist()) == ([3, 1], [0, 3])
    two, three = next_queries(data, "test", [2, 3], "all")
    assert two.candidates.tolist() == three.candidates.tolist() == [0, 0, 6, 3, 1]
    assert (two.answer.tolist(), three.answer.tolist()) == ([0, 1, 2], [3, 4])


def test_ranks_are_those_of_loops_for_any_block_size(random_dialogues):
    vectors = np.random.default_rng(1).integers(-2, 3, size=(120, 3)).astype(np.float32)
    block_sizes = []

    def score(contexts, candidates):
        assert (np.diff(candidates) > 0).all()  # each text is scored once
        block_sizes.append(len(contexts))
        return vectors[contexts].sum(axis=1) @ vectors[candidates].T

    queries = next_queries(random_dialogues, "test", pool="all")
    expected = []
    for query in queries:
        for context, answer in zip(query.contexts, query.answer, strict=True):
            scores = vectors[query.candidates] @ vectors[context].sum(axis=0)
            above = sum(scores > scores[answer])
            expected.append((1 + above, above + sum(scores == scores[answer])))
    for limit in ({}, {"most_scores": 3 * len(queries[0].candidates)}):
        ranks = rank_next(queries, score, **limit)
        actual = zip(
            ranks.resolve_ties("optimistic"), ranks.resolve_ties("pessimistic"), strict=True
        )
        assert list(actual) == expected
    assert len(block_sizes[:7]) == len(queries)
    assert max(block_sizes[7:]) == 3


# -- planning ----------------------------------------------------------------------------------


def test_goals_follow_answers_at_distance(data):
    near, far = plan_queries(data, "test", RandomPool(True), histories=[2], distances=[2, 1])
    assert [queries.name for queries in (near, far)] == ["2+1", "2+2"]
    assert (near.dialogue.tolist(), near.goals.tolist()) == ([0, 3], [3, 1])
    assert (far.dialogue.tolist(), far.goals.tolist()) == ([3], [5])
    # The other two of the three answers are the candidates. One with the same text as the
    # answer is not counted as wrong.
    assert near.candidates[:, 0].tolist() == [0, 6]
    assert [sorted(row) for row in near.candidates[:, 1:].tolist()] == [[0, 6], [0, 0]]
    assert near.left_out.sum(axis=1).tolist() == [1, 0]
    assert far.candidates.tolist() == near.candidates[1:].tolist()


def test_equal_texts_are_not_counted_as_wrong(data):
    (queries,) = plan_queries(data, "test", RandomPool(True), [2], [1])
    calls = []

    def score(contexts, candidates, goals):
        calls.append((contexts.tolist(), goals.tolist()))
        # All candidates with the text of the correct answer have its score.
        return np.where(candidates == candidates[:, :1], 0.5, 1.0)

    ranks = rank_plans([queries], score, block=1)
    assert ranks.resolve_ties("pessimistic").tolist() == [2, 3]
    assert calls == [([[1, 2]], [3]), ([[2, 0]], [1])]


@pytest.mark.parametrize("same_depth", [True, False])
def test_random_candidates_come_from_other_dialogues(random_dialogues, same_depth):
    pool = RandomPool(same_depth, size=7, seed=3)
    turns = random_dialogues.splits["test"]
    for h in (2, 5):
        rows, _, _ = turns.contexts(h)
        candidates = pool(turns, h)
        assert candidates.shape == (len(rows), 7)
        for row, row_candidates in zip(rows.tolist(), candidates, strict=True):
            others = [turns.utterances_of(i) for i in range(len(turns)) if i != row]
            if same_depth:
                others = [other[h : h + 1] for other in others]
            available = np.bincount(np.concatenate(others), minlength=120)
            assert (np.bincount(row_candidates, minlength=120) <= available).all()
        np.testing.assert_array_equal(candidates, pool(turns, h))
        assert not np.array_equal(candidates, replace(pool, seed=4)(turns, h))
    assert RandomPool(True, size=10_000)(turns, 8).shape[1] == len(turns.contexts(8)[0]) - 1


@pytest.mark.parametrize("h", [1, 4])
def test_retrieved_candidates_are_nearest_utterances(random_dialogues, h):
    turns = random_dialogues.splits["test"]
    features = np.random.default_rng(2).standard_normal((120, 6)).astype(np.float32)
    normalized = features / np.linalg.norm(features, axis=1, keepdims=True)
    candidates = RetrievedPool(features, 9)(turns, h)
    rows, contexts, _ = turns.contexts(h)
    utterances = np.unique(turns.utterances)
    for row, context, nearest in zip(rows.tolist(), contexts, candidates, strict=True):
        similarities = normalized @ normalized[context[-2:]].mean(axis=0)
        others = [i for i in utterances.tolist() if i not in turns.utterances_of(row)]
        assert nearest.tolist() == sorted(others, key=lambda i: -similarities[i])[:9]


def write_samples(path: Path, *rows) -> Path:
    names = ("dialogue", "history", "candidates")
    lines = [json.dumps(dict(zip(names, row, strict=False))) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_candidates_can_be_read_from_samples_file(data, tmp_path: Path):
    rows = [("p", 2, ["new", "x"]), ("q", 2, ["f"]), ("s", 2, ["b", "new"]), ("s", 2, ["other"])]
    pool = read_samples(write_samples(tmp_path / "s.jsonl", *rows), data, "test")
    assert pool.extra_texts == ["new", "other"]
    (queries,) = plan_queries(data, "test", pool, [2], [1])
    assert queries.candidates.tolist() == [[0, 7, 0, 0], [6, 2, 7, 8]]
    # Short rows are padded with the correct answer, which is left out.
    assert queries.left_out.tolist() == [[False, False, True, True], [False] * 4]
    with pytest.raises(UserError, match=r"s.jsonl has no candidates after 1 turns for 4 of 4 .* p"):
        plan_queries(data, "test", pool, [1], [1])
    for row, message in (
        (("z", 2, ["a"]), "row 1 of s.jsonl: no test dialogues have the id 'z'"),
        (("p", 2, []), r"candidates is \[\], not a list of texts"),
        (("p", 2), "has no column 'candidates'.*Expected dialogue, hist"),
    ):
        with pytest.raises(UserError, match=message):
            read_samples(write_samples(tmp_path / "s.jsonl", row), data, "test")
