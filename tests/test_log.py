"""Visibility of the package's log messages."""

import subprocess
import sys

import pytest

NOTE = "from llmcond.log import log; log.info('a note'); log.warning('a problem')"
SILENCE = "import logging; logging.getLogger('llmcond').setLevel('WARNING')"


def read_errors(code: str, *flags: str) -> str:
    """Run code in a new process, interactively with ``-i``, and return its standard error."""
    process = subprocess.run(
        [sys.executable, *flags, "-"],
        input=f"{code}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stderr


def test_notes_are_shown_in_sessions_but_not_in_programs():
    assert "a note" in read_errors(NOTE, "-i", "-q")
    assert "a note" not in read_errors(NOTE)
    assert "a note" in read_errors(f"import logging; logging.basicConfig(level='INFO')\n{NOTE}")


@pytest.mark.parametrize("order", [(SILENCE, NOTE), ("import llmcond.log", SILENCE, NOTE)])
def test_log_level_silences_notes_but_not_warnings(order):
    errors = read_errors("\n".join(order), "-i", "-q")
    assert "a note" not in errors
    assert "warning: a problem" in errors


def test_log_level_silences_progress_bars(monkeypatch):
    from llmcond import log

    monkeypatch.setattr(type(log.console()), "is_terminal", True)
    monkeypatch.setattr(log.log, "level", 20)
    assert log.shows_bars()
    monkeypatch.setattr(log.log, "level", 30)
    assert not log.shows_bars()
