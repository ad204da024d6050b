"""Display of results: one line in a terminal, tables in notebooks."""

import copy
import inspect
import pickle
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llmcond
from llmcond import AnalysisResult, PushResult
from llmcond.clustering.page import Clustering
from llmcond.display import Displayed
from llmcond.heads import PairArrays
from llmcond.heads.guide import Guide
from llmcond.runs.explanation import ConditionExplanation, Explanation
from llmcond.search.query import Hits
from llmcond.workflows.embed import EmbedResult

#: The functions that run commands.
FUNCTION_NAMES = [
    name
    for name in llmcond.__all__
    if getattr(getattr(llmcond, name), "__module__", "").startswith("llmcond.commands")
]


def make_hits(n: int) -> Hits:
    rows = [{"rank": i, "score": 0.123456789, "text": f"<b> {i}"} for i in range(1, n + 1)]
    return Hits("beach", {"the place": 1.0}, rows, searched=n)


def test_repr_of_result_is_one_line():
    assert repr(make_hits(1)) == (
        "Hits(query='beach', conditions={'the place': 1.0}, searched=1, exact=True, rows=<1 row>)"
    )
    assert "x…, precision=" in repr(EmbedResult(Path("a.npy"), 3, 4, "none", "x" * 1000))
    assert len(repr(EmbedResult(Path("a" * 300), 3, 4, "m" * 300, "x" * 300))) < 300
    assert "\n" not in repr(make_hits(1000))


def test_repr_names_attributes(tiny_run):
    embedder = llmcond.load_embedder(tiny_run, device="cpu")
    for result in (make_hits(3), embedder.explain("two dogs run", "the animal")):
        names = re.findall(r"[(, ](\w+)=", repr(result))
        assert names
        assert all(hasattr(result, name) for name in names)


def test_copies_of_results_are_equal(tiny_run):
    embedder = llmcond.load_embedder(tiny_run, device="cpu")
    explanation = embedder.explain("two dogs run", "the animal")
    guided = embedder.guided(["a", "b"], ["x", "y"], "the animal")
    pairs = PairArrays(np.ones((2, 3)), np.ones((2, 3)), np.array([np.nan, 1]))
    hits = replace(make_hits(2), guides=guided.guides)
    for result in (hits, explanation, guided.guides, pairs):
        duplicate = copy.deepcopy(result)
        assert duplicate == result
        assert (duplicate != result) is False
        assert result != 1
    assert replace(explanation, sentence="other") != explanation
    values = explanation.conditions[0]
    assert replace(values, values=values.values + 1) != values


def test_embedder_can_be_key_of_cache(tiny_run):
    embedder = llmcond.load_embedder(tiny_run, device="cpu")
    encode = lru_cache(lambda model, text: model.encode(text, "the animal"))
    assert encode(embedder, "a") is encode(embedder, "a")
    assert embedder == embedder  # noqa: PLR0124
    assert embedder != replace(embedder)


def test_result_is_table_in_notebook():
    html = make_hits(30)._repr_html_()
    assert "&lt;b&gt; 20</td>" in html
    assert "<b> 20" not in html
    assert "&lt;b&gt; 21" not in html
    assert "the first 20 of 30 rows" in html
    assert "0.1235" in html
    assert "searched 30" in html


def test_dictionary_is_table_and_none_is_left_out():
    @dataclass(frozen=True, slots=True)
    class _Result(Displayed):
        values: Any

        def to_json(self) -> dict[str, Any]:
            return dict(self.values)

    result = _Result(
        {"prompts": {"a": {"n": 1}, "b": {"n": 2, "m": [1, "x"]}}, "cost": None, "no": []}
    )
    assert repr(result) == "_Result(no=[], prompts=<2 rows>)"
    html = result._repr_html_()
    assert re.findall("<th>(.*?) *</th>", html) == ["name", "n", "m"]
    assert "1, x" in html
    assert "cost" not in html


@pytest.mark.parametrize("change", [1.0, np.nan])
def test_results_with_arrays_can_be_copied_and_compared(change):
    def make_results(value: float) -> tuple[Any, ...]:
        array = np.array([0.5, value], np.float32)
        guide = Guide(array, array[:, None], array, {"a": 1})
        explained = ConditionExplanation("the place", [], array, {1: array}, pairs=array[None])
        return (
            explained,
            Explanation("a", None, "exact", [explained], {}),
            replace(make_hits(2), guides={"the place": guide}),
            EmbedResult(Path("a.npy"), 3, 4, "none", "p", {"the place": guide}),
            Clustering("minilm", None, array, []),
        )

    for result, other in zip(make_results(change), make_results(2.0), strict=True):
        assert copy.deepcopy(result) == result
        assert result != other
        assert result != "text"


def find_result_classes(function: Any) -> list[type]:
    """Return the classes in a function's return annotation, which are all public."""
    names = re.findall(r"\w+", str(inspect.signature(function).return_annotation))
    return [getattr(llmcond, name) for name in names if name not in ("None", "list")]


@pytest.mark.parametrize("name", FUNCTION_NAMES)
def test_results_of_functions_are_displayed(name):
    classes = find_result_classes(getattr(llmcond, name))
    assert classes
    for cls in classes:
        assert issubclass(cls, Displayed), cls
        assert cls.__repr__ is Displayed.__repr__


@pytest.mark.parametrize("cls", [AnalysisResult, PushResult])
def test_dictionary_results_are_displayed_like_others(cls):
    result = cls(split="dev", files=[{"name": "a<b", "size": 1}])
    assert dict(result) == result.to_json()
    assert repr(result) == f"{cls.__name__}(split='dev', files=<1 row>)"
    assert "a&lt;b" in result._repr_html_()
    assert pickle.loads(pickle.dumps(result)) == result
