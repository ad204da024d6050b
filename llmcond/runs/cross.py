"""A trained cross-encoder, applied to new text: it reads both sentences and the condition at once.

It has no embeddings: only what compares two texts can be asked of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llmcond.data.readers import described_source
from llmcond.data.rows import Rows
from llmcond.encoders import EncoderIdentity
from llmcond.encoders.spec import Orders
from llmcond.errors import UserError
from llmcond.log import log
from llmcond.records import check_record
from llmcond.runs.comparing import Comparing, Vectors
from llmcond.runs.embedder import Embedder, load_embedder
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.manifest import TrainedOn
from llmcond.runs.open import open_run

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.heads import FittedHead

#: What records call its head, and the head's folder in a run.
KIND: Final = "regression"
NAME: Final = "cross"
#: Rows whose vectors are in memory at a time.
_BLOCK = 8_192


@dataclass(frozen=True, slots=True, repr=False)
class CrossEncoder(Comparing):
    """The similarity of two sentences under a condition: a linear function of f([s1; s2; c]).

    Make one with :func:`load_cross_encoder`.

    Attributes:
        encoder: f.
        head: the linear function.
        orders: whether f([s2; s1; c]) counts as well, so that the order does not matter.
        fitted_on: the data that it was trained on.
    """

    encoder: Encoder
    head: FittedHead
    orders: Orders
    fitted_on: str = ""

    name = recipe = NAME
    is_fitted = True

    def __repr__(self) -> str:
        """Return what it is made of, in a line."""
        return f"CrossEncoder({self.encoder.name}, orders {self.orders})"

    def predict(self, rows: Rows) -> Vectors:
        """Return the predicted similarity of rows, (n,), with a progress bar."""
        return self.similarity(rows.sentence1, rows.sentence2, rows.condition, show_progress=True)

    def _compared(
        self,
        first: Sequence[tuple[str, str]],
        second: Sequence[tuple[str, str]],
        show_progress: bool,
    ) -> Vectors:
        sides = [(first, second), (second, first)][: 2 if self.orders == "both" else 1]
        rows = [(a, b, c) for side in sides for (a, c), (b, _) in zip(*side, strict=True)]
        predicted = np.empty(len(rows), dtype=np.float32)
        for start in range(0, len(rows), _BLOCK):
            block = rows[start : start + _BLOCK]
            vectors = self.encoder.encode_joined(block, show_progress=show_progress)
            predicted[start : start + _BLOCK] = self.head.transform(vectors)[:, 0]
        bad = np.flatnonzero(~np.isfinite(predicted))
        if len(bad):
            raise UserError(
                f"the encoder gave NaN or infinity for {rows[bad[0]][0][:80]!r}; try another dtype."
            )
        mean: Vectors = predicted.reshape(len(sides), len(first)).mean(axis=0)
        return mean


def load_cross_encoder(
    run: str | Path,
    *,
    orders: Orders | None = None,
    device: str = "auto",
    max_tokens_per_batch: int | None = None,
) -> CrossEncoder:
    """Load the cross-encoder that ``llmcond train-cross`` left in a run.

    Args:
        run: the run's folder.
        orders: ``both``: the mean of both orders of the sentences; ``given``: as they are given,
            in half the time. None: as it was trained.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        max_tokens_per_batch: the token budget of one forward pass; None: by the device.

    Raises:
        UserError: no such run, a run of another kind, or an encoder that has changed.
        LlmcondError: the encoder or the head cannot be loaded.
    """
    from llmcond.heads import load_head

    opened = open_run(Path(run), cross=True)
    if opened.cross is None:
        raise UserError(
            f"{run} holds no cross-encoder. Train one: llmcond train-cross --model "
            f"{opened.encoder_name} --run another one; what {run} holds is loaded by load_embedder."
        )
    orders = orders or opened.cross
    if orders not in ("both", "given"):
        raise UserError(f"orders is {orders!r}; expected 'both' or 'given'.")
    head, record = load_head(opened.head_folder(NAME))
    where = f"the head of {opened.folder}"
    check_record(record, TrainedOn, where, "Train it again.")
    theirs = EncoderIdentity.from_json(record["encoder"]["identity"], where)
    differences = theirs.differences(opened.identity)
    if head.kind != KIND:
        differences = [f"kind: {head.kind!r}, not {KIND!r}"]
    if differences:
        raise UserError(
            f"{where} was trained with another encoder: {'; '.join(differences)}. Train it again, "
            "or copy the whole folder."
        )
    resolved = opened.resolve_encoder(device, max_tokens_per_batch)
    fitted_on = described_source(opened.manifest["data"]["source"])
    return CrossEncoder(LazyEncoder(resolved)(), head, orders, fitted_on)


def load_comparing(
    folder: Path, head: str | None = None, prompt: str | None = None, device: str = "auto"
) -> Embedder | CrossEncoder:
    """Load what compares texts in a run, an embedder or a cross-encoder, and log what it is.

    Raises:
        UserError: as :func:`load_embedder`, or a head or prompt is named of a cross-encoder.
    """
    run = open_run(folder, cross=True)
    if not run.cross:
        return load_embedder(folder, head, prompt=prompt, device=device)
    if head or prompt:
        raise UserError(
            f"{folder} holds a cross-encoder, which has neither heads nor prompts. Leave out "
            "--head and --prompt."
        )
    loaded = load_cross_encoder(folder, device=device)
    log.info(
        f"model: {folder}, cross-encoder {run.encoder_name}, orders {loaded.orders}, trained on "
        f"{loaded.fitted_on}"
    )
    return loaded


def describe(cross: CrossEncoder) -> dict[str, Any]:
    """Return what a cross-encoder is made of, as commands print it."""
    return {
        "encoder": cross.encoder.name,
        "fingerprint": cross.encoder.identity.fingerprint,
        "head": cross.name,
        "orders": cross.orders,
        "fitted_on": cross.fitted_on,
    }
