"""Adapters: LoRA weights in peft's format, which are added to those of a base encoder.

A plain adapter is read and added to its base without peft. Only adapters of another kind, and
adapters on quantised weights, import it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmcond.base.errors import LlmcondError, UserError, first_line
from llmcond.base.files import check_format, digest_file, read_json, write_json
from llmcond.base.output import log
from llmcond.base.records import check_record
from llmcond.base.system import require_libraries
from llmcond.encoders.settings import MODEL_SETTINGS, EncoderOptions
from llmcond.encoders.spec import IGNORED_WEIGHTS, Quantize

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: The weights of a router inside the encoder; see ``llmcond.encoders.torch.csr``.
ROUTER = "router.safetensors"
#: The file with the facts that training records about an encoder; see ``EncoderRecord``.
ENCODER_RECORD = "encoder.json"
#: The training record of an encoder and its head; see ``llmcond.workflows.training_record``.
TRAINING_RECORD = "training.json"
#: The manifest of a run; see ``llmcond.runs.run``.
RUN_RECORD = "run.json"
#: The works that the weights derive from; see ``llmcond.runs.portable``.
CREDITS = "credits.json"
#: The model card.
CARD = "README.md"

FORMAT = 1

#: The fields of an adapter's config that decide what is computed. A missing field counts as empty,
#: except those in ``_DEFAULTS``.
_DECISIVE_FIELDS = (
    "r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "target_modules",
    "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern",
)  # fmt: skip
_DEFAULTS = {"r": 8, "lora_alpha": 8}
#: The fields about the adapter's initialisation and training, which do not affect its use.
_TRAINING_FIELDS = {
    "corda_config", "ensure_weight_tying", "eva_config", "init_lora_weights", "loftq_config",
    "lora_dropout", "lora_ga_config", "runtime_config",
}  # fmt: skip
#: The values of ``init_lora_weights`` that leave the base's weights as they are; all others modify
#: them.
NEUTRAL_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")

#: The fields that a plain adapter may set: they decide the sum of the base and B A, or nothing.
_PLAIN_FIELDS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_alpha",
    "lora_dropout", "peft_version", "qalora_group_size", "r", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
}  # fmt: skip
#: Values that other fields of a plain adapter may have in addition to empty ones.
_PLAIN_VALUES = {"bias": "none", "megatron_core": "megatron.core", "peft_type": "LORA"}

#: peft's name for the only adapter of a model.
_ADAPTER_NAME = "default"
#: Prefix that peft puts before each tensor's name in an adapter's file.
PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class EncoderRecord:
    """The facts that training records about an encoder, so that it is used as it was trained.

    Attributes:
        base: alias, hub name or absolute folder of the encoder that an adapter belongs to. None:
            the folder holds a whole checkpoint.
        revision: commit of the base on the hub.
        like: repository of the known model whose settings it has.
        settings: fields of ``EncoderIdentity`` that it was trained with.
        quantize: quantisation of the base's weights in training.
        base_weights: ``EncoderIdentity.weights`` of the base in training.
        cross: whether it was trained as a cross-encoder.
        dev_of: digests of the datasets whose dev rows it was trained on, separated by spaces; None:
            no dev rows.
        members: number of adapters of an ensemble, each in one of ``member_folders``; 1: it is not
            an ensemble.
    """

    base: str | None = None
    revision: str | None = None
    like: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    quantize: Quantize = "none"
    base_weights: str | None = None
    cross: bool = False
    dev_of: str | None = None
    members: int = 1

    @property
    def dev_digests(self) -> frozenset[str]:
        """The digests of ``dev_of``."""
        return frozenset((self.dev_of or "").split())


def member_folders(folder: Path, members: int) -> tuple[Path, ...]:
    """Return the folders of an ensemble's adapters."""
    return tuple(folder / f"adapter-{number}" for number in range(members))


def write_encoder_record(folder: Path, tuned: EncoderRecord) -> None:
    """Write the training facts of an encoder into its folder; raises as ``write_json``."""
    write_json(folder / ENCODER_RECORD, {"format": FORMAT, **asdict(tuned)})


