"""Heads that map queries and candidates, as torch modules and as fitted heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot
from typing_extensions import override

from llmcond.arrays import Array, Matrix
from llmcond.errors import UserError
from llmcond.heads.base import FittedModule
from llmcond.heads.loading import restore_head
from llmcond.heads.module import HeadModule, members_of
from llmcond.heads.settings import GradientSettings, RecordedSize, Sizes, TrainingSettings
from llmcond.heads.storage import read_head
from llmcond.kinds.ranking.arrays import QueryArrays, QueryFeatures
from llmcond.kinds.ranking.contrastive import Contrast, ContrastSettings

#: Number of entities or queries that are mapped at once.
_BLOCK = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySettings(GradientSettings, ContrastSettings):
    """Recipe settings that all heads for queries and candidates share.

    The settings of the map of queries, such as its rank, come in addition.

    Attributes:
        candidate: map of candidates: ``none``; ``linear``, a separate layer; or ``same``, which
            shares the map of queries if that map has no condition, and otherwise the layer before
            the conditioned map.
        score: ``cosine`` of both embeddings (Hyper-CL's paper), or ``dot``, their inner product
            without normalisation (Hyper-CL's released code, in which candidates have unit length
            and no layer).
        neighbours: whether to read an entity with the mean of the features of its neighbours in the
            training graph. In training, the other end of a triple does not count as a neighbour.
        relations: input for a relation: its ``features``, or its ``one-hot`` index, with which a
            hypernetwork learns a separate matrix for each relation.
        start: initial weights: ``identity``, with which embeddings equal the features as far as the
            architecture allows, or ``random``.
        schedule: schedule of the learning rate: ``linear`` to 0 over all epochs, or ``constant``.
    """

    candidate: Literal["none", "linear", "same"] = "linear"
    score: Literal["cosine", "dot"] = "cosine"
    neighbours: bool = False
    relations: Literal["features", "one-hot"] = "features"
    start: Literal["identity", "random"] = "identity"
    schedule: Literal["linear", "constant"] = "linear"

    def __post_init__(self) -> None:
        """Raise a ValueError for settings that exclude each other."""
        if self.neighbours and self.candidate == "none":
            raise ValueError(
                "neighbours double the number of features, so candidates need a map that reduces "
                "it: set candidate to linear or same"
            )


@dataclass(frozen=True)
class QuerySizes(Sizes):
    """The sizes that a query head is created with.

    Attributes:
        n_relations: number R of relations, in one direction.
    """

    n_relations: RecordedSize = 0


@dataclass(frozen=True, eq=False)
class FittedQueryHead(FittedModule):
    """A fitted head that maps queries and candidates; immutable, like other fitted heads.

    Attributes:
        data: features of the graph that the head is applied to; None for a head that was just
            loaded.
    """

    Sizes = QuerySizes
    mismatch_reason = "does not map queries of a graph"

    data: QueryFeatures | None = None

    @property
    def heads(self) -> list[QueryHead]:
        """The heads of the module; an ensemble has several."""
        return members_of(self.module)

    @property
    def dim_out(self) -> int:
        """The dimension of the embeddings."""
        return sum(head.dim_out for head in self.heads)

    @property
    def n_relations(self) -> int:
        """The number R of relations, in one direction."""
        return self.heads[0].n_relations

    def check_sizes(self, dims: tuple[int, int, int]) -> None:
        """Check the sizes of a graph's features, which are ``QueryArrays.dims``.

        Raises:
            UserError: The head was fitted on other sizes.
        """
        names = ("features of entities", "features of relations", "relations")
        fitted_on = self.dim_in, self.dim_condition, self.n_relations
        for name, got, expected in zip(names, dims, fitted_on, strict=True):
            if got != expected and (name == names[0] or expected):
                what = "" if name == names[2] else "dimensions of "
                raise UserError(
                    f"the graph has {got} {what}{name}; this {self.kind} head was fitted on "
                    f"{expected}."
                )

    def bind(self, graph: QueryArrays | QueryFeatures) -> FittedQueryHead:
        """Return the head applied to a graph; several heads may share its features.

        Raises:
            UserError: The head was fitted on features of other sizes, or on another number of
                relations.
        """
        data = graph if isinstance(graph, QueryFeatures) else QueryFeatures(graph)
        self.check_sizes(data.arrays.dims)
        return replace(self, data=data)

    def queries(self, heads: NDArray[Any], relations: NDArray[Any]) -> Array:
        """Return the embeddings of queries, (m, k) float32.

        Their inner products with ``candidates`` are the scores. If the head compares by cosine,
        both have unit length, so the scores are cosine similarities.

        Args:
            heads: head entities, (m,).
            relations: relations, (m,), below 2 R.
        """
        rows, relation_indices = (
            np.asarray(indices, dtype=np.int64) for indices in (heads, relations)
        )
        data, settings = self._require_graph(), self.settings
        blocks = [np.zeros((0, self.dim_out), dtype=np.float32)]
        for start in range(0, len(rows), _BLOCK):
            block, block_relations = (
                rows[start : start + _BLOCK],
                relation_indices[start : start + _BLOCK],
            )
            with torch.inference_mode():
                x = data.heads(
                    block, block_relations, self.heads[0].reads_joint, settings.neighbours
                )
                relation_inputs = data.relations, torch.from_numpy(block_relations)
                blocks.append(
                    _concatenate_heads([head.query(x, *relation_inputs) for head in self.heads])
                )
        return np.concatenate(blocks)

    def candidates(self) -> Matrix:
        """Return the embeddings of all entities, (n, k), which are computed when rows are read."""
        return _CandidateVectors(self, self._require_graph())

    def _require_graph(self) -> QueryFeatures:
        if self.data is None:
            raise UserError("this head has no graph yet. Call head.on(arrays) first.")
        return self.data


class _CandidateVectors(Matrix):
    """The embeddings of all entities by a head, computed when rows are read."""

    def __init__(self, head: FittedQueryHead, data: QueryFeatures) -> None:
        self._head, self._data = head, data
        self.shape = len(data.arrays.entities), head.dim_out

    def __getitem__(self, rows: Any, /) -> Array:
        entities = np.arange(len(self))[rows]
        vectors = np.empty((len(entities), self.shape[1]), dtype=np.float32)
        for start in range(0, len(entities), _BLOCK):
            block = entities[start : start + _BLOCK]
            with torch.inference_mode():
                x = self._data.entities(block, self._head.settings.neighbours)
                parts = [head.candidate(x) for head in self._head.heads]
                vectors[start : start + _BLOCK] = _concatenate_heads(parts)
        return vectors


def _concatenate_heads(parts: list[Tensor]) -> Array:
    """Concatenate the embeddings of several heads, so that scores are the means of theirs."""
    concatenated = torch.cat(parts, dim=1) / len(parts) ** 0.5 if len(parts) > 1 else parts[0]
    return np.asarray(concatenated.numpy())


def load_query_head(folder: Path) -> tuple[FittedQueryHead, dict[str, Any]]:
    """Load a head that ranks candidates, without a graph; otherwise like ``load_head``."""
    files = read_head(folder)
    return restore_head(files, FittedQueryHead), files.description


class QueryHead(HeadModule):
    """A map of queries, which is any other family of heads, and a map of candidates.

    With neighbours, a first layer reduces an entity's features and the mean of its neighbours'
    features to the dimension of one of them. A map that generates matrices reads relations as
    coordinates in the space that all relations span. It is linear in the relation's features, so
    this is the same map. It has fewer parameters if there are fewer directed relations than
    dimensions, as in WN18RR (22 columns instead of 384).

    Attributes:
        family: family of the map of queries.
        reads_joint: whether the head reads joint features.
        reads_relations: whether the head reads the features of relations.
    """

    family: ClassVar[type[HeadModule]]
    Fitted = FittedQueryHead
    basis: Tensor

    def __init__(
        self, settings: Any, dim_in: int, dim_condition: int = 0, n_relations: int = 0
    ) -> None:
        super().__init__(settings, dim_in, dim_condition)
        family = self.family
        self.n_relations = n_relations
        self.reads_relations = bool(self.dim_of_relations(settings, 1))
        width = dim_condition if self.reads_relations else 2 * n_relations * family.conditioned
        if self.reads_relations and family.generates_matrices:
            width = min(2 * n_relations, dim_condition)
            self.register_buffer("basis", torch.zeros(dim_condition, width))
        self.map = family(settings, dim_in, width)
        self.dim_out = int(getattr(settings, "dim", dim_in))
        features = str(getattr(settings, "features", family.features))
        if features == "both":
            raise UserError(
                "a query has either joint or separate features, and this recipe asks for both: set "
                "features to joint or separate."
            )
        self.reads_joint = features == "joint"
        dim_read = 2 * dim_in if settings.neighbours else dim_in
        # The layer before the map of queries; candidates share it if candidate is "same".
        self._shares_layer = settings.candidate == "same" and family.conditioned
        if settings.neighbours or self._shares_layer:
            self.add_layer("head", dim_in, dim_read, bias=True)
        if settings.candidate == "linear":
            self.add_layer("tail", self.dim_out, dim_read, bias=True)
        elif self.dim_out != dim_in and (self._shares_layer or settings.candidate == "none"):
            raise UserError(
                f"queries are mapped to {self.dim_out} dimensions, and candidates have {dim_in} "
                f"without a layer: set candidate to linear, or dim to {dim_in}."
            )
        self.contrast = Contrast(settings)

    @classmethod
    def dim_of_relations(cls, settings: Any, dim: int) -> int:
        """Return ``dim``, the dimension of relations' features, if the head reads them; else 0."""
        return dim if cls.family.conditioned and settings.relations == "features" else 0

    @property
    def scale(self) -> float:
        """The factor of the scores in training, 1 / temperature."""
        return self.contrast.scale

    def initialise(self, relations: Tensor | None) -> None:
        """Initialise the basis of the relations' space and the weights, before fitting.

        Random numbers come from PyTorch's global generator.

        Args:
            relations: features of relations, (2 R, d_c); None if there are none.
        """
        if hasattr(self, "basis") and relations is not None:
            _, _, basis_rows = torch.linalg.svd(relations, full_matrices=False)
            self.basis.copy_(basis_rows.T)
        if self.settings.start == "identity":
            self.map.start_at_identity()
            for name in ("head", "tail"):
                if hasattr(self, name):
                    nn.init.eye_(self.get_parameter(name))
                    nn.init.zeros_(self.get_parameter(f"{name}_bias"))

    def query(self, x: Tensor, relations: Tensor | None, which: Tensor) -> Tensor:
        """Return the embeddings of queries, (m, k), of unit length if they are compared by cosine.

        Args:
            x: features of the queries' heads, (m, d) or (m, 2 d).
            relations: features of relations, (2 R, d_c). Relations without a query may be missing
                if ``which`` is numbered accordingly.
            which: relation of each query, (m,).
        """
        if hasattr(self, "head"):
            x = self.affine("head", x)
        if not self.family.conditioned:
            return self._normalise(self.map(x, None, None))
        # Only the relations of these queries are mapped.
        distinct_relations, relation_of_query = torch.unique(which, return_inverse=True)
        if self.settings.relations == "one-hot":
            conditions = one_hot(distinct_relations, 2 * self.n_relations).to(x.dtype)
        elif relations is None:
            raise UserError("this head reads the features of relations, and the data has none.")
        else:
            conditions = relations.index_select(0, distinct_relations)
            conditions = conditions @ self.basis if hasattr(self, "basis") else conditions
        return self._normalise(self.map(x, conditions, relation_of_query))

    def candidate(self, x: Tensor) -> Tensor:
        """Return the embeddings of candidates, (c, k), whose features are (c, d) or (c, 2 d)."""
        if self.settings.candidate == "linear":
            return self._normalise(self.affine("tail", x))
        if self.settings.candidate == "same":
            x = self.affine("head", x) if hasattr(self, "head") else x
            x = x if self._shares_layer else self.map(x)
        return self._normalise(x)

    def _normalise(self, embedded: Tensor) -> Tensor:
        return normalize(embedded) if self.settings.score == "cosine" else embedded

    @override
    def seed_dropout(self, seed: int | None) -> None:
        # Only the map of queries has dropout.
        self.map.seed_dropout(seed)


def _create_query_family(family: type[HeadModule]) -> type[QueryHead]:
    """Create the class of query heads whose map of queries is of a family.

    Its settings are ``QuerySettings`` with the settings that only this family has.
    """
    shared = {item.name for item in fields(TrainingSettings)}
    hints = get_type_hints(family.Settings, include_extras=True)
    extra_fields = [
        (item.name, hints[item.name], field(default=item.default))
        for item in fields(family.Settings)
        if item.name not in shared
    ]
    settings = make_dataclass(
        f"Query{family.Settings.__name__}",
        extra_fields,
        bases=(QuerySettings,),
        frozen=True,
        kw_only=True,
    )
    inherited = ("features", "conditioned", "is_identity", "multiplies_in_bfloat16")
    members = {name: getattr(family, name) for name in inherited}
    members |= {"family": family, "Settings": settings}
    return type(f"Query{family.__name__}", (QueryHead,), members)


#: Cached, so that each family has one class of query heads.
create_query_family: Callable[[Any], type[QueryHead]] = cache(_create_query_family)
