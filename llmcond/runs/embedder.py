"""Encoder, prompt and head as one object, applied to new text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcond.arrays import Gathered, Matrix, as_list
from llmcond.data.guides import LabelledTexts, check_labelled
from llmcond.data.readers import described_source
from llmcond.encoders import resolve_base
from llmcond.errors import UserError
from llmcond.features.view import Part, View
from llmcond.heads.guide import Guide, apply_guides, fit_guide
from llmcond.heads.loading import EmbeddingHead
from llmcond.heads.plain import ZERO_SHOT, PlainHead
from llmcond.prompts import Prompt
from llmcond.runs import SavedEmbeddingHead
from llmcond.runs.comparing import Comparing, Vectors, checked_texts, one_text
from llmcond.runs.embedding_model import EmbeddingModel
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.open import find_run

if TYPE_CHECKING:
    from llmcond.encoders import EncoderInput
    from llmcond.encoders.encoder import Encoded, Encoder
    from llmcond.heads.base import ConditionCache


@dataclass(frozen=True, slots=True, repr=False)
class Embedder(Comparing):
    """Condition-aware embeddings: CASE(s, c) = g(f(c; I(s)) - f(c; I(∅))) (CASE, equation 1).

    Make one with :func:`load_embedder`.

    Attributes:
        encoder: f.
        view: I, for both cases, and whether the second term is subtracted.
        head: g; without one zero-shot, where embeddings are the features as they are.
        name: the head's in the run; ``none``: zero-shot.
        cache: keeps what a hypernetwork makes of conditions, from one call to the next.
        fitted_on: the data that the head was fitted on.
        guides: what maps embeddings under some conditions; see :meth:`guided`.
    """

    encoder: Encoder
    view: View
    head: EmbeddingHead = ZERO_SHOT
    name: str = "none"
    cache: ConditionCache | None = None
    fitted_on: str = ""
    guides: Mapping[str, Guide] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return what it is made of, in a line."""
        return (
            f"Embedder({self.encoder.name}, prompt {self.view.name}, head {self.name}, "
            f"{self.dim} dimensions)"
        )

    @property
    def dim(self) -> int:
        """Return the size of the embeddings."""
        return self.head.dim_out or self.encoder.dim

    def encode(
        self,
        sentences: str | Iterable[str],
        conditions: str | Iterable[str],
        *,
        normalize: bool = True,
        show_progress: bool = False,
    ) -> Vectors:
        """Return embeddings of n sentences under n conditions, or one for all, (n, k) float32.

        Args:
            sentences: n texts: a list, an iterator, a column of a data frame or an Arrow array.
                Or one text; the result is one vector, (k,), then.
            conditions: n conditions, one for each sentence; or one text for all sentences.
            normalize: whether to scale embeddings to unit L2 norm, so that inner products are
                cosines. Where the head compares embeddings in another way, they are never scaled;
                where a guide maps them, they always are.
            show_progress: whether to show a progress bar on standard error.

        Raises:
            UserError: lengths that differ, or an empty sentence or condition.
            LlmcondError: the encoder gave NaN, or ran out of memory.
        """
        if isinstance(sentences, str):
            one: Vectors = self.encode([sentences], one_text(conditions), normalize=normalize)[0]
            return one
        vectors = self._encode(checked_texts(sentences, conditions), show_progress)
        return unit_length(vectors, self.head) if normalize else vectors

    def guided(self, texts: Iterable[str], labels: Iterable[Any], condition: str) -> Embedder:
        """Return an embedder whose embeddings under a condition follow a few labelled texts.

        A linear map, fitted in closed form, brings texts of one label together. Embeddings keep
        their size, and those under other conditions stay as they are.

        >>> guided = embedder.guided(texts, ["praise", "complaint", ...], "the sentiment")
        >>> guided.encode(other_texts, "the sentiment")

        Args:
            texts: m texts; 8 to 64 often help.
            labels: m labels, two different ones at least.
            condition: the condition, whose former guide this one replaces.

        Raises:
            UserError: a text that is empty or has two labels, fewer than two labels, or a head
                that does not compare embeddings by their cosine.
        """
        return self.with_guide(check_labelled(condition, as_list(texts), as_list(labels)))

    def with_guide(self, labelled: LabelledTexts) -> Embedder:
        """Return an embedder that is guided by labelled texts; see :meth:`guided`."""
        condition = labelled.condition or ""
        vectors = replace(self, guides={}).encode(labelled.texts, condition)
        guide = guide_of(labelled, vectors, self.head)
        return replace(self, guides={**self.guides, condition: guide})

    def _encode(self, texts: Sequence[tuple[str, str]], show_progress: bool) -> Vectors:
        # One call encodes them all, so that inputs in common are encoded once.
        distinct = list(dict.fromkeys(self.view.inputs(texts)))
        vectors = self.encoder.encode(distinct, show_progress=show_progress)
        return self.embedded(texts, distinct, vectors)

    def encode_counted(self, rows: Sequence[tuple[str, str]]) -> Encoded:
        """Return embeddings of (sentence, condition) rows and their tokens, on the calling thread.

        Embeddings, (n, k), are as the head gives them: :func:`unit_length` normalises them. A row's
        tokens are those of all its inputs, and it is truncated if one of these is. No warning
        counts what was cut.

        Raises:
            UserError: an input that the encoder cannot take, or that it gave NaN for.
            LlmcondError: out of memory.
        """
        inputs = list(self.view.inputs(rows))
        distinct = list(dict.fromkeys(inputs))
        encoded = self.encoder.encode_counted(distinct)
        place = {item: index for index, item in enumerate(distinct)}
        own = np.array([place[item] for item in inputs]).reshape(len(rows), -1)
        return replace(
            encoded,
            vectors=self.embedded(rows, distinct, encoded.vectors),
            n_tokens=encoded.n_tokens[own].sum(axis=1),
            truncated=encoded.truncated[own].any(axis=1),
        )

    def embedded(
        self, texts: Sequence[tuple[str, str]], distinct: Sequence[EncoderInput], vectors: Vectors
    ) -> Vectors:
        """Return embeddings, (n, k), of (sentence, condition) rows as the head gives them.

        ``vectors``, (m, d), are the encoder's of the ``distinct`` inputs of the rows.

        Raises:
            UserError: one of them is NaN or infinity.
        """
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise UserError(
                f"the encoder gave NaN or infinity for {distinct[bad[0]].text[:80]!r}; "
                "try another dtype."
            )
        place = {item: index for index, item in enumerate(distinct)}

        def read(prompt: Prompt, part: Part) -> Matrix:
            inputs = [getattr(prompt, part).render(*row) for row in texts]
            return Gathered(vectors, np.array([place[item] for item in inputs], dtype=np.int64))

        features, condition = self.view.sentence(read), self.view.condition(read)
        if self.cache is not None and condition is not None:
            made = self.cache.transform(features, condition)
        else:
            made = self.head.transform(features, condition)
        return apply_guides(made, [own for _, own in texts], self.guides)

    def _compared(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        # One call encodes both sides, so that inputs in common are encoded once.
        embedded = self._encode([*first, *second], show_progress)
        return self.compare(embedded[: len(first)], embedded[len(first) :])

    def compare(self, first: Vectors, second: Vectors) -> Vectors:
        """Return how similar embeddings, (n, k), are to others row by row, (n,)."""
        return self.head.compare(first, second)


def guide_of(labelled: LabelledTexts, vectors: Vectors, head: EmbeddingHead = ZERO_SHOT) -> Guide:
    """Fit a guide to the embeddings, (m, k), of labelled texts.

    Raises:
        UserError: the head does not compare embeddings by their cosine.
    """
    if not head.compares_by_cosine:
        raise UserError(
            "the head compares embeddings in a way of its own, and a guide maps embeddings that "
            "are compared by cosine. Choose another --head."
        )
    return fit_guide(vectors, labelled.labels, source=labelled.source, digest=labelled.digest)


def unit_length(vectors: Vectors, head: EmbeddingHead = ZERO_SHOT) -> Vectors:
    """Return embeddings, (n, k), with unit L2 norm; as they are where their cosine is not taken.

    Those of norm 0, which say nothing, stay so.
    """
    if not head.compares_by_cosine:
        return vectors
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Vectors = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


def load_embedder(
    run: str | Path | None = None,
    head: str | None = None,
    *,
    prompt: str | None = None,
    device: str = "auto",
    max_tokens_per_batch: int | None = None,
    revision: str | None = None,
) -> Embedder:
    """Load a run's encoder with one of its heads.

    Args:
        run: the run's folder; the name of a bundled model; or ``OWNER/NAME`` of what
            ``llmcond push`` uploaded to the Hugging Face hub, which is downloaded where no folder
            is called so. None: ``runs/default`` where that was made from data of your own, else
            the default one of the bundled models.
        head: a fitted head's name, or its recipe's if that is fitted once. ``none``: zero-shot.
            None: the run's default (``llmcond heads --run RUN --default NAME``), else the head with
            the best score on dev, or zero-shot if there is none.
        prompt: for zero-shot, the prompt; a head has its own.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        max_tokens_per_batch: the token budget of one forward pass, which is what takes the place of
            a batch size; None: by the device and its memory.
        revision: branch, tag or commit of a model of the hub; None: the newest.

    Raises:
        UserError: no such run, model or head, several heads of that name, a prompt that is a
            control, or an encoder that has changed.
        LlmcondError: the hub cannot be reached, or the encoder cannot be loaded.
    """
    model = EmbeddingModel.find(find_run(run, revision), head, prompt)
    resolved = model.run.resolve_encoder(device, max_tokens_per_batch)
    return make_embedder(LazyEncoder(resolved)(), model.head)


def make_embedder(encoder: Encoder, saved: SavedEmbeddingHead) -> Embedder:
    """Return an encoder with a head of its run, fitted or zero-shot, as one object."""
    fitted_on = described_source(saved.record["data"]["source"]) if saved.is_fitted else ""
    cache = None
    if not isinstance(saved.head, PlainHead) and saved.head.generates_matrices:
        from llmcond.heads.base import ConditionCache

        cache = ConditionCache(saved.head)
    return Embedder(encoder, saved.view, saved.head, saved.reference, cache, fitted_on)


def base_encoder(encoder: Encoder) -> Encoder | None:
    """Load the encoder that an adapter was trained on; one that was not trained is its own base.

    Plain sentence embeddings, which conditions are compared with, are the base's: an adapter
    changes the vectors of texts without a condition too, and was not trained for those. None: all
    weights were trained, and what they began from is not recorded.

    Raises:
        LlmcondError: the base cannot be loaded.
    """
    base = resolve_base(encoder.resolved)
    if base is encoder.resolved:
        return encoder
    return None if base is None else LazyEncoder(base)()


def describe(embedder: Embedder) -> dict[str, Any]:
    """Return what an embedder is made of, as commands print it."""
    return {
        "encoder": embedder.encoder.name,
        "fingerprint": embedder.encoder.identity.fingerprint,
        "runtime": embedder.encoder.resolved.runtime,
        "dtype": embedder.encoder.identity.dtype,
        "prompt": embedder.view.name,
        "subtract": embedder.view.subtracts,
        "head": embedder.name,
        "fitted_on": embedder.fitted_on,
        "dim": embedder.dim,
        **guides_json(embedder.guides),
    }


def guides_json(guides: Mapping[Any, Guide]) -> dict[str, Any]:
    """Return what made guides, by their conditions, as commands print it; {}: there are none."""
    made = {str(condition): guide.to_json() for condition, guide in guides.items()}
    return {"guides": made} if made else {}
