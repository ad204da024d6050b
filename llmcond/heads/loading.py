"""Read heads from their folders; PyTorch is imported only for heads that need it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from safetensors import SafetensorError
from safetensors.numpy import load

from llmcond.config import build
from llmcond.errors import UserError
from llmcond.heads.numpy_heads import DENSE_KINDS, NumpyHead
from llmcond.heads.pairs import FitReport
from llmcond.heads.storage import FIT_AGAIN, HeadFiles, damaged_weights_error, read_head
from llmcond.records import check_record

if TYPE_CHECKING:
    from llmcond.heads.base import FittedHead, FittedModule
    from llmcond.heads.module import HeadModule

F = TypeVar("F", bound="FittedModule")
#: A head that maps features to embeddings.
EmbeddingHead: TypeAlias = "FittedHead | NumpyHead"


def load_head(folder: Path) -> tuple[FittedHead, dict[str, Any]]:
    """Load a head from its folder.

    Args:
        folder: folder of the head, which contains head.json and the weights.

    Returns:
        The fitted head on the CPU, and the contents of head.json.

    Raises:
        UserError: the folder contains no head, a head that ranks candidates, or a head that a newer
            version wrote; or the head is custom code that was neither named nor registered.
        LlmcondError: a file is damaged.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from llmcond.heads import PairArrays, fit_recipe, load_head, load_recipe, save_head
        >>> first, second = np.random.default_rng(0).normal(size=(2, 20, 8))
        >>> pairs = PairArrays(first, second, rating=np.linspace(0, 1, 20))
        >>> head = fit_recipe(load_recipe("none"), pairs, None, seed=0, on_epoch=lambda *_: None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_head(head, Path(folder), {"recipe": "none"})
        ...     loaded, record = load_head(Path(folder))
        >>> loaded.kind, record["recipe"], record["dim_in"]
        ('none', 'none', 8)
    """
    from llmcond.heads.base import FittedHead

    files = read_head(folder)
    return restore_head(files, FittedHead), files.description


def restore_head(files: HeadFiles, expected_class: type[F]) -> F:
    """Restore the head that files hold, if it belongs to a class of fitted heads.

    Raises:
        UserError, LlmcondError: as in ``load_head``.
    """
    import torch
    from safetensors.torch import load as load_tensors

    from llmcond.heads.base import fitted_class
    from llmcond.heads.module import Ensemble
    from llmcond.heads.recipes import find_family

    source, description, path, weights = files
    kind, family = find_family(description["kind"], str(source))
    restored = fitted_class(family)
    if not issubclass(restored, expected_class):
        raise UserError(
            f"{source.parent} holds a {kind} head; it {expected_class.mismatch_reason}."
        )
    check_record(description, restored.Sizes, str(source), FIT_AGAIN)
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
        raise damaged_weights_error(path, kind, error) from error
    return restored(
        kind, family, module.freeze(), description["seed"], FitReport(description["fit"])
    )


def load_embedding_head(folder: Path) -> tuple[EmbeddingHead, dict[str, Any]]:
    """Load a head that embeds texts; return it with the contents of its head.json.

    A head of dense layers is always a ``NumpyHead``, so that embeddings do not depend on which
    other packages are installed. All other heads are loaded by torch.

    Raises:
        UserError, LlmcondError: as in ``load_head``.
    """
    files = read_head(folder)
    source, description, path, weights = files
    kind = description["kind"]
    if kind not in DENSE_KINDS:
        from llmcond.heads.base import FittedHead

        return restore_head(files, FittedHead), description
    settings = build(DENSE_KINDS[kind][0], description["settings"], str(source))
    try:
        head = NumpyHead(kind, settings, description["dim_in"], load(weights))
        _ = head.members  # checks the tensors
    except (KeyError, SafetensorError, ValueError) as error:
        raise damaged_weights_error(path, kind, error) from error
    return head, description
