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
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pytest
from annotated_types import Ge, Lt

import llmcond
from llmcond.cli import _command
from llmcond.commands import COMMANDS
from llmcond.commands.base import Command, Parser, add_arguments, as_function, create_command
from llmcond.errors import UserError
from llmcond.options import Amount, Options, all_optional, declaration_of, option


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
    thickness: Amount = option(0.5, help="thickness of a layer")
    rank: int = option(
        1, parse=lambda text: 0 if text == "full" else int(text), help="rank, or full"
    )

    def execute(self) -> dict[str, object]:
        """Paint."""
        return {"wall": self.wall, "into": self.into}


def parse_flags(*arguments: str) -> Command:
    parser = Parser(prog="paint", allow_abbrev=False)
    add_arguments(parser, _Paint)
    return create_command(_Paint, vars(parser.parse_args(arguments)))


def test_flags_are_parsed_by_field_types():
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
    assert command.into == Path("here")
    assert command.rank == 0
    assert _Paint(wall="w", set="b=c=d").set == {"b": "c=d"}
    assert parse_flags("w") == _Paint(wall="w")
    assert parse_flags("w", "--no-gloss") == _Paint(wall="w")


def test_help_names_defaults_once(capsys):
    with pytest.raises(SystemExit):
        parse_flags("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: paint WALL [options]")
    assert "colour of the wall (default: red)" in text
    assert "layers (default: 2)" in text
    assert "100 % of it (default: out)" in text
    assert "(default: None)" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("w --colour bleu", "--colour is 'bleu'. Did you mean 'blue'"),
        ("w --set a", "--set is 'a'; expected NAME=VALUE"),
        ("w --coats x", "invalid int value"),
        ("w --col red", r"there is no --col\. Did you mean '--colour' .*See `paint --help`"),
        ("--colur red", "there is no --colur"),  # before the missing WALL
        ("w more", "unrecognized arguments: more. See `paint --help`"),
        ("", "required: WALL"),
    ],
)
def test_invalid_flag_is_reported_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_flags(*arguments.split())
    assert "\n" not in str(raised.value)


def test_python_function_checks_values_like_command_line():
    paint = as_function(_Paint)
    assert paint(wall="w", into="there") == {"wall": "w", "into": Path("there")}
    assert paint.__name__ == "_paint".removeprefix("_")
    assert "Twice where it rains" in (paint.__doc__ or "")
    assert "coats: layers" in (paint.__doc__ or "")
    with pytest.raises(UserError, match="--colour is 'green'"):
        paint(wall="w", colour="green")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "-n is 0; it must be at least 1 and below 10."),
        ({"layers": np.int64(10)}, "-n is 10; it must be at least 1 and below 10."),
        ({"layers": "3"}, "-n is '3'; expected a whole number."),
        ({"layers": 2.5}, "-n is 2.5; expected a whole number."),
        ({"thickness": -1.0}, "--thickness is -1; it must be at least 0 and finite."),
        ({"thickness": float("inf")}, "--thickness is inf; expected a finite number."),
        ({"thickness": float("nan")}, "--thickness is nan; expected a finite number."),
        ({"thickness": [1]}, "--thickness is [1]; expected a number."),
    ],
)
def test_limits_are_checked_at_construction(values, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        _Paint(wall="w", **values)
    command = _Paint(wall="w", layers=np.int64(9), thickness=0)
    assert (command.layers, command.thickness) == (9, 0)
    # JSON cannot store NumPy types.
    assert (type(command.layers), type(command.thickness)) == (int, float)
    annotation = inspect.signature(as_function(_Paint)).parameters["layers"].annotation
    assert annotation == "int | None"


def test_option_needs_its_companion_option():
    expected = "--drying needs --gloss yes. Add it, or leave out --drying."
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        _Paint(wall="w", drying=2)
    assert _Paint(wall="w", drying=2, gloss=True).drying == 2


def test_options_that_exclude_each_other_are_rejected():
    @dataclass(frozen=True, kw_only=True)
    class Cluster(Options):
        method: str = option("kmeans", help="method")
        table: Any = option(None, help="table")
        smallest: int | None = option(None, needs="--method hdbscan or --table FILE", help="size")
        clusters: int | None = option(None, conflicts="--method hdbscan", help="number")

    with pytest.raises(UserError, match=r"--smallest needs --method hdbscan or --table FILE\."):
        Cluster(smallest=3, method="other")
    with pytest.raises(
        UserError, match=r"--clusters cannot be given with --method hdbscan\. Leave"
    ):
        Cluster(clusters=3, method="hdbscan")
    assert Cluster(smallest=3, method="hdbscan").smallest == 3
    assert Cluster(smallest=3, table=np.zeros(2), clusters=2).clusters == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"wall": "w", "color": 1}, "paint() got an unexpected argument 'color'; did you mean"),
        (
            (),
            {"wall": "w", "q": 1},
            "paint() got an unexpected argument 'q'; it takes wall, colour",
        ),
        (("w",), {}, "paint() takes its arguments by name: paint(wall=...)"),
        ((), {}, "paint() needs wall=..."),
    ],
)
def test_wrong_arguments_report_function_and_similar_name(args, kwargs, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        as_function(_Paint)(*args, **kwargs)


def test_all_optional_fields_default_to_none():
    cls = all_optional(_Paint)
    assert cls().colour is None
    assert {f.name for f in cls.__dataclass_fields__.values() if declaration_of(f)} >= {
        "rank",
        "set",
    }


def test_every_command_is_listed_once():
    assert {"extract", "fit-head", "prompts", "prompts show"} <= COMMANDS.keys()
    modules = {import_module(_command(name).__module__) for name in COMMANDS}
    defined = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Command)
        and value.__module__ == module.__name__
    }
    assert defined == {_command(name) for name in COMMANDS}
    assert len(defined) == len(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_an_example_that_parses(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for data in ("my.csv", "texts.csv"):  # names in examples
        Path(data).touch()
    for run in ("default", "wn18rr", "dialogues"):
        Path("runs", run).mkdir(parents=True)
        Path("runs", run, "run.json").touch()
    cls = _command(name)
    arguments = shlex.split(cls.example)[1 + len(name.split()) :]
    parser = Parser(prog=name, allow_abbrev=False)
    add_arguments(parser, cls)
    if name != "prompts":  # its example runs `prompts show`
        assert isinstance(create_command(cls, vars(parser.parse_args(arguments))), cls)


def test_every_function_has_options_of_its_command():
    functions = [getattr(llmcond, name) for name in llmcond.__all__ if name.islower()]
    assert all(inspect.getdoc(function) for function in functions)
    assert list(inspect.signature(llmcond.fit_head).parameters)[:2] == ["head", "dim"]
    assert str(inspect.signature(llmcond.fit_head).parameters["run"].annotation) == "str | Path"
    assert set(dir(llmcond)) == set(llmcond.__all__)


def test_every_command_function_is_public():
    modules = [import_module(_command(name).__module__) for name in COMMANDS]
    functions = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "__signature__") and value.__module__ == module.__name__
    }
    assert len(functions) > 15
    assert set(functions) <= set(llmcond.__all__)
    assert all(getattr(llmcond, name) is value for name, value in functions.items())


