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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from llmcond.encoders.settings import CHOICES, MODEL_SETTINGS
from llmcond.errors import LlmcondError, UserError, first_line
from llmcond.files import check_format, digest_file, read_json, write_json
from llmcond.log import log
from llmcond.plugins import is_plugin

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: The weights of a router inside the encoder; see :mod:`llmcond.encoders.routers`.
ROUTER = "router.safetensors"
#: What training records of an encoder: see :class:`Tuned`.
TUNED = "encoder.json"

FORMAT = 1

#: The fields of an adapter's config that decide what is computed; empty where two are not given.
_DECIDING = (
    "r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "target_modules",
    "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern",
    "alpha_pattern",
)  # fmt: skip
_DEFAULTS = {"r": 8, "lora_alpha": 8}
#: Those that say how it was begun and trained.
_HISTORY = {
    "corda_config", "ensure_weight_tying", "eva_config", "init_lora_weights", "loftq_config",
    "lora_dropout", "lora_ga_config", "runtime_config",
}  # fmt: skip
#: How adapters are begun beside the base's weights; other ways change those as well.
BEGUN = (None, True, False, "gaussian", "eva", "orthogonal")

#: What peft calls the only adapter of a model.
_NAME = "default"
#: What adapters of models for other tasks have in front of each name.
PREFIX = "base_model.model."
#: Layers of other tasks, which an encoder leaves out.
_HEADS = re.compile(r"(lm_head|embed_out|score|cls|classifier|qa_outputs)\.")
_HEADS_AND_POOLER = re.compile(rf"{_HEADS.pattern}|(\w+\.)?pooler\.")
#: The fields of :class:`Tuned` that are texts, or None.
_TEXTS = ("base", "revision", "like", "base_weights", "dev_of")


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
        cross: whether it was trained as a cross-encoder.
        dev_of: digest of the data whose dev rows it was trained on; None: of none.
        members: adapters of an ensemble, each in a folder of :func:`member_folders`; 1: it is none.
    """

    base: str | None
    revision: str | None
    like: str | None
    settings: Mapping[str, Any]
    quantize: str
    base_weights: str | None
    cross: bool = False
    dev_of: str | None = None
    members: int = 1


def member_folders(folder: Path, members: int) -> tuple[Path, ...]:
    """Return where the adapters of an ensemble lie."""
    return tuple(folder / f"adapter-{number}" for number in range(members))


def write_tuned(folder: Path, tuned: Tuned) -> None:
    """Write what training records of an encoder into its folder; raises as ``write_json``."""
    write_json(folder / TUNED, {"format": FORMAT, **asdict(tuned)})


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
    found: dict[str, Any] = {field.name: record.get(field.name) for field in fields(Tuned)}
    # Which records have had not from the start.
    found |= {"cross": record.get("cross", False), "members": record.get("members", 1)}
    settings = found["settings"]
    members = found["members"]
    right = {name: isinstance(found[name], str | None) for name in _TEXTS} | {
        "settings": isinstance(settings, dict),
        "quantize": found["quantize"] in CHOICES["quantize"],
        "cross": isinstance(found["cross"], bool),
        "members": type(members) is int and members > 0,
    }
    wrong = {name: found[name] for name, holds in right.items() if not holds}
    if right["settings"]:
        wrong |= {key: value for key, value in settings.items() if not _is_setting(key, value)}
    for name, value in wrong.items():
        raise LlmcondError(
            f"{path} has {name} = {value!r}, which training never writes: it was damaged. Copy it "
            "anew."
        )
    return Tuned(**found)


def _is_setting(name: str, value: Any) -> bool:
    # Not isinstance: a bool is an int as well.
    if type(value) is not MODEL_SETTINGS.get(name):
        return False
    return (name == "pooling" and is_plugin(str(value))) or value in CHOICES.get(name, (value,))


# -- an adapter's files ------------------------------------------------------------------------


def read_lora(folder: Path, name: str) -> dict[str, Any]:
    """Read an adapter's config, and see that its weights are there.

    Raises:
        UserError: it is no LoRA adapter, or one that is not in safetensors.
    """
    record = read_json(folder / CONFIG)
    if (kind := record.get("peft_type")) != "LORA":
        raise UserError(
            f"{name} is an adapter of the kind {kind!r}, and only LORA is supported. Merge it into "
            "its base with peft (merge_and_unload), save that, and name its folder."
        )
    if not (folder / WEIGHTS).is_file():
        exists = (folder / "adapter_model.bin").is_file()
        raise UserError(
            f"{name} is an adapter without {WEIGHTS}"
            f"{' (its adapter_model.bin is not read)' if exists else ''}. Save it anew with peft: "
            "save_pretrained(FOLDER, safe_serialization=True)"
        )
    return record


def identify(folder: Path, name: str, base_weights: str) -> str:
    """Identify an adapter on its base, as ``EncoderIdentity.weights`` does; it is read whole.

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
    record = read_json(folder / CONFIG)
    deciding = {
        # peft keeps names as sets, and writes them in any order.
        name: sorted(value, key=str) if isinstance(value, list) else value
        for name in _DECIDING
        if (value := record.get(name, default := _DEFAULTS.get(name))) != default
        and (value or default)
    }
    decided = f"{json.dumps(deciding, sort_keys=True)}\0{digest_file(folder / WEIGHTS)}"
    if (folder / ROUTER).is_file():
        decided += f"\0{digest_file(folder / ROUTER)}"
    return f"sha256:{hashlib.sha256(decided.encode()).hexdigest()} on {base_weights}"


