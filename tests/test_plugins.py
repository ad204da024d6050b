"""User-defined heads and objectives, from files that a recipe names."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from helpers.commands import run_json, run_rejected

from llmcond.base import package as plugins
from llmcond.base.errors import UserError
from llmcond.cli import run
from llmcond.features.view import recipe_view
from llmcond.heads import PairArrays, fit_recipe, load_head, load_recipe, save_head
from llmcond.runs import open_run
from llmcond.runs.trials import Trial

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = """
from dataclasses import dataclass

import torch
from torch import nn

from llmcond.heads import HeadModule, TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSettings(TrainingSettings):
    sharpness: float = 1.0


class GatedHead(HeadModule):
    Settings = GatedSettings
    features = "separate"
    conditioned = True

    def __init__(self, settings, dim_in, dim_condition):
        super().__init__(settings, dim_in, dim_condition)
        self.gate = nn.Linear(dim_condition, dim_in)
        self.norm = nn.BatchNorm1d(dim_in)

    def forward(self, x, condition, which):
        gate = (self.settings.sharpness * self.gate(condition)).sigmoid()
        return self.dropout(self.norm(x) * gate.index_select(0, which))


class DotHead(GatedHead):
    def similarity(self, first, second):
        return (first * second).sum(dim=1) / 100


class Plain(HeadModule):
    Settings = TrainingSettings

    def __init__(self, settings, dim_in, dim_condition):
        super().__init__(settings, dim_in, dim_condition)
        self.layer = nn.Linear(dim_in, dim_in)

    def forward(self, x, condition, which):
        return self.layer(x)


class BareHead(HeadModule):
    pass
"""
OBJECTIVES = """
import torch
from torch import nn


class Scaled(nn.Module):
    contrasts = True

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, first, second, rating, batch, settings):
        one, other = batch.contrastive.T
        cosine = batch.similarity(first, second) / self.temperature
        sign = (rating[one] - rating[other]).sign()
        return nn.functional.softplus(-sign * (cosine[one] - cosine[other])).mean()
"""
TRAINING = """
description = "mine"
source = "mine"
dropout = 0.1
learning_rate = 0.01
batch_size = 16
epochs = 3
patience = 3
"""


@pytest.fixture(autouse=True)
def clear_plugins(monkeypatch):
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    monkeypatch.setattr(plugins, "_LOADED", [])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_heads.py").write_text(HEADS)
    (tmp_path / "my_objectives.py").write_text(OBJECTIVES)
    return tmp_path


def write_recipe(folder, **values):
    lines = [f"{key} = {value!r}" for key, value in values.items()]
    (folder / "mine.toml").write_text("\n".join(lines) + TRAINING)
    return load_recipe(str(folder / "mine.toml"))


def make_pairs(n=60, dim=6):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, n, dim)).astype(np.float32)
    condition = rng.normal(size=(5, 4)).astype(np.float32)[rng.integers(5, size=n)]
    return PairArrays(first, second, rng.uniform(size=n), condition, np.arange(n) // 2)


def fit(recipe, seed=0, device="cpu"):
    return fit_recipe(recipe, make_pairs(), make_pairs(), seed, lambda *_: None, device)


@pytest.mark.parametrize("members", [1, 2])
def test_head_from_file_is_fitted_saved_and_loaded(folder, members):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    recipe = write_recipe(folder, kind="my_heads.py:DotHead", sharpness=2.0, members=members)
    head = fit(recipe)
    assert torch.equal(before, torch.get_rng_state())
    assert (head.kind, head.features) == ("my_heads.py:DotHead", "separate")
    assert head.settings.sharpness == 2.0
    pairs = make_pairs()
    first, second = (head.transform(side, pairs.condition) for side in (pairs.first, pairs.second))
    assert first.shape == (60, 6 * members)
    actual = head.similarity(pairs.first, pairs.second, pairs.condition)
    expected = (first * second).sum(axis=1) / 100 / members
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)
    save_head(head, folder / "head", {})
    loaded, description = load_head(folder / "head")
    assert description["kind"] == "my_heads.py:DotHead"
    for same in (loaded, fit(recipe)):
        np.testing.assert_array_equal(same.transform(pairs.first, pairs.condition), first)
    with pytest.raises(UserError, match="DotHead head needs the features of each condition"):
        fit_recipe(recipe, PairArrays(pairs.first, pairs.second, pairs.rating), None, 0, print)


def test_changed_code_gives_another_digest_of_a_fit(folder, tiny_run):
    run, digests = open_run(tiny_run), []
    for text in (HEADS, HEADS.replace("sigmoid", "tanh")):
        (folder / "my_heads.py").write_text(text)
        recipe = write_recipe(folder, kind="my_heads.py:Plain")
        view = recipe_view(recipe, (run.prompt(None),), True)
        digests.append(Trial(recipe, 0, {}, view).digest(run, "dev"))
    assert digests[0] != digests[1]


def test_loading_head_does_not_run_unregistered_code(folder):
    save_head(fit(write_recipe(folder, kind="my_heads.py:GatedHead")), folder / "head", {})
    script = f"""
        import pathlib
        from llmcond.base import package as plugins
        from llmcond.base.errors import UserError
        from llmcond.heads import load_head

        folder = pathlib.Path({str(folder)!r})
        try:
            load_head(folder / "head")
        except UserError as error:
            assert "my_heads.py:GatedHead" in str(error) and "--plugin" in str(error), error
        else:
            raise AssertionError("code was run")
        plugins.load("my_heads.py:GatedHead", folder)
        print(load_head(folder / "head")[0].kind)
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (process.stdout, process.stderr) == ("my_heads.py:GatedHead\n", "")


