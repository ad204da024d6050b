"""Loading an encoder to be trained: its weights, its adapters, and a way through it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from llmcond.encoders.checkpoints.checkpoint import settings_files
from llmcond.encoders.engine.engine import Engine, is_out_of_memory, try_engine
from llmcond.encoders.engine.interface import OutOfMemoryError
from llmcond.encoders.engine.tokenizing import InputTokenizer, Tokens
from llmcond.encoders.loading.architecture import load_config, load_tokenizer
from llmcond.encoders.loading.loading import load_model
from llmcond.encoders.loading.memory import POOLS
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.routers.inside import passes_of
from llmcond.errors import LlmcondError, UserError, did_you_mean, first_line
from llmcond.finetune.settings import TuneSettings

#: Groups of projections, by what their names begin with.
_ATTENTION = re.compile(r"(^|\.)(self_)?att(n|ention)\b")
GROUPS = ("auto", "attention", "mlp")


@dataclass(frozen=True)
class Trainable:
    """An encoder that can be trained; ``adapted`` is peft's model around it, if it has adapters."""

    resolved: ResolvedEncoder
    tokenizer: InputTokenizer
    engine: Engine
    adapted: Any

    @property
    def network(self) -> Any:
        """Return the encoder's network, in which adapters are put in place."""
        return self.engine.model.network

    def counts(self) -> tuple[int, int]:
        """Return how many of the encoder's weights are trained, and how many there are.

        Those of adapters are no part of the encoder's own; quantised ones are counted as if not.
        """
        trained = total = 0
        for name, value in self.network.named_parameters():
            trained += value.numel() if value.requires_grad else 0
            if "lora_" not in name:
                # bitsandbytes holds two weights of 4 bit in a byte.
                total += value.numel() * (2 if value.dtype == torch.uint8 else 1)
        return trained, total


def prepare_accelerator(resolved: ResolvedEncoder) -> Accelerator:
    """Return what computes on one device, or on those of several processes launched together."""
    # Products in the resolved type; the loss and what stands before it in float32.
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(resolved.identity.dtype, "no")
    # Of an earlier training in this process, which may have had another precision.
    AcceleratorState._reset_state()
    return Accelerator(mixed_precision=precision, cpu=resolved.device == "cpu")


def check_trainable(resolved: ResolvedEncoder, settings: TuneSettings, merge: bool) -> None:
    """Refuse an adapter, and quantised weights that are all to be trained or merged into.

    Raises:
        UserError: one of these, or files that may not be copied beside weights that are written.
    """
    identity, name = resolved.identity, resolved.checkpoint.name
    if resolved.checkpoint.adapter is not None:
        raise UserError(
            f"{name} is an adapter already. Merge it first (train-lora --merge), or train its base "
            "encoder."
        )
    if settings.full and identity.quantize != "none":
        raise UserError(
            f"--rank full trains every weight, and {identity.quantize} weights cannot be trained. "
            "Give a --rank such as 16, or leave out --quantize."
        )
    if merge and identity.quantize != "none":
        # What was trained would be rounded away.
        raise UserError(
            f"--merge adds the adapters to the encoder's weights, and those are in "
            f"{identity.quantize}. Leave out --merge, or --quantize."
        )
    if merge or settings.full:
        settings_files(resolved.checkpoint.folder)  # told before training rather than after it


def load_trainable(resolved: ResolvedEncoder, settings: TuneSettings, seed: int) -> Trainable:
    """Load an encoder, frozen but for its adapters, or whole.

    On a CPU, or where all of it is trained, weights are in float32 and products in the resolved
    type; else frozen weights are in the resolved type, and adapters in float32. The first weights
    of adapters are drawn by ``seed``.

    Raises:
        UserError: a target that it lacks.
        LlmcondError: it cannot be loaded, or the device cannot compute gradients through it.
    """
    identity, name = resolved.identity, resolved.checkpoint.name
    if settings.full or (resolved.device == "cpu" and identity.quantize == "none"):
        # What is folded has no gradient of its own weights.
        folds = resolved.options.fold_latents and not settings.full
        options = replace(resolved.options, fold_latents=folds)
        resolved = replace(resolved, identity=replace(identity, dtype="float32"), options=options)
    config = load_config(resolved.checkpoint, identity.attention)
    tokenizer = InputTokenizer(load_tokenizer(resolved.checkpoint, config), identity, name)
    if not settings.encoder_dropout:
        for key, value in vars(config).items():
            if "drop" in key and isinstance(value, float):  # that on attention weights too
                setattr(config, key, 0.0)
    loaded = load_model(resolved, config)
    for module in loaded.network.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Else bitsandbytes packs 4 bit weights on a CPU, and can take no gradients then.
            module.support_avx512bf16_for_cpu = False
    torch.manual_seed(seed)
    adapted = None if settings.full else add_adapters(loaded.network, settings, name)
    if settings.full:
        loaded.network.requires_grad_(True)
    passes_of(identity).train_weights(loaded.network, identity, resolved.device)
    engine = try_engine(loaded, resolved, tokenizer.pad_id, frozen=False)
    if settings.gradient_checkpointing:
        _checkpoint_gradients(loaded.network, name)
    trainable = Trainable(resolved, tokenizer, engine, adapted)
    _try_out(trainable)
    return trainable


