"""What embeds texts: a run, or a bundled model, with one of its heads; and how it is found."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from llmcond.data.readers import described_source
from llmcond.errors import UserError
from llmcond.features.view import View
from llmcond.log import log
from llmcond.runs import AnyRun, Run, Saved, SavedEmbeddingHead, open_run
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.open import usual_run
from llmcond.runs.saved import zero_shot


@dataclass(frozen=True)
class EmbeddingModel:
    """A run with one of its heads, fitted or zero-shot. The encoder is not loaded yet.

    Attributes:
        device: that the encoder computes on: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    """

    run: Run
    head: SavedEmbeddingHead
    device: str = "auto"

    @classmethod
    def find(
        cls,
        run: str | Path | None = None,
        head: str | None = None,
        prompt: str | None = None,
        *,
        model: str | None = None,
        device: str = "auto",
        quiet: bool = False,
    ) -> Self:
        """Find what a user named, and log what it is, unless ``quiet``.

        ``run`` and ``model`` are those of :func:`llmcond.runs.open.usual_run`, ``head`` and
        ``prompt`` those of :func:`choose_head`.

        Raises:
            UserError: no such run or head, or the prompt is a control.
        """
        opened = open_run(usual_run(run, model))
        chosen = choose_head(opened, head, prompt)
        chosen.view.check_texts()
        if not quiet:
            log_model(opened, chosen, head)
        return cls(opened, chosen, device)

    @property
    def view(self) -> View:
        """Return what is encoded of a text and its condition."""
        return self.head.view

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything that decides the vectors, as records of embeddings hold it."""
        return {
            "encoder": self.run.identity.fingerprint,
            "prompt": {prompt.name: prompt.digest for prompt in self.view.prompts},
            "subtraction": self.view.subtract,
            "head": self.head.record["weights_sha256"],
        }

    @cached_property
    def encoder(self) -> LazyEncoder:
        """Return its encoder, loaded when it is called."""
        return LazyEncoder(self.run.resolve_encoder(self.device))


def choose_head(run: AnyRun, name: str | None, prompt: str | None = None) -> Saved[Any]:
    """Return the head that a name stands for.

    Args:
        run: whose head it is.
        name: a fitted head's, or its recipe's if that is fitted once; ``none``: zero-shot. None:
            the run's default head, or zero-shot where none is fitted.
        prompt: for zero-shot; None: the run's only one.

    Raises:
        UserError: no such head, several, or one that was fitted on another prompt than asked for.
    """
    wanted = name
    if wanted is None and (default := run.default_head()) is not None:
        wanted = default[0]
    if wanted is None or wanted == "none":
        views = run.zero_shot_views(run.prompt(prompt))
        return zero_shot(views[-1] if run.subtracts else views[0])
    names = run.full_head_names([wanted])
    if len(names) > 1:
        raise UserError(
            f"{run.folder} has several heads {wanted!r}: {', '.join(names)}. Give the full name."
        )
    chosen = run.load_applied_head(names[0])
    if prompt is not None and set(prompt.split("+")) != set(chosen.view.name.split("+")):
        raise UserError(
            f"the head {chosen.name} was fitted on the prompt {chosen.view.name}, not {prompt}. "
            "Leave out --prompt, or choose another --head."
        )
    return chosen


def log_model(run: AnyRun, chosen: Saved[Any], named: str | None) -> None:
    """Log in one line the model, the head and the prompt that are used.

    ``named`` is the head that the user named; None: why this one was chosen is logged too.
    """
    default = run.default_head()
    if not chosen.is_fitted:
        head = "zero-shot" if default else "zero-shot (no head is fitted)"
    else:
        head = f"head {chosen.name}"
        if named is None and default is not None:
            head += f" ({default[1]})"
    source = described_source(run.manifest["data"]["source"])
    if run.is_bundled:
        is_default = default is not None and chosen.name == default[0]
        parts = [f"{run.folder.name} (bundled)", "" if is_default else head]
    else:
        parts = [str(run.folder), f"encoder {run.encoder_name}", head]
    fitted = f"fitted on {source}" if chosen.is_fitted and parts[-1] else ""
    parts += [f"prompt {chosen.view.name}", fitted]
    log.info("model: %s", ", ".join(filter(None, parts)))
