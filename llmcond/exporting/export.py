"""Writing an embedder as a model of sentence-transformers, and trying it out before it is there."""

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

from llmcond.encoders.checkpoints.checkpoint import read_settings
from llmcond.encoders.loading.architecture import quiet
from llmcond.encoders.spec import Dtype
from llmcond.errors import LlmcondError, UserError, brief
from llmcond.exporting.exported import Chooses, ExportResult
from llmcond.exporting.modules import (
    NotPlainError,
    Plain,
    obstacles,
    plain,
    reads_both_ways,
    write_modules,
)
from llmcond.exporting.run import copy_run, without_path
from llmcond.exporting.tokenizers import TEXTS
from llmcond.files import making, write_json, write_text
from llmcond.report.card import render_card
from llmcond.runs.comparing import Vectors
from llmcond.runs.embedder import Embedder, describe, load_embedder
from llmcond.system import versions

#: How far vectors of length 1 may be from llmcond's, by the type they are computed in. In 16 bit
#: rounding is that large where an almost equal vector was subtracted.
_FAR: Mapping[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.1}
#: Of an export that llmcond itself computes.
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

    Arguments as in :class:`llmcond.commands.export.Export`.

    Raises:
        UserError: ``out`` is there, or the embedder has no form in the modules of
            sentence-transformers under these conditions.
        LlmcondError: what was written gives other vectors; nothing is left of it.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already. Name another --out, or take it away.")
    if not all(text.strip() for text in condition):
        raise UserError("--condition is empty; give a text.")
    conditions = list(dict.fromkeys(condition))
    embedder = load_embedder(run_folder, head, prompt=prompt, device=device)
    try:
        if not conditions:
            return _write_any(run_folder, out, embedder)
        for reason in obstacles(embedder):
            raise NotPlainError(reason)
        return _write_plain(run_folder, out, embedder, conditions)
    except NotPlainError as error:
        each = "Export each condition by itself, or leave" if len(conditions) > 1 else "Leave"
        raise UserError(
            f"{embedder.encoder.name} with the head {embedder.name} cannot be made of modules of "
            f"sentence-transformers alone: {error}. {each} out --condition: that export takes any "
            "condition, where llmcond is installed."
        ) from error


# -- one condition, or several -----------------------------------------------------------------


def _write_plain(
    run: Path, out: Path, embedder: Embedder, conditions: Sequence[str]
) -> ExportResult:
    ran, dtype = embedder.encoder.identity.dtype, _exported_type(embedder)
    about = {**describe(embedder), "dtype": ran}
    usual = _tried(embedder, conditions[0]) if ran != dtype else None
    embedder = _computed_in(embedder, dtype)
    made, tokenizer = plain(embedder, conditions)
    chosen_by = _chosen_by(made)
    wanted = {one: _tried(embedder, one) for one in conditions}
    notes = _notes(embedder, made, chosen_by)
    if usual is not None:
        far = float(np.abs(usual - wanted[conditions[0]]).max())
        notes.append(
            f"The weights are {dtype}; llmcond computes this run in {ran}, by which a component of "
            f"a vector differs by up to {far:.0e}."
        )
    with making(out) as folder:
        resolved, route = embedder.encoder.resolved, chosen_by == "task"
        modules = write_modules(folder, resolved, tokenizer, made, route=route)
        _write_settings(folder, *_prompts(made, chosen_by))
        result = ExportResult(
            out, conditions, chosen_by, modules, dtype, embedder.dim, None, notes, about
        )
        return _finish_export(folder, result, embedder, run, wanted)


def _exported_type(embedder: Embedder) -> Dtype:
    """Return the type of an export's weights: the run's own, or as the checkpoint has them.

    What llmcond computes in 16 bit for speed only is written in full.
    """
    resolved = embedder.encoder.resolved
    config = read_settings(resolved.checkpoint.folder / "config.json", {})
    halved = config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")
    return resolved.identity.dtype if halved else "float32"


def _computed_in(embedder: Embedder, dtype: Dtype) -> Embedder:
    from llmcond.encoders.encoder import Encoder

    resolved = embedder.encoder.resolved
    if resolved.identity.dtype == dtype:
        return embedder
    identity = replace(resolved.identity, dtype=dtype)
    return replace(embedder, encoder=Encoder(replace(resolved, identity=identity)))


def _chosen_by(made: Plain) -> Chooses:
    """Return how a condition is chosen.

    Raises:
        NotPlainError: each would need an encoder of its own.
    """
    if len(made.around) == 1:
        return "fixed"
    tokens = {(tuple(one.before), tuple(one.after)) for one in made.around.values()}
    leads = set(made.leads.values())
    if len(tokens) == 1 and leads == {""}:
        return "task"
    if len(tokens) == 1 and made.same_layers:
        return "prompt_name"
    raise NotPlainError(
        "each of several conditions would be an encoder, as it is read together with the texts"
    )


def _notes(embedder: Embedder, made: Plain, chosen_by: Chooses) -> list[str]:
    notes = []
    layers = [layer for own in made.layers.values() for layer in own]
    biased = any(layer.bias is not None or layer.activation in ("gelu", "tanh") for layer in layers)
    if chosen_by == "task":
        notes.append(
            "The condition is chosen by a Router, which sentence-transformers has from version 5 "
            "on; other servers (text-embeddings-inference, vLLM) have none: export one condition "
            "for those."
        )
    elif layers and biased and embedder.encoder.identity.normalize:
        notes.append(
            "A Normalize stands before the head's layers, which text-embeddings-inference leaves "
            "out there: its vectors would be others. Serve it by sentence-transformers, or by "
            "llmcond serve."
        )
    if any(made.leads.values()):
        notes.append(
            "The condition is put in front of texts by a prompt of sentence-transformers; a server "
            "that does not read config_sentence_transformers.json must be given that prompt."
        )
    if chosen_by == "prompt_name":
        notes.append(
            "Without a prompt name, encode, encode_query and encode_document take the first "
            f"condition, {next(iter(made.leads))!r}."
        )
    if reads_both_ways(embedder.encoder.resolved):
        notes.append(
            "Tokens attend in both directions by is_causal in config.json, which transformers "
            "heeds from version 5 on; other servers may not."
        )
    return notes


