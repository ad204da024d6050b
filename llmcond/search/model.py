"""What makes the vectors of an index: an encoder, a prompt and a head, and how they are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from llmcond.bundled import pretrained
from llmcond.data.guides import LabelledTexts
from llmcond.errors import UserError
from llmcond.features.view import View
from llmcond.heads.guide import Guide
from llmcond.runs import Run, SavedEmbeddingHead, open_run
from llmcond.runs.embedder import (
    Embedder,
    base_encoder,
    choose_model,
    guide_of,
    make_embedder,
)
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.usual import usual_run
from llmcond.search.projection import ALONE, Projections, Sources

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder


@dataclass(frozen=True)
class Model:
    """A run with one of its heads, or zero-shot. The encoder is loaded when it is needed.

    Attributes:
        guides: what maps vectors under some conditions.
    """

    run: Run
    saved: SavedEmbeddingHead | None
    view: View
    device: str
    guides: dict[Any, Guide] = field(default_factory=dict)

    @classmethod
    def find(
        cls,
        run: str | Path | None = None,
        model: str | None = None,
        head: str | None = None,
        prompt: str | None = None,
        device: str = "auto",
    ) -> Model:
        """Return what the arguments of :func:`load_embedder` name.

        Raises:
            UserError: no such run or head, or a head whose embeddings are not compared by cosine.
        """
        opened = open_run(usual_run(run, model))
        saved, view = choose_model(opened, head, prompt)
        if saved is not None and not saved.head.compares_by_cosine:
            raise UserError(
                f"the head {saved.name} compares embeddings in a way of its own, and an index "
                "compares by cosine. Choose another --head."
            )
        return cls(opened, saved, view, device)

    @property
    def made_by(self) -> dict[str, str]:
        """Return how it is found again: the arguments of :meth:`find`, as texts."""
        folder = self.run.folder
        bundled = folder == pretrained(folder.name)
        where = {"model": folder.name} if bundled else {"run": str(folder.resolve())}
        if self.saved is None:
            return {**where, "head": "none", "prompt": self.view.name}
        return {**where, "head": self.saved.name}

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that decides the vectors."""
        return {
            "encoder": self.run.identity.fingerprint,
            "prompt": {prompt.name: prompt.digest for prompt in self.view.prompts},
            "subtraction": self.view.subtract,
            "head": None if self.saved is None else str(self.saved.record["weights_sha256"]),
        }

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
        return Projections(self.sources, self.saved.head if self.saved else None, self.encoder)

    @cached_property
    def encoder(self) -> LazyEncoder:
        """Return its encoder, loaded when it is called."""
        return LazyEncoder(self.run.resolve_encoder(self.device))

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
        return guide_of(labelled, vectors, self.saved.head if self.saved else None)

    @cached_property
    def _unguided(self) -> Embedder:
        return make_embedder(self.encoder(), self.view, self.saved)

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
