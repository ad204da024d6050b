"""Writing an embedder as a sentence-transformers model, which is tested before it is in place."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from llmcond.base.arrays import Array
from llmcond.base.errors import LlmcondError, UserError, shortened_repr
from llmcond.base.files import check_new_folder, create_folder_atomically, write_json, write_text
from llmcond.base.output import Displayed
from llmcond.base.system import versions
from llmcond.base.text import wordings
from llmcond.encoders.checkpoint import read_settings
from llmcond.encoders.loading import (
    load_config,
    load_model,
    load_tokenizer,
    read_all_weights,
    silence_transformers,
    vector_width,
)
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.settings import SETTINGS, encoder_types
from llmcond.encoders.spec import Dtype, get_pooling
from llmcond.encoders.tokenizing import InputTokenizer
from llmcond.finetune.loop import write_tensors
from llmcond.heads.numpy_heads import DenseLayer
from llmcond.heads.settings import Activation
from llmcond.prompts import Prompt
from llmcond.prompts.template import InputTemplate
from llmcond.report.card import code, render_card
from llmcond.runs.embedder import Embedder, describe, load_embedder
from llmcond.runs.open import open_any_run
from llmcond.runs.portable import copy_run, read_credits, strip_path
from llmcond.runs.similarity import Vectors

#: How a caller of the exported model selects the condition: it is fixed, one of several is selected
#: by an argument (``prompt_name`` or ``task``), or any condition can be given.
ConditionSelector = Literal["fixed", "prompt_name", "task", "any"]


@dataclass(frozen=True)
class ExportResult(Displayed):
    """The result of an export.

    Attributes:
        out: folder that was written.
        conditions: conditions of the export; empty: any condition.
        chosen_by: how the condition is selected. ``fixed``: there is only one. ``task`` or
            ``prompt_name``: the argument of ``encode`` that names one of several. ``any``: the
            argument ``condition``, which needs llmcond.
        modules: names of its sentence-transformers modules, in order.
        dtype: number type of its weights.
        dim: size of the embeddings.
        difference: largest difference of a component of a unit vector from the vectors that llmcond
            computes in that type; None: sentence-transformers is not installed, so the export was
            not tested.
        notes: what users of the export need to know, as sentences.
        about: description of the exported embedder.

    Examples:
        >>> import llmcond
        >>> result = llmcond.export(out="places", condition=["the place"])
        >>> result.conditions, result.dim, result.dtype
        (['the place'], 384, 'float32')
    """

    out: Path
    conditions: Sequence[str]
    chosen_by: ConditionSelector
    modules: Sequence[str]
    dtype: Dtype
    dim: int
    difference: float | None
    notes: Sequence[str]
    about: Mapping[str, Any]


#: Texts on which exports are tested, with various beginnings and ends.
TEXTS = (
    "Two women read a book at the beach.",
    "a man rides a horse in the snow",
    "3 dogs, 2 cats (and one bird)!",
    '"Is it raining?" she asked; nobody knew',
    "Crème brûlée für zwei – 東京 in May 2024",
)
#: Words of the longest of these texts. Encoders that read more get no text that is cut, because a
#: longer one takes minutes on a CPU.
_MOST_WORDS = 2_048
#: Texts with which the tokens around a text are determined. They use words that conditions are
#: unlikely to contain.
_PROBES = ("Zebras quickly juggled 17 oranges", "Three dogs walk in the park")


@dataclass(frozen=True)
class Affixes:
    """Text and tokens around every text under one condition.

    Attributes:
        text_prefix: text prefix, for templates whose beginning a tokenizer must join to the text.
        before: token ids before the text, including special ones.
        after: token ids after the text, including special ones.
    """

    text_prefix: str
    before: list[int]
    after: list[int]


def find_affixes(
    reader: InputTokenizer,
    tokenizer: Any,
    part: InputTemplate,
    condition: str,
    *,
    lead: bool = False,
) -> Affixes | None:
    """Return what a template puts around every sentence under a condition.

    The result is tokens if these reproduce what the encoder reads; otherwise, or with
    ``text_prefix``, the text in front of the sentence is kept as text. None means that neither
    works, for example because the sentence occurs twice, or its last token merges with what
    follows.
    """

    def encode_part(text: str) -> list[int]:
        return reader([part.render(text, condition)])[0].ids

    def encode_text(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    for probe in _PROBES:
        prefix_text = reader.format(part.render(probe, condition)).partition(probe)[0]
        for prefix in dict.fromkeys([prefix_text] if lead else ["", prefix_text]):
            ids, text_ids = encode_part(probe), encode_text(f"{prefix}{probe}")
            for start in range(len(ids) - len(text_ids) + 1):
                before, after = ids[:start], ids[start + len(text_ids) :]
                if ids[start : start + len(text_ids)] == text_ids and all(
                    encode_part(text) == [*before, *encode_text(f"{prefix}{text}"), *after]
                    for text in (*_PROBES, *TEXTS)
                ):
                    return Affixes(prefix, before, after)
    return None


def write_tokenizer(
    tokenizer: Any, before: Sequence[int], after: Sequence[int], max_length: int, folder: Path
) -> None:
    """Write a tokenizer that puts these tokens around every text, and cuts only the text.

    Its class is PreTrainedTokenizerFast, as other classes rebuild the rules for special tokens on
    loading and would lose these.
    """
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    pieces = {name: ids for name, ids in (("<before>", before), ("<after>", after)) if ids}
    single = [name for name in ("<before>", "$A", "<after>") if name == "$A" or name in pieces]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[
            {"id": name, "ids": list(ids), "tokens": tokenizer.convert_ids_to_tokens(ids)}
            for name, ids in pieces.items()
        ],
    )
    write_text(folder / "tokenizer.json", backend.to_str(pretty=True))
    special = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    special.setdefault("pad_token", tokenizer.eos_token or tokenizer.unk_token)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "model_max_length": max_length,
            "model_input_names": list(tokenizer.model_input_names),
            "padding_side": "right",
            "truncation_side": tokenizer.truncation_side,
            "clean_up_tokenization_spaces": False,
        },
    )


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
        contents = [
            [
                None if tensor is None else tensor.numpy().tobytes()
                for layer in layers
                for tensor in (layer.weight, layer.bias)
            ]
            for layers in self.layers.values()
        ]
        return all(content == contents[0] for content in contents)

    @property
    def text_prefixes(self) -> Mapping[str, str]:
        """Text that sentence-transformers puts in front of texts, by condition."""
        return {condition: affixes.text_prefix for condition, affixes in self.affixes.items()}


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
    affixes = {}
    for condition in conditions:
        affix = find_affixes(reader, tokenizer, prompt.conditional, condition, lead=several)
        if affix is None:
            raise NotExportableError(
                f"the tokens that the prompt {prompt.name} puts around a sentence depend on the "
                "sentence"
            )
        affixes[condition] = affix
    return ModularEmbedder(affixes, _layers_by_condition(embedder, conditions)), tokenizer


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
        "word_embedding_dimension": vector_width(
            load_config(resolved.checkpoint, identity.attention)
        ),
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
    if checkpoint.known is not None and checkpoint.known.computed_as:
        config = loaded.network.config.to_diff_dict()
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
    dtype = getattr(torch, identity.dtype)
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights.items()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    for key in ("auto_map", "_name_or_path", "dtype"):
        config.pop(key, None)
    if is_bidirectional_decoder(resolved):
        config["is_causal"] = False
    write_json(folder / "config.json", {**config, "torch_dtype": identity.dtype})
    return dense


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


#: Maximum distance of unit vectors from llmcond's, by the type they are computed in. In 16 bit,
#: rounding errors are that large if an almost equal vector was subtracted.
_TOLERANCE: Mapping[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}
#: Class of the module in exports that are computed by llmcond.
_MODULE = "llmcond.integrations.sentence_transformers.ConditionalEmbedder"


def export_model(
    run_folder: Path,
    out: Path,
    condition: Sequence[str] = (),
    *,
    head: str | None = None,
    prompt: str | None = None,
    device: str = "auto",
) -> ExportResult:
    """Write an embedder as a folder that sentence-transformers loads.

    The arguments are those of ``llmcond.commands.train.Export``.

    Raises:
        UserError: ``out`` exists, or the embedder cannot be expressed as modules of
            sentence-transformers under these conditions.
        LlmcondError: the export computes other vectors; nothing is written then.
    """
    check_new_folder(out)
    conditions = list(dict.fromkeys(condition))
    embedder = load_embedder(run_folder, head, prompt=prompt, device=device)
    try:
        if not conditions:
            return _write_any_condition(run_folder, out, embedder)
        for reason in export_obstacles(embedder):
            raise NotExportableError(reason)
        if any(wordings(one) != (one,) for one in conditions):
            raise NotExportableError("they read a condition in one wording, and ignore nothing")
        return _write_conditions(run_folder, out, embedder, conditions)
    except NotExportableError as error:
        each = "Export each condition separately, or leave" if len(conditions) > 1 else "Leave"
        raise UserError(
            f"{embedder.encoder.name} with the head {embedder.name} cannot be exported as modules "
            f"of sentence-transformers alone: {error}. {each} out --condition: that export accepts "
            "any condition, but needs llmcond."
        ) from error


# -- export of one or several conditions -------------------------------------------------------


def _write_conditions(
    run: Path, out: Path, embedder: Embedder, conditions: Sequence[str]
) -> ExportResult:
    run_dtype, dtype = embedder.encoder.identity.dtype, _export_dtype(embedder)
    about = {**describe(embedder), "dtype": run_dtype}
    run_vectors = _encode_texts(embedder, conditions[0]) if run_dtype != dtype else None
    embedder = _change_dtype(embedder, dtype)
    modular, tokenizer = to_modules(embedder, conditions)
    selector = _find_selector(modular)
    expected = {text: _encode_texts(embedder, text) for text in conditions}
    notes = _collect_notes(embedder, modular, selector)
    if run_vectors is not None:
        difference = float(np.abs(run_vectors - expected[conditions[0]]).max())
        notes.append(
            f"The weights are {dtype}, but llmcond computes this run in {run_dtype}. Components of "
            f"vectors therefore differ by up to {difference:.0e}."
        )
    with create_folder_atomically(out) as folder:
        resolved, route = embedder.encoder.resolved, selector == "task"
        modules = write_modules(folder, resolved, tokenizer, modular, route=route)
        prompts = modular.text_prefixes
        if selector == "fixed":
            prompts = {"default": next(iter(prompts.values()))}
        _write_settings(folder, prompts)
        result = ExportResult(
            out, conditions, selector, modules, dtype, embedder.dim, None, notes, about
        )
        return _finish_export(folder, result, embedder, run, expected)


def _export_dtype(embedder: Embedder) -> Dtype:
    """Return the type of an export's weights: the run's, or that of the checkpoint.

    If llmcond computes in 16 bit only for speed, the weights are written in float32.
    """
    resolved = embedder.encoder.resolved
    config = read_settings(resolved.checkpoint.folder / "config.json", {})
    halved = config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")
    return resolved.identity.dtype if halved else "float32"


def _change_dtype(embedder: Embedder, dtype: Dtype) -> Embedder:
    """Return an embedder that computes in another type."""
    from llmcond.encoders.encoder import Encoder

    resolved = embedder.encoder.resolved
    if resolved.identity.dtype == dtype:
        return embedder
    identity = replace(resolved.identity, dtype=dtype)
    return replace(embedder, encoder=Encoder(replace(resolved, identity=identity)))


def _find_selector(modular: ModularEmbedder) -> ConditionSelector:
    """Return how the condition is selected.

    Raises:
        NotExportableError: each condition would need a separate encoder.
    """
    if len(modular.affixes) == 1:
        return "fixed"
    token_affixes = {
        (tuple(affixes.before), tuple(affixes.after)) for affixes in modular.affixes.values()
    }
    leads = set(modular.text_prefixes.values())
    if len(token_affixes) == 1 and leads == {""}:
        return "task"
    if len(token_affixes) == 1 and modular.same_layers:
        if reserved := set(_PROMPTS).intersection(modular.affixes):
            raise NotExportableError(
                f"sentence-transformers has a prompt {reserved.pop()!r} for another purpose"
            )
        return "prompt_name"
    raise NotExportableError(
        "each condition would need a separate encoder, as it is read together with the texts"
    )


def _collect_notes(
    embedder: Embedder, modular: ModularEmbedder, selector: ConditionSelector
) -> list[str]:
    notes = []
    layers = [
        layer for layers_of_condition in modular.layers.values() for layer in layers_of_condition
    ]
    biased = any(layer.bias is not None or layer.activation in ("gelu", "tanh") for layer in layers)
    if selector == "task":
        notes.append(
            "A Router selects the condition. sentence-transformers supports it from version 5.4 "
            "on; other servers (text-embeddings-inference, vLLM) do not: export one condition for "
            "those."
        )
    elif layers and biased and embedder.encoder.identity.normalize:
        notes.append(
            "A Normalize module precedes the head's layers. text-embeddings-inference leaves it "
            "out, so its vectors would be wrong. Serve the model with sentence-transformers or "
            "llmcond serve."
        )
    if any(modular.text_prefixes.values()):
        notes.append(
            "A prompt of sentence-transformers puts the condition in front of texts. A server that "
            "does not read config_sentence_transformers.json must be given that prompt."
        )
    if selector == "prompt_name":
        notes.append(
            "Without a prompt name, encode, encode_query and encode_document use the first "
            f"condition, `{code(next(iter(modular.text_prefixes)))}`."
        )
    if is_bidirectional_decoder(embedder.encoder.resolved):
        notes.append(
            "Tokens attend in both directions because of is_causal in config.json. transformers "
            "reads it from version 5 on; other servers may not."
        )
    return notes


#: Names of the prompts that ``encode_query`` and ``encode_document`` use.
_PROMPTS = "query", "document"


def _write_settings(folder: Path, prompts: Mapping[str, str]) -> None:
    """Write the settings, with the prompts by name, of which the first is the default.

    Callers of ``encode``, ``encode_query`` or ``encode_document`` that give no name get the first
    condition; without these prompts they would get no condition at all.
    """
    named: dict[str, str] = {}
    if any(prompts.values()):
        named = dict.fromkeys(_PROMPTS, next(iter(prompts.values()))) | {**prompts}
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": named,
            "default_prompt_name": next(iter(prompts)) if named else None,
            "similarity_fn_name": "cosine",
        },
    )


# -- export of any condition -------------------------------------------------------------------


def _write_any_condition(run: Path, out: Path, embedder: Embedder) -> ExportResult:
    expected = {"the place": _encode_texts(embedder, "the place")}
    note = (
        "llmcond.load_sentence_transformer loads it. sentence-transformers itself needs "
        "trust_remote_code=True, which allows modules of other packages, such as llmcond's; the "
        "folder contains no code."
    )
    modules, dtype = [_MODULE.rpartition(".")[2]], embedder.encoder.identity.dtype
    about = describe(embedder)
    result = ExportResult(out, [], "any", modules, dtype, embedder.dim, None, [note], about)
    with create_folder_atomically(out) as folder:
        checkpoint = embedder.encoder.resolved.checkpoint
        copy_run(run, embedder.name, embedder.view, checkpoint, folder)
        write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": _MODULE}])
        _write_settings(folder, {})
        return _finish_export(folder, result, embedder, run, expected)


# -- model card and test -----------------------------------------------------------------------


def _finish_export(
    folder: Path,
    result: ExportResult,
    embedder: Embedder,
    run: Path,
    expected: Mapping[str, Vectors],
) -> ExportResult:
    """Write the card, and compare vectors if sentence-transformers is installed."""
    checkpoint = embedder.encoder.resolved.checkpoint
    known = checkpoint.known
    licence = known.licence if known else None
    # The command contains no local paths.
    words = ["llmcond", "export", "--format", "sentence-transformers", "--out", result.out.name]
    opened = open_any_run(run)
    head = opened.head_arguments(embedder.name, embedder.view)
    for name, value in {**opened.find_arguments, **head}.items():
        words += [f"--{name}", strip_path(value)]
    words += [word for condition in result.conditions for word in ("--condition", condition)]
    works = read_credits(checkpoint.adapter or checkpoint.folder)
    card = render_card(
        Path(__file__).with_name("card.md.j2"),
        {
            "base_model": known.repo if known else checkpoint.repo,
            "library_name": "sentence-transformers",
            "tags": ["llmcond", "conditional-semantic-textual-similarity", "sentence-similarity"],
            "license": licence.lower() if licence and " " not in licence else None,  # an SPDX id
            **(works.metadata if works else {}),
        },
        embedder.view.prompts,
        result=result,
        about={key: strip_path(value) for key, value in result.about.items()},
        licence=licence,
        credits=works.to_markdown() if works else "",
        command=shlex.join(words),
        repr=repr,
        versions=versions(),
    )
    write_text(folder / "README.md", card)
    if not find_spec("sentence_transformers") or not find_spec("sentence_transformers.base"):
        return result  # not installed, or older than 5.4
    texts = _test_texts(embedder)
    actual = _load_and_encode(folder, result.chosen_by, list(expected), texts)
    return replace(result, difference=_compare(actual, expected, texts, result.dtype))


@contextmanager
def _ignore_expected_warnings() -> Iterator[None]:
    """Ignore warnings about the long text of the test, and about a default prompt."""
    logger = logging.getLogger("sentence_transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ of \d+ inputs are longer", UserWarning)
        try:
            yield
        finally:
            logger.setLevel(level)


def _test_texts(embedder: Embedder) -> list[str]:
    """Return the texts on which an export is tested; the last one is long."""
    n_words = min(embedder.encoder.identity.max_length, _MOST_WORDS)
    return [*TEXTS, " ".join(["the end"] * (n_words // 2))]


def _encode_texts(embedder: Embedder, condition: str) -> Vectors:
    with _ignore_expected_warnings():
        return embedder.encode(_test_texts(embedder), condition)


def _load_and_encode(
    folder: Path, selector: ConditionSelector, conditions: Sequence[str], texts: list[str]
) -> dict[str, Vectors]:
    """Load the export in sentence-transformers; encode the texts under each condition."""
    argument = "condition" if selector == "any" else selector
    calls = [{} if selector == "fixed" else {argument: condition} for condition in conditions]
    # peft, if installed, imports bitsandbytes, which warns about faster kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with silence_transformers(), _ignore_expected_warnings():
        if selector == "any":
            from llmcond.integrations.sentence_transformers import load_sentence_transformer

            model = load_sentence_transformer(folder)
        else:
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(str(folder), device="cpu")
        vectors = [model.encode(texts, show_progress_bar=False, **arguments) for arguments in calls]
    return dict(zip(conditions, vectors, strict=True))


def _compare(
    actual: Mapping[str, Vectors],
    expected: Mapping[str, Vectors],
    texts: Sequence[str],
    dtype: Dtype,
) -> float:
    """Return the largest difference of a component.

    Raises:
        LlmcondError: a difference is larger than rounding errors.
    """
    largest = 0.0
    for condition, vectors in expected.items():
        difference = actual[condition].astype(np.float32) - vectors
        distance = np.linalg.norm(difference, axis=1)
        if not distance.max() <= _TOLERANCE[dtype]:
            raise LlmcondError(
                f"the export computes other vectors than llmcond under {condition!r}: that of "
                f"{shortened_repr(texts[int(distance.argmax())])} is {distance.max():.1e} away, "
                "which is more than rounding. Nothing was written. Leave out --condition instead."
            )
        largest = max(largest, float(np.abs(difference).max()))
    return largest
