"""An embedder as modules of sentence-transformers: its layers and tokens, and the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from llmcond.arrays import Array
from llmcond.encoders.checkpoints.checkpoint import read_settings
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.loading.loading import (
    load_config,
    load_model,
    load_tokenizer,
    read_all_weights,
)
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.settings import SETTINGS, encoder_types
from llmcond.encoders.spec import get_pooling
from llmcond.errors import UserError
from llmcond.exporting.tokenizers import Affixes, find_affixes, write_tokenizer
from llmcond.files import write_json
from llmcond.finetune.loop import write_tensors
from llmcond.heads.numpy_heads import DenseLayer
from llmcond.heads.settings import Activation
from llmcond.prompts import Prompt
from llmcond.runs.embedder import Embedder

TensorLayer: TypeAlias = DenseLayer[Tensor]

#: Pooling modes in the form of the config that other servers read as well.
_MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens",
          "lasttoken")  # fmt: skip
_ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {
    "none": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh,
}  # fmt: skip
#: Positively homogeneous activations: f(a x) = a f(x) for a > 0.
_HOMOGENEOUS = ("none", "relu")


class NotExportableError(UserError):
    """An embedder cannot be expressed as modules of sentence-transformers; the message says why."""


@dataclass(frozen=True)
class ModularEmbedder:
    """An embedder under some conditions, as layers and tokens.

    Attributes:
        affixes: text and tokens around every text, by condition.
        layers: layers after the encoder's vectors, by condition.
    """

    affixes: Mapping[str, Affixes]
    layers: Mapping[str, Sequence[TensorLayer]]

    @property
    def same_layers(self) -> bool:
        """Whether the layers are the same under all conditions."""
        first, *others = self.layers.values()
        return all(
            len(other) == len(first)
            and all(
                torch.equal(a.weight, b.weight) and _both_equal(a.bias, b.bias)
                for a, b in zip(other, first, strict=True)
            )
            for other in others
        )

    @property
    def text_prefixes(self) -> Mapping[str, str]:
        """Text that sentence-transformers puts in front of texts, by condition."""
        return {condition: affixes.text_prefix for condition, affixes in self.affixes.items()}


def _both_equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def export_obstacles(embedder: Embedder) -> Iterator[str]:
    """Yield reasons why sentence-transformers has no modules for an embedder."""
    identity, view = embedder.encoder.identity, embedder.view
    if len(view.prompts) > 1:
        yield f"it reads each text with {len(view.prompts)} prompts ({view.name})"
    part, prompt = view.prompts[0].conditional, view.prompts[0]
    if part.router is not None:
        yield f"the prompt {prompt.name} pools by the condition"
    if part.context is not None:
        yield f"the prompt {prompt.name} reads a pair of texts and pools one of them"
    if view.subtracts and not prompt.subtracts_condition:
        yield f"the prompt {prompt.name} subtracts a vector that depends on the sentence"
    if embedder.encoder.resolved.checkpoint.members:
        yield "its encoder is an ensemble"
    for name, setting in SETTINGS.items():
        value = getattr(identity, name)
        if setting.unplain and value != setting.settled_default:
            yield setting.unplain.format(value)
    if not get_pooling(identity.pooling).module:
        yield f"{embedder.encoder.name} pools by {identity.pooling}"
    if not embedder.head.compares_by_cosine:
        yield f"the head {embedder.name} does not compare embeddings by their cosine"


def to_modules(embedder: Embedder, conditions: Sequence[str]) -> tuple[ModularEmbedder, Any]:
    """Express an embedder as layers and tokens; return them with its tokenizer.

    The embedder must have no ``export_obstacles``.

    Raises:
        NotExportableError: its tokens or its head cannot be expressed as modules of
            sentence-transformers.
    """
    resolved, prompt = embedder.encoder.resolved, embedder.view.prompts[0]
    checkpoint, identity = resolved.checkpoint, resolved.identity
    tokenizer = load_tokenizer(checkpoint, load_config(checkpoint, identity.attention))
    if not tokenizer.is_fast:
        raise NotExportableError(f"{checkpoint.name} has no fast tokenizer")
    reader = InputTokenizer(tokenizer, identity, checkpoint.name)
    # Callers can select a text prefix with each call, but not tokens.
    several = len(conditions) > 1 and not prompt.separate
    affixes = {
        condition: find_affixes(reader, tokenizer, prompt.conditional, condition, lead=several)
        for condition in conditions
    }
    constant_affixes = {
        condition: value for condition, value in affixes.items() if value is not None
    }
    if len(constant_affixes) < len(affixes):
        raise NotExportableError(
            f"the tokens that the prompt {prompt.name} puts around a sentence depend on the "
            "sentence"
        )
    return ModularEmbedder(constant_affixes, _layers_by_condition(embedder, conditions)), tokenizer


def _layers_by_condition(
    embedder: Embedder, conditions: Sequence[str]
) -> dict[str, list[TensorLayer]]:
    view, head, layers_by_condition = embedder.view, embedder.head, {}
    of_condition, subtracts = view.condition_prompt(), view.subtracts
    for condition in conditions:
        condition_vector = None
        if of_condition is not None:
            condition_vector = _encode_condition(embedder, of_condition, condition)[None]
        head_layers: Sequence[DenseLayer[Any]] | None = []
        if not head.is_identity:
            head_layers = head.dense_layers(condition_vector)
        if head_layers is None:
            raise NotExportableError(
                f"the head {embedder.name} ({head.kind}) does not consist of dense layers"
            )
        layers = [_fold_mean(layer) for layer in head_layers]
        if subtracts:
            subtracted = _encode_condition(embedder, view.prompts[0], condition)
            first = layers[0] if layers else DenseLayer(torch.eye(len(subtracted)))
            layers = [_fold_mean(first._replace(mean=torch.from_numpy(subtracted))), *layers[1:]]
        layers_by_condition[condition] = layers
    return layers_by_condition


def _fold_mean(layer: DenseLayer[Any]) -> TensorLayer:
    """Return a layer of tensors with the subtracted mean folded into its bias."""
    weight, bias, activation, mean = layer
    weight = torch.as_tensor(weight)
    bias = None if bias is None else torch.as_tensor(bias)
    if mean is not None:
        bias = -(weight @ torch.as_tensor(mean)) + (0 if bias is None else bias)
    return DenseLayer(weight, bias, activation)


def _encode_condition(embedder: Embedder, prompt: Prompt, condition: str) -> Array:
    """Return the unconditional vector of a condition, (dim,)."""
    item = prompt.unconditional.render("", condition)
    vector: Array = embedder.encoder.encode([item])[0]
    return vector


# -- files -------------------------------------------------------------------------------------


def write_modules(
    folder: Path,
    resolved: ResolvedEncoder,
    tokenizer: Any,
    modular: ModularEmbedder,
    *,
    route: bool,
) -> list[str]:
    """Write the files of all modules; return their names.

    Paths and settings of modules are those that sentence-transformers has read since its first
    versions, as other servers know no others. If ``route`` is true, each call selects the layers by
    condition.
    """
    identity = resolved.identity
    first = next(iter(modular.affixes.values()))
    write_tokenizer(tokenizer, first.before, first.after, identity.max_length, folder)
    dense = _write_network(folder, resolved)
    pooled = get_pooling(identity.pooling).module
    pooling = {
        "word_embedding_dimension": load_config(
            resolved.checkpoint, identity.attention
        ).hidden_size,
        **{f"pooling_mode_{mode}": mode == pooled for mode in _MODES},
        "include_prompt": True,
    }
    kinds: list[tuple[str, Any]] = [("Transformer", None), ("Pooling", pooling)]
    kinds += [("Dense", layer) for layer in dense]
    if identity.normalize and any(map(_depends_on_norm, modular.layers.values())):
        kinds.append(("Normalize", {}))
    if route:
        kinds.append(("Router", modular.layers))
    else:
        kinds += [("Dense", layer) for layer in next(iter(modular.layers.values()))]
    kinds.append(("Normalize", {}))
    entries = []
    for number, (kind, value) in enumerate(kinds):
        path = f"{number}_{kind}" if number else ""
        entries.append(
            {"idx": number, "name": str(number), "path": path, "type": _module_type(kind)}
        )
        if kind == "Dense":
            _write_dense(folder / path, value)
        elif kind == "Router":
            _write_router(folder / path, value)
        elif value is not None:
            write_json(folder / path / "config.json", value)
    write_json(folder / "modules.json", entries)
    write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": identity.max_length, "do_lower_case": False},
    )
    return [kind for kind, _ in kinds]


def _depends_on_norm(layers: Sequence[TensorLayer]) -> bool:
    """Return whether the direction of the layers' output depends on the norm of their input."""
    return any(layer.bias is not None or layer.activation not in _HOMOGENEOUS for layer in layers)


