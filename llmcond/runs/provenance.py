"""What made an artefact: the time, and the versions of what computed it."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from llmcond.version import __version__

_LIBRARIES = (
    "numpy",
    "pylance",
    "safetensors",
    "scikit-learn",
    "scipy",
    "tokenizers",
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "peft",
)


def provenance() -> dict[str, Any]:
    """Return the time now and the versions of Python, this package and its libraries."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "versions": dict(_versions())}


@cache
def _versions() -> dict[str, str]:
    versions = {"llmcond": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
