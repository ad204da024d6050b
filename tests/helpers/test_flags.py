"""The check of every error that tests provoke: the flags that it names are the command's."""

import pytest

from helpers.flags import unknown_flags
from llmcond import cli
from llmcond.errors import UserError


@pytest.mark.parametrize(
    ("command", "error", "unknown"),
    [
        ("similarity a b", "it is too long. Raise --max-length.", ["--max-length"]),
        ("similarity a b", "raise max_length (llmcond extract --max-length), or --dim", ["--dim"]),
        ("similarity a b", "fit one: llmcond fit-head --set x=1 --no-subtrac", ["--no-subtrac"]),
        ("similarity a b --conditon=c", "there is no --conditon. Did you mean '--condition'?", []),
        ("serve", "Ray is too old: pip install --upgrade ray", []),
        ("prompts show p", "name it: --model NAME (llmcond prompts --model)", ["--model"]),
        ("", "no command. See `llmcond --help`, --version", []),
    ],
)
def test_flags_that_a_command_lacks_are_found(command, error, unknown):
    assert unknown_flags(command.split(), error) == unknown


def test_an_error_that_names_one_fails_its_test(monkeypatch):
    def fail(*_):
        raise UserError("Raise --max-length.")

    monkeypatch.setattr(cli, "run_command", fail)
    with pytest.raises(AssertionError, match="similarity has no --max-length"):
        cli.run(["similarity", "a", "b", "--condition", "c"])
