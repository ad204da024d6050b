"""Embedders and conditional similarity as a model and a task of mteb.

mteb passes the condition of each row to the model. Usage::

    import mteb from llmcond.integrations.mteb import CSTS, MtebEncoder

    mteb.evaluate(MtebEncoder("runs/default"), CSTS("csts/", split="dev"), cache=None)

Inputs that embedders do not read, such as the instruction of a task, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset, DatasetDict
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from safetensors.numpy import save as save_tensors

from llmcond.data.datasets import read_rows, sample_folder
from llmcond.data.rows import rows_digest
from llmcond.errors import UserError
from llmcond.files import digest_bytes, digest_text
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
        **_: Any,
    ) -> None:
        """Load an embedder; ``model_name`` is the folder of a run or the name of a bundled model.

        Raises:
            UserError, LlmcondError: as in ``llmcond.load_embedder``; or the head does not compare
                vectors by their cosine.
        """
        self.embedder = load_embedder(model_name, head, prompt=prompt, device=device or "auto")
        self.condition = condition
        embedder = self.embedder
        if not embedder.head.compares_by_cosine:
            raise UserError(
                f"the head {embedder.name} does not compare embeddings by their cosine, as mteb "
                "does."
            )
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"llmcond/{Path(embedder.encoder.name).name}-{embedder.name}-"
                f"{embedder.view.name}",
                # mteb stores results under this revision.
                "revision": _hash_embedder(embedder),
                "embed_dim": embedder.dim,
                "max_tokens": embedder.encoder.identity.max_length,
                "framework": ["PyTorch"],
                "similarity_fn_name": ScoringFunction.COSINE,
                "use_instructions": True,
            }
        )

    def encode(self, inputs: Any, *, task_metadata: Any, **_: Any) -> Vectors:
        """Return (n, k) float32 embeddings of the texts and conditions in mteb's batches.

        Raises:
            UserError: neither the task nor the model has a condition.
        """
        embeddings = []
        for batch in inputs:
            conditions = batch.get("condition", self.condition)
            if conditions is None:
                raise UserError(
                    f"the task {task_metadata.name} has no conditions. Give one for all its texts: "
                    "MtebEncoder(..., condition=...)."
                )
            batch_conditions = conditions if isinstance(conditions, str) else list(conditions)
            embeddings.append(self.embedder.encode(list(batch["text"]), batch_conditions))
        return np.concatenate(embeddings)


def _hash_embedder(embedder: Embedder) -> str:
    """Return a hash of everything that determines an embedder's vectors."""
    head, prompts = embedder.head, [prompt.digest for prompt in embedder.view.prompts]
    tensors = {name: np.ascontiguousarray(value) for name, value in head.tensors.items()}
    weights = digest_bytes(save_tensors(tensors), size=16).hex()
    settings = repr(head.settings) if head.dim_in else ""
    return digest_text(embedder.encoder.identity.fingerprint, *prompts, settings, weights)


class CSTS(AbsTaskSTS):  # type: ignore[misc]  # mteb has no types
    """Conditional semantic textual similarity on local data, without its unrated rows.

    Models that do not read ``condition`` are scored on the texts alone.
    """

    min_score, max_score = 0, 1
    #: Columns of both texts. The two sentences of a row share its condition.
    column_names: ClassVar[tuple[Mapping[str, str], Mapping[str, str]]] = (
        {"sentence1": "text", "condition": "condition"},
        {"sentence2": "text", "condition": "condition"},
    )
    metadata = TaskMetadata(
        name="CSTS",
        description="The similarity of two sentences with regard to a condition.",
        reference="https://arxiv.org/abs/2305.15093",
        dataset={"path": "local", "revision": "local"},
        type="STS",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="spearman",
        date=("2014-01-01", "2023-12-31"),
        domains=["Written"],
        task_subtypes=[],
        license="not specified",
        annotations_creators="human-annotated",
        dialect=[],
        sample_creation="found",
        bibtex_citation="",
    )

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
        self._rows, self._split = rows, name
        self.metadata = type(self).metadata.model_copy(
            update={
                "name": "CSTS" if source is not None else "CSTS-sample",
                "dataset": {"path": rows.file, "revision": rows_digest(rows)},
                "eval_splits": [name],
            }
        )
        super().__init__(**kwargs)

    def load_data(self, *_: Any, **__: Any) -> None:
        """Pass the rows to mteb."""
        columns = ("sentence1", "sentence2", "condition")
        texts = {name: list(self._rows.texts[name]) for name in columns}
        data = Dataset.from_dict({**texts, "score": self._rows.rating.tolist()})
        self.dataset = {"default": DatasetDict({self._split: data})}
        self.data_loaded = True
