"""Results: their JSON, their order, comparisons, and undefined metrics."""

import json
from dataclasses import replace
from math import nan

import numpy as np
import pytest

from llmcond.base.errors import UserError
from llmcond.base.metrics import DEFAULT_METRICS, Estimate, Metric
from llmcond.data.rows import Rows
from llmcond.evaluation.paired import PairedDifference, bootstrap_metrics, paired_differences
from llmcond.evaluation.results import (
    ComparedSystem,
    RankedQueries,
    Result,
    Results,
    RowCounts,
    Subset,
    best_first,
    compare_with_baseline,
    format_settings,
    score_results,
    take_scored,
)

ABOUT = {"name": "mlp@a+b", "head": "mlp", "prompts": ("a", "b"), "subtract": True, "split": "dev"}
FIGURES = {"spearman": Estimate(0.5, 0.4, 0.6), "accuracy": Estimate(nan)}
DIFFERENCE = PairedDifference(0.125, 0.1, 0.15, 0, 0.01, 0.02, nan, "better")


def make_rows(n_pairs, rating=None):
    n = 2 * n_pairs
    texts = [f"sentence {i // 2}" for i in range(n)]
    values = np.arange(n) % 5 / 4 if rating is None else np.full(n, rating)
    return Rows(texts, texts, ["a", "b"] * n_pairs, values, np.arange(n) + 1, "rows.csv")


def score_similarity(similarity, rows=None, metrics=DEFAULT_METRICS, **options):
    rows = make_rows(10) if rows is None else rows
    return score_results([Result(**ABOUT)], [np.asarray(similarity)], rows, metrics, **options)[0]


def test_result_json_has_fields_of_its_command():
    identity = {key: value for key, value in ABOUT.items() if key != "prompts"}
    identity |= {"prompt": "a+b", "task": "csts"}
    counts = {"n": 6, "n_dropped": 1, "n_pairs": 3, "n_compared": 2, "n_tied": 1}
    figures = {"spearman": 0.5, "spearman_ci": [0.4, 0.6], "accuracy": None}
    shared = {**identity, **counts, "dim": 8, **figures, "accuracy_ci": [None, None]}
    fit = {"selected_on": "dev", "curve": []}
    result = Result(
        **ABOUT, metrics=FIGURES, seeds=(4,), fits=(fit,), dim=8, counts=RowCounts(**counts)
    )
    assert result.to_json() == {**shared, "seed": 4, "selected_on": "dev"}
    deviations = {"spearman_sd": 0.1, "accuracy_sd": None, "seeds": [4]}
    swept = replace(result, about={"settings": {"dim": 8}}, seed_sd={"spearman": 0.1})
    assert swept.to_json() == {**shared, **deviations, "settings": {"dim": 8}}
    compared = replace(
        swept, about={"control": ""}, difference={"spearman": DIFFERENCE}, against="x"
    ).to_json()
    assert compared.pop("difference")["spearman"]["minimum"] is None
    assert compared == {**shared, **deviations, "control": "", "against": "x"}
    json.dumps(compared, allow_nan=False)


def test_subsets_are_at_top_level_or_under_their_kind():
    part = Subset(2, {"spearman": Estimate(0.1, 0, 0.2)}, {"n_pairs": 1}, DIFFERENCE)
    part_json = {"n": 2, "n_pairs": 1, "spearman": 0.1, "spearman_ci": [0, 0.2]}
    kinds = {
        "conditions": {"seen": part},
        "sentences": {"unseen_sentences": part},
        "by_history": {"2": part},
        "subsets": {"new": part},
    }
    result = Result(**ABOUT, metrics=FIGURES, subsets=kinds, held_out=Estimate(0.3, 0.2, 0.4))
    values = result.to_json()
    assert (values["held_out_spearman"], values["held_out_spearman_ci"]) == (0.3, [0.2, 0.4])
    assert values["seen"] == {"n": 2, "spearman": 0.1}
    assert values["n_unseen_sentences"] == 2
    assert values["unseen_sentences"] == {key: part_json[key] for key in part_json if key != "n"}
    assert values["by_history"] == {"2": part_json}
    difference = values["subsets"]["new"].pop("difference")
    assert (difference["value"], difference["verdict"]) == (0.125, "better")
    assert values["subsets"] == {"new": part_json}
    assert result.part("by_history", "2") is part
    assert result.part("by_history", "3") is result.part("cells", "2") is None


def test_best_result_is_first_and_undefined_is_last():
    for name, expected in (("spearman", [0.5, 0.1]), ("mean_rank", [0.1, 0.5])):
        results = best_first(Result(**ABOUT, metrics={name: Estimate(v)}) for v in (0.1, nan, 0.5))
        assert [result.main.value for result in results][:2] == expected
        assert len(results) == 3


