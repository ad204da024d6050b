"""Previews of an encoder from its tokenizer and config, before its weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from llmcond.encoders.checkpoint_settings import CheckpointSettings
from llmcond.encoders.loading import (
    available_memory,
    build_on_meta,
    check_dense_and_adapter,
    config_of,
    default_token_budget,
    load_config,
    load_tokenizer,
    measure_footprint,
    token_embeddings,
    vector_width,
)
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.settings import PADDING_SIDE, STATED, KnownModel, explain_no_float16
from llmcond.encoders.spec import Dtype, EncoderInput, Quantize, get_pooling
from llmcond.encoders.tokenizing import InputTokenizer, check_token_ids

#: The number types and quantisations whose memory requirements are reported.
_PRECISIONS: list[tuple[Dtype, str]] = [("float32", "none")]
_PRECISIONS += [("bfloat16", quantize) for quantize in get_args(Quantize)]


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """An input as the encoder reads it.

    Attributes:
        label: the label that the input was given with.
        tokens: its tokens as strings, special tokens included.
        pooled: whether the vector is computed from each of these tokens.
    """

    label: str
    tokens: list[str]
    pooled: list[bool]


def tokenize_inputs(
    resolved: ResolvedEncoder, inputs: Sequence[tuple[str, EncoderInput]]
) -> list[TokenizedInput]:
    """Tokenise labelled inputs in the same way as extraction.

    Raises:
        UserError: the checkpoint has no tokenizer, or one that does not fit its vocabulary.
    """
    identity, checkpoint = resolved.identity, resolved.checkpoint
    config = load_config(checkpoint, identity.attention)
    tokenizer = InputTokenizer(load_tokenizer(checkpoint, config), identity, checkpoint.name)
    rows = tokenizer([item for _, item in inputs])
    check_token_ids(rows, len(token_embeddings(build_on_meta(config))), checkpoint.name)
    samples_read = []
    for (label, item), row in zip(inputs, rows, strict=True):
        routed = item.router is not None and not identity.routes_inside
        pooling = get_pooling("mean" if routed else identity.pooling)
        first, last = pooling.tokens(row.first, row.last, len(row.ids))
        first, last = max(first, row.first), min(last, row.last)
        pooled = [first <= position < last for position in range(len(row.ids))]
        samples_read.append(TokenizedInput(label, tokenizer.strings(row), pooled))
    return samples_read


def describe(resolved: ResolvedEncoder) -> dict[str, Any]:
    """Describe the settings of an encoder, and the memory that it needs on its device.

    Raises:
        UserError: its adapter was trained on another base, or peft is not installed.
    """
    identity, checkpoint = resolved.identity, resolved.checkpoint
    config = load_config(checkpoint, identity.attention)
    check_dense_and_adapter(resolved, build_on_meta(config))
    budget = resolved.options.max_tokens_per_batch or default_token_budget(resolved.device)
    settled = {name: getattr(identity, name) for name in (*STATED, "dtype", "quantize")}
    origin = {"name": checkpoint.name, "source": checkpoint.source, "assumed": [*resolved.assumed]}
    no_float16 = explain_no_float16(checkpoint.known, config.to_dict())
    prompts = CheckpointSettings(checkpoint.folder).prompts
    return (
        _known_facts(checkpoint.known)
        | {"no_float16": no_float16, "prompts": prompts}
        | settled
        | origin
        | _describe_size(config, resolved.device, budget, len(resolved.list_members()))
    )


def describe_known(known: KnownModel, device: str) -> dict[str, Any]:
    """Describe a known model from its entry alone, without any of its files."""
    config = config_of(known.architecture, known.computed_as)
    settled = {**known.all_settings, "dtype": None, "quantize": "none"}
    origin = {"name": known.name, "source": known.repo, "assumed": []}
    return (
        _known_facts(known)
        | settled
        | origin
        | _describe_size(config, device, default_token_budget(device))
    )


def _known_facts(known: KnownModel | None) -> dict[str, Any]:
    """Return the facts about a known model that are not settings; None for unknown models."""
    facts = {name: getattr(known, name, None) for name in ("repo", "licence", "gated")}
    return facts | {
        "other_poolings": list(known.poolings[1:]) if known else None,
        "no_float16": explain_no_float16(known, known.architecture) if known else "",
        "prompts": {},
        "padding_side": PADDING_SIDE,
    }


def _describe_size(config: Any, device: str, tokens: int, members: int = 1) -> dict[str, Any]:
    """Describe the size of a network; an ensemble has one for each member."""
    size, free = measure_footprint(build_on_meta(config)), available_memory(device)
    memory: list[dict[str, Any]] = []
    for dtype, quantize in _PRECISIONS:
        weights = size.weights(dtype, quantize)
        loading = (members - 1) * weights + size.loading(dtype, quantize)
        weights *= members
        batch = size.batch(dtype, tokens)
        kind = {"dtype": dtype, "quantize": quantize, "batch_tokens": tokens}
        row = {"loading": loading, "weights": weights, "batch": batch}
        memory.append({**kind, **row, "fits": max(loading, weights + batch) <= free})
    return {
        "architecture": str(config.model_type),
        "layers": int(config.num_hidden_layers),
        "width": members * vector_width(config),
        "n_parameters": members * size.n_parameters,
        "device": device,
        "free": free,
        "memory": memory,
    }
