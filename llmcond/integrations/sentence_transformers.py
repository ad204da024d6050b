"""An embedder inside sentence-transformers, for any condition.

>>> model = llmcond.load_sentence_transformer("runs/default")
>>> model.encode(["A man rides a horse."], condition="the activity")
>>> model.encode([("A man rides a horse.", "the activity"), ("A girl cycles.", "the place")])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule

from llmcond.errors import UserError
from llmcond.exporting.run import SETTINGS, copy_run, read_export
from llmcond.runs.embedder import Embedder, load_embedder


class ConditionalEmbedder(InputModule):  # type: ignore[misc]  # of a library without types
    """The only module of a model: texts and conditions in, embeddings out."""

    forward_kwargs: ClassVar[set[str]] = {"condition"}

    def __init__(self, embedder: Embedder, run: Path) -> None:
        super().__init__()
        self.embedder, self.run = embedder, run

    @property
    def max_seq_length(self) -> int:
        """Return the tokens that an input may have."""
        return self.embedder.encoder.identity.max_length

    def get_embedding_dimension(self) -> int:
        """Return the size of the embeddings."""
        return self.embedder.dim

    def preprocess(
        self,
        inputs: Sequence[Any],
        prompt: str | None = None,
        condition: str | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Return texts with their conditions; ``inputs`` are texts or (text, condition) pairs.

        Raises:
            UserError: a text without a condition, or a list of conditions, which would not be
                in the order that texts are encoded in.
        """
        if prompt:
            raise UserError(
                "this model takes no prompt: it has its own, which the condition is put into. "
                "Give condition= instead."
            )
        if condition is not None and not isinstance(condition, str):
            raise UserError(
                f"condition is a {type(condition).__name__}; give one text for all, or a list of "
                "(text, condition) pairs to encode."
            )
        rows = [one if isinstance(one, tuple | list) else (one, condition) for one in inputs]
        for row in rows:
            if len(row) != 2 or not all(isinstance(text, str) for text in row):
                raise UserError(
                    f"no condition for {row[0]!r}: encode(texts, condition=...), or "
                    "encode([(text, condition), ...])."
                )
        return {"texts": [row[0] for row in rows], "conditions": [row[1] for row in rows]}

    def forward(self, features: dict[str, Any], **others: Any) -> dict[str, Any]:
        """Return the features with the embeddings, (n, dim) float32."""
        vectors = self.embedder.encode(features["texts"], features["conditions"])
        features["sentence_embedding"] = torch.from_numpy(vectors)
        return features

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write what :meth:`load` reads."""
        copy_run(self.run, self.embedder, Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Self:
        """Load what an export of any condition wrote, or what was downloaded of one."""
        names = ("token", "cache_folder", "revision", "local_files_only")
        where = {name: kwargs[name] for name in names if name in kwargs}
        path = cls.load_file_path(model_name_or_path, SETTINGS, subfolder=subfolder, **where)
        if path is None:
            raise UserError(f"{model_name_or_path} has no {SETTINGS}; export it anew.")
        run = cls.load_dir_path(model_name_or_path, subfolder="run", **where)
        return cls.of_export(Path(path).parent, Path(str(run)))

    @classmethod
    def of_export(cls, folder: Path, run: Path, device: str = "auto") -> Self:
        """Return the module of an export's folder, with its run; see :func:`load_embedder`."""
        return cls(load_embedder(run, **read_export(folder), device=device), run)


def load_sentence_transformer(path: str | Path, *, device: str = "auto") -> SentenceTransformer:
    """Load an embedder as a ``SentenceTransformer`` whose ``encode`` takes a condition.

    ``encode(texts, condition="the place")`` is one condition for all texts, and
    ``encode([(text, condition), ...])`` one for each.

    Args:
        path: what ``llmcond export`` wrote, a run's folder, or the name of a bundled model.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError, LlmcondError: as :func:`llmcond.load_embedder`.
    """
    folder = Path(path)
    if (folder / SETTINGS).is_file():
        module = ConditionalEmbedder.of_export(folder, folder / "run", device)
    elif (folder / "modules.json").is_file():
        return SentenceTransformer(str(folder), device=None if device == "auto" else device)
    else:
        from llmcond.runs.open import usual_run

        run = usual_run(path)
        module = ConditionalEmbedder(load_embedder(run, device=device), run)
    return SentenceTransformer(modules=[module], similarity_fn_name="cosine")
