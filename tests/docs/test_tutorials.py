"""The notebooks of docs/tutorials: their commands, links and expectations, and how they execute.

`python scripts/notebooks.py` executes all of them, which takes a minute, when the site is built.
"""

import ast
import json
import re
import shlex
from importlib import import_module

import pytest
from helpers.paths import ROOT

from llmcond.cli import _parser

FOLDER = ROOT / "docs" / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.py"))
NOTEBOOK = """\
# %% [markdown]
# # Numbers

# %%
# %%writefile numbers_file.py
VALUE = 6

# %% expect=["^a 6 b$"]
import os
import sys

from numbers_file import VALUE

print("\\x1b[31ma\\x1b[0m", VALUE, "b", file=sys.stderr)

# %% expect=["^.: numbers_file.py", "COLUMNS 80"]
# !echo "$PWD: $(ls *.py)"; echo COLUMNS \\
#     $COLUMNS
"""


@pytest.fixture
def notebooks(monkeypatch):
    for library in ("jupytext", "nbclient", "nbconvert", "ipykernel"):
        pytest.importorskip(library)
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("notebooks")


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


def test_notebook_is_executed_and_converted(notebooks, tmp_path):
    source = tmp_path / "numbers.py"
    source.write_text(NOTEBOOK, encoding="utf-8")
    notebooks.execute(source).write(tmp_path / "out")
    page = (tmp_path / "out" / "numbers.md").read_text(encoding="utf-8")
    assert page.startswith("# Numbers\n")
    assert '```python title="numbers_file.py"\nVALUE = 6\n```' in page
    assert "```text\na 6 b\n```" in page
    assert '```bash\necho "$PWD: $(ls *.py)"; echo COLUMNS \\\n    $COLUMNS\n```' in page
    for hidden in ("/tmp/tutorial-", "Writing numbers_file", "\\u001b", "expect"):
        assert hidden not in page
    source.write_text(NOTEBOOK.replace("^a 6 b$", "a 7"), encoding="utf-8")
    with pytest.raises(notebooks.TutorialError, match=r"code cell 2: .*'a 7'"):
        notebooks.execute(source)
