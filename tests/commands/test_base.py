"""Command dataclasses: their flags, checks and Python functions."""

import inspect
import pickle
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest
from annotated_types import Ge, Lt

import llmcond
from llmcond import cli
from llmcond.base.errors import UserError
from llmcond.base.options import Amount, all_optional, option
from llmcond.cli import _command
from llmcond.commands import COMMANDS
from llmcond.commands.base import Command, Parser, add_arguments, as_function, create_command


@dataclass(frozen=True, kw_only=True)
class _Paint(Command):
    """Paint a wall.

    Twice where it rains.
    """

    example: ClassVar[str] = "paint wall"

    colour: Literal["red", "blue"] = option("red", help="colour of the wall")
    wall: str = option(flag="", metavar="WALL", help="wall to paint")
    coats: int | None = option(None, metavar="N", help="layers (default: 2)")
    tools: Sequence[str] = option((), metavar="T", help="tools to use")
    note: Sequence[str] = option((), metavar="X", repeat=True, help="note, may be repeated")
    size: tuple[float, float] | None = option(None, metavar=("W", "H"), help="size in metres")
    into: Path = option(Path("out"), metavar="DIR", help="100 % of it")
    set: Mapping[str, str] | None = option(None, metavar="KEY=VALUE", help="settings")
    gloss: bool = option(False, help="shiny")
    layers: Annotated[int, Ge(1), Lt(10)] | None = option(None, flag="-n", help="number of layers")
    drying: int | None = option(None, needs="--gloss yes", help="drying time in hours")
    matt: bool = option(False, conflicts="--gloss yes", help="not shiny")
    thickness: Amount = option(0.5, help="thickness of a layer")
    rank: int = option(
        1, parse=lambda text: 0 if text == "full" else int(text), help="rank, or full"
    )

    def execute(self) -> dict[str, object]:
        """Paint."""
        return {"wall": self.wall, "into": self.into}


def parser_of(name: str, cls: type[Command]) -> Parser:
    parser = Parser(prog=name, allow_abbrev=False)
    add_arguments(parser, cls)
    return parser


def parse_flags(*arguments: str) -> Command:
    return create_command(_Paint, vars(parser_of("paint", _Paint).parse_args(arguments)))


