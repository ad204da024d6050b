"""A trained cross-encoder, which reads both sentences and the condition together.

It has no embeddings, so it can only compare two texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llmcond.base.errors import UserError
from llmcond.base.output import log
from llmcond.base.records import check_record
from llmcond.base.text import ignored_by
from llmcond.data.readers import describe_source
from llmcond.encoders import EncoderIdentity
from llmcond.encoders.spec import Orders, check_finite
from llmcond.features.view import WordingRows
from llmcond.runs.embedder import Embedder, load_embedder
from llmcond.runs.open import LazyEncoder, open_run
from llmcond.runs.run import TrainedHeadRecord
from llmcond.runs.similarity import (
    Explanation,
    SimilarityModel,
    Vectors,
    as_conditions,
    leave_one_out,
)

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.heads import FittedHead

#: The kind of the head in ``head.json``, and the name of the head's folder in a run.
KIND: Final = "regression"
NAME: Final = "cross"
#: The number of rows whose vectors are in memory at a time.
_BLOCK = 8_192


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class CrossEncoder(SimilarityModel):
    """A cross-encoder: similarity under a condition as a linear function of f([s1; s2; c]).

    Load one with ``load_cross_encoder``, which has an example.

    Attributes:
        encoder: The encoder f.
        head: The linear function.
        orders: ``both`` averages the predictions for [s1; s2; c] and [s2; s1; c], so that the
            order of the sentences does not matter. ``given`` reads the given order only.
        fitted_on: The source of the data that it was trained on.

    Examples:
        >>> import llmcond
        >>> data = [
        ...     {"sentence1": f"{n} dogs run.", "sentence2": f"{n} cats run.",
        ...      "condition": condition, "label": label}
        ...     for n in range(20)
        ...     for condition, label in (("the animal", 1), ("the action", 5))
        ... ]
        >>> result = llmcond.train_cross(model="minilm", data=data, run="pets", epochs=1)
        >>> cross_encoder = llmcond.load_cross_encoder("pets")
        >>> cross_encoder.similarity(["A dog eats."], ["A cat eats."], "the animal").shape
        (1,)
    """

    encoder: Encoder
    head: FittedHead
    orders: Orders
    fitted_on: str = ""

    name = recipe = NAME
    is_fitted = True

    def __repr__(self) -> str:
        """Return the encoder's name and the sentence order in one line."""
        return f"CrossEncoder({self.encoder.name}, orders {self.orders})"

    def explain(
        self, sentence: str, conditions: str | Iterable[str], *, to: str | None = None
    ) -> Explanation:
        """Return the contribution of each token of a sentence to its similarity to another one.

        The contribution is how much the similarity falls if the sentence is encoded without the
        token (the method ``leave-one-out``).

        Args:
            sentence: The sentence.
            conditions: One condition, or several.
            to: The other sentence.

        Returns:
            The explanation.

        Raises:
            UserError: There is no other sentence, a text is empty, or the sentence has only one
                token.
            LlmcondError: The encoder returned NaN, or ran out of memory.
        """
        if to is None:
            raise UserError(
                "a cross-encoder has no embeddings, so only a similarity can be explained. Give a "
                "second sentence (--to SENTENCE)."
            )
        names = as_conditions(conditions)
        explanation = leave_one_out(self, sentence, names, to)
        return replace(explanation, about=describe(self))

    def _compute_similarity(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        sides = [(first, second), (second, first)][: 2 if self.orders == "both" else 1]
        ignoring = next((c for _, c in first if ignored_by(c)), None)
        if ignoring is not None:
            raise UserError(
                f"a cross-encoder has no embeddings, so {str(ignoring)!r} cannot ignore anything. "
                "Give the condition alone, or use an embedder."
            )
        both = [pair for side in sides for pair in zip(*side, strict=True)]
        pairs: Any = [((a, b), c) for (a, c), (b, _) in both]
        worded = WordingRows.of(pairs)
        rows = [(*pair, c) for pair, c in worded.rows]
        predicted = np.empty(len(rows), dtype=np.float32)
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            vectors = self.encoder.encode_joined(block, show_progress=show_progress)
            predicted[start : start + _BLOCK] = self.head.transform(vectors)[:, 0]
        check_finite(predicted[:, None], rows, "the head", "Train the cross-encoder again.")
        means = worded.mean(predicted[:, None], normalize=False)
        mean: Vectors = means.reshape(len(sides), len(first)).mean(axis=0)
        return mean


def load_cross_encoder(
    run: str | Path,
    *,
    orders: Orders | None = None,
    device: str = "auto",
    max_tokens_per_batch: int | None = None,
) -> CrossEncoder:
    """Load the cross-encoder that ``llmcond train-cross`` saved in a run.

    Args:
        run: The run's folder.
        orders: ``both`` averages the predictions for both orders of the sentences. ``given`` reads
            the given order only, in half the time. None: the setting that it was trained with.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        max_tokens_per_batch: The token budget of one forward pass. None: chosen for the device.

    Returns:
        The cross-encoder.

    Raises:
        UserError: The run does not exist or holds no cross-encoder, or the encoder has changed.
        LlmcondError: The encoder or the head cannot be loaded.

    Examples:
        >>> import llmcond
        >>> data = [
        ...     {"sentence1": f"{n} dogs run.", "sentence2": f"{n} cats run.",
        ...      "condition": condition, "label": label}
        ...     for n in range(20)
        ...     for condition, label in (("the animal", 1), ("the action", 5))
        ... ]
        >>> result = llmcond.train_cross(model="minilm", data=data, run="pets", epochs=1)
        >>> llmcond.load_cross_encoder("pets")
        CrossEncoder(pets, orders both)
    """
    from llmcond.heads import load_head

    opened = open_run(Path(run), cross=True)
    if opened.cross is None:
        raise UserError(
            f"{run} holds no cross-encoder. Load it with load_embedder, or train a cross-encoder "
            f"in another run: llmcond train-cross --model {opened.encoder_name} --run DIR"
        )
    orders = orders or opened.cross
    if orders not in ("both", "given"):
        raise UserError(f"orders is {orders!r}; expected 'both' or 'given'.")
    head, record = load_head(opened.head_folder(NAME))
    where = f"the head of {opened.folder}"
    check_record(record, TrainedHeadRecord, where, "Train it again.")
    head_identity = EncoderIdentity.from_json(record["encoder"]["identity"], where)
    differences = head_identity.differences(opened.identity)
    if head.kind != KIND:
        differences = [f"kind: {head.kind!r}, not {KIND!r}"]
    if differences:
        raise UserError(
            f"{where} was trained with another encoder: {'; '.join(differences)}. Train it again, "
            "or copy the whole run folder."
        )
    resolved = opened.resolve_encoder(device, max_tokens_per_batch)
    fitted_on = describe_source(opened.manifest["data"]["source"])
    return CrossEncoder(LazyEncoder(resolved)(), head, orders, fitted_on)


def load_similarity_model(
    run: Path, head: str | None = None, prompt: str | None = None, device: str = "auto"
) -> Embedder | CrossEncoder:
    """Load the embedder or the cross-encoder of a run, and log which one it is.

    Raises:
        UserError: As ``load_embedder``, or a head or prompt was named for a cross-encoder.
    """
    opened = open_run(run, cross=True)
    if not opened.cross:
        return load_embedder(run, head, prompt=prompt, device=device)
    if head or prompt:
        raise UserError(
            f"{run} holds a cross-encoder, which has neither heads nor prompts. Leave out "
            "--head and --prompt."
        )
    loaded = load_cross_encoder(run, device=device)
    log.info(
        f"model: {run}, cross-encoder {opened.encoder_name}, orders {loaded.orders}, trained on "
        f"{loaded.fitted_on}"
    )
    return loaded


def describe(cross: CrossEncoder) -> dict[str, Any]:
    """Return a description of a cross-encoder for the output of commands."""
    return {
        "encoder": cross.encoder.name,
        "fingerprint": cross.encoder.identity.fingerprint,
        "head": cross.name,
        "orders": cross.orders,
        "fitted_on": cross.fitted_on,
    }
