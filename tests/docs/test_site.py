"""The generated parts of the documentation site, its addresses, and its tutorials."""

import argparse
import ast
import json
import re
import shlex
import tomllib

import make_docs
import pytest
from helpers.paths import ROOT

import llmcond
from llmcond.cli import _parser


def test_reference_has_every_option_of_every_command():
    page = make_docs.commands_page()
    for name, parser in make_docs.list_parsers(_parser()):
        text = page.partition(f"## llmcond {name} {{")[2].partition("\n## ")[0]
        text += page.partition("\n## Options: ")[2]
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
                for flag in action.option_strings:
                    assert f"`{flag}`" in text, (name, flag)
    assert len(list(make_docs.list_parsers(_parser()))) == len(make_docs.COMMANDS)


def test_reference_has_every_public_name_once(tmp_path, monkeypatch):
    monkeypatch.setattr(make_docs, "PAGES", tmp_path)
    make_docs.write_reference()
    text = "".join(path.read_text() for path in (tmp_path / "reference").glob("*.md"))
    names = re.findall(r"^::: llmcond\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(name for name in llmcond.__all__ if name[0] != "_")


def test_every_file_has_the_addresses_of_pyproject():
    """The addresses are defined in pyproject.toml; a move of the project changes all of them."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    pattern = re.compile(r"https://(?:github\.com/[\w-]+/llmcond\b|[\w-]+\.github\.io/llmcond/)")
    folders = ("docs", "llmcond", "models", "packages", "scripts", ".github")
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    users = {}
    for path in paths:
        if path.suffix in {"", ".cff", ".json", ".md", ".py", ".toml", ".yml"}:
            for url in pattern.findall(path.read_text(encoding="utf-8")):
                users.setdefault(url, []).append(str(path.relative_to(ROOT)))
    assert users.keys() == {urls["Documentation"], urls["Repository"]}, users


# -- tutorials ---------------------------------------------------------------------------------

#: Their notebooks are executed, with their expectations, when the site is built.
TUTORIALS = ROOT / "docs" / "tutorials"


def find_shell_commands(source):
    """Return the commands of the cells of a tutorial that a shell runs."""
    lines = re.findall(r"^# !((?:.*\\\n# )*.*)$", source, re.MULTILINE)
    return [shlex.split(line.replace("\\\n# ", " ")) for line in lines]


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.py")), ids=lambda path: path.stem)
def test_cells_commands_expectations_and_links_are_valid(path):
    source = path.read_text(encoding="utf-8")
    ast.parse(source)
    for program, *arguments in find_shell_commands(source):
        assert program == "llmcond"
        _parser().parse_args(arguments)
    assert re.search("^#   kernelspec:(\n#  .*)*name: python3$", source, re.MULTILINE)
    expectations = re.findall("^# %% expect=(.*)$", source, re.MULTILINE)
    assert len(expectations) >= 3
    for value in expectations:
        assert not any(re.search(pattern, "") for pattern in json.loads(value))
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", source)
    assert links
    for link in links:
        page = TUTORIALS / link
        assert page.is_file() or page.with_suffix(".py").is_file(), link
