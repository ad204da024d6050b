"""Embedders as models of mteb, and tasks with conditions on local data.

mteb passes the condition of each row to the model. Usage::

    import mteb
    from llmcond.integrations.mteb import CSTS, AspectTriples, MtebEncoder

    tasks = [CSTS("csts/", split="dev"), AspectTriples("aspects/")]
    mteb.evaluate(MtebEncoder("runs/default"), tasks, cache=None)

mteb does not check that a stored result is of the same data: leave ``cache=None`` if it differs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path, PurePath
from typing import Any, get_args

import numpy as np
from datasets import Dataset, DatasetDict
from huggingface_hub import metadata_load
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import Licenses
from safetensors.numpy import save as save_tensors

from llmcond.base.errors import UserError, nearest
from llmcond.base.files import digest_bytes, digest_text, read_json
from llmcond.base.package import pretrained_folder
from llmcond.base.text import as_condition
from llmcond.data.datasets import read_rows, sample_folder
from llmcond.data.guides import AspectSample, dataset_files, read_triples
from llmcond.data.rows import rows_digest
from llmcond.encoders.checkpoint import Checkpoint
from llmcond.encoders.loading import build_on_meta, load_config, measure_footprint, token_embeddings
from llmcond.integrations.mteb_tasks import AspectTriplesPC, ConditionalSTS
from llmcond.runs.embedder import Embedder, load_embedder
from llmcond.runs.similarity import Vectors


class MtebEncoder(AbsEncoder):  # type: ignore[misc]  # mteb has no types
    """An embedder as a model of mteb.

    Attributes:
        embedder: the embedder.
        condition: condition for texts of tasks that have none; None: such tasks raise an error.
    """

    def __init__(
        self,
        model_name: str | Path,
        revision: str | None = None,
        *,
        device: str | None = None,
        head: str | None = None,
        prompt: str | None = None,
        condition: str | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        """Load an embedder; the arguments are those of ``llmcond.load_embedder``.

        Raises:
            UserError, LlmcondError: as in ``llmcond.load_embedder``; or the condition is invalid,
                or the head does not compare vectors by their cosine.
        """
        self.condition = None if condition is None else as_condition(condition)
        self.embedder = load_embedder(
            model_name,
            head,
            prompt=prompt,
            device=device or "auto",
            revision=revision,
            truncate_dim=truncate_dim,
        )
        embedder = self.embedder
        if not embedder.head.compares_by_cosine:
            raise UserError(
                f"the head {embedder.name} does not compare embeddings by their cosine, as mteb "
                "does."
            )
        self.mteb_model_meta = _describe_model(
            embedder,
            {
                "source": str(model_name),
                "head": head,
                "prompt": prompt,
                "truncate_dim": truncate_dim,
            },
            condition,
        )

    def encode(self, inputs: Any, *, task_metadata: Any, **_: Any) -> Vectors:
        """Return (n, k) float32 embeddings of the texts and conditions in mteb's batches.

        Blank texts, which some corpora have, get zero vectors.

        Raises:
            UserError: neither the task nor the model has a condition.
        """
        texts: list[str] = []
        conditions: list[str] = []
        for batch in inputs:
            batch_conditions = batch.get("condition", self.condition)
            if batch_conditions is None:
                raise UserError(
                    f"the task {task_metadata.name} has no conditions. Give one for all its texts: "
                    "MtebEncoder(..., condition=...)."
                )
            texts += batch["text"]
            conditions += (
                [batch_conditions] * len(batch["text"])
                if isinstance(batch_conditions, str)
                else batch_conditions
            )
        filled = [index for index, text in enumerate(texts) if text.strip()]
        vectors = np.zeros((len(texts), self.embedder.dim), dtype=np.float32)
        # All at once, so that a text that is in several batches is encoded once.
        vectors[filled] = self.embedder.encode(
            [texts[index] for index in filled], [conditions[index] for index in filled]
        )
        return vectors


def load_mteb_encoder(_: str, revision: str | None = None, **options: Any) -> MtebEncoder:
    """Load a model by its ``ModelMeta``, whose name and revision are not those of llmcond."""
    options.pop("embed_dim", None)  # mteb has compared it with that of the model
    return MtebEncoder(options.pop("source"), **options)


def _describe_model(
    embedder: Embedder, arguments: dict[str, Any], condition: str | None
) -> ModelMeta:
    """Describe an embedder as far as its files do; None where they do not.

    Args:
        embedder: the embedder.
        arguments: the arguments of ``load_mteb_encoder`` that load it.
        condition: condition for texts that have none.
    """
    resolved, identity = embedder.encoder.resolved, embedder.encoder.identity
    checkpoint = resolved.checkpoint
    is_bundled = pretrained_folder(arguments["source"]) is not None
    is_trained = checkpoint.adapter is not None or embedder.head.kind != "none"
    network = build_on_meta(load_config(checkpoint, identity.attention))
    size, copies = measure_footprint(network), len(resolved.list_members())
    head_size = sum(tensor.size for tensor in embedder.head.tensors.values())
    n_bytes = size.weights(identity.dtype, identity.quantize) * copies + 4 * head_size
    base = None if checkpoint.known is None else checkpoint.known.repo
    base = checkpoint.repo or base
    base_card = _read_card(checkpoint.folder)
    card = base_card if checkpoint.adapter is None else _read_card(checkpoint.adapter)
    if checkpoint.adapter is None and is_trained:
        card = {}  # the card of the encoder says nothing of the head
    licence, data = str(card.get("license")).lower(), card.get("datasets") or []
    language, repository = base_card.get("language"), _project_url()
    return ModelMeta(
        loader=load_mteb_encoder if is_bundled else None,
        loader_kwargs=arguments if is_bundled else {},
        name=f"llmcond/{Path(embedder.encoder.name).name}-{embedder.name}-{embedder.view.name}",
        # mteb stores results under this revision, and under a further name for a condition.
        revision=_hash_embedder(embedder),
        experiment_kwargs=None if condition is None else {"condition": condition},
        release_date=_read_training(checkpoint).get("created", "")[:10] or None,
        languages=["eng-Latn"] if language in ("en", ["en"]) else None,
        n_parameters=size.n_parameters * copies + head_size,
        n_embedding_parameters=token_embeddings(network).numel() * copies,
        memory_usage_mb=round(n_bytes / 2**20),
        max_tokens=identity.known_length,
        embed_dim=embedder.dim,
        license=licence if licence in get_args(Licenses) else None,
        open_weights=is_bundled or None,
        public_training_code=repository if is_trained else None,
        public_training_data=f"https://huggingface.co/datasets/{data[0]}"
        if len(data) == 1
        else bool(data) or None,
        framework=["OpenVINO" if resolved.runtime == "openvino" else "PyTorch", "safetensors"],
        reference=repository if is_bundled else None,
        similarity_fn_name=ScoringFunction.COSINE,
        use_instructions=True,
        training_datasets=_list_training_data(embedder),
        adapted_from=base,
        modalities=["text"],
        model_type=["dense"],
    )


def _read_card(folder: Path) -> Mapping[str, Any]:
    """Return the metadata of a model card; an empty mapping if there is none."""
    path = folder / "README.md"
    return (metadata_load(path) if path.is_file() else None) or {}


def _read_training(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the training record of an encoder; an empty mapping if it was not trained."""
    path = (checkpoint.adapter or checkpoint.folder) / "training.json"
    record: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    return record


