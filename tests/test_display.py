"""What users see: results in terminals and notebooks, messages, and the progress of long work."""

import copy
import inspect
import logging
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import llmcond
from llmcond.base.metrics import METRICS
from llmcond.base.output import Displayed, ExtractionBar, FitBar, Table
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


def test_headings_cannot_end_a_cell_in_markdown():
    table = Table.of_rows([{"the fault | what is wrong": "a|b\\|c <Enter>\u00a0&", "n": 1}])
    lines = table.document("markdown").splitlines()
    assert r"the fault \| what is wrong" in lines[0]
    assert r"a\|b\\\|c &lt;Enter> &amp;" in lines[2]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}


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


# -- progress ----------------------------------------------------------------------------------


class Clock:
    """A clock that tests advance."""

    now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


@pytest.fixture
def lines(monkeypatch):
    """The messages of a process without a terminal."""
    lines, logger = [], logging.getLogger("llmcond")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.manager._clear_cache()
    return lines


def test_extraction_is_reported_with_rate_and_remaining_time(clock, lines):
    with ExtractionBar() as bar:
        bar.start(None, None)  # the size becomes known later
        clock.now += 31
        bar.advance(100, 5_000, 3_100, 31)
        bar.start(1_000, 50_000)
        for _ in range(3):
            clock.now += 31
            bar.advance(100, 5_000, 3_100, 31)
    assert lines[0] == "encoding: 100/? inputs, 100 tokens/s"
    assert lines[-1] == "encoding: 400/1,000 inputs, 100 tokens/s, about 3 min left"
    with ExtractionBar() as bar:
        bar.start(1_000, 50_000)
        clock.now += 500  # neither loading counts, nor the delay of a batch's result
        bar.advance(100, 5_000, 1_200, 10)
        clock.now += 500
        bar.advance(100, 5_000, 1_200, 10)
        assert bar._seconds_left() == 80
    n_lines, clock.now = len(lines), 1_000.0
    with FitBar("dev_score", "MRR", METRICS["mrr"].format) as fit:
        for epoch in range(1, 29):  # short work is not reported
            clock.now += 1
            fit.on_epoch(epoch, 28, {"dev_score": 0.5})
    assert len(lines) == n_lines


def test_long_epoch_is_reported_while_it_runs(clock, lines):
    """The remaining time is known from the second step on; quick steps are not reported."""
    with FitBar("dev_score", "MRR on 1,000 queries", METRICS["mrr"].format) as bar:
        for step in range(1, 120):
            clock.now += 1
            bar.on_epoch(step / 120, 2, None)
        clock.now += 5
        bar.on_epoch(1, 2, {"dev_score": 0.25})
        clock.now += 60
        bar.on_epoch(1.5, 2, None)
        clock.now += 0.25
        bar.on_epoch(1.75, 2, None)
    assert lines[0] == "fitting: epoch 1 of 2 (2% done), at most 4 min left"
    assert lines[-1] == (
        "fitting: epoch 2 of 2 (50% done), dev MRR on 1,000 queries 25.0, at most 1 min left"
    )


# -- visibility of messages --------------------------------------------------------------------

NOTE = "from llmcond.base.output import log; log.info('{0} note'); log.warning('{0} problem')\n"
SILENCE = "import logging; logging.getLogger('llmcond').setLevel('WARNING')\n"


def test_notes_are_shown_in_sessions_but_not_in_programs():
    session = NOTE.format("first") + SILENCE + NOTE.format("second")
    for code, flags, notes in ((session, ["-i", "-q"], ["first"]), (NOTE.format("a"), [], [])):
        python = [sys.executable, *flags, "-"]
        process = subprocess.run(python, input=code, capture_output=True, text=True, check=True)
        assert re.findall(r"(\w+) note", process.stderr) == notes
        assert process.stderr.count("problem") == code.count("problem")
