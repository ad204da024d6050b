"""Kinds of task: the bundled ones, and one that an installed package adds."""

import json
import sys

import pytest

from llmcond import cli
from llmcond.errors import UserError
from llmcond.runs.kind import KINDS, find_kind
from llmcond.runs.open import open_any_run

#: Rated pairs under another name, as another package would add them.
PACKAGE = """
from llmcond.kinds.rated import Rated
from llmcond.runs.task_runs import Run
from llmcond.tasks import Task


class PairsRun(Run):
    kind = "pairs"


class Pairs(Rated):
    name, run = "pairs", PairsRun


class Answers(Task):
    kind, metrics = "pairs", ("pearson",)
"""


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_and_its_runs_have_one_name(name):
    kind = find_kind(name)
    assert kind.name == kind.run.kind == name


def test_a_misspelt_kind_is_reported_with_the_nearest():
    with pytest.raises(UserError, match=r"no kind of task 'rankin'.*'ranking'"):
        find_kind("rankin")


def test_a_package_adds_a_kind_by_an_entry_point(tmp_path, monkeypatch, capsys, tiny_checkpoint):
    (tmp_path / "pairs_kind.py").write_text(PACKAGE)
    about = tmp_path / "pairs_kind-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pairs-kind\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[llmcond.kinds]\npairs = pairs_kind:Pairs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pairs_kind", raising=False)
    monkeypatch.chdir(tmp_path)
    rows = [f"two men {a},two men {b},the place,{1 + (a == b) * 4}" for a in "xyz" for b in "xyz"]
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.csv").write_text(
            "\n".join(["sentence1,sentence2,condition,label", *rows, ""])
        )
    model = ["--model", str(tiny_checkpoint()), "--pooling", "mean", "--device", "cpu"]
    given = ["--run", "run", "--prompt", "pair-cond", "--task", "pairs_kind.py:Answers"]
    assert cli.run(["extract", *model, *given, "--data", str(tmp_path)]) == 0
    assert type(open_any_run(tmp_path / "run")).__name__ == "PairsRun"
    capsys.readouterr()
    named = ["--plugin", "pairs_kind.py:Answers"]
    assert cli.run(["evaluate", "--run", "run", "--head", "none", *named, "--json"]) == 0
    for scored in json.loads(capsys.readouterr().out)["results"]:
        assert scored["head"] == "none"
        assert (scored["n"], scored["task"]) == (9, "pairs_kind.py:Answers")
        assert "pearson" in scored
