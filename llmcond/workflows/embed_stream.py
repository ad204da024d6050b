"""Embed texts that do not fit in memory: unit by unit, in this process or by actors of Ray."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
from annotated_types import Ge, MinLen

from llmcond.conditions import example_values, with_same_values
from llmcond.data.candidates import condition_source, text_column
from llmcond.data.guides import LabelledTexts, read_guide
from llmcond.data.streams import Columns, LanceRows, Part, TextSource, open_texts, survey
from llmcond.encoders.spec import CUT, InputError
from llmcond.errors import LlmcondError, UserError, listed
from llmcond.features.view import View
from llmcond.files import check_format
from llmcond.heads.guide import Guide, apply_guides
from llmcond.log import log
from llmcond.progress import ExtractionBar
from llmcond.records import RECORD as RECORD_SCHEMA
from llmcond.records import check_record
from llmcond.runs.embedder import Embedder, guide_of, guides_json, make_embedder, unit_length
from llmcond.runs.embedding_model import EmbeddingModel
from llmcond.scale.outputs import RECORD, VECTOR, Output, Unit, open_output
from llmcond.scale.pool import Cluster, actors
from llmcond.version import __version__
from llmcond.workflows.embed import EmbedResult
from llmcond.workflows.options.texts import EmbedOptions

if TYPE_CHECKING:
    from llmcond.encoders.encoder import Encoded

FORMAT = 1
#: Rows that are embedded and written together: bounds memory, and what a kill loses.
UNIT_ROWS = 16_384


@dataclass(frozen=True)
class StreamModel:
    """A run with one of its heads, as another process finds it again.

    Attributes:
        run: its folder, or the name of a bundled model.
        head: its full name; ``none``: zero-shot.
        prompt: the name of what the head, or zero-shot, sees.
        guides: what maps embeddings under some conditions.
    """

    run: str
    head: str
    prompt: str
    device: str
    normalize: bool
    guides: dict[Any, Guide] = field(default_factory=dict)

    def guide(self, labelled: LabelledTexts) -> None:
        """Fit a guide to labelled texts, for all embeddings under their condition from now on."""
        rows = [(text, labelled.condition or "") for text in labelled.texts]
        guide = guide_of(labelled, self.vectors(rows)[0], self.embedder.head)
        self.guides[labelled.condition] = guide

    @classmethod
    def find(
        cls, folder: Path, head: str | None, prompt: str | None, device: str, normalize: bool
    ) -> StreamModel:
        """Return what the options of a command name."""
        found = EmbeddingModel.find(folder, head, prompt)
        source = folder.name if found.run.is_bundled else str(folder.absolute())
        return cls(source, found.head.reference, found.view.name, device, normalize)

    def to_json(self) -> dict[str, Any]:
        """Return what a record tells of it."""
        made = {"run": self.run, "head": self.head, "prompt": self.prompt}
        return {**made, **guides_json(self.guides)}

    @cached_property
    def _model(self) -> EmbeddingModel:
        return EmbeddingModel.find(self.run, self.head, self.prompt, device=self.device, quiet=True)

    @property
    def view(self) -> View:
        """Return what is encoded of a text and its condition."""
        return self._model.view

    @property
    def identity(self) -> dict[str, Any]:
        """Return everything of it that decides the embeddings."""
        identity = self._model.identity
        return {
            "encoder": identity["encoder"],  # first, as in earlier records
            "store_dtype": self._model.run.manifest["store_dtype"],
            **identity,
            "normalize": self.normalize,
            "guides": {str(c): guide.digest for c, guide in self.guides.items()} or None,
        }

    @cached_property
    def embedder(self) -> Embedder:
        """Return it with its encoder, which is loaded."""
        return make_embedder(self._model.encoder(), self._model.head)

    def vectors(self, rows: Sequence[tuple[str, str]]) -> tuple[Any, Encoded]:
        """Return (n, k) embeddings of (sentence, condition) rows, and what their inputs gave.

        They are those of ``llmcond embed`` of a file, up to rounding: features have the number
        type that the run stores them in.

        Raises:
            InputError: the encoder cannot take an input, or gave NaN or infinity for it.
        """
        embedder, dtype = self.embedder, self._model.run.manifest["store_dtype"]
        distinct = list(dict.fromkeys(self.view.inputs(rows)))
        encoded = embedder.encoder.encode_counted(distinct, threads=True)
        with np.errstate(over="ignore"):
            features = encoded.vectors.astype(dtype)
        finite = np.isfinite(features).all(axis=1)
        if not finite.all():
            item = distinct[int(np.argmin(finite))]
            raise InputError(item, f"the encoder gave NaN or infinity for {item.text[:80]!r}.")
        found = embedder.embedded(rows, distinct, features)
        found = apply_guides(found, [condition for _, condition in rows], self.guides)
        if self.normalize:
            found = unit_length(found, embedder.head)
        return found, encoded


@dataclass(frozen=True)
class _Record:
    """What the record beside the embeddings holds at least.

    Attributes:
        made_of: what decides the embeddings.
        columns: an Arrow schema, of what is kept of the source's columns.
        parts: of the source: see :class:`Part`.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD_SCHEMA

    format: int
    made_of: dict[str, Any]
    unit_rows: Annotated[int, Ge(1)]
    columns: str
    parts: Annotated[list[tuple[str, str, Annotated[int, Ge(0)]]], MinLen(1)]


