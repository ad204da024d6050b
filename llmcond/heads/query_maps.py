"""What maps queries and what maps candidates, as one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, fields, make_dataclass
from functools import cache
from typing import Any, ClassVar, Self, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

from llmcond.errors import UserError
from llmcond.heads.contrastive import Contrast
from llmcond.heads.module import HeadModule
from llmcond.heads.settings import QuerySettings, TrainingSettings

#: What the kinds of such heads begin with; the kind of the queries' map follows.
PREFIX = "query-"


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
        dims: sizes of what entities and relations have, and R.
    """

    family: ClassVar[type[HeadModule]]
    maps_queries = True
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
    def dims(self) -> tuple[int, int, int]:
        """See the class."""
        return self.dim_in, self.dim_condition, self.n_relations

    @property
    def scale(self) -> float:
        """Return what scores are multiplied by in training, 1 / temperature."""
        return self.contrast.scale

    def check(self, dims: tuple[int, int, int], kind: str) -> None:
        """Check the sizes of a graph's features, see :attr:`QueryArrays.dims`.

        Raises:
            UserError: they are others than those the head was made for.
        """
        names = ("features of entities", "features of relations", "relations")
        for name, got, expected in zip(names, dims, self.dims, strict=True):
            if got != expected and (name == names[0] or expected):
                what = "" if name == names[2] else "dimensions of "
                raise UserError(
                    f"the graph has {got} {what}{name}; this {kind} head was fitted on {expected}."
                )

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

    def multiply_in_bfloat16(self, wanted: bool) -> None:
        """Set whether products are made in bfloat16."""
        self.in_bfloat16 = self.map.in_bfloat16 = wanted

    def finished(self) -> Self:
        """See :class:`HeadModule`."""
        self.map.finished()
        return super().finished()


class QueryEnsemble(HeadModule):
    """Several heads of one recipe: embeddings side by side, so that scores are their means."""

    maps_queries = True

    def __init__(self, heads: Sequence[QueryHead]) -> None:
        first = heads[0]
        super().__init__(first.settings, first.dim_in, first.dim_condition)
        self.heads, self.dims, self.reads_joint = heads, first.dims, first.reads_joint
        self.dim_out, self.check = sum(head.dim_out for head in heads), first.check
        for number, head in enumerate(heads):
            self.add_module(f"member{number}", head)

    @property
    def scale(self) -> float:
        """Return the mean of what their scores are multiplied by."""
        return sum(head.scale for head in self.heads) / len(self.heads)

    def query(self, x: Tensor, relations: Tensor | None, which: Tensor) -> Tensor:
        """See :class:`QueryHead`."""
        return self._joined([head.query(x, relations, which) for head in self.heads])

    def candidate(self, x: Tensor) -> Tensor:
        """See :class:`QueryHead`."""
        return self._joined([head.candidate(x) for head in self.heads])

    def _joined(self, parts: list[Tensor]) -> Tensor:
        joined: Tensor = torch.cat(parts, dim=1) / len(parts) ** 0.5
        return joined


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
