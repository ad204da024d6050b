"""Code of a user's own (heads, objectives, metrics, poolings, tasks), run because he named it.

A name is ``my_heads.py:GatedHead`` or ``package.module:GatedHead``. Code is only imported where the
user named it: on the command line, in a TOML file that was named there, or from Python. A record
(a head's or a run's folder) that names code gets what was named so before, or an error.

An installed package adds names without a colon by entry points; :func:`find` imports them, also for
a record that names one, since the user has installed the package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from llmcond.errors import UserError, first_line, nearest

#: Name, as records have it -> the object.
_REGISTERED: dict[str, Any] = {}
#: What :func:`load` was given, for processes that are started later.
_LOADED: list[str] = []


def is_plugin(name: str) -> bool:
    """Return whether a name stands for code of a user's own: ``FILE.py:NAME``, ``MODULE:NAME``."""
    return ":" in name


def register(name: str, value: Any) -> Any:
    """Make an object known under a name such as ``my_heads.py:GatedHead``, and return it."""
    _REGISTERED[record_name(name)] = value
    return value


def record_name(name: str) -> str:
    """Return the name that records have: without the folders of a file."""
    home, _, attribute = name.rpartition(":")
    return f"{Path(home).name}:{attribute}" if home.endswith(".py") else name


def load(name: str, folder: Path | None = None) -> Any:
    """Import what the user named, and register it.

    Args:
        name: ``FILE.py:NAME`` or ``MODULE:NAME``.
        folder: what a file's path is relative to; None: the working folder.

    Raises:
        UserError: no such file, module or name, or its code fails.
    """
    home, _, attribute = name.rpartition(":")
    if not home or not attribute:
        raise UserError(f"{name!r} names no code. Expected FILE.py:NAME or package.module:NAME.")
    is_file = home.endswith(".py")
    path = Path(folder or ".", home).absolute() if is_file else None
    try:
        module = import_module(home) if path is None else _import_file(path)
    except Exception as error:  # whatever a user's code raises
        raise UserError(f"{name} cannot be imported: {first_line(error)}.") from error
    if not hasattr(module, attribute):
        public = [own for own in vars(module) if not own.startswith("_")]
        raise UserError(f"{home} has no {attribute!r}. {nearest(attribute, public)}")
    loaded = name if path is None else f"{path}:{attribute}"
    if loaded not in _LOADED:
        _LOADED.append(loaded)
    return register(name, getattr(module, attribute))


def recorded(name: str, source: str) -> Any:
    """Return what a record names; a UserError unless the user has named or registered it before."""
    key = record_name(name)
    if key not in _REGISTERED:
        raise UserError(
            f"{source} needs code of its own, {name}, which only runs where you name it: --plugin "
            f"{name} with the path to it, or llmcond.register({name!r}, ...) from Python."
        )
    return _REGISTERED[key]


def loaded() -> tuple[str, ...]:
    """Return all that was loaded, for :func:`load` in another process."""
    return tuple(_LOADED)


def installed(group: str) -> dict[str, str]:
    """Return what installed packages add by entry points ``llmcond.GROUP``: name -> MODULE:NAME."""
    return {point.name: point.value for point in entry_points(group=f"llmcond.{group}")}


def find(name: str, bundled: Mapping[str, str], group: str, what: str) -> Any:
    """Import what a name stands for: something bundled, or what an installed package adds.

    Installed packages are searched only for names that are not bundled, as that takes a while.

    Args:
        name: without a colon.
        bundled: name -> MODULE:NAME.
        group: of entry points: ``heads``, ``kinds``, ``metrics`` or ``tasks``.
        what: a noun for messages, such as ``task``.

    Raises:
        UserError: no such name, or the package that adds it cannot be imported.
    """
    home = bundled.get(name)
    if home is not None:
        return _import(home)
    added = installed(group)
    if name not in added:
        raise UserError(
            f"there is no {what} {name!r}. {nearest(name, [*bundled, *added])} Installed packages "
            f"add theirs by entry points of the group llmcond.{group}."
        )
    try:
        return _import(added[name])
    except Exception as error:  # whatever a package's code raises
        raise UserError(
            f"the {what} {name!r} of an installed package, {added[name]}, cannot be imported: "
            f"{first_line(error)}."
        ) from error


def _import(home: str) -> Any:
    module, _, attribute = home.partition(":")
    return getattr(import_module(module), attribute)


def _import_file(path: Path) -> Any:
    """Import a Python file as a module of its own, once as long as its text is the same."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    name = f"llmcond_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