def test_systems_are_compared_with_baseline_of_their_head():
    rows = make_rows(40)
    rng = np.random.default_rng(0)
    names = [("mlp", "a"), ("mlp", "b"), ("mlp", "c"), ("none", "b"), ("none", "a")]
    systems = [
        ComparedSystem(
            (head, True),
            Result(
                **{**ABOUT, "name": f"{head}@{prompt}", "head": head, "prompts": (prompt,)},
                about={"control": "shuffled" if prompt == "c" else ""},
            ),
            (rows.rating + error * rng.standard_normal(80))[None].astype(np.float32),
        )
        for (head, prompt), error in zip(names, (1, 0.1, 2, 0.5, 3), strict=True)
    ]
    results = compare_with_baseline(systems, "a", rows)
    assert [result.name for result in results[:2]] == ["mlp@b", "none@b"]  # the best ones
    by_name = {result.name: result for result in results}
    against = {name: result.against for name, result in by_name.items() if result.against}
    assert against == {"mlp@b": "mlp@a", "mlp@c": "mlp@a", "none@b": "none@a"}
    resampled = bootstrap_metrics([s.similarity for s in systems], rows.rating, rows.pair)
    expected = paired_differences(resampled, {0: [1, 2], 4: [3]}, controls=[2])
    for i, name in ((1, "mlp@b"), (2, "mlp@c"), (3, "none@b")):
        compared = by_name[name].difference
        assert compared == {metric: expected[i][metric] for metric in compared}
        assert by_name[name].metrics == resampled.estimates(i)
    assert by_name["mlp@a"].difference is None
    # A name comes before a prompt: a system may be a run whose folder has the name of a prompt.
    named = [
        replace(s, group="", result=replace(s.result, name=name))
        for name, s in zip("xay", systems, strict=False)
    ]
    against = {r.name: r.against for r in compare_with_baseline(named, "a", rows)}
    assert against == {"x": "a", "a": None, "y": "a"}


@pytest.mark.filterwarnings("error")
def test_undefined_metrics_are_null():
    constant = score_similarity(np.full((1, 20), 0.1)).to_json()
    for name in ("spearman", "pearson"):
        assert (constant[name], constant[f"{name}_ci"]) == (None, [None, None])
    assert constant["accuracy"] == 0.5
    unrated = score_similarity(np.zeros((1, 20)), make_rows(10, nan)).to_json()
    assert (unrated["n"], unrated["n_dropped"], unrated["accuracy"]) == (0, 20, None)
    equally_rated = score_similarity(np.arange(20.0)[None], make_rows(10, 0.5)).to_json()
    assert [equally_rated[name] for name in ("spearman", "pearson", "accuracy")] == [None] * 3
    assert (equally_rated["n_compared"], equally_rated["n_tied"]) == (0, 10)


def test_invalid_predictions_and_names_of_metrics_are_rejected():
    predicted = np.zeros((2, 20))  # three rows of one seed, one of them also of the other
    predicted[0, [3, 5, 19]] = predicted[1, 5] = nan
    with pytest.raises(UserError, match=r"mlp@a\+b predicts NaN or infinity for 3 rated rows"):
        score_similarity(predicted)
    with pytest.raises(UserError, match="a metric cannot be called dim"):
        score_similarity(np.zeros((1, 20)), metrics=[Metric("dim", lambda *_: 0.0)])


def test_settings_are_shown_as_typed():
    settings = {"dim": 4, "matryoshka": (16, 8), "activation": "gelu"}
    assert format_settings(settings) == "dim=4 matryoshka=16,8 activation=gelu"


def test_rows_and_queries_are_counted():
    rows = make_rows(3)
    rows.rating[:3] = nan
    counts = RowCounts.of(rows)
    assert counts == RowCounts(n=3, n_dropped=3, n_pairs=2, n_compared=1, n_tied=0)
    assert counts.text == "3 rated rows of 2 sentence pairs"
    assert counts.details.startswith("3 rows of 2 sentence pairs, 3 unrated dropped; accuracy ov")
    assert (counts.resampled, counts.n_resampled) == ("sentence pairs", 2)
    clusters = np.array([0, 0, 1, 2]), np.array([5, 6, 7, 7])
    queries = RankedQueries(np.array([0, 1, 2, 0]), "triples", None, clusters, "entities")
    counts = RowCounts.of(queries)
    assert counts.text == counts.details == "4 queries of 3 triples"
    assert (counts.resampled, counts.n_resampled, counts.to_json()) == ("entities", 3, {"n": 4})
    selected = take_scored(queries, np.array([True, False, False, True]))
    assert selected.pair.tolist() == [0, 0]
    assert [ids.tolist() for ids in selected.crossed] == [[0, 2], [5, 7]]
    assert selected.rating.tolist() == [0, 0]


def test_results_are_shown_as_table_and_as_data_frame():
    baseline = Result(**{**ABOUT, "name": "<b>"}, metrics=FIGURES)
    results = Results((replace(baseline, difference={"spearman": DIFFERENCE}), baseline))
    html = results._repr_html_()
    assert html.startswith("<p><b>Results</b> </p><table>")
    assert "&lt;b&gt;" in html
    assert "50.0 [40.0, 60.0]" in html
    figures = {"spearman": Estimate(0.5), "accuracy": Estimate(nan), "pearson": Estimate(0.5)}
    undefined = Results((replace(baseline, metrics=figures),))._repr_html_()
    assert undefined.count("[") == 0  # an interval that is undefined is left out
    assert "<td>undefined" in undefined
    frame = Results((baseline,)).to_pandas()
    assert frame["spearman_low"].tolist() == [0.4]
    assert "spearman_ci" not in frame