class Done(NamedTuple):
    """What became of a unit.

    Attributes:
        written: see :meth:`Output.add`.
        n_truncated: inputs that were cut.
        n_tokens: tokens of the inputs, before truncation.
        seconds: wall-clock time.
    """

    written: str
    dim: int
    n_truncated: int
    n_tokens: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """What is done with each unit, in whatever process.

    Attributes:
        version: of the source, if it is a Lance dataset.
        values: example values of every condition; None: conditions are taken as they are.
        identity: of the model, as the process that shares the work has it.
    """

    model: StreamModel
    source: str
    version: int | None
    columns: Columns
    condition_text: str | None
    values: Sequence[str] | None
    out: str
    identity: Mapping[str, Any]

    def schema(self, dim: int) -> pa.Schema:
        """Return the columns that are written."""
        text = pa.string()
        own = [("sentence", text), ("condition", text), (VECTOR, pa.list_(pa.float32(), dim))]
        return pa.schema([*self.columns.keep, *(pa.field(*field) for field in own)])


class UnitEmbedder:
    """Embeds and writes units: what :func:`llmcond.scale.pool.actors` makes actors of."""

    def __init__(self, work: Work) -> None:
        model = work.model
        if model.identity != work.identity:
            raise LlmcondError(
                f"{model.run} is another run here than where the command was given: see that all "
                "machines have the same one at this path."
            )
        self._work, self._source = work, open_texts(work.source, work.version, patient=True)
        self._output = open_output(work.out, patient=True)
        _ = model.embedder  # loaded now: the time that rows take leaves loading out

    def work(self, unit: Unit) -> Done:
        """Embed and write a unit.

        Raises:
            UserError: the encoder cannot take a row, or gave NaN or infinity for it.
            DiskFullError: no room.
        """
        work, columns = self._work, self._work.columns
        began = time.monotonic()
        table = self._source.read(unit.part, unit.start, unit.stop, columns)
        sentences = table[columns.sentence]
        if columns.condition is None:
            conditions: Any = pa.array([work.condition_text] * unit.rows, pa.string())
        else:
            conditions = table[columns.condition]
        with_values = with_same_values(conditions.to_pylist(), work.values)
        rows = list(zip(sentences.to_pylist(), with_values, strict=True))
        try:
            vectors, encoded = work.model.vectors(rows)
        except InputError as error:
            inputs = list(work.model.view.inputs(rows))
            row = unit.start + inputs.index(error.item) // (len(inputs) // len(rows)) + 1
            raise UserError(f"row {row} of {self._source.where(unit.part)}: {error}") from error
        dim = vectors.shape[1]
        flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
        kept = [table[name] for name in columns.keep.names]
        own = [sentences, conditions, pa.FixedSizeListArray.from_arrays(flat, dim)]
        written = self._output.write(unit, pa.table([*kept, *own], work.schema(dim)))
        n_truncated, n_tokens = int(encoded.truncated.sum()), int(encoded.n_tokens.sum())
        return Done(written, dim, n_truncated, n_tokens, time.monotonic() - began)


