"""The scikit-learn estimator: its conventions, and equality with ``fit_recipe``."""

# scikit-learn calls the features X.
# ruff: noqa: N806

import copy
import pickle

import numpy as np
import pytest
import sklearn
from helpers.heads import ignore_progress, tensors
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator

from llmcond.base.errors import UserError
from llmcond.heads import PairArrays, fit_recipe, load_recipe
from llmcond.heads.estimator import Head

# Products this small are slower on two threads, much slower where the cores are shared.
pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DIM_C, ROWS = 6, 3, 80
SHORT = {"epochs": 2, "batch_size": 32}
RECIPES = {
    "linear": {**SHORT, "info_nce": 1.0},
    "hypernet-mse": {**SHORT, "rank": 2},
    "mlp": {**SHORT, "hidden": 8},
    "ica": {},
}
PAIR = np.arange(ROWS) // 2


def make_rated_rows(n_condition=0):
    """Make rows rated from 1 to 5 by their rounded cosine; four rows share a condition."""
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, ROWS, DIM)).astype(np.float32)
    second += first * rng.uniform(0, 2, size=(ROWS, 1)).astype(np.float32)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    y = np.round(np.clip(1 + 4 * (first * second).sum(axis=1) / norms, 1, 5))
    condition = rng.normal(size=(ROWS // 4, n_condition)).astype(np.float32)
    return np.hstack([first, second, condition[np.arange(ROWS) // 4]]), y


X, Y = make_rated_rows()


@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_checks_pass_with_or_without_conditions():
    """Each check has X of some width, which is odd either with the condition's column or without.

    No other failure is allowed, and no check may fail for all heads.
    """
    names, passed = set(), set()
    supervised = Head("hadamard", n_condition=1, settings=SHORT)
    for head in (Head("pca"), Head("pca", n_condition=1), supervised):
        for check in check_estimator(head, on_skip=None, on_fail=None):
            names.add(check["check_name"])
            if check["status"] == "failed":
                error = check["exception"].__cause__ or check["exception"]
                assert "an odd number" in str(error) or "minimum of 3 is required" in str(error)
            else:
                passed.add(check["check_name"])
    assert passed == names


# -- fitted heads ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_fitted_head_equals_head_of_fit_recipe(name):
    X, y = make_rated_rows(n_condition=DIM_C)
    settings = RECIPES[name]
    estimator = Head(name, settings=settings, n_condition=DIM_C, random_state=3)
    head = estimator.fit(X, y, pair=PAIR)
    first, second, condition = X[:, :DIM], X[:, DIM : 2 * DIM], X[:, 2 * DIM :]
    pairs = PairArrays(first, second, (y - 1) / 4, condition, PAIR)
    recipe = load_recipe(name).with_settings({"dim": DIM, **settings}, "test")
    expected = fit_recipe(recipe, pairs, None, 3, ignore_progress)
    assert tensors(head.head_) == tensors(expected)
    assert (head.head_.settings, head.head_.seed) == (expected.settings, 3)
    if not expected.dim_condition:
        condition = None
    sides = np.hstack([expected.transform(side, condition) for side in (first, second)])
    np.testing.assert_allclose(head.transform(X), sides, rtol=1e-5, atol=1e-6)
    embedded = np.hstack([head.embed(side, X[:, 2 * DIM :]) for side in (first, second)])
    np.testing.assert_allclose(embedded, sides, rtol=1e-5, atol=1e-6)
    similarity = expected.similarity(first, second, condition)
    np.testing.assert_allclose(head.predict(X), similarity, rtol=1e-5, atol=1e-6)
    assert head.transform(X).dtype == head.predict(X).dtype == np.float32
    assert head.score(X, y) == pytest.approx(spearmanr(head.predict(X), y).statistic)
    assert head.n_features_in_ == 2 * DIM + DIM_C
    assert head.curve_ == expected.fit.record.get("curve", [])
    for copied in (pickle.loads(pickle.dumps(head)), copy.deepcopy(head)):
        np.testing.assert_array_equal(copied.transform(X), head.transform(X))
        assert copied.head_.fit.record == head.head_.fit.record


def test_seed_is_random_state_or_sampled_from_generator():
    settings = {**SHORT, "epochs": 1}
    for make_state in (int, np.random.RandomState):
        heads = [
            Head("linear", settings=settings, validation_fraction=0.25, random_state=state)
            for state in map(make_state, (5, 5, 6))
        ]
        first, repeated, other = (tensors(head.fit(X, Y).head_) for head in heads)
        assert first == repeated != other


@pytest.mark.parametrize("name", ["ica", "none", "random"])
def test_unsupervised_heads_need_no_ratings(name):
    head = Head(name).fit(X)
    assert tensors(head.head_) == tensors(Head(name).fit(X, 6 - Y).head_)
    assert tensors(head.head_) == tensors(Head(name, validation_fraction=0.5).fit(X, Y).head_)
    assert (head.rating_range_, head.curve_) == (None, [])
    assert [get_tags(Head(kind)).target_tags.required for kind in (name, "mlp")] == [False, True]


def test_ratings_may_have_any_scale():
    head = Head("linear", settings=SHORT).fit(X.astype(np.float16), Y)
    for ratings in (10 * Y - 3, (Y - 1) / 4, list(Y)):
        other = Head("linear", settings=SHORT).fit(X.astype(np.float16).astype(float), ratings)
        assert tensors(other.head_) == tensors(head.head_)
        assert other.rating_range_ == (min(ratings), max(ratings))
    assert head.rating_range_ == (1, 5)


def test_held_out_pairs_select_epoch(monkeypatch):
    splits = []

    def record_splits(recipe, pairs, dev, *arguments):
        splits.append((pairs, dev))
        return fit_recipe(recipe, pairs, dev, *arguments)

    monkeypatch.setattr("llmcond.heads.estimator.fit_recipe", record_splits)
    names = np.char.add("pair ", PAIR.astype(str))
    head = Head("linear", settings=SHORT, validation_fraction=0.25).fit(X, Y, pair=names)
    ((train, held_out),) = splits
    assert (len(train), len(held_out)) == (60, 20)
    assert not set(train.pair) & set(held_out.pair)
    assert head.head_.fit.record["selected_on"] == "dev"
    assert all(epoch["dev_spearman"] is not None for epoch in head.curve_)


# -- pipelines and searches --------------------------------------------------------------------


@pytest.mark.parametrize("routed", [False, True])
def test_cross_validation_splits_pairs_with_rows(routed):
    with sklearn.config_context(enable_metadata_routing=routed):
        head = Head("linear", settings=RECIPES["linear"])
        head = head.set_fit_request(pair=True) if routed else head
        params = {"pair": PAIR, **({"groups": PAIR} if routed else {})}
        groups = {} if routed else {"groups": PAIR}
        scores = cross_val_score(
            head, X, Y, cv=GroupKFold(4), params=params, error_score="raise", **groups
        )
    assert scores.shape == (4,)
    assert np.isfinite(scores).all()


def test_each_setting_is_a_parameter():
    head = Head("linear", settings={"epochs": 1})
    assert head.get_params()["settings__epochs"] == 1
    assert "settings__epochs" not in head.get_params(deep=False)
    changed = clone(head.set_params(settings__epochs=3, settings__dropout=0.0, dim=2))
    expected = {**head.get_params(deep=False), "settings__epochs": 3, "settings__dropout": 0.0}
    assert changed.get_params() == expected
    assert changed.dim == 2
    assert Head().set_params(settings__epochs=2).settings == {"epochs": 2}
    with pytest.raises(ValueError, match="Invalid parameter"):
        head.set_params(epochs=3)


# -- rejected input ----------------------------------------------------------------------------


def test_invalid_parameters_are_rejected_by_fit():
    for parameters, message in (
        ({"recipe": "mpl"}, "unknown head 'mpl'. Did you mean 'mlp'"),
        ({"settings": {"dim": 4}}, r"a separate parameter: Head\(dim="),
        ({"recipe": "none", "dim": 2}, "the head none has no setting dim"),
        ({"recipe": "hadamard"}, "set n_condition to their number of columns"),
        ({"recipe": "hypernet-mse", "n_condition": 2, "settings": {"rank": 64}}, "rank is 64, but"),
        ({"n_condition": 1}, f"{2 * DIM} columns minus the 1 of the condition, an odd number"),
        ({"settings": {"info_nce": 1.0}}, r"no pairs were given\. .* as pair="),
    ):
        with pytest.raises(ValueError, match=message):
            Head(**parameters).fit(X, Y)
    with pytest.raises(UserError, match="unknown head"):
        Head("mpl").fit(X, Y)
    assert not get_tags(Head("mpl")).target_tags.required


def test_invalid_rows_are_rejected():
    for rows, ratings, pair, message in (
        (X[:, 1:], Y, None, f"X has {2 * DIM - 1} columns, an odd number"),
        (X, None, None, "y is None: the head mlp learns from ratings"),
        (X, np.where(Y < 3, np.nan, Y), None, "Input y contains NaN"),
        (X, np.full(ROWS, 2.5), None, f"all {ROWS} ratings y are 2.5"),
        (np.where(X > 1, np.inf, X), Y, None, "Input X contains infinity"),
        (X, Y, np.arange(5), f"pair names the sentence pair of 5 rows, but X has {ROWS}"),
    ):
        with pytest.raises(ValueError, match=message):
            Head(settings=SHORT).fit(rows, ratings, pair=pair)
    with pytest.raises(ValueError, match="NaN"):
        Head("none").fit(X, np.full(ROWS, np.nan))
