"""Writing an embedder as a sentence-transformers model, which is tested before it is in place."""

from __future__ import annotations

import logging
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from llmcond.bundled import pretrained_folder
from llmcond.encoders.checkpoints.checkpoint import find_hub_source, read_settings
from llmcond.encoders.loading.loading import silence_transformers
from llmcond.encoders.spec import Dtype
from llmcond.errors import LlmcondError, UserError, shortened_repr
from llmcond.exporting.modules import (
    ModularEmbedder,
    NotExportableError,
    export_obstacles,
    is_bidirectional_decoder,
    to_modules,
    write_modules,
)
from llmcond.exporting.result import ConditionSelector, ExportResult
from llmcond.exporting.run import copy_run, strip_path
from llmcond.exporting.tokenizers import TEXTS
from llmcond.files import check_new_folder, create_folder_atomically, write_json, write_text
from llmcond.report.card import render_card
from llmcond.runs.credits import read_credits
from llmcond.runs.embedder import Embedder, describe, load_embedder
from llmcond.runs.similarity import Vectors
from llmcond.system import versions

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

    The arguments are those of ``llmcond.commands.export.Export``.

    Raises:
        UserError: ``out`` exists, or the embedder cannot be expressed as modules of
            sentence-transformers under these conditions.
        LlmcondError: the export computes other vectors; nothing is written then.
    """
    check_new_folder(out)
    if not all(text.strip() for text in condition):
        raise UserError("--condition is empty. Give a text.")
    conditions = list(dict.fromkeys(condition))
    embedder = load_embedder(run_folder, head, prompt=prompt, device=device)
    try:
        if not conditions:
            return _write_any_condition(run_folder, out, embedder)
        for reason in export_obstacles(embedder):
            raise NotExportableError(reason)
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
        _write_settings(folder, *_name_prompts(modular, selector))
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
            "A Router selects the condition. sentence-transformers supports it from version 5 on; "
            "other servers (text-embeddings-inference, vLLM) do not: export one condition for "
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
            f"condition, {next(iter(modular.text_prefixes))!r}."
        )
    if is_bidirectional_decoder(embedder.encoder.resolved):
        notes.append(
            "Tokens attend in both directions because of is_causal in config.json. transformers "
            "reads it from version 5 on; other servers may not."
        )
    return notes


def _name_prompts(
    modular: ModularEmbedder, selector: ConditionSelector
) -> tuple[dict[str, str], str | None]:
    """Return the prompts of an export by name, and the name of the default one, if there is any.

    Callers of ``encode``, ``encode_query`` or ``encode_document`` that give no name get the first
    condition; without these prompts they would get no condition at all.
    """
    if not any(modular.text_prefixes.values()):
        return {}, None
    prompts = (
        {"default": next(iter(modular.text_prefixes.values()))}
        if selector == "fixed"
        else modular.text_prefixes
    )
    name, prefix = next(iter(prompts.items()))
    return {"query": prefix, "document": prefix, **prompts}, name


def _write_settings(folder: Path, prompts: Mapping[str, str], default: str | None) -> None:
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": "cosine"},
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
        copy_run(run, embedder, folder)
        write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": _MODULE}])
        _write_settings(folder, {}, None)
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
    source = find_hub_source(run)
    if source is not None:
        words += ["--model", source.repo, "--revision", source.commit]
    else:
        words += ["--model" if run == pretrained_folder(run.name) else "--run", run.name]
    words += ["--head", str(result.about["head"])]
    words += [word for condition in result.conditions for word in ("--condition", condition)]
    works = read_credits(checkpoint.adapter or checkpoint.folder)
    card = render_card(
        Path(__file__).with_name("card.md.j2"),
        {
            "base_model": known.repo if known else checkpoint.repo,
            "library_name": "sentence-transformers",
            "tags": ["llmcond", "conditional-semantic-textual-similarity", "sentence-similarity"],
            "license": licence.lower() if licence else None,
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
    if find_spec("sentence_transformers") is None:
        return result
    actual = _load_and_encode(folder, result.chosen_by, list(expected))
    return replace(result, difference=_compare(actual, expected, result.dtype))


@contextmanager
def _ignore_cut_warnings() -> Iterator[None]:
    """Ignore warnings about cut texts: one of the test texts is too long on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ of \d+ inputs are longer", UserWarning)
        yield


def _encode_texts(embedder: Embedder, condition: str) -> Vectors:
    with _ignore_cut_warnings():
        return embedder.encode(TEXTS, condition)


def _load_and_encode(
    folder: Path, selector: ConditionSelector, conditions: Sequence[str]
) -> dict[str, Vectors]:
    """Load the export in sentence-transformers; encode the test texts under each condition."""
    calls: list[dict[str, str]] = (
        [{}]
        if selector == "fixed"
        else [
            {"condition" if selector == "any" else selector: condition} for condition in conditions
        ]
    )
    # peft, if installed, imports bitsandbytes, which warns about faster kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with silence_transformers(), _ignore_cut_warnings():
        if selector == "any":
            from llmcond.integrations.sentence_transformers import load_sentence_transformer

            model = load_sentence_transformer(folder)
        else:
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(str(folder), device="cpu")
        vectors = [
            model.encode(list(TEXTS), show_progress_bar=False, **arguments) for arguments in calls
        ]
    return dict(zip(conditions, vectors, strict=True))


def _compare(actual: Mapping[str, Vectors], expected: Mapping[str, Vectors], dtype: Dtype) -> float:
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
                f"{shortened_repr(TEXTS[int(distance.argmax())])} is {distance.max():.1e} away, "
                "which is "
                "more than rounding. Nothing was written. Leave out --condition instead."
            )
        largest = max(largest, float(np.abs(difference).max()))
    return largest