def embed_stream(options: EmbedOptions) -> EmbedResult:
    """Write one condition-aware embedding for each row of a source that is read bit by bit.

    Units that are there are left out, so that the same call goes on where it stopped.

    Raises:
        UserError: a text is empty, with its row; no such column; ``out`` holds something else,
            or embeddings of another model, source or condition, or of rows that have changed.
        DiskFullError: no room; what was written is kept.
    """
    out, values, guide = str(options.out), options.values, options.guide
    text, keep, cluster = options.text_column, options.keep, options.cluster()
    model = StreamModel.find(
        options.folder(), options.head, options.prompt, options.device, options.normalize
    )
    texts, output = open_texts(str(options.source)), open_output(out)
    has = texts.columns().__contains__
    sentence = text_column(has, text)
    column, condition_text = condition_source(has, options.condition, options.condition_text)
    examples = None if values is None else example_values(values)
    if guide is not None:
        conditions = with_same_values([condition_text] if condition_text else [], values)
        for labelled in read_guide(guide, text, conditions, closed=bool(conditions)):
            named = [labelled.condition or ""]
            (own,) = named if conditions else with_same_values(named, values)
            model.guide(replace(labelled, condition=own))
    made_of = {
        **model.identity,
        "source": texts.name,
        "sentence": sentence,
        "condition": column,
        "condition_text": condition_text,
        "values": list(examples) if examples else None,
        "keep": list(keep),
    }
    before = output.record()
    record = _begun(texts, out, made_of, before)
    with output.writing():
        if output.record() != before:
            raise UserError(f"another llmcond embed began to write into {out}; try again.")
        record |= {"made_by": {**model.to_json(), "llmcond": __version__}}
        output.write_record(record)
        parts = [Part(*part) for part in record["parts"]]
        units = _units(parts, record["unit_rows"])
        there = output.done(units)
        todo = [unit for unit in units if unit.number not in there]
        columns = Columns(sentence, column, _schema(record, out))
        version = texts.version if isinstance(texts, LanceRows) else None
        work = Work(
            model,
            texts.name,
            version,
            columns,
            condition_text,
            examples,
            output.uri,
            model.identity,
        )
        dim = _embed(work, output, todo, cluster)
        dim = dim or output.dim
    n, new = sum(part.rows for part in parts), sum(unit.rows for unit in todo)
    there_before = f" ({n - new:,} were there)" if n > new else ""
    log.info(f"{n:,} embeddings of {dim} dimensions by {model.head} -> {out}{there_before}")
    return EmbedResult(out, n, dim, model.head, model.prompt, model.guides)


