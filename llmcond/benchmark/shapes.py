"""Encoders with a known model's architecture and random weights, and texts to run them on.

Speed and memory do not depend on the values of weights. Random weights are generated on the device,
tensor by tensor. Only a config and a tokenizer of a few hundred KiB are on disk.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from llmcond.encoders import EncoderOptions
from llmcond.encoders.checkpoint import Checkpoint
from llmcond.encoders.resolve import ResolvedEncoder, resolve_checkpoint
from llmcond.encoders.settings import MODELS
from llmcond.encoders.spec import EncoderInput

Shape = Literal["nv-embed-v2", "mistral-7b", "qwen2-7b", "xlm-r-large", "minilm"]
#: The checks to run: ``quick`` has a few checks of each timed encoder, ``all`` also those on small
#: encoders.
Level = Literal["none", "quick", "all"]
#: The known model of each shape.
SHAPES: Mapping[Shape, str] = {
    "nv-embed-v2": "nvidia/NV-Embed-v2",
    "mistral-7b": "Salesforce/SFR-Embedding-Mistral",
    "qwen2-7b": "Alibaba-NLP/gte-Qwen2-7B-instruct",
    "xlm-r-large": "intfloat/multilingual-e5-large-instruct",
    "minilm": "minilm",
}
#: The settings in which a small encoder differs from the full architecture. Attention heads have
#: the size 64, which kernels support well.
_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8_192,
}
_SMALL_LATENTS = {
    "num_latents_value": 16,
    "num_cross_heads": 2,
    "cross_dim_head": 64,
    "hidden_dim": 256,
    "latent_dim": 256,
}
#: The order gives <pad> the id that has no position in XLM-R's networks.
_SPECIAL = ("<unk>", "<pad>", "<s>", "</s>", "<|endoftext|>")
_INSTRUCTION = "Retrieve semantically similar texts to the Condition, given the Sentence: {}"
_SAMPLE = Path(__file__).parents[1] / "data" / "sample" / "train.csv"


def random_encoder(
    shape: Shape,
    folder: Path,
    options: EncoderOptions,
    device: str,
    *,
    small: bool = False,
    init_device: str | None = None,
) -> ResolvedEncoder:
    """Resolve an encoder of a shape without loading it, and write its files into ``folder``.

    Random weights are generated on ``init_device``, or else on ``device``. If they are generated on
    the CPU, they are the same for every device.
    """
    known = next(model for model in MODELS if model.name == SHAPES[shape])
    shape_folder = folder / (f"{shape}-small" if small else shape)
    if not shape_folder.is_dir():
        make_tokenizer(shape_folder)
        (shape_folder / "config.json").write_text(
            json.dumps(_make_config(known.architecture, small))
        )
    checkpoint = Checkpoint(
        shape_folder.name, shape_folder, known, random_device=init_device or device
    )
    return resolve_checkpoint(checkpoint, replace(options, device=device), device, identify=False)


def _make_config(architecture: Mapping[str, Any], small: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(dict(architecture)))
    if small:
        backbone = config.get("text_config", config)
        backbone |= {key: value for key, value in _SMALL.items() if key in backbone}
        if "latent_attention_config" in config:
            config["latent_attention_config"] |= _SMALL_LATENTS
    return config


def make_tokenizer(folder: Path) -> None:
    """Save a tokenizer of the bundled sample, with about as many tokens per text as real ones."""
    from transformers import PreTrainedTokenizerFast

    special_tokens = {
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    PreTrainedTokenizerFast(tokenizer_object=_train_tokenizer(), **special_tokens).save_pretrained(
        folder
    )


@cache
def _train_tokenizer() -> Any:
    """Train a tokenizer on the bundled sample, once for all shapes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=list(_SPECIAL), show_progress=False
    )
    texts = [row[key] for row in _read_sample() for key in ("sentence1", "sentence2", "condition")]
    tokenizer.train_from_iterator([*texts, _INSTRUCTION * 50, "Instruct: Query: " * 50], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    return tokenizer


# -- texts -----------------------------------------------------------------------------------------


@cache
def _read_sample() -> list[dict[str, str]]:
    with _SAMPLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def csts_inputs(n: int, instruct: bool) -> list[EncoderInput]:
    """Return ``n`` inputs of C-STS length in the order of the data, like those of prompts."""
    rows = _read_sample()
    sampled = (rows[index * len(rows) // n % len(rows)] for index in range(n))
    return [_make_input(row["sentence1"], row["condition"], instruct) for row in sampled]


def long_inputs(n: int, instruct: bool) -> list[EncoderInput]:
    """Return ``n`` inputs of more than 512 tokens; see ``shorten_input``."""
    texts = [row["sentence1"] for row in _read_sample()]
    instruction = "Retrieve semantically similar texts" if instruct else ""
    texts_joined = (
        " ".join(texts[(index * 60 + offset) % len(texts)] for offset in range(60))
        for index in range(n)
    )
    return [EncoderInput(instruction, text) for text in texts_joined]


def shorten_input(
    item: EncoderInput, max_tokens: int, count: Callable[[EncoderInput], int]
) -> EncoderInput:
    """Shorten an input's text by words to nearly ``max_tokens`` tokens.

    An encoder would first have to find the sentence in a longer input to cut it, and this should
    not be part of the measured time.
    """
    words = item.text.split()
    while (tokens := count(item)) > max_tokens:
        words = words[: max(1, len(words) * max_tokens // tokens - 1)]
        item = replace(item, text=" ".join(words))
    return item


def branching_inputs(n: int, conditions: int, instruct: bool) -> list[EncoderInput]:
    """Return ``n`` inputs: sentences, each of them under ``conditions`` conditions."""
    rows = _read_sample()
    sentences = list(dict.fromkeys(row["sentence1"] for row in rows))
    conditions_list = list(dict.fromkeys(row["condition"] for row in rows))
    return [
        _make_input(
            sentences[index // conditions % len(sentences)],
            conditions_list[index % len(conditions_list)],
            instruct,
        )
        for index in range(n)
    ]


def _make_input(sentence: str, condition: str, instruct: bool) -> EncoderInput:
    if instruct:
        return EncoderInput(_INSTRUCTION.format(sentence), condition)
    return EncoderInput("", f"{sentence} {condition}")
