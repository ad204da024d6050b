"""Guides: linear maps of embeddings, fitted in closed form on a few labelled texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from llmcond.base.arrays import Array, EqualByValue, scale_to_unit_norm
from llmcond.base.errors import LlmcondError, UserError, first_line
from llmcond.base.files import check_format, digest_text, replace_atomically
from llmcond.base.records import check_record
from llmcond.base.text import condition_key

FORMAT = 1
#: Penalty of ridge regression on unit vectors.
_ALPHA = 0.3
#: Weight of directions that do not depend on the labels; the most important direction has 1.
_RESIDUAL = 0.3
_AGAIN = "Create it again with llmcond index --guide."


@dataclass(frozen=True, slots=True, eq=False)
class Guide(EqualByValue):
    """A linear map that brings texts with the same label together.

    It keeps the size of the vectors. Vectors are centred, and stretched along the directions that
    separate the labels. All other directions are unchanged, so that texts with the same label can
    still be distinguished.

    Attributes:
        mean: (d,) mean of the labelled vectors.
        directions: (d, r) orthonormal columns, fewer than there are labels.
        gains: (r,) stretch factor of each direction, minus 1.
        labels: label -> number of labelled texts.
        source: where the labelled texts come from; empty: from Python.
        digest: hash of the labelled texts and of the fit's parameters; guides with equal digests
            are the same map.
    """

    mean: Array
    directions: Array
    gains: Array
    labels: Mapping[str, int]
    source: str = ""
    digest: str = ""

    def transform(self, vectors: NDArray[Any]) -> Array:
        """Return (n, d) mapped vectors of unit L2 norm; zero vectors stay zero."""
        vectors = scale_to_unit_norm(np.asarray(vectors, dtype=np.float32))
        centred = vectors - self.mean
        mapped = centred + (centred @ self.directions * self.gains) @ self.directions.T
        mapped[~vectors.any(axis=1)] = 0
        return scale_to_unit_norm(mapped)

    def change_basis(self, basis: NDArray[Any]) -> Guide:
        """Return the guide for vectors zQ^T, (n, k), given this guide for z, (n, d).

        Args:
            basis: (k, d) matrix Q with orthonormal columns.
        """
        mean, directions = basis @ self.mean, basis @ self.directions
        return replace(self, mean=mean.astype(np.float32), directions=directions.astype(np.float32))

    def to_json(self) -> dict[str, Any]:
        """Return the number of texts per label, and where they come from."""
        return {"labels": dict(self.labels), "source": self.source}


class Guides(MutableMapping[str | None, Guide]):
    """The guides of conditions. The key None stands for texts without a condition.

    A condition is looked up by ``llmcond.base.text.condition_key``, so that a guide is also
    found if the condition is spelled in another case or Unicode form, or with other white
    space.
    """

    def __init__(self, guides: Mapping[Any, Guide] | None = None) -> None:
        self._entries: dict[str | None, tuple[str | None, Guide]] = {}
        self.update(guides or {})

    def __getitem__(self, condition: str | None) -> Guide:
        return self._entries[_guide_key(condition)][1]

    def __setitem__(self, condition: str | None, guide: Guide) -> None:
        self._entries[_guide_key(condition)] = condition, guide

    def __delitem__(self, condition: str | None) -> None:
        del self._entries[_guide_key(condition)]

    def __iter__(self) -> Iterator[str | None]:
        return (condition for condition, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Guides({dict(self)})"


def _guide_key(condition: str | None) -> str | None:
    return None if condition is None else condition_key(condition)


def fit_guide(
    vectors: NDArray[Any], labels: Sequence[str], *, source: str = "", digest: str = ""
) -> Guide:
    """Fit a guide to labelled vectors.

    W, (d, classes), are the weights of ridge regression from the vectors to their one-hot labels,
    divided by the largest singular value. The inner product of mapped vectors is that of xW plus
    that of x with the weight 0.3 squared: the map is the square root of WW' + 0.3² I. This follows
    GSTransform (ACL 2025), whose map is trained.

    Args:
        vectors: (m, d) embeddings of the labelled texts; their length does not matter.
        labels: (m,) labels, at least two different ones.
        source: see ``Guide``.
        digest: hash of the labelled texts.
    """
    classes, members = np.unique(np.array(labels, dtype=object), return_inverse=True)
    points = scale_to_unit_norm(np.asarray(vectors, dtype=np.float64))
    # All texts lie in a space of at most m dimensions. Their sums by label are X'Y, for which no
    # matrix of texts by labels is needed, and the singular vectors of W are eigenvectors of WW'.
    centred = points - points.mean(axis=0)
    basis = np.linalg.qr(centred.T)[0]
    coordinates = centred @ basis
    sums = np.zeros((len(classes), basis.shape[1]))
    np.add.at(sums, members, coordinates)
    gram = coordinates.T @ coordinates + _ALPHA * np.eye(basis.shape[1])
    weights = np.linalg.solve(gram, sums.T)
    squares, eigenvectors = np.linalg.eigh(weights @ weights.T)
    sizes = np.sqrt(np.maximum(squares[::-1], 0))
    directions = basis @ eigenvectors[:, ::-1]
    # One-hot labels sum to 1, so at least one direction is empty.
    nonzero = sizes > 1e-6 * max(sizes[0], 1e-6)
    sizes = sizes[nonzero] / max(sizes[0], 1e-6)
    return Guide(
        points.mean(axis=0).astype(np.float32),
        directions[:, nonzero].astype(np.float32),
        (np.sqrt((sizes / _RESIDUAL) ** 2 + 1) - 1).astype(np.float32),
        dict(Counter(map(str, labels))),
        source,
        digest_text(digest, str(_ALPHA), str(_RESIDUAL)),
    )


def apply_guides(
    vectors: NDArray[Any], conditions: Sequence[str], guides: Mapping[str | None, Guide]
) -> Array:
    """Map the (n, d) vectors under conditions that have a guide; return all vectors.

    Raises:
        UserError: a guide was fitted on vectors of another size.
    """
    mapped = np.array(vectors, dtype=np.float32) if guides else np.asarray(vectors)
    rows_of: dict[str, list[int]] = {}
    for row, condition in enumerate(conditions if guides else ()):
        rows_of.setdefault(condition, []).append(row)
    for condition, rows in rows_of.items():
        guide = guides.get(condition)
        if guide is None:
            continue
        if len(guide.mean) != mapped.shape[1]:
            raise UserError(
                f"the guide of {str(condition)!r} maps embeddings of {len(guide.mean)} dimensions, "
                f"and these have {mapped.shape[1]}. Fit the guide with the same truncate_dim."
            )
        mapped[rows] = guide.transform(mapped[rows])
    return mapped


# -- on disk -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GuideRecord:
    """The metadata that is stored with the weights of a guide."""

    condition: str
    labels: Mapping[str, int]
    source: str
    digest: str


def guide_file(folder: Path, condition: str) -> Path:
    """Return the path of a condition's guide in a folder, which does not depend on its form."""
    return folder / f"{digest_text(condition_key(condition), size=12)}.safetensors"


