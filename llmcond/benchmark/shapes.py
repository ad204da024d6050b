"""Encoders of a known model's architecture with random weights, and texts to run them on.

Speed and memory do not depend on the values of weights. They are drawn on the device, tensor by
tensor; on disk are a config and a tokenizer of a few hundred KiB.
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
from llmcond.encoders.checkpoints.checkpoint import Checkpoint
from llmcond.encoders.known import MODELS
from llmcond.encoders.resolve import ResolvedEncoder, settle
from llmcond.encoders.spec import EncoderInput

Shape = Literal["nv-embed-v2", "mistral-7b", "qwen2-7b", "xlm-r-large", "minilm"]
#: Which checks are run: those of each encoder that is timed are few, those on small ones many.
Level = Literal["none", "quick", "all"]
#: The known model that a shape is of.
SHAPES: Mapping[Shape, str] = {
    "nv-embed-v2": "nvidia/NV-Embed-v2",
    "mistral-7b": "Salesforce/SFR-Embedding-Mistral",
    "qwen2-7b": "Alibaba-NLP/gte-Qwen2-7B-instruct",
    "xlm-r-large": "intfloat/multilingual-e5-large-instruct",
    "minilm": "minilm",
}
#: What a small encoder of the same architecture has otherwise; heads of 64, as kernels like them.
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
#: Padding has the id that XLM-R's networks give no position.
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
    drawn_on: str | None = None,
) -> ResolvedEncoder:
    """Return an encoder of a shape, not loaded; its settings and tokenizer are put into ``folder``.

    Weights are drawn on ``device``, or elsewhere by ``drawn_on``: drawn on a CPU they are the same
    for every device.
    """
    known = next(model for model in MODELS if model.name == SHAPES[shape])
    own = folder / (f"{shape}-small" if small else shape)
    if not own.is_dir():
        make_tokenizer(own)
        (own / "config.json").write_text(json.dumps(_config(known.architecture, small)))
    checkpoint = Checkpoint(own.name, own, known, drawn_on=drawn_on or device)
    return settle(checkpoint, replace(options, device=device), device, identify=False)


def _config(architecture: Mapping[str, Any], small: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(dict(architecture)))
    if small:
        backbone = config.get("text_config", config)
        backbone |= {key: value for key, value in _SMALL.items() if key in backbone}
        if "latent_attention_config" in config:
            config["latent_attention_config"] |= _SMALL_LATENTS
    return config


def make_tokenizer(folder: Path) -> None:
    """Save a tokenizer of the bundled sample: texts have about as many tokens as by real ones."""
    from transformers import PreTrainedTokenizerFast

    named = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), **named).save_pretrained(folder)


@cache
def _tokenizer() -> Any:
    """Train a tokenizer on the bundled sample, once for all shapes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=8_000, special_tokens=list(_SPECIAL), show_progress=False
    )
    texts = [row[key] for row in _sample() for key in ("sentence1", "sentence2", "condition")]
    tokenizer.train_from_iterator([*texts, _INSTRUCTION * 50, "Instruct: Query: " * 50], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    return tokenizer


# -- texts -----------------------------------------------------------------------------------------


@cache
def _sample() -> list[dict[str, str]]:
    with _SAMPLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def csts_inputs(n: int, instruct: bool) -> list[EncoderInput]:
    """Return ``n`` inputs of C-STS length in the order of the data, as the usual prompts are."""
    rows = _sample()
    picked = (rows[index * len(rows) // n % len(rows)] for index in range(n))
    return [_input(row["sentence1"], row["condition"], instruct) for row in picked]


def long_inputs(n: int, instruct: bool) -> list[EncoderInput]:
    """Return ``n`` inputs of more than 512 tokens; see :func:`shortened`."""
    texts = [row["sentence1"] for row in _sample()]
    instruction = "Retrieve semantically similar texts" if instruct else ""
    long = (
        " ".join(texts[(index * 60 + at) % len(texts)] for at in range(60)) for index in range(n)
    )
    return [EncoderInput(instruction, text) for text in long]


def shortened(item: EncoderInput, most: int, count: Callable[[EncoderInput], int]) -> EncoderInput:
    """Return an input with as many of its text's words as ``most`` tokens have room for, nearly.

    To cut a longer one, an encoder has to find its sentence first, which is not what is timed.
    """
    words = item.text.split()
    while (tokens := count(item)) > most:
        words = words[: max(1, len(words) * most // tokens - 1)]
        item = replace(item, text=" ".join(words))
    return item


def branching_inputs(n: int, conditions: int, instruct: bool) -> list[EncoderInput]:
    """Return ``n`` inputs: sentences, each under so many conditions."""
    rows = _sample()
    sentences = list(dict.fromkeys(row["sentence1"] for row in rows))
    every = list(dict.fromkeys(row["condition"] for row in rows))
    return [
        _input(sentences[at // conditions % len(sentences)], every[at % len(every)], instruct)
        for at in range(n)
    ]


def _input(sentence: str, condition: str, instruct: bool) -> EncoderInput:
    if instruct:
        return EncoderInput(_INSTRUCTION.format(sentence), condition)
    return EncoderInput("", f"{sentence} {condition}")
