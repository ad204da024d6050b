"""Explanations in tables, figures and pages: values, shades, and hostile texts as text."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from helpers.pages import HOSTILE, ParsedPage, check_views, open_page

from llmcond.encoders.engine.tokenizing import Token
from llmcond.errors import UserError
from llmcond.files import PAGE_SUFFIXES, check_figure
from llmcond.report.explanations import (
    show_explanation,
    write_explanation,
)
from llmcond.runs.explanation import ConditionExplanation, Explanation

SENTENCE = "Snowboarding $is$ fun"
TOKENS = [
    Token("[CLS]", None, None, True),
    Token("snow", 0, 4, False),
    Token("##boarding", 4, 12, False),
    Token("$is$", 13, 17, False),
    Token("Ã©", 18, 21, False),
]
VALUES = np.array([0.7, 0.2, 0.1, -0.05, 0.0001])


def explain(method="exact", **changes):
    first = ConditionExplanation("the sport", TOKENS, VALUES, similarity=0.9, condition_term=-0.05)
    second = ConditionExplanation("the mood", TOKENS, VALUES[::-1], similarity=0.1)
    explanation = Explanation(SENTENCE, "Skiing", method, [first, second], {"encoder": "minilm"})
    return replace(explanation, **changes)


def layered():
    layers = {5: VALUES, 6: VALUES[::-1]}
    explained = ConditionExplanation("the sport", TOKENS, (VALUES + VALUES[::-1]) / 2, layers)
    return Explanation(SENTENCE, None, "router-weights", [explained, explained])


# -- tables --------------------------------------------------------------------------------------


def test_table_has_values_and_bars(capsys):
    show_explanation(explain())
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line.split()}
    assert lines["snow"] == ["snow", "+0.200", "█" * 3, "-0.050", "░"]
    assert lines["##boarding"] == ["##boarding", "+0.100", "██", "+0.100", "██"]
    assert "[CLS] (special)" in printed
    assert "█" not in " ".join(lines["[CLS]"])  # longer than all others, and no word
    assert lines["minus"] == ["minus", "the", "condition", "-0.050", "+0.000"]
    # The vocabulary's characters are unreadable, so those of the sentence are shown.
    assert "Ã" not in printed
    assert lines["fun"][1] == "+0.000"
    assert "the sport: 0.900; the mood: 0.100" in " ".join(printed.split())


def test_documents_have_no_bars(capsys):
    show_explanation(explain(), "markdown")
    printed = capsys.readouterr().out
    assert "█" not in printed
    assert "| snow" in printed


def test_each_condition_of_router_has_table_with_layers(capsys):
    show_explanation(layered())
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("layer 5 layer 6 mean") == 2
    assert "snow 0.200 -0.050 0.075" in printed


def test_terminal_is_not_controlled_by_texts(capsys):
    tokens = [Token("\x1b[31mred", 0, 4, False)]
    explained = ConditionExplanation("the\x1b]0;x", tokens, np.ones(1), similarity=1.0)
    show_explanation(Explanation("\x1b[31mred", "b", "leave-one-out", [explained]))
    assert "\x1b" not in capsys.readouterr().out


# -- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".html", ".svg", ".pdf"])
def test_numbers_of_figure_are_written_as_csv(tmp_path, suffix):
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        check_figure(path, pages=PAGE_SUFFIXES)
        write_explanation(explain(), path)
    # The library that writes PDF files sorts their objects differently in each of them.
    assert suffix == ".pdf" or paths[0].read_bytes() == paths[1].read_bytes()
    with (tmp_path / "a-data.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 2 * len(TOKENS) + 1
    assert rows[1] == {
        **{"condition": "the sport", "layer": "", "token": "snow", "start": "0", "end": "4"},
        **{"special": "False", "contribution": "0.2"},
    }
    assert rows[5]["token"] == "minus the condition"


def test_figure_grows_with_long_sentences(tmp_path):
    from PIL import Image

    sizes = []
    for n in (1, 12):
        explained = ConditionExplanation("c", TOKENS * n, np.tile(VALUES, n))
        write_explanation(
            Explanation(SENTENCE, None, "pooling-weights", [explained]), tmp_path / "a.png"
        )
        with Image.open(tmp_path / "a.png") as image:
            sizes.append(image.size)
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] > 2 * sizes[0][1]


@pytest.mark.parametrize("name", ["a.txt", "a"])
def test_figure_that_cannot_be_written_is_rejected(tmp_path, name):
    with pytest.raises(UserError, match="suffix"):
        check_figure(tmp_path / name, pages=PAGE_SUFFIXES)


def hostile_page(folder):
    tokens = [Token(text, None, None, bool(i % 2)) for i, text in enumerate(HOSTILE)]
    explained = [
        ConditionExplanation(text, tokens, np.linspace(-1, 1, len(tokens))) for text in HOSTILE
    ]
    explanation = Explanation(HOSTILE[0], HOSTILE[1], "leave-one-out", explained, {"x": HOSTILE[2]})
    write_explanation(explanation, folder / "page.html")
    return folder / "page.html"


def test_page_shows_hostile_texts_as_text(tmp_path):
    page = ParsedPage(hostile_page(tmp_path).read_text("utf-8"))
    assert len(page.scripts) == 1  # that of the button
    assert page.all("img") == []
    assert HOSTILE[0] in page.visible_text
    assert len(page.all("li")) == 2 + len(HOSTILE) ** 2


def test_page_joins_parts_of_words(tmp_path):
    write_explanation(explain(), tmp_path / "page.html")
    page = ParsedPage((tmp_path / "page.html").read_text("utf-8"))
    classes = [item["class"].split() for item in page.all("li") if "class" in item]
    assert classes[:5] == [["special"], [], ["continues"], ["negative"], []]
    assert classes[5] == ["special"]
    shares = [item["style"] for item in page.all("li") if "style" in item]
    # The largest value of a word, -0.05 to 0.7 with both conditions, has the full shade.
    assert shares[:2] == ["--share: 0.0", "--share: 0.286"]
    assert shares[-1] == "--share: 1.0"
    assert "Compared with: Skiing" in page.visible_text


def test_page_is_accessible_in_all_views(browser, tmp_path):
    with open_page(browser, hostile_page(tmp_path)) as tab:
        check_views(tab)


def test_tokens_of_right_to_left_sentence_begin_at_right(browser, tmp_path):
    sentence = HOSTILE[4]
    tokens = [Token(word, None, None, False) for word in sentence.split()]
    explained = ConditionExplanation("c", tokens, np.ones(len(tokens)))
    write_explanation(Explanation(sentence, None, "exact", [explained]), tmp_path / "page.html")
    with open_page(browser, tmp_path / "page.html") as tab:
        first, second = (tab.locator(".tokens li").nth(i).bounding_box()["x"] for i in (0, 1))
        assert first > second
