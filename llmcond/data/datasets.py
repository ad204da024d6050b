"""Reading data sets: files become rows, checked, on a stated scale, in splits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llmcond.data.readers import (
    MissingColumnError,
    Source,
    open_source,
    read_records,
    source_name,
    without_shard,
)
from llmcond.data.rows import Rows, rows_digest, save_rows, split_by_pair
from llmcond.errors import UserError, brief
from llmcond.files import digest_text, replacing
from llmcond.progress import ReadBar

SPLITS = ("train", "dev", "test")
#: Share of sentence pairs that each split of a single file gets.
FRACTIONS = {"train": 0.7, "dev": 0.15, "test": 0.15}
#: Share of the training pairs that become dev where a folder has no dev file.
DEV_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Columns:
    """The names that a file's columns have; without one of labels, ``label`` is empty."""

    sentence1: str = "sentence1"
    sentence2: str = "sentence2"
    condition: str = "condition"
    label: str = "label"


@dataclass(frozen=True, slots=True)
class RatingScale:
    """The range that ratings are on, mapped to 0 to 1.

    ``unrated`` is the label of a row that is unrated or ill-defined: a number, or ``empty`` for
    labels that are empty, null or NaN.
    """

    low: float = 1.0
    high: float = 5.0
    unrated: float | Literal["empty"] = -1.0

    def check(self) -> None:
        """Raise a UserError unless low < high, with ``unrated`` outside."""
        if not (np.isfinite([self.low, self.high]).all() and self.low < self.high):
            raise UserError(
                f"the rating range is {self.low:g} to {self.high:g}; low must be below high, and "
                "both must be finite."
            )
        if self.unrated == "empty":
            return
        if not (isinstance(self.unrated, int | float) and math.isfinite(self.unrated)):
            raise UserError(
                f"--unrated is {brief(self.unrated)}; expected a number, or empty for labels that "
                "are empty, null or NaN."
            )
        if self.low <= self.unrated <= self.high:
            raise UserError(
                f"the label {self.unrated:g} marks unrated rows, but lies within the rating range "
                f"{self.low:g} to {self.high:g}. Name another with --unrated."
            )

    def to_unit(self, label: object) -> float:
        """Return a label on 0 to 1; NaN for an unrated row.

        Raises:
            ValueError: not a number, or out of range; the message says which.
        """
        text = str(label).strip() if label is not None else ""
        try:
            value = float(text or "nan")
        except ValueError:
            raise ValueError(f"is {brief(text)}, not a number") from None
        empty = math.isnan(value)
        if value == self.unrated or (empty and self.unrated == "empty"):
            return math.nan
        if empty:
            raise ValueError(
                f"is {brief(text)}, not a number; --unrated empty takes such rows as unrated"
            )
        if not self.low <= value <= self.high:
            marker = self.unrated if self.unrated == "empty" else f"{self.unrated:g}"
            raise ValueError(
                f"is {value:g}, outside the rating range {self.low:g} to {self.high:g} (and not "
                f"{marker}, which marks unrated rows); name the range with --rating-range"
            )
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Dataset:
    """Splits of rows, and what they came from.

    Attributes:
        splits: rows by ``train``, ``dev`` and ``test``; ``test`` may be missing.
        source: what the user named, or ``sample``.
        notes: what was decided on the way, in sentences for the user.
    """

    splits: Mapping[str, Rows]
    source: str
    columns: Columns
    scale: RatingScale
    split_seed: int = 0
    notes: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """Identify texts, ratings and splits, whatever file they came from."""
        return digest_text(*(f"{name}:{rows_digest(rows)}" for name, rows in self.splits.items()))

    def to_json(self) -> dict[str, Any]:
        """Return the record that manifests keep: source, digest, settings and counts."""
        return {
            "source": self.source,
            "digest": self.digest,
            "columns": asdict(self.columns),
            "scale": asdict(self.scale),
            "split_seed": self.split_seed,
            "rows": {name: len(rows) for name, rows in self.splits.items()},
            "unrated": {name: int((~rows.rated).sum()) for name, rows in self.splits.items()},
            "notes": list(self.notes),
        }

    def save(self, folder: Path) -> None:
        """Write the rows into a run's folder."""
        with replacing(folder / "rows.parquet") as path:
            save_rows(path, self.splits)


def sample_folder() -> Path:
    """Return the folder of the bundled sample."""
    return Path(__file__).resolve().parent / "sample"


