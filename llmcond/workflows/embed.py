"""Embed a file of sentences: in order, resumable, and written whole or not at all."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Matrix
from llmcond.conditions import with_same_values
from llmcond.data.candidates import (
    condition_source,
    has_column,
    is_text_file,
    read_collection,
    text_column,
)
from llmcond.data.datasets import Texts, read_texts
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.readers import EMBEDDING_SUFFIXES
from llmcond.data.rows import column_of
from llmcond.display import Displayed
from llmcond.encoders import resolve_base
from llmcond.encoders.spec import EncoderInput, InputError
from llmcond.errors import UserError
from llmcond.features.view import Part
from llmcond.files import check_output, replacing
from llmcond.heads.guide import Guide, apply_guides
from llmcond.log import log
from llmcond.prompts import Prompt
from llmcond.runs.embedder import guide_of, guides_json, unit_length
from llmcond.runs.embedding_model import EmbeddingModel
from llmcond.runs.extraction import LazyEncoder, extract_inputs
from llmcond.workflows.options.texts import EmbedOptions

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore

#: Rows whose vectors are in memory at a time.
_BLOCK = 8_192

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class EmbedResult(Displayed):
    """What was written: ``rows`` embeddings of size ``dim``; head ``none`` is zero-shot.

    ``guides`` are those of some conditions.
    """

    out: Path | str
    rows: int
    dim: int
    head: str
    prompt: str
    guides: Mapping[Any, Guide] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        own = super().to_json()
        del own["guides"]
        return own | guides_json(self.guides)


class Embeddings:
    """Embeddings of texts of a user's own by a run, whose store keeps what was encoded.

    What was interrupted goes on where it stopped, and a second head encodes nothing.

    Attributes:
        view: what is encoded of a text and its condition.
        head_name: the head's; ``none``: zero-shot.
        guides: what maps embeddings under some conditions; None: of texts by themselves.
    """

    def __init__(self, run_folder: Path, head: str | None, prompt: str | None, device: str) -> None:
        model = EmbeddingModel.find(run_folder, head, prompt, device=device)
        self.view, self.head_name, self.encoder = model.view, model.head.reference, model.encoder
        self._head, self._store = model.head.head, model.run.store_for_others()
        self.guides: dict[str | None, Guide] = {}

    def guide(self, labelled: LabelledTexts) -> None:
        """Fit a guide to labelled texts, for all embeddings under their condition from now on.

        Raises:
            UserError: as of :meth:`extract`, or the head does not compare by cosine.
        """
        texts, condition = labelled.texts, labelled.condition
        self.guides.pop(condition, None)
        if condition is None:
            guide = guide_of(labelled, self.alone(texts))
        else:
            vectors = self.of([(text, condition) for text in texts], labelled.source)
            guide = guide_of(labelled, vectors, self._head)
        self.guides[condition] = guide

    def extract(self, rows: Sequence[tuple[str, str]], file: str) -> None:
        """Encode what the store lacks for (sentence, condition) rows of a file so named.

        Raises:
            UserError: the encoder gave NaN or infinity, with the row that made it.
        """
        inputs = self.view.inputs(rows)
        try:
            extract_inputs(self._store, self.encoder, self.view.name, inputs)
        except InputError as error:
            number = 1 + list(inputs).index(error.item) // len(self.view.needed())
            raise UserError(f"row {number} of {file}: {error}") from error

    def blocks(self, rows: Sequence[tuple[str, str]], normalize: bool = True) -> Iterator[Vectors]:
        """Yield the embeddings of rows that were extracted, some at a time."""
        for start in range(0, len(rows), _BLOCK):
            part = rows[start : start + _BLOCK]

            def read(prompt: Prompt, side: Part, part: Sequence[Any] = part) -> Matrix:
                return self._store.lookup([getattr(prompt, side).render(*row) for row in part])

            found = self._head.transform(self.view.sentence(read), self.view.condition(read))
            found = apply_guides(found, [condition for _, condition in part], self.guides)
            yield unit_length(found, self._head) if normalize else found

    def of(self, rows: Sequence[tuple[str, str]], file: str) -> Vectors:
        """Return (n, k) the embeddings of rows of a file so named, of unit L2 norm.

        Raises:
            UserError: as of :meth:`extract`.
        """
        self.extract(rows, file)
        return np.concatenate(list(self.blocks(rows)))

    def alone(self, texts: Sequence[str]) -> Vectors:
        """Return (n, d) the encoder's own vectors of texts, without a condition or a head."""
        vectors = _alone(self.encoder, self._store, texts)
        guide = self.guides.get(None)
        return vectors if guide is None else guide.transform(vectors)

    def base(self, texts: Sequence[str]) -> tuple[str, Vectors]:
        """Return plain embeddings of texts, (n, d), and the name of the encoder they are of.

        That is the base which an adapter was trained on, or the encoder itself where it was not
        trained. Where all its weights were trained, no base is recorded, and it stands in.
        """
        from llmcond.features.store import FeatureStore

        resolved = resolve_base(self.encoder.resolved)
        if resolved is None:
            log.info(f"no base of {self.encoder.name} is recorded; its own vectors are taken")
        if resolved is None or resolved is self.encoder.resolved:
            return self.encoder.name, _alone(self.encoder, self._store, texts)
        base = LazyEncoder(resolved)
        store = FeatureStore(self._store.root, resolved.identity, self._store.dtype)
        return base.name, _alone(base, store, texts)


