"""Recipes: one TOML file a head, with its kind and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from typing import Any, ClassVar

from llmcond.arrays import rows_of
from llmcond.config import STRICT, build, find_toml, read_toml
from llmcond.errors import UserError, nearest
from llmcond.heads.base import Family, FittedHead, OnEpoch, PairArrays

#: Rows compared at a time.
_BLOCK = 1_024

#: Where each kind of head lives: a new one is a new file and a line here.
_FAMILIES = {
    "none": ("llmcond.heads.identity", "NONE"),
    "linear": ("llmcond.heads.siamese", "LINEAR"),
    "mlp": ("llmcond.heads.siamese", "MLP"),
    "pca": ("llmcond.heads.projection", "PCA"),
    "ica": ("llmcond.heads.projection", "ICA"),
    "whitening": ("llmcond.heads.projection", "WHITENING"),
    "random": ("llmcond.heads.projection", "RANDOM"),
    "hadamard": ("llmcond.heads.conditioned", "HADAMARD"),
    "concat": ("llmcond.heads.conditioned", "CONCAT"),
    "hypernet": ("llmcond.heads.hypernet", "HYPERNET"),
    "hypernet-ablation": ("llmcond.heads.conditioned", "ABLATION"),
    "towers": ("llmcond.heads.towers", "TOWERS"),
}


@dataclass(frozen=True, slots=True)
class _About:
    """The keys that every recipe has; all others are settings of its kind."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: str
    description: str
    source: str
    finetune: dict[str, Any] = field(default_factory=dict)


_ABOUT = tuple(item.name for item in fields(_About))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head's recipe, checked.

    Attributes:
        name: the file's name without ``.toml``.
        description: one line for listings.
        source: the paper's section or equation.
        family: the kind of head.
        settings: an instance of the family's settings.
        path: what :func:`load_recipe` found it by.
        finetune: how an encoder is trained with it, where its authors did: settings of
            ``train-lora`` that go before the defaults.
    """

    name: str
    description: str
    source: str
    family: Family
    settings: Any
    path: str = ""
    finetune: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dim(self) -> int | None:
        """Return the size of the embeddings; None where the head keeps that of the features."""
        dim: int | None = getattr(self.settings, "dim", None)
        return dim

    @property
    def features(self) -> str:
        """Return which features of a sentence it takes: ``joint``, ``separate`` or ``both``."""
        return str(getattr(self.settings, "features", self.family.features))

    def with_settings(self, changes: dict[str, Any], source: str) -> Recipe:
        """Return the recipe with some settings changed.

        Raises:
            UserError: an unknown setting, or a value of the wrong type or range.
        """
        settings = build(self.family.settings, {**asdict(self.settings), **changes}, source)
        return replace(self, settings=settings)

    def parse_changes(self, changes: dict[str, str], source: str) -> dict[str, Any]:
        """Return ``--set`` values, given as text, in the types of the settings.

        Raises:
            UserError: an unknown setting, or text that is no such number.
        """
        return parse_settings(self.family.settings, changes, source, f"the head {self.name}")

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as head.json records it."""
        about = {"name": self.name, "description": self.description, "source": self.source}
        return {**about, "kind": self.family.kind, "settings": asdict(self.settings)}


#: How ``--set`` reads each type of setting.
_READERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": {"true": True, "false": False}.__getitem__,
}


def parse_settings(
    settings: type[Any], changes: Mapping[str, str], source: str, what: str
) -> dict[str, Any]:
    """Return values that were given as text in the types of a dataclass's fields.

    Raises:
        UserError: a setting that ``what`` does not have, or text that is no such number.
    """
    kinds = {item.name: str(item.type) for item in fields(settings)}
    parsed: dict[str, Any] = {}
    for key, text in changes.items():
        if key not in kinds:
            raise UserError(
                f"{source}: {what} has no setting {key!r}. {nearest(key, kinds)} "
                f"Settings: {', '.join(kinds) or 'none'}."
            )
        try:
            parsed[key] = _READERS[kinds[key]](text)
        except (KeyError, ValueError) as error:
            raise UserError(f"{source}: {key} is {text!r}, not {kinds[key]}.") from error
    return parsed


def load_recipe(name_or_file: str) -> Recipe:
    """Read a recipe by its bundled name or by the path of a ``.toml`` file.

    Raises:
        UserError: no such recipe, an unknown kind or key, or a bad value.
    """
    path = find_toml(name_or_file, "heads")
    values = read_toml(path)
    about = {key: value for key, value in values.items() if key in _ABOUT}
    described = build(_About, about, str(path))
    family = find_family(described.kind, str(path))
    settings = {key: value for key, value in values.items() if key not in _ABOUT}
    return Recipe(
        name=path.stem,
        description=described.description,
        source=described.source,
        family=family,
        settings=build(family.settings, settings, str(path)),
        path=str(path.absolute()),
        finetune=described.finetune,
    )


def find_family(kind: str, source: str) -> Family:
    """Return the family of a kind of head; its module is imported only now.

    Raises:
        UserError: no such kind.
    """
    if kind not in _FAMILIES:
        raise UserError(f"{source}: unknown kind of head {kind!r}. {nearest(kind, _FAMILIES)}")
    module, name = _FAMILIES[kind]
    family: Family = getattr(import_module(module), name)
    return family


def fit_recipe(
    recipe: Recipe, pairs: PairArrays, dev: PairArrays | None, seed: int, on_epoch: OnEpoch
) -> FittedHead:
    """Fit a head.

    Args:
        recipe: what to fit.
        pairs: rated training pairs.
        dev: rated pairs that choose the epoch, where the head has epochs.
        seed: of everything random.
        on_epoch: told of each epoch.

    Raises:
        UserError: a dimension above that of the features, too few ratings, or a loss that
            diverges.
    """
    if recipe.dim is not None and recipe.dim > pairs.dim:
        raise UserError(
            f"dim is {recipe.dim}, but the features have {pairs.dim}: a head never enlarges them. "
            f"Set dim to {pairs.dim} or less."
        )
    if recipe.family.supervised:
        _check_ratings(pairs)
    if recipe.family.kind != "none":
        _check_vectors(pairs)
    if not recipe.family.conditioned:
        # So that a saved head says what it takes.
        pairs = replace(pairs, condition=None)
        dev = None if dev is None else replace(dev, condition=None)
    fit = recipe.family.fit(pairs, dev, recipe.settings, seed, on_epoch)
    dims = (pairs.dim, pairs.dim_condition)
    return FittedHead(recipe.family, recipe.settings, seed, dims[0], fit, dims[1])


def _check_ratings(pairs: PairArrays) -> None:
    distinct = len(set(pairs.rating.tolist()))
    if distinct < 2:
        raise UserError(
            f"the training split has {distinct} distinct ratings over {len(pairs)} rated rows; at "
            "least 2 are needed to fit a head."
        )


def _check_vectors(pairs: PairArrays) -> None:
    if not _varies(pairs):
        raise UserError(
            f"all {2 * len(pairs):,} training vectors are equal, so there is nothing to fit. Were "
            "they made by the right prompt?"
        )


def _varies(pairs: PairArrays) -> bool:
    """Tell whether any two training vectors differ; as a rule the first ones do."""
    first = rows_of(pairs.first, slice(0, 1))
    blocks = (
        rows_of(side, slice(start, start + _BLOCK))
        for side in (pairs.first, pairs.second)
        for start in range(0, len(pairs), _BLOCK)
    )
    return any(bool((block != first).any()) for block in blocks)
