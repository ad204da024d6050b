"""Training on texts with attributes: what was asked for, and its record."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmcond.data.aspects import set_files
from llmcond.files import digest_file
from llmcond.finetune.settings import AspectSettings


def aspects_record(settings: AspectSettings) -> dict[str, Any]:
    """Return what decides the groups that are drawn: settings, and the digest of each set."""
    files = set_files(Path(str(settings.aspects)))
    digests = {name: digest_file(path) for name, path in files.items()}
    return {**asdict(settings), "aspects": digests}
