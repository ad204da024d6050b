"""Describe an encoder before it is downloaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmcond.encoders import EncoderInput, EncoderOptions, find_model
from llmcond.encoders.checkpoints.checkpoint import find_checkpoint
from llmcond.encoders.resolve import settle
from llmcond.errors import LlmcondError
from llmcond.prompts import load_prompt

_SENTENCE = "Two people ride bicycles up a steep road."
_CONDITION = "the number of people"


def check_model(name: str, options: EncoderOptions) -> tuple[dict[str, Any], LlmcondError | None]:
    """Return what is known of a model, and what stood in the way of knowing all.

    Of a model on the hub, its settings and tokenizer are downloaded, never its weights. Where they
    cannot be had, a known model is described by what is known of it.

    Raises:
        LlmcondError: nothing is known of it.
    """
    from llmcond.encoders.inspect import describe, describe_known, samples
    from llmcond.system import choose_device

    known, device = find_model(name), choose_device(options.device)
    try:
        checkpoint = find_checkpoint(name, options.revision, options.like)
    except LlmcondError as error:
        if known is None:
            raise
        report = describe_known(known, device)
        return {**report, "prompt": None, "samples": [], "complete": False}, error
    resolved = settle(checkpoint, options, device, identify=False)
    report = describe(resolved)
    prompt = load_prompt(resolved.default_prompt)
    inputs = [
        ("conditional", prompt.conditional.render(_SENTENCE, _CONDITION)),
        ("unconditional", prompt.unconditional.render(_SENTENCE, _CONDITION)),
    ]
    if resolved.identity.instruction_format:
        inputs.append(("no instruction", EncoderInput("", _CONDITION)))
    drawn = [asdict(sample) for sample in samples(resolved, inputs)]
    return {**report, "prompt": prompt.name, "samples": drawn, "complete": True}, None
