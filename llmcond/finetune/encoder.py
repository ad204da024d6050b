"""Loading an encoder for training, with adapters and gradients, and saving the trained encoder."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import warnings
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from safetensors.torch import load_file
from torch import nn

from llmcond.base.errors import LlmcondError, UserError, first_line, list_legal_values
from llmcond.base.files import read_json, replace_atomically, write_json
from llmcond.encoders.adapter import (
    CONFIG,
    PREFIX,
    ROUTER,
    WEIGHTS,
    EncoderRecord,
    read_lora,
    special_fields,
    summarize_names,
    write_encoder_record,
)
from llmcond.encoders.checkpoint import Checkpoint, settings_files
from llmcond.encoders.loading import (
    POOLING_MODULES,
    load_config,
    load_model,
    load_tokenizer,
    read_all_weights,
)
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.settings import MODEL_SETTINGS, STATED, find_model
from llmcond.encoders.tokenizing import InputTokenizer, OutOfMemoryError, Tokens
from llmcond.encoders.torch.csr import router_weights, train_router
from llmcond.encoders.torch.engine import Engine, create_engine, is_out_of_memory
from llmcond.finetune.loop import write_tensors
from llmcond.finetune.settings import TuneSettings

#: Names of attention projections; all other projections belong to the group ``mlp``.
_ATTENTION = re.compile(r"(^|\.)(self_)?att(n|ention)\b")
GROUPS = ("auto", "attention", "mlp")


@dataclass(frozen=True)
class TrainableEncoder:
    """An encoder that can be trained.

    Attributes:
        resolved: settings and files of the encoder.
        tokenizer: its tokenizer.
        engine: engine that computes its vectors with gradients.
        peft_model: peft's model around the network; None if there are no adapters.
    """

    resolved: ResolvedEncoder
    tokenizer: InputTokenizer
    engine: Engine
    peft_model: Any

    @property
    def network(self) -> Any:
        """Network of the encoder, including its adapters."""
        return self.engine.model.network

    def count_weights(self) -> tuple[int, int]:
        """Return the number of trained weights, and the number of all weights of the encoder.

        Weights of adapters do not count as weights of the encoder. Quantised weights count
        individually.
        """
        trained = total = 0
        for name, value in self.network.named_parameters():
            trained += value.numel() if value.requires_grad else 0
            if "lora_" not in name:
                # bitsandbytes stores two 4-bit weights per byte.
                total += value.numel() * (2 if value.dtype == torch.uint8 else 1)
        return trained, total


def prepare_accelerator(resolved: ResolvedEncoder) -> Accelerator:
    """Return an accelerator for one device, or for several processes launched together."""
    # Products use the resolved type; the head and the loss use float32.
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(resolved.identity.dtype, "no")
    # Remove the state of an earlier training in this process, which may have used another
    # precision or device.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    # Processes wait while the main one scores the encoder, for longer than the default 10 minutes.
    waiting = InitProcessGroupKwargs(timeout=timedelta(days=7))
    return Accelerator(
        mixed_precision=precision, cpu=resolved.device == "cpu", kwargs_handlers=[waiting]
    )


def check_trainable(
    resolved: ResolvedEncoder, settings: TuneSettings, merge: bool, named: Collection[str] = ()
) -> TuneSettings:
    """Return the settings to train an encoder with: an adapter keeps its rank, alpha and targets.

    Args:
        resolved: the encoder.
        settings: the settings.
        merge: whether adapters are merged into the weights.
        named: names of the settings that the user has set.

    Raises:
        UserError: the encoder is an ensemble, or an adapter that the settings do not fit; settings
            of adapters are set, but all weights are trained; quantised weights are to be trained or
            merged; or files cannot be copied to the folder of the written weights.
    """
    identity, adapter = resolved.identity, resolved.checkpoint.adapter
    if adapter is not None:
        settings = _adapter_settings(resolved.checkpoint, adapter, settings, named)
    unused = {"adapter_dropout", "alpha", "target"}.intersection(named) if settings.full else ()
    for key in sorted(unused):
        raise UserError(
            f"--{key.replace('_', '-')} is a setting of adapters, and --rank full trains all "
            "weights without adapters. Leave it out, or set --rank to a number."
        )
    if merge or settings.full:
        if identity.quantize != "none":  # rounding would remove the trained changes
            raise UserError(
                f"{'--rank full' if settings.full else '--merge'} changes the encoder's weights, "
                f"and {identity.quantize} weights cannot be changed. Leave out --quantize, or "
                "train adapters without --merge."
            )
        settings_files(resolved.checkpoint.folder)  # raises before training instead of after
    return settings


def _adapter_settings(
    checkpoint: Checkpoint, adapter: Path, settings: TuneSettings, named: Collection[str]
) -> TuneSettings:
    """Return the settings with the rank, alpha and targets of an adapter that is trained on."""
    record, name = read_lora(adapter, checkpoint.name), checkpoint.name
    if checkpoint.members or special_fields(record):
        kind = "an ensemble" if checkpoint.members else "more than plain LoRA"
        raise UserError(
            f"{name} is {kind}, which cannot be trained further. Train its base encoder."
        )
    names = [key.removesuffix(".lora_A.weight") for key in load_file(adapter / WEIGHTS)]
    targets = dict.fromkeys(
        re.sub(r".*\.\d+\.", "", name) for name in names if not name.endswith(".lora_B.weight")
    )
    rank, alpha = record["r"], float(record["lora_alpha"])
    if record.get("use_rslora"):
        alpha *= rank**0.5  # the scale, alpha / sqrt(rank), is that of plain LoRA with this alpha
    fixed = {"rank": rank, "alpha": alpha, "target": tuple(targets)}
    for key, value in fixed.items():
        if key in named and getattr(settings, key) != value:
            value_set = "full" if settings.full else getattr(settings, key)
            raise UserError(
                f"{name} is an adapter with {key} {value}, which is trained further, so --{key} "
                f"cannot be {value_set}. Leave it out, or merge the adapter into its base first "
                "(train-lora --merge)."
            )
    return replace(settings, **fixed)


def base_of(resolved: ResolvedEncoder, model: str) -> tuple[str, Checkpoint]:
    """Return the name and the checkpoint of what adapters are added to.

    Of an adapter that is trained further, this is its base; otherwise it is the encoder itself,
    whose name is ``model``.
    """
    base = resolved.checkpoint.base
    return (model, resolved.checkpoint) if base is None else (base.name, base)


def load_trainable(
    resolved: ResolvedEncoder, settings: TuneSettings, seed: int
) -> TrainableEncoder:
    """Load an encoder for training, frozen except for its adapters, or with all weights trainable.

    On a CPU, or if all weights are trained, weights are in float32 and products in the resolved
    type. Otherwise the frozen weights are in the resolved type, and adapters in float32. The
    initial weights of adapters are sampled with ``seed``, unless the encoder is an adapter, which
    is then trained further.

    Raises:
        UserError: the encoder lacks a target.
        LlmcondError: it cannot be loaded, or the device cannot compute gradients through it.
    """
    identity, name = resolved.identity, resolved.checkpoint.name
    if settings.full or (resolved.device == "cpu" and identity.quantize == "none"):
        # Folded latents have no gradients of the original weights.
        folds = resolved.options.fold_latents and not settings.full
        options = replace(resolved.options, fold_latents=folds)
        resolved = replace(resolved, identity=replace(identity, dtype="float32"), options=options)
    adapter = resolved.checkpoint.adapter
    resolved = replace(resolved, checkpoint=replace(resolved.checkpoint, adapter=None))
    config = load_config(resolved.checkpoint, identity.attention)
    tokenizer = InputTokenizer(load_tokenizer(resolved.checkpoint, config), identity, name)
    if not settings.encoder_dropout:
        for key, value in vars(config).items():
            if "drop" in key and isinstance(value, float):  # includes dropout of attention weights
                setattr(config, key, 0.0)
    loaded = load_model(resolved, config)
    for module in loaded.network.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Otherwise bitsandbytes packs 4-bit weights on a CPU, which prevents gradients.
            module.support_avx512bf16_for_cpu = False
    torch.manual_seed(seed)
    adapted = None if settings.full else add_adapters(loaded.network, settings, name)
    if adapter is not None:
        _load_adapter(adapted, loaded.network, adapter, name)
    if settings.full:
        loaded.network.requires_grad_(True)
    train_router(loaded.network, identity, resolved.device)
    engine = create_engine(loaded, resolved, tokenizer.pad_id, frozen=False)
    if settings.gradient_checkpointing:
        _enable_gradient_checkpointing(loaded.network, name)
    trainable = TrainableEncoder(resolved, tokenizer, engine, adapted)
    _check_gradients(trainable)
    return trainable


def _load_adapter(adapted: Any, network: Any, folder: Path, name: str) -> None:
    """Load the weights of an adapter into peft's model around a network."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    # Adapters of models for other tasks have the encoder's name in front of their tensors' names.
    root = str(getattr(network, "base_model_prefix", ""))
    root = "" if hasattr(network, root) else f"{root}."
    tensors = {
        PREFIX + key.removeprefix(PREFIX).removeprefix(root): value
        for key, value in load_file(folder / WEIGHTS).items()
    }
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    sizes, trained_sizes = (
        {(key, value.shape) for key, value in state.items()} for state in (tensors, expected)
    )
    # peft would ignore tensors without a layer, and leave layers without a tensor at zero.
    differing = {key.removeprefix(PREFIX) for key, _ in sizes ^ trained_sizes}
    if differing:
        raise UserError(
            f"{name} is an adapter of only some of the layers with the projections that it adapts, "
            f"or its files do not belong together: {summarize_names(differing, 'tensors')} differ. "
            "Merge it into its base with peft (merge_and_unload), save the result, and train that."
        )
    set_peft_model_state_dict(adapted, tensors)


