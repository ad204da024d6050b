"""The files shipped with the package: prompts, recipes of heads, and trained encoders."""

from __future__ import annotations

import re
from pathlib import Path

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
    package = Path(__file__).resolve().parent
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
