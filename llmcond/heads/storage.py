"""A fitted head on disk: a folder with head.json and its weights in safetensors, never a pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le, Lt
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import save as save_tensors
from safetensors.torch import load as load_tensors

from llmcond.config import build
from llmcond.errors import LlmcondError, UserError, first_line
from llmcond.files import check_format, read_json, replacing, write_json
from llmcond.heads.base import Fitted, FittedHead
from llmcond.heads.ensemble import Ensemble
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import Fit
from llmcond.heads.queries import FittedQueryHead
from llmcond.heads.query_maps import QueryEnsemble
from llmcond.heads.recipes import find_family
from llmcond.heads.turn_fit import FittedRoles
from llmcond.records import RECORD, check_record

#: In format 1 the weights had one name, so that a head could not be replaced at once.
FORMAT = 2
_AGAIN = "Fit the head again."
#: Beyond any features, and below what overflows.
_Size = Annotated[int, Ge(0), Le(2**24)]


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


@dataclass(frozen=True)
class _Description:
    """What head.json holds of a head by itself."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    kind: str
    settings: Mapping[str, Any]
    seed: Annotated[int, Ge(0), Lt(2**32)]
    dim_in: _Size
    weights_sha256: str
    fit: FitRecord
    dim_condition: _Size = 0
    n_relations: _Size = 0


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
        "dim_in": head.dim_in,
        "dim_condition": head.dim_condition,
        **({"n_relations": head.n_relations} if isinstance(head, FittedQueryHead) else {}),
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


def load_head(folder: Path) -> tuple[FittedHead, dict[str, Any]]:
    """Return the head of a folder, and everything that its head.json records.

    Raises:
        UserError: no head there, one that ranks candidates, one written by a newer version, or one
            of the user's own code that was neither named nor registered.
        LlmcondError: its files were damaged.
    """
    head, description = _load(folder)
    if not isinstance(head, FittedHead):
        raise UserError(f"{folder} holds a head that ranks candidates; it compares no pairs.")
    return head, description


def load_query_head(folder: Path) -> tuple[FittedQueryHead, dict[str, Any]]:
    """Return a head that ranks candidates, on no graph yet; else as :func:`load_head`."""
    head, description = _load(folder)
    if not isinstance(head, FittedQueryHead):
        raise UserError(f"{folder} holds a {head.kind} head; it maps no queries of a graph.")
    return head, description


def load_roles_head(folder: Path) -> tuple[FittedRoles, dict[str, Any]]:
    """Return a head that maps utterances of dialogues to roles; else as :func:`load_head`."""
    head, description = _load(folder)
    if not isinstance(head, FittedRoles):
        raise UserError(f"{folder} holds a {head.kind} head; it maps no utterances of dialogues.")
    return head, description


def _load(folder: Path) -> tuple[Fitted, dict[str, Any]]:
    source = folder / "head.json"
    description = read_json(source)
    check_format(description, FORMAT, str(folder))
    check_record(description, _Description, str(source), _AGAIN)
    path = weights_of(folder, description)
    try:
        weights = path.read_bytes()
    except OSError as error:
        if read_json(source) != description:  # it was replaced just now
            return _load(folder)
        raise LlmcondError(f"{path} cannot be read: {error.strerror}. {_AGAIN}") from error
    if hashlib.sha256(weights).hexdigest() != description["weights_sha256"]:
        raise LlmcondError(f"{path} is damaged: it is not what head.json describes. {_AGAIN}")
    kind, family = find_family(description["kind"], str(source))
    settings = build(family.Settings, description["settings"], str(source))
    dims = [description["dim_in"], description.get("dim_condition", 0)]
    if family.maps_queries:
        dims.append(description.get("n_relations", 0))
    try:
        tensors = load_tensors(weights)
        with torch.device("meta"):  # takes no memory, whatever sizes a damaged file names
            _made(family, settings, dims).load_state_dict(tensors, assign=True)
        module = _made(family, settings, dims)
        module.load_state_dict(tensors)
    except (ArithmeticError, KeyError, RuntimeError, SafetensorError, ValueError) as error:
        raise LlmcondError(
            f"{path} does not hold the parameters of a {kind} head of these settings "
            f"({first_line(error)}). {_AGAIN}"
        ) from error
    made: Any = FittedHead
    if family.maps_queries or family.maps_turns:
        made = FittedQueryHead if family.maps_queries else FittedRoles
    fit = Fit(description["fit"])
    return made(kind, family, module.finished(), description["seed"], fit), description


def _made(family: type[HeadModule], settings: Any, dims: Sequence[int]) -> HeadModule:
    heads: list[Any] = [family(settings, *dims) for _ in range(getattr(settings, "members", 1))]
    joined: Any = QueryEnsemble if family.maps_queries else Ensemble
    made: HeadModule = heads[0] if len(heads) == 1 else joined(heads)
    return made
