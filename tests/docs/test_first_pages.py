"""The code blocks of the README and of the first pages run.

The bundled sample is replaced by its first rows, so that fits take a second.
"""

from pathlib import Path

import pytest
from helpers.blocks import find_blocks, run_command, split_commands
from helpers.paths import ROOT

import llmcond.data.datasets
from llmcond.data.datasets import sample_folder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def user_files(in_tmp, monkeypatch):
    """Write the first rows of the table that the README mentions, and of the bundled sample."""
    sample = Path("sample")
    sample.mkdir()
    for name, n_rows in {"train": 24, "dev": 16, "test": 16}.items():
        lines = (sample_folder() / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        (sample / f"{name}.csv").write_text("\n".join(lines[: 1 + n_rows]), encoding="utf-8")
    monkeypatch.setattr(llmcond.data.datasets, "sample_folder", sample.absolute)
    Path("docs").mkdir()
    lines = (ROOT / "docs" / "tickets.csv").read_text(encoding="utf-8").splitlines()
    Path("docs/tickets.csv").write_text("\n".join(lines[:40]), encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/install.md"])
def test_blocks_of_page_run(page, user_files, capsys):
    n_run = 0
    for language, block in find_blocks((ROOT / page).read_text(encoding="utf-8")):
        if language == "python":
            exec(block, {})  # text of the page
            n_run += 1
        for words in split_commands(block) if language == "bash" else ():
            if words[0] == "llmcond":  # the other commands install the package
                run_command(words, capsys)
                n_run += 1
    assert n_run > 0
