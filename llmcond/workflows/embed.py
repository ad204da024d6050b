"""Embed a file of sentences: in order, resumable, and written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from llmcond.data.datasets import Texts, read_texts
from llmcond.encoders import EncoderInput
from llmcond.errors import UserError
from llmcond.features.extract import NonFiniteError, extract
from llmcond.features.view import Part, View
from llmcond.files import check_writable, replacing
from llmcond.heads import Matrix
from llmcond.log import log
from llmcond.progress import extraction_bar
from llmcond.prompts import Prompt
from llmcond.runs import open_run
from llmcond.runs.embedder import choose_head
from llmcond.runs.extraction import LazyEncoder, log_extraction

#: Rows whose vectors are in memory at a time.
_BLOCK = 8_192

Blocks = Iterator[NDArray[np.float32]]


@dataclass(frozen=True)
class Embedded:
    """What was written.

    Attributes:
        out: the file.
        rows: how many embeddings.
        dim: their size.
        head: that made them; ``none``: features as they are.
        prompt: whose features.
    """

    out: Path
    rows: int
    dim: int
    head: str
    prompt: str

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {**asdict(self), "out": str(self.out)}


def embed_file(
    run_folder: Path,
    source: str,
    out: Path,
    sentence: str = "sentence",
    condition: str | None = None,
    head: str | None = None,
    prompt: str | None = None,
    device: str = "auto",
) -> Embedded:
    """Write one condition-aware embedding for each row of a file.

    Features go through the run's store, so an interrupted call resumes where it stopped, and a
    second head on the same file encodes nothing.

    Args:
        run_folder: a run.
        source: a .csv, .tsv, .jsonl or .parquet file.
        out: a .parquet file (sentence, condition, embedding) or a .npy file ((n, k) float32).
        sentence: the sentences' column.
        condition: the conditions' column, or one text for every row. None: the column called
            condition.
        head: as in :func:`llmcond.runs.embedder.load_embedder`.
        prompt: for zero-shot; a head has its own.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: wrong input, or an output that cannot be written.
        LlmcondError: the encoder fails.
    """
    writers = {".parquet": _write_parquet, ".npy": _write_npy}
    if out.suffix not in writers:
        raise UserError(f"{out} ends in {out.suffix or 'nothing'}; name a .parquet or .npy file.")
    run = open_run(run_folder)
    chosen = choose_head(run, head, prompt)
    view = chosen.view if chosen else View((run.prompt(prompt),))
    texts = read_texts(source, sentence, condition)
    if not texts.from_column:
        log.info(f"{texts.file} has no column {condition!r}: that is every row's condition")
    if out.absolute() == Path(source).absolute():
        raise UserError(f"{out} is the file that is read; name another --out.")
    check_writable(out)
    rows = list(zip(texts.sentences, texts.conditions, strict=True))
    columns = view.inputs(rows)
    store = run.store()
    resolved = run.resolve_encoder(device)
    try:
        with extraction_bar() as bar:
            done = extract(
                [item for column in columns for item in column],
                store,
                LazyEncoder(resolved),
                bar,
                by_prefix=resolved.shares_prefixes,
            )
    except NonFiniteError as error:
        number = _row_of(error.item, columns)
        raise UserError(f"row {number} of {texts.file}: {error}") from error
    log_extraction(view.name, done, resolved)

    def blocks() -> Blocks:
        for start in range(0, len(rows), _BLOCK):
            part = rows[start : start + _BLOCK]

            def read(prompt: Prompt, side: Part, part: Sequence[Any] = part) -> Matrix:
                return store.lookup([getattr(prompt, side).render(*row) for row in part])

            features = view.sentence(read)
            condition = view.condition(read)
            yield chosen.head.transform(features, condition) if chosen else features[:]

    dim = writers[out.suffix](out, texts, blocks)
    name = chosen.name if chosen else "none"
    log.info(f"{len(rows):,} embeddings of {dim} dimensions by {name} -> {out}")
    return Embedded(out, len(rows), dim, name, view.name)


def _row_of(item: EncoderInput, columns: list[list[EncoderInput]]) -> int:
    return 1 + min(column.index(item) for column in columns if item in column)


def _write_parquet(out: Path, texts: Texts, blocks: Callable[[], Blocks]) -> int:
    writer: pq.ParquetWriter | None = None
    start = dim = 0
    with replacing(out) as temporary:
        try:
            for vectors in blocks():
                stop, dim = start + len(vectors), vectors.shape[1]
                flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
                table = pa.table(
                    {
                        "sentence": texts.sentences[start:stop],
                        "condition": texts.conditions[start:stop],
                        "embedding": pa.FixedSizeListArray.from_arrays(flat, dim),
                    }
                )
                writer = writer or pq.ParquetWriter(temporary, table.schema)
                writer.write_table(table)
                start = stop
        finally:
            if writer is not None:
                writer.close()
    return dim


def _write_npy(out: Path, texts: Texts, blocks: Callable[[], Blocks]) -> int:
    start = dim = 0
    array: Any = None
    with replacing(out) as temporary:
        for vectors in blocks():
            if array is None:
                dim = vectors.shape[1]
                shape = (len(texts.sentences), dim)
                array = np.lib.format.open_memmap(temporary, "w+", np.dtype(np.float32), shape)
            array[start : start + len(vectors)] = vectors
            start += len(vectors)
        array.flush()
    return dim
