"""Display of results: one line in a terminal, tables in notebooks."""

import copy
import inspect
import re
from dataclasses import replace

import numpy as np

import llmcond
from llmcond.base.output import Displayed
from llmcond.clustering import Clustering
from llmcond.heads import PairArrays
from llmcond.search.query import Hits

#: The functions that run commands.
FUNCTION_NAMES = [
    name
    for name in llmcond.__all__
    if getattr(getattr(llmcond, name), "__module__", "").startswith("llmcond.commands")
]


def make_hits(n: int) -> Hits:
    rows = [{"rank": i, "score": 0.123456789, "text": f"<b> {i}"} for i in range(1, n + 1)]
    return Hits("beach", {"the place": 1.0}, rows, searched=n)


def test_result_is_one_line_in_terminal_and_table_in_notebook():
    conditions = "conditions={'the place': 1.0}"
    expected = f"Hits(query='beach', {conditions}, searched=30, exact=True, rows=<30 rows>)"
    assert repr(make_hits(30)) == expected
    html = make_hits(30)._repr_html_()
    assert "&lt;b&gt; 20</td>" in html
    assert "<b> 20" not in html
    assert "&lt;b&gt; 21" not in html
    assert "the first 20 of 30 rows" in html
    assert "0.1235" in html
    assert "searched 30" in html


def test_copies_of_results_are_equal(tiny_run):
    embedder = llmcond.load_embedder(tiny_run, device="cpu")
    explanation = embedder.explain("two dogs run", "the animal")
    guided = embedder.guided(["a", "b"], ["x", "y"], "the animal")
    pairs = PairArrays(np.ones((2, 3)), np.ones((2, 3)), np.array([np.nan, 1]))
    clustering = Clustering("minilm", None, np.array([0.5, np.nan], np.float32), [])
    hits = replace(make_hits(2), guides=guided.guides)
    for result in (hits, explanation, guided.guides, pairs, clustering):
        assert copy.deepcopy(result) == result
        assert result != 1
    assert replace(explanation, sentence="other") != explanation
    values = explanation.conditions[0]
    assert replace(values, values=values.values + 1) != values
    assert len({embedder, replace(embedder), embedder}) == 2


def test_results_of_functions_are_displayed():
    for name in FUNCTION_NAMES:
        returned = str(inspect.signature(getattr(llmcond, name)).return_annotation)
        classes = [word for word in re.findall(r"\w+", returned) if word not in ("None", "list")]
        assert classes
        for cls in classes:  # all of them are public
            assert getattr(llmcond, cls).__repr__ is Displayed.__repr__
