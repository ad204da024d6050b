"""A model with one condition, for programs whose interfaces have no argument for a condition."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.files import digest_text
from llmcond.base.text import Condition, as_condition, condition_text, ignored_by
from llmcond.runs.embedder import Embedder, EmbeddingModel
from llmcond.runs.open import resolve_run


@dataclass(frozen=True)
class ConditionedModel:
    """A model with one condition.

    It holds only settings, so that it can be pickled and copied. The encoder is loaded when the
    first text is embedded, and all objects with the same model share it.

    Attributes:
        condition: The condition, or a ``Condition`` with example values or several wordings.
        model: A name or folder, as for ``llmcond.load_embedder``.
        head: The name of a head, as for ``llmcond.load_embedder``.
        prompt: The prompt of zero-shot.
        revision: A branch, tag or commit of a model on the hub.
        truncate_dim: The number of leading dimensions that embeddings keep. None: all of them.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: The condition is empty or ignores others.
    """

    condition: str
    model: str | Path | None = None
    head: str | None = None
    prompt: str | None = None
    revision: str | None = None
    truncate_dim: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        condition = as_condition(self.condition)
        if ignored := ignored_by(condition):
            raise UserError(
                f"what {', '.join(ignored)} is must be found from all texts, which this program "
                "does not show at once. Use `llmcond index --ignore` or BERTopic's backend, or "
                "ignore nothing."
            )
        object.__setattr__(self, "condition", condition)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only, without the embedder."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def embedder(self) -> Embedder:
        """The embedder, loaded at first use.

        Raises:
            UserError, LlmcondError: As ``llmcond.load_embedder``.
        """
        model = self._model
        key = (*model.find_arguments.items(), ("device", self.device))
        with _loading:  # so that threads do not load the same model at once
            if key not in _loaded or _loaded[key][0] != model.identity:  # perhaps fitted again
                _loaded[key] = model.identity, model.load()
        return replace(_loaded[key][1], truncate_dim=self.truncate_dim)

    @property
    def fingerprint(self) -> str:
        """A digest of all that determines the vectors: the model, the condition and their size."""
        identity = json.dumps(self._model.identity, sort_keys=True)
        return digest_text(identity, str(self.condition), str(self.truncate_dim))

    def embed(self, texts: Iterable[str], *, show_progress: bool = False) -> NDArray[np.float32]:
        """Embed texts under the condition.

        Args:
            texts: n texts.
            show_progress: Whether to show a progress bar on standard error.

        Returns:
            (n, k) float32 with unit norm, as ``Embedder.encode`` returns them.

        Raises:
            UserError, LlmcondError: As ``Embedder.encode``.
        """
        return self.embedder.encode(texts, self.condition, show_progress=show_progress)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that determine the vectors, and the fingerprint."""
        arguments = dict(self._model.find_arguments)
        return {
            "condition": condition_text(self.condition),
            "values": list(getattr(self.condition, "values", ())),
            "model": arguments.pop("run", None) or arguments.pop("model"),
            **arguments,
            "truncate_dim": self.truncate_dim,
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_json(cls, settings: Mapping[str, Any], device: str = "auto") -> Self:
        """Create an object from the output of ``to_json``, or from a part of it.

        Args:
            settings: The condition, and optionally its example values and any other arguments. If
                they include a fingerprint, it is compared with that of the model.
            device: The device, unless the settings include it.

        Raises:
            UserError: The settings have no condition or include an unknown one, or the model has
                changed since the fingerprint was computed.
        """
        others = dict(settings)
        try:
            text, values = others.pop("condition"), others.pop("values", ())
            fingerprint = others.pop("fingerprint", None)
            condition = Condition(text, values) if values else text
            model = cls(condition, **{"device": device, **others})
        except (KeyError, TypeError) as error:
            raise UserError(
                f"the settings {shortened_repr(settings)} are not those of an llmcond model with a "
                f"condition ({error})."
            ) from error
        if fingerprint not in (None, model.fingerprint):
            raise UserError(
                f"the vectors under {str(model.condition)!r} are of another model than "
                f"{model.model} is now: its weights, head or prompt have changed. Embed the texts "
                "again."
            )
        return model

    @cached_property  # so that the fingerprint is that of the vectors, also after another fit
    def _model(self) -> EmbeddingModel:
        run = resolve_run(self.model, revision=self.revision)
        return EmbeddingModel.find(run, self.head, self.prompt, device=self.device, quiet=True)


#: The identities and the embedders of the models that were loaded.
_loaded: dict[tuple[tuple[str, str], ...], tuple[dict[str, Any], Embedder]] = {}
_loading = Lock()
