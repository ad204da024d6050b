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


def test_all_subjects_have_a_tutorial():
    names = {path.stem for path in TUTORIALS}
    assert names >= {
        *("quickstart", "own_csv", "tickets", "prompts", "own_head", "knowledge_graph"),
        *("dialogue", "csts"),
    }


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_cells_and_commands_are_valid(path):
    source = path.read_text(encoding="utf-8")
    ast.parse(source)
    for program, *arguments in find_shell_commands(source):
        assert program == "llmcond"
        _parser().parse_args(arguments)
    assert re.search("^#   kernelspec:(\n#  .*)*name: python3$", source, re.MULTILINE)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_expectations_are_regular_expressions(path):
    expectations = re.findall("^# %% expect=(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(expectations) >= 3
    for value in expectations:
        for pattern in json.loads(value):
            assert not re.search(pattern, "")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_links_lead_to_pages(path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert links
    for link in links:
        page = FOLDER / link
        assert page.is_file() or page.with_suffix(".py").is_file(), link


def test_notebook_is_executed_and_converted(notebooks, tmp_path):
    source = tmp_path / "numbers.py"
    source.write_text(NOTEBOOK, encoding="utf-8")
    tutorial = notebooks.execute(source)
    tutorial.write(tmp_path / "out")
    page = (tmp_path / "out" / "numbers.md").read_text(encoding="utf-8")
    assert page.startswith("# Numbers\n")
    assert '```python title="numbers_file.py"\nVALUE = 6\n```' in page
    assert "```text\na 6 b\n```" in page
    assert '```bash\necho "$PWD: $(ls *.py)"; echo COLUMNS \\\n    $COLUMNS\n```' in page
    notebook = json.loads((tmp_path / "out" / "numbers.ipynb").read_text(encoding="utf-8"))
    text = json.dumps(notebook)
    assert "expect" not in text
    assert notebook["cells"][2]["outputs"][0]["text"] == ["a 6 b\n"]
    for hidden in ("/tmp/tutorial-", "Writing numbers_file", "\\u001b"):
        assert hidden not in page


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("value = 1 / 0", "ZeroDivisionError: division by zero"),
        ("# !echo text; exit 3", "returned non-zero exit status 3"),
    ],
)
def test_failure_names_tutorial_cell_and_reason(
    notebooks, tmp_path, capsys, monkeypatch, cell, message
):
    (tmp_path / "broken.py").write_text(f"# %%\nvalue = 0\n\n# %%\n{cell}\n", encoding="utf-8")
    monkeypatch.setattr(notebooks, "TUTORIALS", tmp_path)
    assert notebooks.main(["broken", "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tutorial broken, code cell 2: ")
    assert message in error
    assert "\x1b" not in error
    assert not (tmp_path / "out").exists()


def test_output_that_lacks_expected_part_is_reported(notebooks):
    from nbformat.v4 import new_code_cell, new_output

    output = new_output("display_data", {"text/html": "<td>a</td>\n<td>1 </td>"})
    cell = new_code_cell("print()", metadata={"expect": ["a \\d"]}, outputs=[output])
    notebooks.check_output("name", 3, cell)
    cell.metadata["expect"].append("a 2")
    with pytest.raises(notebooks.TutorialError, match=r"tutorial name, code cell 3: .*'a 2'"):
        notebooks.check_output("name", 3, cell)


def test_unknown_tutorial_is_rejected(notebooks, capsys):
    with pytest.raises(SystemExit):
        notebooks.main(["nothing", "--out", "out"])
    assert "unknown 'nothing'. Expected one of: csts, " in capsys.readouterr().err


def test_long_cells_are_folded(notebooks):
    text = notebooks.fence_source("\n".join(["a = 1"] * 60))
    assert text.startswith("<details markdown><summary>Show this cell of 60 lines</summary>")
    assert notebooks.fence_source("a = 1") == "```python\na = 1\n```\n"


def test_wide_prose_is_wrapped_and_tables_are_not(notebooks, tmp_path):
    prose, row = "word " * 40, f" a  {'b' * 100}"
    lines = notebooks.tidy_text(f"{prose}\n{row}\n{tmp_path}/file", tmp_path).split("\n")
    assert max(map(len, lines[:-2])) <= 80
    assert lines[-2:] == [row, "file"]
