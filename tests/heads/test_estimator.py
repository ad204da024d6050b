"""The scikit-learn estimator: its conventions, and equality with ``fit_recipe``."""

# scikit-learn calls the features X.
# ruff: noqa: N803, N806

import copy
import pickle
import warnings

import numpy as np
import pytest
import sklearn
from helpers.heads import ignore_progress, tensors
from joblib.externals.loky import get_reusable_executor
from scipy.stats import spearmanr
from sklearn.base import clone, is_regressor
from sklearn.ensemble import StackingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    ShuffleSplit,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator

from llmcond.errors import UserError
from llmcond.heads import FittedHead, PairArrays, fit_recipe, load_head, load_recipe, save_head
from llmcond.heads.estimator import Head

# Products this small are slower on two threads, much slower where the cores are shared.
pytestmark = pytest.mark.usefixtures("one_thread")

DIM, DIM_C, ROWS = 6, 3, 80
SHORT = {"epochs": 2, "batch_size": 32}
CONTRAST = {**SHORT, "info_nce": 1.0}
#: Settings that make every bundled recipe small.
RECIPES = {
    "concat": SHORT,
    "concat-paper": SHORT,
    "hadamard": SHORT,
    "hadamard-paper": {},
    "hypernet": {**SHORT, "rank": 2, "info_nce": 0.0},
    "hypernet-ablation": {**SHORT, "rank": 2},
    "hypernet-full": {**SHORT, "info_nce": 0.0},
    "hypernet-full-mse": SHORT,
    "hypernet-joint": {**SHORT, "rank": 2},
    "hypernet-mse": {**SHORT, "rank": 2},
    "hypernet-released": {**SHORT, "rank": 2, "info_nce": 0.0},
    "ica": {},
    "linear": SHORT,
    "mlp": {**SHORT, "hidden": 8},
    "none": {},
    "pca": {},
    "random": {},
    "towers": {**SHORT, "rank": 2, "hidden": 8},
    "whitening": {},
}
UNSUPERVISED = ["ica", "none", "pca", "random", "whitening"]