def _module_type(kind: str) -> str:
    return f"sentence_transformers.models.{kind}"


def _write_network(folder: Path, resolved: ResolvedEncoder) -> list[TensorLayer]:
    """Write the encoder's weights with merged adapters; return the encoder's own dense layers."""
    checkpoint, identity = resolved.checkpoint, resolved.identity
    config = read_settings(checkpoint.folder / "config.json", {})
    loaded = load_model(resolved, load_config(checkpoint, identity.attention))
    weights = read_all_weights(loaded.network, checkpoint)
    kinds = {kind: name for name, kind in _ACTIVATIONS.items()}
    modules: list[Any] = list(loaded.dense)
    dense = [
        DenseLayer(linear.weight, linear.bias, kinds[type(activation)])
        for linear, activation in zip(modules[::2], modules[1::2], strict=True)
    ]
    if get_pooling(identity.pooling).part == "pooler":
        pooler = loaded.network.pooler.dense
        dense = [DenseLayer(pooler.weight, pooler.bias, "tanh"), *dense]
    dtype = identity.dtype
    write_tensors(
        folder / "model.safetensors",
        {name: _cast(value, dtype) for name, value in weights.items()},
        {"format": "pt"},
    )
    for key in ("auto_map", "_name_or_path", "torch_dtype"):
        config.pop(key, None)
    if is_bidirectional_decoder(resolved):
        config["is_causal"] = False
    write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    return dense


