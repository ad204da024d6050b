"""A fitted head on disk: a folder with head.json and its weights in safetensors, never a pickle.

Importing this module imports no torch; :mod:`llmcond.heads.loading` makes modules of what is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import Ge, Lt
from filelock import FileLock
from safetensors.numpy import save as save_tensors

from llmcond.errors import LlmcondError, UserError, first_line
from llmcond.files import check_format, read_json, replacing, write_json
from llmcond.heads.settings import Sizes
from llmcond.records import RECORD, check_record

if TYPE_CHECKING:
    from llmcond.heads.base import Fitted

#: In format 1 the weights had one name, so that a head could not be replaced at once.
FORMAT = 2
AGAIN = "Fit the head again."


@dataclass(frozen=True)
class _Epoch:
    epoch: int
    loss: float
    dev_spearman: float | None = None
    dev_score: float | None = None


@dataclass(frozen=True)
class FitRecord:
    """What is recorded of a fit, as far as it is read."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    selected_on: str | None = None
    best_epoch: int | None = None
    steps_per_epoch: int | None = None
    curve: Sequence[_Epoch] = ()


@dataclass(frozen=True, kw_only=True)
class _Description(Sizes):
    """What head.json holds of a head by itself."""

    kind: str
    settings: Mapping[str, Any]
    seed: Annotated[int, Ge(0), Lt(2**32)]
    weights_sha256: str
    fit: FitRecord


def save_head(head: Fitted, folder: Path, record: dict[str, Any]) -> None:
    """Write a head's folder; a reader finds the head that was there, or the new one.

    ``record`` says what made it: recipe, encoder, prompt, data, versions.

    Raises:
        UserError, OSError: the folder cannot be written.
        DiskFullError: no room.
    """
    tensors = {name: np.ascontiguousarray(value) for name, value in head.tensors.items()}
    weights = save_tensors(tensors)
    description = {
        "format": FORMAT,
        "kind": head.kind,
        "settings": asdict(head.settings),
        "seed": head.seed,
        **{size.name: getattr(head, size.name) for size in fields(head.Sizes)},
        "dim_out": head.dim_out,
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "fit": dict(head.fit.record),
        **record,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        try:
            with replacing(folder / _weights_name(description)) as path:
                path.write_bytes(weights)
            # From here on it is the head: weights have the name that this file gives them.
            write_json(folder / "head.json", description)
        finally:
            _sweep(folder)


def _weights_name(description: Mapping[str, Any]) -> str:
    return f"head-{str(description.get('weights_sha256'))[:16]}.safetensors"


def weights_of(folder: Path, description: Mapping[str, Any]) -> Path:
    """Return where the weights lie that head.json describes."""
    named = folder / _weights_name(description)
    return named if named.is_file() else folder / "head.safetensors"  # as format 1 and push have it


def _sweep(folder: Path) -> None:
    """Remove weights that are not the head's, and what killed processes left; it is locked."""
    with suppress(UserError, OSError):
        kept = weights_of(folder, read_json(folder / "head.json"))
        for path in (*folder.glob("head*.safetensors"), *folder.glob(".head*")):
            if path != kept:
                path.unlink()


class HeadFiles(NamedTuple):
    """The files of a head.

    Attributes:
        source: path of head.json.
        description: what it holds.
        path: path of the weights.
        weights: their bytes, in the format of safetensors.
    """

    source: Path
    description: dict[str, Any]
    path: Path
    weights: bytes


def read_head(folder: Path) -> HeadFiles:
    """Read the files of a head, and check that they belong together.

    Raises:
        UserError: no head there, or one written by a newer version.
        LlmcondError: its files were damaged.
    """
    source = folder / "head.json"
    description = read_json(source)
    check_format(description, FORMAT, str(folder))
    check_record(description, _Description, str(source), AGAIN)
    path = weights_of(folder, description)
    try:
        weights = path.read_bytes()
    except OSError as error:
        if read_json(source) != description:  # it was replaced just now
            return read_head(folder)
        raise LlmcondError(f"{path} cannot be read: {error.strerror}. {AGAIN}") from error
    if hashlib.sha256(weights).hexdigest() != description["weights_sha256"]:
        raise LlmcondError(f"{path} is damaged: it is not what head.json describes. {AGAIN}")
    return HeadFiles(source, description, path, weights)


def damaged_weights(path: Path, kind: str, error: Exception) -> LlmcondError:
    """Return the error that weights are not those of a head, and why."""
    return LlmcondError(
        f"{path} does not hold the parameters of a {kind} head of these settings "
        f"({first_line(error)}). {AGAIN}"
    )
