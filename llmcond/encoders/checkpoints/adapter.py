"""Adapters: LoRA weights in peft's format, which are added to those of a base encoder.

What says how an adapter is used is read without peft; peft itself is imported to use one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcond.encoders.options import CHOICES, MODEL_SETTINGS
from llmcond.errors import LlmcondError, UserError, first_line
from llmcond.files import check_format, digest_file, read_json, write_json
from llmcond.log import log
from llmcond.plugins import is_plugin

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: What training records of an encoder: see :class:`Tuned`.
TUNED = "encoder.json"

FORMAT = 1

#: The fields of an adapter's config that decide what is computed, and what they mean left out.
_DECIDING: dict[str, Any] = {
    "r": 8,
    "lora_alpha": 8,
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "target_modules": None,
    "exclude_modules": None,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layers_pattern": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
#: Those that say where it comes from, how it was begun and how it was trained.
_HISTORY = {
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "peft_type",
    "peft_version",
    "revision",
    "runtime_config",
    "task_type",
}
#: How adapters are begun beside the base's weights; other ways change those as well.
_BEGUN = (None, True, False, "gaussian", "eva", "orthogonal")

#: What peft calls the only adapter of a model.
_NAME = "default"
#: What adapters of models for other tasks have in front of each name.
_PREFIX = "base_model.model."
#: Layers of other tasks, which an encoder leaves out.
_HEADS = re.compile(r"(lm_head|embed_out|score|cls|classifier|qa_outputs)\.")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What training records of an encoder, so that it is used as it was trained.

    Attributes:
        base: alias, hub name or absolute folder of the encoder that an adapter belongs to; None
            where the folder itself is a whole checkpoint.
        revision: the base's commit on the hub.
        like: repository of the known model whose settings it has.
        settings: those of an encoder's identity that it was trained with.
        quantize: what the base's weights were quantised to in training.
        base_weights: the base's ``EncoderIdentity.weights`` in training.
    """

    base: str | None
    revision: str | None
    like: str | None
    settings: Mapping[str, Any]
    quantize: str
    base_weights: str | None


def write_tuned(folder: Path, tuned: Tuned) -> None:
    """Write what training records of an encoder into its folder.

    Raises:
        DiskFullError: no room.
        UserError: the folder cannot be written.
    """
    record = {
        "format": FORMAT,
        "base": tuned.base,
        "revision": tuned.revision,
        "like": tuned.like,
        "settings": dict(tuned.settings),
        "quantize": tuned.quantize,
        "base_weights": tuned.base_weights,
    }
    write_json(folder / TUNED, record)


def read_tuned(folder: Path) -> Tuned | None:
    """Read what :func:`write_tuned` wrote; None where a folder holds none of it.

    Raises:
        UserError: it cannot be read, or a newer version wrote it.
        LlmcondError: it was damaged.
    """
    path = folder / TUNED
    if not path.is_file():
        return None
    record = read_json(path)
    if record.get("format") != FORMAT and all(type(value) is int for value in record.values()):
        return None  # a vocabulary, which GPT-2's authors gave this name
    check_format(record, FORMAT, str(path))
    names = ("base", "revision", "like", "base_weights")
    settings = record.get("settings")
    wrong = [name for name in names if not isinstance(record.get(name), str | None)]
    if not isinstance(settings, dict):
        raise _damaged(path, "settings", settings)
    wrong += [name for name, value in settings.items() if not _is_setting(name, value)]
    wrong += [] if record.get("quantize") in CHOICES["quantize"] else ["quantize"]
    if wrong:
        raise _damaged(path, wrong[0], {**record, **settings}.get(wrong[0]))
    return Tuned(
        **{name: record.get(name) for name in names},
        settings=settings,
        quantize=record["quantize"],
    )


def _damaged(path: Path, name: str, value: Any) -> LlmcondError:
    return LlmcondError(
        f"{path} has {name} = {value!r}, which training never writes: it was damaged. Copy it anew."
    )


def _is_setting(name: str, value: Any) -> bool:
    # Not isinstance: a bool is an int as well.
    if type(value) is not MODEL_SETTINGS.get(name):
        return False
    plugin = name == "pooling" and is_plugin(str(value))
    return plugin or value in CHOICES.get(name, (value,))


