"""An embedder as modules that sentence-transformers has itself: what they are, and their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from llmcond.arrays import Array
from llmcond.encoders.checkpoints.checkpoint import read_settings
from llmcond.encoders.checkpoints.weights import all_weights
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.loading.architecture import load_config, load_tokenizer
from llmcond.encoders.loading.loading import load_model
from llmcond.encoders.poolings import pooling_named
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.settings import SETTINGS, encoder_types
from llmcond.errors import UserError
from llmcond.exporting.tokenizers import Around, around, write_tokenizer
from llmcond.files import write_json
from llmcond.finetune.state import write_tensors
from llmcond.heads.plain import DenseLayer
from llmcond.heads.settings import Activation
from llmcond.prompts import Prompt
from llmcond.runs.embedder import Embedder

TensorLayer: TypeAlias = DenseLayer[Tensor]

#: Its settings in the form that other servers read as well.
_MODES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens",
          "lasttoken")  # fmt: skip
_ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {
    "none": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh,
}  # fmt: skip
#: Those that a factor above 0 can be taken out of.
_HOMOGENEOUS = ("none", "relu")


class NotPlainError(UserError):
    """An embedder cannot be made of the modules of sentence-transformers; the message says why."""


@dataclass(frozen=True)
class Plain:
    """What an embedder is under some conditions, as layers and tokens.

    Attributes:
        around: what stands around every text, by condition.
        layers: behind the encoder's own vectors, by condition.
    """

    around: Mapping[str, Around]
    layers: Mapping[str, Sequence[TensorLayer]]

    @property
    def same_layers(self) -> bool:
        """Return whether the layers are the same under all conditions."""
        first, *others = self.layers.values()
        return all(
            len(own) == len(first)
            and all(
                torch.equal(a.weight, b.weight) and _equal(a.bias, b.bias)
                for a, b in zip(own, first, strict=True)
            )
            for own in others
        )

    @property
    def leads(self) -> Mapping[str, str]:
        """Return what sentence-transformers puts in front of texts, by condition."""
        return {condition: found.lead for condition, found in self.around.items()}


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def obstacles(embedder: Embedder) -> Iterator[str]:
    """Yield what of an embedder sentence-transformers has no modules for."""
    own, view = embedder.encoder.identity, embedder.view
    if len(view.prompts) > 1:
        yield f"it reads each text by {len(view.prompts)} prompts ({view.name})"
    part, prompt = view.prompts[0].conditional, view.prompts[0]
    if part.router is not None:
        yield f"the prompt {prompt.name} pools by the condition"
    if part.context is not None:
        yield f"the prompt {prompt.name} reads a pair of texts and pools one of them"
    if view.subtracts and not prompt.of_condition:
        yield f"the prompt {prompt.name} subtracts a vector that the sentence changes"
    if embedder.encoder.resolved.checkpoint.members:
        yield "its encoder is an ensemble"
    for name, setting in SETTINGS.items():
        value = getattr(own, name)
        if setting.unplain and value != setting.settled_default:
            yield setting.unplain.format(value)
    if not pooling_named(own.pooling).module:
        yield f"{embedder.encoder.name} pools by {own.pooling}"
    if not embedder.head.compares_by_cosine:
        yield f"the head {embedder.name} compares embeddings not by their cosine"


def plain(embedder: Embedder, conditions: Sequence[str]) -> tuple[Plain, Any]:
    """Return what an embedder without :func:`obstacles` is under conditions, and its tokenizer.

    Raises:
        NotPlainError: its tokens or its head have no form in the modules of sentence-transformers.
    """
    resolved, prompt = embedder.encoder.resolved, embedder.view.prompts[0]
    checkpoint, identity = resolved.checkpoint, resolved.identity
    tokenizer = load_tokenizer(checkpoint, load_config(checkpoint, identity.attention))
    if not tokenizer.is_fast:
        raise NotPlainError(f"{checkpoint.name} has no fast tokenizer")
    reader = InputTokenizer(tokenizer, identity, checkpoint.name)
    # Text in front of a text can be chosen with each call, tokens cannot.
    several = len(conditions) > 1 and not prompt.separate
    found = {one: around(reader, tokenizer, prompt.conditional, one, lead=several)
             for one in conditions}  # fmt: skip
    known = {one: value for one, value in found.items() if value is not None}
    if len(known) < len(found):
        raise NotPlainError(
            f"the tokens of the prompt {prompt.name} around a sentence are not the same for all"
        )
    return Plain(known, _layers(embedder, conditions)), tokenizer


def _layers(embedder: Embedder, conditions: Sequence[str]) -> dict[str, list[TensorLayer]]:
    view, head, found = embedder.view, embedder.head, {}
    of_condition, subtracts = view.of_condition(), view.subtracts
    for condition in conditions:
        given = None
        if of_condition is not None:
            given = _encoded(embedder, of_condition, condition)[None]
        made: Sequence[DenseLayer[Any]] | None = []
        if not head.is_identity:
            made = head.dense_layers(given)
        if made is None:
            raise NotPlainError(f"the head {embedder.name} ({head.kind}) is no such layers")
        layers = [_without_mean(layer) for layer in made]
        if subtracts:
            taken = _encoded(embedder, view.prompts[0], condition)
            first = layers[0] if layers else DenseLayer(torch.eye(len(taken)))
            layers = [_without_mean(first._replace(mean=torch.from_numpy(taken))), *layers[1:]]
        found[condition] = layers
    return found


def _without_mean(layer: DenseLayer[Any]) -> TensorLayer:
    """Return a layer of tensors whose bias has what the layer subtracts from its inputs."""
    weight, bias, activation, mean = layer
    weight = torch.as_tensor(weight)
    bias = None if bias is None else torch.as_tensor(bias)
    if mean is not None:
        bias = -(weight @ torch.as_tensor(mean)) + (0 if bias is None else bias)
    return DenseLayer(weight, bias, activation)


def _encoded(embedder: Embedder, prompt: Prompt, condition: str) -> Array:
    """Return the unconditional vector of a condition, (dim,)."""
    item = prompt.unconditional.render("", condition)
    vector: Array = embedder.encoder.encode([item])[0]
    return vector


# -- files -------------------------------------------------------------------------------------


def write_modules(
    folder: Path, resolved: ResolvedEncoder, tokenizer: Any, made: Plain, *, route: bool
) -> list[str]:
    """Write the files of all modules; return their names.

    Paths and settings of modules are the ones that sentence-transformers has read from the start,
    as other servers know no others. ``route``: layers are chosen by condition with each call.
    """
    identity = resolved.identity
    first = next(iter(made.around.values()))
    write_tokenizer(tokenizer, first.before, first.after, identity.max_length, folder)
    dense = _write_network(folder, resolved)
    pooled = pooling_named(identity.pooling).module
    pooling = {
        "word_embedding_dimension": load_config(
            resolved.checkpoint, identity.attention
        ).hidden_size,
        **{f"pooling_mode_{mode}": mode == pooled for mode in _MODES},
        "include_prompt": True,
    }
    kinds: list[tuple[str, Any]] = [("Transformer", None), ("Pooling", pooling)]
    kinds += [("Dense", layer) for layer in dense]
    if identity.normalize and any(map(_needs_scale, made.layers.values())):
        kinds.append(("Normalize", {}))
    if route:
        kinds.append(("Router", made.layers))
    else:
        kinds += [("Dense", layer) for layer in next(iter(made.layers.values()))]
    kinds.append(("Normalize", {}))
    listed = []
    for number, (kind, value) in enumerate(kinds):
        path = f"{number}_{kind}" if number else ""
        listed.append({"idx": number, "name": str(number), "path": path, "type": _type(kind)})
        if kind == "Dense":
            _write_dense(folder / path, value)
        elif kind == "Router":
            _write_router(folder / path, value)
        elif value is not None:
            write_json(folder / path / "config.json", value)
    write_json(folder / "modules.json", listed)
    write_json(
        folder / "sentence_bert_config.json",
        {"max_seq_length": identity.max_length, "do_lower_case": False},
    )
    return [kind for kind, _ in kinds]


def _needs_scale(layers: Sequence[TensorLayer]) -> bool:
    """Return whether layers make something else of a vector than of its multiples."""
    return any(layer.bias is not None or layer.activation not in _HOMOGENEOUS for layer in layers)


def _type(kind: str) -> str:
    return f"sentence_transformers.models.{kind}"


def _write_network(folder: Path, resolved: ResolvedEncoder) -> list[TensorLayer]:
    """Write the encoder's weights, an adapter's among them; return the layers of its own."""
    checkpoint, identity = resolved.checkpoint, resolved.identity
    config = read_settings(checkpoint.folder / "config.json", {})
    loaded = load_model(resolved, load_config(checkpoint, identity.attention))
    weights = all_weights(loaded.network, checkpoint)
    kinds = {kind: name for name, kind in _ACTIVATIONS.items()}
    own: list[Any] = list(loaded.dense)
    dense = [
        DenseLayer(linear.weight, linear.bias, kinds[type(behind)])
        for linear, behind in zip(own[::2], own[1::2], strict=True)
    ]
    if pooling_named(identity.pooling).part == "pooler":
        pooler = loaded.network.pooler.dense
        dense = [DenseLayer(pooler.weight, pooler.bias, "tanh"), *dense]
    dtype = identity.dtype
    write_tensors(
        folder / "model.safetensors",
        {name: _as(value, dtype) for name, value in weights.items()},
        {"format": "pt"},
    )
    for key in ("auto_map", "_name_or_path", "torch_dtype"):
        config.pop(key, None)
    if reads_both_ways(resolved):
        config["is_causal"] = False
    write_json(folder / "config.json", {**config, "torch_dtype": dtype})
    return dense


def _as(value: Tensor, dtype: str) -> Tensor:
    return value.to(getattr(torch, dtype)) if value.is_floating_point() else value


def reads_both_ways(resolved: ResolvedEncoder) -> bool:
    """Return whether it is a decoder whose tokens attend to those behind them, too."""
    config = read_settings(resolved.checkpoint.folder / "config.json", {})
    own = config.get("use_bidirectional_attention") or config.get("model_type") in encoder_types()
    return resolved.identity.attention == "bidirectional" and not own


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
    """Write a route for each condition, whose name torch need not be able to give a module."""
    names = {condition: f"condition_{number}" for number, condition in enumerate(layers)}
    types, structure = {}, {}
    for condition, own in layers.items():
        route = [f"{names[condition]}_{number}_Dense" for number in range(len(own))]
        for name, layer in zip(route, own, strict=True):
            _write_dense(folder / name, layer)
            types[name] = _type("Dense")
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
