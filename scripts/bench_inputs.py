"""Inputs of C-STS length, checkpoints with random weights, and ONNX files for benchmarks."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.known import KnownModel
from llmcond.encoders.loading.loading import build_on_meta, load_config, silence_transformers
from llmcond.encoders.openvino.architectures import ARCHITECTURES
from llmcond.encoders.spec import EncoderInput

#: Maximum size of a shard of a checkpoint, in bytes.
SHARD = 2 * 2**30
SAMPLE = Path(__file__).resolve().parent.parent / "llmcond" / "data" / "sample"
INSTRUCTION = "Retrieve semantically similar texts to the Condition, given the Sentence: {}"


@dataclass(frozen=True)
class Shape:
    """An architecture of a common size that is not a known model; encoded with default settings."""

    repo: str
    architecture: Mapping[str, Any] = field(repr=False)


_BASE = {
    "hidden_size": 768,
    "intermediate_size": 3_072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 514,
    "layer_norm_eps": 1e-05,
}
SHAPES = {
    "mpnet-base": Shape("mpnet-base", {"model_type": "mpnet", "vocab_size": 30_527, **_BASE}),
    "xlm-r-base": Shape(
        "xlm-r-base",
        {"model_type": "xlm-roberta", "vocab_size": 250_002, "type_vocab_size": 1, **_BASE},
    ),
}


def random_checkpoint(known: KnownModel | Shape, parent: Path, sizes: Mapping[str, int]) -> Path:
    """Return a checkpoint of an architecture with random weights; create it if it is missing.

    Args:
        known: known model or shape.
        parent: folder in which the checkpoint has its folder.
        sizes: settings of the architecture to change, such as ``num_hidden_layers``.
    """
    names = [known.repo.replace("/", "--"), *(f"{key}-{value}" for key, value in sizes.items())]
    folder = parent / "-".join(names)
    if not (folder / "model.safetensors.index.json").is_file():
        _make_checkpoint(known, folder, sizes)
    return folder


def _make_checkpoint(known: KnownModel | Shape, folder: Path, sizes: Mapping[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    architecture = json.loads(json.dumps(dict(known.architecture)))
    (architecture.get("text_config") or architecture).update(sizes)
    if architecture["model_type"] in ARCHITECTURES:
        # OpenVINO reads config.json directly, so the defaults of transformers have to be in it.
        from transformers import AutoConfig

        architecture = AutoConfig.for_model(**architecture).to_dict()
    (folder / "config.json").write_text(json.dumps(architecture))
    make_tokenizer(folder)
    like = known.repo if isinstance(known, KnownModel) else None
    checkpoint = resolve(str(folder), EncoderOptions(like=like), identify=False).checkpoint
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
        # Weights of norms are near one; all others are as transformers initialises them.
        random = torch.randn(value.shape, generator=generator) * 0.02
        scales = "norm" in name.lower() and name.endswith("weight") and value.dim() == 1
        current[name] = (random + 1 if scales else random).bfloat16()
        index[name] = f"model-{written:05d}.safetensors"
        size += n_bytes
    save_file(current, folder / f"model-{written:05d}.safetensors", {"format": "pt"})
    listing = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))


def make_tokenizer(folder: Path) -> None:
    """Train a small tokenizer on the bundled sample; texts get realistic lengths in tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    # The first four have the ids of XLM-R, whose positions count tokens other than padding.
    special = ["<s>", "<pad>", "</s>", "<unk>", "<bos>", "<eos>", "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(vocab_size=8_000, special_tokens=special, show_progress=False)
    texts = [row[key] for row in _sample() for key in ("sentence1", "sentence2", "condition")]
    tokenizer.train_from_iterator([*texts, INSTRUCTION * 50, "Instruct: Query: " * 50], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    ).save_pretrained(folder)


def _sample() -> list[dict[str, str]]:
    with next(SAMPLE.glob("train*.csv")).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def make_inputs(n: int, instruct: bool) -> list[EncoderInput]:
    """Return n inputs of C-STS length; with ``instruct``, the sentence is in an instruction."""
    rows = _sample()
    return [
        EncoderInput(INSTRUCTION.format(row["sentence1"]), row["condition"])
        if instruct
        else EncoderInput("", f"{row['sentence1']} {row['condition']}")
        for row in (rows[i * len(rows) // n] for i in range(n))
    ]


def make_branches(n_sentences: int, n_conditions: int, instruct: bool) -> list[EncoderInput]:
    """Return bundled sentences, each under ``n_conditions`` conditions."""
    rows = _sample()
    sentences = list(dict.fromkeys(row["sentence1"] for row in rows))[:n_sentences]
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    inputs = []
    for number, sentence in enumerate(sentences):
        for offset in range(n_conditions):
            condition = conditions[(number * n_conditions + offset) % len(conditions)]
            inputs.append(
                EncoderInput(INSTRUCTION.format(sentence), condition)
                if instruct
                else EncoderInput("", f"{sentence} {condition}")
            )
    return inputs


def join_inputs(
    inputs: Iterable[EncoderInput], lengths: Iterable[int], n_tokens: int
) -> list[EncoderInput]:
    """Join consecutive short inputs into inputs of about ``n_tokens`` tokens.

    ``lengths`` are the numbers of tokens of ``inputs``, including special tokens. Inputs at the end
    that do not fill another one are dropped.
    """
    joined: list[EncoderInput] = []
    texts: list[str] = []
    room = n_tokens
    for item, length in zip(inputs, lengths, strict=True):
        if texts and length > room:
            joined.append(EncoderInput("", " ".join(texts)))
            texts, room = [], n_tokens
        texts.append(item.text)
        room -= length - 2  # the joined input has only one pair of special tokens
    return joined


class _States(torch.nn.Module):
    """A network whose only output is the hidden states of its tokens."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, (inputs, tokens, width)."""
        states: torch.Tensor = self.network(input_ids, attention_mask).last_hidden_state
        return states


@silence_transformers()
def export_onnx(folder: str, path: Path) -> None:
    """Write the network of a checkpoint as an ONNX file in float32, for other libraries.

    The graph has the inputs ``input_ids`` and ``attention_mask``, (inputs, tokens) int64, and the
    output ``states``, (inputs, tokens, width). The export uses PyTorch's older exporter and eager
    attention, because OpenVINO and ONNX Runtime fuse such a graph best. It needs the package onnx.
    """
    from transformers import AutoModel

    network = AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    example = torch.ones(2, 8, dtype=torch.int64)
    names, axes = ["input_ids", "attention_mask"], {0: "inputs", 1: "tokens"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _States(network).eval(),
            (example, example),
            str(path),
            dynamo=False,
            input_names=names,
            output_names=["states"],
            dynamic_axes=dict.fromkeys((*names, "states"), axes),
        )


def optimize_onnx(path: Path, optimized: Path, folder: str) -> None:
    """Fuse the layers of an ONNX file as ONNX Runtime does for networks like BERT."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    optimizer = import_module("onnxruntime.transformers.optimizer")
    network = optimizer.optimize_model(
        str(path),
        model_type="bert",
        num_heads=config["num_attention_heads"],
        hidden_size=config["hidden_size"],
    )
    network.save_model_to_file(str(optimized), use_external_data_format=True)


def quantize_onnx(path: Path, quantized: Path) -> None:
    """Quantise the weights of an ONNX file to int8; activations are quantised dynamically."""
    quantization = import_module("onnxruntime.quantization")
    quantization.quantize_dynamic(
        path,
        quantized,
        use_external_data_format=True,
        # Float32; ONNX Runtime cannot infer the output types of fused layers.
        extra_options={"DefaultTensorType": 1},
    )
