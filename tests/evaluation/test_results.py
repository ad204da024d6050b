"""Results: their JSON, their order, and undefined metrics."""

import json
import re
import sys
from dataclasses import replace
from math import nan

import numpy as np
import pytest

from llmcond.data.rows import Rows
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.paired import PairedDifference
from llmcond.evaluation.results import (
    Result,
    Results,
    RowCounts,
    best_first,
    flatten_json,
    score_results,
)
from llmcond.metrics import DEFAULT_METRICS, Estimate, Metric

ABOUT = {"name": "mlp@a+b", "head": "mlp", "prompts": ("a", "b"), "subtract": True, "split": "dev"}
METRICS = {"spearman": Estimate(0.5, 0.4, 0.6), "accuracy": Estimate(nan)}


def make_rows(n_pairs, rating=None):
    n = 2 * n_pairs
    texts = [f"sentence {i // 2}" for i in range(n)]
    values = np.arange(n) % 5 / 4 if rating is None else np.full(n, rating)
    return Rows(texts, texts, ["a", "b"] * n_pairs, values, np.arange(n) + 1, "rows.csv")


def score_similarity(similarity, rows=None, metrics=DEFAULT_METRICS, **options):
    rows = make_rows(10) if rows is None else rows
    return score_results([Result(**ABOUT)], [np.asarray(similarity)], rows, metrics, **options)[0]


def test_result_json_has_fields_of_its_command():
    model_keys = {"name", "head", "prompt", "subtract", "split", "task", "dim"}
    counts = {"n", "n_dropped", "n_pairs", "n_compared", "n_tied"}
    figures = {"spearman", "spearman_ci", "accuracy", "accuracy_ci"}
    deviations = {"spearman_sd", "accuracy_sd"}
    fit = {"selected_on": "dev", "curve": [], "best_epoch": 3, "steps_per_epoch": 2}
    fitted = {**ABOUT, "metrics": METRICS, "seeds": (4,), "fits": (fit,), "dim": 8}
    result_json = Result(**fitted).to_json()
    assert set(result_json) == model_keys | counts | figures | {"seed", "selected_on"}
    assert (
        result_json["prompt"],
        result_json["task"],
        result_json["seed"],
        result_json["selected_on"],
    ) == (
        "a+b",
        "csts",
        4,
        "dev",
    )
    assert (result_json["spearman_ci"], result_json["accuracy"], result_json["accuracy_ci"]) == (
        *([0.4, 0.6], None),
        [None, None],
    )
    difference = PairedDifference(0.1, nan, nan, 0.0, nan, nan, nan, "no evidence")
    differences = {"spearman": difference}
    compared_json = Result(
        **fitted, about={"control": ""}, difference=differences, against="x"
    ).to_json()
    compared = {"seeds", "control", "difference", "against"}
    assert set(compared_json) == model_keys | counts | figures | deviations | compared
    assert compared_json["difference"]["spearman"]["low"] is None
    swept_json = Result(**fitted, about={"settings": {"dim": 8}}).to_json()
    swept = {"settings", "seeds"}
    assert set(swept_json) == model_keys | counts | figures | deviations | swept
    json.dumps([result_json, compared_json, swept_json], allow_nan=False)


def test_prompts_and_subtraction_are_not_read_from_name():
    titles = {
        "mlp@a+b": "mlp",
        "mlp@a+b+c": "mlp",
        "mlp@home": "mlp@home",
        "mine": "mine",
    }
    for name, title in titles.items():
        assert Result(**{**ABOUT, "name": name}).title == title
    # A prompt named c does not mean that nothing is subtracted.
    result = Result(**{**ABOUT, "name": "mlp@a+c", "prompts": ("a", "c")})
    assert (result.title, result.prompt, result.subtract) == ("mlp", "a+c", True)


def test_best_result_is_first_and_undefined_is_last():
    values = (0.1, nan, 0.5)
    results = best_first(Result(**ABOUT, metrics={"spearman": Estimate(v)}) for v in values)
    assert [result.main.value for result in results][:2] == [0.5, 0.1]
    assert len(results) == 3


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


def test_non_finite_predictions_are_rejected():
    with pytest.raises(UserError, match=r"mlp@a\+b predicts NaN or infinity for 1 rated rows"):
        score_similarity(np.append(np.zeros(19), nan)[None])


def test_metric_cannot_have_name_of_another_column():
    with pytest.raises(UserError, match="a metric cannot be called dim"):
        score_similarity(np.zeros((1, 20)), metrics=[Metric("dim", lambda *_: 0.0)])


def test_counts_ignore_unrated_rows():
    rows = make_rows(3)
    rows.rating[:3] = nan
    counts = RowCounts(n=3, n_dropped=3, n_pairs=2, n_compared=1, n_tied=0)
    assert RowCounts.of(rows) == counts


def test_results_are_shown_as_table_in_notebooks(monkeypatch):
    results = Results((Result(**{**ABOUT, "name": "<b>"}, metrics=METRICS),))
    assert len(results) == 1
    assert results[0] in results
    html = results._repr_html_()
    assert "&lt;b&gt;" in html
    assert html.startswith("<p><b>Results</b> </p><table>")
    assert "50.0 [40.0, 60.0]" in html
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LlmcondError, match="pip install pandas"):
        results.to_pandas()


def test_compared_results_are_shown_with_their_difference():
    difference = PairedDifference(0.125, 0.1, 0.15, 0, 0.01, 0.02, 0.1, "better")
    baseline = Result(**ABOUT, metrics=METRICS)
    better = replace(baseline, difference={"spearman": difference})
    html = Results((better, baseline))._repr_html_()
    cells = re.findall("<td>(.*?) *</td>", html)
    assert cells[len(cells) // 2 - 3 : len(cells) // 2] == ["+12.5 [10.0, 15.0]", "0.02", "better"]
    assert cells[-3:] == ["", "", ""]


def test_results_convert_to_data_frame():
    pytest.importorskip("pandas")
    frame = Results((Result(**ABOUT, metrics=METRICS),)).to_pandas()
    assert frame["spearman_low"].tolist() == [0.4]
    assert "spearman_ci" not in frame


def test_nested_values_have_separate_columns():
    values = {
        "held_out_spearman_ci": [0.1, 0.2],
        "unseen_sentences": {"n_pairs": 3, "f_ci": [1, 2]},
    }
    assert flatten_json(values) == {
        "held_out_spearman_low": 0.1,
        "held_out_spearman_high": 0.2,
        "unseen_sentences_n_pairs": 3,
        "unseen_sentences_f_low": 1,
        "unseen_sentences_f_high": 2,
    }
