"""Heads that map queries and candidates, as modules and once they are fitted."""

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

from llmcond.arrays import Array, Matrix
from llmcond.errors import UserError
from llmcond.heads.base import Fitted
from llmcond.heads.loading import restore_head
from llmcond.heads.module import HeadModule, members_of
from llmcond.heads.settings import GradientSettings, RecordedSize, Sizes, TrainingSettings
from llmcond.heads.storage import read_head
from llmcond.kinds.ranking.arrays import QueryArrays, QueryFeatures
from llmcond.kinds.ranking.contrastive import Contrast, ContrastSettings

#: Entities and queries mapped at a time.
_BLOCK = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySettings(GradientSettings, ContrastSettings):
    """What the recipe of any head may say that maps queries and candidates.

    The settings of the map of queries itself, such as its rank, come in addition.

    Attributes:
        candidate: what maps candidates: ``none``; ``linear``, a layer of their own; or ``same``,
            what maps queries too: a joint map itself, and before a conditioned one the same layer.
        score: ``cosine`` of both embeddings (Hyper-CL's paper), or ``dot``: their product as they
            are (its released code, which has candidates of length 1 and no layer for them).
        neighbours: whether an entity is read with the mean of its neighbours' features in the
            training graph, of which a triple's other end is taken out in training.
        relations: what is known of a relation: its ``features``, or ``one-hot`` which one it is; a
            hypernetwork is then one free matrix for each.
        start: ``identity``: embeddings are, as far as the form allows, the features at first; or
            ``random``.
        schedule: how the learning rate falls over all epochs: ``linear`` to 0, or ``constant``.
    """

    candidate: Literal["none", "linear", "same"] = "linear"
    score: Literal["cosine", "dot"] = "cosine"
    neighbours: bool = False
    relations: Literal["features", "one-hot"] = "features"
    start: Literal["identity", "random"] = "identity"
    schedule: Literal["linear", "constant"] = "linear"

    def __post_init__(self) -> None:
        """Refuse settings that do not go together."""
        if self.neighbours and self.candidate == "none":
            raise ValueError(
                "neighbours need a map of candidates, which brings twice as many features to "
                "their size: set candidate to linear or same"
            )


@dataclass(frozen=True)
class QuerySizes(Sizes):
    """The sizes that such a head is made with; ``n_relations`` is R, in one direction."""

    n_relations: RecordedSize = 0