# -- an adapter's files ------------------------------------------------------------------------


def read_lora(folder: Path, name: str) -> dict[str, Any]:
    """Read an adapter's config, and see that its weights are there.

    Args:
        folder: of the adapter.
        name: what messages call it.

    Raises:
        UserError: it is no LoRA adapter, or one that is not in safetensors.
    """
    record = read_json(folder / CONFIG)
    kind = record.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"{name} is an adapter of the kind {kind!r}, and only LORA is supported. Merge it into "
            "its base with peft (merge_and_unload), save that, and name its folder."
        )
    if not (folder / WEIGHTS).is_file():
        old = " (its adapter_model.bin is not read)"
        raise UserError(
            f"{name} is an adapter without {WEIGHTS}"
            f"{old if (folder / 'adapter_model.bin').is_file() else ''}. Save it anew with peft: "
            "save_pretrained(FOLDER, safe_serialization=True)"
        )
    return record


def identify(folder: Path, name: str, base_weights: str) -> str:
    """Identify an adapter on its base, as ``EncoderIdentity.weights`` does.

    Args:
        folder: of the adapter, which is read whole.
        name: what messages call it.
        base_weights: which the base has.

    Raises:
        UserError: it was trained on another base.
    """
    tuned = read_tuned(folder)
    if tuned is not None and tuned.base_weights not in (None, base_weights):
        raise UserError(
            f"{name} was trained on {tuned.base} with the weights {tuned.base_weights}, and those "
            f"found under that name are {base_weights}. Its vectors would be others: put the base "
            "that it was trained on in that place."
        )
    return f"sha256:{_digest(folder)} on {base_weights}"


def _digest(folder: Path) -> str:
    """Return a SHA-256 over an adapter's weights and what decides how they are used."""
    record = read_json(folder / CONFIG)
    deciding = {
        # peft keeps names as sets, and writes them in any order.
        name: sorted(value, key=str) if isinstance(value, list) else value
        for name, default in _DECIDING.items()
        if (value := record.get(name, default)) != default and (value or default)
    }
    decided = json.dumps(deciding, sort_keys=True)
    return hashlib.sha256(f"{decided}\0{digest_file(folder / WEIGHTS)}".encode()).hexdigest()


# -- putting an adapter onto its base ----------------------------------------------------------


def check_adapter(network: Any, folder: Path, name: str) -> None:
    """Refuse an adapter that does not belong to an architecture, before weights are downloaded.

    Args:
        network: of the base, without memory for its weights; peft's layers are left in it.
        folder: of the adapter.
        name: what messages call it.

    Raises:
        UserError: peft is not installed, or the adapter is another architecture's or is not
            supported.
        LlmcondError: its file is broken.
    """
    _require_peft(name)
    _inject(network, folder, name, _shapes(folder, name))


def attach(network: Any, folder: Path, name: str, *, merge: bool) -> Any:
    """Put an adapter onto its base, in place.

    Args:
        network: of the base, with its weights.
        folder: of the adapter.
        name: what messages call it.
        merge: whether all of it is added to the base's weights; otherwise layers beside those
            that are quantised stay, and are computed in the type of the others.

    Returns:
        The same network.

    Raises:
        UserError: peft is not installed, or the adapter is another architecture's or is not
            supported.
        LlmcondError: its file is broken, or what comes of it is not finite.
    """
    _require_peft(name)
    tensors = _read(folder, name)
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    root, places = _inject(network, folder, name, shapes)
    state = root.state_dict()
    values = {
        place: tensors[key] if state[place].is_meta else tensors[key].to(state[place])
        for key, place in places.items()
    }
    # Not by peft's own from_pretrained: it moves the whole model to other devices where it finds
    # some, reads pickles, and only warns of what is missing.
    root.load_state_dict(values, strict=False, assign=True)
    try:
        _take_out(root, merge)
    except (RuntimeError, ValueError) as error:
        raise LlmcondError(
            f"the adapter {name} cannot be added to its base's weights: {first_line(error)}"
        ) from error
    if hasattr(network, "peft_config"):
        del network.peft_config
    return network