def _checkpoint_gradients(network: Any, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it is about to have another name
            network.gradient_checkpointing_enable({"use_reentrant": False})
    except (AttributeError, ValueError) as error:
        raise UserError(
            f"{name} cannot compute activations again: {first_line(error)} Leave out "
            "--gradient-checkpointing, and raise --gradient-accumulation-steps instead."
        ) from error


def _try_out(trainable: Trainable) -> None:
    """Take gradients of one short text, where that fails at once if it fails at all."""
    identity, device = trainable.resolved.identity, trainable.resolved.device
    text = Tokens([0] * 4, 0, 4, 4, 4)
    try:
        trainable.engine.embed([text, text]).square().sum().backward()  # type: ignore[no-untyped-call]
        weights = [value for value in trainable.network.parameters() if value.requires_grad]
        if not any(value.grad is not None for value in weights):
            raise RuntimeError("no gradient reaches the trained weights")
    except OutOfMemoryError:
        raise
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise LlmcondError(
            f"{trainable.resolved.checkpoint.name} cannot be trained as {identity.dtype}, quantize "
            f"{identity.quantize}, on {device}: {first_line(error)}. Try another --quantize, "
            "--dtype or --device."
        ) from error
    finally:
        trainable.network.zero_grad(set_to_none=True)


def projections(network: nn.Module) -> list[str]:
    """Return the names that linear layers have within a transformer block, such as ``mlp.up_proj``.

    What pools is left out: it is no part of a block.
    """
    found: dict[str, None] = {}
    for name, module in network.named_modules():
        # Of a subclass too: so are quantised layers.
        if not isinstance(module, nn.Linear) or any(part in name for part in POOLS):
            continue
        match = re.fullmatch(r".*\.\d+\.(.+)", f".{name}")
        if match:
            found[match[1]] = None
    return list(found)


def choose(network: nn.Module, target: Sequence[str], encoder: str) -> list[str]:
    """Return the projections that a target names: groups of :data:`GROUPS`, names, or their ends.

    Raises:
        UserError: a name that no projection has; the legal ones are listed.
    """
    legal = projections(network)
    if not legal:
        raise UserError(
            f"{encoder} has no linear layers in numbered blocks, so there is nothing to put an "
            "adapter on. Train all of it: --rank full"
        )
    chosen: dict[str, None] = {}
    for name in target:
        # A whole name goes before names that end in it: output.dense, attention.output.dense.
        found = [name] if name in legal else [own for own in legal if _is(own, name)]
        if not found:
            ends = [own.rpartition(".")[2] for own in legal]
            hint = did_you_mean(name, [*legal, *ends, *GROUPS])
            raise UserError(
                f"--target is {name!r}, which {encoder} does not have. {hint} Legal: "
                f"{', '.join((*GROUPS, *legal))}."
            )
        chosen.update(dict.fromkeys(found))
    return [own for own in legal if own in chosen]


def _is(own: str, name: str) -> bool:
    if name in GROUPS:
        attention = _ATTENTION.search(own) is not None
        return name == "auto" or attention == (name == "attention")
    return own.endswith(f".{name}")


def add_adapters(network: nn.Module, settings: TuneSettings, encoder: str) -> Any:
    """Put an adapter on each of the chosen projections, in place, and freeze all else.

    Each begins as the zero map; its first matrix is drawn from PyTorch's own generator. What is
    returned is peft's model around the network.
    """
    # bitsandbytes, which peft imports, warns of faster kernels that it would download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, TaskType, get_peft_model

    names = choose(network, settings.target, encoder)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.adapter_dropout,
        # Not a list of names: peft would take ``output.dense`` for ``attention.output.dense`` too.
        target_modules=rf"(.*\.)?\d+\.({'|'.join(re.escape(name) for name in names)})",
        task_type=TaskType.FEATURE_EXTRACTION,
    )
    with warnings.catch_warnings():
        # Of its own use of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(network, config)