def _list_training_data(embedder: Embedder) -> set[str]:
    """Return the names of the data that encoder and head were trained on; mteb's names if any.

    mteb adds the data of the base encoder, if it knows the encoder.
    """
    record = _read_training(embedder.encoder.resolved.checkpoint)
    source = embedder.fitted_on.partition(" and texts of ")[0]
    names = {PurePath(source).name} if source else set()
    if record:
        names |= {PurePath(record["data"]["source"]).name, *record["summary"].get("aspects", ())}
    if any(re.match(r"c-?sts", name, re.IGNORECASE) for name in names):
        names.add(CSTS.metadata.name)
    if names & AspectTriples.metadata.eval_langs.keys():
        names.add(AspectTriples.metadata.name)
    return names


def _project_url() -> str | None:
    """Return the address of llmcond's repository, as its package states it."""
    try:
        urls = metadata("llmcond").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    return dict(url.split(", ", 1) for url in urls).get("Repository")


def _hash_embedder(embedder: Embedder) -> str:
    """Return a hash of everything that determines an embedder's vectors."""
    head, prompts = embedder.head, [prompt.digest for prompt in embedder.view.prompts]
    tensors = {name: np.ascontiguousarray(value) for name, value in head.tensors.items()}
    weights = digest_bytes(save_tensors(tensors), size=16).hex()
    # Zero-shot has no settings, but may subtract.
    settings = repr(head.settings) if head.dim_in else "" if embedder.view.subtract else "plain"
    size = () if embedder.truncate_dim is None else (str(embedder.truncate_dim),)
    return digest_text(embedder.encoder.identity.fingerprint, *prompts, settings, weights, *size)


