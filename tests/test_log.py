"""Where the package's messages are shown."""

import subprocess
import sys

import pytest

NOTE = "from llmcond.log import log; log.info('a note'); log.warning('a problem')"
SILENCE = "import logging; logging.getLogger('llmcond').setLevel('WARNING')"


def said(code: str, *flags: str) -> str:
    """Run lines in a process of its own, as a session if ``-i`` is given; return its errors."""
    done = subprocess.run(
        [sys.executable, *flags, "-"],
        input=f"{code}\n",
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_notes_appear_in_a_session_and_not_in_a_program():
    assert "a note" in said(NOTE, "-i", "-q")
    assert "a note" not in said(NOTE)
    assert "a note" in said(f"import logging; logging.basicConfig(level='INFO')\n{NOTE}")


@pytest.mark.parametrize("order", [(SILENCE, NOTE), ("import llmcond.log", SILENCE, NOTE)])
def test_one_line_silences_notes_and_leaves_warnings(order):
    errors = said("\n".join(order), "-i", "-q")
    assert "a note" not in errors
    assert "warning: a problem" in errors


def test_bars_are_silenced_with_the_notes(monkeypatch):
    from llmcond import log

    monkeypatch.setattr(type(log.console()), "is_terminal", True)
    monkeypatch.setattr(log.log, "level", 20)
    assert log.shows_bars()
    monkeypatch.setattr(log.log, "level", 30)
    assert not log.shows_bars()
