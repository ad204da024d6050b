"""Queries, pools and ranks of dialogues: by hand, against loops, and by what they must not hold."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmcond.errors import UserError
from llmcond.kinds.dialogue.data import Dialogues, Turns
from llmcond.kinds.dialogue.queries import (
    PLAN_METRICS,
    RandomPool,
    RetrievedPool,
    index_candidates,
    measure_subsets,
    next_queries,
    plan_queries,
    rank_next,
    rank_plans,
    read_samples,
    resolve_histories,
    stack_queries,
)
from llmcond.metrics import choose_metrics

#: Seven texts; the first is said in every dialogue, and "x" follows twice after two turns.
TEXTS = ("x", "a", "b", "c", "d", "e", "f")
TALKS = [[1, 2, 0, 3], [0, 4, 0], [5, 6], [2, 0, 6, 1, 5]]


@pytest.fixture
def data() -> Dialogues:
    turns = Turns.from_lists(TALKS, ["p", "q", "r", "s"])
    return Dialogues("made", TEXTS, {"train": turns, "test": turns})


@pytest.fixture(scope="module")
def many() -> Dialogues:
    """Return 40 dialogues of 3 to 9 turns, some of whose utterances are the same."""
    rng = np.random.default_rng(0)
    talks = [rng.integers(120, size=length).tolist() for length in rng.integers(3, 10, size=40)]
    turns = Turns.from_lists(talks, [str(i) for i in range(40)])
    return Dialogues("made", [f"t{i}" for i in range(120)], {"test": turns})


# -- queries and ranks -------------------------------------------------------------------------


def test_candidates_are_the_answers_at_the_same_depth(data):
    two, three = next_queries(data, "test", [3, 2])
    assert (two.history, two.dialogue.tolist()) == (2, [0, 1, 3])
    assert two.contexts.tolist() == [[1, 2], [0, 4], [2, 0]]
    assert two.candidates.tolist() == [0, 0, 6]
    assert two.answer.tolist() == [0, 1, 2]
    assert two.repeated.tolist() == [True, True, False]
    assert (three.candidates.tolist(), three.dialogue.tolist()) == ([3, 1], [0, 3])


def test_all_answers_can_be_the_candidates_of_every_length(data):
    two, three = next_queries(data, "test", [2, 3], "all")
    assert two.candidates.tolist() == three.candidates.tolist() == [0, 0, 6, 3, 1]
    assert (two.answer.tolist(), three.answer.tolist()) == ([0, 1, 2], [3, 4])


def test_candidates_of_ones_own_may_be_new_texts(data):
    pool, further = index_candidates(data, ["new", "x", " c", "f", "a", "new", "c"])
    assert (pool.tolist(), further) == ([7, 0, 3, 6, 1, 7, 3], ["new"])
    two, three = next_queries(data, "test", [2, 3], pool)
    assert (two.answer.tolist(), three.answer.tolist()) == ([1, 1, 3], [2, 4])
    assert three.repeated.tolist() == [True, False]
    with pytest.raises(UserError, match="lack 1 of 3 correct answers, the first one 'f'"):
        next_queries(data, "test", [2], pool[:3])


def test_ranks_are_those_of_each_row_whatever_the_blocks(many):
    vectors = np.random.default_rng(1).integers(-2, 3, size=(120, 3)).astype(np.float32)
    calls = []

    def score(contexts, candidates):
        assert (np.diff(candidates) > 0).all()
        calls.append((len(contexts), id(candidates)))
        return vectors[contexts].sum(axis=1) @ vectors[candidates].T

    asked = next_queries(many, "test", pool="all")
    ranks = rank_next(asked, score)
    assert len(calls) == len(asked) == 7
    assert len({place for _, place in calls}) == 1
    blocked = rank_next(asked, score, most_scores=3 * len(asked[0].candidates))
    assert max(calls[7:])[0] == 3
    expected = []
    for one in asked:
        for context, answer in zip(one.contexts, one.answer, strict=True):
            scores = vectors[one.candidates] @ vectors[context].sum(axis=0)
            above = sum(scores > scores[answer])
            expected.append((1 + above, above + sum(scores == scores[answer])))
    for found in (ranks, blocked):
        got = np.stack(
            [found.resolve_ties("optimistic"), found.resolve_ties("pessimistic")], axis=1
        )
        np.testing.assert_array_equal(got, expected)
    assert (ranks.resolve_ties("optimistic") < ranks.resolve_ties("pessimistic")).any()


def test_histories_are_those_that_two_dialogues_go_beyond(data, many):
    assert resolve_histories(data, "test") == [2, 3]
    assert resolve_histories(data, "test", [3, 1, 3]) == [1, 3]
    assert resolve_histories(many, "test") == list(range(2, 9))
    for asked in ([2, 4], [0], [-1, 2]):
        with pytest.raises(UserError, match=r"the longest have 5 and 4 turns.*from 1 to 3"):
            next_queries(data, "test", asked)
    single = Dialogues("made", TEXTS, {"test": Turns.from_lists(TALKS[:1])})
    with pytest.raises(UserError, match="Add data"):
        next_queries(single, "test")
    with pytest.raises(UserError, match="has no dev dialogues; it has train, test"):
        next_queries(data, "dev")


def test_figures_are_means_over_histories_by_dialogue(many):
    asked = next_queries(many, "test")
    rng = np.random.default_rng(3)
    queries = stack_queries(asked)
    n = len(queries.pair)
    systems = [rng.integers(1, 20, size=(1, n)).astype(float) for _ in range(2)]
    metrics = choose_metrics(["average_rank", "average_rank_micro", "hits@1"])
    overall, parts = measure_subsets(asked, systems, metrics)

    assert (queries.unit, len(queries.rated)) == ("dialogues", n)
    np.testing.assert_array_equal(queries.pair, np.concatenate([one.dialogue for one in asked]))
    assert list(parts) == [str(h) for h in range(2, 9)]
    assert sum(own[0].n for own in parts.values()) == n
    for i, ranks in enumerate(systems):
        by_history = [ranks[0, queries.rating == k].mean() for k in range(len(asked))]
        found = overall[i].metrics
        assert found["average_rank"].value == pytest.approx(np.mean(by_history))
        assert found["average_rank_micro"].value == pytest.approx(ranks.mean())
        got = [own[i].metrics["average_rank"].value for own in parts.values()]
        np.testing.assert_allclose(got, by_history)
        assert found["average_rank"].low < found["average_rank"].value < found["average_rank"].high


# -- planning ----------------------------------------------------------------------------------


def test_goals_are_so_many_turns_later(data):
    one, two = plan_queries(data, "test", RandomPool(True), histories=[2], distances=[2, 1])
    assert [own.name for own in (one, two)] == ["2+1", "2+2"]
    assert (one.dialogue.tolist(), one.goals.tolist()) == ([0, 3], [3, 1])
    assert (two.dialogue.tolist(), two.goals.tolist()) == ([3], [5])
    # Of three answers the two others are the candidates; the same words are no wrong answer.
    assert one.candidates[:, 0].tolist() == [0, 6]
    assert [sorted(own) for own in one.candidates[:, 1:].tolist()] == [[0, 6], [0, 0]]
    assert one.left_out.sum(axis=1).tolist() == [1, 0]
    assert two.candidates.tolist() == one.candidates[1:].tolist()


def test_equal_texts_are_not_counted_as_wrong(data):
    (asked,) = plan_queries(data, "test", RandomPool(True), [2], [1])
    seen = []

    def score(contexts, candidates, goals):
        seen.append((contexts.tolist(), goals.tolist()))
        # All candidates with the text of the right one score as it does.
        return np.where(candidates == candidates[:, :1], 0.5, 1.0)

    ranks = rank_plans([asked], score, block=1)
    assert ranks.resolve_ties("pessimistic").tolist() == [2, 3]
    assert seen == [([[1, 2]], [3]), ([[2, 0]], [1])]


@pytest.mark.parametrize(
    "pool", [RandomPool(True, size=7, seed=3), RandomPool(False, size=7, seed=3)]
)
def test_drawn_candidates_are_of_other_dialogues(many, pool):
    turns = many.splits["test"]
    for h in (2, 5):
        rows, _, _ = turns.contexts(h)
        found = pool(turns, h)
        assert found.shape == (len(rows), 7)
        for row, own in zip(rows.tolist(), found, strict=True):
            others = [turns.utterances_of(i) for i in range(len(turns)) if i != row]
            if pool.same_depth:
                others = [other[h : h + 1] for other in others]
            among = np.bincount(np.concatenate(others), minlength=120)
            assert (np.bincount(own, minlength=120) <= among).all()
        np.testing.assert_array_equal(found, pool(turns, h))
        assert not np.array_equal(found, replace(pool, seed=4)(turns, h))
    assert RandomPool(True, size=10_000)(turns, 8).shape[1] == len(turns.contexts(8)[0]) - 1


@pytest.mark.parametrize("h", [1, 4])
def test_retrieved_candidates_are_the_nearest_of_a_sort(many, h):
    turns = many.splits["test"]
    features = np.random.default_rng(2).standard_normal((120, 6)).astype(np.float32)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    found = RetrievedPool(features, 9)(turns, h)
    rows, contexts, _ = turns.contexts(h)
    said = np.unique(turns.utterances)
    for row, context, own in zip(rows.tolist(), contexts, found, strict=True):
        near = unit @ unit[context[-2:]].mean(axis=0)
        others = [i for i in said.tolist() if i not in turns.utterances_of(row)]
        assert own.tolist() == sorted(others, key=lambda i: -near[i])[:9]


def test_a_plan_that_no_dialogue_is_long_enough_for_is_refused(data):
    for histories, distances in (([2, 3], [2]), ([2], [0]), ([0], [1])):
        with pytest.raises(UserError, match="the longest of test has 5"):
            plan_queries(data, "test", RandomPool(True), histories, distances)
    single = Dialogues("made", TEXTS, {"test": Turns.from_lists(TALKS[:1])})
    for pool in (RandomPool(True), RandomPool(False), RetrievedPool(np.ones((7, 2)))):
        with pytest.raises(UserError, match="no candidates in addition to the answer"):
            plan_queries(single, "test", pool, [2], [1])


def write_samples(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sample(dialogue, history, *candidates) -> dict:
    return {"dialogue": dialogue, "history": history, "candidates": list(candidates)}


def test_candidates_may_be_samples_from_a_file(data, tmp_path: Path):
    rows = [sample("p", 2, "new", "x"), sample("q", 2, "f"), sample("s", 2, "b", "new"),
            sample("s", 2, "other")]  # fmt: skip
    pool = read_samples(write_samples(tmp_path / "s.jsonl", rows), data, "test")
    assert pool.extra_texts == ["new", "other"]
    (asked,) = plan_queries(data, "test", pool, [2], [1])
    assert asked.candidates.tolist() == [[0, 7, 0, 0], [6, 2, 7, 8]]
    # What fills up is the right answer itself, which is left out.
    assert asked.left_out.tolist() == [[False, False, True, True], [False] * 4]
    with pytest.raises(UserError, match=r"s.jsonl has no candidates after 1 turns for 4 of 4 .* p"):
        plan_queries(data, "test", pool, [1], [1])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (sample("z", 2, "a"), "row 1 of s.jsonl: no test dialogues have the id 'z'"),
        (sample("p", "2", "a"), "history is '2', not a number of turns"),
        (sample("p", True, "a"), "history is True, not a number of turns"),
        (sample("p", 2), r"candidates is \[\], not a list of texts"),
        (sample("p", 2, "a", ""), "candidate 2 is empty"),
        (sample("p", 2, "a", 3), "candidate 2 is 3, not a text"),
        ({"dialogue": "p", "history": 2}, "has no column 'candidates'.*Expected dialogue, hist"),
    ],
)
def test_samples_that_are_wrong_are_told_by_row(data, tmp_path: Path, row, message):
    path = write_samples(tmp_path / "s.jsonl", [row])
    with pytest.raises(UserError, match=message):
        read_samples(path, data, "test")


def test_planning_figures_count_each_cell_the_same(many):
    asked = plan_queries(many, "test", RandomPool(False, size=20), [2, 5], [1, 2])
    rng = np.random.default_rng(4)
    ranks = rank_plans(
        asked, lambda contexts, candidates, goals: rng.random(candidates.shape)
    ).resolve_ties()
    overall, cells = measure_subsets(asked, [ranks[None]], PLAN_METRICS)
    assert list(cells) == ["2+1", "2+2", "5+1", "5+2"]
    assert len({own[0].n for own in cells.values()}) > 1
    for metric in PLAN_METRICS:
        each = [own[0].metrics[metric.name].value for own in cells.values()]
        assert overall[0].metrics[metric.name].value == pytest.approx(np.mean(each))
