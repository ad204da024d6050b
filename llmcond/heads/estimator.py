"""Any head as a scikit-learn estimator: for pipelines, cross-validation and grid search."""

# scikit-learn calls the features X, also by keyword.
# ruff: noqa: N803, N806

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin, TransformerMixin
from sklearn.utils import assert_all_finite, check_array, check_random_state
from sklearn.utils.validation import (
    _check_feature_names_in,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from llmcond.arrays import Array
from llmcond.errors import UserError
from llmcond.heads.fit import fit_recipe
from llmcond.heads.pairs import PairArrays
from llmcond.heads.recipes import Recipe, load_recipe
from llmcond.metrics import spearman

#: What the names of settings begin with as parameters of their own.
_SETTING = "settings__"
#: Features in 16 bit stay so; all else becomes float32, which is what heads compute in.
_CHECKED: Mapping[str, Any] = {"dtype": [np.float32, np.float16], "order": "C"}


class HeadError(UserError, ValueError):
    """The user's input was wrong; a ValueError as well, which scikit-learn expects."""


class Head(RegressorMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # untyped
    """A head of any recipe, fitted on features of rated sentence pairs.

    X is (n, 2 d + n_condition): the features of the first sentences, those of the second ones, and
    those of the conditions e(c), side by side. A recipe that takes no conditions leaves the last
    ``n_condition`` columns out, so that recipes of both sorts can be compared on one X. Which
    features of a sentence a recipe is made for, e(s|c) or e(s), is said in its file; here they
    are columns.

    Ratings y are on any scale: the least of those that are fitted on becomes 0 and the greatest 1,
    always. That is what the command line does where they reach both ends of their scale. Recipes
    that learn nothing from ratings (pca, ica, whitening, random, none) need no y.

    To scikit-learn a head is a regressor, whose prediction is the cosine, and a transformer.

    A step before the head in a pipeline sees columns: one that scales each by itself, as
    StandardScaler does, treats the two sentences differently.

    To keep a fitted head in files, give ``head_`` to :func:`llmcond.heads.save_head`; pickles are
    for scikit-learn's own processes.

    All methods raise a ValueError where an array has another shape or is not finite, and all but
    :meth:`fit` a NotFittedError before it was called.

    Args:
        recipe: a bundled recipe's name, or the path of a ``.toml`` file.
        dim: size of the embeddings; None: the recipe's, at most d.
        settings: other settings of the recipe, such as ``{"epochs": 5}``. Each is a parameter of
            its own as well, for ``set_params(settings__epochs=5)`` and grids. The rank of a
            hypernetwork that is not given is lowered to what its matrices can have.
        n_condition: how many of the last columns of X are the condition's features.
        validation_fraction: share of the rows, or of the sentence pairs where ``pair`` is given,
            that is held out and chooses the epoch; 0: none, the last epoch is kept. Heads without
            epochs are fitted on all rows.
        random_state: seed of everything random, or what scikit-learn draws one from.
        device: where it is fitted: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Attributes:
        head_ (FittedHead): the fitted head.
        n_features_in_ (int): columns of X.
        feature_names_in_ (NDArray[Any]): their names, where X had names.
        rating_range_ (tuple[float, float] | None): the ratings that became 0 and 1; None where the
            recipe learns nothing from ratings.
        curve_ (list[dict[str, Any]]): loss and held-out Spearman correlation of each epoch; empty
            where there are no epochs.
    """

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
        # scikit-learn's rule: parameters are kept as they are, and looked at when fitting.
        self.recipe, self.dim, self.settings = recipe, dim, settings
        self.n_condition, self.validation_fraction = n_condition, validation_fraction
        self.random_state, self.device = random_state, device

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters; with ``deep`` also each of the settings, ``settings__epochs``."""
        parameters: dict[str, Any] = super().get_params(deep=deep)
        if deep and isinstance(self.settings, Mapping):
            parameters |= {f"{_SETTING}{name}": value for name, value in self.settings.items()}
        return parameters

    def set_params(self, **params: Any) -> Head:
        """Change parameters; ``settings__epochs=5`` changes one of the settings, or adds it."""
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
            y: (n,) ratings.
            pair: (n,) the sentence pair of each row, as numbers or names. Objectives that contrast
                the two conditions of a pair need it, and ``validation_fraction`` then parts no
                pair. The rows of a pair need not stand next to each other.

        Raises:
            HeadError: parameters, columns or ratings that cannot be fitted on.
        """
        with _as_value_errors():
            recipe = self._recipe()
            seed = self._seed()
            fraction: Any = self.validation_fraction
            if not isinstance(fraction, Real) or not 0 <= float(fraction) < 1:
                raise HeadError(
                    f"validation_fraction is {fraction!r}; it must be at least 0 and below 1."
                )
            pairs, rating_range = self._pairs(X, y, pair, recipe)
            pairs, dev = _split(pairs, float(fraction) if recipe.family.supervised else 0.0, seed)
            recipe = self._lowered(recipe, pairs.dim)
            head = fit_recipe(recipe, pairs, dev, seed, lambda *_: None, self.device)
        for note in head.fit.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        self.head_ = head
        self.rating_range_ = rating_range
        self.curve_ = [dict(epoch) for epoch in head.fit.record.get("curve", ())]
        return self

    def transform(self, X: Any) -> Any:
        """Return the embeddings of both sentences of X side by side, (n, 2 k) float32."""
        first, second, condition = self._sides(X)
        sides = [self.head_.transform(side, condition) for side in (first, second)]
        return np.concatenate(sides, axis=1)

    def predict(self, X: Any) -> Array:
        """Return the cosine of the embeddings of both sentences of X, (n,) float32, on -1 to 1."""
        first, second, condition = self._sides(X)
        return self.head_.similarity(first, second, condition)

    def score(self, X: Any, y: Any) -> float:
        """Return the Spearman correlation of the cosine and the ratings y, (n,), on any scale.

        It is NaN where it is undefined: all ratings or all cosines are equal, or there is one row.
        A grid search ranks such settings last.
        """
        check_is_fitted(self, "head_")
        if y is None:
            raise HeadError("score compares cosines with ratings, and y is None.")
        rating, cosine = _numbers(y), self.predict(X)
        check_consistent_length(cosine, rating)
        return spearman(cosine.astype(np.float64), rating)

    def embed(self, features: Any, condition: Any = None) -> Array:
        """Return the embeddings of sentences, not pairs, (n, k) float32, from features, (n, d).

        Conditions are (n, n_condition), or (1, n_condition) of one for all; they are not looked at
        where X had such columns and the recipe takes none.

        Raises:
            HeadError: another size, or conditions that are missing or not wanted.
        """
        check_is_fitted(self, "head_")
        features = check_array(features, estimator=self, input_name="features", **_CHECKED)
        if self.n_features_in_ > 2 * self.head_.dim_in and not self.head_.dim_condition:
            condition = None
        if condition is not None:
            condition = check_array(condition, estimator=self, input_name="condition", **_CHECKED)
        with _as_value_errors():
            return self.head_.transform(features, condition)

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """Return the names of what :meth:`transform` gives, (2 k,): ``head_first0`` and so on.

        ``input_features`` changes nothing: the names of the columns of X are only checked.
        """
        check_is_fitted(self, "head_")
        _check_feature_names_in(self, input_features)
        size = range(self.head_.dim_out)
        names = [f"head_{side}{place}" for side in ("first", "second") for place in size]
        return np.asarray(names, dtype=object)

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn asks of an estimator: y is needed where the recipe learns."""
        tags = super().__sklearn_tags__()
        try:
            tags.target_tags.required = self._recipe().family.supervised
        except UserError:
            # Fitting says so; tags are also asked for where nothing is to be fitted.
            tags.target_tags.required = False
        tags.transformer_tags.preserves_dtype = ["float32"]
        # The score is a correlation, and a cosine of halves of X fits no linear function of X.
        tags.regressor_tags.poor_score = True
        return tags

    def _recipe(self) -> Recipe:
        """Return the recipe with the settings that were given, its dimension not yet lowered."""
        if not isinstance(self.recipe, str | os.PathLike):
            raise HeadError(
                f"recipe is {self.recipe!r}; it must be a recipe's name or the path of a file."
            )
        if not isinstance(self.settings, Mapping | None):
            raise HeadError(
                f"settings is {self.settings!r}; it must be a dict such as "
                '{"epochs": 5}, or None.'
            )
        recipe = load_recipe(str(self.recipe))
        changes = {name: _plain_number(value) for name, value in (self.settings or {}).items()}
        if "dim" in changes:
            raise HeadError('settings has "dim", which is a parameter by itself: Head(dim=...).')
        if self.dim is not None:
            if recipe.dim is None:
                raise HeadError(
                    f"the head {recipe.name} has no dim to choose, but dim is {self.dim!r}; "
                    "leave it out."
                )
            changes["dim"] = _plain_number(self.dim)
        return recipe.with_settings(changes, f"Head({recipe.name!r})")

    def _lowered(self, recipe: Recipe, dim_in: int) -> Recipe:
        """Return the recipe with the sizes that were not given lowered to those of the features."""
        if self.dim is None and recipe.dim is not None and recipe.dim > dim_in:
            recipe = recipe.with_settings({"dim": dim_in}, recipe.name)
        most = min(dim_in, recipe.dim or dim_in)
        rank = getattr(recipe.settings, "rank", 0) if recipe.family.generates_matrices else 0
        if rank > most and "rank" not in (self.settings or {}):
            recipe = recipe.with_settings({"rank": most}, recipe.name)
        return recipe

    def _seed(self) -> int:
        """Return the seed; a generator's is drawn, so that two fits with it differ."""
        if not isinstance(self.random_state, Integral):
            return int(check_random_state(self.random_state).randint(2**31 - 1))
        seed = int(self.random_state)
        if not 0 <= seed < 2**32:
            raise HeadError(f"random_state is {seed}; it must be at least 0 and below 2^32.")
        return seed

    def _pairs(
        self, X: Any, y: Any, pair: Any, recipe: Recipe
    ) -> tuple[PairArrays, tuple[float, float] | None]:
        """Return what to fit on, and which ratings became 0 and 1; None if nothing reads them."""
        if not isinstance(self.n_condition, Integral) or self.n_condition < 0:
            raise HeadError(
                f"n_condition is {self.n_condition!r}; it must be a number of columns, 0 or more."
            )
        least = {"ensure_min_samples": 2, "ensure_min_features": 2 + int(self.n_condition)}
        rating_range = None
        if not recipe.family.supervised:
            X = validate_data(self, X, **least, **_CHECKED)
            if y is not None:
                check_consistent_length(X, _numbers(y))
            rating = np.zeros(len(X))
        elif y is None:
            raise HeadError(
                "This Head estimator requires y to be passed, but the target y is None: the head "
                f"{recipe.name} learns from ratings."
            )
        else:
            X, y = validate_data(self, X, y, y_numeric=True, **least, **_CHECKED)
            rating = _numbers(y)
            low, high = rating_range = float(rating.min()), float(rating.max())
            if low == high:
                raise HeadError(
                    f"all {len(y):,} ratings y are {low:g}, so there is nothing to learn from "
                    "them; at least 2 distinct ones are needed."
                )
            rating = (rating - low) / (high - low)
        if recipe.family.conditioned and not self.n_condition:
            raise HeadError(
                f"the head {recipe.name} takes the features of each condition as well: put them "
                "behind those of both sentences in X, and say how many columns they are with "
                "n_condition."
            )
        dim, odd = divmod(X.shape[1] - int(self.n_condition), 2)
        if odd:
            rest = f" less the {self.n_condition} of the condition" if self.n_condition else ""
            raise HeadError(
                f"X has {X.shape[1]} columns{rest}, an odd number, which two sentences cannot "
                "share evenly. X is their features side by side, with those of the condition "
                "behind, which n_condition counts."
            )
        first, second, condition = _columns(X, dim, recipe.family.conditioned)
        pairs = PairArrays(first, second, rating, condition, _numbered(pair, len(X)))
        return pairs, rating_range

    def _sides(self, X: Any) -> tuple[Array, Array, Array | None]:
        check_is_fitted(self, "head_")
        X = validate_data(self, X, reset=False, **_CHECKED)
        return _columns(X, self.head_.dim_in, bool(self.head_.dim_condition))


def _columns(X: Array, dim: int, conditioned: bool) -> tuple[Array, Array, Array | None]:
    """Return the features of both sentences, (n, d), and of the conditions if taken."""
    return X[:, :dim], X[:, dim : 2 * dim], X[:, 2 * dim :] if conditioned else None


@contextmanager
def _as_value_errors() -> Iterator[None]:
    """Turn what people are told into what scikit-learn expects as well."""
    try:
        yield
    except UserError as error:
        raise HeadError(str(error)) from error


def _plain_number(value: Any) -> Any:
    """Return NumPy's numbers, such as grids are made of, as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _numbers(y: Any) -> NDArray[np.float64]:
    """Return ratings as they are, (n,)."""
    try:
        found: NDArray[np.float64] = column_or_1d(y, input_name="y", warn=True).astype(np.float64)
        assert_all_finite(found, input_name="y")
    except (TypeError, ValueError) as error:
        raise HeadError(f"y must be ratings, as numbers: {str(error).rstrip('.')}.") from error
    return found


def _numbered(pair: Any, n: int) -> NDArray[np.int64] | None:
    """Return the number of each row's sentence pair."""
    if pair is None:
        return None
    names = column_or_1d(pair, input_name="pair")
    assert_all_finite(names, input_name="pair")
    if len(names) != n:
        raise HeadError(f"pair names the sentence pair of {len(names):,} rows, but X has {n:,}.")
    found: NDArray[np.int64] = np.unique(names, return_inverse=True)[1].astype(np.int64)
    return found


def _split(pairs: PairArrays, fraction: float, seed: int) -> tuple[PairArrays, PairArrays | None]:
    """Return the rows to fit on and those that choose the epoch; no sentence pair is parted."""
    if not fraction:
        return pairs, None
    from sklearn.model_selection import GroupShuffleSplit

    groups = np.arange(len(pairs)) if pairs.pair is None else pairs.pair
    splitter = GroupShuffleSplit(n_splits=1, test_size=fraction, random_state=seed)
    kept, held_out = next(splitter.split(groups, groups=groups))
    return pairs.take(kept), pairs.take(held_out)
