"""Training on texts with attributes: what was asked for, and its record."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from llmcond.config import build
from llmcond.data.aspects import set_files
from llmcond.errors import UserError
from llmcond.files import digest_file
from llmcond.finetune.settings import AspectSettings


def aspect_settings(given: AspectSettings) -> AspectSettings | None:
    """Check what was asked for; None: no texts with attributes.

    Raises:
        UserError: a value out of its range, or an option of these texts without ``aspects``.
    """
    values = {**asdict(given), "aspects": given.aspects and str(given.aspects)}
    settings = build(AspectSettings, values, "texts with attributes")
    if settings.aspects is not None:
        return settings
    for item in fields(settings):
        if getattr(settings, item.name) != item.default:
            flag = item.name.replace("_", "-")
            raise UserError(f"--{flag} needs texts with attributes. Add --aspects FOLDER.")
    return None


def aspects_record(settings: AspectSettings) -> dict[str, Any]:
    """Return what decides the groups that are drawn: settings, and the digest of each set."""
    files = set_files(Path(str(settings.aspects)))
    digests = {name: digest_file(path) for name, path in files.items()}
    return {**asdict(settings), "aspects": digests}
