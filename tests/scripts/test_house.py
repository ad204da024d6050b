"""Statistics of a package: sizes, import cycles, and modules that mention certain words."""

import json
import subprocess
from importlib import import_module

import pytest
from helpers.paths import ROOT

FILES = {
    "__init__.py": "",
    "a.py": (
        "from tiny.b import f\n\n\ndef long():\n    x = 'sentence1'\n    y = x\n    return y\n"
    ),
    "b.py": "def f():\n    from tiny import a\n    return a\n",
    "room/__init__.py": "from .c import C\n",
    "room/c.py": (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from tiny.room import d\n\n\n"
        "class C:\n    def g(self):\n        return 'hadamard pool_overs'\n"
    ),
    "room/d.py": "from . import c\nimport tiny.b\n",
    "workflows/paint.py": (
        "def paint(self, coats=2, *, wall=None):\n    pass\n\n\n"
        "def many(a, b, c, d, e, f, *, g, h=1):\n    pass\n"
    ),
    "options.py": "class O:\n    coats: int = option(2, help='x')\n    wall: str = option('w')\n",
    "room/e.py": "import tiny.room.f\n",
    "room/f.py": "from .e import x\n",
    "kinds/dialogue.py": "def own(run):\n    return isinstance(run, DialogueRun)\n",
    "room/told.py": "def told(run):\n    return isinstance(run, (int, DialogueRun))  # dialogue\n",
}


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("house")


@pytest.fixture
def package(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "tiny" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "hadamard.toml").write_text("kind = 'x'\n")
    return tmp_path / "tiny"


def test_sizes_cycles_and_mentions_are_counted(house, package):
    result = house.measure(package)
    assert (result.files, result.lines) == (12, sum(text.count("\n") for text in FILES.values()))
    assert result.largest_file.place == "tiny/room/c.py"
    assert (result.largest_function.place, result.largest_function.lines) == ("tiny.a.long", 4)
    assert (result.function_median, result.function_p90) == (2, 4)
    assert result.cycles_load == [["tiny.room.e", "tiny.room.f"]]
    assert result.cycles_lazy == [["tiny.a", "tiny.b"], ["tiny.room.e", "tiny.room.f"]]
    assert ["tiny.room.c", "tiny.room.d"] in result.cycles_typing
    assert result.mentions == {"sentence1": 1, "spearman": 0, "pool_over": 0, "add_argument": 0}
    assert result.many_parameters == ["tiny.workflows.paint.many"]
    assert result.kind_checks == ["tiny.room.told: isinstance(run, (int, DialogueRun))"]
    assert result.costs["kind of task"] == ["tiny/room/told.py"]
    assert result.declared_twice == ["tiny.workflows.paint.paint: coats"]
    assert result.costs["head"] == ["heads/hadamard.toml", "tiny/room/c.py"]


def test_comparison_shows_before_and_after_in_columns(house, package, capsys):
    git = ["git", "-C", str(package.parent), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    (package / "room" / "f.py").unlink()
    assert house.main(["--root", str(package), "--against", "HEAD"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| | HEAD | now |"
    assert "| files | 12 | 11 |" in lines
    assert "| import cycles | 1 (tiny.room.e, tiny.room.f) | 0 |" in lines
    assert house.main(["--root", str(package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["now"]["files"] == 11


def test_empty_folder_and_unknown_revision_are_rejected(house, package, tmp_path):
    with pytest.raises(SystemExit, match="contains no Python modules"):
        house.main(["--root", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="git archive failed: fatal: not a git repository"):
        house.main(["--root", str(package), "--against", "no-such-revision"])


def test_package_has_no_import_cycles(house, capsys):
    assert house.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    cycles = [line.split()[-1] for line in lines if line.startswith("import cycles")]
    assert cycles == ["0", "0", "0"], lines
    assert any("llmcond" in line for line in lines)