def _enable_gradient_checkpointing(network: Any, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers will rename this method
            network.gradient_checkpointing_enable({"use_reentrant": False})
    except (AttributeError, ValueError) as error:
        raise UserError(
            f"{name} does not support gradient checkpointing: {first_line(error)} Leave out "
            "--gradient-checkpointing, and raise --gradient-accumulation-steps instead."
        ) from error


def _check_gradients(trainable: TrainableEncoder) -> None:
    """Compute gradients of a short text, so that an unsupported combination fails at once."""
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
            f"{trainable.resolved.checkpoint.name} cannot be trained with dtype {identity.dtype} "
            f"and quantize {identity.quantize} on {device}: {first_line(error)}. Try another "
            "--quantize, --dtype or --device."
        ) from error
    finally:
        trainable.network.zero_grad(set_to_none=True)


def projections(network: nn.Module) -> list[str]:
    """Return the names of linear layers within a transformer block, such as ``mlp.up_proj``.

    Pooling layers are left out, as they are not part of a block.
    """
    names: dict[str, None] = {}
    for name, module in network.named_modules():
        # Quantised layers are subclasses of nn.Linear.
        if not isinstance(module, nn.Linear) or any(part in name for part in POOLING_MODULES):
            continue
        match = re.fullmatch(r".*\.\d+\.(.+)", f".{name}")
        if match:
            names[match[1]] = None
    return list(names)


