"""A fitted head on disk: a folder with head.json and its weights in safetensors, never a pickle.

PyTorch is imported only for heads that need it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import numpy as np
from annotated_types import Ge, Lt
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load
from safetensors.numpy import save as save_tensors

from llmcond.base.errors import LlmcondError, UserError, first_line
from llmcond.base.files import check_format, read_json, replace_atomically, write_json
from llmcond.base.records import build, check_record
from llmcond.heads.numpy_heads import DENSE_KINDS, FitReport, NumpyHead
from llmcond.heads.settings import Sizes

if TYPE_CHECKING:
    from llmcond.heads.fitted import FittedHead, FittedModule
    from llmcond.heads.module import HeadModule


FORMAT = 2
FIT_AGAIN = "Fit the head again."


@dataclass(frozen=True)
class _Epoch:
    epoch: int
    loss: float
    dev_spearman: float | None = None
    dev_score: float | None = None


@dataclass(frozen=True)
class FitRecord:
    """The fields of a fit's record that are read again."""

    selected_on: str | None = None
    best_epoch: int | None = None
    steps_per_epoch: int | None = None
    curve: Sequence[_Epoch] = ()
    trained_on: Sequence[str] = ("train",)


@dataclass(frozen=True)
class _ZeroShot:
    name: str


@dataclass(frozen=True, kw_only=True)
class _Description(Sizes):
    """The fields of head.json that describe the head itself."""

    kind: str
    settings: Mapping[str, Any]
    seed: Annotated[int, Ge(0), Lt(2**32)]
    weights_sha256: str
    fit: FitRecord
    zero_shot: _ZeroShot | None = None


def save_head(head: FittedModule, folder: Path, record: dict[str, Any]) -> None:
    """Write a head into its folder.

    The head is replaced atomically: a concurrent reader gets the previous head or the new one.

    Args:
        head: the fitted head.
        folder: folder of the head; it is created if it does not exist.
        record: further entries of head.json, such as the recipe, encoder, prompt, data and
            versions.

    Raises:
        UserError, OSError: the folder cannot be written.
        DiskFullError: the disk is full.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from llmcond.heads import PairArrays, fit_recipe, load_recipe, save_head
        >>> first, second = np.random.default_rng(0).normal(size=(2, 20, 8))
        >>> pairs = PairArrays(first, second, rating=np.linspace(0, 1, 20))
        >>> head = fit_recipe(load_recipe("none"), pairs, None, seed=0, on_epoch=lambda *_: None)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_head(head, Path(folder), {"recipe": "none"})
        ...     (Path(folder) / "head.json").is_file()
        True
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
            with replace_atomically(folder / _weights_name(description)) as path:
                path.write_bytes(weights)
            # This file names the weights, so from now on readers get the new head.
            write_json(folder / "head.json", description)
        finally:
            _remove_obsolete_files(folder)


def _weights_name(description: Mapping[str, Any]) -> str:
    return f"head-{str(description.get('weights_sha256'))[:16]}.safetensors"


def weights_path(folder: Path, description: Mapping[str, Any]) -> Path:
    """Return the path of the weights that head.json describes."""
    path = folder / _weights_name(description)
    return path if path.is_file() else folder / "head.safetensors"  # the name in pushed heads


def _remove_obsolete_files(folder: Path) -> None:
    """Remove obsolete weights and leftovers of killed processes; the caller holds the lock."""
    with suppress(UserError, OSError):
        current = weights_path(folder, read_json(folder / "head.json"))
        for path in (*folder.glob("head*.safetensors"), *folder.glob(".head*")):
            if path != current:
                path.unlink()


def read_description(folder: Path) -> dict[str, Any]:
    """Read a head's head.json, and check it.

    Raises:
        UserError: the folder contains no head, or one that a newer version wrote.
        LlmcondError: the file is damaged.
    """
    source = folder / "head.json"
    description = read_json(source)
    check_format(description, FORMAT, str(folder))
    check_record(description, _Description, str(source), FIT_AGAIN)
    return description


def _read_head(folder: Path) -> tuple[dict[str, Any], Path, bytes]:
    """Return the contents of head.json, and the path and the contents of the weights.

    Raises:
        UserError: the folder contains no head, or one that a newer version wrote.
        LlmcondError: a file is damaged.
    """
    description = read_description(folder)
    path = weights_path(folder, description)
    try:
        weights = path.read_bytes()
    except OSError as error:
        if read_json(folder / "head.json") != description:  # another process has just replaced it
            return _read_head(folder)
        raise LlmcondError(f"{path} cannot be read: {error.strerror}. {FIT_AGAIN}") from error
    if hashlib.sha256(weights).hexdigest() != description["weights_sha256"]:
        raise LlmcondError(f"{path} is damaged: head.json has another checksum. {FIT_AGAIN}")
    return description, path, weights


def damaged_weights_error(path: Path, kind: str, error: Exception) -> LlmcondError:
    """Return an error which says that weights do not belong to a head of this kind, and why."""
    return LlmcondError(
        f"{path} does not hold the parameters of a {kind} head with these settings "
        f"({first_line(error)}). {FIT_AGAIN}"
    )


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
    from llmcond.heads.fitted import FittedHead

    return load_fitted(folder, FittedHead)


def load_fitted(folder: Path, expected_class: type[F]) -> tuple[F, dict[str, Any]]:
    """Load a head of a class of fitted heads; otherwise like ``load_head``."""
    import torch
    from safetensors.torch import load as load_tensors

    from llmcond.heads.fitted import fitted_class, fitted_head
    from llmcond.heads.module import Ensemble
    from llmcond.heads.recipes import find_family

    description, path, weights = _read_head(folder)
    source = str(folder / "head.json")
    kind, family = find_family(description["kind"], source)
    restored = fitted_class(family)
    if not issubclass(restored, expected_class):
        raise UserError(f"{folder} holds a {kind} head; it {expected_class.mismatch_reason}.")
    check_record(description, restored.Sizes, source, FIT_AGAIN)
    settings = build(family.Settings, description["settings"], source)
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
    fit = FitReport(description["fit"])
    return fitted_head(kind, module, description["seed"], fit), description


def load_embedding_head(folder: Path) -> tuple[EmbeddingHead, dict[str, Any]]:
    """Load a head that embeds texts; return it with the contents of its head.json.

    A head of dense layers is always a ``NumpyHead``, so that embeddings do not depend on which
    other packages are installed. All other heads are loaded by torch.

    Raises:
        UserError, LlmcondError: as in ``load_head``.
    """
    if read_description(folder)["kind"] not in DENSE_KINDS:
        return load_head(folder)
    description, path, weights = _read_head(folder)
    kind = description["kind"]
    settings = build(DENSE_KINDS[kind][0], description["settings"], str(folder / "head.json"))
    try:
        head = NumpyHead(kind, settings, description["dim_in"], load(weights))
        _ = head.members  # checks the tensors
    except (KeyError, SafetensorError, ValueError) as error:
        raise damaged_weights_error(path, kind, error) from error
    return head, description