def read_encoder_record(folder: Path) -> EncoderRecord | None:
    """Read the file of ``write_encoder_record``; None if the folder has none.

    Raises:
        UserError: the file cannot be read, or a newer version wrote it.
        LlmcondError: the file is damaged.
    """
    path = folder / ENCODER_RECORD
    if not path.is_file():
        return None
    record = read_json(path)
    if record.get("format") != FORMAT and all(type(value) is int for value in record.values()):
        return None  # the vocabulary of GPT-2, whose authors used the same file name
    check_format(record, FORMAT, str(path))
    tuned = check_record(record, EncoderRecord, str(path), "Copy it again.")
    for name in tuned.settings.keys() - set(MODEL_SETTINGS):
        raise LlmcondError(f"{path} was damaged: unknown setting {name!r}. Copy it again.")
    try:
        EncoderOptions(quantize=tuned.quantize, **tuned.settings)
    except UserError as error:
        raise LlmcondError(f"{path} is damaged. {error} Copy the file again.") from error
    return tuned


# -- an adapter's files ------------------------------------------------------------------------


def read_lora(folder: Path, name: str) -> dict[str, Any]:
    """Read an adapter's config, and check that its weights exist.

    Raises:
        UserError: it is not a LoRA adapter, or its weights are not in safetensors.
    """
    record = read_json(folder / CONFIG)
    if (kind := record.get("peft_type")) != "LORA":
        raise UserError(
            f"{name} is an adapter of the type {kind!r}, and only LORA is supported. Merge it into "
            "its base with peft (merge_and_unload), save the result, and name its folder."
        )
    if not (folder / WEIGHTS).is_file():
        exists = (folder / "adapter_model.bin").is_file()
        raise UserError(
            f"{name} is an adapter without {WEIGHTS}"
            f"{' (its adapter_model.bin is not read)' if exists else ''}. Save it again with peft: "
            "save_pretrained(FOLDER, safe_serialization=True)"
        )
    return record


def special_fields(record: Mapping[str, Any]) -> list[str]:
    """Return the fields of an adapter's config that make it more than the sum of the base and B A.

    The list is empty for a plain adapter.
    """
    special = [
        key
        for key, value in record.items()
        if value and key not in _PLAIN_FIELDS and _PLAIN_VALUES.get(key) != value
    ]
    if record.get("init_lora_weights") not in NEUTRAL_INITIALISATIONS:
        special.append("init_lora_weights")
    return special


def _is_target(name: str, target_modules: Any) -> bool:
    """Return whether an adapter adapts a layer; ``target_modules`` is interpreted as in peft."""
    if isinstance(target_modules, str):
        return re.fullmatch(target_modules, name) is not None
    suffixes = target_modules if isinstance(target_modules, list) else []
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


class NotPlainError(Exception):
    """An adapter is not the sum of its base and B A; the message lists the fields that say so."""


def plain_lora(
    record: Mapping[str, Any], layers: Mapping[str, tuple[int, ...]]
) -> tuple[float, dict[str, tuple[int, ...]]]:
    """Return the scale of a plain adapter, and the shapes of its tensors by their names.

    Args:
        record: its config.
        layers: the shape of the weight of each layer of its base, by the layer's name; it is empty
            for layers that are not linear.

    Raises:
        NotPlainError: only peft can apply the adapter.
    """
    values: dict[str, Any] = {**_DEFAULTS, **record}
    rank, alpha, targets = (values.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if special := special_fields(record):
        raise NotPlainError(", ".join(special))
    if not (type(rank) is int and rank > 0 and isinstance(alpha, int | float)):
        raise NotPlainError(f"r = {rank!r} and lora_alpha = {alpha!r}")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        adapted = {name: shape for name, shape in layers.items() if _is_target(name, targets)}
    except re.error as error:
        raise NotPlainError(f"target_modules = {targets!r}") from error
    if targets == "all-linear" or not all(adapted.values()):
        raise NotPlainError(f"target_modules = {targets!r}")
    for name, (out_features, in_features) in adapted.items():
        shapes[f"{name}.lora_A.weight"] = (rank, in_features)
        shapes[f"{name}.lora_B.weight"] = (out_features, rank)
    return alpha / (rank**0.5 if record.get("use_rslora") else rank), shapes


def identify(folder: Path, name: str, base_weights: str) -> str:
    """Compute ``EncoderIdentity.weights`` of an adapter on its base; all its weights are read.

    Args:
        folder: the adapter's folder.
        name: name of the adapter in messages.
        base_weights: ``EncoderIdentity.weights`` of the base.

    Raises:
        UserError: the adapter was trained on another base.
    """
    tuned = read_encoder_record(folder)
    if tuned is not None and tuned.base_weights not in (None, base_weights):
        raise UserError(
            f"{name} was trained on {tuned.base} with the weights {tuned.base_weights}, but the "
            f"weights found under that name are {base_weights}. Its vectors would differ from "
            "those in training. Restore the base that it was trained on."
        )
    record = read_json(folder / CONFIG)
    deciding = {
        # peft holds names as sets, and writes them in an arbitrary order.
        name: sorted(value, key=str) if isinstance(value, list) else value
        for name in _DECISIVE_FIELDS
        if (value := record.get(name, default := _DEFAULTS.get(name))) != default
        and (value or default)
    }
    content = f"{json.dumps(deciding, sort_keys=True)}\0{digest_file(folder / WEIGHTS)}"
    if (folder / ROUTER).is_file():
        content += f"\0{digest_file(folder / ROUTER)}"
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()} on {base_weights}"