def select_projections(network: nn.Module, target: Sequence[str], encoder: str) -> list[str]:
    """Return the projections that a target names by groups of ``GROUPS``, names, or ends of names.

    Raises:
        UserError: no projection has such a name; the message lists the legal ones.
    """
    legal = projections(network)
    if not legal:
        raise UserError(
            f"{encoder} has no linear layers in numbered blocks, to which adapters could be added. "
            "Train all weights with --rank full."
        )
    selected: dict[str, None] = {}
    for name in target:
        # An exact match takes precedence over names that end in it, as with output.dense and
        # attention.output.dense.
        matches = (
            [name]
            if name in legal
            else [projection for projection in legal if _matches_target(projection, name)]
        )
        if not matches:
            ends = [projection.rpartition(".")[2] for projection in legal]
            advice = list_legal_values(name, [*legal, *ends, *GROUPS], [*GROUPS, *legal])
            raise UserError(f"--target is {name!r}, which {encoder} does not have. {advice}")
        selected.update(dict.fromkeys(matches))
    return [projection for projection in legal if projection in selected]


def _matches_target(projection: str, target: str) -> bool:
    if target in GROUPS:
        attention = _ATTENTION.search(projection) is not None
        return target == "auto" or attention == (target == "attention")
    return projection.endswith(f".{target}")


