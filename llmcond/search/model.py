"""The model of an index: a run with its head, and how an index records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from llmcond.data.guides import LabelledTexts
from llmcond.errors import UserError
from llmcond.heads.guide import Guide, Guides
from llmcond.runs.embedder import Embedder, EmbeddingModel, base_encoder, fit_checked_guide
from llmcond.search.projection import NO_CONDITION, ConditionProjections, ViewTemplates

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder


@dataclass(frozen=True)
class SearchModel(EmbeddingModel):
    """The model whose vectors an index searches. The encoder is loaded at first use.

    Raises:
        UserError: if the head does not compare embeddings by their cosine.
    """

    def __post_init__(self) -> None:
        if not self.head.head.compares_by_cosine:
            raise UserError(
                f"the head {self.head.name} does not compare embeddings by their cosine, but an "
                "index does. Choose another --head."
            )

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """Return the names of the parts of ``identity`` that differ from a recorded identity."""
        identity = self.identity
        return [name for name in identity if identity[name] != recorded.get(name)]

    @cached_property
    def templates(self) -> ViewTemplates:
        """The encoder inputs that its vectors are computed from."""
        return ViewTemplates(self.view)

    def is_joint(self, condition: str | None) -> bool:
        """Return whether each text is encoded together with the condition."""
        return condition is not NO_CONDITION and bool(self.templates.joint)

    @cached_property
    def projections(self) -> ConditionProjections:
        """The projections of texts to vectors under a condition."""
        return ConditionProjections(self.templates, self.head.head, self.encoder, self.truncate_dim)

    @cached_property
    def base(self) -> Encoder | None:
        """The encoder without adapters, whose embeddings give scores without a condition.

        It is None where that encoder is unknown.
        """
        return base_encoder(self.encoder())

    def fit_guide(self, labelled: LabelledTexts) -> Guide:
        """Fit a guide on the vectors that searches compare.

        Raises:
            UserError: if the encoder returns NaN.
        """
        project, texts = self.projections.get(labelled.condition), labelled.texts
        vectors = project(texts, self.projections.encode_texts(texts), self.projections.encode)
        return fit_checked_guide(labelled, vectors, self.head.head)

    @cached_property
    def _unguided(self) -> Embedder:
        return self.load()

    @property
    def embedder(self) -> Embedder:
        """An embedder with the same run, head and guides. Access loads the encoder."""
        guides = Guides()
        for condition, guide in self.guides.items():
            basis = self.projections.get(condition).basis
            guides[condition] = guide if basis is None else guide.change_basis(basis)
        return replace(self._unguided, guides=guides)


def short_name(encoder: Encoder) -> str:
    """Return an encoder's name on the Hugging Face Hub, or the last part of its local path."""
    name = encoder.name
    return name if name == encoder.resolved.checkpoint.repo else PurePath(name).name
