"""Extraction of data under a prompt, as all commands that need features do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmcond.encoders import EncoderInput, ResolvedEncoder
from llmcond.encoders.spec import CUT, InputError
from llmcond.errors import UserError
from llmcond.features.extract import Chunking, Execute, Extraction, extract
from llmcond.features.missing import Missing
from llmcond.log import log
from llmcond.progress import ExtractionBar
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import PromptInputs
from llmcond.runs.kind import inputs_of
from llmcond.runs.run import AnyRun

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.features.store import FeatureStore


class LazyEncoder:
    """Loads an encoder when it is first called, and keeps it; ``before`` is done just before.

    With ``execute``, what is extracted is encoded elsewhere, by encoders like it. ``processes`` is
    how many processes, this one included, extract the same inputs.
    """

    def __init__(
        self,
        resolved: ResolvedEncoder,
        before: Callable[[], None] = lambda: None,
        execute: Execute | None = None,
        processes: int = 1,
    ) -> None:
        self.resolved, self.execute, self._before = resolved, execute, before
        self.processes = processes

    @cached_property
    def _encoder(self) -> Encoder:
        from llmcond.encoders.encoder import Encoder

        self._before()
        return Encoder(self.resolved)

    def __call__(self) -> Encoder:
        """Return the encoder."""
        return self._encoder

    @property
    def name(self) -> str:
        """Return the name that messages call it by."""
        return self.resolved.checkpoint.name


def extract_prompt(
    store: FeatureStore,
    encoder: LazyEncoder,
    prompt: Prompt,
    inputs: PromptInputs,
    missing: Missing | None = None,
) -> Extraction:
    """Extract all inputs of some data under a prompt; see :func:`extract_inputs`.

    Raises:
        UserError: the encoder gave NaN or infinity, with the row that made it.
        LlmcondError: the encoder fails, or the disk is full.
    """
    try:
        return extract_inputs(store, encoder, prompt.name, inputs, missing)
    except InputError as error:
        where = inputs.where(error.item)
        if where is None:
            raise
        raise UserError(f"{where}, prompt {prompt.name}: {error}") from error


def extract_others(
    run: AnyRun, prompts: Sequence[Prompt], inputs: Callable[[Prompt], PromptInputs], device: str
) -> FeatureStore:
    """Return a store with the features of other data than the run's, whose ``inputs`` are given.

    Raises:
        UserError: the run's encoder is gone or has changed, or as of :func:`extract_prompt`.
    """
    store, encoder = run.store_for_others(), LazyEncoder(run.resolve_encoder(device))
    for prompt in prompts:
        extract_prompt(store, encoder, prompt, inputs(prompt))
    return store


def extract_inputs(
    store: FeatureStore,
    encoder: LazyEncoder,
    name: str,
    inputs: Iterable[EncoderInput],
    missing: Missing | None = None,
) -> Extraction:
    """Extract inputs, with a progress bar and a message that says ``name`` and what was done."""
    resolved, processes, before = encoder.resolved, encoder.processes, len(store)

    def stored() -> int:
        return len(store) - before

    with ExtractionBar(processes=processes, stored=stored if processes > 1 else None) as bar:
        chunking = Chunking(by_prefix=resolved.shares_prefixes)
        done = extract(
            inputs, store, encoder, bar, chunking, missing=missing, execute=encoder.execute
        )
    what = "nothing to encode; the vectors of all inputs are stored"
    if done.n_computed:
        n_encoded = stored() if processes > 1 else done.n_computed
        what = f"{n_encoded:,} of {done.n_inputs:,} inputs encoded in {done.seconds:.1f} s"
        if processes > 1:
            what += f" by {processes} processes; this one encoded {done.n_computed:,} of them"
        what += f", {done.n_tokens / done.seconds:,.0f} tokens/s"
    cut = (
        f"; {done.n_truncated:,} inputs are longer than {resolved.identity.max_length} tokens: "
        f"{CUT}"
        if done.n_truncated
        else ""
    )
    log.info(f"{name}: {what}{cut}")
    return done


def extract_own(
    run: AnyRun, encoder: LazyEncoder, prompt: Prompt, missing: Missing | None = None
) -> tuple[Extraction, dict[str, Any]]:
    """Extract a run's own data under a prompt; return that with what the manifest keeps of it."""
    resolved, inputs = encoder.resolved, inputs_of(run.task, run.data, prompt)
    done = extract_prompt(run.store(), encoder, prompt, inputs, missing)
    record = {
        "n_inputs": done.n_inputs,
        "n_computed": done.n_computed,
        "n_truncated": done.n_truncated,
        "max_length": resolved.identity.max_length,
        "device": resolved.device,
        "runtime": resolved.runtime,
        "share_prefixes": resolved.shares_prefixes,
    }
    run.record_prompt(prompt, record)
    return done, record
