"""Results as values: their JSON, their order, and what is undefined."""

import json
import sys
from math import nan

import numpy as np
import pytest

from llmcond.data.rows import Rows
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.paired import PairedDifference
from llmcond.evaluation.results import (
    ComparedResult,
    Result,
    Results,
    RowCounts,
    SweptResult,
    best_first,
    score_results,
)
from llmcond.metrics import DEFAULT_METRICS, Estimate, Metric

ABOUT = {"name": "mlp@a+b", "head": "mlp", "prompts": ("a", "b"), "subtract": True, "split": "dev"}
METRICS = {"spearman": Estimate(0.5, 0.4, 0.6), "accuracy": Estimate(nan)}


def rows(n_pairs, rating=None):
    n = 2 * n_pairs
    texts = [f"sentence {i // 2}" for i in range(n)]
    values = np.arange(n) % 5 / 4 if rating is None else np.full(n, rating)
    return Rows(texts, texts, ["a", "b"] * n_pairs, values, np.arange(n) + 1, "rows.csv")


def scored(similarity, of=None, metrics=DEFAULT_METRICS, **options):
    of = rows(10) if of is None else of
    return score_results([Result(**ABOUT)], [np.asarray(similarity)], of, metrics, **options)[0]


def test_each_kind_of_result_has_the_json_of_its_command():
    about = {"name", "head", "prompt", "subtract", "split", "task", "dim"}
    counts = {"n", "n_dropped", "n_pairs", "n_compared", "n_tied"}
    figures = {"spearman", "spearman_ci", "accuracy", "accuracy_ci"}
    deviations = {"spearman_sd", "accuracy_sd"}
    fit = {"selected_on": "dev", "curve": [], "best_epoch": 3, "steps_per_epoch": 2}
    fitted = {**ABOUT, "metrics": METRICS, "seeds": (4,), "fits": (fit,), "dim": 8}
    one = Result(**fitted).to_json()
    assert set(one) == about | counts | figures | {"seed", "selected_on"}
    assert (one["prompt"], one["task"], one["seed"], one["selected_on"]) == (
        "a+b",
        "csts",
        4,
        "dev",
    )
    assert (one["spearman_ci"], one["accuracy"], one["accuracy_ci"]) == (
        *([0.4, 0.6], None),
        [None, None],
    )
    difference = PairedDifference(0.1, nan, nan, 0.0, nan, nan, nan, "no evidence")
    two = ComparedResult(**fitted, difference={"spearman": difference}, against="x").to_json()
    compared = {"seeds", "control", "difference", "against"}
    assert set(two) == about | counts | figures | deviations | compared
    assert two["difference"]["spearman"]["low"] is None
    three = SweptResult(**fitted, settings={"dim": 8}).to_json()
    swept = {"settings", "seeds", "best_epochs", "curves", "steps_per_epoch"}
    assert set(three) == about | counts | figures | deviations | swept
    json.dumps([one, two, three], allow_nan=False)


def test_a_name_is_only_a_label():
    titles = {
        "mlp@a+b": "mlp",
        "mlp@a+b+c": "mlp",
        "mlp@home": "mlp@home",
        "mine": "mine",
    }
    for name, title in titles.items():
        assert Result(**{**ABOUT, "name": name}).title == title
    # A prompt of the name c is no sign that nothing is subtracted.
    odd = Result(**{**ABOUT, "name": "mlp@a+c", "prompts": ("a", "c")})
    assert (odd.title, odd.prompt, odd.subtract) == ("mlp", "a+c", True)


def test_the_best_comes_first_and_what_is_undefined_last():
    values = (0.1, nan, 0.5)
    found = best_first(Result(**ABOUT, metrics={"spearman": Estimate(v)}) for v in values)
    assert [one.main.value for one in found][:2] == [0.5, 0.1]
    assert len(found) == 3


@pytest.mark.filterwarnings("error")
def test_what_is_undefined_is_null_and_never_a_figure():
    constant = scored(np.full((1, 20), 0.1)).to_json()
    for name in ("spearman", "pearson"):
        assert (constant[name], constant[f"{name}_ci"]) == (None, [None, None])
    assert constant["accuracy"] == 0.5
    unrated = scored(np.zeros((1, 20)), rows(10, nan)).to_json()
    assert (unrated["n"], unrated["n_dropped"], unrated["accuracy"]) == (0, 20, None)
    alike = scored(np.arange(20.0)[None], rows(10, 0.5)).to_json()
    assert [alike[name] for name in ("spearman", "pearson", "accuracy")] == [None] * 3
    assert (alike["n_compared"], alike["n_tied"]) == (0, 10)


def test_predictions_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match=r"mlp@a\+b predicts NaN or infinity for 1 rated rows"):
        scored(np.append(np.zeros(19), nan)[None])


def test_a_metric_has_no_name_of_another_column():
    with pytest.raises(UserError, match="a metric cannot be called dim"):
        scored(np.zeros((1, 20)), metrics=[Metric("dim", lambda *_: 0.0)])


def test_counts_are_of_rated_rows():
    some = rows(3)
    some.rating[:3] = nan
    counts = RowCounts(n=3, n_dropped=3, n_pairs=2, n_compared=1, n_tied=0)
    assert RowCounts.of(some) == counts


def test_results_are_a_table_in_notebooks(monkeypatch):
    results = Results((Result(**{**ABOUT, "name": "<b>"}, metrics=METRICS),))
    assert len(results) == 1
    assert results[0] in results
    html = results._repr_html_()
    assert "&lt;b&gt;" in html
    assert "50.0 [40.0, 60.0]" in html
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LlmcondError, match="pip install pandas"):
        results.to_pandas()


def test_results_are_a_data_frame():
    pytest.importorskip("pandas")
    frame = Results((Result(**ABOUT, metrics=METRICS),)).to_pandas()
    assert frame["spearman_low"].tolist() == [0.4]
    assert "spearman_ci" not in frame
