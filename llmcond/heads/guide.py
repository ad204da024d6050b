"""Guides: linear maps of embeddings that follow labelled texts, or ignore other conditions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from llmcond.base.arrays import Array, EqualByValue, scale_to_unit_norm
from llmcond.base.errors import LlmcondError, UserError, first_line, format_list
from llmcond.base.files import as_json, check_format, digest_text, replace_atomically
from llmcond.base.records import check_record
from llmcond.base.text import Condition, condition_key, condition_text, ignored_by

FORMAT = 2
#: Penalty of ridge regression on unit vectors.
_ALPHA = 0.3
#: Weight of directions that do not depend on the labels; the most important direction has 1.
_RESIDUAL = 0.3
#: Smallest variance of an ignored direction, as a share of that of the first one.
_SHARE = 0.1
#: The largest number of directions that are found for one ignored condition.
_MOST_DIRECTIONS = 32
#: At most one in this many dimensions is removed for one ignored condition.
_FRACTION = 4
_AGAIN = "Create it again with llmcond index --guide."


@dataclass(frozen=True, slots=True, eq=False)
class Guide(EqualByValue):
    """A linear map that brings texts with the same label together, or ignores other conditions.

    It keeps the size of the vectors. Vectors are centred, and changed in a few directions. All
    other directions are unchanged, so that texts with the same label can still be distinguished.

    Attributes:
        mean: (d,) mean of the vectors that the map was fitted on.
        directions: (d, r) columns whose inner products with a centred vector change it.
        outputs: (d, r) columns that are added for these inner products.
        labels: label -> number of labelled texts; empty for a map that only ignores.
        ignored: the conditions or columns that are ignored.
        source: where the labelled texts come from; empty: from Python.
        digest: hash of what the map was fitted on; guides with equal digests are the same map.
        before: a map that is applied first.
    """

    mean: Array
    directions: Array
    outputs: Array
    labels: Mapping[str, int]
    ignored: Sequence[str] = ()
    source: str = ""
    digest: str = ""
    before: Guide | None = None

    def transform(self, vectors: NDArray[Any]) -> Array:
        """Return (n, d) mapped vectors of unit L2 norm; zero vectors stay zero."""
        if self.before is not None:
            vectors = self.before.transform(vectors)
        vectors = scale_to_unit_norm(np.asarray(vectors, dtype=np.float32))
        mapped = vectors - self.mean
        mapped += (mapped @ self.directions) @ self.outputs.T
        mapped[~vectors.any(axis=1)] = 0
        return scale_to_unit_norm(mapped)

    def removed(self) -> Array:
        """Return the directions, (d, r), that this map and those before it change."""
        before = [] if self.before is None else [self.before.removed()]
        return np.hstack([*before, self.outputs])

    def change_basis(self, basis: NDArray[Any]) -> Guide:
        """Return the guide for vectors zQ^T, (n, k), given this guide for z, (n, d).

        Args:
            basis: (k, d) matrix Q with orthonormal columns.
        """
        changed = {name: (basis @ getattr(self, name)).astype(np.float32) for name in _TENSORS}
        before = None if self.before is None else self.before.change_basis(basis)
        return replace(self, **changed, before=before)

    @property
    def all_ignored(self) -> list[str]:
        """The conditions and columns that this map and those before it ignore."""
        return [*(self.before.all_ignored if self.before else ()), *self.ignored]

    def to_json(self) -> dict[str, Any]:
        """Return the number of texts per label, where they come from, and what is ignored."""
        ignored = self.all_ignored
        return {
            "labels": dict(self.labels),
            "source": self.source,
            **({"ignored": ignored} if ignored else {}),
        }


_TENSORS = ("mean", "directions", "outputs")


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

    def without_labels(self, condition: str | None) -> Guide | None:
        """Return the map of a condition that ignores others, without the guide after it."""
        guide = self.get(condition)
        return guide.before if guide is not None and guide.labels else guide


def _guide_key(condition: str | None) -> str | None:
    return None if condition is None else condition_key(condition)


def fit_guide(
    vectors: NDArray[Any],
    labels: Sequence[str],
    *,
    source: str = "",
    digest: str = "",
    before: Guide | None = None,
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
        before: the map that ``vectors`` were mapped by already, which is always applied first.
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
    gains = np.sqrt((sizes / _RESIDUAL) ** 2 + 1) - 1
    return Guide(
        points.mean(axis=0).astype(np.float32),
        directions[:, nonzero].astype(np.float32),
        (directions[:, nonzero] * gains).astype(np.float32),
        dict(Counter(map(str, labels))),
        (),
        source,
        digest_text(digest, before.digest if before else "", str(_ALPHA), str(_RESIDUAL)),
        before,
    )


def fit_ignoring(
    vectors: NDArray[Any],
    under_others: Mapping[str, NDArray[Any]],
    columns: Mapping[str, Sequence[str]],
    n_directions: int | None = None,
) -> Guide:
    """Fit a map that removes what texts differ in under other conditions, or by known labels.

    For another condition, the directions are the top eigenvectors of the covariance of the texts'
    vectors under it minus the covariance under the condition itself. Directions count
    whose eigenvalue is at least a tenth of the largest one. Vectors lose their components in all
    these directions.

    For known labels, the map is that of LEACE (arXiv 2306.03819, theorem 4.3): it makes the means
    of all labels equal, and changes the vectors as little as possible. The covariance is that of
    Ledoit and Wolf, so that it also works with fewer texts than dimensions.

    Args:
        vectors: (n, d) vectors of texts under the condition.
        under_others: (n, d) vectors of the same texts under each condition that is ignored.
        columns: (n,) labels of each column that is ignored. A text without a label has ``""``.
        n_directions: the number of directions for each condition; None: as above, and at
            most a quarter of the dimensions.

    Raises:
        UserError: no direction would be left.
    """
    points = scale_to_unit_norm(np.asarray(vectors, dtype=np.float64))
    mean = points.mean(axis=0)
    removed = [
        _contrast(points, scale_to_unit_norm(np.asarray(other, dtype=np.float64)), n_directions)
        for other in under_others.values()
    ]
    directions = np.hstack([np.zeros((points.shape[1], 0)), *removed])
    if directions.shape[1] >= directions.shape[0]:
        raise UserError(
            f"ignoring {format_list([*under_others], 3)} would remove {directions.shape[1]} "
            f"directions of embeddings with {directions.shape[0]}, and leave nothing. Ignore less, "
            "or give a number of directions."
        )
    basis = np.linalg.qr(directions)[0].astype(np.float32)
    guide = _ignoring_guide([mean.astype(np.float32), basis, -basis], [*under_others])
    for name, labels in columns.items():
        known = np.array([label != "" for label in labels])
        mapped = guide.transform(vectors)[known].astype(np.float64)
        erased = _erase_labels(mapped, np.array(labels, dtype=object)[known])
        guide = _ignoring_guide(erased, [name], guide)
    return guide


def _ignoring_guide(
    arrays: Sequence[Array], ignored: Sequence[str], before: Guide | None = None
) -> Guide:
    mean, directions, outputs = arrays
    digest = digest_text(*(array.tobytes().hex() for array in arrays))
    return Guide(mean, directions, outputs, {}, ignored, "", digest, before)


def _contrast(target: NDArray[Any], other: NDArray[Any], n_directions: int | None) -> NDArray[Any]:
    """Return (d, r) directions in which vectors vary more under another condition."""
    difference = np.cov(other.T, bias=True) - np.cov(target.T, bias=True)
    variances, directions = np.linalg.eigh(difference)
    variances, directions = variances[::-1], directions[:, ::-1]
    count = int((variances >= _SHARE * variances[0]).sum()) if variances[0] > 0 else 0
    most = min(_MOST_DIRECTIONS, max(1, len(variances) // _FRACTION))
    n = min(count, most) if n_directions is None else n_directions
    return directions[:, :n]


def _erase_labels(points: NDArray[Any], labels: NDArray[Any]) -> list[Array]:
    """Return the mean, directions and outputs of LEACE for labelled vectors, (n, d)."""
    from sklearn.covariance import ledoit_wolf

    mean = points.mean(axis=0)
    one_hot = (labels[:, None] == np.unique(labels)).astype(np.float64)
    cross = (points - mean).T @ (one_hot - one_hot.mean(axis=0)) / len(points)
    variances, axes = np.linalg.eigh(ledoit_wolf(points)[0])
    varies = variances > 1e-6 * variances[-1]  # not in directions that were removed before
    variances, axes = variances[varies], axes[:, varies]
    roots = np.sqrt(variances)
    whitened = np.linalg.svd((axes / roots).T @ cross, full_matrices=False)
    basis = whitened[0][:, whitened[1] > 1e-6 * whitened[1].max(initial=0)]
    outputs = -(axes * roots) @ basis
    return [value.astype(np.float32) for value in (mean, (axes / roots) @ basis, outputs)]


def check_ignored(condition: str, guides: Mapping[str | None, Guide]) -> None:
    """Check that there is a map for what a condition ignores.

    Raises:
        UserError: there is none.
    """
    if ignored_by(condition) and condition not in guides:
        raise UserError(
            f"what {str(condition)!r} ignores must be found in a collection of texts first. Call "
            "embedder.ignoring(texts, condition) with at least 50 texts, or use llmcond cluster, "
            "embed, index or serve with --ignore."
        )


def apply_guides(
    vectors: NDArray[Any], conditions: Sequence[str], guides: Mapping[str | None, Guide]
) -> Array:
    """Map the (n, d) vectors under conditions that have a guide; return all vectors.

    Raises:
        UserError: a guide was fitted on vectors of another size, or no map was fitted for what a
            condition ignores.
    """
    mapped = np.array(vectors, dtype=np.float32) if guides else np.asarray(vectors)
    rows_of: dict[str, list[int]] = {}
    for row, condition in enumerate(conditions):
        if guides or ignored_by(condition):
            rows_of.setdefault(condition, []).append(row)
    for condition, rows in rows_of.items():
        guide = guides.get(condition)
        check_ignored(condition, guides)
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
class _MapRecord:
    """The metadata of one map, in the order in which maps are applied."""

    labels: Mapping[str, int]
    source: str
    digest: str
    ignored: Sequence[str]


@dataclass(frozen=True)
class _GuideRecord:
    """The metadata that is stored with the weights of a guide."""

    text: str
    values: Sequence[str]
    ignore: Sequence[str]
    maps: Sequence[_MapRecord]


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
    maps = [guide]
    while maps[0].before is not None:
        maps.insert(0, maps[0].before)
    tensors = {
        f"{number}.{name}": np.ascontiguousarray(getattr(one, name))
        for number, one in enumerate(maps)
        for name in _TENSORS
    }
    parts = {name: getattr(condition, name, ()) for name in ("values", "ignore")}
    names = [field.name for field in fields(_MapRecord)]
    records = [_MapRecord(*(getattr(one, name) for name in names)) for one in maps]
    record = {"format": FORMAT, "text": condition_text(condition), **parts, "maps": records}
    with replace_atomically(guide_file(folder, condition)) as path:
        save_file(tensors, path, {"guide": json.dumps(as_json(record))})


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
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            check_format(record, FORMAT, str(path))
            read = check_record(record, _GuideRecord, str(path), _AGAIN)
            guide: Any = None
            for number, one in enumerate(read.maps):
                mean, directions, outputs = (tensors[f"{number}.{name}"] for name in _TENSORS)
                known = one.labels, one.ignored, one.source, one.digest
                guide = Guide(mean, directions, outputs, *known, guide)
        except (KeyError, ValueError, OSError, SafetensorError) as error:
            raise LlmcondError(f"{path} is damaged: {first_line(error)}. {_AGAIN}") from error
        condition = read.text
        if read.values or read.ignore or "|" in read.text:
            condition = Condition(read.text, read.values, read.ignore)
        guides[condition] = guide
    return guides
