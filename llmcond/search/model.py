"""What makes the vectors of an index: a run and its head, and how they are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from llmcond.data.guides import LabelledTexts
from llmcond.errors import UserError
from llmcond.heads.guide import Guide
from llmcond.runs.embedder import Embedder, base_encoder, guide_of, make_embedder
from llmcond.runs.embedding_model import EmbeddingModel
from llmcond.search.projection import ALONE, Projections, Sources

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder


@dataclass(frozen=True)
class SearchModel(EmbeddingModel):
    """A model whose vectors are searched. The encoder is loaded when it is needed.

    Attributes:
        guides: what maps vectors under some conditions.

    Raises:
        UserError: the head does not compare embeddings by their cosine.
    """

    guides: dict[Any, Guide] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.head.head.compares_by_cosine:
            raise UserError(
                f"the head {self.head.name} compares embeddings in a way of its own, and an index "
                "compares by cosine. Choose another --head."
            )

    @property
    def made_by(self) -> dict[str, str]:
        """Return how it is found again: the arguments of :meth:`find`, as texts."""
        folder = self.run.folder
        source = {"model": folder.name} if self.run.is_bundled else {"run": str(folder.resolve())}
        prompt = {} if self.head.is_fitted else {"prompt": self.view.name}
        return {**source, "head": self.head.reference, **prompt}

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """Return in what it is not what :attr:`identity` was recorded of."""
        own = self.identity
        return [name for name in own if own[name] != recorded.get(name)]

    @cached_property
    def sources(self) -> Sources:
        """Return the inputs behind its vectors."""
        return Sources(self.view)

    def is_joint(self, condition: str | None) -> bool:
        """Return whether each text is encoded together with the condition."""
        return condition is not ALONE and bool(self.sources.joint)

    @cached_property
    def projections(self) -> Projections:
        """Return what makes vectors under conditions."""
        return Projections(self.sources, self.head.head, self.encoder)

    @cached_property
    def base(self) -> Encoder | None:
        """Return the encoder whose plain embeddings conditions are compared with; None: unknown."""
        return base_encoder(self.encoder())

    def fit_guide(self, labelled: LabelledTexts) -> Guide:
        """Fit a guide of the vectors that searches compare.

        Raises:
            UserError: the encoder gave NaN.
        """
        project, texts = self.projections.of(labelled.condition), labelled.texts
        vectors = project(texts, self.projections.stored(texts), self.projections.encode)
        return guide_of(labelled, vectors, self.head.head)

    @cached_property
    def _unguided(self) -> Embedder:
        return make_embedder(self.encoder(), self.head)

    @property
    def embedder(self) -> Embedder:
        """Return it as an embedder, which loads the encoder."""
        guides = {}
        for condition, guide in self.guides.items():
            basis = self.projections.of(condition).basis
            guides[condition] = guide if basis is None else guide.lifted(basis)
        return replace(self._unguided, guides=guides)


def short_name(encoder: Encoder) -> str:
    """Return an encoder's name on the hub, or the last part of its path."""
    name = encoder.name
    return name if name == encoder.resolved.checkpoint.repo else PurePath(name).name
