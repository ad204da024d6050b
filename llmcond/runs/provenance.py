"""What made an artefact: the time, and the versions of what computed it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from llmcond.system import versions


def provenance() -> dict[str, Any]:
    """Return the time now and the versions of Python, this package and its libraries."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "versions": dict(versions())}
