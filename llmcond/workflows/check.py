"""The description of an encoder before its weights are downloaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmcond.encoders import EncoderInput, EncoderOptions, find_model
from llmcond.encoders.checkpoints.checkpoint import find_checkpoint
from llmcond.encoders.resolve import resolve_checkpoint
from llmcond.errors import LlmcondError
from llmcond.prompts import load_prompt
from llmcond.system import choose_device

_SENTENCE = "Two people ride bicycles up a steep road."
_CONDITION = "the number of people"


def check_model(name: str, options: EncoderOptions) -> tuple[dict[str, Any], LlmcondError | None]:
    """Describe a model, without downloading its weights.

    The settings and the tokenizer of a model on the hub are downloaded. If they cannot be, a model
    from the list of known models is described by its entry there.

    Args:
        name: the model's name on the hub, its folder, or the name of a known model.
        options: the options to encode with.

    Returns:
        The description, and the error that left it incomplete; None if it is complete.

    Raises:
        LlmcondError: the model cannot be read and is not a known one.
    """
    known, device = find_model(name), choose_device(options.device)
    try:
        checkpoint = find_checkpoint(name, options.revision, options.like)
    except LlmcondError as error:
        if known is None:
            raise
        from llmcond.encoders.inspect import describe_known

        report = describe_known(known, device)
        return {**report, "prompt": None, "samples": [], "complete": False}, error
    resolved = resolve_checkpoint(checkpoint, options, device, identify=False)
    # PyTorch is imported after everything that may be wrong has been reported.
    from llmcond.encoders.inspect import describe, tokenize_inputs

    report = describe(resolved)
    prompt = load_prompt(resolved.default_prompt)
    inputs = [
        ("conditional", prompt.conditional.render(_SENTENCE, _CONDITION)),
        ("unconditional", prompt.unconditional.render(_SENTENCE, _CONDITION)),
    ]
    if resolved.identity.instruction_format:
        inputs.append(("no instruction", EncoderInput("", _CONDITION)))
    rendered = [asdict(sample) for sample in tokenize_inputs(resolved, inputs)]
    return {**report, "prompt": prompt.name, "samples": rendered, "complete": True}, None