def save_guide(guide: Guide, condition: str, folder: Path) -> None:
    """Write a guide into a folder; it replaces the previous guide of the condition.

    Raises:
        UserError, OSError: the folder cannot be written.
        DiskFullError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: getattr(guide, name) for name in ("mean", "directions", "gains")}
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    record = {**guide.to_json(), "condition": str(condition), "digest": guide.digest}
    with replace_atomically(guide_file(folder, condition)) as path:
        save_file(tensors, path, {"guide": json.dumps({"format": FORMAT, **record})})


def load_guides(folder: Path) -> Guides:
    """Return the guides of a folder by condition; none if the folder does not exist.

    Raises:
        UserError: a newer version wrote a guide.
        LlmcondError: a file is damaged.
    """
    guides = Guides()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "numpy") as file:
                record = json.loads((file.metadata() or {})["guide"])
                tensors = {name: file.get_tensor(name) for name in ("mean", "directions", "gains")}
        except (KeyError, ValueError, OSError, SafetensorError) as error:
            raise LlmcondError(f"{path} is damaged: {first_line(error)}. {_AGAIN}") from error
        check_format(record, FORMAT, str(path))
        check_record(record, _GuideRecord, str(path), _AGAIN)
        values = {name: record[name] for name in ("labels", "source", "digest")}
        guides[record["condition"]] = Guide(**tensors, **values)
    return guides
