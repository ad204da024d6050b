"""Extraction of data under a prompt, for all commands that need features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmcond.encoders import EncoderInput, ResolvedEncoder
from llmcond.encoders.spec import InputError, truncation_note
from llmcond.errors import UserError
from llmcond.features.extract import Chunking, Extraction, PlanExecutor, extract
from llmcond.features.missing import MissingCount
from llmcond.log import log
from llmcond.progress import ExtractionBar
from llmcond.prompts import Prompt
from llmcond.runs.run import Run

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoder
    from llmcond.features.store import FeatureStore


class LazyEncoder:
    """An encoder that is loaded at the first call.

    With ``execute``, inputs are encoded elsewhere, by encoders of the same identity.
    ``reported_truncation`` says whether the log has a line about long inputs, as one is enough for
    a command that encodes texts under several conditions.
    """

    reported_truncation = False

    def __init__(self, resolved: ResolvedEncoder, execute: PlanExecutor | None = None) -> None:
        self.resolved, self.execute = resolved, execute

    @cached_property
    def _encoder(self) -> Encoder:
        from llmcond.encoders.encoder import Encoder

        return Encoder(self.resolved)

    def __call__(self) -> Encoder:
        """Return the encoder."""
        return self._encoder

    @property
    def name(self) -> str:
        """The encoder's name in messages."""
        return self.resolved.checkpoint.name


def extract_prompt(
    store: FeatureStore,
    encoder: LazyEncoder,
    prompt: Prompt,
    inputs: Any,
    missing: MissingCount | None = None,
) -> Extraction:
    """Extract all inputs of a dataset under a prompt; see ``extract_inputs``.

    Raises:
        UserError: The encoder returned NaN or infinity; the message names the row.
        LlmcondError: The encoder failed, or the disk is full.
    """
    try:
        return extract_inputs(store, encoder, prompt.name, inputs, missing)
    except InputError as error:
        where = inputs.locate(error.item) if hasattr(inputs, "locate") else None
        if where is None:
            raise
        raise UserError(f"{where}, prompt {prompt.name}: {error}") from error


def extract_other_data(
    run: Run, prompts: Sequence[Prompt], inputs: Callable[[Prompt], Any], device: str
) -> FeatureStore:
    """Extract ``inputs`` of data other than the run's, and return the store that holds them.

    Raises:
        UserError: The run's encoder is missing or has changed, or as ``extract_prompt``.
    """
    encoder = LazyEncoder(run.resolve_encoder(device))
    store = run.store_for_other_texts(encoder.resolved.identity)
    for prompt in prompts:
        extract_prompt(store, encoder, prompt, inputs(prompt))
    return store


def extract_inputs(
    store: FeatureStore,
    encoder: LazyEncoder,
    name: str,
    inputs: Iterable[EncoderInput],
    missing: MissingCount | None = None,
) -> Extraction:
    """Extract inputs with a progress bar, and log a summary that begins with ``name``."""
    resolved = encoder.resolved
    with ExtractionBar() as bar:
        chunking = Chunking(by_prefix=resolved.shares_prefixes)
        extraction = extract(
            inputs, store, encoder, bar, chunking, missing=missing, execute=encoder.execute
        )
    summary = "nothing to encode, the vectors of all inputs are already stored"
    if extraction.n_computed:
        summary = (
            f"{extraction.n_computed:,} of {extraction.n_inputs:,} inputs encoded in "
            f"{extraction.seconds:.1f} s, {extraction.n_tokens / extraction.seconds:,.0f} tokens/s"
        )
    log.info(f"{name}: {summary}")
    if extraction.n_truncated and not encoder.reported_truncation:
        limit = f"{resolved.identity.max_length} tokens"
        log.info(truncation_note(extraction.n_truncated, limit))
        encoder.reported_truncation = True
    return extraction


def extract_run(
    run: Run, encoder: LazyEncoder, prompt: Prompt, missing: MissingCount | None = None
) -> tuple[Extraction, dict[str, Any]]:
    """Extract a run's data under a prompt. Return the extraction and its record in run.json."""
    resolved, inputs = encoder.resolved, run.task.inputs(run.data, prompt)
    extraction = extract_prompt(run.store(), encoder, prompt, inputs, missing)
    record = {
        "n_inputs": extraction.n_inputs,
        "n_computed": extraction.n_computed,
        "n_truncated": extraction.n_truncated,
        "max_length": resolved.identity.max_length,
        "device": resolved.device,
        "runtime": resolved.runtime,
        "share_prefixes": resolved.shares_prefixes,
    }
    run.record_prompt(prompt, record)
    return extraction, record
