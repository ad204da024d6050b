"""Embedders and conditional similarity inside mteb, which passes each row's condition along.

>>> import mteb
>>> from llmcond.integrations.mteb import CSTS, MtebEncoder
>>> mteb.evaluate(MtebEncoder("runs/default"), CSTS("csts/", split="dev"), cache=None)

What no embedder reads, such as a task's own instruction, is left out.
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
from llmcond.runs.comparing import Vectors
from llmcond.runs.embedder import Embedder, load_embedder


class MtebEncoder(AbsEncoder):  # type: ignore[misc]  # of a library without types
    """An embedder as a model of mteb.

    Attributes:
        embedder: what it encodes by.
        condition: of texts whose task gives none; None: such a task is refused.
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
        """Load it; ``model_name`` is a run's folder or the name of a bundled model.

        Raises:
            UserError, LlmcondError: as :func:`llmcond.load_embedder`, or its vectors are not
                compared by their cosine.
        """
        self.embedder = load_embedder(model_name, head, prompt=prompt, device=device or "auto")
        self.condition = condition
        own = self.embedder
        if not own.head.compares_by_cosine:
            raise UserError(
                f"the head {own.name} compares embeddings not by their cosine, as mteb would."
            )
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"llmcond/{Path(own.encoder.name).name}-{own.name}-{own.view.name}",
                # mteb keeps results by it.
                "revision": _revision(own),
                "embed_dim": own.dim,
                "max_tokens": own.encoder.identity.max_length,
                "framework": ["PyTorch"],
                "similarity_fn_name": ScoringFunction.COSINE,
                "use_instructions": True,
            }
        )

    def encode(self, inputs: Any, *, task_metadata: Any, **_: Any) -> Vectors:
        """Return (n, k) float32 embeddings of what mteb's batches hold: texts and conditions.

        Raises:
            UserError: the task gives no conditions, and none was given for it.
        """
        found = []
        for batch in inputs:
            conditions = batch.get("condition", self.condition)
            if conditions is None:
                raise UserError(
                    f"the task {task_metadata.name} gives no conditions. Give one for all of its "
                    "texts: MtebEncoder(..., condition=...)."
                )
            given = conditions if isinstance(conditions, str) else list(conditions)
            found.append(self.embedder.encode(list(batch["text"]), given))
        return np.concatenate(found)


def _revision(embedder: Embedder) -> str:
    """Identify everything that decides an embedder's vectors."""
    head, prompts = embedder.head, [prompt.digest for prompt in embedder.view.prompts]
    tensors = {name: np.ascontiguousarray(value) for name, value in head.tensors.items()}
    weights = digest_bytes(save_tensors(tensors), size=16).hex()
    settings = repr(head.settings) if head.dim_in else ""
    return digest_text(embedder.encoder.identity.fingerprint, *prompts, settings, weights)


class CSTS(AbsTaskSTS):  # type: ignore[misc]  # of a library without types
    """Conditional semantic textual similarity, of rows on this machine; unrated ones are left out.

    Models that read no ``condition`` are scored on the texts alone.
    """

    min_score, max_score = 0, 1
    #: A text and its condition: rows of a sentence pair have one condition for both.
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
            source: rows as ``llmcond extract --data`` takes them; None: the bundled sample, which
                is not C-STS.
            split: of a folder; None: test, or where there is none dev.
            kwargs: those of mteb's tasks.

        Raises:
            UserError: as for any data.
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
        """Hand the rows to mteb."""
        columns = ("sentence1", "sentence2", "condition")
        own = {name: list(self._rows.texts[name]) for name in columns}
        data = Dataset.from_dict({**own, "score": self._rows.rating.tolist()})
        self.dataset = {"default": DatasetDict({self._split: data})}
        self.data_loaded = True
