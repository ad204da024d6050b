"""Every error in the tests is checked for flags that the command does not have."""

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
def test_unknown_flags_lists_flags_that_the_command_lacks(command, error, unknown):
    assert unknown_flags(command.split(), error) == unknown


def test_error_with_an_unknown_flag_fails_the_test(monkeypatch):
    def fail(*_):
        raise UserError("Raise --max-length.")

    monkeypatch.setattr(cli, "run_command", fail)
    with pytest.raises(AssertionError, match="similarity has no --max-length"):
        cli.run(["similarity", "a", "b", "--condition", "c"])
