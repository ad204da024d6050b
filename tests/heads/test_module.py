"""Ensembles: a head of several members, whose cosine is the mean of theirs."""

import numpy as np
import pytest

from llmcond.errors import UserError
from llmcond.heads import PairArrays, fit_recipe, load_head, load_recipe, save_head

pytestmark = pytest.mark.usefixtures("one_thread")

# The heads are so wide that ReLU makes no embedding all zeros, which would have no direction.
SETTINGS = {
    "mlp": {"dim": 12, "hidden": 32},
    "hypernet-mse": {"dim": 4, "rank": 2},
    "towers": {"dim": 20, "hidden": 32, "rank": 4},
}


def fit(kind, seed, **changes):
    rng = np.random.default_rng(0)
    dim = 20 if kind == "towers" else 12
    first, second = rng.normal(size=(2, 60, dim)).astype(np.float32)
    condition = rng.normal(size=(60, 12)).astype(np.float32)
    pairs = PairArrays(first, second, rng.uniform(size=60), condition)
    recipe = load_recipe(kind).with_settings({**SETTINGS[kind], "epochs": 3, **changes}, "test")
    head = fit_recipe(recipe, pairs, pairs, seed, lambda *_: None)
    return head, pairs, condition if head.dim_condition else None


@pytest.mark.parametrize("kind", SETTINGS)
def test_cosine_is_mean_of_members(kind, tmp_path):
    head, pairs, condition = fit(kind, 5, members=3)
    assert head.dim_out == 3 * SETTINGS[kind]["dim"]
    single_heads = [fit(kind, 5 + number * 2**20)[0] for number in range(3)]
    expected = np.mean(
        [h.similarity(pairs.first, pairs.second, condition) for h in single_heads], 0
    )
    actual = head.similarity(pairs.first, pairs.second, condition)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert [member["curve"] for member in head.fit.record["members"]] == [
        single_head.fit.record["curve"] for single_head in single_heads
    ]
    save_head(head, tmp_path / "head", {})
    loaded, _ = load_head(tmp_path / "head")
    np.testing.assert_array_equal(
        loaded.transform(pairs.first, condition), head.transform(pairs.first, condition)
    )


@pytest.mark.parametrize("members", [0, 101])
def test_number_of_members_is_bounded(members):
    with pytest.raises(UserError, match=r"members. is .*at (least 1|most 100)\."):
        fit("mlp", 0, members=members)