def test_flags_are_parsed_by_field_types(capsys):
    command = parse_flags(
        *"w --colour blue --coats 3 --tools a b --tools c --note x --note y --size 1 2.5".split(),
        *"--into here --set a=1 b=c=d --gloss --rank full".split(),
    )
    assert command == _Paint(
        wall="w",
        colour="blue",
        coats=3,
        tools=["a", "b", "c"],
        note=("x", "y"),
        size=[1.0, 2.5],
        into="here",
        set={"a": 1, "b": "c=d"},
        gloss=True,
        rank="full",
    )
    assert (command.into, command.rank) == (Path("here"), 0)
    assert parse_flags("w", "--no-gloss") == parse_flags("w") == _Paint(wall="w")
    with pytest.raises(SystemExit):
        parse_flags("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: paint WALL [options]")
    for line in (
        "colour of the wall (default: red)",
        "layers (default: 2)",
        "100 % of it (default",
    ):
        assert line in text
    assert "(default: None)" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("w --colour bleu", "--colour is 'bleu'. Did you mean 'blue'"),
        ("w --set a", "--set is 'a'; expected NAME=VALUE"),
        ("w --col red", r"there is no --col\. Did you mean '--colour' .*See `paint --help`"),
        ("--colur red", "there is no --colur"),  # before the missing WALL
        ("", "required: WALL"),
        ("w --drying 2", r"--drying needs --gloss yes\. Add it, or leave out --drying\."),
        ("w --matt --gloss", r"--matt cannot be given with --gloss yes\. Leave"),
        ("w -n 10", r"-n is 10; it must be at least 1 and below 10\."),
    ],
)
def test_invalid_flag_is_reported_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_flags(*arguments.split())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 2.5}, "-n is 2.5; expected a whole number."),
        ({"thickness": -1.0}, "--thickness is -1; it must be at least 0 and finite."),
        ({"thickness": float("nan")}, "--thickness is nan; expected a finite number."),
    ],
)
def test_invalid_value_of_function_is_reported(values, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        as_function(_Paint)(wall="w", **values)


def test_function_of_command():
    paint = as_function(_Paint)
    assert paint(wall="w", into="there") == {"wall": "w", "into": Path("there")}
    assert paint.__name__ == "paint"
    assert "Twice where it rains" in (paint.__doc__ or "")
    assert "coats: layers" in (paint.__doc__ or "")
    assert inspect.signature(paint).parameters["layers"].annotation == "int | None"
    command = _Paint(wall="w", layers=np.int64(9), thickness=0)
    # JSON cannot store NumPy types.
    assert (type(command.layers), type(command.thickness)) == (int, float)
    for args, kwargs, message in (
        ((), {"wall": "w", "color": 1}, "paint() got an unexpected argument 'color'; did you mean"),
        ((), {"wall": "w", "q": 1}, "paint() got an unexpected argument 'q'; it takes wall"),
        (("w",), {}, "paint() takes its arguments by name: paint(wall=...)"),
        ((), {}, "paint() needs wall=..."),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            paint(*args, **kwargs)
    assert all_optional(_Paint)().colour is None


# -- all commands and public names -------------------------------------------------------------


def test_every_command_is_listed_and_its_function_is_public():
    modules = {import_module(_command(name).__module__) for name in COMMANDS}
    values = [
        (name, value)
        for module in modules
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    commands = {value for _, value in values if isinstance(value, type)}
    commands = {value for value in commands if issubclass(value, Command)}
    assert commands == {_command(name) for name in COMMANDS}
    assert len(commands) == len(COMMANDS)
    functions = {name: value for name, value in values if hasattr(value, "__signature__")}
    assert len(functions) > 15
    assert {name: getattr(llmcond, name) for name in functions} == functions
    assert set(functions) <= set(llmcond.__all__) == set(dir(llmcond))


def test_every_command_has_an_example_that_parses(in_tmp):
    for data in ("my.csv", "texts.csv"):  # names in examples
        Path(data).touch()
    for run in ("default", "wn18rr", "dialogues"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "run.json").touch()
    for name in sorted(set(COMMANDS) - {"prompts"}):  # its example runs `prompts show`
        cls = _command(name)
        arguments = shlex.split(cls.example)[1 + len(name.split()) :]
        values = vars(parser_of(name, cls).parse_args(arguments))
        assert isinstance(create_command(cls, values), cls)


def test_every_public_name_can_be_imported_pickled_and_looked_up():
    for name in set(llmcond.__all__) - {"__version__"}:
        value = getattr(llmcond, name)
        assert pickle.loads(pickle.dumps(value)) is value
        # The generated reference looks functions up like this, and reads their parameters.
        assert getattr(sys.modules[value.__module__], value.__qualname__) is value
        assert inspect.getdoc(value)
        assert inspect.isclass(value) == (name[0].isupper())
        assert inspect.isclass(value) or inspect.signature(value).parameters
    assert list(inspect.signature(llmcond.fit_head).parameters)[:2] == ["head", "dim"]
    assert str(inspect.signature(llmcond.fit_head).parameters["run"].annotation) == "str | Path"
    with pytest.raises(AttributeError, match="nothing"):
        llmcond.nothing  # noqa: B018
    with pytest.raises(TypeError, match=r"load_encoder\(\) got .* 'dtyp'; did you mean 'dtype'"):
        llmcond.load_encoder("minilm", dtyp="float32")
    with pytest.raises(TypeError, match=r"by name after model: load_encoder\(model\)"):
        llmcond.load_encoder("minilm", "float32")


def test_every_flag_with_one_value_is_rejected_if_repeated():
    n_flags = 0
    for name in sorted(COMMANDS):
        parser = parser_of(name, _command(name))
        for action in parser._actions:
            is_list = action.nargs == "+" or type(action).__name__ == "_AppendAction"
            if not action.option_strings or is_list or action.dest == "help":
                continue
            flag, n_flags = action.option_strings[-1], n_flags + 1
            value = action.choices[0] if isinstance(action.choices, Sequence) else "1"
            values = [value] * int({None: 1}.get(action.nargs, action.nargs))
            with pytest.raises(UserError) as raised:
                parser.parse_args([flag, *values, flag, *values])
            assert str(raised.value).startswith(f"{flag} is given twice, but it takes one value.")
    assert n_flags > 400


def test_positional_options_come_before_required_flags(capsys):
    for name, usage in (
        ("check-condition", "check-condition TEXTS --condition TEXT [options]"),
        ("similarity", "similarity SENTENCE1 SENTENCE2 --condition TEXT [options]"),
    ):
        with pytest.raises(SystemExit):
            cli.run([name, "--help"])
        assert f"usage: llmcond {usage}" in " ".join(capsys.readouterr().out.split())


def test_similarity_names_an_empty_sentence():
    for first, second, message in (
        ("", "b", "the first sentence is empty"),
        ("a", " ", "the second sentence is empty"),
    ):
        options = {"sentence1": first, "sentence2": second, "condition": ["c"]}
        with pytest.raises(UserError, match=message):
            create_command(_command("similarity"), options)


def test_error_with_an_unknown_flag_fails_the_test(monkeypatch):
    """A fixture checks the flags in every error of the tests."""

    def fail(*_):
        raise UserError("Raise --max-length, or see `llmcond extract --max-length`.")

    monkeypatch.setattr(cli, "run_command", fail)
    with pytest.raises(AssertionError, match="similarity has no --max-length"):
        cli.run(["similarity", "a", "b", "--condition", "c"])
