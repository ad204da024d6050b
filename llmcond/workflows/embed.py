"""Embedding a file of sentences: in order, resumable, and written completely or not at all."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import Quantizer, measure_ranges, read_ranges
from llmcond.base.errors import UserError
from llmcond.base.files import check_output, replace_atomically, suffix
from llmcond.base.options import Precision
from llmcond.base.output import Displayed, log
from llmcond.base.package import __version__
from llmcond.base.text import (
    add_values,
    combine_values,
    condition_key,
    condition_titles,
    example_values,
    read_values,
)
from llmcond.data.datasets import HasColumns, open_collection, read_collection, resolve_conditions
from llmcond.data.guides import read_guide
from llmcond.data.readers import EMBEDDING_SUFFIXES, VECTOR
from llmcond.data.rows import to_arrow
from llmcond.features.pool import assign_devices
from llmcond.heads.guide import Guide
from llmcond.options.texts import EmbedOptions, ranges_path
from llmcond.report.tables import head_text
from llmcond.runs.embedder import EmbeddingModel, guides_json
from llmcond.runs.similarity import report_foreign_texts

if TYPE_CHECKING:
    pass

#: The largest number of characters of a condition in the name of a column.
_TITLE = 60

Vectors = NDArray[np.float32]
#: The (n, k) embeddings of the same n texts under each condition.
Blocks = tuple[Vectors, ...]


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
        columns: the columns of vectors in the output, each with its condition, or with the name of
            the column that its conditions come from; in a .npy file, the order of the second axis.

    Examples:
        >>> import llmcond
        >>> rows = [
        ...     {"sentence": "A man rides a bicycle.", "condition": "the vehicle"},
        ...     {"sentence": "A woman drives a car.", "condition": "the vehicle"},
        ... ]
        >>> result = llmcond.embed(texts=rows, out="vectors.npy")
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
    columns: Mapping[str, str] = field(default_factory=dict)

    @override
    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        del fields["guides"]
        return fields | guides_json(self.guides)


@dataclass(frozen=True)
class VectorColumn:
    """A column of vectors in the output, and the conditions that its rows are embedded under.

    Attributes:
        name: the name of the column.
        source: the column of the source that holds the conditions; None: ``text`` is the condition
            of every row.
        text: the condition of every row, without example values.
        values: the example values that every condition gets; None: none.
    """

    name: str
    source: str | None
    text: str | None
    values: Sequence[str] | None

    @property
    def condition(self) -> str:
        """The condition of every row with its values, or the name of the column of conditions."""
        return self.source or add_values([self.text or ""], self.values)[0]

    def conditions(self, cells: Sequence[str] | None, n: int) -> list[str]:
        """Return the conditions of n rows; ``cells`` are those of the column of conditions."""
        return add_values([self.text or ""] * n if cells is None else cells, self.values)

    def to_json(self) -> dict[str, Any]:
        """Return the column as records store it."""
        return {**asdict(self), "values": self.values and list(self.values)}


def find_vector_columns(options: EmbedOptions, table: HasColumns) -> list[VectorColumn]:
    """Return the columns of vectors that the options of a command ask for.

    A single one is called ``embedding``. Of several, each has its condition in its name. Conditions
    that differ in their form or case only are embedded once.

    Raises:
        UserError: a condition is empty, or the numbers of conditions and values differ.
    """
    named: Sequence[str | None] = options.condition or [None]
    examples: list[list[str] | None] = [read_values(text) for text in options.values]
    if len(named) == 1 and examples:
        examples = [[value for texts in examples for value in texts or ()]]
    elif len(examples) not in (0, len(named)):
        combine_values(options.condition, options.values)  # raises the error for these numbers
    columns: dict[tuple[str | None, str], VectorColumn] = {}
    for name, values in zip(named, examples or [None] * len(named), strict=True):
        source, text = resolve_conditions(table, name, options.condition_text)
        column = VectorColumn(VECTOR, source, text, example_values(values or ()) or None)
        columns.setdefault((source, condition_key(column.condition)), column)
    if len(columns) < len(named):
        log.info("conditions that differ in case or spacing only count once")
    if len(columns) == 1:
        return list(columns.values())
    titles = condition_titles([column.condition for column in columns.values()])
    names: dict[str, VectorColumn] = {}
    for title, column in zip(titles, columns.values(), strict=True):
        # Lance allows neither full stops nor back quotes in a name.
        short = re.sub(r"[.`\x00-\x1f]", "_", title)[:_TITLE]
        name = f"{VECTOR} ({short})"
        while name in names:
            name = f"{VECTOR} ({short}, {len(names) + 1})"
        names[name] = replace(column, name=name)
    return list(names.values())


def embed_file(options: EmbedOptions) -> EmbedResult:
    """Write one embedding for each row of a file and each condition.

    The run's store keeps the features. An interrupted call resumes where it stopped, and a second
    head on the same file encodes nothing.
    """
    out, keep, read = Path(options.out), options.keep, options.read_options()
    run_folder = options.resolve_folder()
    check_output(out, EMBEDDING_SUFFIXES, [run_folder / "rows.parquet"])
    source = open_collection(options.texts, read, options.text)
    columns = find_vector_columns(options, source)
    names = {column.name: column.condition for column in columns}
    conflicts = sorted({"sentence", "condition", *names} & set(keep))
    if keep and (conflicts or suffix(out) == ".npy"):
        reason = f"{conflicts[0]!r} is written anyway" if conflicts else f"{out} holds vectors only"
        raise UserError(f"--keep: {reason}. Name other columns, and a .parquet or .csv file.")
    embeddings = EmbeddingModel.find(
        run_folder,
        options.head,
        options.prompt,
        device=options.device,
        truncate_dim=options.truncate_dim,
    )
    sources = list(dict.fromkeys(column.source for column in columns if column.source))
    texts = read_collection(source, options.text, keep, conditions=sources)
    report_foreign_texts(texts.texts, embeddings.encoder.resolved.checkpoint)
    n = len(texts.texts)
    conditions = [column.conditions(texts.conditions.get(column.source), n) for column in columns]
    if options.guide is not None:
        distinct = list(dict.fromkeys(chain.from_iterable(conditions)))
        for labelled in read_guide(options.guide, options.text, distinct, read=read):
            embeddings.fit_guide(labelled)
    rows = [list(zip(texts.texts, column, strict=True)) for column in conditions]
    ranges = None
    if options.truncate_dim is not None or options.ranges is not None:
        # A wrong size is reported before all texts are encoded.
        dim = embeddings.embed(rows[0][:1], texts.file).shape[1]
        ranges = None if options.ranges is None else read_ranges(options.ranges, dim)
    workers = assign_devices(options.find_workers(), embeddings.encoder.resolved)
    with embeddings.shared(workers):
        embeddings.extract(list(chain.from_iterable(rows)), texts.file, n)

    def read_blocks() -> Iterator[Blocks]:
        return zip(*(embeddings.read_blocks(part, options.normalize) for part in rows), strict=True)

    blocks = read_blocks()
    first = next(blocks)
    dim = first[0].shape[1]
    quantizer, ranges_file = Quantizer(options.precision, ranges), options.ranges
    if quantizer.needs_ranges:
        ranges = _measure_all_ranges(chain.from_iterable(read_blocks()), n * len(columns))
        quantizer = replace(quantizer, ranges=ranges)
        ranges_file = ranges_path(out)
        with replace_atomically(ranges_file) as temporary, temporary.open("wb") as stream:
            np.save(stream, ranges)
    name = embeddings.head.reference
    record = {
        "llmcond": __version__,
        **embeddings.identity,
        "head": name,
        "prompt": embeddings.view.name,
        **format_json(quantizer, options.truncate_dim),
        "conditions": columns_json(columns),
    }
    table = {**texts.columns, "sentence": texts.texts}
    if len(columns) == 1:
        condition = [columns[0].text or ""] * n
        table["condition"] = texts.conditions.get(columns[0].source, condition)
    write = {".parquet": _write_parquet, ".csv": _write_csv, ".npy": _write_npy}[suffix(out)]
    with replace_atomically(out) as temporary:
        write(temporary, table, list(names), quantizer, record, chain([first], blocks))
    log.info(
        f"{n:,} embeddings of {dim} dimensions{describe_columns(columns)} ({head_text(name)}"
        f"{describe_precision(quantizer, dim)}) -> {out}"
    )
    return EmbedResult(
        out,
        n,
        dim,
        name,
        embeddings.view.name,
        embeddings.guides,
        options.precision,
        None if ranges_file is None else Path(ranges_file),
        names,
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


def columns_json(columns: Sequence[VectorColumn]) -> list[dict[str, Any]] | None:
    """Return several columns of vectors for records; None for one, as earlier records have none."""
    return [column.to_json() for column in columns] if len(columns) > 1 else None


def describe_columns(columns: Sequence[VectorColumn]) -> str:
    """Return several columns of vectors for the log; an empty text for a single one."""
    return f" under each of {len(columns)} conditions" if len(columns) > 1 else ""


def _write_parquet(
    path: Path,
    texts: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    quantizer: Quantizer,
    record: Mapping[str, Any],
    blocks: Iterator[Blocks],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = next(blocks)
    number, width = pa.from_numpy_dtype(quantizer.dtype), quantizer.width(first[0].shape[1])
    columns = {name: to_arrow(values) for name, values in texts.items()}
    types = {name: column.type for name, column in columns.items()}
    types |= dict.fromkeys(names, pa.list_(number, width))
    schema, start = pa.schema(types, {"llmcond": json.dumps(record)}), 0
    with pq.ParquetWriter(path.absolute(), schema) as writer:
        for block in chain([first], blocks):
            stop = start + len(block[0])
            flat = (np.ascontiguousarray(quantizer(vectors)).reshape(-1) for vectors in block)
            vectors = [
                pa.FixedSizeListArray.from_arrays(pa.array(codes, number), width) for codes in flat
            ]
            slices = [column[start:stop] for column in columns.values()]
            writer.write_table(pa.table([*slices, *vectors], schema))
            start = stop


def _write_csv(
    path: Path,
    texts: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    quantizer: Quantizer,
    record: Mapping[str, Any],
    blocks: Iterator[Blocks],
) -> None:
    """Write embeddings as JSON lists, with enough digits to restore the same float32 values."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*texts, *names])
        rows = zip(*texts.values(), strict=True)
        for block in blocks:
            vectors = zip(*map(quantizer, block), strict=True)
            for row, cells in zip(islice(rows, len(block[0])), vectors, strict=True):
                lists = [f"[{', '.join(f'{value:.9g}' for value in cell)}]" for cell in cells]
                writer.writerow([*row, *lists])


def _write_npy(
    path: Path,
    texts: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    quantizer: Quantizer,
    record: Mapping[str, Any],
    blocks: Iterator[Blocks],
) -> None:
    """Write embeddings as (n, k), or as (n, conditions, k) under several conditions."""
    first, start = next(blocks), 0
    width, several = quantizer.width(first[0].shape[1]), len(names) > 1
    n = len(texts["sentence"])
    shape = (n, len(names), width) if several else (n, width)
    array = np.lib.format.open_memmap(path, "w+", quantizer.dtype, shape)
    for block in chain([first], blocks):
        codes = [quantizer(vectors) for vectors in block]
        stop = start + len(codes[0])
        array[start:stop] = np.stack(codes, axis=1) if several else codes[0]
        start = stop
    array.flush()
