"""Analyses of dialogue runs, checked against loops over pairs and candidates."""

import csv
import shutil

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.vectors import normalize

import llmcond
from llmcond.errors import UserError
from llmcond.runs import open_any_run


@pytest.fixture(scope="module")
def run(dialogue_run, tmp_path_factory):
    run = tmp_path_factory.mktemp("analysed") / "run"
    shutil.copytree(dialogue_run, run)
    llmcond.fit_head(run=run, head="ccl", set={"epochs": "2"})
    return run


def read_roles(run, name):
    """Return the three roles of each utterance of the run's texts, by a head of the run."""
    opened = open_any_run(run)
    from llmcond.kinds.dialogue.examples import DialogueExamples

    saved = opened.load_head(name)
    features = DialogueExamples(opened).features(saved.view).read(slice(None))
    return opened.data.turns_of("test"), *saved.head.before(features), saved.head.after(features)


def context_terms(b1, b2, context, score):
    """Return the unit vectors of a context's terms, each with the turns that it contains."""
    if score == "bi":
        return [((i,), normalize(b2[u])) for i, u in enumerate(context)]
    return [
        ((i, j), normalize(b1[context[i]] + b2[context[j]]))
        for j in range(len(context))
        for i in range(j)
    ]


@pytest.mark.parametrize("score", ["bi", "average"])
def test_similarities_match_loops_over_candidates(run, score):
    result = llmcond.analyse(run=run, head=["rank"], what=["similarity", "turns"])
    assert [(row["name"], row["score"]) for row in result["similarity"]] == [
        ("none@separate", "bi"),
        ("none@separate", "average"),
        ("rank@separate", "bi"),
        ("rank@separate", "average"),
    ]
    turns, b1, b2, after = read_roles(run, "rank@separate")
    correct, random, by_turn = [], [], []
    subsets = [(h, *turns.contexts(h)[1:]) for h in range(2, 9)]
    subsets = [subset for subset in subsets if len(set(subset[2].tolist())) > 1]
    last_history = subsets[-1][0]
    for h, contexts, answers in subsets:
        for context, answer in zip(contexts, answers, strict=True):
            terms = context_terms(b1, b2, context, score)
            others = [other for other in answers if other != answer]
            cosines = {turn: (v @ after[answer], np.mean(v @ after[others].T)) for turn, v in terms}
            correct.append(np.mean([first for first, _ in cosines.values()]))
            random.append(np.mean([second for _, second in cosines.values()]))
            if h == last_history:
                by_turn.append(
                    [
                        np.mean([a - b for parts, (a, b) in cosines.items() if turn in parts])
                        for turn in range(h)
                    ]
                )
    row = next(
        row
        for row in result["similarity"]
        if (row["name"], row["score"]) == ("rank@separate", score)
    )
    assert result["n"] == len(correct)
    assert row["correct"] == pytest.approx(np.mean(correct), abs=1e-5)
    assert row["random"] == pytest.approx(np.mean(random), abs=1e-5)
    assert row["difference"] == pytest.approx(row["correct"] - row["random"], abs=1e-6)
    assert row["difference_ci"][0] < row["difference"] < row["difference_ci"][1]
    row = next(
        row for row in result["turns"] if (row["name"], row["score"]) == ("rank@separate", score)
    )
    assert (row["history"], row["n"]) == (last_history, len(by_turn))
    assert [turn["turn"] for turn in row["turns"]] == list(range(1, last_history + 1))
    differences = [turn["difference"] for turn in row["turns"]]
    np.testing.assert_allclose(differences, np.mean(by_turn, axis=0), atol=1e-5)


def test_bi_encoder_is_analysed_without_pairs(capsys, run, tmp_path):
    command = ("analyse", "--run", run, "--head", "ccl", "rank", "--out", tmp_path)
    result = run_json(capsys, *command, "--figure-format", "svg")
    names = [(row["name"].split("@")[0], row["score"]) for row in result["turns"][2:]]
    assert names == [("ccl", "bi"), ("rank", "bi"), ("rank", "average")]
    with (tmp_path / "turns-data.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["series"] for row in rows} == {
        f"{row['name']}, {row['score']}" for row in result["turns"]
    }
    assert len(rows) == sum(len(row["turns"]) for row in result["turns"])
    assert (tmp_path / "turns.svg").read_bytes().startswith(b"<svg")


def test_analysis_of_other_task_is_rejected(capsys, run, tiny_run):
    message = run_rejected(capsys, "analyse", "--run", run, "--what", "norms")
    assert (
        "--what norms is not an analysis of the task dialogue. Choose from similarity, turns"
        in (message)
    )
    with pytest.raises(UserError, match=r"not an analysis of the task csts\. Choose from isotropy"):
        llmcond.analyse(run=tiny_run, what=["turns"])
    assert "no fitted head 'missing'" in run_rejected(
        capsys, "analyse", "--run", run, "--head", "missing"
    )
