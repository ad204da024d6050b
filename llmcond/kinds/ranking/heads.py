"""Heads that map queries and candidates: features, objective, modules, fitted heads and fitting.

A query is a head entity and a relation, and every entity is a candidate. Bi-encoders read the joint
features e(h; r) of a query, tri-encoders read e(h) and e(r) separately (Hyper-CL, ACL 2024, section
4.2).

The objective is InfoNCE of queries and candidates (SimKGC, ACL 2022, equation 4, section 3.3 and
released code; Hyper-CL, section 3.3). Fitting a head and training an encoder share it. Both pass it
scores, the target column of each row, and a mask of the scores to leave out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot
from typing_extensions import override

from llmcond.base.arrays import Array, Matrix, MatrixLike, Positions
from llmcond.base.errors import UserError
from llmcond.base.system import choose_device
from llmcond.heads.fit import HeadTrainer, fit_members
from llmcond.heads.fitted import FittedModule, UnitRows
from llmcond.heads.module import HeadModule, members_of
from llmcond.heads.numpy_heads import DevScore, OnEpoch
from llmcond.heads.recipes import Recipe
from llmcond.heads.settings import (
    LARGEST,
    GradientSettings,
    RecordedSize,
    Sizes,
    TrainingSettings,
    Weight,
    learning_rate_factor,
)
from llmcond.kinds.ranking.graph import KnownTriples, adjacency, both_directions


def joint_keys(
    heads: NDArray[np.integer[Any]], relations: NDArray[np.integer[Any]], n_relations: int
) -> Positions:
    """Return the key h * 2 R + r of each joint input of a head h and a relation r, (m,) int64."""
    return np.asarray(heads, dtype=np.int64) * (2 * n_relations) + relations


@dataclass(frozen=True, eq=False)
class QueryArrays:
    """The features and training triples of a graph, in the form that heads read.

    Heads read features as float32 tensors, scaled to unit length as SimKGC's pooling does. The mean
    of an entity's neighbours is not scaled.

    Attributes:
        entities: features of all entities, which are the candidates: (n, d), any float type.
        triples: head, relation and tail of the training split: (m, 3), with relations below R.
        n_relations: number of relations, R. Relation r + R is relation r from tail to head.
        known: known tails of the training split, in both directions.
        relations: features of relations, (2 R, d_c), for heads that read them.
        joint: features of the distinct joint inputs (h, r), (j, d), for heads that read them.
        joint_input_keys: keys of these joint inputs in ascending order, (j,) int64; see
            ``joint_keys``.
    """

    entities: MatrixLike
    triples: NDArray[np.integer[Any]]
    n_relations: int
    known: KnownTriples
    relations: MatrixLike | None = None
    joint: MatrixLike | None = None
    joint_input_keys: Positions | None = None

    @property
    def dims(self) -> tuple[int, int, int]:
        """The sizes that a head is created with: d, d_c (0 without relation features) and R."""
        dim_condition = 0 if self.relations is None else int(self.relations.shape[1])
        return int(self.entities.shape[1]), dim_condition, self.n_relations

    def queries(self) -> Positions:
        """Return the triples in both directions, (2 m, 3): (h, r, t), and then (t, r + R, h)."""
        return both_directions(self.triples, self.n_relations).astype(np.int64)

    def with_joint(self, joint: MatrixLike, joint_of: Positions) -> QueryArrays:
        """Return a copy with other joint features, (j, d), of the keys ``joint_of``, (j,)."""
        arrays = replace(self, joint=joint, joint_input_keys=joint_of)
        # What was computed from the entities is the same.
        names = {"relation_vectors", "_unit_entities", "_graph", "_sums"} & self.__dict__.keys()
        arrays.__dict__.update({name: self.__dict__[name] for name in names})
        return arrays

    @cached_property
    def relation_vectors(self) -> Tensor | None:
        """The features of all relations, (2 R, d_c); None if there are none."""
        relations = self.relations
        return None if relations is None else UnitRows(relations).read(np.arange(len(relations)))

    @cached_property
    def _unit_entities(self) -> UnitRows:
        return UnitRows(self.entities)

    @cached_property
    def _unit_joint(self) -> UnitRows | None:
        return None if self.joint is None else UnitRows(self.joint)

    @cached_property
    def _graph(self) -> csr_array:
        return adjacency(self.triples, len(self.entities))

    @cached_property
    def _sums(self) -> Array | None:
        """The sums of the features of each entity's neighbours, (n, d); None if too large."""
        table = self._unit_entities.table
        return None if table is None else self._graph @ table.numpy()

    def read_entities(
        self, rows: Positions, neighbours: bool = False, drop: Positions | None = None
    ) -> Tensor:
        """Return the features of entities.

        Args:
            rows: entities, (m,).
            neighbours: whether to append the mean of each entity's neighbours.
            drop: one entity per row, (m,), that does not count as a neighbour: the other end of
                the triple to predict. The mean is then (sum - e_drop) / (degree - 1), and zero if
                no neighbour is left.

        Returns:
            Features of shape (m, d), or (m, 2 d) with neighbours.
        """
        features = self._unit_entities.read(rows)
        return torch.cat([features, self._means(rows, drop)], dim=1) if neighbours else features

    def read_heads(
        self,
        rows: Positions,
        relations: Positions,
        joint: bool,
        neighbours: bool = False,
        drop: Positions | None = None,
    ) -> Tensor:
        """Return the features of the queries' heads.

        Args:
            rows: head entities, (m,).
            relations: relations of the queries, (m,).
            joint: whether to read the joint features of head and relation.
            neighbours: as in ``read_entities``.
            drop: as in ``read_entities``.

        Returns:
            Features of shape (m, d), or (m, 2 d) with neighbours.

        Raises:
            UserError: Joint features are missing.
        """
        if not joint:
            return self.read_entities(rows, neighbours, drop)
        features = self._joint_features(rows, relations)
        return torch.cat([features, self._means(rows, drop)], dim=1) if neighbours else features

    def _joint_features(self, rows: Positions, relations: Positions) -> Tensor:
        keys = self.joint_input_keys
        if self._unit_joint is None or keys is None or not len(keys):
            raise UserError(
                "this head reads joint features of head entities and relations, and the data has "
                "none. Extract them with a prompt that joins both."
            )
        query_keys = joint_keys(rows, relations, self.n_relations)
        positions = np.minimum(np.searchsorted(keys, query_keys), len(keys) - 1)
        n_missing = int((keys[positions] != query_keys).sum())
        if n_missing:
            raise UserError(
                f"{n_missing:,} of {len(query_keys):,} queries have no joint features. Extract the "
                "features of all these queries, or use a head for separate features."
            )
        return self._unit_joint.read(positions)

    def _means(self, rows: Positions, drop: Positions | None) -> Tensor:
        graph = self._graph
        degree = graph.indptr[rows + 1] - graph.indptr[rows]
        if self._sums is not None:
            sums = self._sums[rows]
        else:
            subgraph = graph[rows]
            neighbours, columns = np.unique(subgraph.indices, return_inverse=True)
            shape = len(rows), len(neighbours)
            local = csr_array((subgraph.data, columns.reshape(-1), subgraph.indptr), shape=shape)
            sums = local @ self._unit_entities.read(neighbours).numpy()
        if drop is not None:
            linked = rows != drop  # An entity is not its own neighbour.
            sums = sums - self._unit_entities.read(drop).numpy() * linked[:, None]
            degree = degree - linked
        # Subtracting the only term of a sum may leave a rounding error, so the mean is set to 0.
        means = sums / np.maximum(degree, 1)[:, None] * (degree > 0)[:, None]
        return torch.from_numpy(means.astype(np.float32))


