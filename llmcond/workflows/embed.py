"""Embedding a file of sentences: in order, resumable, and written completely or not at all."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.arrays import Matrix
from llmcond.conditions import add_values
from llmcond.data.candidates import (
    has_column,
    is_text_file,
    read_collection,
    resolve_conditions,
    text_column,
)
from llmcond.data.datasets import ConditionedTexts, read_texts
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.readers import EMBEDDING_SUFFIXES
from llmcond.data.rows import to_arrow
from llmcond.display import Displayed
from llmcond.encoders import resolve_base
from llmcond.encoders.spec import EncoderInput, InputError
from llmcond.errors import UserError
from llmcond.features.view import FeaturePart
from llmcond.files import check_output, replace_atomically
from llmcond.heads.guide import Guide, Guides, apply_guides
from llmcond.log import log
from llmcond.options import Precision
from llmcond.prompts import Prompt
from llmcond.quantization import Quantizer, check_truncate_dim, measure_ranges, read_ranges
from llmcond.report.format import head_text
from llmcond.runs.embedder import (
    check_truncatable,
    fit_checked_guide,
    guides_json,
    normalise_vectors,
)
from llmcond.runs.embedding_model import EmbeddingModel
from llmcond.runs.extraction import LazyEncoder, extract_inputs
from llmcond.runs.languages import report_foreign_texts
from llmcond.version import __version__
from llmcond.workflows.options.texts import EmbedOptions

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore

#: The number of rows whose vectors are in memory at a time.
_BLOCK = 8_192

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class EmbedResult(Displayed):
    """The result of writing embeddings.

    Attributes:
        out: the file or folder that was written, or its URI.
        rows: the number of embeddings.
        dim: the number of dimensions of an embedding.
        head: the name of the head; zero-shot is ``none@PROMPT``.
        prompt: the name of the prompt.
        guides: the guide of each condition that has one.
        precision: the number type of the embeddings.
        ranges: the file with the ranges of int8 and uint8, or None.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     {"sentence": "A man rides a bicycle.", "condition": "the vehicle"},
        ...     {"sentence": "A woman drives a car.", "condition": "the vehicle"},
        ... ]
        >>> result = llmcond.embed(source=rows, out="vectors.npy")
        >>> result.rows, result.dim
        (2, 384)
    """

    out: Path | str
    rows: int
    dim: int
    head: str
    prompt: str
    guides: Mapping[Any, Guide] = field(default_factory=dict)
    precision: Precision = "float32"
    ranges: Path | None = None

    @override
    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        del fields["guides"]
        return fields | guides_json(self.guides)


class TextEmbedder:
    """A model of a run that embeds the user's texts, with a store of encoded features.

    The store lets an interrupted call continue where it stopped, and lets a second head embed the
    same texts without encoding them again.

    Attributes:
        view: the features of a text and its condition that the head takes.
        head_name: the name of the head; ``none`` is zero-shot.
        encoder: the encoder, which is loaded when it is first needed.
        guides: the guide of each condition that has one; the key None is for texts without a
            condition.
        identity: everything about the model that decides the embeddings.
    """

    def __init__(
        self,
        run_folder: Path,
        head: str | None,
        prompt: str | None,
        device: str,
        truncate_dim: int | None = None,
    ) -> None:
        """Find the model of a run; its embeddings have ``truncate_dim`` dimensions (None: all).

        Raises:
            UserError: as ``EmbeddingModel.find``, or the head does not compare by cosine, so that
                its embeddings cannot be truncated.
        """
        model = EmbeddingModel.find(run_folder, head, prompt, device=device)
        check_truncatable(truncate_dim, model.head.head)
        self.identity, self._truncate_dim = model.identity, truncate_dim
        self.view, self.head_name, self.encoder = model.view, model.head.reference, model.encoder
        self._head, self._store = model.head.head, model.run.store_for_other_texts()
        self.guides = Guides()

    def fit_guide(self, labelled: LabelledTexts) -> None:
        """Fit a guide to labelled texts, and apply it to all later embeddings of their condition.

        Raises:
            UserError: as ``extract``, or the head does not compare by cosine.
        """
        texts, condition = labelled.texts, labelled.condition
        self.guides.pop(condition, None)
        if condition is None:
            guide = fit_checked_guide(labelled, self.embed_plain(texts))
        else:
            vectors = self.embed([(text, condition) for text in texts], labelled.source)
            guide = fit_checked_guide(labelled, vectors, self._head)
        self.guides[condition] = guide

    def extract(self, rows: Sequence[tuple[str, str]], file: str) -> None:
        """Encode the inputs of (sentence, condition) rows that the store lacks.

        Args:
            rows: the rows.
            file: the name of their file, for messages.

        Raises:
            UserError: the encoder gave NaN or infinity; the message names the row.
        """
        inputs = self.view.inputs(rows)
        try:
            extract_inputs(self._store, self.encoder, self.view.name, inputs)
        except InputError as error:
            number = 1 + list(inputs).index(error.item) // len(self.view.required_parts())
            raise UserError(f"row {number} of {file}: {error}") from error

    def blocks(self, rows: Sequence[tuple[str, str]], normalize: bool = True) -> Iterator[Vectors]:
        """Yield the (n, k) embeddings of extracted rows, in batches."""
        for start in range(0, len(rows), _BLOCK):
            batch = rows[start : start + _BLOCK]

            def read(prompt: Prompt, side: FeaturePart, batch: Sequence[Any] = batch) -> Matrix:
                return self._store.lookup([getattr(prompt, side).render(*row) for row in batch])

            vectors = self._head.transform(
                self.view.sentence_features(read), self.view.condition_features(read)
            )
            vectors = vectors[:, : check_truncate_dim(self._truncate_dim, vectors.shape[1])]
            vectors = apply_guides(vectors, [condition for _, condition in batch], self.guides)
            yield normalise_vectors(vectors, self._head) if normalize else vectors

    def embed(self, rows: Sequence[tuple[str, str]], file: str) -> Vectors:
        """Return the (n, k) embeddings of rows, with unit L2 norm.

        Raises:
            UserError: as ``extract``.
        """
        self.extract(rows, file)
        return np.concatenate(list(self.blocks(rows)))

    def embed_plain(self, texts: Sequence[str]) -> Vectors:
        """Return the (n, d) vectors that the encoder gives texts, without a condition or a head."""
        vectors = _encode_alone(self.encoder, self._store, texts)
        guide = self.guides.get(None)
        return vectors if guide is None else guide.transform(vectors)

    def embed_with_base(self, texts: Sequence[str]) -> tuple[str, Vectors]:
        """Return the name of the base encoder, and the (n, d) vectors that it gives texts.

        The base is the encoder that an adapter was trained on, or the encoder itself if it was not
        trained. If all its weights were trained, no base is recorded, and the trained encoder is
        used instead.
        """
        from llmcond.features.store import FeatureStore

        resolved = resolve_base(self.encoder.resolved)
        if resolved is None:
            log.info(f"no base of {self.encoder.name} is recorded, so its own vectors are used")
        if resolved is None or resolved is self.encoder.resolved:
            return self.encoder.name, _encode_alone(self.encoder, self._store, texts)
        base = LazyEncoder(resolved)
        store = FeatureStore(self._store.root, resolved.identity, self._store.dtype)
        return base.name, _encode_alone(base, store, texts)


def _encode_alone(encoder: LazyEncoder, store: FeatureStore, texts: Sequence[str]) -> Vectors:
    inputs = [EncoderInput("", text) for text in texts]
    extract_inputs(store, encoder, f"{encoder.name}, no condition", inputs)
    return normalise_vectors(store.lookup(inputs).read())


def embed_file(options: EmbedOptions) -> EmbedResult:
    """Write one condition-aware embedding for each row of a file.

    The run's store keeps the features. An interrupted call resumes where it stopped, and a second
    head on the same file encodes nothing.
    """
    run_folder, source, out = options.resolve_folder(), options.source, Path(options.out)
    guide, keep, text = options.guide, options.keep, options.text_column
    check_output(out, EMBEDDING_SUFFIXES, [source, guide, run_folder / "rows.parquet"])
    embeddings = TextEmbedder(
        run_folder, options.head, options.prompt, options.device, options.truncate_dim
    )
    conflicts = sorted({"sentence", "condition", "embedding"} & set(keep))
    if keep and (conflicts or out.suffix == ".npy"):
        reason = f"{conflicts[0]!r} is written anyway" if conflicts else f"{out} holds vectors only"
        raise UserError(f"--keep: {reason}. Name other columns, and a .parquet or .csv file.")
    texts = _read_texts(source, text, options.condition, options.condition_text, keep)
    report_foreign_texts(texts.sentences, embeddings.encoder.resolved.checkpoint)
    conditions = add_values(texts.conditions, options.values)
    if guide is not None:
        for labelled in read_guide(guide, text, list(dict.fromkeys(conditions))):
            embeddings.fit_guide(labelled)
    rows = list(zip(texts.sentences, conditions, strict=True))
    ranges = None
    if options.truncate_dim is not None or options.ranges is not None:
        # A wrong size is reported before all texts are encoded.
        dim = embeddings.embed(rows[:1], texts.file).shape[1]
        ranges = None if options.ranges is None else read_ranges(options.ranges, dim)
    embeddings.extract(rows, texts.file)
    vectors = embeddings.blocks(rows, options.normalize)
    first = next(vectors)
    dim = first.shape[1]
    quantizer, ranges_file = Quantizer(options.precision, ranges), options.ranges
    if quantizer.needs_ranges:
        blocks = embeddings.blocks(rows, options.normalize)
        ranges = _measure_all_ranges(blocks, len(rows))
        quantizer = replace(quantizer, ranges=ranges)
        ranges_file = out.with_name(f"{out.stem}-ranges.npy")
        with replace_atomically(ranges_file) as temporary, temporary.open("wb") as stream:
            np.save(stream, ranges)
    name = embeddings.head_name
    record = {
        "llmcond": __version__,
        **embeddings.identity,
        "head": name,
        "prompt": embeddings.view.name,
        **format_json(quantizer, options.truncate_dim),
    }
    write = {".parquet": _write_parquet, ".csv": _write_csv, ".npy": _write_npy}[out.suffix]
    with replace_atomically(out) as temporary:
        write(temporary, texts, quantizer, record, chain([first], vectors))
    log.info(
        f"{len(rows):,} embeddings of {dim} dimensions ({head_text(name)}"
        f"{describe_precision(quantizer, dim)}) -> {out}"
    )
    return EmbedResult(
        out,
        len(rows),
        dim,
        name,
        embeddings.view.name,
        embeddings.guides,
        options.precision,
        None if ranges_file is None else Path(ranges_file),
    )


def _measure_all_ranges(blocks: Iterable[Vectors], n: int) -> Vectors:
    """Return the ranges of n embeddings, which are read in blocks; see ``measure_ranges``."""
    extremes = [np.stack([block.min(axis=0), block.max(axis=0)]) for block in blocks]
    return measure_ranges(np.concatenate(extremes), n)


def format_json(quantizer: Quantizer, truncate_dim: int | None) -> dict[str, Any]:
    """Return the form of written embeddings, for records."""
    ranges = None if quantizer.ranges is None else quantizer.ranges.tolist()
    return {"truncate_dim": truncate_dim, "precision": quantizer.precision, "ranges": ranges}


def describe_precision(quantizer: Quantizer, dim: int) -> str:
    """Return a precision other than float32, with the bytes of an embedding, for the log."""
    if quantizer.precision == "float32":
        return ""
    n_bytes = quantizer.width(dim) * quantizer.dtype.itemsize
    return f", {quantizer.precision}, {n_bytes} bytes each"


def _read_texts(
    source: Any,
    text: str | None,
    condition: str | None,
    condition_text: str | None,
    keep: Sequence[str],
) -> ConditionedTexts:
    """Read texts and their conditions from a table, or from a text file with one text per line."""
    has = partial(has_column, source)
    column, condition_for_all = resolve_conditions(has, condition, condition_text)
    if not is_text_file(source):
        return read_texts(source, text_column(has, text), column, condition_for_all, keep)
    if text or keep or condition_for_all is None:
        source_option = (
            f"--text {text}" if text else f"--keep {keep[0]}" if keep else "the conditions"
        )
        raise UserError(
            f"{source} is read as a text file with one text per line, so it has no column for "
            f"{source_option}. Name a table, or one condition for every row: --condition TEXT."
        )
    collection = read_collection(source)
    return ConditionedTexts(
        collection.texts, [condition_for_all] * len(collection.texts), collection.file
    )


def _write_parquet(
    path: Path,
    texts: ConditionedTexts,
    quantizer: Quantizer,
    record: Mapping[str, Any],
    blocks: Iterator[Vectors],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(blocks)
    number, width = pa.from_numpy_dtype(quantizer.dtype), quantizer.width(first.shape[1])
    text, vector, start = pa.string(), pa.list_(number, width), 0
    extra_columns = {name: to_arrow(values) for name, values in texts.extra.items()}
    types = {name: column.type for name, column in extra_columns.items()}
    schema = pa.schema(
        {**types, "sentence": text, "condition": text, "embedding": vector},
        {"llmcond": json.dumps(record)},
    )
    with pq.ParquetWriter(path.absolute(), schema) as writer:
        for vectors in chain([first], blocks):
            stop = start + len(vectors)
            flat = pa.array(np.ascontiguousarray(quantizer(vectors)).reshape(-1), number)
            embedding = pa.FixedSizeListArray.from_arrays(flat, width)
            extra_slices = [column[start:stop] for column in extra_columns.values()]
            columns = [
                *extra_slices,
                texts.sentences[start:stop],
                texts.conditions[start:stop],
                embedding,
            ]
            writer.write_table(pa.table(columns, schema))
            start = stop


def _write_csv(
    path: Path,
    texts: ConditionedTexts,
    quantizer: Quantizer,
    record: Mapping[str, Any],
    blocks: Iterator[Vectors],
) -> None:
    """Write embeddings as JSON lists, with enough digits to restore the same float32 values."""
    columns = [*texts.extra.values(), texts.sentences, texts.conditions]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*texts.extra, "sentence", "condition", "embedding"])
        vectors = chain.from_iterable(map(quantizer, blocks))
        for *row, vector in zip(*columns, vectors, strict=True):
            writer.writerow([*row, f"[{', '.join(f'{value:.9g}' for value in vector)}]"])


def _write_npy(
    path: Path,
    texts: ConditionedTexts,
    quantizer: Quantizer,
    record: Mapping[str, Any],
    blocks: Iterator[Vectors],
) -> None:
    first, start = next(blocks), 0
    shape = (len(texts.sentences), quantizer.width(first.shape[1]))
    array = np.lib.format.open_memmap(path, "w+", quantizer.dtype, shape)
    for vectors in chain([first], blocks):
        array[start : start + len(vectors)] = quantizer(vectors)
        start += len(vectors)
    array.flush()
