"""``run.json``: what made a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcond.files import check_format, read_json
from llmcond.records import check_record
from llmcond.runs.records import Manifest, TaskManifest

FORMAT = 1
#: What ``run.json`` calls an encoder that lies in the run's own folder, wherever that is.
HERE = "."


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what a run's ``run.json`` holds.

    Raises:
        UserError: a newer version wrote it.
        LlmcondError: it was damaged.
    """
    manifest = read_json(folder / "run.json")
    check_format(manifest, FORMAT, str(folder))
    schema = Manifest if kind_of(manifest) == "rated" else TaskManifest
    check_record(manifest, schema, str(folder / "run.json"), "Extract into a new --run.")
    return manifest


def kind_of(manifest: Mapping[str, Any]) -> str:
    """Return the kind of a run's task, which older versions did not name."""
    return str(manifest.get("kind", "ranking" if manifest.get("ranking") else "rated"))
