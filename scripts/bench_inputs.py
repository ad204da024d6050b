"""Checkpoints with random weights and inputs of C-STS length, for the benchmarks."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.known import KnownModel
from llmcond.encoders.loading.architecture import build_on_meta, load_config
from llmcond.encoders.spec import EncoderInput

SHARD = 2 * 2**30
SAMPLE = Path(__file__).resolve().parent.parent / "llmcond" / "data" / "sample"
INSTRUCTION = "Retrieve semantically similar texts to the Condition, given the Sentence: {}"


def random_checkpoint(known: KnownModel, parent: Path, sizes: Mapping[str, int]) -> Path:
    """Make a checkpoint of a known model's architecture with random weights, unless it is there.

    Args:
        known: the model.
        parent: folder of the checkpoint's own.
        sizes: what is to be other than the model has it, such as ``num_hidden_layers``.
    """
    names = [known.repo.replace("/", "--"), *(f"{key}-{value}" for key, value in sizes.items())]
    folder = parent / "-".join(names)
    if not (folder / "model.safetensors.index.json").is_file():
        _make_checkpoint(known, folder, sizes)
    return folder


def _make_checkpoint(known: KnownModel, folder: Path, sizes: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    architecture = json.loads(json.dumps(dict(known.architecture)))
    (architecture.get("text_config") or architecture).update(sizes)
    (folder / "config.json").write_text(json.dumps(architecture))
    make_tokenizer(folder)
    checkpoint = resolve(str(folder), EncoderOptions(like=known.repo), identify=False).checkpoint
    names = build_on_meta(load_config(checkpoint)).state_dict()
    generator = torch.Generator().manual_seed(0)
    index, total = {}, sum(value.numel() * 2 for value in names.values())
    written = size = 0
    current: dict[str, torch.Tensor] = {}
    for name, value in names.items():
        n_bytes = value.numel() * 2
        if current and size + n_bytes > SHARD:
            save_file(current, folder / f"model-{written:05d}.safetensors", {"format": "pt"})
            written, size, current = written + 1, 0, {}
        # Norms near one, everything else as transformers initialises it.
        random = torch.randn(value.shape, generator=generator) * 0.02
        current[name] = (random + 1 if "norm" in name and value.dim() == 1 else random).bfloat16()
        index[name] = f"model-{written:05d}.safetensors"
        size += n_bytes
    save_file(current, folder / f"model-{written:05d}.safetensors", {"format": "pt"})
    listing = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))


def make_tokenizer(folder: Path) -> None:
    """Train a small tokenizer on the bundled sample: lengths are like those of real ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<bos>", "<eos>", "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(vocab_size=8_000, special_tokens=special, show_progress=False)
    texts = [row[key] for row in _sample() for key in ("sentence1", "sentence2", "condition")]
    tokenizer.train_from_iterator([*texts, INSTRUCTION * 50, "Instruct: Query: " * 50], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def _sample() -> list[dict[str, str]]:
    with next(SAMPLE.glob("train*.csv")).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def make_inputs(n: int, instruct: bool) -> list[EncoderInput]:
    """Return inputs of C-STS length, as the prompt ``cond`` makes them."""
    rows = _sample()
    return [
        EncoderInput(INSTRUCTION.format(row["sentence1"]), row["condition"])
        if instruct
        else EncoderInput("", f"{row['sentence1']} {row['condition']}")
        for row in (rows[i * len(rows) // n] for i in range(n))
    ]


def make_branches(n_sentences: int, n_conditions: int, instruct: bool) -> list[EncoderInput]:
    """Return inputs of the bundled sentences, each under as many conditions."""
    rows = _sample()
    sentences = list(dict.fromkeys(row["sentence1"] for row in rows))[:n_sentences]
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    inputs = []
    for number, sentence in enumerate(sentences):
        for place in range(n_conditions):
            condition = conditions[(number * n_conditions + place) % len(conditions)]
            inputs.append(
                EncoderInput(INSTRUCTION.format(sentence), condition)
                if instruct
                else EncoderInput("", f"{sentence} {condition}")
            )
    return inputs
