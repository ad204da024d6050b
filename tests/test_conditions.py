"""The strings of users: texts, and conditions with example values."""

import copy
import json
import pickle
import shlex

import numpy as np
import pyarrow as pa
import pytest

import llmcond
from llmcond.base.errors import UserError
from llmcond.base.text import (
    Condition,
    add_values,
    as_condition,
    cell_text,
    check_string,
    combine_values,
    condition_cell,
    condition_flags,
    condition_json,
    condition_key,
    condition_text,
    ignored_by,
    ignoring,
    read_values,
    shorten,
    without_ignored,
    wordings,
    write_values,
)
from llmcond.data.datasets import read_rows
from llmcond.data.guides import read_guide
from llmcond.runs.similarity import as_conditions, pair_with_conditions

CUISINE = Condition("the cuisine", values=["Italian", "Thai", "Indian"])
CUISINE_TEXT = "the cuisine, such as Italian, Thai, Indian"


def test_condition_is_the_string_that_encoder_reads():
    assert CUISINE == CUISINE_TEXT
    assert {CUISINE_TEXT: 1}[CUISINE] == 1
    assert f"{CUISINE}" == str(CUISINE) == CUISINE_TEXT
    assert (type(str(CUISINE)), json.dumps([CUISINE])) == (str, json.dumps([CUISINE_TEXT]))
    assert pa.array([CUISINE], pa.string()).to_pylist() == [CUISINE_TEXT]
    assert np.array([CUISINE])[0] == CUISINE_TEXT
    assert (CUISINE.text, CUISINE.values) == ("the cuisine", ("Italian", "Thai", "Indian"))
    assert Condition("the cuisine") == "the cuisine"
    assert llmcond.Condition is Condition