def make_rated_rows(n, seed, n_condition=0):
    """Make rows rated from 1 to 5 by their rounded cosine; four rows share a condition."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, n, DIM)).astype(np.float32)
    second += first * rng.uniform(0, 2, size=(n, 1)).astype(np.float32)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    y = np.round(np.clip(1 + 4 * (first * second).sum(axis=1) / norms, 1, 5))
    condition = rng.normal(size=(-(-n // 4), n_condition)).astype(np.float32)
    return np.hstack([first, second, condition[np.arange(n) // 4]]), y


@pytest.fixture(scope="module")
def data():
    return make_rated_rows(ROWS, seed=1)


@pytest.fixture(scope="module")
def conditioned():
    return make_rated_rows(ROWS, seed=1, n_condition=DIM_C)


def split_columns(X):
    return X[:, :DIM], X[:, DIM : 2 * DIM], X[:, 2 * DIM :]


def fit_directly(name, X, y, pair=None, seed=0, **settings):
    """Fit without the estimator."""
    recipe = load_recipe(name)
    if recipe.dim is not None:
        settings = {"dim": DIM, **settings}
    first, second, condition = split_columns(X)
    condition = condition if condition.shape[1] else None
    pairs = PairArrays(first, second, (y - y.min()) / np.ptp(y), condition, pair)
    return fit_recipe(recipe.with_settings(settings, "test"), pairs, None, seed, ignore_progress)


# -- scikit-learn's own checks -----------------------------------------------------------------

_ODD = "its X has 3 or 5 columns, an odd number, which two sentences cannot share"
_EVEN = "its X has 2, 4 or 10 columns, which without the condition's one are an odd number"
#: Checks that cannot pass without condition columns, and with one. No check is in both.
FAILS_WITHOUT = dict.fromkeys(
    [
        "check_dict_unchanged",
        "check_dont_overwrite_parameters",
        "check_estimators_dtypes",
        "check_estimators_nan_inf",
        "check_estimators_pickle",
        "check_f_contiguous_array_estimator",
        "check_fit2d_predict1d",
        "check_fit_score_takes_y",
        "check_methods_sample_order_invariance",
        "check_methods_subset_invariance",
        "check_pipeline_consistency",
        "check_supervised_y_2d",
        "check_transformer_data_not_an_array",
        "check_transformer_general",
        "check_transformer_preserve_dtypes",
    ],
    _ODD,
)
FAILS_WITH = dict.fromkeys(
    [
        "check_dtype_object",
        "check_estimators_fit_returns_self",
        "check_estimators_overwrite_params",
        "check_fit_check_is_fitted",
        "check_fit_idempotent",
        "check_n_features_in",
        "check_n_features_in_after_fitting",
        "check_positive_only_tag_during_fit",
        "check_readonly_memmap_input",
        "check_regressor_data_not_an_array",
        "check_regressors_int",
        "check_regressors_no_decision_function",
        "check_regressors_train",
    ],
    _EVEN,
)


@pytest.mark.parametrize(
    ("head", "expected_failed_checks"),
    [
        (Head("pca"), FAILS_WITHOUT),
        (Head("pca", n_condition=1), FAILS_WITH),
        (Head("mlp", settings={**SHORT, "hidden": 4}), FAILS_WITHOUT),
        (Head("hadamard", n_condition=1, settings=SHORT), FAILS_WITH),
    ],
    ids=["pca", "pca-condition", "mlp", "hadamard"],
)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_checks_pass(head, expected_failed_checks):
    results = check_estimator(head, on_skip=None, on_fail=None)
    failed = [check for check in results if check["status"] == "failed"]
    for check in failed:
        # Only the number of columns may be a reason for failure.
        error = check["exception"].__cause__ or check["exception"]
        assert "an odd number" in str(error) or "minimum of 3 is required" in str(error), check
    assert {check["check_name"] for check in failed} == set(expected_failed_checks)


def test_every_scikit_learn_check_passes_with_or_without_conditions():
    assert not set(FAILS_WITHOUT) & set(FAILS_WITH)


# -- fitted heads ------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", RECIPES)
def test_fitted_head_equals_head_of_fit_recipe(conditioned, name):
    X, y = conditioned
    head = Head(name, settings=RECIPES[name], n_condition=DIM_C, random_state=3).fit(X, y)
    expected_head = fit_directly(name, X, y, seed=3, **RECIPES[name])
    assert tensors(head.head_) == tensors(expected_head)
    assert (head.head_.settings, head.head_.seed) == (expected_head.settings, 3)
    first, second, condition = split_columns(X)
    head_condition = condition if expected_head.dim_condition else None
    embeddings = [expected_head.transform(side, head_condition) for side in (first, second)]
    np.testing.assert_allclose(head.transform(X), np.hstack(embeddings), rtol=1e-5, atol=1e-6)
    similarity = expected_head.similarity(first, second, head_condition)
    np.testing.assert_allclose(head.predict(X), similarity, rtol=1e-5, atol=1e-6)
    assert head.transform(X).dtype == head.predict(X).dtype == np.float32
    assert head.n_features_in_ == 2 * DIM + DIM_C
    assert head.curve_ == expected_head.fit.record.get("curve", [])


def test_every_bundled_recipe_is_tested():
    from llmcond.bundled import bundled_names

    # Hyper-CL's recipes by encoder are hypernet-released with other numbers.
    names = [name for name in bundled_names("heads") if not name.startswith("hypercl-")]
    assert sorted(RECIPES) == names


@pytest.mark.parametrize("name", ["mlp", "ica", "hypernet-mse"])
def test_same_random_state_gives_same_bits(conditioned, name):
    heads = [
        Head(
            name,
            settings=RECIPES[name],
            n_condition=DIM_C,
            validation_fraction=0.25,
            random_state=seed,
        ).fit(*conditioned)
        for seed in (5, 5, 6)
    ]
    bits = [tensors(head.head_) for head in heads]
    assert bits[0] == bits[1] != bits[2]


def test_random_state_may_be_generator(data):
    seeds = [
        Head("random", random_state=np.random.RandomState(seed)).fit(data[0]).head_.seed
        for seed in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize("name", UNSUPERVISED)
def test_unsupervised_heads_need_no_ratings(data, name):
    X, y = data
    head = Head(name).fit(X)
    assert tensors(head.head_) == tensors(Head(name).fit(X, 6 - y).head_)
    assert tensors(head.head_) == tensors(Head(name, validation_fraction=0.5).fit(X, y).head_)
    assert (head.rating_range_, head.curve_) == (None, [])


@pytest.mark.parametrize("change", [lambda y: 10 * y - 3, lambda y: (y - 1) / 4, list])
def test_ratings_may_have_any_scale(data, change):
    X, y = data
    heads = [Head("linear", settings=SHORT).fit(X, ratings) for ratings in (y, change(y))]
    assert tensors(heads[0].head_) == tensors(heads[1].head_)
    assert heads[0].rating_range_ == (1, 5)
    assert heads[1].rating_range_ == (min(change(y)), max(change(y)))
    assert heads[1].score(X, change(y)) == pytest.approx(heads[0].score(X, y))


def test_float16_features_give_same_head_as_float64(data):
    X, y = data
    half = X.astype(np.float16)
    heads = [
        Head("linear", settings=SHORT).fit(features, y)
        for features in (half, half.astype(np.float64))
    ]
    assert tensors(heads[0].head_) == tensors(heads[1].head_)


def test_default_dim_is_limited_to_dim_of_features(data):
    head = Head("pca").fit(*data)
    assert load_recipe("pca").dim > head.head_.settings.dim == DIM
    assert head.transform(data[0]).shape == (ROWS, 2 * DIM)
    assert Head("pca", dim=2).fit(*data).transform(data[0]).shape == (ROWS, 4)


def test_recipe_may_be_file(data, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "pca"\ndescription = "d"\nsource = "s"\ndim = 2\n')
    for recipe in (path, str(path)):
        assert Head(recipe).fit(data[0]).transform(data[0]).shape == (ROWS, 4)


def test_held_out_rows_select_epoch(data):
    X, y = data
    head = Head("linear", settings={**SHORT, "epochs": 5}, validation_fraction=0.25).fit(X, y)
    assert head.head_.fit.record["selected_on"] == "dev"
    assert all(epoch["dev_spearman"] is not None for epoch in head.curve_)
    assert head.head_.fit.record["steps_per_epoch"] == 2  # 60 of 80 rows
    head_without_dev = Head("linear", settings={**SHORT, "epochs": 5}).fit(X, y)
    assert head_without_dev.head_.fit.record["selected_on"] is None
    assert [epoch["dev_spearman"] for epoch in head_without_dev.curve_] == [None] * 5


def test_validation_split_keeps_sentence_pairs_together(data, monkeypatch):
    splits = []

    def spy(recipe, pairs, dev, seed, on_epoch, device):
        splits.append((pairs, dev))
        return fit_recipe(recipe, pairs, dev, seed, on_epoch, device)

    monkeypatch.setattr("llmcond.heads.estimator.fit_recipe", spy)
    pair = np.repeat([f"pair {number}" for number in range(ROWS // 2)], 2)
    Head("linear", settings=SHORT, validation_fraction=0.25).fit(*data, pair=pair)
    ((train, held_out),) = splits
    assert (len(train), len(held_out)) == (60, 20)
    assert not set(train.pair) & set(held_out.pair)


def test_fit_notes_are_raised_as_warnings(data):
    with pytest.warns(UserWarning, match="are fewer than batch_size 512"):
        Head("linear", settings={"epochs": 1}).fit(*data)


# -- contrasts ---------------------------------------------------------------------------------


def test_contrastive_objectives_take_pairs(data):
    X, y = data
    pair = np.arange(ROWS) // 2
    head = Head("linear", settings=CONTRAST).fit(X, y, pair=pair)
    assert tensors(head.head_) == tensors(fit_directly("linear", X, y, pair=pair, **CONTRAST))
    assert head.head_.fit.record["n_contrastive_pairs"] == ROWS // 2


def test_rows_of_pair_need_not_be_adjacent(data):
    X, y = data
    pair = np.arange(ROWS) // 2
    separated = np.concatenate([np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)])
    heads = [
        Head("linear", settings=CONTRAST).fit(X[rows], y[rows], pair=pair[rows])
        for rows in (np.arange(ROWS), separated)
    ]
    assert tensors(heads[0].head_) == tensors(heads[1].head_)


def test_contrastive_objective_without_pairs_is_rejected(data):
    with pytest.raises(ValueError, match=r"no pairs were given\. .* as pair="):
        Head("linear", settings=CONTRAST).fit(*data)


def test_two_of_three_rows_of_pair_are_contrasted(data):
    pair = np.arange(ROWS)
    pair[[10, 20, 30]] = 10
    head = Head("linear", settings=CONTRAST).fit(*data, pair=pair)
    assert head.head_.fit.record["n_contrastive_pairs"] == 1


@pytest.mark.parametrize("routed", [False, True])
def test_cross_validation_splits_pairs_with_rows(data, routed):
    X, y = data
    pair = np.repeat(np.arange(ROWS // 2), 2)
    with sklearn.config_context(enable_metadata_routing=routed):
        head = Head("linear", settings=CONTRAST)
        head = head.set_fit_request(pair=True) if routed else head
        groups = {"params": {"pair": pair, "groups": pair}} if routed else {"groups": pair}
        groups = groups if routed else {**groups, "params": {"pair": pair}}
        scores = cross_val_score(head, X, y, cv=GroupKFold(4), error_score="raise", **groups)
    assert scores.shape == (4,)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("routed", [False, True])
def test_sample_weights_are_rejected(data, routed):
    weights = np.ones(ROWS)
    with sklearn.config_context(enable_metadata_routing=routed):
        with pytest.raises(TypeError, match="sample_weight"):
            Head("linear").fit(*data, sample_weight=weights)
        with pytest.raises((TypeError, ValueError), match="sample_weight"):
            GridSearchCV(Head("linear"), {"dim": [2]}).fit(*data, sample_weight=weights)


# -- one side, names, scores -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "hypernet-mse", "pca"])
def test_embed_transforms_either_sentence(conditioned, name):
    X, y = conditioned
    head = Head(name, settings=RECIPES[name], n_condition=DIM_C).fit(X, y)
    first, second, condition = split_columns(X)
    sides = np.hstack([head.embed(first, condition), head.embed(second, condition)])
    np.testing.assert_allclose(sides, head.transform(X), rtol=1e-5, atol=1e-6)
    shared = head.embed(first[:4], condition[:1])  # four rows share a condition
    np.testing.assert_allclose(shared, head.embed(first, condition)[:4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "features", "condition", "message"),
    [
        ("linear", np.zeros((2, DIM + 1)), None, f"have {DIM + 1} dimensions.*fitted on {DIM}"),
        ("linear", np.full((2, DIM), np.nan), None, "features contains NaN"),
        ("hadamard", np.zeros((2, DIM)), None, "also needs the features of each condition"),
        ("hadamard", np.zeros((2, DIM)), np.zeros((2, DIM_C + 1)), "conditions have 4 dimensions"),
        ("hadamard", np.zeros((3, DIM)), np.zeros((2, DIM_C)), "3 sentences and 2 conditions"),
    ],
)
def test_embed_rejects_mismatched_input(conditioned, name, features, condition, message):
    head = Head(name, settings=SHORT, n_condition=DIM_C).fit(*conditioned)
    with pytest.raises(ValueError, match=message):
        head.embed(features, condition)


def test_embed_rejects_conditions_if_fitted_without(data):
    with pytest.raises(ValueError, match="this pca head was fitted on none"):
        Head("pca").fit(data[0]).embed(data[0][:, :DIM], np.zeros((ROWS, 2)))


def test_output_feature_names(data):
    head = Head("pca", dim=2).fit(data[0])
    expected = ["head_first0", "head_first1", "head_second0", "head_second1"]
    assert head.get_feature_names_out().tolist() == expected
    names = [f"x{column}" for column in range(2 * DIM)]
    assert head.get_feature_names_out(names).tolist() == expected
    with pytest.raises(ValueError, match="should have length equal to number of features"):
        head.get_feature_names_out(names[1:])


def test_score_is_spearman_correlation(data):
    X, y = data
    head = Head("linear", settings=SHORT).fit(X, y)
    assert head.score(X, y) == pytest.approx(spearmanr(head.predict(X), y).statistic)


def test_undefined_score_is_nan_without_warning(data):
    X, y = data
    head = Head("none").fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(head.score(X, np.ones(ROWS)))
        assert np.isnan(head.score(X[:1], y[:1]))
        assert np.isnan(head.score(np.tile(X[:1], (5, 1)), y[:5]))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, "y is None"),
        (np.ones(3), "inconsistent numbers of samples"),
        (["good"] * ROWS, "y must be ratings, as numbers"),
        (np.full(ROWS, np.nan), "y must be ratings, as numbers: Input y contains NaN"),
    ],
)
def test_score_rejects_invalid_ratings(data, y, message):
    head = Head("none").fit(data[0])
    with pytest.raises(ValueError, match=message):
        head.score(data[0], y)


# -- pipelines and searches --------------------------------------------------------------------


def test_clone_copies_parameters_but_no_fit(data):
    head = Head("pca", dim=2, settings={}, random_state=4).fit(data[0])
    cloned = clone(head)
    assert cloned.get_params() == head.get_params()
    assert not hasattr(cloned, "head_")
    assert cloned.set_params(dim=3).fit(data[0]).head_.settings.dim == 3


@pytest.mark.parametrize(
    "copy_head", [lambda head: pickle.loads(pickle.dumps(head)), copy.deepcopy]
)
@pytest.mark.parametrize("name", ["mlp", "hypernet-mse", "pca"])
def test_fitted_head_can_be_pickled_and_copied(conditioned, name, copy_head):
    X, y = conditioned
    head = Head(name, settings=RECIPES[name], n_condition=DIM_C).fit(X, y)
    copied = copy_head(head)
    np.testing.assert_array_equal(copied.transform(X), head.transform(X))
    assert copied.head_.family is head.head_.family
    assert (copied.head_.settings, copied.head_.seed) == (head.head_.settings, head.head_.seed)
    assert copied.head_.fit.record == head.head_.fit.record
    assert copied.curve_ == head.curve_
    assert isinstance(head.head_, FittedHead)  # the original is unchanged


def test_fitted_head_can_be_saved(data, tmp_path):
    head = Head("linear", settings=SHORT).fit(*data)
    save_head(head.head_, tmp_path / "head", {})
    loaded, _ = load_head(tmp_path / "head")
    first, second, _ = split_columns(data[0])
    np.testing.assert_array_equal(loaded.similarity(first, second), head.predict(data[0]))


def test_pipeline_scales_and_fits(data):
    X, y = data
    pipeline = make_pipeline(StandardScaler(), Head("linear", settings=SHORT)).fit(X, y)
    scaled = StandardScaler().fit_transform(X)
    expected_head = Head("linear", settings=SHORT).fit(scaled, y)
    np.testing.assert_array_equal(pipeline.predict(X), expected_head.predict(scaled))
    assert pipeline.score(X, y) == pytest.approx(expected_head.score(scaled, y))
    assert len(pipeline.get_feature_names_out()) == 2 * DIM


def test_grid_search_over_recipes_dimensions_and_settings(conditioned):
    X, y = conditioned
    grid = [
        {"recipe": ["linear"], "dim": np.array([2, 4]), "settings": [SHORT, {"epochs": 1}]},
        {"recipe": ["hypernet-mse"], "settings": [RECIPES["hypernet-mse"]]},
        {"recipe": ["pca"], "settings": [None], "dim": [3]},
    ]
    search = GridSearchCV(Head(n_condition=DIM_C), grid, cv=2, error_score="raise")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fewer than batch_size")
        search.fit(X, y)
    assert search.cv_results_["mean_test_score"].shape == (6,)
    assert search.best_score_ == max(search.cv_results_["mean_test_score"])
    assert search.predict(X).shape == (ROWS,)


def test_grid_search_ranks_undefined_scores_last(data):
    X, y = data
    # All first sentences are far from all second ones: along that line every cosine is -1.
    X = X + np.repeat(np.float32([20, -20]), DIM)
    grid = [{"recipe": ["pca"], "dim": [1]}, {"recipe": ["none"]}]
    search = GridSearchCV(Head(), grid, cv=2, error_score="raise")
    with pytest.warns(UserWarning, match="test scores are non-finite"):
        search.fit(X, y)
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == [True, False]
    assert search.cv_results_["rank_test_score"].tolist() == [2, 1]


@pytest.fixture
def no_processes_left():
    """End the worker processes that scikit-learn keeps for its next call."""
    yield
    get_reusable_executor().shutdown(wait=True)


def test_two_processes_give_same_scores_as_one(data, no_processes_left):
    X, y = data
    head = Head("mlp", settings=RECIPES["mlp"])
    serial, parallel = (
        cross_validate(head, X, y, cv=2, n_jobs=jobs, return_estimator=True) for jobs in (1, 2)
    )
    np.testing.assert_allclose(parallel["test_score"], serial["test_score"])
    fitted = parallel["estimator"][0]
    np.testing.assert_allclose(fitted.predict(X), serial["estimator"][0].predict(X), atol=1e-5)
    search = GridSearchCV(head, {"dim": [2, 4]}, cv=2, n_jobs=2, error_score="raise").fit(X, y)
    assert search.best_estimator_.head_.dim_out == search.best_params_["dim"]


def test_contrastive_objective_works_with_shuffle_split(data):
    X, y = data
    pair = np.arange(ROWS) // 2
    scores = cross_val_score(
        Head("linear", settings=CONTRAST),
        X,
        y,
        cv=ShuffleSplit(2, test_size=0.2, random_state=0),
        params={"pair": pair},
        error_score="raise",
    )
    assert np.isfinite(scores).all()


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"recipe": "mpl"}, "unknown head 'mpl'. Did you mean 'mlp'"),
        ({"recipe": None}, "'recipe' parameter of Head must be .* Got None"),
        ({"settings": ["epochs"]}, r"'settings' parameter .* Got \['epochs'\]"),
        ({"settings": {"epoch": 5}}, r"Head\('mlp'\): unknown key 'epoch'. Did you mean 'epochs'"),
        ({"settings": {"epochs": 0}}, ".epochs. is 0: .*at least 1"),
        ({"settings": {"dim": 4}}, r"a separate parameter: Head\(dim="),
        ({"dim": DIM + 1}, f"features have {DIM}: .*Set dim to {DIM} or less"),
        ({"dim": 2.5}, "'dim' is 2.5"),
        ({"recipe": "none", "dim": 2}, "the head none has no setting dim"),
        ({"recipe": "hadamard"}, "set n_condition to their number of columns"),
        ({"n_condition": 1}, f"{2 * DIM} columns minus the 1 of the condition, an odd number"),
        ({"n_condition": -2}, r"'n_condition' .* range \[0, inf\). Got -2"),
        ({"n_condition": 2 * DIM}, f"minimum of {2 * DIM + 2} is required"),
        ({"validation_fraction": 1.0}, r"'validation_fraction' .* range \[0\.0, 1\.0\). Got 1\.0"),
        ({"validation_fraction": "much"}, "'validation_fraction' .* Got 'much'"),
        ({"validation_fraction": 0.999}, "the resulting train set will be empty"),
        ({"random_state": -1}, "'random_state' .* Got -1"),
        ({"random_state": 2**32}, "'random_state' .* Got 4294967296"),
        ({"random_state": "seed"}, "'random_state' .* Got 'seed'"),
    ],
)
def test_invalid_parameters_are_rejected_by_fit(data, parameters, message):
    with pytest.raises(ValueError, match=message):
        Head(**parameters).fit(*data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, y: (X[:, 1:], y), f"X has {2 * DIM - 1} columns, an odd number"),
        (lambda X, y: (X[:, :1], y), r"1 feature\(s\)"),
        (lambda X, y: (X, None), "y is None: the head mlp learns from ratings"),
        (lambda X, y: (X, y[:5]), "inconsistent numbers of samples"),
        (lambda X, y: (X, np.where(y < 3, np.nan, y)), "Input y contains NaN"),
        (lambda X, y: (X, np.full(ROWS, 2.5)), f"all {ROWS} ratings y are 2.5"),
        (lambda X, y: (X, ["good"] * ROWS), "y must be ratings, as numbers"),
        (lambda X, y: (np.where(X > 1, np.nan, X), y), "Input X contains NaN"),
        (lambda X, y: (np.where(X > 1, np.inf, X), y), "Input X contains infinity"),
        (lambda X, y: (X.astype(float) * 1e300, y), r"too large for dtype\('float32'\)"),
        (lambda X, y: (X[:1], y[:1]), "minimum of 2 is required"),
        (lambda X, y: (np.ones_like(X), y), "training vectors are equal"),
    ],
)
def test_invalid_rows_are_rejected(data, change, message):
    X, y = change(*data)
    with pytest.raises(ValueError, match=message), np.errstate(over="ignore"):
        Head(settings=SHORT).fit(X, y)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (np.arange(5), f"pair names the sentence pair of 5 rows, but X has {ROWS}"),
        (np.full(ROWS, np.nan), "pair contains NaN"),
        (np.zeros((ROWS, 2)), "should be a 1d array"),
    ],
)
def test_invalid_pairs_are_rejected(data, pair, message):
    with pytest.raises(ValueError, match=message):
        Head("linear", settings=SHORT).fit(*data, pair=pair)


def test_errors_are_also_user_errors(data):
    with pytest.raises(UserError, match="unknown head"):
        Head("mpl").fit(*data)
    assert not get_tags(Head("mpl")).target_tags.required
    with pytest.raises(UserError, match="rank is 64, but a 6 x 6 matrix"):
        Head("hypernet-mse", n_condition=2, settings={"rank": 64}).fit(
            *make_rated_rows(ROWS, 0, n_condition=2)
        )


def test_default_sizes_are_limited_to_dim_of_features():
    X, y = make_rated_rows(ROWS, 0, n_condition=2)
    head = Head("hypernet-mse", n_condition=2, settings=SHORT).fit(X, y)
    assert (head.head_.settings.dim, head.head_.settings.rank) == (DIM, DIM)
    narrow = Head("hypernet-mse", dim=2, n_condition=2, settings=SHORT).fit(X, y)
    assert (narrow.head_.settings.dim, narrow.head_.settings.rank) == (2, 2)


def test_head_is_regressor(data):
    X, y = data
    assert is_regressor(Head())
    heads = [("zero_shot", Head("none")), ("linear", Head("linear", settings=SHORT))]
    stacked = StackingRegressor(heads, cv=2).fit(X, y)
    assert stacked.score(X, y) > 0.5
    with pytest.raises(ValueError, match="NaN"):
        Head("none").fit(X, np.full(ROWS, np.nan))


def test_each_setting_is_a_parameter():
    head = Head("linear", settings={"epochs": 1})
    assert head.get_params()["settings__epochs"] == 1
    assert "settings__epochs" not in head.get_params(deep=False)
    assert clone(
        head.set_params(settings__epochs=3, settings__dropout=0.0, dim=2)
    ).get_params() == {
        **head.get_params(deep=False),
        "settings__epochs": 3,
        "settings__dropout": 0.0,
    }
    assert Head().set_params(settings__epochs=2).settings == {"epochs": 2}
    with pytest.raises(ValueError, match="Invalid parameter"):
        head.set_params(epochs=3)


def test_grid_search_varies_setting(data):
    X, y = data
    grid = {"settings__epochs": [1, 3], "settings__learning_rate": [0.01]}
    search = GridSearchCV(Head("linear", settings={"batch_size": 32}), grid, cv=2).fit(X, y)
    assert len(search.cv_results_["params"]) == 2
    best = search.best_params_["settings__epochs"]
    assert len(search.best_estimator_.curve_) == best
    assert search.best_estimator_.settings == {
        "batch_size": 32,
        "epochs": best,
        "learning_rate": 0.01,
    }


@pytest.mark.parametrize("method", ["transform", "predict", "embed"])
def test_unfitted_head_raises_not_fitted_error(data, method):
    with pytest.raises(NotFittedError):
        getattr(Head("pca"), method)(data[0])
    with pytest.raises(NotFittedError):
        Head("pca").score(*data)
    with pytest.raises(NotFittedError):
        Head("pca").get_feature_names_out()


def test_wrong_number_of_columns_is_rejected(data):
    head = Head("pca").fit(data[0])
    with pytest.raises(ValueError, match=f"X has {DIM} features, but Head is expecting {2 * DIM}"):
        head.predict(data[0][:, :DIM])