#: Scores, (m, k), and a mask of the same shape that is true where one is left out.
MaskedScores = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContrastSettings:
    """Settings of the contrastive objective: its negatives and its temperature.

    The defaults are those of SimKGC's commands for WN18RR.

    Attributes:
        temperature: initial temperature of the scores.
        learn_temperature: whether the temperature is trained.
        margin: margin that is subtracted from the score of each query with its target.
        directions: ``both`` ranks the target of each query among the candidates of the batch, and
            the query of each target among the queries; ``query`` does only the former.
        negatives: candidates of a batch: its ``tails``, or all its ``entities`` (heads and tails).
        self_negatives: whether the head of a query is a candidate for the query.
        queue: number of previous batches whose candidates are used as negatives too, with the
            embeddings that they had in their batch.
        queue_weight: factor of the scores of these candidates.
        random_candidates: number of entities sampled for each batch, in addition to the entities
            of its triples.
        relation_negatives: number of other relations that each triple is contrasted with; 0 for
            none. The tail must be nearer to the head under the triple's relation than under the
            others. This is Hyper-CL's contrast of one sentence under two conditions; SimKGC has
            no such term.
    """

    temperature: Annotated[float, Gt(0), Le(LARGEST)] = 0.05
    learn_temperature: bool = True
    margin: Weight = 0.02
    directions: Literal["both", "query"] = "both"
    negatives: Literal["tails", "entities"] = "tails"
    self_negatives: bool = True
    queue: Annotated[int, Ge(0), Le(1_000)] = 0
    queue_weight: Weight = 0.5
    random_candidates: Annotated[int, Ge(0), Le(LARGEST)] = 0
    relation_negatives: Annotated[int, Ge(0), Le(1_000)] = 0