def test_copies_have_text_and_values_and_are_immutable():
    pickles = [pickle.dumps(CUISINE, protocol) for protocol in range(2, 6)]
    for condition in (copy.copy(CUISINE), copy.deepcopy(CUISINE), *map(pickle.loads, pickles)):
        assert type(condition) is Condition
        assert (condition, condition.text) == (CUISINE_TEXT, CUISINE.text)
        assert condition.values == CUISINE.values
    for name in ("values", "other"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(CUISINE, name, ("Greek",))


def test_values_can_be_list_or_csv_text():
    for text, values in (
        (pa.array(["Italian", "Thai"]), ("Italian", "Thai")),
        (' Rome, "Paris, Texas" , Rome,, ', ("Rome", "Paris, Texas")),
        ('"say ""yes""",no', ('say "yes"', "no")),
        (["Paris, Texas", " Rome ", ""], ("Paris, Texas", "Rome")),
        ((str(i) for i in range(64)), tuple(str(i) for i in range(64))),
        (" , ", ()),
    ):
        condition = Condition("the place", text)
        assert condition.values == values
        assert Condition("the place", condition.values) == condition
        assert "such as" not in condition or values


def test_invalid_condition_error_says_what_is_wrong():
    for text, values, message in (
        ("a", [*map(str, range(65))], "one condition has 65 example values; give at most 64"),
        ("the place", ["Rome", 7], "the example value 7 is not a string"),
        ("the place", None, "the example values are None; expected a list"),
        ("the place", 'Rome, "Paris', "cannot be read: .* put double quotes"),
        ("a" + "|b" * 64, (), "one condition has 65 wordings; give at most 64"),
        (" ", "Rome", "the values Rome belong to an empty condition"),
        (CUISINE, "Greek", "is the Condition .* expected its text and all values"),
        (7, "Rome", "the condition is the int 7; expected a string"),
    ):
        with pytest.raises(UserError, match=message):
            Condition(text, values)


def test_values_are_combined_with_conditions_in_order():
    assert combine_values(["a", "b"], []) == ["a", "b"]
    assert combine_values(["a", "b"], ["", "x, y"]) == ["a", "b, such as x, y"]
    assert combine_values(["a"], ["x", "y"]) == ["a, such as x, y"]
    assert combine_values(["a | b"], ["x"]) == ["a | b, such as x"]
    assert combine_values(["a | b", "c"], ["x", "y"]) == ["a | b, such as x", "c, such as y"]
    for values in (["x"], ["x", "y", "z"]):
        with pytest.raises(UserError, match=f"{len(values)} --values and 2 --condition. Give"):
            combine_values(["a", "b"], values)


#: Spellings of one condition that the encoder reads as one text, and another one in capitals.
FORMS = ["the cafe\u0301", " the café", "the  café ", "the\u00a0café", "\u2028the\ncafé\t"]
CAPITALS = "The CAFÉ"


@pytest.mark.parametrize("form", FORMS)
def test_every_entrance_gives_a_condition_its_normal_form(form):
    assert Condition(form) == as_condition(form) == condition_cell(form) == "the café"
    assert Condition(form).text == "the café"
    assert Condition("the café", [form]).values == ("the café",)
    assert combine_values([form], []) == add_values([form], None) == ["the café"]
    assert combine_values([form], ["x"]) == add_values([form], "x") == ["the café, such as x"]
    assert pair_with_conditions(["a ", "b"], form) == [("a ", "the café"), ("b", "the café")]
    assert as_conditions([form]) == as_conditions(form) == ["the café"]
    data = [{"sentence1": " a  b", "sentence2": "c", "condition": form, "label": 1}]
    assert read_rows(data)[0].texts["condition"] == ["the café"]
    assert read_rows(data)[0].texts["sentence1"] == [" a  b"]
    guide = {"text": ["a ", "b"], "label": ["x", "y"], "condition": [form, CAPITALS]}
    for closed in (True, False):
        (labelled,) = read_guide(pa.table(guide), None, ["the café"], closed=closed)
        assert (labelled.condition, labelled.texts) == ("the café", ["a ", "b"])


def test_repeated_conditions_of_a_command_count_once(caplog):
    caplog.set_level("INFO")
    for form in (FORMS[0], CAPITALS):
        assert combine_values(["the café", "the place", form], []) == ["the café", "the place"]
        assert len(combine_values(["the café", form], ["x", "y"])) == 2
    message = "--condition 'the café' is given more than once and counts once; case and spacing"
    assert [text.startswith(message) for text in caplog.messages] == [True, True]


def test_invalid_conditions_are_refused_in_one_line():
    for condition, message in (
        (" \u00a0\n", r"the condition is empty\. Give a text, such as 'the topic'\."),
        (Condition(""), "the condition is empty"),
        (["the place"], r"the condition is \['the place'\], not a text"),
        ("\ud800", "the condition contains half of a surrogate pair"),
    ):
        with pytest.raises(UserError, match=message):
            as_condition(condition)
        with pytest.raises(UserError):
            combine_values([condition], [])


def test_wordings_and_ignored_conditions_are_part_of_a_condition():
    condition = Condition(
        " the fault|what  is wrong | ", ["a", "b"], ["the product", "the product "]
    )
    assert condition == "the fault|what is wrong |, such as a, b, ignoring the product"
    assert wordings(condition) == (
        Condition("the fault", "a, b"),
        Condition("what is wrong", "a, b"),
    )
    assert ignored_by(condition) == ("the product",)
    assert without_ignored(condition) == Condition("the fault|what is wrong |", "a, b")
    assert without_ignored(Condition("the fault", ignore="the product")) == "the fault"
    assert copy.deepcopy(condition).ignore == pickle.loads(pickle.dumps(condition)).ignore
    assert wordings(as_condition("a | b")) == ("a", "b")
    assert wordings("a | b") == ("a | b",)  # a condition of a dataset is read as it is
    assert wordings(None) == (None,)
    assert "--values 'a, b' --ignore 'the product'" in condition_flags(condition)
    assert condition_json(condition)["ignore"] == ["the product"]
    for text in (" | ", "|"):
        with pytest.raises(UserError, match="names no condition"):
            as_condition(text)
    for other in ("the  FAULT", ""):
        with pytest.raises(UserError, match=r"cannot ignore itself|is empty"):
            ignoring("the fault", [other])


def test_flags_tables_and_json_separate_text_and_values():
    condition = Condition("the place", ["Paris, Texas", "Rome", 'the "Ritz"'])
    _, text, flag, values = shlex.split(condition_flags(condition))
    assert (flag, Condition(text, values)) == ("--values", condition)
    assert condition_flags("the place") == "--condition 'the place'"
    assert condition_text(CUISINE) == "the cuisine"
    assert condition_text("the place") == "the place"
    cuisine = {"condition": "the cuisine", "values": ["Italian", "Thai", "Indian"]}
    assert condition_json(CUISINE) == cuisine
    assert condition_json("the place") == condition_json(Condition("the place"))
    assert condition_json(None) == {"condition": None}


# -- texts -------------------------------------------------------------------------------------


def test_only_invalid_characters_are_refused_and_keys_ignore_invisible_ones():
    for text in ("a\ud800", "\udfffb", "a\0b"):
        with pytest.raises(UserError, match=r"^--where is '.*, which contains .*\. Correct it\.$"):
            check_string(text, "--where")
        with pytest.raises(ValueError, match=r"^contains"):
            cell_text(text)
    for text in ("the café", "\U0001f600", "a\u2028b", "x\ty\r\n"):
        assert check_string(text, "--where") == cell_text(text) == text
    for text in ("THE CAFÉ", "The Cafe\u0301", "the\u200b café", "ｔｈｅ café", "the ca\u00adfé"):
        assert condition_key(text) == condition_key("the café") != condition_key("the cafe")


def test_shortened_text_keeps_letters_whole():
    assert shorten("two  words\n here", 80) == "two words here"
    assert shorten("a" * 300_000, 5) == "aaaaa…"
    assert shorten("किताब", 3) == "कि…"
    assert shorten("👩\u200d👧 x", 2) == "👩…"


def test_values_that_are_written_are_read_again():
    values = ("Rome", "Paris, Texas", 'a 5" pipe', "it's")
    assert write_values(values) == 'Rome, "Paris, Texas", "a 5"" pipe", it\'s'
    assert tuple(read_values(write_values(values))) == values
