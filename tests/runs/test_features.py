"""Loading a run's features as input of llmcond.Head."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import llmcond
from llmcond.errors import UserError
from llmcond.runs import open_run


@pytest.fixture(scope="module")
def run_with_both(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """A run with joint and with separate features."""
    folder = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("both") / "run"))
    model = open_run(folder).manifest["encoder"]["model"]
    fixed = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
    llmcond.extract(model=model, run=folder, prompt=["separate"], **fixed)
    return folder


@pytest.mark.parametrize(
    ("recipe", "prompt"),
    [("linear", "concat-sent-cond"), ("ica", "concat-sent-cond"), ("hypernet", "separate")],
)
def test_head_fitted_on_loaded_features_equals_fit_head(
    run_with_both: Path, recipe: str, prompt: str
):
    # With a single epoch, dev selects nothing, so both fits end with the same weights.
    rank = {"rank": 2} if recipe == "hypernet" else {}
    settings = {} if recipe == "ica" else {"epochs": 1, "batch_size": 8, **rank}
    changes = [f"{key}={value}" for key, value in settings.items()]
    llmcond.fit_head(run=run_with_both, head=recipe, dim=4, prompt=prompt, set=changes, name=recipe)
    [saved] = open_run(run_with_both).find_heads([recipe])
    X, y, pair, n_condition = llmcond.load_features(run_with_both, recipe, prompt=prompt)  # noqa: N806
    assert (n_condition > 0) == (recipe == "hypernet")
    head = llmcond.Head(recipe, dim=4, n_condition=n_condition, settings=settings)
    head.fit(X, y, pair=pair)
    for name, weights in saved.head.tensors.items():
        np.testing.assert_array_equal(weights, head.head_.tensors[name])
    dev = llmcond.load_features(run_with_both, recipe, prompt=prompt, split="dev")
    assert (
        len(dev.X)
        == len(dev.y)
        == len(dev.pair)
        == int(open_run(run_with_both).rows("dev").rated.sum())
    )


def test_unknown_split_is_rejected(tiny_run: Path):
    with pytest.raises(UserError, match="held-out"):
        llmcond.load_features(tiny_run, split="held-out")