def contrastive(
    scores: Tensor,
    target: Tensor,
    mask: Tensor,
    settings: ContrastSettings,
    scale: Tensor | float,
    others: Sequence[MaskedScores] = (),
    relations: MaskedScores | None = None,
) -> Tensor:
    """Return the loss of a batch, a scalar: the sum over directions, each a mean over rows.

    With the score s_ij of query i and candidate j, and t the target of query i, a row's loss is
    -log(e^((s_it - margin) scale) / (e^((s_it - margin) scale) + sum over j of e^(s_ij scale))).
    The other direction is the same, summed over the queries instead of the candidates.

    Args:
        scores: scores of each query with each candidate of the batch, (m, n).
        target: column of the target of each query, (m,) int64. Several queries may share a column,
            if each entity has a single column. If an entity has a column for each of its
            occurrences, as in SimKGC, it has correspondingly more weight as a negative.
        mask: mask, (m, n) bool, that is true where a candidate is a known answer of a query. Known
            answers are not negatives, in either direction. The values at the targets are ignored.
        settings: settings of the objective.
        scale: factor of the scores, 1 / temperature.
        others: scores (m, k) and masks of additional candidates, which are not the target of any
            query of the batch.
        relations: scores (m, r) of the target of each query with its head under other relations,
            and their mask.
    """
    rows = torch.arange(len(scores), device=scores.device)
    is_target = target[:, None] == torch.arange(scores.shape[1], device=scores.device)
    logits = (scores - settings.margin * is_target.to(scores.dtype)) * scale
    # The mask is applied after scaling: -inf times the temperature would have a NaN gradient.
    logit_groups = [logits.masked_fill(mask & ~is_target, -torch.inf)]
    logit_groups += [
        (other_scores * scale).masked_fill(other_mask, -torch.inf)
        for other_scores, other_mask in others
    ]
    total = cross_entropy(torch.cat(logit_groups, dim=1), target)
    if settings.directions == "both":
        # Queries with the same target are not negatives of each other.
        is_known_answer = mask.T[target] | (target[:, None] == target)
        is_known_answer[rows, rows] = False
        columns = logits.index_select(1, target).T
        total = total + cross_entropy(columns.masked_fill(is_known_answer, -torch.inf), rows)
    if relations is not None:
        other_scores, other_mask = relations
        other_logits = (other_scores * scale).masked_fill(other_mask, -torch.inf)
        pair_logits = torch.cat([logits.gather(1, target[:, None]), other_logits], dim=1)
        total = total + cross_entropy(pair_logits, torch.zeros_like(target))
    return total


