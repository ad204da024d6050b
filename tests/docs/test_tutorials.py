"""The notebooks of docs/tutorials: their commands, links and expectations.

`python scripts/notebooks.py` executes all of them, with their expectations, for the site.
"""

import ast
import json
import re
import shlex

import pytest
from helpers.paths import ROOT

from llmcond.cli import _parser

FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.py"))


def find_shell_commands(source):
    """Return the commands of the cells of a tutorial that a shell runs."""
    lines = re.findall(r"^# !((?:.*\\\n# )*.*)$", source, re.MULTILINE)
    return [shlex.split(line.replace("\\\n# ", " ")) for line in lines]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
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
        page = FOLDER / link
        assert page.is_file() or page.with_suffix(".py").is_file(), link
