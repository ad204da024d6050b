"""What an encoder will do, told from its tokenizer and config before anything large is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from llmcond.encoders.engine.interface import check_ids
from llmcond.encoders.engine.nv_embed import read_config
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.known import PADDING_SIDE, KnownModel
from llmcond.encoders.loading.architecture import (
    build_on_meta,
    load_config,
    load_tokenizer,
    token_embeddings,
)
from llmcond.encoders.loading.device import default_token_budget
from llmcond.encoders.loading.loading import check_parts
from llmcond.encoders.loading.memory import available, footprint
from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.settings import STATED
from llmcond.encoders.spec import Dtype, EncoderInput

#: The precisions that a check tells the memory of.
_PRECISIONS: tuple[tuple[Dtype, str], ...] = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "8bit"),
    ("bfloat16", "4bit"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """An input as the encoder reads it: its tokens, and of which of them its vector is made."""

    label: str
    tokens: list[str]
    pooled: list[bool]


def samples(resolved: ResolvedEncoder, inputs: Sequence[tuple[str, EncoderInput]]) -> list[Sample]:
    """Tokenise labelled inputs as extraction would.

    Raises:
        UserError: the checkpoint has no tokenizer that fits it.
    """
    identity, checkpoint = resolved.identity, resolved.checkpoint
    config = load_config(checkpoint, identity.attention)
    tokenizer = InputTokenizer(load_tokenizer(checkpoint, config), identity, checkpoint.name)
    rows = tokenizer([item for _, item in inputs])
    check_ids(rows, len(token_embeddings(build_on_meta(config))), checkpoint.name)
    found = []
    for (label, item), row in zip(inputs, rows, strict=True):
        routed = item.router is not None and not identity.routes_inside
        pooling = pooling_named("mean" if routed else identity.pooling)
        first, last = pooling.tokens(row.first, row.last, len(row.ids))
        first, last = max(first, row.first), min(last, row.last)
        pooled = [first <= position < last for position in range(len(row.ids))]
        found.append(Sample(label, tokenizer.strings(row), pooled))
    return found


def describe(resolved: ResolvedEncoder) -> dict[str, Any]:
    """Return what is settled of an encoder, and the memory it needs on its device.

    Raises:
        UserError: it has an adapter that does not belong to it, or peft is not installed.
    """
    identity, checkpoint = resolved.identity, resolved.checkpoint
    config = load_config(checkpoint, identity.attention)
    check_parts(resolved, build_on_meta(config))
    budget = resolved.options.max_tokens_per_batch or default_token_budget(resolved.device)
    return {
        **_facts(checkpoint.known, vars(identity)),
        "name": checkpoint.name,
        "source": checkpoint.source,
        "pooling": identity.pooling,
        "dtype": identity.dtype,
        "quantize": identity.quantize,
        "assumed": list(resolved.assumed),
        **_size(config, resolved.device, budget),
    }


def describe_known(known: KnownModel, device: str) -> dict[str, Any]:
    """Return what is known of a model without any of its files."""
    architecture = dict(known.architecture)
    nv_embed = architecture["model_type"] == "nvembed"
    config = read_config(architecture) if nv_embed else AutoConfig.for_model(**architecture)
    return {
        **_facts(known, known.stated),
        "name": known.name,
        "source": known.repo,
        "pooling": known.poolings[0],
        "dtype": None,
        "quantize": "none",
        "assumed": [],
        **_size(config, device, default_token_budget(device)),
    }


def _facts(known: KnownModel | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a model, and what its file and an encoder's identity both say."""
    facts = {name: getattr(known, name, None) for name in ("repo", "licence", "gated")}
    facts |= {name: settings[name] for name in STATED if name != "pooling"}
    return facts | {
        "other_poolings": list(known.poolings[1:]) if known else None,
        "no_float16": known.no_float16 if known else "",
        "padding_side": PADDING_SIDE,
    }


def _size(config: Any, device: str, tokens: int) -> dict[str, Any]:
    size, free = footprint(build_on_meta(config)), available(device)
    memory: list[dict[str, Any]] = []
    for dtype, quantize in _PRECISIONS:
        row = {
            "loading": size.loading(dtype, quantize),
            "weights": size.weights(dtype, quantize),
            "batch": size.batch(dtype, tokens),
        }
        fits = max(row["loading"], row["weights"] + row["batch"]) <= free
        kind = {"dtype": dtype, "quantize": quantize, "batch_tokens": tokens}
        memory.append({**kind, **row, "fits": fits})
    return {
        "architecture": str(config.model_type),
        "layers": int(config.num_hidden_layers),
        "width": int(config.hidden_size),
        "n_parameters": size.n_parameters,
        "device": device,
        "free": free,
        "memory": memory,
    }