def replace_relations(
    triples: Positions, count: int, settings: ContrastSettings, rng: np.random.Generator
) -> list[Positions]:
    """Return triples, (m, 3), with other relations below ``count``, for each relation negative."""
    head, relation, tail = triples.T
    others = [
        (relation + rng.integers(1, count, size=len(relation))) % count
        for _ in range(settings.relation_negatives)
    ]
    return [np.stack([head, other, tail], axis=1) for other in others]


def contrast_relations(
    embed: Callable[[Positions], Tensor],
    others: Sequence[Positions],
    targets: Tensor,
    known: KnownTriples,
) -> MaskedScores | None:
    """Return the scores (m, r) of tails with their heads under other relations, and a mask.

    Args:
        embed: function that embeds the queries of triples.
        others: triples with other relations, as ``replace_relations`` returns them.
        targets: embeddings of the tails, (m, k).
        known: known triples, which are masked.
    """
    if not others:
        return None
    scores = torch.stack([(embed(triples) * targets).sum(dim=1) for triples in others], dim=1)
    mask = np.stack([known.contains(triples) for triples in others], axis=1)
    return scores, torch.from_numpy(mask).to(targets.device)


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

    data: QueryArrays | None = None

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

    def bind(self, arrays: QueryArrays) -> FittedQueryHead:
        """Return the head applied to a graph; several heads may share its features.

        Raises:
            UserError: The head was fitted on features of other sizes, or on another number of
                relations.
        """
        self.check_sizes(arrays.dims)
        return replace(self, data=arrays)

    def queries(self, heads: NDArray[Any], relations: NDArray[Any]) -> Array:
        """Return the embeddings of queries, (m, k) float32.

        Their inner products with ``candidates`` are the scores. If the head compares by cosine,
        both have unit length, so the scores are cosine similarities.

        Args:
            heads: head entities, (m,).
            relations: relations, (m,), below 2 R.
        """
        queries = np.stack([heads, relations], axis=1).astype(np.int64)
        data, settings = self._require_graph(), self.settings
        blocks = [np.zeros((0, self.dim_out), dtype=np.float32)]
        for start in range(0, len(queries), _BLOCK):
            rows, which = queries[start : start + _BLOCK].T
            with torch.inference_mode():
                x = data.read_heads(rows, which, self.heads[0].reads_joint, settings.neighbours)
                inputs = x, data.relation_vectors, torch.from_numpy(np.ascontiguousarray(which))
                blocks.append(_concatenate_heads([head.query(*inputs) for head in self.heads]))
        return np.concatenate(blocks)

    def candidates(self) -> Matrix:
        """Return the embeddings of all entities, (n, k), which are computed when rows are read."""
        return _CandidateVectors(self, self._require_graph())

    def _require_graph(self) -> QueryArrays:
        if self.data is None:
            raise UserError("this head has no graph yet. Call head.bind(arrays) first.")
        return self.data


class _CandidateVectors(Matrix):
    """The embeddings of all entities by a head, computed when rows are read."""

    def __init__(self, head: FittedQueryHead, data: QueryArrays) -> None:
        self._head, self._data = head, data
        self.shape = len(data.entities), head.dim_out

    def __getitem__(self, rows: Any, /) -> Array:
        entities = np.arange(len(self))[rows]
        vectors = np.empty((len(entities), self.shape[1]), dtype=np.float32)
        for start in range(0, len(entities), _BLOCK):
            block = entities[start : start + _BLOCK]
            with torch.inference_mode():
                x = self._data.read_entities(block, self._head.settings.neighbours)
                parts = [head.candidate(x) for head in self._head.heads]
                vectors[start : start + _BLOCK] = _concatenate_heads(parts)
        return vectors