def _cast(value: Tensor, dtype: str) -> Tensor:
    return value.to(getattr(torch, dtype)) if value.is_floating_point() else value


def is_bidirectional_decoder(resolved: ResolvedEncoder) -> bool:
    """Return whether the encoder is a decoder whose tokens also attend to later tokens."""
    config = read_settings(resolved.checkpoint.folder / "config.json", {})
    known_to_transformers = (
        config.get("use_bidirectional_attention") or config.get("model_type") in encoder_types()
    )
    return resolved.identity.attention == "bidirectional" and not known_to_transformers


def _write_dense(folder: Path, layer: TensorLayer) -> None:
    kind = _ACTIVATIONS[layer.activation]
    tensors = {"linear.weight": layer.weight.float()}
    if layer.bias is not None:
        tensors["linear.bias"] = layer.bias.float()
    out, into = layer.weight.shape
    write_json(
        folder / "config.json",
        {
            "in_features": into,
            "out_features": out,
            "bias": layer.bias is not None,
            "activation_function": f"{kind.__module__}.{kind.__name__}",
        },
    )
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def _write_router(folder: Path, layers: Mapping[str, Sequence[TensorLayer]]) -> None:
    """Write one route per condition.

    Routes have numbered names, as a condition may contain characters that torch module names
    cannot.
    """
    names = {condition: f"condition_{number}" for number, condition in enumerate(layers)}
    types, structure = {}, {}
    for condition, condition_layers in layers.items():
        route = [f"{names[condition]}_{number}_Dense" for number in range(len(condition_layers))]
        for name, layer in zip(route, condition_layers, strict=True):
            _write_dense(folder / name, layer)
            types[name] = _module_type("Dense")
        structure[names[condition]] = route
    routes = {str((condition, None)): name for condition, name in names.items()}
    write_json(
        folder / "router_config.json",
        {
            "types": types,
            "structure": structure,
            "parameters": {
                "default_route": None,
                "allow_empty_key": False,
                "route_mappings": routes,
            },
        },
    )