# -- putting an adapter onto its base ----------------------------------------------------------


def attach(network: Any, folder: Path, name: str, *, merge: bool) -> Any:
    """Put an adapter onto its base, which has its weights, in place; return the same network.

    Where it is merged, all of it is added to the base's weights; otherwise layers beside those that
    are quantised stay, and are computed in the type of the others.

    Raises:
        UserError: as :func:`inject`.
        LlmcondError: its file is broken, or what comes of it is not finite.
    """
    root, values = inject(network, folder, name)
    state = root.state_dict()
    for place, value in values.items():
        values[place] = value if state[place].is_meta else value.to(state[place])
    # Not by peft's own loading: it rounds the adapter to the base's type before it is added, moves
    # the whole model to other devices, reads pickles, and only warns of what is missing.
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


def inject(network: Any, folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
    """Put an adapter's layers into a network, still without their weights.

    Returns:
        What the adapter's names begin at, and the tensors of its file by their places in there.

    Raises:
        UserError: peft is not installed, or the adapter is another architecture's or is not
            supported.
        LlmcondError: its file is broken.
    """
    from llmcond.encoders.loading.quantization import require

    require(f"{name} is an adapter", "peft", extra="lora")
    # peft imports bitsandbytes where it is installed, which warns of faster kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import get_peft_model_state_dict, inject_adapter_in_model
    from torch import nn

    record, tensors = read_lora(folder, name), _read(folder, name)
    root, kind = _root(network, tensors), network.config.model_type
    try:
        _check_ranks(record, tensors, name)
        config = _lora_config(record, name, root)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong is told below
            inject_adapter_in_model(config, root, _NAME, low_cpu_mem_usage=True)
            state = root.state_dict()
            own = get_peft_model_state_dict(root, state, _NAME, save_embedding_layers=False)
    except LlmcondError:
        raise
    except Exception as error:  # whatever a file of settings can make a library raise
        if "not found in the base model" not in str(error):
            raise UserError(
                f"{CONFIG} of {name} describes nothing that can be put onto its base ({kind}): "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        wanted = record.get("target_modules")
        wanted = ", ".join(sorted(map(str, wanted))) if isinstance(wanted, list) else repr(wanted)
        # Of a subclass too: so are quantised layers.
        linear = (key for key, layer in network.named_modules() if isinstance(layer, nn.Linear))
        raise UserError(
            f"{name} is for the layers {wanted}, and its base ({kind}) has none of them, so it is "
            "another one's. Its linear layers are "
            f"{', '.join(dict.fromkeys(key.rpartition('.')[2] for key in linear))}."
        ) from error
    place_of = {id(value): place for place, value in state.items()}
    places = {place: place for place in state} | {key: place_of[id(own[key])] for key in own}
    left_out = _HEADS_AND_POOLER if getattr(network, "pooler", None) is None else _HEADS
    tensors = {k: v for k, v in tensors.items() if k in places or not left_out.match(k)}
    expected = {key: state[place] for key, place in places.items()}
    _compare(tensors, expected, own, f"{name} on its base ({kind})")
    return root, {places[key]: value for key, value in tensors.items()}


def _read(folder: Path, name: str) -> dict[str, Any]:
    """Read an adapter's tensors, which must be finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        loaded = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise LlmcondError(
            f"{WEIGHTS} of {name} cannot be read: {first_line(error)}. Copy it anew from where "
            f"{folder} comes from."
        ) from error
    # Types of 8 bit can be neither checked nor added to anything.
    tensors = {
        key.removeprefix(PREFIX): value.float() if value.element_size() == 1 else value
        for key, value in loaded.items()
    }
    broken = [key for key, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise LlmcondError(
            f"{name} has NaN or infinity in {counted(broken, 'tensors')}, so its vectors would be "
            "none. Train it anew, with a lower learning rate."
        )
    return tensors


def _root(network: Any, names: Iterable[str]) -> Any:
    """Return what an adapter's names begin at: the network, or the one for a task around it."""
    from torch import nn

    prefix = str(getattr(network, "base_model_prefix", ""))
    named = any(name.startswith(f"{prefix}.") for name in names)
    if not prefix or hasattr(network, prefix) or not named:
        return network
    root: Any = nn.Module()
    root.add_module(prefix, network)
    # What peft asks a model for when it chooses its layers.
    for bits in ("is_loaded_in_8bit", "is_loaded_in_4bit"):
        setattr(root, bits, getattr(network, bits, False))
    return root


def _check_ranks(record: Mapping[str, Any], tensors: Mapping[str, Any], name: str) -> None:
    """Refuse ranks that no tensor has, before there is memory for layers of them."""
    largest = max((size for value in tensors.values() for size in value.shape), default=0)
    ranks = [record.get("r"), *(record.get("rank_pattern") or {}).values()]
    for rank in (rank for rank in ranks if isinstance(rank, int) and rank > largest):
        raise UserError(
            f"{CONFIG} of {name} has a rank of {rank:,}, and its tensors have at most {largest:,} "
            "rows: they do not belong together. Copy both anew."
        )


def _lora_config(record: Mapping[str, Any], name: str, root: Any) -> Any:
    """Return peft's config; only of fields that are checked: peft imports what some others name."""
    from peft import LoraConfig, PeftConfig

    begun = record.get("init_lora_weights")
    if begun not in BEGUN:
        raise UserError(
            f"{name} was begun by init_lora_weights = {begun!r}, which changes the base's weights "
            "too. Convert it to a plain one: save_pretrained(FOLDER, "
            "path_initial_model_for_weight_conversion=...) in peft."
        )
    usual = LoraConfig().to_dict()
    used = {*PeftConfig().to_dict(), *_HISTORY, *_DECIDING}
    changed = [k for k, v in record.items() if k not in used and v and v != usual.get(k)]
    later = [key for key in changed if key not in usual]
    if later:
        # As peft itself does; what they add to the adapter's tensors is compared below.
        log.warning(
            f"{name} was saved by another version of peft, and {', '.join(later)} of its {CONFIG} "
            "is ignored. Update peft to heed it."
        )
    for key in (key for key in changed if key in usual):
        raise UserError(
            f"{name} is an adapter with {key} = {record[key]!r}, which is not supported. Merge it "
            "into its base with peft (merge_and_unload), save that, and name its folder."
        )
    fields = {key: record[key] for key in _DECIDING if record.get(key) is not None}
    layers = [own for own, _ in root.named_modules()]
    saved = [
        key for key in fields.pop("modules_to_save", ()) if any(own.endswith(key) for own in layers)
    ]
    # Weights are not initialised: they are read.
    return LoraConfig(
        **fields, modules_to_save=saved or None, init_lora_weights=False, inference_mode=True
    )


def _compare(
    tensors: Mapping[str, Any], expected: Mapping[str, Any], own: Iterable[str], what: str
) -> None:
    """Refuse an adapter that lacks tensors of its ``own``, or has some that fit nowhere."""
    missing = [name for name in own if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    wrong = [f"lacks {counted(missing, 'tensors')}"] if missing else []
    if unexpected:
        wrong.append(f"has {counted(unexpected, 'tensors')} that do not belong there")
    if wrong:
        raise UserError(
            f"{what} {' and '.join(wrong)}: it was trained on another base, or its file is not "
            "whole."
        )
    for name, value in tensors.items():
        shape, fits = tuple(value.shape), tuple(expected[name].shape)
        if shape != fits:
            raise UserError(
                f"{what} has {name} of the shape {shape}, and {fits} fits "
                "there: it was trained on another base, or with another rank than its config says."
            )


def counted(names: Iterable[str], what: str) -> str:
    """Return how many names there are, and the first three."""
    names = sorted(names)
    return f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"


def _take_out(root: Any, merge: bool) -> None:
    """Add the adapter's weights to those of the base where that can be, and take its layers out."""
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import onload_layer
    from peft.utils import ModulesToSaveWrapper

    def move(layer: Any, dtype: Any) -> None:
        for part in layer.adapter_layer_names:
            getattr(layer, part).to(layer.get_base_layer().weight.device, dtype)

    # What is not quantised has the type that the network computes in.
    computed_in = next(
        value.dtype
        for name, value in root.named_parameters()
        if value.is_floating_point() and not re.search(r"(^|\.)(lora_|modules_to_save\.)", name)
    )
    for name, module in list(root.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            left = module.modules_to_save[_NAME]
        elif isinstance(module, LoraLayer):
            base = module.get_base_layer()
            # What pools is not quantised with the rest, and folding reads its weights.
            if not merge and not base.weight.is_floating_point():
                move(module, computed_in)
                continue
            with onload_layer(module):
                move(module, torch.float32)
                module.merge()
                if not base.weight.isfinite().all():
                    raise ValueError(
                        f"they overflow in {base.weight.dtype}. Try another dtype (llmcond extract "
                        "--dtype)."
                    )
            left = base
        else:
            continue
        root.set_submodule(name, left)