# -- applying an adapter to its base -----------------------------------------------------------


def attach(network: Any, folder: Path, name: str, *, merge: bool) -> Any:
    """Apply an adapter, in place, to a base whose weights are loaded; return the same network.

    Args:
        network: the base.
        folder: the adapter's folder.
        name: name of the adapter in messages.
        merge: add all of the adapter to the base's weights. Otherwise the LoRA layers of quantised
            weights stay separate, and compute in the number type of the unquantised weights.

    Raises:
        UserError: as ``check_adapter``.
        LlmcondError: the adapter's file is broken, or a resulting weight is not finite.
    """
    # peft loads the weights that accelerate has offloaded to the CPU or to a disk.
    merge_here = merge and not any(value.is_meta for value in network.parameters())
    updates = _read_updates(network, folder, name) if merge_here else None
    try:
        if updates is None:
            _attach_with_peft(network, folder, name, merge=merge)
        for layer, scale, down, up in updates or ():
            # The sum is computed in float32, so that a weight of fewer bits is rounded once.
            weight = layer.weight.data
            weight += scale * (up.to(weight.device).float() @ down.to(weight.device).float())
            _check_overflow(weight)
    except (RuntimeError, ValueError) as error:
        raise LlmcondError(
            f"the adapter {name} cannot be added to the weights of its base: {first_line(error)}"
        ) from error
    return network


def check_adapter(network: Any, folder: Path, name: str, *, merge: bool) -> None:
    """Check that an adapter can be applied to a base, which has no weights and may be modified.

    The arguments are those of ``attach``.

    Raises:
        UserError: the adapter is not supported or belongs to another architecture, or it needs
            peft, which is not installed.
        LlmcondError: the adapter's file is broken.
    """
    if not merge or _read_updates(network, folder, name) is None:
        _inject(network, folder, name)


def _read_updates(
    network: Any, folder: Path, name: str
) -> list[tuple[Any, float, Any, Any]] | None:
    """Return what a plain adapter adds to each layer: the layer, the scale, A and B.

    The result is None if only peft can apply the adapter.

    Raises:
        UserError: the adapter belongs to another architecture.
        LlmcondError: the adapter's file is broken.
    """
    from torch import nn

    record, tensors = read_lora(folder, name), _read_tensors(folder, name)
    modules = dict(_find_root(network, tensors).named_modules())
    try:
        scale, expected = plain_lora(
            record,
            {
                key: tuple(layer.weight.shape) if type(layer) is nn.Linear else ()
                for key, layer in modules.items()
            },
        )
    except NotPlainError:
        return None
    if not expected:
        raise _other_base_error(network, record, name)
    tensors = _check_tensors(tensors, expected, expected, network, name)
    return [
        (modules[key.removesuffix(".lora_A.weight")], scale, tensors[key], tensors[up])
        for key, up in zip(*[iter(expected)] * 2, strict=True)
    ]


def _check_overflow(weight: Any) -> None:
    if not weight.isfinite().all():
        raise ValueError(
            f"they overflow in {weight.dtype}. Try another dtype (llmcond extract --dtype)."
        )


def _attach_with_peft(network: Any, folder: Path, name: str, *, merge: bool) -> None:
    root, values = _inject(network, folder, name)
    state = root.state_dict()
    for key, value in values.items():
        values[key] = value if state[key].is_meta else value.to(state[key])
    # The loader of peft is not used: it rounds the adapter to the base's number type before the
    # addition, moves the whole model to other devices, reads pickles, and only warns about missing
    # tensors.
    root.load_state_dict(values, strict=False, assign=True)
    _merge_or_keep_layers(root, merge)
    if hasattr(network, "peft_config"):
        del network.peft_config


