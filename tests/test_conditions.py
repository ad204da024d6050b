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
    combine_values,
    condition_flags,
    condition_json,
    condition_text,
)
from llmcond.errors import UserError

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


def test_tables_and_json_separate_text_and_values():
    assert condition_text(CUISINE) == "the cuisine"
    assert condition_text("the place") == "the place"
    assert condition_json(CUISINE) == {
        "condition": "the cuisine",
        "values": ["Italian", "Thai", "Indian"],
    }
    assert condition_json("the place") == condition_json(Condition("the place"))
    assert condition_json(None) == {"condition": None}
