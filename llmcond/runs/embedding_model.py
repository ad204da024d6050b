"""The model that embeds texts: a run or a bundled model with one of its heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from llmcond.data.readers import describe_source
from llmcond.errors import UserError, nearest
from llmcond.features.view import FeatureView
from llmcond.log import log
from llmcond.runs import AnyRun, Run, RunEmbeddingHead, RunHead, open_run
from llmcond.runs.extraction import LazyEncoder
from llmcond.runs.open import resolve_run
from llmcond.runs.run_heads import zero_shot_head


@dataclass(frozen=True)
class EmbeddingModel:
    """A run with one of its heads, fitted or zero-shot. The encoder is not loaded yet.

    Attributes:
        run: The run, or the bundled model, which has the layout of a run.
        head: The head.
        device: Device of the encoder: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    """

    run: Run
    head: RunEmbeddingHead
    device: str = "auto"

    @classmethod
    def find(
        cls,
        run: str | Path | None = None,
        head: str | None = None,
        prompt: str | None = None,
        *,
        model: str | None = None,
        revision: str | None = None,
        device: str = "auto",
        quiet: bool = False,
    ) -> Self:
        """Find the model that a user named, and log which one it is unless ``quiet``.

        ``run``, ``model`` and ``revision`` are as for ``llmcond.runs.open.resolve_run``, ``head``
        and ``prompt`` as for ``choose_head``.

        Raises:
            UserError: The run or head does not exist, or the prompt is a control.
            LlmcondError: The hub cannot be reached.
        """
        opened = open_run(resolve_run(run, model, revision))
        saved = choose_head(opened, head, prompt)
        saved.view.check_texts()
        if not quiet:
            log_model(opened, saved, head)
        return cls(opened, saved, device)

    @property
    def view(self) -> FeatureView:
        """The features that the head takes for a text and its condition."""
        return self.head.view

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the vectors, as records of embeddings store it."""
        return {
            "encoder": self.run.identity.fingerprint,
            "prompt": {prompt.name: prompt.digest for prompt in self.view.prompts},
            "subtraction": self.view.subtract,
            "head": self.head.record["weights_sha256"],
        }

    @cached_property
    def encoder(self) -> LazyEncoder:
        """The encoder, which is loaded at its first call."""
        return LazyEncoder(self.run.resolve_encoder(self.device))


def choose_head(run: AnyRun, name: str | None, prompt: str | None = None) -> RunHead[Any]:
    """Load the head that a name refers to.

    Args:
        run: The run of the head.
        name: The name of a fitted head, or of its recipe if only one head was fitted with it.
            ``none``: zero-shot, also as ``none@PROMPT``. None: the run's default head, or
            zero-shot if none is fitted.
        prompt: The prompt of zero-shot; None: the run's only prompt.

    Raises:
        UserError: No head or several heads match, or the head was fitted on another prompt.
    """
    reference = name
    if reference is None and (default := run.default_head()) is not None:
        reference = default[0]
    # A head that was trained as zero-shot has such a name too.
    if (reference or "").startswith("none@") and reference not in run.head_names():
        if prompt is None:
            return _find_zero_shot(run, str(reference))
        reference = "none"
    if reference is None or reference == "none":
        return zero_shot_head(run.zero_shot_view(run.prompt(prompt)))
    names = run.full_head_names([reference])
    if len(names) > 1:
        raise UserError(
            f"{run.folder} has several heads {reference!r}: {', '.join(names)}. Give the full name."
        )
    saved = run.load_applied_head(names[0])
    if prompt is not None and set(prompt.split("+")) != set(saved.view.name.split("+")):
        raise UserError(
            f"the head {saved.name} was fitted on the prompt {saved.view.name}, not {prompt}. "
            "Leave out --prompt, or choose another --head."
        )
    return saved


def _find_zero_shot(run: AnyRun, name: str) -> RunHead[Any]:
    """Return the zero-shot head of a name such as ``none@pair-cond``.

    Raises:
        UserError: The run has no features of that prompt.
    """
    views = [view for prompt in run.prompts().values() for view in run.zero_shot_views(prompt)]
    heads = {head.name: head for head in map(zero_shot_head, views)}
    if name not in heads:
        raise UserError(f"{run.folder} has no {name}. {nearest(name, heads)}")
    return heads[name]


def log_model(run: AnyRun, saved: RunHead[Any], requested: str | None) -> None:
    """Log the model, the head and the prompt in one line.

    ``requested`` is the head that the user named. If it is None, the reason why this head was
    chosen is logged as well.
    """
    default = run.default_head()
    if not saved.is_fitted:
        head = "zero-shot" if default else "zero-shot (no head is fitted)"
    else:
        head = f"head {saved.name}"
    if requested is None and default is not None:
        head += f" ({default[1]})"
    source = describe_source(run.manifest["data"]["source"])
    if run.is_bundled:
        is_default = default is not None and saved.name == default[0]
        parts = [run.display_name, "" if is_default else head]
    elif run.is_encoder:
        parts = [f"encoder {run.encoder_name}, zero-shot"]
    else:
        parts = [run.display_name, f"encoder {run.encoder_name}", head]
    fitted = f"fitted on {source}" if saved.is_fitted and parts[-1] else ""
    parts += [f"prompt {saved.view.name}", fitted]
    log.info("model: %s", ", ".join(filter(None, parts)))
