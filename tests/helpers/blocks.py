"""Code blocks of documentation pages, run in this process."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmcond.cli import run


def find_blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each code block of a page."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def split_commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without prompts and comments."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


def write_titled_file(block: str) -> str | None:
    """Write a block that begins with a file's name in a comment, and return the name."""
    title = re.match(r"# (\S+\.(?:py|toml|csv))\n", block)
    if not title:
        return None
    Path(title[1]).write_text(block[title.end() :], encoding="utf-8")
    return title[1]


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command of llmcond, check that it succeeds, and return what it printed."""
    program, *arguments = words
    assert program == "llmcond"
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 0, (shlex.join(words), captured.err)
    return captured.out
