"""Guides: linear maps of embeddings, fitted in closed form on a few labelled texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from llmcond.arrays import Array
from llmcond.errors import LlmcondError, first_line
from llmcond.files import check_format, digest_text, replacing
from llmcond.records import RECORD, check_record

FORMAT = 1
#: The penalty of ridge regression on unit vectors.
_ALPHA = 0.3
#: The weight of directions that the labels say nothing about; the foremost direction has 1.
_RESIDUAL = 0.3
_AGAIN = "Make it again: llmcond index --guide."


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """A linear map that brings texts of one label together and keeps the size of the vectors.

    Vectors are centred, and stretched along the directions that tell the labels apart. All other
    directions stay, so that texts of one label can still be told from each other.

    Attributes:
        mean: (d,) mean of the labelled vectors.
        directions: (d, r) orthonormal columns, fewer than there are labels.
        gains: (r,) by how much each direction is stretched, less 1.
        labels: label -> how many labelled texts have it.
        source: where the labelled texts are from; empty: from Python.
        digest: of the labelled texts and of how it is fitted; equal ones map alike.
    """

    mean: Array
    directions: Array
    gains: Array
    labels: Mapping[str, int]
    source: str = ""
    digest: str = ""

    def transform(self, vectors: NDArray[Any]) -> Array:
        """Return (n, d) mapped vectors of unit L2 norm; zero vectors, which say nothing, stay."""
        vectors = _unit(np.asarray(vectors, dtype=np.float32))
        centred = vectors - self.mean
        mapped = centred + (centred @ self.directions * self.gains) @ self.directions.T
        mapped[~vectors.any(axis=1)] = 0
        return _unit(mapped)

    def lifted(self, basis: NDArray[Any]) -> Guide:
        """Return the guide of vectors zQ^T, (n, k), from that of z, (n, d), for a basis Q, (k, d).

        The columns of the basis are orthonormal.
        """
        mean, directions = basis @ self.mean, basis @ self.directions
        return replace(self, mean=mean.astype(np.float32), directions=directions.astype(np.float32))

    def to_json(self) -> dict[str, Any]:
        """Return what made it: the number of texts of each label, and where they are from."""
        return {"labels": dict(self.labels), "source": self.source}


def fit_guide(
    vectors: NDArray[Any], labels: Sequence[str], *, source: str = "", digest: str = ""
) -> Guide:
    """Fit a guide to labelled vectors.

    W, (d, classes), are the weights of ridge regression from the vectors to their one-hot labels,
    divided by the largest singular value. Mapped vectors have the inner products of xW beside those
    of x, the latter with the weight 0.3 squared: the map is the square root of WW' + 0.3² I. After
    GSTransform (ACL 2025), whose map is trained.

    Args:
        vectors: (m, d) embeddings of the labelled texts; their length does not count.
        labels: (m,) two different ones at least.
        source: see :class:`Guide`.
        digest: of the labelled texts.
    """
    from sklearn.linear_model import Ridge

    classes, members = np.unique(np.array(labels, dtype=object), return_inverse=True)
    points = _unit(np.asarray(vectors, dtype=np.float64))
    ridge = Ridge(alpha=_ALPHA).fit(points, np.eye(len(classes))[members])
    directions, sizes, _ = np.linalg.svd(ridge.coef_.T, full_matrices=False)
    # One-hot labels sum to 1, so that one direction at least is empty.
    kept = sizes > 1e-6 * max(sizes[0], 1e-6)
    sizes = sizes[kept] / max(sizes[0], 1e-6)
    return Guide(
        points.mean(axis=0).astype(np.float32),
        directions[:, kept].astype(np.float32),
        (np.sqrt((sizes / _RESIDUAL) ** 2 + 1) - 1).astype(np.float32),
        dict(Counter(map(str, labels))),
        source,
        digest_text(digest, str(_ALPHA), str(_RESIDUAL)),
    )


def apply_guides(
    vectors: NDArray[Any], conditions: Sequence[str], guides: Mapping[Any, Guide]
) -> Array:
    """Return (n, d) vectors, in which those under conditions that have a guide are mapped."""
    mapped = np.array(vectors, dtype=np.float32) if guides else np.asarray(vectors)
    for condition, guide in guides.items():
        rows = [row for row, own in enumerate(conditions) if own == condition]
        if rows:
            mapped[rows] = guide.transform(mapped[rows])
    return mapped


def _unit(vectors: NDArray[Any]) -> NDArray[Any]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: NDArray[Any] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


# -- on disk -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """What is recorded beside the weights of a guide."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    condition: str
    labels: Mapping[str, int]
    source: str
    digest: str


def guide_file(folder: Path, condition: str) -> Path:
    """Return the file of a condition's guide among those of a folder."""
    return folder / f"{digest_text(condition, size=12)}.safetensors"


def save_guide(guide: Guide, condition: str, folder: Path) -> None:
    """Write a guide into a folder, in the place of the condition's former one.

    Raises:
        UserError, OSError: the folder cannot be written.
        DiskFullError: no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(guide, name) for name in ("mean", "directions", "gains")}
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    own = {**guide.to_json(), "condition": str(condition), "digest": guide.digest}
    with replacing(guide_file(folder, condition)) as path:
        save_file(tensors, path, {"guide": json.dumps({"format": FORMAT, **own})})


def load_guides(folder: Path) -> dict[str, Guide]:
    """Return the guides of a folder by their conditions; none where there is no folder.

    Raises:
        UserError: a newer version wrote one.
        LlmcondError: a file is damaged.
    """
    guides = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "numpy") as file:
                record = json.loads((file.metadata() or {})["guide"])
                tensors = {name: file.get_tensor(name) for name in ("mean", "directions", "gains")}
        except (KeyError, ValueError, OSError, SafetensorError) as error:
            raise LlmcondError(f"{path} is damaged: {first_line(error)}. {_AGAIN}") from error
        check_format(record, FORMAT, str(path))
        check_record(record, _Record, str(path), _AGAIN)
        own = {name: record[name] for name in ("labels", "source", "digest")}
        guides[record["condition"]] = Guide(**tensors, **own)
    return guides