def add_adapters(network: nn.Module, settings: TuneSettings, encoder: str) -> Any:
    """Add adapters to the selected projections, in place, and freeze all other weights.

    Each adapter starts as the zero map; its first matrix is sampled from PyTorch's global
    generator. The result is peft's model around the network.
    """
    # peft imports bitsandbytes, which warns about faster kernels that it would download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, TaskType, get_peft_model

    names = select_projections(network, settings.target, encoder)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.adapter_dropout,
        # Not a list of names, as peft would apply ``output.dense`` to ``attention.output.dense``
        # too.
        target_modules=rf"(.*\.)?\d+\.({'|'.join(re.escape(name) for name in names)})",
        task_type=TaskType.FEATURE_EXTRACTION,
    )
    with warnings.catch_warnings():
        # peft's own use of transformers causes these warnings.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(network, config)


#: Metadata that transformers and peft expect in the header.
_METADATA = {"format": "pt"}


def save_encoder(
    trainable: TrainableEncoder,
    model: str,
    folder: Path,
    *,
    merge: bool,
    cross: bool = False,
    dev_of: Set[str] = frozenset(),
) -> None:
    """Write the trained weights of an encoder into a folder that can be named as a model.

    Args:
        trainable: the trained encoder.
        model: alias, hub name or absolute path of the base encoder.
        folder: folder to write to.
        merge: whether adapters are added to the weights; then all weights are written.
        cross: whether it was trained as a cross-encoder, so that its vectors are not used as
            embeddings.
        dev_of: digests of the datasets whose dev rows it was trained on, so that it is not scored
            on them.
    """
    resolved = trainable.resolved
    model, base = base_of(resolved, model)
    whole = trainable.peft_model is None or merge
    if whole:
        if trainable.peft_model is not None:
            trainable.peft_model.merge_and_unload()
        origin = resolved.checkpoint.folder
        for path in settings_files(origin):
            with replace_atomically(folder / path.relative_to(origin)) as target:
                shutil.copyfile(path, target)
        write_tensors(
            folder / "model.safetensors",
            read_all_weights(trainable.network, resolved.checkpoint),
            _METADATA,
        )
    else:
        _save_adapter(trainable, model, folder)
    identity, known = resolved.identity, resolved.checkpoint.known
    settings = MODEL_SETTINGS if identity.routes_inside else STATED
    router = router_weights(trainable.network)
    if router:
        write_tensors(folder / ROUTER, router, _METADATA)
    tuned = EncoderRecord(
        base=None if whole else model,
        revision=None if whole else base.commit,
        like=known.repo if known else None,
        settings={name: value for name, value in identity.to_json().items() if name in settings},
        quantize=identity.quantize,
        base_weights=identity.weights if base is resolved.checkpoint else base.weights,
        cross=cross,
        dev_of=" ".join(sorted(dev_of)) or None,
    )
    write_encoder_record(folder, tuned)


def hub_name(model: str, resolved: ResolvedEncoder) -> str | None:
    """Return the name of an encoder on the hub; None if it is not there."""
    known = find_model(model)
    return known.repo if known else resolved.checkpoint.repo


def _save_adapter(trainable: TrainableEncoder, model: str, folder: Path) -> None:
    from peft import get_peft_model_state_dict

    # By default, peft asks the hub whether the vocabulary has grown.
    tensors = get_peft_model_state_dict(trainable.peft_model, save_embedding_layers=False)
    write_tensors(folder / WEIGHTS, tensors, _METADATA)
    config: Any = trainable.peft_model.peft_config["default"]
    config.inference_mode = True
    # peft reads this entry itself, so it must be the hub's name instead of an alias.
    config.base_model_name_or_path = hub_name(model, trainable.resolved) or model
    config.revision = base_of(trainable.resolved, model)[1].commit
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        write_json(folder / CONFIG, read_json(Path(temporary) / CONFIG))