def read_dataset(
    source: Any,
    columns: Columns = Columns(),
    scale: RatingScale = RatingScale(),
    seed: int = 0,
    extra: Sequence[str] = (),
) -> Dataset:
    """Read a file or a folder of splits; None is the bundled sample.

    A single file is split by sentence pair (70 % train, 15 % dev, 15 % test), by a hash of the
    seed and the two sentences: the order of rows does not matter. In a folder without a dev file,
    10 % of the training pairs become dev.

    Args:
        source: a file that ends in one of ``SUFFIXES``; a folder with train, dev (or validation)
            and test files; either as ``hf://datasets/...``; or rows in memory: a pandas or Arrow
            table or a sequence of mappings, or one for each split by its name.
        columns: the columns' names.
        scale: the range of the ratings.
        seed: decides which pairs go where.
        extra: further columns of text to read.

    Raises:
        UserError: nothing there, a missing column, an empty file, or a row that is wrong.
    """
    scale.check()
    opened = open_source(str(sample_folder()) if source is None else source)
    if opened.splits is None:
        rows = _read_rows(opened, opened.files, columns, scale, extra)
        splits = split_by_pair(rows, FRACTIONS, seed)
        note = f"one file, split by sentence pair with seed {seed}"
    else:
        splits = {
            name: _read_rows(opened, files, columns, scale, extra)
            for name, files in opened.splits.items()
        }
        splits, note = _complete(splits, opened.name, seed)
    notes = (note,) if note else ()
    return Dataset(splits, source_name(source, opened.name), columns, scale, seed, notes)


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Where rows come from, and how they are read: what was asked for.

    What is not given is as in the run or the task; see :meth:`like`.

    Attributes:
        source: None: the run's own data, or the bundled sample for a new run.
        columns: names that differ, by fields of :class:`Columns`.
        scale: values that differ, by fields of :class:`RatingScale`.
        split_seed: decides how a single file is split; None: not given.
        extra: further columns of text to read.
        drop_leaks: of dialogues, whether those that are in a later split too are left out.
    """

    source: Any = None
    columns: Mapping[str, str] = field(default_factory=dict)
    scale: Mapping[str, Any] = field(default_factory=dict)
    split_seed: int | None = None
    extra: tuple[str, ...] = ()
    drop_leaks: bool = False

    def read(self) -> Dataset:
        """Read and split the rows."""
        columns, scale = Columns(**self.columns), RatingScale(**self.scale)
        return read_dataset(self.source, columns, scale, self.split_seed or 0, self.extra)

    def like(self, other: DataOptions) -> DataOptions:
        """Return the options with whatever was not given taken from others."""
        return replace(
            self,
            columns={**other.columns, **self.columns},
            scale={**other.scale, **self.scale},
            split_seed=other.split_seed if self.split_seed is None else self.split_seed,
            extra=self.extra or other.extra,
            drop_leaks=self.drop_leaks or other.drop_leaks,
        )


def read_rows(
    source: Any,
    split: str | None = None,
    columns: Columns = Columns(),
    scale: RatingScale = RatingScale(),
    extra: Sequence[str] = (),
) -> tuple[Rows, str]:
    """Read the rows of a single file, all of them, or of one split of a folder.

    Returns:
        The rows, and the split they are: the one asked for; else test, or for a folder without
        test dev.

    Raises:
        UserError: as :func:`read_dataset`, or a folder without that split.
    """
    scale.check()
    opened = open_source(source)
    if opened.splits is None:
        return _read_rows(opened, opened.files, columns, scale, extra), split or "test"
    wanted = split or ("test" if "test" in opened.splits else "dev")
    if wanted not in opened.splits:
        raise UserError(f"{opened.name} has no {wanted} file; it has {', '.join(opened.splits)}.")
    return _read_rows(opened, opened.splits[wanted], columns, scale, extra), wanted


def read_pairs(
    source: Any, split: str, columns: Columns = Columns(), scale: RatingScale = RatingScale()
) -> Rows:
    """Read rows as :func:`read_rows` does; all are unrated where no column has ratings."""
    try:
        return read_rows(source, split, columns, scale)[0]
    except MissingColumnError:
        return read_rows(source, split, replace(columns, label=""), scale)[0]


def _complete(splits: dict[str, Rows], source: str, seed: int) -> tuple[dict[str, Rows], str]:
    """Return splits with a dev split, in their order, and a note if it was made."""
    if "train" not in splits:
        raise UserError(f"{source} has no train file; it has {', '.join(splits)}.")
    note, shares = "", {"train": 1 - DEV_FRACTION, "dev": DEV_FRACTION}
    if "dev" not in splits:
        splits = {**splits, **split_by_pair(splits["train"], shares, seed)}
        share = f"{DEV_FRACTION:.0%} of the training pairs"
        note = f"no dev file: {share} are dev, chosen with seed {seed}"
    return {name: splits[name] for name in SPLITS if name in splits}, note


def _read_rows(
    source: Source, files: Sequence[str], columns: Columns, scale: RatingScale, extra: Sequence[str]
) -> Rows:
    names = [columns.sentence1, columns.sentence2, columns.condition, *extra]
    wanted: list[tuple[str, Callable[[Any], Any]]] = [(name, cell_text) for name in names]
    if columns.label:
        wanted.append((columns.label, scale.to_unit))
    found = read_columns(source, files, wanted)
    ratings = found.pop() if columns.label else [math.nan] * len(found[0])
    first, second, conditions, *more = found
    name = Path(files[0]).name
    return Rows(
        first,
        second,
        conditions,
        rating=np.array(ratings, dtype=np.float64),
        number=np.arange(1, len(ratings) + 1),
        # Shards count as one file, cut into pieces.
        file=name if len(files) == 1 else without_shard(name),
        extra=dict(zip(extra, more, strict=True)),
    )


def read_columns(
    source: Source, files: Sequence[str], columns: Sequence[tuple[str, Callable[[Any], Any]]]
) -> list[list[Any]]:
    """Return columns of files, each with what its function makes of the cells.

    Raises:
        UserError: as of :func:`llmcond.data.readers.read_records`, or a function raised a
            ValueError, which says what is wrong with the cell.
    """
    found, names = [list[Any]() for _ in columns], list(dict.fromkeys(name for name, _ in columns))
    # Equal texts, as of a sentence's conditions, are one object.
    same: dict[Any, Any] = {}
    for file in files:
        problems = Problems(Path(file).name)
        with ReadBar(problems.file) as bar:
            for number, record in enumerate(bar.count(read_records(source, file, names)), 1):
                for values, (name, read) in zip(found, columns, strict=True):
                    try:
                        value = read(record[name])
                        values.append(
                            same.setdefault(value, value) if type(value) is str else value
                        )
                    except ValueError as error:
                        problems.add(number, f"{name} {error}")
        problems.raise_if_any()
    return found


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def cell_text(value: object) -> str:
    """Return a cell that holds a text.

    Raises:
        ValueError: it is empty or no text at all; the message says which.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("is empty")
    if not isinstance(value, str):
        raise ValueError(f"is {brief(value)}, not a text")
    if _LONE_SURROGATE.search(value):
        raise ValueError("holds half of a surrogate pair, which is no character")
    return str(value)


