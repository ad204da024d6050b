"""Recipes: one TOML file per head, with its kind and settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from llmcond.base import package as plugins
from llmcond.base.errors import UserError, nearest
from llmcond.base.records import build, read_toml, resolve_toml
from llmcond.heads.module import HeadModule
from llmcond.heads.settings import ObjectiveSettings, TrainingSettings

#: Kind of a head -> its class. To add a kind, write a class and add a line to this mapping.
FAMILIES = {
    "none": "llmcond.heads.conditioned:Identity",
    "linear": "llmcond.heads.conditioned:Linear",
    "mlp": "llmcond.heads.conditioned:Mlp",
    "pca": "llmcond.heads.conditioned:Pca",
    "ica": "llmcond.heads.conditioned:Ica",
    "whitening": "llmcond.heads.conditioned:Whitening",
    "random": "llmcond.heads.conditioned:Random",
    "hadamard": "llmcond.heads.conditioned:Hadamard",
    "concat": "llmcond.heads.conditioned:Concat",
    "hypernet": "llmcond.heads.conditioned:Hypernet",
    "hypernet-ablation": "llmcond.heads.conditioned:HypernetAblation",
    "towers": "llmcond.heads.conditioned:Towers",
    "regression": "llmcond.heads.conditioned:Regression",
    "roles": "llmcond.kinds.dialogue.heads:RoleHead",
    "no-roles": "llmcond.kinds.dialogue.heads:IdentityRoleHead",
}

#: Prefix of kinds that wrap another kind, such as ``query-mlp`` -> the function that creates the
#: wrapping class from the wrapped one.
PREFIXES = {"query-": "llmcond.kinds.ranking.heads:create_query_family"}


@dataclass(frozen=True, slots=True)
class _RecipeHeader:
    """The keys that every recipe has; all others are settings of its kind."""

    kind: str
    description: str
    source: str
    finetune: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A validated recipe of a head.

    Attributes:
        name: name of the file without ``.toml``.
        description: one line for listings.
        source: section or equation of the paper.
        kind: name of the family in recipes and in head.json.
        family: class of the module.
        settings: an instance of the family's settings.
        path: path that the recipe was read from.
        finetune: settings of ``train-lora`` that override its defaults when an encoder is trained
            with this head, if its authors trained one.

    Examples:
        >>> from llmcond.heads import load_recipe
        >>> recipe = load_recipe("linear")
        >>> recipe.kind, recipe.features
        ('linear', 'joint')
        >>> recipe.with_settings({"dim": 64}, "example").dim
        64
    """

    name: str
    description: str
    source: str
    kind: str
    family: type[HeadModule]
    settings: Any
    path: str = ""
    finetune: Mapping[str, Any] = field(default_factory=dict)

    def user_modules(self, *others: object) -> list[str]:
        """Return the modules of users' files that define the head, its objective or ``others``."""
        settings = self.settings
        is_custom = isinstance(settings, ObjectiveSettings) and bool(settings.objective)
        objective = settings.load_objective() if is_custom else None
        return plugins.user_modules(self.family, objective, *others)

    @property
    def dim(self) -> int | None:
        """Size of the embeddings; None if the head keeps that of the features."""
        dim: int | None = getattr(self.settings, "dim", None)
        return dim

    def check_dim(self, dim_in: int) -> None:
        """Raise a UserError if the embeddings are larger than features of the size ``dim_in``."""
        if self.dim is not None and self.dim > dim_in:
            raise UserError(
                f"dim is {self.dim}, but the features have {dim_in}: a head never enlarges them. "
                f"Set dim to {dim_in} or less."
            )

    @property
    def features(self) -> str:
        """Sentence features that the head reads: ``joint``, ``separate`` or ``both``."""
        return str(getattr(self.settings, "features", self.family.features))

    @property
    def is_identity(self) -> bool:
        """Whether embeddings are the unchanged features."""
        return self.family.is_identity

    def with_settings(self, changes: dict[str, Any], source: str) -> Recipe:
        """Copy the recipe with some settings changed.

        Args:
            changes: new values by setting.
            source: where the changes come from; errors begin with it.

        Returns:
            The changed recipe.

        Raises:
            UserError: a setting does not exist, or its value is invalid.
        """
        settings = build(self.family.Settings, {**asdict(self.settings), **changes}, source)
        return replace(self, settings=settings)

    def with_changes(self, changes: Mapping[str, str] | None, source: str) -> Recipe:
        """Copy the recipe with the settings of ``--set`` changed.

        Args:
            changes: new values as text, by setting; see ``parse_settings``.
            source: where the changes come from; errors begin with it.

        Returns:
            The changed recipe.

        Raises:
            UserError: a setting does not exist, or its value is invalid.
        """
        known = [item.name for item in fields(self.family.Settings)]
        for key in changes or {}:
            if key not in known:
                raise UserError(
                    f"{source}: the head {self.name} has no setting {key!r}. {nearest(key, known)}"
                )
        return self.with_settings(parse_settings(self.family.Settings, changes or {}), source)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as head.json records it.

        Returns:
            Its name, description, source, kind and settings.
        """
        about = {"name": self.name, "description": self.description, "source": self.source}
        return {**about, "kind": self.kind, "settings": asdict(self.settings)}


def parse_settings(settings: type[Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """Parse values of ``--set`` as numbers, truth values, lists of numbers, or text.

    Settings that are texts are not parsed. Whether the settings have these names and types is
    checked when they are built.

    Raises:
        UserError: there is no such custom objective.
    """

    def parse(text: str) -> Any:
        for parser in (int, float, {"true": True, "false": False}.__getitem__):
            with suppress(KeyError, ValueError):
                return parser(text)
        return text

    hints, parsed = get_type_hints(settings), dict[str, Any](changes)
    for key, text in changes.items():
        if get_origin(hints.get(key)) in (list, tuple):
            parsed[key] = [parse(part) for part in re.split("[,+]", text) if part]
        elif hints.get(key) is not str and get_origin(hints.get(key)) is not Literal:
            parsed[key] = parse(text)
    return _load_objective(settings, parsed, Path())


def load_recipe(name_or_file: str, task: str | None = None) -> Recipe:
    """Read a recipe.

    Args:
        name_or_file: name of a bundled recipe, such as ``mlp``, or path of a ``.toml`` file.
        task: task with recipes of its own, such as ``kgc``; all others use those of rated pairs.

    Returns:
        The validated recipe.

    Raises:
        UserError: the recipe does not exist, or has an unknown kind, an unknown key or an invalid
            value.

    Examples:
        >>> from llmcond.heads import load_recipe
        >>> load_recipe("mlp").settings.depth
        2
    """
    path = resolve_toml(name_or_file, "heads", task)
    settings = read_toml(path)
    header = {
        item.name: settings.pop(item.name)
        for item in fields(_RecipeHeader)
        if item.name in settings
    }
    recipe_header = build(_RecipeHeader, header, str(path))
    kind, family = find_family(recipe_header.kind, str(path), path.parent)
    if family.no_recipe:
        raise UserError(f"{path}: a {kind} head {family.no_recipe}.")
    settings = _load_objective(family.Settings, settings, path.parent)
    built = build(family.Settings, settings, str(path))
    names = path.stem, recipe_header.description, recipe_header.source, kind
    return Recipe(*names, family, built, str(path.absolute()), recipe_header.finetune)


def find_family(kind: str, source: str, folder: Path | None = None) -> tuple[str, type[HeadModule]]:
    """Return the name of a kind of head as records have it, and its class, which is imported now.

    A prefix wraps another kind: ``query-KIND`` is a head that maps queries with a KIND head, in
    addition to a map of candidates.

    Custom code, ``FILE.py:NAME`` or ``MODULE:NAME``, is relative to ``folder``. If ``folder`` is
    None, ``source`` is a record, and only code that the user has named or registered elsewhere is
    used.

    Raises:
        UserError: the kind does not exist, or the code is not a head.
    """
    for prefix in PREFIXES:
        if kind.startswith(prefix):
            name, inner = find_family(kind.removeprefix(prefix), source, folder)
            return f"{prefix}{name}", plugins.find_plugin(
                prefix, PREFIXES, "heads", "kind of head"
            )(inner)
    if plugins.is_plugin(kind):
        family = (
            plugins.get_registered(kind, source)
            if folder is None
            else _load_named(kind, folder, source)
        )
    else:
        try:
            family = plugins.find_plugin(kind, FAMILIES, "heads", "kind of head")
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
    if not (isinstance(family, type) and issubclass(family, HeadModule)):
        raise UserError(f"{kind} is not a head: it must be a subclass of llmcond.heads.HeadModule.")
    settings: Any = getattr(family, "Settings", None)
    has_settings = is_dataclass(settings)
    # Some bundled families are not fitted on rated pairs.
    trained = family.supervised and kind not in FAMILIES
    if not has_settings or (trained and not issubclass(settings, TrainingSettings)):
        raise UserError(
            f"{kind} has no valid Settings: it must be a frozen dataclass, and for heads trained "
            "by gradient descent a subclass of llmcond.heads.TrainingSettings."
        )
    return plugins.record_name(kind), family


def _load_named(name: str, folder: Path, source: str) -> Any:
    """Return code that the user named: from its file, or registered, or imported."""
    home = name.rpartition(":")[0]
    if home.endswith(".py") and (folder / home).is_file():
        return plugins.load(name, folder)
    try:
        return plugins.get_registered(name, source)
    except UserError:
        return plugins.load(name, folder)


def _load_objective(
    settings_class: type[Any], settings: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Load the custom objective of settings for rated pairs; return the settings with its name."""
    name = settings.get("objective")
    if not issubclass(settings_class, ObjectiveSettings) or not isinstance(name, str) or not name:
        return settings
    if not plugins.is_plugin(name):
        known = "mse, info_nce, quadruplet, cosent and ranking are settings"
        raise UserError(f"objective is {name!r}; expected code as FILE.py:NAME ({known}).")
    _load_named(name, folder, "the setting objective")
    return {**settings, "objective": plugins.record_name(name)}
