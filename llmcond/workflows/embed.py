"""Embedding a file of sentences: in order, resumable, and written completely or not at all."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

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
    ignored_by,
    ignoring,
    read_values,
)
from llmcond.data.datasets import HasColumns, open_collection, read_collection, resolve_conditions
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.readers import EMBEDDING_SUFFIXES, VECTOR
from llmcond.data.rows import to_arrow
from llmcond.features.pool import assign_devices
from llmcond.heads.guide import Guide
from llmcond.options.texts import EmbedOptions, ranges_path
from llmcond.report.tables import head_text
from llmcond.runs.embedder import EmbeddingModel, guides_json
from llmcond.runs.similarity import report_foreign_texts

#: The largest number of characters of a condition in the name of a column.
_TITLE = 60

Vectors = NDArray[np.float32]
#: The (n, k) embeddings of the same n texts under each condition.
Blocks = tuple[Vectors, ...]
#: The (n, width) numbers that embeddings are written as.
Codes = NDArray[Any]


@dataclass(frozen=True)
class EmbedResult(Displayed):
    """The result of writing embeddings.

    Attributes:
        out: the file or folder that was written, or its URI.
        rows: the number of embeddings.
        dim: the number of dimensions of an embedding.
        head: the name of the head; zero-shot is ``none``.
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
        ignore: the conditions that ``text`` ignores.
    """

    name: str
    source: str | None
    text: str | None
    values: Sequence[str] | None
    ignore: Sequence[str] = ()

    @property
    def condition(self) -> str:
        """The condition of every row with its values, or the name of the column of conditions."""
        return self.source or self.conditions(None, 1)[0]

    def conditions(self, cells: Sequence[str] | None, n: int) -> list[str]:
        """Return the conditions of n rows; ``cells`` are those of the column of conditions."""
        if cells is not None:
            return add_values(cells, self.values)
        return [ignoring(add_values([self.text or ""], self.values)[0], self.ignore)] * n


def find_vector_columns(options: EmbedOptions, table: HasColumns) -> list[VectorColumn]:
    """Return the columns of vectors that the options of a command ask for.

    A single one is called ``embedding``. Of several, each has its condition in its name. Conditions
    that differ in their form or case only are embedded once.

    Raises:
        UserError: a condition is empty, or the numbers of conditions and values differ.
    """
    named: Sequence[str | None] = options.condition or [None]
    examples = [read_values(text) for text in options.values] or [[] for _ in named]
    if len(named) == 1:
        examples = [list(chain.from_iterable(examples))]
    elif len(examples) != len(named):
        combine_values(options.condition, options.values)  # raises the error for these numbers
    columns: dict[tuple[str | None, str], VectorColumn] = {}
    for name, values in zip(named, examples, strict=True):
        source, text = resolve_conditions(table, name, options.condition_text)
        column = VectorColumn(VECTOR, source, text, list(example_values(values)) or None)
        columns.setdefault((source, condition_key(column.condition)), column)
    if len(columns) < len(named):
        log.info("conditions that differ in case or spacing only count once")
    if options.ignore or options.ignore_column:
        sources = [column.source for column in columns.values() if column.source]
        if sources:
            raise UserError(
                f"what to ignore needs conditions as texts, and {sources[0]!r} is a column of "
                "them. Name the condition of every row: --condition-text TEXT."
            )
        ignoring_conditions = options.add_ignored([one.condition for one in columns.values()])
        columns = {
            key: replace(column, ignore=[*ignored_by(condition)])
            for (key, column), condition in zip(columns.items(), ignoring_conditions, strict=True)
        }
    if len(columns) == 1:
        return list(columns.values())
    titles = condition_titles([column.condition for column in columns.values()])
    names: dict[str, VectorColumn] = {}
    for title, column in zip(titles, columns.values(), strict=True):
        # Lance allows neither full stops nor back quotes in a name.
        short = re.sub(r"[.`\x00-\x1f]", "_", title)[:_TITLE]
        name, number = f"{VECTOR} ({short})", len(names)
        while name in names:
            number += 1
            name = f"{VECTOR} ({short}, {number})"
        names[name] = replace(column, name=name)
    return list(names.values())


def written_columns(names: Iterable[str]) -> list[str]:
    """Return the columns that are written with those of vectors, which ``names`` lists."""
    names = list(names)
    return ["sentence", *(["condition"] if len(names) == 1 else []), *names]


def _check_columns(options: EmbedOptions, names: Sequence[str]) -> dict[str, str]:
    """Check the names of the columns to write.

    Args:
        options: the options of the command.
        names: the columns of vectors.

    Returns:
        The column of the scores of mentions by column of vectors, if they are wanted.

    Raises:
        UserError: a column has the name of another one, or the file holds vectors only.
    """
    out, holds_vectors = options.out, suffix(options.out) == ".npy"
    scores = {n: f"mentions{n.removeprefix(VECTOR)}" for n in names if options.mentions}
    if scores and holds_vectors:
        raise UserError(
            f"--mentions writes a column, and {out} holds vectors only. Name a .parquet or .csv "
            "file."
        )
    conflicts = sorted({*written_columns(names), *scores.values()} & {*options.keep})
    if options.keep and (conflicts or holds_vectors):
        reason = f"{conflicts[0]!r} is written anyway" if conflicts else f"{out} holds vectors only"
        raise UserError(f"--keep: {reason}. Name other columns, and a .parquet or .csv file.")
    return scores


def embed_file(options: EmbedOptions) -> EmbedResult:
    """Write one embedding for each row of a file and each condition.

    The run's store keeps the features. An interrupted call resumes where it stopped, and a second
    head on the same file encodes nothing.
    """
    out, keep, read = Path(options.out), options.keep, options.read_options()
    arguments = options.model_arguments()
    check_output(out, EMBEDDING_SUFFIXES, [arguments["run"] / "rows.parquet"])
    source = open_collection(options.texts, read, options.text)
    columns = find_vector_columns(options, source)
    names = {column.name: column.condition for column in columns}
    scores = _check_columns(options, [*names])
    sources = dict.fromkeys(column.source for column in columns if column.source)
    others = list(dict.fromkeys([*keep, *options.ignore_column]))
    texts = read_collection(source, options.text, others, conditions=list(sources))
    n = len(texts.texts)
    conditions = [column.conditions(texts.conditions.get(column.source), n) for column in columns]
    rows = [list(zip(texts.texts, column, strict=True)) for column in conditions]
    embeddings = EmbeddingModel.find(**arguments, truncate_dim=options.truncate_dim).with_answers(
        options.read_answers(), chain.from_iterable(rows)
    )
    report_foreign_texts(texts.texts, embeddings.encoder.resolved.checkpoint)
    distinct = list(dict.fromkeys(chain.from_iterable(conditions)))
    guides: list[LabelledTexts] = []
    if options.guide is not None:
        guides = read_guide(options.guide, options.text, distinct, read=read)
    embeddings.fit_ignored(texts, distinct, options.ignore_column, options.ignore_directions)
    for labelled in guides:
        embeddings.fit_guide(labelled)
    quantizer = _check_first_row(options, embeddings, rows[0][:1], texts.file)
    workers = assign_devices(options.find_workers(), embeddings.encoder.resolved)
    with embeddings.shared(workers):
        embeddings.extract(list(chain.from_iterable(rows)), texts.file, n)
    mentions = {
        scores[column.name]: [
            round(score, 4) for score in embeddings.mentions(part, texts.file).tolist()
        ]
        for column, part in zip(columns, rows, strict=True)
        if column.name in scores
    }

    def read_blocks() -> Iterator[Blocks]:
        return zip(*(embeddings.read_blocks(part, options.normalize) for part in rows), strict=True)

    if quantizer.needs_ranges:
        extremes = [
            np.stack([vectors.min(axis=0), vectors.max(axis=0)])
            for vectors in chain.from_iterable(read_blocks())
        ]
        quantizer = replace(
            quantizer, ranges=measure_ranges(np.concatenate(extremes), n * len(columns))
        )
    dim = next(embeddings.read_blocks(rows[0][:1])).shape[1]
    name = embeddings.head.reference
    record = {
        "llmcond": __version__,
        **embeddings.identity,
        "head": name,
        "prompt": embeddings.view.name,
        "truncate_dim": options.truncate_dim,
        "precision": quantizer.precision,
        "ranges": None if quantizer.ranges is None else quantizer.ranges.tolist(),
        "conditions": [asdict(column) for column in columns],
        **guides_json(embeddings.guides),
    }
    table = {**{name: texts.columns[name] for name in keep}, "sentence": texts.texts}
    if len(columns) == 1:
        condition = [columns[0].text or ""] * n
        table["condition"] = texts.conditions.get(columns[0].source, condition)
    table |= mentions
    codes = (
        [np.ascontiguousarray(quantizer(vectors)) for vectors in block] for block in read_blocks()
    )
    write = {".parquet": _write_parquet, ".csv": _write_csv, ".npy": _write_npy}[suffix(out)]
    with ExitStack() as files:
        if quantizer.ranges is not None:  # Both files are replaced together, the vectors first.
            ranges = files.enter_context(replace_atomically(ranges_path(out)))
            with ranges.open("wb") as stream:
                np.save(stream, quantizer.ranges)
        with replace_atomically(out) as temporary:
            write(temporary, table, list(names), record, codes)
    log.info(f"{describe_embeddings(n, dim, columns, name, quantizer)} -> {out}")
    return EmbedResult(
        out,
        n,
        dim,
        name,
        embeddings.view.name,
        embeddings.guides,
        options.precision,
        None if quantizer.ranges is None else ranges_path(out),
        names,
    )


def _check_first_row(
    options: EmbedOptions, embeddings: EmbeddingModel, row: Sequence[tuple[str, str]], file: str
) -> Quantizer:
    """Return the quantizer; report a wrong size or model before all texts are encoded."""
    quantizer = Quantizer(options.precision)
    if options.truncate_dim is not None or options.ranges is not None:
        dim = embeddings.embed(row, file).shape[1]
        if options.ranges is not None:
            quantizer = replace(quantizer, ranges=read_ranges(options.ranges, dim))
    if options.mentions:
        embeddings.mentions(row, file)
    return quantizer


def describe_embeddings(
    n: int, dim: int, columns: Sequence[VectorColumn], head: str, quantizer: Quantizer
) -> str:
    """Return the number, the size and the form of embeddings for the log."""
    conditions = f" under each of {len(columns)} conditions" if len(columns) > 1 else ""
    form = head_text(head)
    if quantizer.precision != "float32":
        n_bytes = quantizer.width(dim) * quantizer.dtype.itemsize
        form += f", {quantizer.precision}, {n_bytes} bytes each"
    return f"{n:,} embeddings of {dim} dimensions{conditions} ({form})"


def vector_array(codes: Codes) -> Any:
    """Return the (n, k) codes of embeddings as a column of Arrow."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(codes.reshape(-1)), codes.shape[1])