def _concatenate_heads(parts: list[Tensor]) -> Array:
    """Concatenate the embeddings of several heads, so that scores are the means of theirs."""
    concatenated = torch.cat(parts, dim=1) / len(parts) ** 0.5 if len(parts) > 1 else parts[0]
    return np.asarray(concatenated.numpy())


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
        # The logarithm of 1 / temperature.
        log_scale = torch.tensor(-math.log(settings.temperature))
        parameter = nn.Parameter(log_scale, requires_grad=settings.learn_temperature)
        self.contrast = nn.ParameterDict({"log_scale": parameter})

    @classmethod
    def dim_of_relations(cls, settings: Any, dim: int) -> int:
        """Return ``dim``, the dimension of relations' features, if the head reads them; else 0."""
        return dim if cls.family.conditioned and settings.relations == "features" else 0

    @property
    def scale(self) -> float:
        """The factor of the scores in training, 1 / temperature."""
        return math.exp(float(self.contrast["log_scale"].detach()))

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

    def loss(
        self,
        scores: Tensor,
        target: Tensor,
        mask: Tensor,
        others: Sequence[MaskedScores] = (),
        relations: MaskedScores | None = None,
    ) -> Tensor:
        """Return ``contrastive`` at the current temperature."""
        scale = self.contrast["log_scale"].exp()
        return contrastive(scores, target, mask, self.settings, scale, others, relations)

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


def fit_queries(
    recipe: Recipe,
    arrays: QueryArrays,
    dev: DevScore[FittedQueryHead] | None,
    seed: int,
    on_epoch: OnEpoch,
    device: str = "auto",
    start: FittedQueryHead | None = None,
) -> FittedQueryHead:
    """Fit a head on the triples of a graph, in both directions.

    The score on ``dev`` chooses the epoch; without ``dev`` the last epoch is kept. The parameters
    of ``start``, if it is given, are the initial ones. The same seed gives the same head on the
    same machine, bit for bit on one thread.

    Raises:
        UserError: The recipe is for rated pairs, there are no triples, features that the head reads
            are missing, ``dim`` exceeds the dimension of the features, the parameters do not fit
            into memory, those of ``start`` have other shapes, or the loss diverges.
    """
    family, settings = check_queries(recipe), recipe.settings
    if not len(arrays.triples):
        raise UserError("the training split has no triples to fit a head on.")
    dim, dim_condition, n_relations = arrays.dims
    recipe.check_dim(dim)
    if family.dim_of_relations(settings, 1) and not dim_condition:
        raise UserError(
            "this head reads the features of relations, and the data has none. Add them, or set "
            "relations to one-hot."
        )
    dims = dim, family.dim_of_relations(settings, dim_condition), n_relations
    fitting = partial(_QueryFitting, recipe, dims, arrays, dev, torch.device(choose_device(device)))
    head: FittedQueryHead = fit_members(fitting, recipe, seed, on_epoch, start)
    return replace(head, data=arrays)


def check_queries(recipe: Recipe) -> type[QueryHead]:
    """Return the family of a recipe's head.

    Raises:
        UserError: The family does not map queries.
    """
    if not issubclass(recipe.family, QueryHead):
        raise UserError(f"the head {recipe.name} compares rated pairs and cannot rank candidates.")
    return recipe.family