def test_load_encoder_names_itself_in_errors():
    with pytest.raises(TypeError, match=r"load_encoder\(\) got .* 'dtyp'; did you mean 'dtype'"):
        llmcond.load_encoder("minilm", dtyp="float32")
    with pytest.raises(TypeError, match=r"by name after model: load_encoder\(model\)"):
        llmcond.load_encoder("minilm", "float32")


@pytest.mark.parametrize("name", sorted(set(llmcond.__all__) - {"__version__"}))
def test_every_public_name_can_be_pickled_and_looked_up(name):
    value = getattr(llmcond, name)
    assert pickle.loads(pickle.dumps(value)) is value
    # The generated reference looks functions up like this, and reads their parameters.
    assert getattr(sys.modules[value.__module__], value.__qualname__) is value
    assert inspect.getdoc(value)
    assert inspect.isclass(value) == (name[0].isupper())
    if inspect.isfunction(value):
        assert inspect.signature(value).parameters


def _repeated_flags() -> list[tuple[str, str, list[str]]]:
    """Return each flag of each command that takes one value, with its words on the command line."""
    cases = []
    for name in sorted(COMMANDS):
        parser = Parser(prog=name, allow_abbrev=False)
        add_arguments(parser, _command(name))
        for action in parser._actions:
            if not action.option_strings or action.nargs == "+" or action.dest == "help":
                continue
            if type(action).__name__ == "_AppendAction":
                continue
            value = action.choices[0] if isinstance(action.choices, Sequence) else "1"
            count = {None: 1}.get(action.nargs, action.nargs)
            cases.append((name, action.option_strings[-1], [value] * int(count)))
    return cases


def test_every_flag_with_one_value_is_rejected_if_repeated():
    cases = _repeated_flags()
    assert len(cases) > 400
    for name, flag, values in cases:
        parser = Parser(prog=name, allow_abbrev=False)
        add_arguments(parser, _command(name))
        with pytest.raises(UserError) as raised:
            parser.parse_args([flag, *values, flag, *values])
        assert str(raised.value).startswith(f"{flag} is given twice, but it takes one value."), name
