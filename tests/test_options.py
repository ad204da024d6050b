"""Options: every option of every command checks the type of its value."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np

from llmcond.base.errors import UserError
from llmcond.base.options import flag_of, options_of, plain_type
from llmcond.cli import _command
from llmcond.commands import COMMANDS

NAN, INF = float("nan"), float("inf")
#: Values of other types than an option has, by its type.
WRONG: Mapping[Any, Sequence[Any]] = {
    bool: [1, 0.0, "yes", [True]],
    int: [True, np.True_, 1.5, 1.0, NAN, "x", [1], b"1", np.array([[1, 2]])],
    float: [True, NAN, INF, "x", [1.0], 1j],
    str: [5, True, ["a"], b"a", {"a": 1}],
    Path: [5, ["a"], b"a"],
    Literal: ["nonsense", 5, ["x"], np.array(["x", "y"]), True],
    Sequence: [5, b"x", [None], [b"x"], [["x"]], {"x": 1}, np.array("x"), [NAN]],
    Mapping: [5, "x", ["x"], [5], {"a": None}, {"a": {}}, ["a=1", "a=2"], {1: 2}, [("a", 1)]],
    tuple: [5, (1,), (1, 2, 3), ("a", "b"), (NAN, 1), b"ab"],
}
#: Values of required options that stand beside the tested one.
LEGAL: Mapping[Any, Any] = {str: "x", Path: "x.csv", Sequence: ["x"]}


def _type_name(kind: Any) -> Any:
    if get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        return Sequence
    return get_origin(kind) or kind


def _cases() -> list[tuple[str, str, Any]]:
    cases, seen = [], set()
    for name in sorted(COMMANDS):
        for option, hint, spec in options_of(_command(name)):
            if (option, str(hint), spec) in seen:  # Commands share options.
                continue
            seen.add((option, str(hint), spec))
            kind = plain_type(hint)
            wrong = list(WRONG.get(_type_name(kind), ()))
            if kind is str and int in get_args(hint):
                wrong.remove(5)
            if kind is not Any and NoneType not in get_args(hint):
                wrong.append(None)
            # A text is parsed as on the command line, and checked where it is used.
            wrong = [value for value in wrong if spec.parse is None or not isinstance(value, str)]
            cases += [(name, option, value) for value in wrong]
    return cases


def test_every_option_rejects_values_of_other_types():
    cases = _cases()
    assert len(cases) > 1_000
    unexpected = []
    for name, option, value in cases:
        cls = _command(name)
        declared = {field: (hint, spec) for field, hint, spec in options_of(cls)}
        values = {
            field.name: LEGAL.get(_type_name(plain_type(declared[field.name][0])), [])
            for field in fields(cls)
            if field.default is MISSING and field.name in declared
        }
        flag = declared[option][1].flag or flag_of(option)
        try:
            cls(**{**values, option: value})
        except UserError as error:
            message = str(error)
            if message.startswith(flag) and "\n" not in message and len(message) < 700:
                continue
            unexpected.append((name, option, value, message))
        else:
            unexpected.append((name, option, value, "no error"))
    assert unexpected == []


def test_lists_in_settings_are_joined_as_on_the_command_line(in_tmp):
    (in_tmp / "runs" / "default").mkdir(parents=True)
    (in_tmp / "runs" / "default" / "run.json").touch()
    settings = {"a": True, "b": 0.5, "c": "x", "d": [1, 2]}
    expected = {"a": "true", "b": "0.5", "c": "x", "d": "1,2"}
    assert _command("fit-head")(head="mlp", set=settings).set == expected
    swept = _command("sweep")(head="mlp", vary={"dim": [16, 32], "x": "1,2", "y": [[1, 2], [3]]})
    assert swept.varied() == {"dim": ["16", "32"], "x": ["1", "2"], "y": ["1+2", "3"]}
    assert _command("evaluate")(history=3).history == "3"
