"""Read heads from their folders; PyTorch is imported only for heads that need it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from safetensors import SafetensorError
from safetensors.numpy import load

from llmcond.config import build
from llmcond.errors import UserError
from llmcond.heads.pairs import Fit
from llmcond.heads.plain import PLAIN_KINDS, PlainHead
from llmcond.heads.storage import AGAIN, HeadFiles, damaged_weights, read_head
from llmcond.records import check_record

if TYPE_CHECKING:
    from llmcond.heads.base import Fitted, FittedHead
    from llmcond.heads.module import HeadModule

F = TypeVar("F", bound="Fitted")
#: A head that makes embeddings of features.
EmbeddingHead: TypeAlias = "FittedHead | PlainHead"


def load_head(folder: Path) -> tuple[FittedHead, dict[str, Any]]:
    """Return the head of a folder, and everything that its head.json records.

    Raises:
        UserError: no head there, one that ranks candidates, one written by a newer version, or one
            of the user's own code that was neither named nor registered.
        LlmcondError: its files were damaged.
    """
    from llmcond.heads.base import FittedHead

    files = read_head(folder)
    return restore_head(files, FittedHead), files.description


def restore_head(files: HeadFiles, of: type[F]) -> F:
    """Return the head that files hold, if it is of a class of fitted heads.

    Errors are those of :func:`load_head`.
    """
    import torch
    from safetensors.torch import load as load_tensors

    from llmcond.heads.base import fitted_class
    from llmcond.heads.module import Ensemble
    from llmcond.heads.recipes import find_family

    source, description, path, weights = files
    kind, family = find_family(description["kind"], str(source))
    restored = fitted_class(family)
    if not issubclass(restored, of):
        raise UserError(f"{source.parent} holds a {kind} head; it {of.refusal}.")
    check_record(description, restored.Sizes, str(source), AGAIN)
    settings = build(family.Settings, description["settings"], str(source))
    dims = [description.get(size.name, 0) for size in fields(restored.Sizes)]

    def make() -> HeadModule:
        members = getattr(settings, "members", 1)
        heads = [family(settings, *dims) for _ in range(members)]
        return heads[0] if members == 1 else Ensemble(heads)

    try:
        tensors = load_tensors(weights)
        with torch.device("meta"):  # takes no memory, whatever sizes a damaged file names
            make().load_state_dict(tensors, assign=True)
        module = make()
        module.load_state_dict(tensors)
    except (ArithmeticError, KeyError, RuntimeError, SafetensorError, ValueError) as error:
        raise damaged_weights(path, kind, error) from error
    return restored(kind, family, module.finished(), description["seed"], Fit(description["fit"]))


def load_embedding_head(folder: Path) -> tuple[EmbeddingHead, dict[str, Any]]:
    """Return the head of a folder that embeds texts, and everything that its head.json records.

    A head of dense layers is always a :class:`PlainHead`, so that embeddings do not depend on what
    else is installed. Any other one is loaded by torch.

    Raises:
        UserError, LlmcondError: as :func:`load_head`.
    """
    files = read_head(folder)
    source, description, path, weights = files
    kind = description["kind"]
    if kind not in PLAIN_KINDS:
        from llmcond.heads.base import FittedHead

        return restore_head(files, FittedHead), description
    settings = build(PLAIN_KINDS[kind][0], description["settings"], str(source))
    try:
        head = PlainHead(kind, settings, description["dim_in"], load(weights))
        _ = head.members  # checks the tensors
    except (KeyError, SafetensorError, ValueError) as error:
        raise damaged_weights(path, kind, error) from error
    return head, description
