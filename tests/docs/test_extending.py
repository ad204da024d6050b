"""The files and commands of docs/extending.md work exactly as printed."""

import sys
from pathlib import Path

import pytest
from helpers.blocks import find_blocks, run_command, split_commands, write_titled_file
from helpers.paths import ROOT

from llmcond import plugins
from llmcond.cli import run

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = find_blocks(PAGE)

#: Maps a part of a command line to text that its output must contain.
EXPECTED_OUTPUT = {
    "kendall": "kendall",
    "runs/trios --plugin": "2 queries of 2 trios",
    "complete": "cider",
}


@pytest.fixture
def forget_plugins(monkeypatch):
    """A function that forgets all plugins, so that each command must name its own."""

    def forget():
        monkeypatch.setattr(plugins, "_REGISTERED", {})
        for name in [name for name in sys.modules if name.startswith("llmcond_plugin_")]:
            monkeypatch.delitem(sys.modules, name)

    return forget


def test_page_runs(tmp_path, monkeypatch, capsys, forget_plugins):
    monkeypatch.chdir(tmp_path)
    names = []
    for language, text in BLOCKS:
        name = write_titled_file(text)
        if name:
            names.append(name)
        elif language == "bash":
            for words in split_commands(text):
                forget_plugins()
                out = run_command(words, capsys)
                for part, expected in EXPECTED_OUTPUT.items():
                    assert part not in " ".join(words) or expected in out
        elif language == "python":
            forget_plugins()
            namespace = {}
            for name in ("my_task.py", "my_heads.py"):
                exec(Path(name).read_text(), namespace)  # text of the page
            exec(text, namespace)
            assert -1 <= namespace["results"][0].metrics["spearman"].value <= 1
    assert len(names) == 11
    ranks = Path("ranks.csv").read_text(encoding="utf-8").splitlines()
    # Three test dishes, each with two columns, both in either direction.
    assert len(ranks) == 1 + 3 * 2 * 2
    assert ranks[1].split(",")[1:5] == ["forward", "chestnut soup", "drink", "cider"]
    for run_folder in ("runs/answers", "runs/largest", "runs/menus", "runs/trios"):
        forget_plugins()
        assert run(["evaluate", "--head", "none", "--run", run_folder]) == 2
        assert "--plugin" in capsys.readouterr().err