@dataclass(frozen=True, eq=False)
class FittedQueryHead(Fitted):
    """A fitted head that maps queries and candidates: an immutable value, like other heads.

    Attributes:
        data: the graph that it maps entities of; None for a head that was just loaded.
    """

    Sizes = QuerySizes
    refusal = "maps no queries of a graph"

    data: QueryFeatures | None = None

    @property
    def heads(self) -> list[QueryHead]:
        """The module's heads, of which an ensemble has several."""
        return members_of(self.module)

    @property
    def dim_out(self) -> int:
        """Return the size of the embeddings."""
        return sum(head.dim_out for head in self.heads)

    @property
    def n_relations(self) -> int:
        """Return R, of relations in one direction."""
        return self.heads[0].n_relations

    def check(self, dims: tuple[int, int, int]) -> None:
        """Check the sizes of a graph's features, see :attr:`QueryArrays.dims`.

        Raises:
            UserError: they are others than those the head was fitted on.
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

    def on(self, graph: QueryArrays | QueryFeatures) -> FittedQueryHead:
        """Return the head on a graph; other heads may share the features.

        Raises:
            UserError: features of other sizes than those it was fitted on, or other relations.
        """
        data = graph if isinstance(graph, QueryFeatures) else QueryFeatures(graph)
        self.check(data.arrays.dims)
        return replace(self, data=data)

    def queries(self, heads: NDArray[Any], relations: NDArray[Any]) -> Array:
        """Return embeddings of queries, (m, k) float32, of entities and relations below 2 R.

        Scores are products of these and :meth:`candidates`: cosines where the head compares by
        them, as both have length 1 then.
        """
        rows, which = (np.asarray(part, dtype=np.int64) for part in (heads, relations))
        data, settings = self._bound(), self.settings
        blocks = [np.zeros((0, self.dim_out), dtype=np.float32)]
        for start in range(0, len(rows), _BLOCK):
            own, by = rows[start : start + _BLOCK], which[start : start + _BLOCK]
            with torch.inference_mode():
                x = data.heads(own, by, self.heads[0].reads_joint, settings.neighbours)
                seen = data.relations, torch.from_numpy(by)
                blocks.append(_side_by_side([head.query(x, *seen) for head in self.heads]))
        return np.concatenate(blocks)

    def candidates(self) -> Matrix:
        """Return embeddings of all entities, (n, k), computed for the rows that are read."""
        return _Candidates(self, self._bound())

    def _bound(self) -> QueryFeatures:
        if self.data is None:
            raise UserError("this head is on no graph yet: head.on(arrays).")
        return self.data


class _Candidates(Matrix):
    """The embeddings of all entities under a head."""

    def __init__(self, head: FittedQueryHead, data: QueryFeatures) -> None:
        self._head, self._data = head, data
        self.shape = len(data.arrays.entities), head.dim_out

    def __getitem__(self, rows: Any, /) -> Array:
        which = np.arange(len(self))[rows]
        found = np.empty((len(which), self.shape[1]), dtype=np.float32)
        for start in range(0, len(which), _BLOCK):
            part = which[start : start + _BLOCK]
            with torch.inference_mode():
                x = self._data.entities(part, self._head.settings.neighbours)
                parts = [head.candidate(x) for head in self._head.heads]
                found[start : start + _BLOCK] = _side_by_side(parts)
        return found


def _side_by_side(parts: list[Tensor]) -> Array:
    """Return embeddings of several heads as one, whose scores are the means of theirs."""
    joined = torch.cat(parts, dim=1) / len(parts) ** 0.5 if len(parts) > 1 else parts[0]
    return np.asarray(joined.numpy())


def load_query_head(folder: Path) -> tuple[FittedQueryHead, dict[str, Any]]:
    """Return a head that ranks candidates, on no graph yet; else as :func:`load_head`."""
    files = read_head(folder)
    return restore_head(files, FittedQueryHead), files.description


class QueryHead(HeadModule):
    """A map of queries, any other family of heads, beside a map of candidates.

    With neighbours, a layer brings an entity's own features and the mean of its neighbours' to
    the size of its own first. A map that generates matrices sees relations by their coordinates in
    the space that all of them span: what it makes of them is linear, so that is the same map. It
    has fewer parameters where there are fewer directed relations than dimensions, as in WN18RR (22
    columns instead of 384).

    Attributes:
        family: of the map of queries.
        reads_joint, reads_relations: whether it takes joint features, and features of relations.
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
                "a query is read by its joint features or by separate ones: set features to one "
                "of them."
            )
        self.reads_joint = features == "joint"
        read = 2 * dim_in if settings.neighbours else dim_in
        # The layer that heads go through before their map, and candidates too if it is the same.
        self._shares = settings.candidate == "same" and family.conditioned
        if settings.neighbours or self._shares:
            self.add_layer("head", dim_in, read, bias=True)
        if settings.candidate == "linear":
            self.add_layer("tail", self.dim_out, read, bias=True)
        elif self.dim_out != dim_in and (self._shares or settings.candidate == "none"):
            raise UserError(
                f"queries are mapped to {self.dim_out} dimensions, and candidates keep their "
                f"{dim_in}: set candidate to linear, or dim to {dim_in}."
            )
        self.contrast = Contrast(settings)

    @classmethod
    def dim_of_relations(cls, settings: Any, dim: int) -> int:
        """Return the size of relations' features as far as the head takes them, else 0."""
        return dim if cls.family.conditioned and settings.relations == "features" else 0

    @property
    def scale(self) -> float:
        """Return what scores are multiplied by in training, 1 / temperature."""
        return self.contrast.scale

    def begin(self, relations: Tensor | None) -> None:
        """Take what is known before fitting: the relations' space, and the start that is asked for.

        Random numbers come from PyTorch's own generator. ``relations`` is (2 R, d_c).
        """
        if hasattr(self, "basis") and relations is not None:
            _, _, rows = torch.linalg.svd(relations, full_matrices=False)
            self.basis.copy_(rows.T)
        if self.settings.start == "identity":
            self.map.start_at_identity()
            for name in ("head", "tail"):
                if hasattr(self, name):
                    nn.init.eye_(self.get_parameter(name))
                    nn.init.zeros_(self.get_parameter(f"{name}_bias"))

    def query(self, x: Tensor, relations: Tensor | None, which: Tensor) -> Tensor:
        """Return embeddings of queries, (m, k); of length 1 where they are compared by cosine.

        ``x`` is (m, d) or (m, 2 d), what is read of heads; relations are (2 R, d_c) and ``which``
        (m,) the relation of each query. Relations that no query has may be missing, with numbers
        to match.
        """
        if hasattr(self, "head"):
            x = self.affine("head", x)
        if not self.family.conditioned:
            return self._scored(self.map(x, None, None))
        # Relations that no query has cost nothing.
        used, own = torch.unique(which, return_inverse=True)
        if self.settings.relations == "one-hot":
            seen = one_hot(used, 2 * self.n_relations).to(x.dtype)
        elif relations is None:
            raise UserError("this head takes the features of relations, and none were given.")
        else:
            seen = relations.index_select(0, used)
            seen = seen @ self.basis if hasattr(self, "basis") else seen
        return self._scored(self.map(x, seen, own))

    def candidate(self, x: Tensor) -> Tensor:
        """Return embeddings of candidates, (c, k); ``x`` is (c, d) or (c, 2 d)."""
        if self.settings.candidate == "linear":
            return self._scored(self.affine("tail", x))
        if self.settings.candidate == "same":
            x = self.affine("head", x) if hasattr(self, "head") else x
            x = x if self._shares else self.map(x)
        return self._scored(x)

    def _scored(self, embedded: Tensor) -> Tensor:
        return normalize(embedded) if self.settings.score == "cosine" else embedded

    def seed_dropout(self, seed: int | None) -> None:
        """See :class:`HeadModule`; all dropout is the map's."""
        self.map.seed_dropout(seed)


def _query_family(family: type[HeadModule]) -> type[QueryHead]:
    """Return the heads whose map of queries is of a family.

    Their settings are those of :class:`QuerySettings` and what the family has of its own.
    """
    shared = {item.name for item in fields(TrainingSettings)}
    hints = get_type_hints(family.Settings, include_extras=True)
    own = [
        (item.name, hints[item.name], field(default=item.default))
        for item in fields(family.Settings)
        if item.name not in shared
    ]
    settings = make_dataclass(
        f"Query{family.Settings.__name__}", own, bases=(QuerySettings,), frozen=True, kw_only=True
    )
    inherited = ("features", "conditioned", "is_identity", "multiplies_in_bfloat16")
    members = {name: getattr(family, name) for name in inherited}
    members |= {"family": family, "Settings": settings}
    return type(f"Query{family.__name__}", (QueryHead,), members)


#: Made once a family, so that a kind is one class.
query_family: Callable[[Any], type[QueryHead]] = cache(_query_family)
