"""A fitted head on disk: a folder with head.json and head.safetensors, never a pickle."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from llmcond.config import build
from llmcond.errors import LlmcondError, first_line
from llmcond.files import check_format, digest_file, read_json, replacing, write_json
from llmcond.heads.base import FittedHead
from llmcond.heads.ensemble import Ensemble
from llmcond.heads.pairs import Fit
from llmcond.heads.recipes import find_family

FORMAT = 1
_REQUIRED = ("kind", "settings", "seed", "dim_in", "fit")


def save_head(head: FittedHead, folder: Path, record: dict[str, Any]) -> None:
    """Write a head's folder; it is complete or, after a failure, as it was before.

    ``record`` says what made it: recipe, encoder, prompt, data, versions.

    Raises:
        DiskFullError: no room.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = {name: np.ascontiguousarray(value) for name, value in head.tensors.items()}
        with replacing(temporary / "head.safetensors") as path:
            path.write_bytes(save_tensors(tensors))
        description = {
            "format": FORMAT,
            "kind": head.kind,
            "settings": asdict(head.settings),
            "seed": head.seed,
            "dim_in": head.dim_in,
            "dim_condition": head.dim_condition,
            "dim_out": head.dim_out,
            "weights_sha256": digest_file(temporary / "head.safetensors"),
            "fit": dict(head.fit.record),
            **record,
        }
        write_json(temporary / "head.json", description)
        _swap(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``; a head that was there goes last."""
    new.chmod(0o755)
    if not folder.exists():
        new.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    folder.rename(old / "head")
    try:
        new.rename(folder)
    except OSError:
        (old / "head").rename(folder)
        old.rmdir()
        raise
    shutil.rmtree(old)


def load_head(folder: Path) -> tuple[FittedHead, dict[str, Any]]:
    """Return the head of a folder, and everything that its head.json records.

    Raises:
        UserError: no head there, one written by a newer version, or one of the user's own code that
            was neither named nor registered.
        LlmcondError: its files were damaged.
    """
    description = read_json(folder / "head.json")
    check_format(description, FORMAT, str(folder))
    weights = folder / "head.safetensors"
    if not weights.is_file() or digest_file(weights) != description.get("weights_sha256"):
        raise LlmcondError(f"{weights} is missing or damaged; fit the head again.")
    tensors = load_tensors(weights.read_bytes())
    missing = [key for key in _REQUIRED if key not in description]
    if missing:
        raise LlmcondError(f"{folder}/head.json lacks {missing[0]!r}; fit the head again.")
    kind, family = find_family(description["kind"], str(folder / "head.json"))
    settings = build(family.Settings, description["settings"], str(folder / "head.json"))
    dims = description["dim_in"], int(description.get("dim_condition", 0))
    heads = [family(settings, *dims) for _ in range(getattr(settings, "members", 1))]
    module = heads[0] if len(heads) == 1 else Ensemble(heads)
    try:
        module.load_state_dict({name: torch.from_numpy(value) for name, value in tensors.items()})
    except (KeyError, RuntimeError) as error:
        raise LlmcondError(
            f"{weights} does not hold the parameters of a {kind} head of these settings "
            f"({first_line(error)}); fit the head again."
        ) from error
    fit = Fit(description["fit"])
    return FittedHead(kind, family, module.finished(), description["seed"], fit), description
