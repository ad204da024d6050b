"""Embedders as models of sentence-transformers, for any condition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule

from llmcond.base.errors import UserError
from llmcond.base.system import check_device
from llmcond.encoders.adapter import RUN_RECORD
from llmcond.runs.embedder import Embedder, load_embedder
from llmcond.runs.portable import EXPORT_SETTINGS, copy_run, read_export


class ConditionalEmbedder(InputModule):  # type: ignore[misc]  # the library has no types
    """The only module of a model: it maps texts and conditions to embeddings."""

    forward_kwargs: ClassVar[set[str]] = {"condition"}

    def __init__(self, embedder: Embedder, run: Path) -> None:
        super().__init__()
        if not embedder.head.compares_by_cosine:
            raise UserError(
                f"the head {embedder.name} does not compare embeddings by their cosine, as "
                "sentence-transformers does."
            )
        self.embedder, self.run = embedder, run

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens of an input."""
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
        """Pair texts with their conditions; ``inputs`` are texts or (text, condition) pairs.

        Raises:
            UserError: a text has no condition, or ``condition`` is a list, which
                sentence-transformers would not sort together with the texts.
        """
        if prompt:
            raise UserError(
                "this model takes no prompt: it has a prompt into which it inserts the condition. "
                "Give condition= instead."
            )
        if condition is not None and not isinstance(condition, str):
            raise UserError(
                f"condition is a {type(condition).__name__}; give one text for all, or a list of "
                "(text, condition) pairs to encode."
            )
        if condition is not None and any(isinstance(item, tuple | list) for item in inputs):
            raise UserError("give condition= or (text, condition) pairs, not both.")
        rows = [item if isinstance(item, tuple | list) else (item, condition) for item in inputs]
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
        """Write the files that ``load`` reads.

        Raises:
            UserError: the model was loaded from this folder.
        """
        embedder = self.embedder
        if (Path(output_path) / "run").resolve() == self.run.resolve():
            raise UserError(f"the model was loaded from {output_path}. Name another folder.")
        checkpoint = embedder.encoder.resolved.checkpoint
        copy_run(self.run, embedder.name, embedder.view, checkpoint, Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Self:
        """Load an export of any condition, from a local folder or from the hub."""
        names = ("token", "cache_folder", "revision", "local_files_only")
        hub_options = {name: kwargs[name] for name in names if name in kwargs}
        path = cls.load_file_path(
            model_name_or_path, EXPORT_SETTINGS, subfolder=subfolder, **hub_options
        )
        if path is None:
            raise UserError(f"{model_name_or_path} has no {EXPORT_SETTINGS}. Export it again.")
        run = cls.load_dir_path(model_name_or_path, subfolder="run", **hub_options)
        return cls.of_export(Path(path).parent, Path(str(run)))

    @classmethod
    def of_export(cls, folder: Path, run: Path, device: str = "auto") -> Self:
        """Create the module from the folder of an export and its run."""
        return cls(load_embedder(run, **read_export(folder), device=device), run)


def load_sentence_transformer(
    path: str | Path, *, device: str = "auto", revision: str | None = None
) -> SentenceTransformer:
    """Load an embedder as a ``SentenceTransformer`` whose ``encode`` accepts a condition.

    ``encode(texts, condition="the place")`` uses one condition for all texts, and ``encode([(text,
    condition), ...])`` one for each.

    Args:
        path: output of ``llmcond export``, the folder of a run, the name of a bundled model, or the
            ``OWNER/NAME`` of a model that ``llmcond push`` uploaded to the hub.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        revision: branch, tag or commit of a model on the hub; None: the newest version.

    Returns:
        The model. An export with fixed conditions is an ordinary sentence-transformers model.

    Raises:
        UserError, LlmcondError: as in ``llmcond.load_embedder``; or ``path`` is an export, and a
            revision is given.

    Examples:
        >>> import llmcond
        >>> model = llmcond.load_sentence_transformer("minilm-conditions")
        >>> model.encode(["A man rides a horse."], condition="the activity").shape
        (1, 384)
        >>> pairs = [("A man rides a horse.", "the activity"), ("A girl cycles.", "the place")]
        >>> model.encode(pairs).shape
        (2, 384)
    """
    folder = Path(path)
    is_export = (folder / "modules.json").is_file() and not (folder / RUN_RECORD).is_file()
    if is_export and revision is not None:
        raise UserError(
            f"revision is {revision!r}, but {path} is a folder, and only models on the hub have "
            "revisions. Leave it out."
        )
    if (folder / EXPORT_SETTINGS).is_file():
        module = ConditionalEmbedder.of_export(folder, folder / "run", device)
    elif is_export:  # A run of a whole checkpoint has its modules.json, too.
        check_device(device)
        return SentenceTransformer(str(folder), device=None if device == "auto" else device)
    else:
        from llmcond.runs.open import resolve_run

        run = resolve_run(path, revision=revision)
        module = ConditionalEmbedder(load_embedder(run, device=device), run)
    return SentenceTransformer(modules=[module], similarity_fn_name="cosine")