def _begun(
    texts: TextSource, out: str, made_of: Mapping[str, Any], before: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the record of what is written: that of before, with parts that are new.

    Raises:
        UserError: embeddings of something else were begun, or parts have changed since.
    """
    known: list[Part] = []
    kept, unit_rows = None, UNIT_ROWS
    if before is not None:
        check_format(dict(before), FORMAT, f"{out}/{RECORD}")
        check_record(before, _Record, f"{out}/{RECORD}", "Name another --out.")
        _check_same(out, before["made_of"], made_of)
        known = [Part(*part) for part in before["parts"]]
        kept, unit_rows = _schema(before, out), before["unit_rows"]
    states = texts.states()
    _check_parts(texts, states, known, out)
    names = {part.name for part in known}
    new = [name for name in states if name not in names]
    columns = [made_of["sentence"], made_of["condition"]]
    given = list(dict.fromkeys(column for column in columns if column))
    parts, schema = survey(texts, new, given, made_of["keep"], kept)
    if kept is not None and schema != kept:
        raise UserError(
            f"{listed(new, 3)} of {texts.name} came since {out} was begun, with columns of other "
            "types. Name another --out."
        )
    if not sum(part.rows for part in [*known, *parts]):
        raise UserError(f"{texts.name} is empty: it has no rows.")
    return {
        "format": FORMAT,
        "made_of": dict(made_of),
        "unit_rows": unit_rows,
        "columns": base64.b64encode(schema.serialize()).decode(),
        "parts": [list(part) for part in [*known, *parts]],
    }


def _check_parts(
    texts: TextSource, states: Mapping[str, str], known: Sequence[Part], out: str
) -> None:
    """Check that a source still has the parts of a record.

    Raises:
        UserError: one is gone or has changed.
        LlmcondError: the record says something else of one than the source.
    """
    changed = [part.name for part in known if states.get(part.name) != part.state]
    if changed:
        raise UserError(
            f"{texts.name} has changed since {out} was begun: {listed(changed, 3)} "
            f"{'is' if len(changed) == 1 else 'are'} gone, or not as before. Name another --out."
        )
    counts = dict(zip(states, texts.counts(list(states)), strict=True)) if known else {}
    if [part.rows for part in known] != [counts.pop(part.name, None) for part in known]:
        raise LlmcondError(
            f"{out}/{RECORD} has other numbers of rows than the parts of {texts.name} have; it "
            "was damaged. Name another --out."
        )


def _check_same(out: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    told = []
    for name in now:
        if before.get(name) != now[name]:
            digests = name in ("encoder", "prompt", "head", "guides")
            told.append(name if digests else f"{name} {before.get(name)!r}, not {now[name]!r}")
    if told:
        raise UserError(
            f"{out} was begun with another {'; '.join(told)}. Give what it was begun with, or "
            "another --out."
        )


def _schema(record: Mapping[str, Any], out: str) -> pa.Schema:
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(record["columns"])))
    except (ValueError, OSError, pa.ArrowException) as error:
        raise LlmcondError(
            f"{out}/{RECORD} has columns that cannot be read; it was damaged. Name another --out."
        ) from error


def _units(parts: Sequence[Part], size: int) -> list[Unit]:
    found: list[Unit] = []
    first = 0
    for part in parts:
        for start in range(0, part.rows, size):
            stop = min(start + size, part.rows)
            found.append(Unit(len(found), part.name, start, stop, first + start))
        first += part.rows
    return found


def _embed(work: Work, output: Output, todo: Sequence[Unit], cluster: Cluster | None) -> int:
    """Embed and write units; return the size of the embeddings, 0 where there is nothing to do."""
    total = sum(unit.rows for unit in todo)
    dim, cut = 0, 0
    if not todo:
        return dim
    with (
        _executing(work, cluster) as (execute, processes),
        ExtractionBar(processes=processes, name="embedding", noun="rows") as bar,
    ):
        bar.start(total, total)
        try:
            for unit, done in execute(todo):
                dim, cut = done.dim, cut + done.n_truncated
                output.add(unit, done.written, work.schema(dim))
                bar.advance(unit.rows, unit.rows, done.n_tokens, done.seconds)
        except BaseException:
            # What was written by now need not be done again.
            with suppress(LlmcondError):
                output.finish()
            raise
    output.finish()
    if cut:
        log.info(f"{cut:,} inputs are longer than the encoder takes: {CUT}")
    return dim


@contextmanager
def _executing(
    work: Work, cluster: Cluster | None
) -> Iterator[tuple[Callable[[Iterable[Unit]], Iterator[tuple[Unit, Done]]], int]]:
    """Yield what embeds units, in this process or by actors on a cluster, and their number."""
    if cluster is None:
        worker = UnitEmbedder(work)
        yield lambda units: ((unit, worker.work(unit)) for unit in units), 1
        return
    # A new value, without what was loaded here.
    work = replace(work, model=replace(work.model))
    with actors(cluster, UnitEmbedder, work) as pool:
        yield pool.map, pool.size