def _require_peft(name: str) -> None:
    from llmcond.encoders.loading.quantization import require

    require(f"{name} is an adapter", "peft", extra="lora")
    # peft imports bitsandbytes where it is installed, which warns of faster kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Read an adapter's tensors, which must be finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        loaded = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _broken(folder, name, error) from error
    tensors = {key.removeprefix(_PREFIX): value for key, value in loaded.items()}
    broken = [key for key, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise LlmcondError(
            f"{name} has NaN or infinity in {_named(broken)}, so its vectors would be none. Train "
            "it anew, with a lower learning rate."
        )
    return tensors


def _shapes(folder: Path, name: str) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return {
                key.removeprefix(_PREFIX): tuple(file.get_slice(key).get_shape())
                for key in file.keys()  # noqa: SIM118 - it is no mapping
            }
    except (OSError, SafetensorError) as error:
        raise _broken(folder, name, error) from error


def _broken(folder: Path, name: str, error: Exception) -> LlmcondError:
    return LlmcondError(
        f"{WEIGHTS} of {name} cannot be read: {first_line(error)}. Copy it anew from where "
        f"{folder} comes from."
    )


def _inject(network: Any, folder: Path, name: str, shapes: Shapes) -> tuple[Any, dict[str, str]]:
    """Put an adapter's layers into a network, still without their weights.

    Returns:
        What the adapter's names begin at, and for each tensor of its file the place in there.

    Raises:
        UserError: it is another network's, or is not supported.
    """
    from peft.tuners.lora import LoraModel

    record = read_lora(folder, name)
    root, kind = _root(network, shapes), network.config.model_type
    try:
        config = _lora_config(record, name, root)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong is told below
            LoraModel(root, config, _NAME, low_cpu_mem_usage=True)
    except LlmcondError:
        raise
    except Exception as error:  # whatever a file of settings can make a library raise
        if "not found in the base model" in str(error):
            targets = record.get("target_modules")
            named = (
                ", ".join(sorted(map(str, targets))) if isinstance(targets, list) else repr(targets)
            )
            raise UserError(
                f"{name} is for the layers {named}, and its base ({kind}) has none of "
                f"them, so it is another one's. Its linear layers are {_linear_names(network)}."
            ) from error
        raise UserError(
            f"{CONFIG} of {name} describes nothing that can be put onto its base ({kind}): "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    places = _places(root)
    _compare(places, shapes, root, f"{name} on its base ({kind})")
    return root, {key: place for key, place in places.items() if key in shapes}


def _root(network: Any, names: Iterable[str]) -> Any:
    """Return what an adapter's names begin at: the network, or the one for a task around it."""
    from torch import nn

    prefix = str(getattr(network, "base_model_prefix", ""))
    if not prefix or hasattr(network, prefix):
        return network
    if not any(name.startswith(f"{prefix}.") for name in names):
        return network
    root: Any = nn.Module()
    root.add_module(prefix, network)
    # What peft asks a model for when it chooses its layers.
    for bits in ("is_loaded_in_8bit", "is_loaded_in_4bit"):
        setattr(root, bits, getattr(network, bits, False))
    return root


def _lora_config(record: Mapping[str, Any], name: str, root: Any) -> Any:
    from peft import LoraConfig

    begun = record.get("init_lora_weights")
    if begun not in _BEGUN:
        raise UserError(
            f"{name} was begun by init_lora_weights = {begun!r}, which changes the base's weights "
            "too. Convert it to a plain one: save_pretrained(FOLDER, "
            "path_initial_model_for_weight_conversion=...) in peft."
        )
    usual = LoraConfig().to_dict()
    changed = {
        key: value
        for key, value in record.items()
        if key not in _HISTORY | _DECIDING.keys() and value and value != usual.get(key)
    }
    later = [key for key in changed if key not in usual]
    if later:
        # As peft itself does; what they add to the adapter's tensors is compared below.
        log.warning(
            f"{name} was saved by another version of peft, and {', '.join(later)} of its {CONFIG} "
            "is ignored. Update peft to heed it."
        )
    refused = [key for key in changed if key in usual]
    refused += [] if record.get("bias", "none") == "none" else ["bias"]
    if refused:
        raise UserError(
            f"{name} is an adapter with {refused[0]} = {record[refused[0]]!r}, which is not "
            "supported. Merge it into its base with peft (merge_and_unload), save that, and name "
            "its folder."
        )
    fields = {key: record[key] for key in _DECIDING if record.get(key) is not None}
    saved = [
        key
        for key in fields.pop("modules_to_save", ())
        if any(own.endswith(key) for own, _ in root.named_modules())
    ]
    # Weights are not initialised: they are read.
    return LoraConfig(
        **fields, modules_to_save=saved or None, init_lora_weights=False, inference_mode=True
    )


def _places(root: Any) -> dict[str, str]:
    """Return where a network has each tensor that an adapter's file may hold, by its name there."""
    places = {}
    for place in root.state_dict():
        if ".original_module." not in place:
            name = place.replace(f".modules_to_save.{_NAME}.", ".")
            name = re.sub(rf"(\.lora_\w+)\.{_NAME}(\.\w+)?$", r"\1\2", name)
            # Written without the name of the layer that it became.
            places[re.sub(r"(\.lora_magnitude_vector)\.weight$", r"\1", name)] = place
    return places


def _compare(places: Mapping[str, str], shapes: Shapes, root: Any, what: str) -> None:
    """Refuse an adapter that lacks tensors, or has some that its base does not."""
    state = root.state_dict()
    missing = [name for name, place in places.items() if _is_own(place) and name not in shapes]
    unexpected = [name for name in shapes if name not in places and not _is_left_out(name, root)]
    if missing or unexpected:
        lacks = f"lacks {_named(missing)}" if missing else ""
        has = f"has {_named(unexpected)} that do not belong there" if unexpected else ""
        raise UserError(
            f"{what} {' and '.join(filter(None, (lacks, has)))}: it was trained on another base, "
            "or its file is not whole."
        )
    for name, shape in shapes.items():
        if name in places and shape != tuple(state[places[name]].shape):
            expected = tuple(state[places[name]].shape)
            raise UserError(
                f"{what} has {name} of the shape {shape}, and {expected} fits there: it was "
                "trained on another base, or with another rank than its config says."
            )


def _is_own(place: str) -> bool:
    """Return whether a tensor is the adapter's, rather than the base's."""
    return ".lora_" in place or f".modules_to_save.{_NAME}." in place


def _is_left_out(name: str, root: Any) -> bool:
    pooler = [module for own, module in root.named_modules() if own.endswith("pooler")]
    return _HEADS.match(name) is not None or (
        not pooler and re.match(r"(\w+\.)?pooler\.", name) is not None
    )


def _linear_names(network: Any) -> str:
    from torch import nn

    # Of a subclass too: so are quantised layers.
    layers = (name for name, layer in network.named_modules() if isinstance(layer, nn.Linear))
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))