def _alone(encoder: LazyEncoder, store: FeatureStore, texts: Sequence[str]) -> Vectors:
    inputs = [EncoderInput("", text) for text in texts]
    extract_inputs(store, encoder, f"{encoder.name}, no condition", inputs)
    return unit_length(store.lookup(inputs).read())


def embed_file(options: EmbedOptions) -> EmbedResult:
    """Write one condition-aware embedding for each row of a file.

    Features go through the run's store, so an interrupted call resumes where it stopped, and a
    second head on the same file encodes nothing.
    """
    run_folder, source, out = options.folder(), options.source, Path(options.out)
    guide, keep, text = options.guide, options.keep, options.text_column
    check_output(out, EMBEDDING_SUFFIXES, [source, guide, run_folder / "rows.parquet"])
    embeddings = Embeddings(run_folder, options.head, options.prompt, options.device)
    taken = sorted({"sentence", "condition", "embedding"} & set(keep))
    if keep and (taken or out.suffix == ".npy"):
        wrong = f"{taken[0]!r} is written anyway" if taken else f"{out} holds vectors only"
        raise UserError(f"--keep: {wrong}. Name other columns, and a .parquet or .csv file.")
    texts = _read(source, text, options.condition, options.condition_text, keep)
    conditions = with_same_values(texts.conditions, options.values)
    if guide is not None:
        for labelled in read_guide(guide, text, list(dict.fromkeys(conditions))):
            embeddings.guide(labelled)
    rows = list(zip(texts.sentences, conditions, strict=True))
    embeddings.extract(rows, texts.file)
    vectors = embeddings.blocks(rows, options.normalize)
    first = next(vectors)
    dim = first.shape[1]
    write = {".parquet": _write_parquet, ".csv": _write_csv, ".npy": _write_npy}[out.suffix]
    with replacing(out) as temporary:
        write(temporary, texts, dim, chain([first], vectors))
    name = embeddings.head_name
    log.info(f"{len(rows):,} embeddings of {dim} dimensions by {name} -> {out}")
    return EmbedResult(out, len(rows), dim, name, embeddings.view.name, embeddings.guides)


def _read(
    source: Any,
    text: str | None,
    condition: str | None,
    condition_text: str | None,
    keep: Sequence[str],
) -> Texts:
    """Read texts and their conditions, from a table or a text file, one text a line."""
    has = partial(has_column, source)
    column, words = condition_source(has, condition, condition_text)
    if not is_text_file(source):
        return read_texts(source, text_column(has, text), column, words, keep)
    if text or keep or words is None:
        wrong = f"--text {text}" if text else f"--keep {keep[0]}" if keep else "the conditions"
        raise UserError(
            f"{source} is read as a text file, one text a line, and has no column for {wrong}. "
            "Name a table, or one condition for every row: --condition TEXT."
        )
    found = read_collection(source)
    return Texts(found.texts, [words] * len(found.texts), found.file)


def _write_parquet(path: Path, texts: Texts, dim: int, blocks: Iterable[Vectors]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, vector, start = pa.string(), pa.list_(pa.float32(), dim), 0
    kept = {name: column_of(values) for name, values in texts.kept.items()}
    types = {name: column.type for name, column in kept.items()}
    schema = pa.schema({**types, "sentence": text, "condition": text, "embedding": vector})
    with pq.ParquetWriter(path.absolute(), schema) as writer:
        for vectors in blocks:
            stop = start + len(vectors)
            flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
            embedding = pa.FixedSizeListArray.from_arrays(flat, dim)
            own = [column[start:stop] for column in kept.values()]
            columns = [*own, texts.sentences[start:stop], texts.conditions[start:stop], embedding]
            writer.write_table(pa.table(columns, schema))
            start = stop


def _write_csv(path: Path, texts: Texts, dim: int, blocks: Iterable[Vectors]) -> None:
    """Write rows whose embeddings are JSON lists, of digits enough to give the same float32."""
    columns = [*texts.kept.values(), texts.sentences, texts.conditions]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*texts.kept, "sentence", "condition", "embedding"])
        vectors = chain.from_iterable(blocks)
        for *row, vector in zip(*columns, vectors, strict=True):
            writer.writerow([*row, f"[{', '.join(f'{value:.9g}' for value in vector)}]"])


def _write_npy(path: Path, texts: Texts, dim: int, blocks: Iterable[Vectors]) -> None:
    shape, start = (len(texts.sentences), dim), 0
    array = np.lib.format.open_memmap(path, "w+", np.dtype(np.float32), shape)
    for vectors in blocks:
        array[start : start + len(vectors)] = vectors
        start += len(vectors)
    array.flush()
