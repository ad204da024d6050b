"""``ConditionCache``: a hypernetwork gives the same embeddings with a cache as without."""

import numpy as np
import pytest

from llmcond.errors import UserError
from llmcond.heads import PairArrays, SharedRows, fit_recipe, load_recipe
from llmcond.heads.fitted import ConditionCache

pytestmark = pytest.mark.usefixtures("one_thread")


def fit_head(kind="hypernet-mse", **changes):
    rng = np.random.default_rng(0)
    first, second, condition = rng.normal(size=(3, 40, 12)).astype(np.float32)
    pairs = PairArrays(first, second, rng.uniform(size=40), condition)
    settings = {"epochs": 1, **changes}
    return fit_recipe(
        load_recipe(kind).with_settings(settings, "test"), pairs, None, 0, lambda *_: None
    )


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_cache_gives_same_embeddings_as_head(rank, activation):
    head = fit_head(dim=8, rank=rank, activation=activation)
    rng = np.random.default_rng(1)
    table = rng.normal(size=(90, 12)).astype(np.float32)
    features = rng.normal(size=(300, 12)).astype(np.float32)
    condition = table[rng.integers(90, size=300)]
    cache = ConditionCache(head)
    expected = head.transform(features, condition)
    for _ in range(2):
        np.testing.assert_allclose(cache.transform(features, condition), expected, atol=1e-5)
    n_conditions = len(np.unique(condition, axis=0))
    assert (cache.hits, cache.misses) == (n_conditions, n_conditions)
    embeddings = cache.transform(features, table[:1])
    np.testing.assert_allclose(embeddings, head.transform(features, table[:1]), atol=1e-5)
    assert cache.transform(features[:0], table[:0]).shape == (0, 8)


def test_budget_evicts_least_recently_used():
    head = fit_head(dim=8, rank=3)
    table = np.random.default_rng(2).normal(size=(3, 12)).astype(np.float32)
    condition_bytes = 12 * 4 + (12 * 3 + 3 * 8) * 4
    cache = ConditionCache(head, budget=2 * condition_bytes)
    x = np.ones((1, 12), dtype=np.float32)
    for i in (0, 1, 0, 2, 0, 1):
        np.testing.assert_allclose(
            cache.transform(x, table[[i]]), head.transform(x, table[[i]]), atol=1e-5
        )
    # Condition 2 replaced condition 1, the least recently used one.
    assert (cache.hits, cache.misses) == (2, 4)


def test_equal_vectors_count_as_one_condition():
    head = fit_head(dim=8, rank=3)
    table = np.random.default_rng(3).normal(size=(1, 12)).astype(np.float32)
    cache = ConditionCache(head)
    features = np.ones((5, 12), dtype=np.float32)
    cache.transform(features, np.repeat(table, 5, axis=0))
    cache.transform(features, SharedRows(table, np.zeros(5, dtype=np.int64)))
    assert (cache.hits, cache.misses) == (1, 1)


def test_other_heads_cannot_be_cached():
    with pytest.raises(UserError, match="a linear head generates no matrices that could be cached"):
        ConditionCache(fit_head("linear", dim=4))
    assert not fit_head("linear", dim=4).generates_matrices
    with pytest.raises(UserError, match="needs the features of each condition"):
        ConditionCache(fit_head(dim=8, rank=3)).transform(np.ones((2, 12)), None)
