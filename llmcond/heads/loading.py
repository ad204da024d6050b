"""Fitted heads, as torch modules, from what is stored of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from llmcond.config import build
from llmcond.errors import UserError
from llmcond.heads.base import Fitted, FittedHead
from llmcond.heads.ensemble import Ensemble
from llmcond.heads.module import HeadModule
from llmcond.heads.pairs import Fit
from llmcond.heads.queries import FittedQueryHead
from llmcond.heads.query_maps import QueryEnsemble
from llmcond.heads.recipes import find_family
from llmcond.heads.storage import HeadFiles, damaged_weights, read_head
from llmcond.heads.turn_fit import FittedRoles


def load_head(folder: Path) -> tuple[FittedHead, dict[str, Any]]:
    """Return the head of a folder, and everything that its head.json records.

    Raises:
        UserError: no head there, one that ranks candidates, one written by a newer version, or one
            of the user's own code that was neither named nor registered.
        LlmcondError: its files were damaged.
    """
    files = read_head(folder)
    return pair_head(files), files.description


def pair_head(files: HeadFiles) -> FittedHead:
    """Return the head that files hold; errors are those of :func:`load_head`."""
    head = _loaded(files)
    if not isinstance(head, FittedHead):
        folder = files.source.parent
        raise UserError(f"{folder} holds a head that ranks candidates; it compares no pairs.")
    return head


def load_query_head(folder: Path) -> tuple[FittedQueryHead, dict[str, Any]]:
    """Return a head that ranks candidates, on no graph yet; else as :func:`load_head`."""
    files = read_head(folder)
    head = _loaded(files)
    if not isinstance(head, FittedQueryHead):
        raise UserError(f"{folder} holds a {head.kind} head; it maps no queries of a graph.")
    return head, files.description


def load_roles_head(folder: Path) -> tuple[FittedRoles, dict[str, Any]]:
    """Return a head that maps utterances of dialogues to roles; else as :func:`load_head`."""
    files = read_head(folder)
    head = _loaded(files)
    if not isinstance(head, FittedRoles):
        raise UserError(f"{folder} holds a {head.kind} head; it maps no utterances of dialogues.")
    return head, files.description


def _loaded(files: HeadFiles) -> Fitted:
    source, description, path, weights = files
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
        raise damaged_weights(path, kind, error) from error
    made: Any = FittedHead
    if family.maps_queries or family.maps_turns:
        made = FittedQueryHead if family.maps_queries else FittedRoles
    fit = Fit(description["fit"])
    head: Fitted = made(kind, family, module.finished(), description["seed"], fit)
    return head


def _made(family: type[HeadModule], settings: Any, dims: Sequence[int]) -> HeadModule:
    heads: list[Any] = [family(settings, *dims) for _ in range(getattr(settings, "members", 1))]
    joined: Any = QueryEnsemble if family.maps_queries else Ensemble
    made: HeadModule = heads[0] if len(heads) == 1 else joined(heads)
    return made
