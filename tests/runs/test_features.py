"""A run's features as llmcond.Head takes them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import llmcond
from llmcond.errors import UserError
from llmcond.runs import open_run


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """A run with joint and with separate features."""
    own = Path(shutil.copytree(tiny_run, tmp_path_factory.mktemp("both") / "run"))
    model = open_run(own).manifest["encoder"]["model"]
    fixed = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
    llmcond.extract(model=model, run=own, prompt=["separate"], **fixed)
    return own


@pytest.mark.parametrize(
    ("recipe", "prompt"),
    [("linear", "concat-sent-cond"), ("ica", "concat-sent-cond"), ("hypernet", "separate")],
)
def test_a_head_fitted_on_them_is_that_of_the_command(both: Path, recipe: str, prompt: str):
    # After a single epoch there is none to choose on dev.
    rank = {"rank": 2} if recipe == "hypernet" else {}
    settings = {} if recipe == "ica" else {"epochs": 1, "batch_size": 8, **rank}
    changes = [f"{key}={value}" for key, value in settings.items()]
    llmcond.fit_head(run=both, head=recipe, dim=4, prompt=prompt, set=changes, name=recipe)
    [saved] = open_run(both).find_heads([recipe])
    X, y, pair, n_condition = llmcond.load_features(both, recipe, prompt=prompt)  # noqa: N806
    assert (n_condition > 0) == (recipe == "hypernet")
    head = llmcond.Head(recipe, dim=4, n_condition=n_condition, settings=settings)
    head.fit(X, y, pair=pair)
    for name, weights in saved.head.tensors.items():
        np.testing.assert_array_equal(weights, head.head_.tensors[name])
    dev = llmcond.load_features(both, recipe, prompt=prompt, split="dev")
    assert len(dev.X) == len(dev.y) == len(dev.pair) == int(open_run(both).rows("dev").rated.sum())


def test_a_split_that_is_not_there(tiny_run: Path):
    with pytest.raises(UserError, match="held-out"):
        llmcond.load_features(tiny_run, split="held-out")