def _inject(network: Any, folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
    """Insert an adapter's layers into a network by peft, without loading their weights.

    Returns:
        The module that the adapter's tensor names are relative to, and the tensors of its file,
        keyed by the names in that module's state dict.

    Raises:
        UserError: peft is not installed, or the adapter is not supported or belongs to another
            architecture.
        LlmcondError: the adapter's file is broken.
    """
    require_libraries(
        f"{name} is an adapter that is not plain LoRA on unquantised weights", "peft", extra="lora"
    )
    # peft imports bitsandbytes if that is installed, which then warns about faster kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import get_peft_model_state_dict, inject_adapter_in_model

    record, tensors = read_lora(folder, name), _read_tensors(folder, name)
    root = _find_root(network, tensors)
    try:
        _check_ranks(record, tensors, name)
        config = _build_lora_config(record, name, root)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # problems are reported below
            inject_adapter_in_model(config, root, _ADAPTER_NAME, low_cpu_mem_usage=True)
            state = root.state_dict()
            adapter_state = get_peft_model_state_dict(
                root, state, _ADAPTER_NAME, save_embedding_layers=False
            )
    except LlmcondError:
        raise
    except Exception as error:  # an invalid config can make peft raise any error
        if "not found in the base model" in str(error):
            raise _other_base_error(network, record, name) from error
        raise UserError(
            f"{CONFIG} of {name} cannot be applied to its base ({network.config.model_type}): "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    key_of = {id(value): state_key for state_key, value in state.items()}
    state_keys = {state_key: state_key for state_key in state} | {
        key: key_of[id(adapter_state[key])] for key in adapter_state
    }
    expected = {key: tuple(state[state_key].shape) for key, state_key in state_keys.items()}
    tensors = _check_tensors(tensors, expected, adapter_state, network, name)
    return root, {state_keys[key]: value for key, value in tensors.items()}


def _other_base_error(network: Any, record: Mapping[str, Any], name: str) -> UserError:
    """Return the error for an adapter whose layers its base does not have."""
    from torch import nn

    targets = record.get("target_modules")
    named = ", ".join(sorted(map(str, targets))) if isinstance(targets, list) else repr(targets)
    # Quantised layers are subclasses of nn.Linear, so this lists them too.
    linear = (key for key, layer in network.named_modules() if isinstance(layer, nn.Linear))
    return UserError(
        f"{name} is an adapter of the layers {named}, but its base ({network.config.model_type}) "
        "has none of them, so it belongs to another base. The linear layers of this base are "
        f"{', '.join(dict.fromkeys(key.rpartition('.')[2] for key in linear))}."
    )


def _read_tensors(folder: Path, name: str) -> dict[str, Any]:
    """Read an adapter's tensors, which must be finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        loaded = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise LlmcondError(
            f"{WEIGHTS} of {name} cannot be read: {first_line(error)}. Copy it again from the "
            f"source of {folder}."
        ) from error
    # 8-bit floats support neither isfinite nor addition.
    tensors = {
        key.removeprefix(PREFIX): value.float() if value.element_size() == 1 else value
        for key, value in loaded.items()
    }
    broken = [key for key, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise LlmcondError(
            f"{name} has NaN or infinity in {summarize_names(broken, 'tensors')}, so its vectors "
            "would be "
            "invalid. Train it again with a lower learning rate."
        )
    return tensors


def _find_root(network: Any, names: Iterable[str]) -> Any:
    """Return the module that tensor names are relative to: the network, or a model around it."""
    from torch import nn

    prefix = str(getattr(network, "base_model_prefix", ""))
    named = any(name.startswith(f"{prefix}.") for name in names)
    if not prefix or hasattr(network, prefix) or not named:
        return network
    root: Any = nn.Module()
    root.add_module(prefix, network)
    # peft reads these attributes of a model when it chooses the classes of its layers.
    for bits in ("is_loaded_in_8bit", "is_loaded_in_4bit"):
        setattr(root, bits, getattr(network, bits, False))
    return root


def _check_ranks(record: Mapping[str, Any], tensors: Mapping[str, Any], name: str) -> None:
    """Raise a ``UserError`` for ranks that exceed all tensors, before peft allocates memory."""
    largest = max((size for value in tensors.values() for size in value.shape), default=0)
    ranks = [record.get("r"), *(record.get("rank_pattern") or {}).values()]
    for rank in (rank for rank in ranks if isinstance(rank, int) and rank > largest):
        raise UserError(
            f"{CONFIG} of {name} has a rank of {rank:,}, but its tensors have at most {largest:,} "
            "rows, so the two files do not belong together. Copy both again."
        )


def _build_lora_config(record: Mapping[str, Any], name: str, root: Any) -> Any:
    """Build peft's config from checked fields only, because peft imports code that others name."""
    from peft import LoraConfig, PeftConfig

    initialisation = record.get("init_lora_weights")
    if initialisation not in NEUTRAL_INITIALISATIONS:
        raise UserError(
            f"{name} was initialised with init_lora_weights = {initialisation!r}, which changes "
            "the base's weights too. Convert it to a standard adapter with peft: "
            "save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...)"
        )
    defaults = LoraConfig().to_dict()
    used = {*PeftConfig().to_dict(), *_TRAINING_FIELDS, *_DECISIVE_FIELDS}
    changed = [k for k, v in record.items() if k not in used and v and v != defaults.get(k)]
    unknown_fields = [key for key in changed if key not in defaults]
    if unknown_fields:
        # peft ignores unknown fields too. If they add tensors, the check of tensors finds these.
        log.warning(
            f"{name} was saved by another version of peft, and {', '.join(unknown_fields)} in its "
            f"{CONFIG} is ignored. Update peft to apply it."
        )
    for key in (key for key in changed if key in defaults):
        raise UserError(
            f"{name} is an adapter with {key} = {record[key]!r}, which is not supported. Merge it "
            "into its base with peft (merge_and_unload), save the result, and name its folder."
        )
    fields = {key: record[key] for key in _DECISIVE_FIELDS if record.get(key) is not None}
    layer_names = [layer_name for layer_name, _ in root.named_modules()]
    saved_layers = [
        key
        for key in fields.pop("modules_to_save", ())
        if any(layer_name.endswith(key) for layer_name in layer_names)
    ]
    # The weights are read from the adapter's file, so they need no initialisation.
    return LoraConfig(
        **fields, modules_to_save=saved_layers or None, init_lora_weights=False, inference_mode=True
    )


def _check_tensors(
    tensors: Mapping[str, Any],
    expected: Mapping[str, tuple[int, ...]],
    adapter_keys: Iterable[str],
    network: Any,
    name: str,
) -> dict[str, Any]:
    """Return the tensors of an adapter without those of heads of other tasks.

    Raises:
        UserError: tensors are missing, unexpected or of a wrong shape.
    """
    tensors = {k: v for k, v in tensors.items() if k in expected or not IGNORED_WEIGHTS.search(k)}
    description = f"{name} on its base ({network.config.model_type})"
    missing = [key for key in adapter_keys if key not in tensors]
    unexpected = [key for key in tensors if key not in expected]
    problems = [f"lacks {summarize_names(missing, 'tensors')}"] if missing else []
    if unexpected:
        problems.append(f"has {summarize_names(unexpected, 'tensors')} that do not belong to it")
    if problems:
        raise UserError(
            f"{description} {' and '.join(problems)}. It was trained on another base, or its file "
            "is incomplete."
        )
    for key, value in tensors.items():
        if tuple(value.shape) != expected[key]:
            raise UserError(
                f"{description} has {key} of the shape {tuple(value.shape)}; expected "
                f"{expected[key]}. It was "
                "trained on another base, or with a rank other than the one in its config."
            )
    return tensors


def summarize_names(names: Iterable[str], what: str) -> str:
    """Return the number of names, with the first three: ``5 tensors (a, b, c, …)``."""
    names = sorted(names)
    return f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def _merge_or_keep_layers(root: Any, merge: bool) -> None:
    """Add the adapter's weights to those of the base where possible, and remove its layers."""
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import onload_layer
    from peft.utils import ModulesToSaveWrapper

    def move(layer: Any, dtype: Any) -> None:
        for part in layer.adapter_layer_names:
            getattr(layer, part).to(layer.get_base_layer().weight.device, dtype)

    # The weights that are not quantised have the number type that the network computes in.
    compute_dtype = next(
        value.dtype
        for name, value in root.named_parameters()
        if value.is_floating_point() and not re.search(r"(^|\.)(lora_|modules_to_save\.)", name)
    )
    for name, module in list(root.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            replacement = module.modules_to_save[_ADAPTER_NAME]
        elif isinstance(module, LoraLayer):
            base = module.get_base_layer()
            # The layers that pool are never quantised, and folding reads their merged weights.
            if not merge and not base.weight.is_floating_point():
                move(module, compute_dtype)
                continue
            with onload_layer(module):
                move(module, torch.float32)
                module.merge()
                _check_overflow(base.weight)
            replacement = base
        else:
            continue
        root.set_submodule(name, replacement)
