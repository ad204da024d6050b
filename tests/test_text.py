"""The entrance of a user's strings."""

import pytest

from llmcond.errors import UserError
from llmcond.text import (
    cell_text,
    check_string,
    condition_cell,
    condition_key,
    normalise_condition,
    shorten,
)


@pytest.mark.parametrize("text", ["a\ud800", "\udfffb", "a\0b"])
def test_invalid_characters_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^--where is '.*, which contains .*\. Correct it\.$"):
        check_string(text, "--where")
    with pytest.raises(ValueError, match=r"^contains"):
        cell_text(text)


@pytest.mark.parametrize("text", ["the café", "数", "\U0001f600", "a\u2028b", "x\ty\r\n"])
def test_valid_texts_are_unchanged(text: str) -> None:
    assert check_string(text, "--where") == cell_text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "the cafe\u0301",
        " the café",
        "the  café\n",
        "the\u00a0café",
        "the\u3000café",
        "\u2028the\tcafé",
    ],
)
def test_conditions_have_one_form(text: str) -> None:
    assert normalise_condition(text) == condition_cell(text) == "the café"
    assert condition_key(text.upper()) == condition_key("The Café")


@pytest.mark.parametrize(
    "text",
    [
        "THE CAFÉ",
        "The Cafe\u0301",
        "the\u200b café",
        "\ufeffthe café",
        "ｔｈｅ café",
        "the ca\u00adfé",
    ],
)
def test_key_ignores_case_and_invisible_or_compatible_characters(text: str) -> None:
    assert condition_key(text) == condition_key("the café") != condition_key("the cafe")


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        ("two  words\n here", 80, "two words here"),
        ("a" * 300_000, 5, "aaaaa…"),
        ("ab cd", 3, "ab…"),
        ("किताब", 3, "कि…"),
        ("👩\u200d👧 x", 2, "👩…"),
        (" " * 200, 80, "…"),
    ],
)
def test_shortened_text_keeps_letters_whole(text: str, length: int, expected: str) -> None:
    assert shorten(text, length) == expected
