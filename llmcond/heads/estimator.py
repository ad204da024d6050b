"""Heads as scikit-learn estimators: for pipelines, cross-validation and grid search."""

# scikit-learn calls the features X, also as a keyword argument.
# ruff: noqa: N803, N806

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin, TransformerMixin
from sklearn.utils import assert_all_finite, check_array, check_random_state
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import (
    _check_feature_names_in,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from llmcond.base.arrays import Array
from llmcond.base.errors import UserError
from llmcond.base.metrics import spearman
from llmcond.heads.fit import fit_recipe
from llmcond.heads.numpy_heads import PairArrays
from llmcond.heads.recipes import Recipe, load_recipe

#: Prefix of settings as separate parameters.
_SETTING = "settings__"
#: Features in 16 bit keep their type; all others become float32, in which heads compute.
_CHECKED: Mapping[str, Any] = {"dtype": [np.float32, np.float16], "order": "C"}


class HeadError(UserError, ValueError):
    """An error in the user's input, which is also a ValueError, as scikit-learn expects."""


class Head(RegressorMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # untyped
    """A scikit-learn estimator that fits a head on features of rated sentence pairs.

    X is (n, 2 d + n_condition): the features of the first sentences, of the second sentences and of
    the conditions e(c), side by side. A recipe that reads no conditions ignores the last
    ``n_condition`` columns, so that recipes of both kinds can be compared on the same X. Each
    recipe's file says whether it is designed for sentence features e(s|c) or e(s); the estimator
    does not check it.

    Ratings y may have any scale: the lowest rating in the training data becomes 0 and the highest
    1. The command line does the same if the ratings reach both ends of their scale. Recipes that
    learn nothing from ratings (pca, ica, whitening, random, none) need no y.

    For scikit-learn a head is a regressor, which predicts the cosine, and a transformer.

    A pipeline step before the head sees columns: a step that scales each column separately, such as
    StandardScaler, treats the two sentences differently.

    To save a fitted head, pass ``head_`` to ``llmcond.heads.save_head``; pickles are meant for
    scikit-learn's own processes.

    All methods raise a ValueError if an array has the wrong shape or is not finite. All methods
    that need a fitted head raise a NotFittedError before ``fit`` was called.

    Args:
        recipe: name of a bundled recipe, or path of a ``.toml`` file.
        dim: size of the embeddings; None: that of the recipe, but at most d.
        settings: other settings of the recipe, such as ``{"epochs": 5}``. Each is also a separate
            parameter, for ``set_params(settings__epochs=5)`` and grids. If the rank of a
            hypernetwork is not given, it is lowered to the maximum for its matrices.
        n_condition: number of the last columns of X that are features of the condition.
        validation_fraction: share of the rows, or of the sentence pairs if ``pair`` is given, that
            is held out to select the epoch; 0: none, the last epoch is kept. Heads without epochs
            are fitted on all rows.
        random_state: seed of everything random, or a scikit-learn random state from which to sample
            a seed.
        device: device to fit on: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Attributes:
        head_ (FittedHead): the fitted head.
        n_features_in_ (int): number of columns of X.
        feature_names_in_ (NDArray[Any]): names of the columns, if X had names.
        rating_range_ (tuple[float, float] | None): the ratings that became 0 and 1; None if the
            recipe learns nothing from ratings.
        curve_ (list[dict[str, Any]]): loss and held-out Spearman correlation of each epoch; empty
            if there are no epochs.

    Examples:
        >>> import numpy as np
        >>> from llmcond import Head
        >>> X = np.random.default_rng(0).normal(size=(40, 16))
        >>> y = np.linspace(1, 5, 40)
        >>> head = Head("linear", dim=4, settings={"epochs": 2, "batch_size": 16}).fit(X, y)
        >>> head.predict(X).shape, head.transform(X).shape
        ((40,), (40, 8))
        >>> head.rating_range_
        (1.0, 5.0)
    """

    _parameter_constraints: ClassVar[Mapping[str, Any]] = {
        "recipe": [str, os.PathLike],
        "settings": [Mapping, None],
        "n_condition": [Interval(Integral, 0, None, closed="left")],
        "validation_fraction": [Interval(Real, 0, 1, closed="left")],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        recipe: str = "mlp",
        *,
        dim: int | None = None,
        settings: Mapping[str, Any] | None = None,
        n_condition: int = 0,
        validation_fraction: float = 0.0,
        random_state: Any = 0,
        device: str = "auto",
    ) -> None:
        # scikit-learn requires that parameters are stored unchanged and validated in `fit`.
        self.recipe, self.dim, self.settings = recipe, dim, settings
        self.n_condition, self.validation_fraction = n_condition, validation_fraction
        self.random_state, self.device = random_state, device

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters.

        Args:
            deep: whether to include each of the settings, as in ``settings__epochs``.

        Returns:
            Values by parameter.
        """
        parameters: dict[str, Any] = super().get_params(deep=deep)
        if deep and isinstance(self.settings, Mapping):
            parameters |= {f"{_SETTING}{name}": value for name, value in self.settings.items()}
        return parameters

    def set_params(self, **params: Any) -> Head:
        """Change parameters.

        Args:
            params: new values by parameter; ``settings__epochs=5`` changes or adds one of the
                settings.

        Returns:
            The estimator itself.

        Raises:
            ValueError: a parameter does not exist.
        """
        settings = {
            name.removeprefix(_SETTING): params.pop(name)
            for name in list(params)
            if name.startswith(_SETTING)
        }
        super().set_params(**params)
        if settings:
            self.settings = {**(self.settings or {}), **settings}
        return self

    def fit(self, X: Any, y: Any = None, *, pair: Any = None) -> Head:
        """Fit the head.

        Args:
            X: (n, 2 d + n_condition) features.
            y: (n,) ratings on any scale; None for recipes that learn nothing from ratings.
            pair: (n,) sentence pair of each row, as numbers or names. Objectives that contrast the
                two conditions of a pair need it. ``validation_fraction`` then keeps the rows of a
                pair together. They need not be adjacent.

        Returns:
            The estimator itself.

        Raises:
            ValueError: a parameter is invalid.
            HeadError: a setting, column or rating is invalid.
        """
        self._validate_params()
        with _raise_value_errors():
            recipe = self._load_recipe()
            seed = self._resolve_seed()
            pairs, rating_range = self._validate_pairs(X, y, pair, recipe)
            fraction = float(self.validation_fraction) if recipe.family.supervised else 0.0
            pairs, dev = _split_rows(pairs, fraction, seed)
            recipe = self._lower_sizes(recipe, pairs.dim)
            head = fit_recipe(recipe, pairs, dev, seed, lambda *_: None, self.device)
        for note in head.fit.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        self.head_ = head
        self.rating_range_ = rating_range
        self.curve_ = [dict(epoch) for epoch in head.fit.record.get("curve", ())]
        return self

    def transform(self, X: Any) -> Any:
        """Compute the embeddings of both sentences of each row.

        Args:
            X: (n, 2 d + n_condition) features.

        Returns:
            (n, 2 k) float32 embeddings, side by side.

        Raises:
            NotFittedError: ``fit`` was not called.
            ValueError: X has another number of columns, or is not finite.
        """
        first, second, condition = self._validate_sides(X)
        sides = [self.head_.transform(side, condition) for side in (first, second)]
        return np.concatenate(sides, axis=1)

    def predict(self, X: Any) -> Array:
        """Compute the cosine of the embeddings of both sentences of each row.

        Args:
            X: (n, 2 d + n_condition) features.

        Returns:
            (n,) float32 similarities on -1 to 1.

        Raises:
            NotFittedError: ``fit`` was not called.
            ValueError: X has another number of columns, or is not finite.
        """
        first, second, condition = self._validate_sides(X)
        return self.head_.similarity(first, second, condition)

    def score(self, X: Any, y: Any) -> float:
        """Compute the Spearman correlation of the predicted cosines and ratings.

        Args:
            X: (n, 2 d + n_condition) features.
            y: (n,) ratings on any scale.

        Returns:
            The correlation; NaN if it is undefined, because all ratings or all cosines are equal or
            there is only one row. A grid search ranks such settings last.

        Raises:
            NotFittedError: ``fit`` was not called.
            ValueError: X has another number of columns, y is None, or their lengths differ.
        """
        check_is_fitted(self, "head_")
        if y is None:
            raise HeadError("score compares cosines with ratings, and y is None.")
        rating, cosine = _read_ratings(y), self.predict(X)
        check_consistent_length(cosine, rating)
        return spearman(cosine.astype(np.float64), rating)

    def embed(self, features: Any, condition: Any = None) -> Array:
        """Compute the embeddings of single sentences instead of pairs.

        Args:
            features: (n, d) features of sentences.
            condition: (n, n_condition) features of conditions, or (1, n_condition) if all sentences
                share one. They are ignored if X had such columns and the recipe reads none.

        Returns:
            (n, k) float32 embeddings.

        Raises:
            NotFittedError: ``fit`` was not called.
            HeadError: an array has another size, or conditions are missing or not expected.
        """
        check_is_fitted(self, "head_")
        features = check_array(features, estimator=self, input_name="features", **_CHECKED)
        if self.n_features_in_ > 2 * self.head_.dim_in and not self.head_.dim_condition:
            condition = None
        if condition is not None:
            condition = check_array(condition, estimator=self, input_name="condition", **_CHECKED)
        with _raise_value_errors():
            return self.head_.transform(features, condition)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return the names of the columns that ``transform`` returns.

        Args:
            input_features: names of the columns of X, which are only validated.

        Returns:
            (2 k,) names: ``head_first0``, ``head_first1`` and so on.

        Raises:
            NotFittedError: ``fit`` was not called.
            ValueError: the names are not those of X.
        """
        check_is_fitted(self, "head_")
        _check_feature_names_in(self, input_features)
        size = range(self.head_.dim_out)
        names = [f"head_{side}{column}" for side in ("first", "second") for column in size]
        return np.asarray(names, dtype=object)

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags; y is required if the recipe learns from ratings."""
        tags = super().__sklearn_tags__()
        try:
            tags.target_tags.required = self._load_recipe().family.supervised
        except (AttributeError, TypeError, UserError):
            # `fit` reports invalid parameters; tags are also read without fitting.
            tags.target_tags.required = False
        tags.transformer_tags.preserves_dtype = ["float32"]
        # scikit-learn's checks use a linear function of X, which the cosine of its halves cannot
        # fit; the score is a correlation, too.
        tags.regressor_tags.poor_score = True
        return tags

    def _load_recipe(self) -> Recipe:
        """Return the recipe with the given settings, before its sizes are lowered."""
        recipe = load_recipe(str(self.recipe))
        changes = {name: _to_python_number(value) for name, value in (self.settings or {}).items()}
        if "dim" in changes:
            raise HeadError(
                'settings contains "dim", which is a separate parameter: Head(dim=...).'
            )
        if self.dim is not None:
            if recipe.dim is None:
                raise HeadError(
                    f"the head {recipe.name} has no setting dim, but dim is {self.dim!r}; "
                    "leave it out."
                )
            changes["dim"] = _to_python_number(self.dim)
        return recipe.with_settings(changes, f"Head({recipe.name!r})")

    def _lower_sizes(self, recipe: Recipe, dim_in: int) -> Recipe:
        """Lower the sizes that were not given to those of the features; return the recipe."""
        if self.dim is None and recipe.dim is not None and recipe.dim > dim_in:
            recipe = recipe.with_settings({"dim": dim_in}, recipe.name)
        max_rank = min(dim_in, recipe.dim or dim_in)
        rank = getattr(recipe.settings, "rank", 0) if recipe.family.generates_matrices else 0
        if rank > max_rank and "rank" not in (self.settings or {}):
            recipe = recipe.with_settings({"rank": max_rank}, recipe.name)
        return recipe

    def _resolve_seed(self) -> int:
        """Return the seed; it is sampled from a generator, so that two fits with it differ."""
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _validate_pairs(
        self, X: Any, y: Any, pair: Any, recipe: Recipe
    ) -> tuple[PairArrays, tuple[float, float] | None]:
        """Return the training pairs, and the ratings that became 0 and 1 (None if not used)."""
        minimum = {"ensure_min_samples": 2, "ensure_min_features": 2 + int(self.n_condition)}
        rating_range = None
        if not recipe.family.supervised:
            X = validate_data(self, X, **minimum, **_CHECKED)
            if y is not None:
                check_consistent_length(X, _read_ratings(y))
            rating = np.zeros(len(X))
        elif y is None:
            raise HeadError(
                "This Head estimator requires y to be passed, but the target y is None: the head "
                f"{recipe.name} learns from ratings."
            )
        else:
            X, y = validate_data(self, X, y, y_numeric=True, **minimum, **_CHECKED)
            rating = _read_ratings(y)
            low, high = rating_range = float(rating.min()), float(rating.max())
            if low == high:
                raise HeadError(
                    f"all {len(y):,} ratings y are {low:g}, so there is nothing to learn from "
                    "them; at least 2 distinct ones are needed."
                )
            rating = (rating - low) / (high - low)
        if recipe.family.conditioned and not self.n_condition:
            raise HeadError(
                f"the head {recipe.name} also needs the features of each condition. Append them to "
                "those of both sentences in X, and set n_condition to their number of columns."
            )
        dim, remainder = divmod(X.shape[1] - int(self.n_condition), 2)
        if remainder:
            suffix = f" minus the {self.n_condition} of the condition" if self.n_condition else ""
            raise HeadError(
                f"X has {X.shape[1]} columns{suffix}, an odd number, which two sentences cannot "
                "share evenly. X must contain the features of both sentences, followed by the "
                "n_condition columns of the condition."
            )
        first, second, condition = _split_columns(X, dim, recipe.family.conditioned)
        pairs = PairArrays(first, second, rating, condition, _number_pairs(pair, len(X)))
        return pairs, rating_range

    def _validate_sides(self, X: Any) -> tuple[Array, Array, Array | None]:
        check_is_fitted(self, "head_")
        X = validate_data(self, X, reset=False, **_CHECKED)
        return _split_columns(X, self.head_.dim_in, bool(self.head_.dim_condition))


def _split_columns(X: Array, dim: int, conditioned: bool) -> tuple[Array, Array, Array | None]:
    """Return the features of both sentences, (n, d), and those of the conditions or None."""
    return X[:, :dim], X[:, dim : 2 * dim], X[:, 2 * dim :] if conditioned else None


@contextmanager
def _raise_value_errors() -> Iterator[None]:
    """Raise a UserError as a HeadError, which is also the ValueError that scikit-learn expects."""
    try:
        yield
    except UserError as error:
        raise HeadError(str(error)) from error


def _to_python_number(value: Any) -> Any:
    """Convert a NumPy number, as grids contain them, to a Python number."""
    return value.item() if isinstance(value, np.generic) else value


def _read_ratings(y: Any) -> NDArray[np.float64]:
    """Return ratings on their own scale, (n,) float64."""
    try:
        ratings: NDArray[np.float64] = column_or_1d(y, input_name="y", warn=True).astype(np.float64)
        assert_all_finite(ratings, input_name="y")
    except (TypeError, ValueError) as error:
        raise HeadError(f"y must be ratings, as numbers: {str(error).rstrip('.')}.") from error
    return ratings


def _number_pairs(pair: Any, n: int) -> NDArray[np.int64] | None:
    """Return the number of each row's sentence pair."""
    if pair is None:
        return None
    names = column_or_1d(pair, input_name="pair")
    assert_all_finite(names, input_name="pair")
    if len(names) != n:
        raise HeadError(f"pair names the sentence pair of {len(names):,} rows, but X has {n:,}.")
    numbers: NDArray[np.int64] = np.unique(names, return_inverse=True)[1].astype(np.int64)
    return numbers


def _split_rows(
    pairs: PairArrays, fraction: float, seed: int
) -> tuple[PairArrays, PairArrays | None]:
    """Return the rows to fit on, and those that select the epoch; sentence pairs are not split."""
    if not fraction:
        return pairs, None
    from sklearn.model_selection import GroupShuffleSplit

    splitter = GroupShuffleSplit(n_splits=1, test_size=fraction, random_state=seed)
    training, held_out = next(splitter.split(pairs.groups, groups=pairs.groups))
    return pairs.take(training), pairs.take(held_out)