class _LocalData:
    """A task whose data is in memory, and whose metadata describes that data."""

    _data: Any
    metadata: Any

    def load_data(self, *_: Any, **__: Any) -> None:
        """Pass the data to mteb."""
        self.dataset, self.data_loaded = self._data, True

    def unload_data(self) -> None:
        """Let mteb release the data, but keep the metadata, which mteb resets to the class's."""
        metadata = self.metadata
        super().unload_data()  # type: ignore[misc]  # of the task
        self.metadata = metadata


class CSTS(_LocalData, ConditionalSTS):
    """Conditional semantic textual similarity on local data, without its unrated rows."""

    def __init__(self, source: Any = None, split: str | None = None, **kwargs: Any) -> None:
        """Read the rows of a file, or of one split of a folder.

        Args:
            source: data as ``llmcond extract --data`` reads it; None: the bundled sample, which is
                not C-STS.
            split: split of a folder; None: test, or dev if there is no test split.
            kwargs: arguments of mteb's tasks.

        Raises:
            UserError: the data cannot be read.
        """
        rows, name = read_rows(sample_folder() if source is None else source, split)
        rows = rows.take(rows.rated)
        columns = ("sentence1", "sentence2", "condition")
        texts = {column: list(rows.texts[column]) for column in columns}
        low, high = self.min_score, self.max_score
        scores = (low + (high - low) * rows.rating).tolist()
        self._data = DatasetDict({name: Dataset.from_dict({**texts, "score": scores})})
        self.metadata = type(self).metadata.model_copy(
            update={
                "name": "CSTS" if source is not None else "CSTS-sample",
                "dataset": {"path": rows.file, "revision": rows_digest(rows)},
                "eval_splits": [name],
            }
        )
        super().__init__(**kwargs)


class AspectTriples(_LocalData, AspectTriplesPC):
    """Paired triples of local texts with several attributes, a subset for each dataset."""

    def __init__(self, folder: str | Path, only: Sequence[str] = (), **kwargs: Any) -> None:
        """Read the datasets of a folder that have triples.

        Args:
            folder: folder of ``scripts/bench_aspects.py``, with NAME.json for each dataset, and
                triples/NAME.json.
            only: names of the datasets; by default all that have triples.
            kwargs: arguments of mteb's tasks.

        Raises:
            UserError: a dataset does not exist, has no triples, or has an invalid format.
        """
        files = dataset_files(Path(folder))
        for name in only:
            if name not in files:
                raise UserError(f"{folder} has no dataset {name!r}. {nearest(name, files)}")
        samples = {name: read_triples(files[name]) for name in only or files}
        without = [name for name, sample in samples.items() if sample is None]
        if (only and without) or len(without) == len(samples):
            raise UserError(
                f"{without[0]} in {folder} has no triples. Add triples/{without[0]}.json, as "
                "docs/aspects.md describes."
            )
        pairs = {name: _list_pairs(sample) for name, sample in samples.items() if sample}
        self._data = {
            name: DatasetDict({"test": Dataset.from_list(rows)}) for name, rows in pairs.items()
        }
        self.metadata = type(self).metadata.model_copy(
            update={
                "dataset": {
                    "path": Path(folder).resolve().name,
                    "revision": digest_text(json.dumps(pairs)),
                },
                "eval_langs": {name: ["eng-Latn"] for name in pairs},
            }
        )
        super().__init__(**kwargs)


def _list_pairs(sample: AspectSample) -> list[dict[str, Any]]:
    """Return the four pairs of each triple."""
    return [
        {
            "sentence1": sample.texts[triple.anchor].text,
            "sentence2": sample.texts[position].text,
            "condition": sample.conditions[condition].text,
            "labels": int((position == triple.first) == (condition == triple.condition)),
        }
        for triple in sample.triples
        for condition in (triple.condition, triple.other)
        for position in (triple.first, triple.second)
    ]