class Problems:
    """What is wrong in a file's rows, gathered so that one error tells how many there are."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._first: str | None = None
        self._rows: set[int] = set()

    def add(self, number: int, what: str) -> None:
        """Record that the row with this number is wrong."""
        self._first = self._first or f"row {number} of {self.file}: {what}"
        self._rows.add(number)

    def text(self, number: int, column: str, value: object) -> str:
        """Return ``value`` as text, noting the row if it is empty or no text at all."""
        try:
            return cell_text(value)
        except ValueError as error:
            self.add(number, f"{column} {error}")
            return ""

    def raise_if_any(self) -> None:
        """Raise a UserError that names the first wrong row and counts the others."""
        if self._first is None:
            return
        others = len(self._rows) - 1
        what = "row is" if others == 1 else "rows are"
        more = f" ({others} more {what} wrong too)" if others else ""
        raise UserError(f"{self._first}{more}. Mend or remove it and try again.")


@dataclass(frozen=True, slots=True)
class Texts:
    """Sentences with their conditions, for embedding, and further columns, from a file so named."""

    sentences: list[str]
    conditions: list[str]
    file: str
    kept: Mapping[str, list[Any]] = field(default_factory=dict)


def condition_column(condition: str | None, condition_text: str | None) -> str | None:
    """Return the column that conditions are in; None where one text is that of every row.

    Raises:
        UserError: both are given, or an empty text.
    """
    if condition is not None and condition_text is not None:
        raise UserError("both --condition and --condition-text are given; give one of them.")
    if condition_text is None:
        return condition or "condition"
    try:
        cell_text(condition_text)
    except ValueError as error:
        raise UserError(f"--condition-text {error}; give a text.") from None
    return None


def read_texts(
    source: str,
    sentence: str,
    condition: str | None = None,
    condition_text: str | None = None,
    keep: Sequence[str] = (),
) -> Texts:
    """Read a column of sentences with their conditions from one file.

    The conditions are in a column, by default the one called condition, or ``condition_text`` is
    that of every sentence. Columns to ``keep`` are read as they are.

    Raises:
        UserError: a folder, a missing column, an empty file or an empty text.
    """
    column = condition_column(condition, condition_text)
    opened = open_source(source)
    if opened.splits is not None:
        raise UserError(f"{source} is a folder; name one file.")
    wanted = [(name, cell_text) for name in (sentence, column) if name]
    try:
        sentences, *found = read_columns(opened, opened.files, [*wanted, *unread_columns(keep)])
    except MissingColumnError as error:
        other = "" if condition_text else ", and the conditions: --condition COL_OR_TEXT"
        advice = f"Name the column of the texts: --text COL{other}."
        raise UserError(f"{error.found} {advice}") from error
    conditions = found.pop(0) if column else [condition_text or ""] * len(sentences)
    return Texts(
        sentences, conditions, Path(opened.files[0]).name, dict(zip(keep, found, strict=True))
    )


def unread_columns(names: Sequence[str]) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return columns whose cells :func:`read_columns` leaves as they are."""
    return [(name, lambda value: value) for name in names]