def test_head_that_does_not_load_is_left_out_of_evaluation(capsys, folder, run_copy, monkeypatch):
    (folder / "mine.toml").write_text(f'kind = "my_heads.py:Plain"{TRAINING}')
    fit = ("fit-head", "--run", run_copy, "--head")
    run_json(capsys, *fit, folder / "mine.toml")
    run_json(capsys, *fit, "pca", "--dim", 3)
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    monkeypatch.setattr(plugins, "_LOADED", [])
    assert run(["evaluate", "--run", str(run_copy), "--json"]) == 0
    printed = capsys.readouterr()
    heads = [row["head"] for row in json.loads(printed.out)["results"]]
    assert sorted(set(heads)) == ["none", "pca"]
    (line,) = [line for line in printed.err.splitlines() if "left out" in line]
    assert "my_heads.py:Plain" in line
    assert "--plugin" in line
    message = run_rejected(capsys, "evaluate", "--run", run_copy, "--head", "mine")
    assert "my_heads.py:Plain" in message


def test_invalid_heads_are_rejected(folder):
    for kind, message in (
        ("my_heads.py:nn", "nn is not a head: .*HeadModule"),
        ("my_heads.py:BareHead", "BareHead has no valid Settings"),
        ("my_heads.py:Gated", "no 'Gated'.*GatedHead"),
        ("other.py:Gated", r"other\.py.* does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            write_recipe(folder, kind=kind)


def test_objective_from_file_is_minimised(folder):
    values = {"kind": "linear", "dim": 4, "mse": 0.0, "objective_weight": 2.0}
    recipe = write_recipe(folder, **values, objective="my_objectives.py:Scaled")
    assert recipe.settings.contrasts
    recipe = recipe.with_settings({"epochs": 8, "dropout": 0.0}, "test")
    head = fit(recipe)
    losses = [epoch["loss"] for epoch in head.fit.record["curve"]]
    assert losses[-1] < losses[0]
    half = fit(recipe.with_settings({"objective_weight": 1.0}, "test"))
    assert half.fit.record["curve"][0]["loss"] == pytest.approx(losses[0] / 2, rel=0.05)
    save_head(head, folder / "head", {})
    plugins._REGISTERED.clear()
    # A fitted head does not need its objective.
    loaded, description = load_head(folder / "head")
    assert description["settings"]["objective"] == "my_objectives.py:Scaled"
    np.testing.assert_array_equal(loaded.tensors["weight"], head.tensors["weight"])
    with pytest.raises(UserError, match=r"objective is 'margin'; expected code as FILE.py:NAME"):
        load_recipe("linear").with_changes({"objective": "margin"}, "--set")
