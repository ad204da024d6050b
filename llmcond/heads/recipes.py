"""Recipes: one TOML file a head, with its kind and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_origin, get_type_hints

from llmcond import plugins
from llmcond.config import STRICT, build, find_toml, read_toml
from llmcond.errors import UserError, nearest
from llmcond.heads.module import HeadModule
from llmcond.heads.settings import ObjectiveSettings, TrainingSettings

#: The kind of a head -> its class. A new one is a class and a line here.
FAMILIES = {
    "none": "llmcond.heads.dense:Identity",
    "linear": "llmcond.heads.dense:Linear",
    "mlp": "llmcond.heads.dense:Mlp",
    "pca": "llmcond.heads.dense:Pca",
    "ica": "llmcond.heads.dense:Ica",
    "whitening": "llmcond.heads.dense:Whitening",
    "random": "llmcond.heads.dense:Random",
    "hadamard": "llmcond.heads.conditioned:Hadamard",
    "concat": "llmcond.heads.conditioned:Concat",
    "hypernet": "llmcond.heads.conditioned:Hypernet",
    "hypernet-ablation": "llmcond.heads.conditioned:HypernetAblation",
    "towers": "llmcond.heads.conditioned:Towers",
    "regression": "llmcond.heads.dense:Regression",
    "roles": "llmcond.kinds.dialogue.roles:Roles",
    "no-roles": "llmcond.kinds.dialogue.roles:NoRoles",
}

#: Prefix of kinds that wrap another kind, such as ``query-mlp`` -> the function that makes the
#: wrapping class from the wrapped one.
PREFIXES = {"query-": "llmcond.kinds.ranking.heads:query_family"}


@dataclass(frozen=True, slots=True)
class _About:
    """The keys that every recipe has; all others are settings of its kind."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    kind: str
    description: str
    source: str
    finetune: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A head's recipe, checked.

    Attributes:
        name: the file's name without ``.toml``.
        description: one line for listings.
        source: the paper's section or equation.
        kind: the family's name, in recipes and head.json.
        family: the class of its module.
        settings: an instance of the family's settings.
        path: what :func:`load_recipe` found it by.
        finetune: how an encoder is trained with it, where its authors did: settings of
            ``train-lora`` that go before the defaults.
    """

    name: str
    description: str
    source: str
    kind: str
    family: type[HeadModule]
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

    @property
    def is_identity(self) -> bool:
        """Return whether embeddings are the features as they are."""
        return self.family.is_identity

    def with_settings(self, changes: dict[str, Any], source: str) -> Recipe:
        """Return the recipe with some settings changed, checked as :func:`load_recipe` does."""
        settings = build(self.family.Settings, {**asdict(self.settings), **changes}, source)
        return replace(self, settings=settings)

    def parse_changes(self, changes: dict[str, str], source: str) -> dict[str, Any]:
        """Return ``--set`` values, given as text, in the types of the settings."""
        return parse_settings(self.family.Settings, changes, source, f"the head {self.name}")

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as head.json records it."""
        about = {"name": self.name, "description": self.description, "source": self.source}
        return {**about, "kind": self.kind, "settings": asdict(self.settings)}


#: How ``--set`` reads each type of setting, by the type of a value.
_READERS: Mapping[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    bool: {"true": True, "false": False}.__getitem__,
}


def parse_settings(
    settings: type[Any], changes: Mapping[str, str], source: str, what: str
) -> dict[str, Any]:
    """Return values that were given as text in the types of a dataclass's fields.

    Raises:
        UserError: a setting that ``what`` lacks, or text that is no such number.
    """
    hints = get_type_hints(settings)  # int of Annotated[int, ...]
    kinds: dict[str, type] = {
        item.name: str if get_origin(hints[item.name]) is Literal else hints[item.name]
        for item in fields(settings)
    }
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
            raise UserError(f"{source}: {key} is {text!r}, not {kinds[key].__name__}.") from error
    return _with_objective(settings, parsed, Path())


def load_recipe(name_or_file: str, task: str | None = None) -> Recipe:
    """Read a recipe by its bundled name or by the path of a ``.toml`` file.

    Args:
        name_or_file: such as ``mlp``, or ``my/head.toml``.
        task: a task with recipes of its own, such as ``kgc``; any other has those of rated pairs.

    Raises:
        UserError: no such recipe, an unknown kind or key, or a bad value.
    """
    path = find_toml(name_or_file, "heads", task)
    settings = read_toml(path)
    about = {item.name: settings.pop(item.name) for item in fields(_About) if item.name in settings}
    described = build(_About, about, str(path))
    kind, family = find_family(described.kind, str(path), path.parent)
    if family.no_recipe:
        raise UserError(f"{path}: a {kind} head {family.no_recipe}.")
    settings = _with_objective(family.Settings, settings, path.parent)
    built = build(family.Settings, settings, str(path))
    names = path.stem, described.description, described.source, kind
    return Recipe(*names, family, built, str(path.absolute()), described.finetune)


def find_family(kind: str, source: str, folder: Path | None = None) -> tuple[str, type[HeadModule]]:
    """Return a kind of head as records name it, and its class; its module is imported only now.

    A kind may be made of another one, whose name follows a prefix: ``query-KIND`` is a head whose
    map of queries is of a kind, beside a map of candidates.

    Code of the user's own, ``FILE.py:NAME`` or ``MODULE:NAME``, is relative to ``folder``; where
    that is None, ``source`` is a record, for which no code is imported that the user has not named
    elsewhere.

    Raises:
        UserError: no such kind, or code that is no head.
    """
    for prefix in PREFIXES:
        if kind.startswith(prefix):
            name, inner = find_family(kind.removeprefix(prefix), source, folder)
            return f"{prefix}{name}", plugins.find(prefix, PREFIXES, "heads", "kind of head")(inner)
    if plugins.is_plugin(kind):
        family = plugins.recorded(kind, source) if folder is None else _named(kind, folder, source)
    else:
        try:
            family = plugins.find(kind, FAMILIES, "heads", "kind of head")
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
    if not (isinstance(family, type) and issubclass(family, HeadModule)):
        raise UserError(f"{kind} is no head: it must be a subclass of llmcond.heads.HeadModule.")
    settings: Any = getattr(family, "Settings", None)
    legal = is_dataclass(settings)
    # Some of our own are not fitted on rated pairs.
    trained = family.supervised and kind not in FAMILIES
    if not legal or (trained and not issubclass(settings, TrainingSettings)):
        raise UserError(
            f"{kind} has no Settings that recipes can be checked by: a frozen dataclass, of "
            "heads trained by gradient a subclass of llmcond.heads.TrainingSettings."
        )
    return plugins.record_name(kind), family


def _named(name: str, folder: Path, source: str) -> Any:
    """Return code that the user named: from its file, else registered, else imported."""
    home = name.rpartition(":")[0]
    if home.endswith(".py") and (folder / home).is_file():
        return plugins.load(name, folder)
    try:
        return plugins.recorded(name, source)
    except UserError:
        return plugins.load(name, folder)


def _with_objective(of: type[Any], settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return settings whose objective, if it is the user's own code on rated pairs, is loaded."""
    name = settings.get("objective")
    if not issubclass(of, ObjectiveSettings) or not isinstance(name, str) or not name:
        return settings
    if not plugins.is_plugin(name):
        known = "mse, info_nce, quadruplet, cosent and ranking are weights by themselves"
        raise UserError(f"objective is {name!r}; it names code, FILE.py:NAME ({known}).")
    _named(name, folder, "the setting objective")
    return {**settings, "objective": plugins.record_name(name)}