def _named(names: Iterable[str]) -> str:
    names = sorted(names)
    return f"{len(names)} tensors ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def _take_out(root: Any, merge: bool) -> None:
    """Add the adapter's weights to those of the base where that can be, and take its layers out."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import onload_layer
    from peft.utils import ModulesToSaveWrapper

    dtype = _computed_in(root)
    for name, module in list(root.named_modules()):
        left: Any = None
        if isinstance(module, ModulesToSaveWrapper):
            left = module.modules_to_save[_NAME]
        elif isinstance(module, LoraLayer):
            base = module.get_base_layer()
            # What pools is not quantised with the rest, and folding reads its weights.
            if merge or base.weight.is_floating_point():
                with onload_layer(module):
                    _add(module, base)
                left = base
            else:
                _move(module, base.weight.device, dtype)
        if left is not None:
            parent, _, own = name.rpartition(".")
            setattr(root.get_submodule(parent), own, left)


def _computed_in(root: Any) -> Any:
    """Return the type that a network computes in, which is that of what is not quantised."""
    kinds = (value.dtype for name, value in root.named_parameters() if not _is_own(f".{name}"))
    return next(kind for kind in kinds if kind.is_floating_point)


def _add(layer: Any, base: Any) -> None:
    import torch

    _move(layer, base.weight.device, torch.float32)
    layer.merge()
    if base.weight.is_floating_point() and not base.weight.isfinite().all():
        raise ValueError(f"they overflow in {base.weight.dtype}. Try another --dtype.")


def _move(layer: Any, device: Any, dtype: Any) -> None:
    for part in layer.adapter_layer_names:
        getattr(layer, part).to(device, dtype)
