"""Messages: their visibility, and the progress of long work, reported every half minute."""

import logging
import subprocess
import sys

import pytest

from llmcond.base.metrics import METRICS
from llmcond.base.output import ExtractionBar, FitBar


class Clock:
    """A clock that tests advance."""

    now = 1_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


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
    with ExtractionBar(clock) as bar:
        bar.start(None, None)  # the size becomes known later
        clock.now += 31
        bar.advance(100, 5_000, 3_100, 31)
        bar.start(1_000, 50_000)
        for _ in range(3):
            clock.now += 31
            bar.advance(100, 5_000, 3_100, 31)
    assert lines[0] == "encoding: 100/? inputs, 100 tokens/s"
    assert lines[-1] == "encoding: 400/1,000 inputs, 100 tokens/s, about 3 min left"
    with ExtractionBar(clock) as bar:
        bar.start(1_000, 50_000)
        clock.now += 500  # neither loading counts, nor the delay of a batch's result
        bar.advance(100, 5_000, 1_200, 10)
        clock.now += 500
        bar.advance(100, 5_000, 1_200, 10)
        assert bar._seconds_left() == 80
    n_lines, clock.now = len(lines), 1_000.0
    with FitBar("dev_score", "MRR", METRICS["mrr"].format, clock) as fit:
        for epoch in range(1, 29):  # short work is not reported
            clock.now += 1
            fit.on_epoch(epoch, 28, {"dev_score": 0.5})
    assert len(lines) == n_lines


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
    assert lines[-1] == (
        "fitting: epoch 2 of 2 (50% done), dev MRR on 1,000 queries 25.0, at most 1 min left"
    )


# -- visibility of messages --------------------------------------------------------------------

NOTE = "from llmcond.base.output import log; log.info('a note'); log.warning('a problem')"
SILENCE = "import logging; logging.getLogger('llmcond').setLevel('WARNING')"


@pytest.mark.parametrize(
    ("code", "flags", "is_shown"),
    [
        (NOTE, ["-i", "-q"], True),  # an interactive session
        (NOTE, [], False),
        (f"{SILENCE}\n{NOTE}", ["-i", "-q"], False),
    ],
)
def test_notes_are_shown_in_sessions_but_not_in_programs(code, flags, is_shown):
    python = [sys.executable, *flags, "-"]
    process = subprocess.run(python, input=f"{code}\n", capture_output=True, text=True, check=True)
    assert ("a note" in process.stderr) == is_shown
    assert "a problem" in process.stderr
