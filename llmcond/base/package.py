"""The package: its version, its bundled files, lazy imports, and code that users add."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from llmcond.base.errors import UserError, first_line, nearest

__version__ = "0.2.0"


#: Default run of commands.
DEFAULT_RUN = Path("runs/default")
#: Default bundled model, which commands use if there is no run.
DEFAULT_MODEL = "minilm-conditions"


def bundled_folder(kind: str, task: str | None = None) -> Path:
    """Return the folder of the bundled ``prompts``, ``heads`` or ``models``.

    The folders are at the repository's top level. Building a wheel copies them into the package.

    Args:
        kind: name of the folder.
        task: task whose subfolder is returned if it has one.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "_bundled" / kind
    folder = installed if installed.is_dir() else package.parent / kind
    has_task = task is not None and re.fullmatch(r"\w+", task) and (folder / task).is_dir()
    return folder / str(task) if has_task else folder


def pretrained_folder(name: object) -> Path | None:
    """Return the folder of a bundled model, or None if there is no model of this name.

    The folder is laid out like a pushed run: an encoder and a head without data and features.
    """
    return bundled_folder("models") / str(name) if name in pretrained_names() else None


def pretrained_names() -> list[str]:
    """Return the names of the bundled models, the default one first."""
    names = {path.parent.name for path in bundled_folder("models").glob("*/run.json")}
    return sorted(names, key=lambda name: (name != DEFAULT_MODEL, name))


def bundled_names(kind: str, task: str | None = None) -> list[str]:
    """Return the sorted names of the bundled ``prompts`` or ``heads``, or of those of a task."""
    return sorted(path.stem for path in bundled_folder(kind, task).glob("*.toml"))


def lazy_getattr(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` that imports a package's public names when they are first used.

    Args:
        package: name of the package, for errors.
        modules: module of each public name.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return load


def attach_stub(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for the names in a package's stub.

    The stub is ``__init__.pyi`` next to ``file``. As in SPEC 1 of Scientific Python, it consists of
    absolute imports.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    names = sorted(homes)
    return lazy_getattr(package, homes), lambda: list(names), names


#: Registered objects by their names in records.
_REGISTERED: dict[str, Any] = {}
#: Names that were passed to ``load``, for processes that are started later.
_LOADED: list[str] = []


def is_plugin(name: str) -> bool:
    """Return whether a name stands for a user's code: ``FILE.py:NAME`` or ``MODULE:NAME``."""
    return ":" in name


def register(name: str, value: Any) -> Any:
    """Register an object, so that records that name it can be loaded.

    A run or head that uses a custom head, objective, metric, pooling or task records only its name.
    In Python, register the object before you load such a run.

    Args:
        name: name of the object in records, such as ``my_heads.py:GatedHead``. Folders in the name
            of a file are ignored.
        value: the object.

    Returns:
        The object.

    Examples:
        >>> import llmcond
        >>> def mean_error(prediction, rating, group):
        ...     return abs(prediction - rating).mean()
        >>> registered = llmcond.register("my_metrics.py:mean_error", mean_error)
        >>> registered is mean_error
        True
    """
    _REGISTERED[record_name(name)] = value
    return value


def record_name(name: str) -> str:
    """Return a name without the folders of its file, as records contain it."""
    home, _, attribute = name.rpartition(":")
    return f"{Path(home).name}:{attribute}" if home.endswith(".py") else name


def load(name: str, folder: Path | None = None) -> Any:
    """Import an object that the user has named, and register it.

    Args:
        name: ``FILE.py:NAME`` or ``MODULE:NAME``.
        folder: folder that the path of a file is relative to; None: the working directory.

    Returns:
        The object.

    Raises:
        UserError: the file, module or object does not exist, or its code fails.
    """
    home, _, attribute = name.rpartition(":")
    if not home or not attribute:
        raise UserError(
            f"{name!r} is not a name of code. Expected FILE.py:NAME or package.module:NAME."
        )
    is_file = home.endswith(".py")
    path = Path(folder or ".", home).absolute() if is_file else None
    try:
        module = import_module(home) if path is None else _import_file(path)
    except Exception as error:  # A user's code can raise anything.
        raise UserError(f"{name} cannot be imported: {first_line(error)}.") from error
    if not hasattr(module, attribute):
        public = [member for member in vars(module) if not member.startswith("_")]
        raise UserError(f"{home} has no {attribute!r}. {nearest(attribute, public)}")
    loaded = name if path is None else f"{path}:{attribute}"
    if loaded not in _LOADED:
        _LOADED.append(loaded)
    return register(name, getattr(module, attribute))


def get_registered(name: str, source: str) -> Any:
    """Return the object that a record names.

    Args:
        name: name of the object in the record.
        source: the record, for the message.

    Raises:
        UserError: the user has neither named nor registered the object before.
    """
    key = record_name(name)
    if key not in _REGISTERED:
        raise UserError(
            f"{source} needs your code {name}, which only runs if you name it: add --plugin "
            f"{name} with the path to it, or call llmcond.register({name!r}, ...) in Python."
        )
    return _REGISTERED[key]


def loaded_names() -> tuple[str, ...]:
    """Return the names of all loaded objects, for ``load`` in another process."""
    return tuple(_LOADED)


def installed_plugins(group: str) -> dict[str, str]:
    """Return the entry points ``llmcond.GROUP`` of installed packages: name -> MODULE:NAME."""
    from importlib.metadata import entry_points  # half of the time of `llmcond --help`

    return {point.name: point.value for point in entry_points(group=f"llmcond.{group}")}


def find_plugin(name: str, bundled: Mapping[str, str], group: str, what: str) -> Any:
    """Import an object by its name, from llmcond or an installed package.

    Installed packages are searched only for names that are not bundled, because it takes a while.

    Args:
        name: name without a colon.
        bundled: bundled objects, name -> MODULE:NAME.
        group: group of entry points: ``heads``, ``kinds``, ``metrics`` or ``tasks``.
        what: noun for messages, such as ``task``.

    Raises:
        UserError: there is no such name, or the package that adds it cannot be imported.
    """
    home = bundled.get(name)
    if home is not None:
        return _import(home)
    added = installed_plugins(group)
    if name not in added:
        raise UserError(
            f"there is no {what} {name!r}. {nearest(name, [*bundled, *added])} Installed packages "
            f"can add more by entry points of the group llmcond.{group}."
        )
    try:
        return _import(added[name])
    except Exception as error:  # A package's code can raise anything.
        raise UserError(
            f"the {what} {name!r} of an installed package, {added[name]}, cannot be imported: "
            f"{first_line(error)}."
        ) from error


def _import(home: str) -> Any:
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute)


#: The names of modules of users' files begin with this, and end with a digest of the file.
_FILE_MODULE = "llmcond_plugin_"


def user_modules(*values: object) -> list[str]:
    """Return the names of the modules of users' files that classes, functions or objects are of.

    A name changes with the text of its file.
    """
    names = {str(getattr(value, "__module__", "")) for value in values}
    return sorted(name for name in names if name.startswith(_FILE_MODULE))


def _import_file(path: Path) -> Any:
    """Import a Python file as a separate module, and again only if its text has changed."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    name = f"{_FILE_MODULE}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
