"""What is shipped with the package: prompts, heads, and a trained encoder with its head."""

from __future__ import annotations

import re
from pathlib import Path

#: The run of commands that are not told of another.
DEFAULT_RUN = Path("runs/default")
#: The bundled encoder with its head that commands take where there is no run.
PRETRAINED = "minilm-conditions"


def bundled(kind: str, task: str | None = None) -> Path:
    """Return the folder of bundled ``prompts``, ``heads`` or ``models``, or of a task's own.

    They stand at the repository's top level, and are copied into the package when a wheel is built.
    """
    package = Path(__file__).resolve().parent
    installed = package / "_bundled" / kind
    folder = installed if installed.is_dir() else package.parent / kind
    own = task is not None and re.fullmatch(r"\w+", task) and (folder / task).is_dir()
    return folder / str(task) if own else folder


def pretrained(name: object) -> Path | None:
    """Return the folder of a bundled encoder that was trained, with its head; None: no such name.

    It is laid out as a run that was pushed: without data and features.
    """
    return bundled("models") / str(name) if name in pretrained_names() else None


def pretrained_names() -> list[str]:
    """Return the names of the bundled encoders that were trained, the default one first."""
    names = {path.parent.name for path in bundled("models").glob("*/run.json")}
    return sorted(names, key=lambda name: (name != PRETRAINED, name))


def bundled_names(kind: str, task: str | None = None) -> list[str]:
    """Return the names of the bundled ``prompts`` or ``heads``, or a task's own, sorted."""
    return sorted(path.stem for path in bundled(kind, task).glob("*.toml"))
