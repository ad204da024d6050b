"""Explanations in tables, figures and pages: values, shades, and hostile texts as text."""

import csv

import numpy as np
import pytest
from helpers.pages import HOSTILE, ParsedPage, check_views, open_page

from llmcond.base.errors import UserError
from llmcond.base.files import PAGE_SUFFIXES, check_figure
from llmcond.encoders.tokenizing import Token
from llmcond.report.analyses import show_explanation, write_explanation
from llmcond.runs.similarity import ConditionExplanation, Explanation

SENTENCE = "Snowboarding $is$ fun"
TOKENS = [
    Token("[CLS]", None, None, True),
    Token("snow", 0, 4, False),
    Token("##boarding", 4, 12, False),
    Token("$is$", 13, 17, False),
    Token("Ã©", 18, 21, False),
]
VALUES = np.array([0.7, 0.2, 0.1, -0.05, 0.0001])


def explain():
    first = ConditionExplanation("the sport", TOKENS, VALUES, similarity=0.9, condition_term=-0.05)
    second = ConditionExplanation(
        "the mood", TOKENS, VALUES[::-1], similarity=0.1, condition_term=0.0
    )
    return Explanation(SENTENCE, "Skiing", "exact", [first, second], {"encoder": "minilm"})


def test_table_has_values_and_bars_and_cannot_control_the_terminal(capsys):
    show_explanation(explain())
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line.split()}
    assert lines["Snow"] == ["Snow", "+0.200", "█" * 3, "-0.050", "░"]
    assert lines["boarding"] == ["boarding", "+0.100", "██", "+0.100", "██"]
    assert "[CLS] (special)" in printed
    assert "█" not in " ".join(lines["[CLS]"])  # longer than all others, and no word
    assert lines["minus"] == ["minus", "the", "condition", "(special)", "-0.050", "+0.000"]
    # The vocabulary's characters are unreadable, so those of the sentence are shown.
    assert "Ã" not in printed
    assert lines["fun"][1] == "+0.000"
    assert "the sport, similarity 0.900" in " ".join(printed.split())
    tokens = [Token("\x1b[31mred", 0, 4, False)]
    explained = ConditionExplanation("the\x1b]0;x", tokens, np.ones(1), similarity=1.0)
    show_explanation(Explanation("\x1b[31mred", "b", "leave-one-out", [explained]))
    assert "\x1b" not in capsys.readouterr().out


def test_numbers_of_figure_are_written_as_csv(tmp_path):
    write_explanation(explain(), tmp_path / "a.svg")
    with (tmp_path / "a-data.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2 * (len(TOKENS) + 1)
    assert rows[1] == {
        **{"condition": "the sport", "layer": "", "token": "snow", "start": "0", "end": "4"},
        **{"special": "False", "contribution": "0.2"},
    }
    assert rows[5]["token"] == "minus the condition"
    with pytest.raises(UserError, match="suffix"):
        check_figure(tmp_path / "a.txt", pages=PAGE_SUFFIXES)


def test_page_shows_hostile_texts_as_text(browser, tmp_path):
    tokens = [Token(text, None, None, bool(i % 2)) for i, text in enumerate(HOSTILE)]
    values = np.linspace(-1, 1, len(tokens))
    explained = [ConditionExplanation(text, tokens, values) for text in HOSTILE]
    explanation = Explanation(HOSTILE[0], HOSTILE[1], "leave-one-out", explained, {"x": HOSTILE[2]})
    write_explanation(explanation, tmp_path / "page.html")
    page = ParsedPage((tmp_path / "page.html").read_text("utf-8"))
    assert len(page.scripts) == 1  # that of the button
    assert page.all("img") == []
    assert HOSTILE[0] in page.visible_text
    assert len(page.all("li")) == 2 + len(HOSTILE) ** 2
    with open_page(browser, tmp_path / "page.html") as tab:
        check_views(tab)
