"""docs/extending.md: its files are written and its commands run, as they stand on the page."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

import llmcond
from llmcond import plugins
from llmcond.cli import run

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

#: A part of a command's line -> what it must show.
SHOWN = {"kendall": "kendall", "runs/trios --plugin": "2 queries of 2 trios", "complete": "cider"}


@pytest.fixture
def forgotten(monkeypatch):
    """No code is known: every command of the page must name its own."""

    def forget():
        monkeypatch.setattr(plugins, "_REGISTERED", {})
        for name in [name for name in sys.modules if name.startswith("llmcond_plugin_")]:
            monkeypatch.delitem(sys.modules, name)

    return forget


def test_the_page_runs(tmp_path, monkeypatch, capsys, forgotten):
    monkeypatch.chdir(tmp_path)
    names = []
    for language, text in BLOCKS:
        title = re.match(r"# (\S+\.(?:py|toml|csv))\n", text)
        if title:
            names.append(title[1])
            Path(title[1]).write_text(text[title.end() :], encoding="utf-8")
        elif language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                forgotten()
                program, *arguments = shlex.split(line)
                assert program == "llmcond"
                assert run(arguments) == 0, (line, capsys.readouterr().err)
                shown = capsys.readouterr()
                for part, expected in SHOWN.items():
                    assert part not in line or expected in shown.out
        elif language == "python":
            forgotten()
            home = {}
            for name in ("my_task.py", "my_heads.py"):
                exec(Path(name).read_text(), home)  # the page's own text
            exec(text, home)
            assert -1 <= home["results"][0].metrics["spearman"].value <= 1
    assert len(names) == 11
    ranks = Path("ranks.csv").read_text(encoding="utf-8").splitlines()
    # Three dishes of test, two columns that are asked of each from both sides.
    assert len(ranks) == 1 + 3 * 2 * 2
    assert ranks[1].split(",")[1:5] == ["forward", "chestnut soup", "drink", "cider"]
    for refused in ("runs/answers", "runs/largest", "runs/menus", "runs/trios"):
        forgotten()
        assert run(["evaluate", "--head", "none", "--run", refused]) == 2
        assert "--plugin" in capsys.readouterr().err
    assert llmcond.Task is not None
