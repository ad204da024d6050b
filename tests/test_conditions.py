"""Conditions with example values: their text, copies, flags, and pairing with values."""

import copy
import json
import pickle
import shlex

import numpy as np
import pyarrow as pa
import pytest

import llmcond
from llmcond.conditions import (
    Condition,
    add_values,
    as_condition,
    combine_values,
    condition_flags,
    condition_json,
    condition_text,
)
from llmcond.data.datasets import read_rows
from llmcond.data.guides import read_guide
from llmcond.errors import UserError
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


def test_copies_have_text_and_values():
    pickles = [pickle.dumps(CUISINE, protocol) for protocol in range(2, 6)]
    copies = [copy.copy(CUISINE), copy.deepcopy(CUISINE), *map(pickle.loads, pickles)]
    for condition in copies:
        assert (condition, condition.text, condition.values) == (
            CUISINE_TEXT,
            CUISINE.text,
            CUISINE.values,
        )
        assert type(condition) is Condition


def test_condition_is_immutable():
    with pytest.raises(AttributeError, match="cannot be changed"):
        CUISINE.values = ("Greek",)
    with pytest.raises(AttributeError, match="cannot be changed"):
        CUISINE.other = 1


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (pa.array(["Italian", "Thai"]), ("Italian", "Thai")),
        ("Italian, Thai ,Indian", ("Italian", "Thai", "Indian")),
        (' Rome, "Paris, Texas" , Rome,, ', ("Rome", "Paris, Texas")),
        ('"say ""yes""",no', ('say "yes"', "no")),
        ("a\nb", ("a", "b")),
        ("Italian", ("Italian",)),
        (["Paris, Texas", " Rome ", ""], ("Paris, Texas", "Rome")),
        ((str(i) for i in range(64)), tuple(str(i) for i in range(64))),
        ("", ()),
        (" , ", ()),
    ],
)
def test_values_can_be_list_or_csv_text(text, values):
    condition = Condition("the place", text)
    assert condition.values == values
    assert Condition("the place", condition.values) == condition
    assert "such as" not in condition or values


def test_condition_flags_reproduce_condition():
    condition = Condition("the place", ["Paris, Texas", "Rome", 'the "Ritz"'])
    _, text, flag, values = shlex.split(condition_flags(condition))
    assert (flag, Condition(text, values)) == ("--values", condition)
    assert condition_flags("the place") == "--condition 'the place'"
    assert condition_flags(Condition("the place")) == "--condition 'the place' --values ''"


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        (
            "the place",
            [str(i) for i in range(65)],
            "one condition has 65 example values; give at most 64",
        ),
        ("the place", ["Rome", 7], "the example value 7 is not a string"),
        ("the place", 7, "the example values are 7; expected a list"),
        ("the place", None, "the example values are None; expected a list"),
        ("the place", {"Rome": 1}, "the example values are {'Rome': 1}; expected a list"),
        ("the place", ["\ud800"], "the example value is .* half of a surrogate pair"),
        ("\0", ["Rome"], "the condition is .* NUL"),
        ("the place", 'Rome, "Paris', "cannot be read: .* put double quotes"),
        ("the place", 'Rome, "Paris"Texas', "cannot be read: .* put double quotes"),
        (" ", "Rome", "the values Rome belong to an empty condition"),
        (CUISINE, "Greek", "is the Condition .* expected its text and all values"),
        (7, "Rome", "the condition is the int 7; expected a string"),
    ],
)
def test_invalid_condition_error_says_what_is_wrong(text, values, message):
    with pytest.raises(UserError, match=message):
        Condition(text, values)


def test_values_are_combined_with_conditions_in_order():
    assert combine_values(["a", "b"], []) == ["a", "b"]
    first, second = combine_values(["a", "b"], ["", "x, y"])
    assert (first, second) == ("a", "b, such as x, y")
    assert combine_values(["a"], ["x", "y"]) == ["a, such as x, y"]
    for values in (["x"], ["x", "y", "z"]):
        with pytest.raises(UserError, match=f"{len(values)} --values and 2 --condition. Give"):
            combine_values(["a", "b"], values)
    with pytest.raises(UserError, match="1 --values and 0 --condition"):
        combine_values([], ["x"])


#: Spellings of one condition that the encoder reads as one text, and another one in capitals.
FORMS = ["the café", "the cafe\u0301", " the café", "the  café ", "the\u00a0café", "the\ncafé\t"]
CAPITALS = "The CAFÉ"


@pytest.mark.parametrize("form", FORMS)
def test_every_entrance_gives_a_condition_its_normal_form(form):
    assert Condition(form) == as_condition(form) == "the café"
    assert Condition(form).text == "the café"
    assert Condition("the café", [form]).values == ("the café",)
    assert combine_values([form], []) == add_values([form], None) == ["the café"]
    assert combine_values([form], ["x"]) == add_values([form], "x") == ["the café, such as x"]
    assert pair_with_conditions(["a ", "b"], form) == [("a ", "the café"), ("b", "the café")]
    assert pair_with_conditions(["a"], [form]) == [("a", "the café")]
    assert as_conditions([form]) == as_conditions(form) == ["the café"]
    data = [{"sentence1": " a  b", "sentence2": "c", "condition": form, "label": 1}]
    assert read_rows(data)[0].texts["condition"] == ["the café"]
    assert read_rows(data)[0].texts["sentence1"] == [" a  b"]
    guide = {"text": ["a ", "b"], "label": ["x", "y"], "condition": [form, CAPITALS]}
    for closed in (True, False):
        (labelled,) = read_guide(pa.table(guide), None, ["the café"], closed=closed)
        assert (labelled.condition, labelled.texts) == ("the café", ["a ", "b"])


def test_values_that_differ_in_case_or_form_are_one_value():
    assert Condition("c", ["Café", "cafe\u0301 ", "CAFÉ", "bar"]).values == ("Café", "bar")


@pytest.mark.parametrize("form", [*FORMS, CAPITALS])
def test_repeated_conditions_of_a_command_count_once(form, caplog):
    caplog.set_level("INFO")
    assert combine_values(["the café", "the place", form], []) == ["the café", "the place"]
    assert caplog.messages == [
        "--condition 'the café' is given more than once and counts once; case and spacing make no "
        "difference"
    ]
    assert len(combine_values(["the café", form], ["x", "y"])) == 2


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("", "the condition is empty. Give a text, such as 'the topic'."),
        (" \u00a0\n", "the condition is empty"),
        (None, "the condition is empty"),
        (["the place"], "the condition is ['the place'], not a text"),
        (7, "the condition is 7, not a text"),
        ("a\0", "the condition contains a NUL character"),
        ("\ud800", "the condition contains half of a surrogate pair"),
        (Condition(""), "the condition is empty"),
    ],
)
def test_invalid_conditions_are_refused_in_one_line(condition, message):
    with pytest.raises(UserError) as error:
        as_condition(condition)
    assert message in str(error.value)
    with pytest.raises(UserError):
        combine_values([condition], [])


def test_tables_and_json_separate_text_and_values():
    assert condition_text(CUISINE) == "the cuisine"
    assert condition_text("the place") == "the place"
    assert condition_json(CUISINE) == {
        "condition": "the cuisine",
        "values": ["Italian", "Thai", "Indian"],
    }
    assert condition_json("the place") == condition_json(Condition("the place"))
    assert condition_json(None) == {"condition": None}