def _write_parquet(
    path: Path,
    texts: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    record: Mapping[str, Any],
    blocks: Iterator[Sequence[Codes]],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns, first = {name: to_arrow(values) for name, values in texts.items()}, next(blocks)
    types = {name: column.type for name, column in columns.items()}
    types |= dict.fromkeys(names, vector_array(first[0]).type)
    schema, start = pa.schema(types, {"llmcond": json.dumps(record)}), 0
    with pq.ParquetWriter(path.absolute(), schema) as writer:
        for block in chain([first], blocks):
            stop = start + len(block[0])
            slices = [column[start:stop] for column in columns.values()]
            writer.write_table(pa.table([*slices, *map(vector_array, block)], schema))
            start = stop


def _write_csv(
    path: Path,
    texts: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    record: Mapping[str, Any],
    blocks: Iterator[Sequence[Codes]],
) -> None:
    """Write embeddings as JSON lists, with enough digits to restore the same float32 values."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*texts, *names])
        vectors = (cells for block in blocks for cells in zip(*block, strict=True))
        for row, cells in zip(zip(*texts.values(), strict=True), vectors, strict=True):
            lists = [f"[{', '.join(f'{value:.9g}' for value in cell)}]" for cell in cells]
            writer.writerow([*row, *lists])


def _write_npy(
    path: Path,
    texts: Mapping[str, Sequence[Any]],
    names: Sequence[str],
    record: Mapping[str, Any],
    blocks: Iterator[Sequence[Codes]],
) -> None:
    """Write embeddings as (n, k), or as (n, conditions, k) under several conditions."""
    stacked = (np.stack(block, axis=1) if len(names) > 1 else block[0] for block in blocks)
    first = next(stacked)
    shape = (len(texts["sentence"]), *first.shape[1:])
    descr = np.lib.format.dtype_to_descr(first.dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    # On a full disk, writing into a memory map kills the process.
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
        for codes in chain([first], stacked):
            stream.write(np.ascontiguousarray(codes).data)