def _prompts(made: Plain, chosen_by: Chooses) -> tuple[dict[str, str], str | None]:
    """Return the prompts of an export by name, and the name of the default one, if there is one.

    Callers that know no names, of ``encode``, ``encode_query`` or ``encode_document``, get the
    first condition: without these prompts they would get no condition at all.
    """
    if not any(made.leads.values()):
        return {}, None
    named = {"default": next(iter(made.leads.values()))} if chosen_by == "fixed" else made.leads
    name, lead = next(iter(named.items()))
    return {"query": lead, "document": lead, **named}, name


def _write_settings(folder: Path, prompts: Mapping[str, str], default: str | None) -> None:
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": "cosine"},
    )


# -- any condition -----------------------------------------------------------------------------


def _write_any(run: Path, out: Path, embedder: Embedder) -> ExportResult:
    wanted = {"the place": _tried(embedder, "the place")}
    note = (
        "llmcond.load_sentence_transformer loads it; sentence-transformers itself does with "
        "trust_remote_code=True, its word for modules of other packages (llmcond's here, no "
        "code lies in the folder)."
    )
    modules, dtype = [_MODULE.rpartition(".")[2]], embedder.encoder.identity.dtype
    about = describe(embedder)
    result = ExportResult(out, [], "any", modules, dtype, embedder.dim, None, [note], about)
    with making(out) as folder:
        copy_run(run, embedder, folder)
        write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": _MODULE}])
        _write_settings(folder, {}, None)
        return _finish_export(folder, result, embedder, run, wanted)


# -- its card, and trying it out ---------------------------------------------------------------


def _finish_export(
    folder: Path, result: ExportResult, embedder: Embedder, run: Path, wanted: Mapping[str, Vectors]
) -> ExportResult:
    """Write the card, and compare with the ``wanted`` vectors if sentence-transformers is there."""
    checkpoint = embedder.encoder.resolved.checkpoint
    known = checkpoint.known
    licence = known.licence if known else None
    # The command has no paths of this machine.
    words = ["llmcond", "export", "--format", "sentence-transformers", "--out", result.out.name]
    words += ["--run", run.name, "--head", str(result.about["head"])]
    words += [word for one in result.conditions for word in ("--condition", one)]
    card = render_card(
        Path(__file__).with_name("card.md.j2"),
        {
            "base_model": known.repo if known else checkpoint.repo,
            "library_name": "sentence-transformers",
            "license": licence.lower() if licence else None,
            "tags": ["llmcond", "conditional-semantic-textual-similarity", "sentence-similarity"],
        },
        embedder.view.prompts,
        made=result,
        about={key: without_path(value) for key, value in result.about.items()},
        licence=licence,
        command=shlex.join(words),
        repr=repr,
        versions=versions(),
    )
    write_text(folder / "README.md", card)
    if find_spec("sentence_transformers") is None:
        return result
    got = _loaded(folder, result.chosen_by, list(wanted))
    return replace(result, difference=_compare(got, wanted, result.dtype))


@contextmanager
def _cutting() -> Iterator[None]:
    """Say nothing of cut texts: one of those that an export is tried out on is to be cut."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\d+ of \d+ inputs are longer", UserWarning)
        yield


def _tried(embedder: Embedder, condition: str) -> Vectors:
    with _cutting():
        return embedder.encode(TEXTS, condition)


def _loaded(folder: Path, chosen_by: Chooses, conditions: Sequence[str]) -> dict[str, Vectors]:
    """Return what sentence-transformers makes of the texts under each condition."""
    given: list[dict[str, str]] = (
        [{}]
        if chosen_by == "fixed"
        else [{"condition" if chosen_by == "any" else chosen_by: one} for one in conditions]
    )
    # Where peft is, it imports bitsandbytes, which warns of faster kernels.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with quiet(), _cutting():
        if chosen_by == "any":
            from llmcond.integrations.sentence_transformers import load_sentence_transformer

            model = load_sentence_transformer(folder)
        else:
            from sentence_transformers import SentenceTransformer

            model = SentenceTransformer(str(folder), device="cpu")
        found = [model.encode(list(TEXTS), show_progress_bar=False, **own) for own in given]
    return dict(zip(conditions, found, strict=True))


def _compare(got: Mapping[str, Vectors], wanted: Mapping[str, Vectors], dtype: Dtype) -> float:
    """Return the largest difference.

    Raises:
        LlmcondError: it is more than rounding.
    """
    most = 0.0
    for condition, vectors in wanted.items():
        apart = got[condition].astype(np.float32) - vectors
        far = np.linalg.norm(apart, axis=1)
        if not far.max() <= _FAR[dtype]:
            raise LlmcondError(
                f"the export gives other vectors than llmcond under {condition!r}: that of "
                f"{brief(TEXTS[int(far.argmax())])} is {far.max():.1e} away, which is more than "
                "rounding. Nothing was written; leave out --condition instead."
            )
        most = max(most, float(np.abs(apart).max()))
    return most
