"""Embedding of texts that do not fit in memory, in work units, which workers may share."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
from annotated_types import Ge, MinLen
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import Quantizer, check_ranges, measure_ranges, read_ranges
from llmcond.base.errors import LlmcondError, UserError, format_list
from llmcond.base.files import check_format
from llmcond.base.output import ExtractionBar, log
from llmcond.base.package import __version__
from llmcond.base.records import as_json, check_record
from llmcond.base.stores import check_lance_column_names
from llmcond.data.datasets import Collection, text_column
from llmcond.data.formats import ReadOptions, check_columns
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.streams import (
    LanceRows,
    SourcePart,
    StreamColumns,
    TextSource,
    open_texts,
    survey,
)
from llmcond.encoders.spec import InputError, truncation_note
from llmcond.features.extract import check_storable
from llmcond.features.outputs import RECORD_NAME, LanceOutput, Output, WorkUnit, open_output
from llmcond.features.pool import Workers, assign_devices, worker_pool
from llmcond.features.view import WordingRows
from llmcond.options.texts import EmbedOptions
from llmcond.runs.embedder import (
    MAX_COLLECTION,
    Embedder,
    EmbeddingModel,
    guides_json,
    normalise_vectors,
)
from llmcond.runs.similarity import report_foreign_texts
from llmcond.workflows.embed import (
    EmbedResult,
    VectorColumn,
    describe_embeddings,
    find_vector_columns,
    vector_array,
    written_columns,
)

if TYPE_CHECKING:
    from llmcond.encoders.spec import Encoded

#: The version of the record's format.
FORMAT = 1
#: The rows of a work unit, which are embedded and written together. The number bounds the memory,
#: and the work that a kill loses.
UNIT_ROWS = 16_384
#: The first rows of the source, whose embeddings give the ranges of int8 and uint8.
CALIBRATION_ROWS = 2_048


@dataclass(frozen=True)
class StreamModel(EmbeddingModel):
    """A model that embeds rows without storing their features.

    Pickling finds the same model again, so that another process can load it.

    Attributes:
        normalize: whether embeddings have unit L2 norm.
    """

    normalize: bool = True

    def __reduce__(self) -> Any:
        # A run's folder is named as it is, because other machines may mount it by a link.
        source = self.run.find_arguments
        if "run" in source:
            source = {"run": str(self.run.folder.absolute())}
        arguments = {**self.find_arguments, **source, "device": self.device, "quiet": True}
        names = ("truncate_dim", "guides", "normalize", "answers")
        return _restore_model, (arguments, {name: getattr(self, name) for name in names})

    @override
    def embed(self, rows: Sequence[tuple[str, str]], file: str) -> Any:
        return self.vectors(rows)[0]

    @property
    @override
    def identity(self) -> dict[str, Any]:
        identity = super().identity
        return {
            "encoder": identity["encoder"],
            "store_dtype": self.run.manifest["store_dtype"],
            **identity,
            "normalize": self.normalize,
            "truncate_dim": self.truncate_dim,
            "guides": {str(c): guide.digest for c, guide in self.guides.items()} or None,
        }

    @cached_property
    def embedder(self) -> Embedder:
        """The model with its encoder, which is loaded at the first use."""
        return self.load()

    def vectors(self, rows: Sequence[tuple[str, str]]) -> tuple[Any, Encoded]:
        """Embed (sentence, condition) rows.

        The embeddings equal those that ``llmcond embed`` gives for a file, up to rounding, because
        features are rounded to the number type of the run's store.

        Returns:
            The (n, k) embeddings, and the encoder's output for the distinct inputs.

        Raises:
            InputError: the encoder cannot take an input, or gave NaN or infinity for it.
        """
        distinct = list(dict.fromkeys(self.view.inputs(WordingRows.of(rows, self.answers).rows)))
        encoded = self.embedder.encoder.encode_with_counts(distinct, threads=True)
        with np.errstate(over="ignore"):
            features = encoded.vectors.astype(self.run.manifest["store_dtype"])
        check_storable(features, distinct)
        embedder = replace(self.embedder, guides=self.guides, answers=self.answers)
        vectors = embedder.embed_vectors(rows, distinct, features)
        return normalise_vectors(vectors, self.head.head) if self.normalize else vectors, encoded


def _restore_model(arguments: Mapping[str, Any], state: Mapping[str, Any]) -> StreamModel:
    return replace(StreamModel.find(**arguments), **state)


@dataclass(frozen=True)
class _OutputRecord:
    """The required fields of the record that is stored with the embeddings.

    Attributes:
        format: the version of the format.
        made_of: everything that decides the embeddings.
        unit_rows: the number of rows of a work unit.
        columns: the Arrow schema, in base64, of the source's columns that are kept.
        parts: the parts of the source (see ``SourcePart``).
        first_parts: the number of parts when the output was started, which decide what conditions
            ignore; None: the record is older.
        ranges: the ranges of int8 and uint8; None: the precision has none.
        model: the names of the model, and the version of llmcond.
    """

    format: int
    made_of: dict[str, Any]
    unit_rows: Annotated[int, Ge(1)]
    columns: str
    parts: Annotated[list[tuple[str, str, Annotated[int, Ge(0)]]], MinLen(1)]
    first_parts: Annotated[int, Ge(1)] | None = None
    ranges: list[list[float]] | None = None
    model: dict[str, Any] = field(default_factory=dict)


class UnitResult(NamedTuple):
    """The outcome of a work unit.

    Attributes:
        written: what ``Output.add_unit`` takes to add the unit.
        schema: the schema of the rows that were written.
        dim: the size of the embeddings.
        n_truncated: the number of truncated inputs.
        n_tokens: the tokens of the inputs before truncation.
        seconds: the wall-clock time.
    """

    written: str
    schema: pa.Schema
    dim: int
    n_truncated: int
    n_tokens: int
    seconds: float


@dataclass(frozen=True)
class EmbeddingJob:
    """The settings for embedding work units, the same in every process.

    Attributes:
        model: the model that embeds.
        source: the name of the source of texts, or the source itself if it is in memory.
        version: the source's version, if it is a Lance dataset.
        columns: the columns that are read.
        vectors: the columns of vectors that are written.
        out: the URI of the output.
        identity: the model's identity in the process that distributes the units.
        quantizer: the precision of the embeddings.
    """

    model: StreamModel
    source: Any
    version: int | None
    columns: StreamColumns
    vectors: Sequence[VectorColumn]
    out: str
    identity: Mapping[str, Any]
    quantizer: Quantizer


def read_unit(
    job: EmbeddingJob, source: TextSource, unit: WorkUnit
) -> tuple[pa.Table, list[tuple[str, str]]]:
    """Read a unit's columns, and return its (text, condition) rows, condition by condition.

    Raises:
        UserError: a row has no answer.
    """
    table = source.read(unit.part, unit.start, unit.stop, job.columns)
    texts = table[job.columns.sentence].to_pylist()
    rows: list[tuple[str, str]] = []
    for column in job.vectors:
        cells = table[column.source].to_pylist() if column.source else None
        rows += zip(texts, column.conditions(cells, unit.rows), strict=True)
    if job.model.answers is not None:
        job.model.answers.check(rows)
    return table, rows


class UnitEmbedder:
    """A worker that embeds and writes units; ``llmcond.features.pool`` runs it elsewhere."""

    def __init__(self, job: EmbeddingJob) -> None:
        model = job.model
        if model.identity != job.identity:
            raise LlmcondError(
                f"{model.run.display_name} is a different run on this machine than where the "
                "command was started. Make sure that all machines have the same run at this path."
            )
        self._job, self._source = job, open_texts(job.source, job.version, patient=True)
        self._output = open_output(job.out, patient=True)
        _ = model.embedder  # loads the model, so that the time of the rows excludes loading

    def work(self, unit: WorkUnit) -> UnitResult:
        """Embed and write a unit.

        Raises:
            UserError: the encoder cannot take a row, or gave NaN or infinity for it.
            DiskFullError: the disk is full.
        """
        job = self._job
        began = time.monotonic()
        table, vectors, encoded = self.embed(unit)
        for column, part in zip(job.vectors, np.split(vectors, len(job.vectors)), strict=True):
            codes = np.ascontiguousarray(job.quantizer(part))
            table = table.append_column(column.name, vector_array(codes))
        written = self._output.write_unit(unit, table)
        n_truncated, n_tokens = int(encoded.truncated.sum()), int(encoded.n_tokens.sum())
        seconds, dim = time.monotonic() - began, vectors.shape[1]
        return UnitResult(written, table.schema, dim, n_truncated, n_tokens, seconds)

    def embed(self, unit: WorkUnit) -> tuple[pa.Table, NDArray[np.float32], Encoded]:
        """Embed a unit.

        Returns:
            The columns to write before the embeddings; the (c * n, k) embeddings of the n rows
            under each of c conditions; and the encoder's output for the distinct inputs.

        Raises:
            UserError: the encoder cannot take a row, or gave NaN or infinity for it.
        """
        job, columns = self._job, self._job.columns
        table, rows = read_unit(job, self._source, unit)
        sentences, first = table[columns.sentence], job.vectors[0]
        try:
            vectors, encoded = job.model.vectors(rows)
        except InputError as error:
            if error.item in rows:  # the head failed, and not the encoder
                position = rows.index(error.item)
            else:
                worded = WordingRows.of(rows, job.model.answers)
                inputs = list(job.model.view.inputs(worded.rows))
                position = inputs.index(error.item) // (len(inputs) // len(worded.rows))
                position = int(worded.owners[position])
            row = unit.start + position % unit.rows + 1
            raise UserError(f"row {row} of {self._source.part_name(unit.part)}: {error}") from error
        written = table.select(columns.keep.names).append_column("sentence", sentences)
        if len(job.vectors) == 1:
            text = pa.array([first.text] * unit.rows, pa.string())
            cells = table[first.source] if first.source else text
            written = written.append_column("condition", cells)
        return written, vectors, encoded


def embed_stream(options: EmbedOptions) -> EmbedResult:
    """Write one condition-aware embedding for each row of a source, which is read in work units.

    Existing units are skipped, so the same call continues where it stopped.

    Raises:
        UserError: a text is empty (the message names its row), a column is missing, or ``out``
            holds something else, or embeddings of another model, source or condition, or of rows
            that have changed since.
        DiskFullError: the disk is full; the units written so far are kept.
    """
    out, text, keep = str(options.out), options.text, options.keep
    model = StreamModel.find(**options.model_arguments(), truncate_dim=options.truncate_dim)
    model = replace(model, normalize=options.normalize, answers=options.read_answers())
    workers = assign_devices(options.find_workers(), model.encoder.resolved)
    reading = options.read_options()
    texts, output = open_texts(options.texts, read=reading, column=text), open_output(out)
    sentence_column = text_column(texts, text)
    columns = find_vector_columns(options, texts)
    names, output.vector = {column.name: column.condition for column in columns}, columns[0].name
    keep = list(dict.fromkeys(keep))
    sources = list(dict.fromkeys(column.source for column in columns if column.source))
    _check_columns(texts, output, keep, [sentence_column, *sources], written_columns(names))
    texts = texts.with_texts(sentence_column, sources)
    previous_record = output.read_record()
    previous = _read_previous(previous_record, texts, out)
    labelled = [] if options.guide is None else _read_guide(options.guide, text, columns, reading)
    _fit_ignored(model, options, columns, texts, sentence_column, previous)
    for one in labelled:
        model.fit_guide(one)
    config = {
        **model.identity,
        "source": texts.name,
        "sentence": sentence_column,
        "conditions": [
            {name: value for name, value in asdict(column).items() if name != "name" and value}
            for column in columns
        ],
        "keep": keep,
        "precision": None if options.precision == "float32" else options.precision,
    }
    record = _extend_record(texts, out, config, [sentence_column, *sources], previous)
    with output.writing():
        if output.read_record() != previous_record:
            raise UserError(f"another llmcond embed has started to write into {out}. Try again.")
        parts = [SourcePart(*part) for part in record.parts]
        units = _split_units(parts, record.unit_rows)
        read = StreamColumns(sentence_column, sources, _read_schema(record.columns, out))
        version = texts.version if isinstance(texts, LanceRows) else None
        job = EmbeddingJob(
            model,
            texts.reference,
            version,
            read,
            columns,
            output.uri,
            model.identity,
            Quantizer(options.precision, _find_ranges(options, record.ranges, out)),
        )
        _check_units(job, units, options, texts, previous)
        if job.quantizer.needs_ranges:
            quantizer = replace(job.quantizer, ranges=_measure_ranges(job, units))
            job = replace(job, quantizer=quantizer)
        source = {**model.find_arguments, "prompt": model.view.name, **guides_json(model.guides)}
        outcome: dict[str, Any] = {
            "ranges": job.quantizer.ranges,
            "model": {**source, "llmcond": __version__},
        }
        output.write_record(as_json(replace(record, **outcome)))
        done = output.find_finished(units)
        todo = [unit for unit in units if unit.number not in done]
        if todo:
            unit = replace(todo[0], stop=min(todo[0].stop, todo[0].start + CALIBRATION_ROWS))
            table = texts.read(unit.part, unit.start, unit.stop, read)
            report_foreign_texts(
                table[sentence_column].to_pylist(), model.encoder.resolved.checkpoint
            )
        dim = _embed_units(job, output, todo, workers) or model.truncate_dim
        packed = job.quantizer.precision.endswith("binary")
        dim = dim or model.head.head.dim_out or output.dim * (8 if packed else 1)
    n, n_new = sum(part.rows for part in parts), sum(unit.rows for unit in todo)
    previous_note = f" ({n - n_new:,} of them existed)" if n > n_new else ""
    form = describe_embeddings(n, dim, columns, model.head.reference, job.quantizer)
    log.info(f"{form} -> {out}{previous_note}")
    return EmbedResult(
        out,
        n,
        dim,
        model.head.reference,
        model.view.name,
        model.guides,
        options.precision,
        columns=names,
    )


def _check_units(
    job: EmbeddingJob,
    units: Sequence[WorkUnit],
    options: EmbedOptions,
    texts: TextSource,
    previous: _OutputRecord | None,
) -> None:
    """Check what would fail later, when the output's record already determines the options.

    Raises:
        UserError: a row has no answer, or the embeddings do not have the size that the options
            need.
    """
    if job.model.answers is not None:
        checked = {part[0] for part in previous.parts} if previous else ()
        only_texts = replace(job, columns=replace(job.columns, keep=pa.schema([])))
        for unit in units:
            if unit.part not in checked:
                read_unit(only_texts, texts, unit)
    ranges = job.quantizer.ranges
    if previous is None and (options.truncate_dim is not None or ranges is not None):
        first = replace(units[0], stop=units[0].start + 1)
        # A copy of the model does not stay in the memory of this process.
        copy = replace(job, model=replace(job.model))
        dim = UnitEmbedder(copy).embed(first)[1].shape[1]
        if ranges is not None:
            check_ranges(ranges, dim, f"--ranges {options.ranges}")


def _fit_ignored(
    model: StreamModel,
    options: EmbedOptions,
    vectors: Sequence[VectorColumn],
    texts: TextSource,
    text: str,
    previous: _OutputRecord | None,
) -> None:
    """Find what conditions ignore in the first texts of a source.

    Those of a started output are read again, so that new parts do not change what is ignored.

    Raises:
        UserError: a text is empty, or a part lacks a column.
    """
    others = options.ignore_column
    if not (options.ignore or others):
        return
    sentences: list[str] = []
    columns: dict[str, list[Any]] = {name: [] for name in others}
    parts = [part[0] for part in previous.parts] if previous else list(texts.states())
    for name in parts[: previous.first_parts if previous else None]:
        rows, schema = texts.survey(name, [text])
        check_columns(
            texts.part_name(name), schema.names, others, "Name other columns with --ignore-column."
        )
        read = pa.schema([schema.field(column).remove_metadata() for column in others])
        stop = min(rows, MAX_COLLECTION - len(sentences))
        table = texts.read(name, 0, stop, StreamColumns(text, [], read))
        sentences += table[text].to_pylist()
        for column in others:
            columns[column] += table[column].to_pylist()
        if len(sentences) == MAX_COLLECTION:
            break
    collection = Collection(sentences, texts.name, columns, {}, True, range(1, len(sentences) + 1))
    conditions = [column.condition for column in vectors]
    model.fit_ignored(collection, conditions, others, options.ignore_directions)


def _read_guide(
    guide: Any, text: str | None, columns: Sequence[VectorColumn], reading: ReadOptions
) -> list[LabelledTexts]:
    """Read the labelled texts of a table, with their conditions as rows have them."""
    by_column = next((column for column in columns if column.source), None)
    conditions = [column.condition for column in columns if column.source is None]
    closed = by_column is None
    guides: list[LabelledTexts] = []
    for labelled in read_guide(guide, text, conditions, closed=closed, read=reading):
        condition = labelled.condition or ""
        if condition not in conditions and by_column is not None:
            condition = by_column.conditions([condition], 1)[0]
        guides.append(replace(labelled, condition=condition))
    return guides


def _measure_ranges(job: EmbeddingJob, units: Sequence[WorkUnit]) -> NDArray[np.float32]:
    """Return the ranges of the first embeddings, of several units if the first files are small."""
    worker, missing, first = UnitEmbedder(job), CALIBRATION_ROWS, []
    for unit in units:
        short = replace(unit, stop=min(unit.stop, unit.start + missing))
        first.append(worker.embed(short)[1])
        missing -= short.rows
        if not missing:
            break
    return measure_ranges(np.concatenate(first))


def _find_ranges(
    options: EmbedOptions, recorded: Sequence[Sequence[float]] | None, out: str
) -> NDArray[np.float32] | None:
    """Return the ranges of a started output, or those that the user names; None if there are none.

    Raises:
        UserError: the two differ, or the file of ranges cannot be read.
    """
    started = None if recorded is None else check_ranges(recorded, None, f"{out}/{RECORD_NAME}")
    if options.ranges is None:
        return started
    ranges = read_ranges(options.ranges)
    if started is not None and not np.array_equal(started, ranges):
        raise UserError(
            f"{out} was started with other ranges than {options.ranges}. Leave out --ranges, or "
            "name another --out."
        )
    return ranges


def _read_previous(
    record: Mapping[str, Any] | None, texts: TextSource, out: str
) -> _OutputRecord | None:
    """Check the record of a started output, and that its source still has the recorded parts.

    Raises:
        UserError: the output has another source, or parts have changed since.
        LlmcondError: the record is damaged.
    """
    if record is None:
        return None
    where = f"{out}/{RECORD_NAME}"
    check_format(dict(record), FORMAT, where)
    previous = check_record(record, _OutputRecord, where, "Name another --out.")
    _check_same(out, {"source": previous.made_of.get("source")}, {"source": texts.name})
    _check_parts(texts, texts.states(), [SourcePart(*part) for part in previous.parts], out)
    return previous


def _check_columns(
    texts: TextSource,
    output: Output,
    keep: Sequence[str],
    read: Sequence[str],
    written: Sequence[str],
) -> None:
    """Raise a UserError if the output cannot have the columns to keep next to those written.

    Without ``keep``, all columns but those of texts and conditions, ``read``, are written.
    """
    others = keep or [name for name in texts.columns() if name not in read]
    if repeated := [name for name in others if name in written]:
        raise UserError(
            f"{texts.name} has a column {repeated[0]!r}, but the output has another column of that "
            "name. Keep only other columns: --keep COL"
        )
    if isinstance(output, LanceOutput):
        check_lance_column_names([*others, *written])


def _extend_record(
    texts: TextSource,
    out: str,
    config: Mapping[str, Any],
    read: Sequence[str],
    previous: _OutputRecord | None,
) -> _OutputRecord:
    """Return the record of the output: the previous one, extended by new parts of the source.

    ``read`` names the columns of texts and conditions.

    Raises:
        UserError: the output holds other embeddings.
    """
    known_parts: list[SourcePart] = []
    previous_schema = None
    if previous is not None:
        _check_same(out, previous.made_of, config)
        known_parts = [SourcePart(*part) for part in previous.parts]
        previous_schema = _read_schema(previous.columns, out)
    states = texts.states()
    names = {part.name for part in known_parts}
    new = [name for name in states if name not in names]
    columns = list(dict.fromkeys(read))
    parts, schema = survey(texts, new, columns, config["keep"], previous_schema)
    if previous_schema is not None and schema != previous_schema:
        raise UserError(
            f"{format_list(new, 3)} of {texts.name} came after {out} was started, and the types of "
            "their columns differ. Name another --out."
        )
    if not sum(part.rows for part in [*known_parts, *parts]):
        raise UserError(f"{texts.name} is empty: it has no rows.")
    return _OutputRecord(
        FORMAT,
        dict(config),
        previous.unit_rows if previous else UNIT_ROWS,
        base64.b64encode(schema.serialize()).decode(),
        [(part.name, part.state, part.rows) for part in [*known_parts, *parts]],
        previous.first_parts or len(known_parts) if previous else len(parts),
        previous.ranges if previous else None,
    )


def _check_parts(
    texts: TextSource, states: Mapping[str, str], known_parts: Sequence[SourcePart], out: str
) -> None:
    """Check that a source still has the parts of a record.

    Raises:
        UserError: a part is missing or has changed.
        LlmcondError: the record and the source count different numbers of rows.
    """
    changed = [part.name for part in known_parts if states.get(part.name) != part.state]
    if changed:
        raise UserError(
            f"{texts.name} has changed since {out} was started: {format_list(changed, 3)} "
            f"{'is' if len(changed) == 1 else 'are'} missing or modified. Name another --out."
        )
    counts = dict(zip(states, texts.counts(list(states)), strict=True)) if known_parts else {}
    if [part.rows for part in known_parts] != [counts.pop(part.name, None) for part in known_parts]:
        raise LlmcondError(
            f"{out}/{RECORD_NAME} is damaged: its numbers of rows differ from those of the parts "
            f"of {texts.name}. Name another --out."
        )


def _check_same(out: str, recorded: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    changes = []
    for name in dict.fromkeys([*config, *recorded]):
        before, now = recorded.get(name), config.get(name)
        if before != now:
            is_digest = name in ("encoder", "prompt", "head", "guides", "answers")
            changes.append(name if is_digest else f"{name} {before!r}, not {now!r}")
    if changes:
        raise UserError(
            f"{out} was started with another {'; '.join(changes)}. Give the same options as "
            "before, or another --out."
        )


def _read_schema(columns: str, out: str) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(columns)))
    except (ValueError, OSError, pa.ArrowException) as error:
        raise LlmcondError(
            f"{out}/{RECORD_NAME} is damaged: its columns cannot be read. Name another --out."
        ) from error


def _split_units(parts: Sequence[SourcePart], size: int) -> list[WorkUnit]:
    units: list[WorkUnit] = []
    first = 0
    for part in parts:
        for start in range(0, part.rows, size):
            stop = min(start + size, part.rows)
            units.append(WorkUnit(len(units), part.name, start, stop, first + start))
        first += part.rows
    return units


def _embed_units(
    job: EmbeddingJob, output: Output, units: Sequence[WorkUnit], workers: Workers | None
) -> int:
    """Embed and write units; return the size of the embeddings, or 0 if there are no units."""
    total = sum(unit.rows for unit in units)
    dim, n_truncated = 0, 0
    if not units:
        return dim
    with (
        _open_executor(job, workers) as (execute, processes),
        ExtractionBar(processes=processes, name="embedding", noun="rows") as bar,
    ):
        bar.start(total, total)
        try:
            for unit, done in execute(units):
                dim, n_truncated = done.dim, n_truncated + done.n_truncated
                output.add_unit(unit, done.written, done.schema)
                bar.advance(unit.rows, unit.rows, done.n_tokens, done.seconds)
        except BaseException:
            # The next call can then skip the units that were written.
            with suppress(LlmcondError):
                output.finish()
            raise
    output.finish()
    if n_truncated:
        log.info(truncation_note(n_truncated, "the encoder's limit"))
    return dim


@contextmanager
def _open_executor(
    job: EmbeddingJob, workers: Workers | None
) -> Iterator[tuple[Callable[[Iterable[WorkUnit]], Iterator[tuple[WorkUnit, UnitResult]]], int]]:
    """Yield a function that embeds units, here or by workers, and its parallelism."""
    if workers is None:
        worker = UnitEmbedder(job)
        yield lambda units: ((unit, worker.work(unit)) for unit in units), 1
        return
    if workers.gpus_each:  # a worker sees only its own GPU
        job = replace(job, model=replace(job.model, device="cuda"))
    with worker_pool(workers, UnitEmbedder, job) as pool:
        yield pool.map, pool.size
