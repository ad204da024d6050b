"""Conditions with example values: what they read as, and how they are copied and paired."""

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
READS = "the cuisine, such as Italian, Thai, Indian"


def test_it_is_the_text_that_the_encoder_reads():
    assert CUISINE == READS
    assert {READS: 1}[CUISINE] == 1
    assert f"{CUISINE}" == str(CUISINE) == READS
    assert (type(str(CUISINE)), json.dumps([CUISINE])) == (str, json.dumps([READS]))
    assert pa.array([CUISINE], pa.string()).to_pylist() == [READS]
    assert np.array([CUISINE])[0] == READS
    assert (CUISINE.text, CUISINE.values) == ("the cuisine", ("Italian", "Thai", "Indian"))
    assert Condition("the cuisine") == "the cuisine"
    assert llmcond.Condition is Condition


def test_copies_keep_text_and_values():
    pickles = [pickle.dumps(CUISINE, protocol) for protocol in range(2, 6)]
    copies = [copy.copy(CUISINE), copy.deepcopy(CUISINE), *map(pickle.loads, pickles)]
    for found in copies:
        assert (found, found.text, found.values) == (READS, CUISINE.text, CUISINE.values)
        assert type(found) is Condition


def test_it_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot be changed"):
        CUISINE.values = ("Greek",)
    with pytest.raises(AttributeError, match="cannot be changed"):
        CUISINE.other = 1


@pytest.mark.parametrize(
    ("given", "values"),
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
def test_values_are_a_list_or_a_text_as_in_csv(given, values):
    made = Condition("the place", given)
    assert made.values == values
    assert Condition("the place", made.values) == made
    assert "such as" not in made or values


def test_the_flags_of_a_condition_give_it_again():
    made = Condition("the place", ["Paris, Texas", "Rome", 'the "Ritz"'])
    _, condition, flag, values = shlex.split(condition_flags(made))
    assert (flag, Condition(condition, values)) == ("--values", made)
    assert condition_flags("the place") == "--condition 'the place'"
    assert condition_flags(Condition("the place")) == "--condition 'the place' --values ''"


@pytest.mark.parametrize(
    ("text", "values", "said"),
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
def test_what_is_wrong_is_said(text, values, said):
    with pytest.raises(UserError, match=said):
        Condition(text, values)


def test_values_go_with_conditions_in_their_order():
    assert combine_values(["a", "b"], []) == ["a", "b"]
    first, second = combine_values(["a", "b"], ["", "x, y"])
    assert (first, second) == ("a", "b, such as x, y")
    assert combine_values(["a"], ["x", "y"]) == ["a, such as x, y"]
    for values in (["x"], ["x", "y", "z"]):
        with pytest.raises(UserError, match=f"{len(values)} --values and 2 --condition. Give"):
            combine_values(["a", "b"], values)
    with pytest.raises(UserError, match="1 --values and 0 --condition"):
        combine_values([], ["x"])


def test_tables_and_json_have_text_and_values_apart():
    assert condition_text(CUISINE) == "the cuisine"
    assert condition_text("the place") == "the place"
    assert condition_json(CUISINE) == {
        "condition": "the cuisine",
        "values": ["Italian", "Thai", "Indian"],
    }
    assert condition_json("the place") == condition_json(Condition("the place"))
    assert condition_json(None) == {"condition": None}