class _QueryFitting(HeadTrainer[QueryHead, FittedQueryHead]):
    """Fits one head on the queries of a graph."""

    data: QueryArrays

    def create_module(self) -> QueryHead:
        module = super().create_module()
        module.initialise(self.data.relation_vectors)
        return module

    def prepare(self) -> None:
        self._rng = np.random.Generator(np.random.SFC64(self.seed))
        # Candidates of previous batches, SimKGC's pre-batch negatives. SimKGC initialises them with
        # random vectors; here, there are none at first.
        self._queue: deque[tuple[Positions, Tensor]] = deque(maxlen=self.settings.queue)
        self._triples = self.data.queries()
        self.n_rows = len(self._triples)

    def parameter_groups(self) -> list[dict[str, Any]]:
        parameters = [value for value in self.module.parameters() if value.ndim]
        # Weight decay would pull the temperature to 1.
        temperature = list(self.module.contrast.parameters())
        return [{"params": parameters}, {"params": temperature, "weight_decay": 0.0}]

    def learning_rate_factor(self, step: int, steps: int) -> float:
        return learning_rate_factor(step, steps, 0.0, self.settings.schedule)

    def record(self) -> dict[str, Any]:
        return {"temperature": 1 / self.module.scale}

    def current_head(self) -> FittedQueryHead:
        return replace(super().current_head(), data=self.data)

    def loss(self, batch: Positions) -> Tensor:
        """Return the loss of a batch of queries with their tails, a scalar."""
        settings, module, triples = self.settings, self.module, self._triples[batch]
        known = self.data.known
        head, relation, tail = triples.T
        entities, features, columns = self._batch_candidates(head, tail)
        candidates = module.candidate(features.to(self.device))
        head_features = self.data.read_heads(
            head, relation, module.reads_joint, settings.neighbours, drop=tail
        )
        queries = self._embed_queries(head_features, relation)
        target = self._to_device(columns)
        mask = self._mask_candidates(head, relation, entities)
        further_negatives = self._score_other_candidates(triples, queries)
        self._queue.append((entities, candidates.detach()))
        relations = contrast_relations(
            lambda other: self._embed_queries(head_features, other[:, 1]),
            replace_relations(triples, 2 * self.data.n_relations, settings, self._rng),
            candidates.index_select(0, target),
            known,
        )
        scores = module.product(queries, candidates)
        return module.loss(scores, target, mask, further_negatives, relations)

    def _score_other_candidates(self, triples: Positions, queries: Tensor) -> list[MaskedScores]:
        """Return the scores of candidates that are not in the batch: own heads, and the queue."""
        settings, known = self.settings, self.data.known
        head, relation, tail = triples.T
        negatives: list[MaskedScores] = []
        if settings.self_negatives and settings.negatives == "tails":
            head_features = self.data.read_entities(head, settings.neighbours, drop=tail)
            scores = (queries * self.module.candidate(head_features.to(self.device))).sum(
                dim=1, keepdim=True
            )
            loops = known.contains(np.stack([head, relation, head], axis=1))
            negatives.append((scores, self._to_device(loops[:, None])))
        if self._queue:
            entities, vectors = zip(*self._queue, strict=True)
            queue_mask = self._mask_candidates(head, relation, np.concatenate(entities))
            scores = self.module.product(queries, torch.cat(vectors))
            negatives.append((scores * settings.queue_weight, queue_mask))
        return negatives

    def _mask_candidates(self, head: Positions, relation: Positions, entities: Positions) -> Tensor:
        """Return which entities (n,) are not negatives of queries (m,), by the settings, (m, n)."""
        mask = self.data.known.mask(head, relation, entities)
        if not self.settings.self_negatives:
            mask |= entities == head[:, None]
        return self._to_device(mask)

    def _batch_candidates(
        self, head: Positions, tail: Positions
    ) -> tuple[Positions, Tensor, Positions]:
        """Return the candidates of a batch, each entity once unless it is read with neighbours.

        Returns:
            The entities (n,), their features (n, d), and the column of each row's target (m,).
        """
        settings, data = self.settings, self.data
        n_random, n = settings.random_candidates, len(data.entities)
        random_entities = self._rng.integers(n, size=n_random)
        with_heads = settings.negatives == "entities"
        if settings.neighbours:
            # Head and tail of a triple do not count as neighbours of each other, so the features of
            # an entity depend on the triple, and every row gets a column.
            entities, drop = (tail, head)
            if with_heads:
                entities, drop = np.concatenate([tail, head]), np.concatenate([head, tail])
            features = data.read_entities(entities, neighbours=True, drop=drop)
            if n_random:
                features = torch.cat(
                    [features, data.read_entities(random_entities, neighbours=True)]
                )
            return np.concatenate([entities, random_entities]), features, np.arange(len(tail))
        entities = np.unique(
            np.concatenate([tail, head, random_entities] if with_heads else [tail, random_entities])
        )
        return entities, data.read_entities(entities), np.searchsorted(entities, tail)

    def _embed_queries(self, head_features: Tensor, relation: Positions) -> Tensor:
        relations = self.data.relation_vectors
        return self.module.query(
            head_features.to(self.device),
            None if relations is None else relations.to(self.device),
            self._to_device(relation),
        )

    def _to_device(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
