"""Without a terminal, long work reports its progress every half minute."""

import logging
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from llmcond.metrics import METRICS
from llmcond.progress import ExtractionBar, FitBar, ProgressBar
from llmcond.runs.trials import iterate_completed

SPEARMAN = METRICS["spearman"]


class Clock:
    """A clock that tests advance."""

    now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class MessageHandler(logging.Handler):
    """Stores messages, and calls a function after each."""

    def __init__(self):
        super().__init__()
        self.lines, self.then = [], lambda: None

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.then()


@pytest.fixture
def handler(monkeypatch):
    handler, logger = MessageHandler(), logging.getLogger("llmcond")
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "handlers", [handler])
    logger.manager._clear_cache()
    return handler


@pytest.fixture
def lines(handler):
    return handler.lines


def test_extraction_is_reported_with_rate_and_remaining_time(clock, lines):
    with ExtractionBar(clock) as bar:
        bar.start(1_000, 50_000)
        for _ in range(9):
            clock.now += 10
            bar.advance(100, 5_000, 1_200, 10)
    assert len(lines) == 3
    assert lines[0] == "encoding: 100/1,000 inputs, 120 tokens/s, about 2 min left"
    assert lines[2] == "encoding: 700/1,000 inputs, 120 tokens/s, about 30 s left"


def test_remaining_time_counts_batches_only(clock, lines):
    """Neither the time of loading counts, nor the delay of a batch's result."""
    with ExtractionBar(clock) as bar:
        bar.start(1_000, 50_000)
        clock.now += 500
        assert bar._seconds_left() is None
        bar.advance(100, 5_000, 1_200, 10)
        assert bar._seconds_left() == 90
        clock.now += 500
        bar.advance(100, 5_000, 1_200, 10)
        assert bar._seconds_left() == 80
    assert lines[1] == "encoding: 200/1,000 inputs, 120 tokens/s, about 1 min left"
    with ExtractionBar(clock, processes=4) as bar:
        bar.start(1_000, 50_000)
        bar.advance(200, 10_000, 1_200, 10)
        assert bar._seconds_left() == 10


def test_extraction_by_several_processes_counts_inputs_of_all(clock, lines):
    stored = 0
    with ExtractionBar(clock, processes=2, stored=lambda: stored) as bar:
        bar.start(1_000, 50_000)
        clock.now += 40
        stored = 400  # the other process stored 200 of them
        bar.advance(200, 10_000, 1_200, 40)
        assert bar._seconds_left() == 60
        clock.now += 60
        stored = 1_000
        bar.advance(300, 15_000, 1_800, 60)
        assert bar._seconds_left() == 0
    assert lines == [
        "encoding: 400/1,000 inputs, 30 tokens/s in each of 2 processes, about 1 min left",
        "encoding: 1,000/1,000 inputs, 30 tokens/s in each of 2 processes",
    ]


def test_short_extraction_is_not_reported(clock, lines):
    with ExtractionBar(clock) as bar:
        bar.start(1_000, 50_000)
        for _ in range(10):
            clock.now += 2
            bar.advance(100, 5_000, 1_200, 2)
    assert lines == []


def test_extraction_of_unknown_size_is_reported(clock, lines):
    with ExtractionBar(clock) as bar:
        bar.start(None, None)
        clock.now += 31
        bar.advance(100, 5_000, 3_100, 31)
    assert lines == ["encoding: 100/? inputs, 100 tokens/s"]


def test_long_epoch_is_reported_while_it_runs(clock, lines):
    """The remaining time is known from the second step on; quick steps are not reported."""
    with FitBar("dev_score", "MRR on 1,000 queries", METRICS["mrr"].format, clock) as bar:
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
    assert lines[1] == "fitting: epoch 1 of 2 (27% done), at most 3 min left"
    assert lines[-1] == (
        "fitting: epoch 2 of 2 (50% done), dev MRR on 1,000 queries 25.0, at most 1 min left"
    )


def test_epochs_of_fit_and_steps_of_training_are_reported(clock, lines):
    with FitBar("dev_spearman", SPEARMAN.heading, SPEARMAN.format, clock) as bar:
        for epoch in range(1, 5):
            clock.now += 20
            bar.on_epoch(epoch, 100, {"dev_spearman": 0.5})
    assert lines == [
        "fitting: epoch 2 of 100, dev Spearman 50.0, at most 33 min left",
        "fitting: epoch 4 of 100, dev Spearman 50.0, at most 32 min left",
    ]
    lines.clear()
    with FitBar("dev_spearman", SPEARMAN.heading, SPEARMAN.format, clock, name="training") as bar:
        for step in range(1, 8):
            clock.now += 7
            bar.on_step(SimpleNamespace(step=step, curve=(), best_score=0.25), 9, {"loss": 0.125})
    assert lines == [
        "training: step 2 of 9, loss 0.1250, best dev 25.0, about 49 s left",
        "training: step 7 of 9, loss 0.1250, best dev 25.0, about 14 s left",
    ]


def test_short_fit_is_not_reported(clock, lines):
    with FitBar("dev_spearman", SPEARMAN.heading, SPEARMAN.format, clock) as bar:
        for epoch in range(1, 29):
            clock.now += 1
            bar.on_epoch(epoch, 28, {"dev_spearman": 0.5})
    assert lines == []


def test_fits_of_several_processes_are_reported(handler):
    futures = [Future() for _ in range(3)]
    futures[1].set_result("b")
    # The other fits finish after the message that they are not done.
    handler.then = lambda: [future.set_result("a") for future in futures[::2]]
    results = [future.result() for future in iterate_completed(futures, seconds=0)]
    assert sorted(results) == ["a", "a", "b"]
    assert handler.lines == ["1 of 3 fits are done"]


def test_reading_large_file_is_reported(clock, lines):
    with ProgressBar("reading large.csv", clock) as bar:
        for _ in bar.count(range(100_000)):
            clock.now += 0.001
    assert lines == ["reading large.csv: 40,000 rows", "reading large.csv: 80,000 rows"]


def test_size_of_extraction_can_become_known_later(clock, lines):
    with ExtractionBar(clock) as bar:
        bar.start(None, None)
        clock.now += 31
        bar.advance(100, 5_000, 3_100, 31)
        bar.start(1_000, 50_000)
        for _ in range(3):
            clock.now += 31
            bar.advance(100, 5_000, 3_100, 31)
    assert lines[0] == "encoding: 100/? inputs, 100 tokens/s"
    assert lines[-1] == "encoding: 400/1,000 inputs, 100 tokens/s, about 3 min left"
