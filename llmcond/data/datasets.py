"""Reading of columns of texts: datasets of rated pairs, candidates to rank, and texts to embed."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from llmcond.base.errors import UserError, shortened_repr
from llmcond.base.files import digest_text, expand_home, replace_atomically
from llmcond.base.output import ProgressBar, log
from llmcond.base.text import EmptyTextError, cell_text, check_cell, check_text, condition_cell
from llmcond.data.formats import TEXT_COLUMNS, TEXT_SUFFIXES, MissingColumnError, ReadOptions
from llmcond.data.readers import (
    STDIN,
    SUFFIXES,
    Source,
    open_source,
    read_records,
    source_name,
    without_shard,
)
from llmcond.data.rows import Rows, is_null, pairs_digest, rows_digest, save_rows, split_by_pair

SPLITS = ("train", "dev", "test")
R = TypeVar("R")

#: Share of sentence pairs that each split of a single file gets.
FRACTIONS = {"train": 0.7, "dev": 0.15, "test": 0.15}
#: Share of the training pairs that become dev where a folder has no dev file.
DEV_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of a file's columns; ``label`` is empty if no column has ratings."""

    sentence1: str = "sentence1"
    sentence2: str = "sentence2"
    condition: str = "condition"
    label: str = "label"


@dataclass(frozen=True, slots=True)
class RatingScale:
    """The range of ratings, which are mapped to 0 to 1.

    Attributes:
        low: lowest rating.
        high: highest rating.
        unrated: label of rows that are unrated or ill-defined: a number, or ``empty`` for labels
            that are empty, null or NaN.
    """

    low: float = 1.0
    high: float = 5.0
    unrated: float | Literal["empty"] = -1.0

    def check(self) -> None:
        """Raise a ``UserError`` unless low < high and ``unrated`` is outside of this range."""
        if not (np.isfinite([self.low, self.high]).all() and self.low < self.high):
            raise UserError(
                f"the rating range is {self.low:g} to {self.high:g}; low must be below high, and "
                "both must be finite."
            )
        if self.unrated == "empty":
            return
        if not (isinstance(self.unrated, int | float) and math.isfinite(self.unrated)):
            raise UserError(
                f"--unrated is {shortened_repr(self.unrated)}; expected a number, or empty for "
                "labels that "
                "are empty, null or NaN."
            )
        if self.low <= self.unrated <= self.high:
            raise UserError(
                f"the label {self.unrated:g} marks unrated rows, but is within the rating range "
                f"{self.low:g} to {self.high:g}. Choose another one with --unrated."
            )

    def to_unit(self, label: object) -> float:
        """Scale a label to 0 to 1; NaN for an unrated row.

        Raises:
            ValueError: the label is not a number or is out of range; the message says which.
        """
        text = str(label).strip() if label is not None else ""
        try:
            value = float(text or "nan")
        except ValueError:
            raise ValueError(f"is {shortened_repr(text)}, not a number") from None
        empty = math.isnan(value)
        if value == self.unrated or (empty and self.unrated == "empty"):
            return math.nan
        if empty:
            raise ValueError(
                f"is {shortened_repr(text)}, not a number; to read such rows as unrated: "
                "--unrated empty"
            )
        if not self.low <= value <= self.high:
            marker = self.unrated if self.unrated == "empty" else f"{self.unrated:g}"
            raise ValueError(
                f"is {value:g}, outside the rating range {self.low:g} to {self.high:g} (and not "
                f"{marker}, which marks unrated rows); set the range with --rating-range"
            )
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Dataset:
    """Splits of rows, with the options that they were read with.

    Attributes:
        splits: rows by split, ``train``, ``dev`` and ``test``; ``test`` may be missing.
        source: the path or URI that the user named, or ``sample``.
        columns: names of the columns.
        scale: range of the ratings.
        split_seed: seed with which a single file was split.
        notes: decisions made during reading, as phrases for the user.
    """

    splits: Mapping[str, Rows]
    source: str
    columns: Columns
    scale: RatingScale
    split_seed: int = 0
    notes: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> str:
        """A digest of texts, ratings and splits, independent of the files they came from."""
        return digest_text(*(f"{name}:{rows_digest(rows)}" for name, rows in self.splits.items()))

    @cached_property
    def dev_digests(self) -> frozenset[str]:
        """The digests by which encoders that are trained on dev record this.

        They are the digest of the data and, so that a change of other splits or of ratings does not
        hide it, that of the sentence pairs of dev.
        """
        dev = self.splits.get("dev")
        return frozenset({self.digest, *([] if dev is None else [pairs_digest(dev)])})

    def to_json(self) -> dict[str, Any]:
        """Return the record for manifests: source, digest, settings and counts."""
        return {
            "source": self.source,
            "digest": self.digest,
            "dev_digests": sorted(self.dev_digests),
            "columns": asdict(self.columns),
            "scale": asdict(self.scale),
            "split_seed": self.split_seed,
            "rows": {name: len(rows) for name, rows in self.splits.items()},
            "unrated": {name: int((~rows.rated).sum()) for name, rows in self.splits.items()},
            "notes": list(self.notes),
        }

    def save(self, folder: Path) -> None:
        """Write the rows into a run's folder."""
        with replace_atomically(folder / "rows.parquet") as path:
            save_rows(path, self.splits)


def sample_folder() -> Path:
    """Return the folder of the bundled sample data."""
    return Path(__file__).resolve().parent / "sample"


def read_dataset(
    source: Any,
    columns: Columns = Columns(),
    scale: RatingScale = RatingScale(),
    seed: int = 0,
    extra: Sequence[str] = (),
    reading: ReadOptions | None = None,
) -> Dataset:
    """Read a file, a folder of splits, or rows in memory.

    A single file is split by sentence pair (70 % train, 15 % dev, 15 % test) with a hash of the
    seed and the two sentences, so the order of rows does not matter. In a folder without a dev
    file, 10 % of the training pairs become dev.

    Args:
        source: a file with one of the ``SUFFIXES``; a folder with train, dev (or validation) and
            test files; either of these as ``hf://datasets/...``; or rows in memory: a table of
            pandas, polars, Arrow or Hugging Face datasets, or a sequence of mappings, or a mapping
            from split to one of these. None: the bundled sample.
        columns: names of the columns.
        scale: range of the ratings.
        seed: random seed of the split.
        extra: further columns of text to read.
        reading: how text files are read; None: the caller has no such options.

    Raises:
        UserError: the source does not exist, a column is missing, a file is empty, or a row is
            invalid.
    """
    scale.check()
    opened = open_source(str(sample_folder()) if source is None else source, read=reading)
    splits, notes = read_splits(
        opened,
        lambda files, _: _read_rows(opened, files, columns, scale, extra),
        split_by_pair,
        seed,
        ("sentence pair", "pairs"),
    )
    return Dataset(splits, source_name(source, opened.name), columns, scale, seed, tuple(notes))


@dataclass(frozen=True, slots=True)
class DataOptions:
    """The user's options about data.

    Missing options come from the run or the task; see ``with_defaults``.

    Attributes:
        source: as in ``read_dataset``. None: the run's data, or the bundled sample for a new run.
        columns: names that differ from the default, by fields of ``Columns``.
        scale: values that differ from the default, by fields of ``RatingScale``.
        split_seed: random seed of the split of a single file; None: missing.
        extra: further columns of text to read.
        drop_leaks: whether to drop dialogues that are also in a later split.
        reading: how text files are read.
    """

    source: Any = None
    columns: Mapping[str, str] = field(default_factory=dict)
    scale: Mapping[str, Any] = field(default_factory=dict)
    split_seed: int | None = None
    extra: tuple[str, ...] = ()
    drop_leaks: bool = False
    reading: ReadOptions = field(default_factory=ReadOptions)

    def read(self) -> Dataset:
        """Read and split the rows."""
        columns, scale = Columns(**self.columns), RatingScale(**self.scale)
        seed = self.split_seed or 0
        return read_dataset(self.source, columns, scale, seed, self.extra, self.reading)

    def with_defaults(self, other: DataOptions) -> DataOptions:
        """Return these options, with missing ones filled in from ``other``."""
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
    reading: ReadOptions | None = None,
    *,
    need_ratings: bool = True,
) -> tuple[Rows, str]:
    """Read all rows of a single file, or one split of a folder.

    Args:
        source: as for ``read_dataset``, like the other arguments.
        split: the split of a folder.
        columns: names of the columns.
        scale: range of the ratings.
        extra: further columns of text to read.
        reading: how text files are read; None: the caller has no such options.
        need_ratings: whether a missing column of ratings is an error; otherwise, all rows are
            unrated.

    Returns:
        The rows, and their split: ``split`` if it is given; otherwise test, or dev for a folder
        without test.

    Raises:
        UserError: as ``read_dataset``, or the folder does not have the split.
    """
    scale.check()
    opened = open_source(source, read=reading)
    files, split_name = find_split(opened, split)
    try:
        return _read_rows(opened, files, columns, scale, extra), split_name
    except MissingColumnError:
        if need_ratings:
            raise
        return _read_rows(opened, files, replace(columns, label=""), scale, extra), split_name


def read_splits(
    source: Source,
    read: Callable[[Sequence[str], str], R],
    split: Callable[[R, Mapping[str, float], int], dict[str, R]],
    seed: int,
    unit: tuple[str, str],
) -> tuple[dict[str, R], list[str]]:
    """Read the splits of a source. A single file is split, and so is train if there is no dev file.

    Args:
        source: the source.
        read: reads the files of a split; gets its name, which is empty for a single file.
        split: splits examples by the fraction of each split, and a seed.
        seed: random seed of the split.
        unit: the noun for what is split, and its plural.

    Returns:
        The examples of each split, in the order of ``SPLITS``, and notes on what was split.

    Raises:
        UserError: there is no train file.
    """
    if source.splits is None:
        note = f"one file, split by {unit[0]} with seed {seed}"
        return split(read(source.files, ""), FRACTIONS, seed), [note]
    splits, notes = {name: read(files, name) for name, files in source.splits.items()}, []
    if "train" not in splits:
        raise UserError(f"{source.name} has no train file; it has {', '.join(splits)}.")
    if "dev" not in splits:
        splits |= split(splits["train"], {"train": 1 - DEV_FRACTION, "dev": DEV_FRACTION}, seed)
        share = f"{DEV_FRACTION:.0%} of the training {unit[1]}"
        notes.append(f"no dev file: {share} are dev, chosen with seed {seed}")
    return {name: splits[name] for name in SPLITS if name in splits}, notes


def find_split(source: Source, split: str | None) -> tuple[Sequence[str], str]:
    """Return the files and the name of one split of a source; all files if it has no splits.

    By default, the split is test, or dev if there is no test file.

    Raises:
        UserError: the source does not have the split.
    """
    if source.splits is None:
        return source.files, split or "test"
    split = split or ("test" if "test" in source.splits else "dev")
    if split not in source.splits:
        raise UserError(f"{source.name} has no {split} file; it has {', '.join(source.splits)}.")
    return source.splits[split], split


def _read_rows(
    source: Source,
    files: Sequence[str],
    columns: Columns,
    scale: RatingScale,
    extra: Sequence[str],
) -> Rows:
    names = [columns.sentence1, columns.sentence2, columns.condition, *extra]
    readers: list[tuple[str, Callable[[Any], Any]]] = [(name, cell_text) for name in names]
    readers[:2] = [(name, text_reader(source)) for name in names[:2]]
    readers[2] = (columns.condition, condition_cell)
    if columns.label:
        readers.append((columns.label, scale.to_unit))
    values, numbers = read_columns(source, files, readers)
    ratings = values.pop() if columns.label else [math.nan] * len(values[0])
    first, second, conditions, *extra_values = values
    name = Path(files[0]).name
    return Rows(
        first,
        second,
        conditions,
        rating=np.array(ratings, dtype=np.float64),
        number=np.array(numbers, dtype=np.int64),
        # Shards count as a single file.
        file=name if len(files) == 1 else without_shard(name),
        extra=dict(zip(extra, extra_values, strict=True)),
    )


def read_columns(
    source: Source, files: Sequence[str], columns: Sequence[tuple[str, Callable[[Any], Any]]]
) -> tuple[list[list[Any]], list[int]]:
    """Read columns of files.

    Args:
        source: the source of the files.
        files: names of the files, whose rows are concatenated.
        columns: names of columns, each with a function that converts its cells. The function
            raises a ``ValueError`` with an explanation for an invalid cell.

    Returns:
        The converted values of each column, and the numbers of the rows, from 1, which also count
        rows that are left out.

    Raises:
        UserError: as ``read_records``, or a cell is invalid.
    """
    names = list(dict.fromkeys(name for name, _ in columns))
    rows, numbers = list[list[Any]](), list[int]()
    # Equal texts, such as the sentence of several conditions, share one object to save memory.
    interned: dict[Any, Any] = {}
    before = 0
    for file in files:
        problems = Problems.of(source, file)
        n_rows, left_out = 0, list[int]()
        with ProgressBar(f"reading {problems.file}", visible=False) as bar:
            for n_rows, record in enumerate(bar.count(read_records(source, file, names)), 1):
                row: list[Any] = []
                for name, read in columns:
                    try:
                        value = read(record[name])
                        row.append(
                            interned.setdefault(value, value) if type(value) is str else value
                        )
                    except EmptyTextError as error:
                        if source.options.skip_empty:
                            left_out.append(n_rows)
                            break
                        problems.add(n_rows, f"{name} {error}", empty=True)
                    except ValueError as error:
                        problems.add(n_rows, f"{name} {error}")
                else:
                    rows.append(row)
                    numbers.append(before + n_rows)
        problems.raise_if_any()
        problems.report_left_out(left_out, n_rows)
        before += n_rows
    return [[row[i] for row in rows] for i in range(len(columns))], numbers


#: The formats whose first row is a header.
_WITH_HEADER = (".csv", ".tsv", ".xlsx")
#: The formats whose rows are lines.
_LINES = (".txt",)
#: The largest number of further invalid rows that an error lists.
_MAX_LISTED = 9


class Problems:
    """Collects the invalid rows of a file, so that a single error reports all of them.

    Args:
        file: the file's name.
        noun: name of a row. ``data row`` if the file has a header, which a user may count as a row.
        can_skip: whether the command has the option ``--skip-empty``.
        skips: whether that option is set.

    Attributes:
        left_out: the number of the row of each empty text that ``text`` has left out.
    """

    def __init__(
        self, file: str, noun: str = "row", *, can_skip: bool = False, skips: bool = False
    ) -> None:
        self.file, self.left_out = file, list[int]()
        self._noun, self._can_skip, self._skips = noun, can_skip, skips
        self._first: str | None = None
        self._rows: set[int] = set()
        self._has_empty = False

    @classmethod
    def of(cls, source: Source, file: str) -> Problems:
        """Return a collector for a file of a source."""
        suffix = source.suffix(file)
        noun = "data row" if suffix in _WITH_HEADER else "line" if suffix in _LINES else "row"
        return cls(
            Path(file).name,
            noun,
            can_skip=source.read is not None,
            skips=source.options.skip_empty,
        )

    def add(self, number: int, what: str, *, empty: bool = False) -> None:
        """Record that the row with this number is invalid, and why.

        Args:
            number: number of the row, from 1.
            what: why it is invalid.
            empty: whether it only lacks a text.
        """
        self._first = self._first or f"{self._noun} {number} of {self.file}: {what}"
        self._rows.add(number)
        self._has_empty = self._has_empty or empty

    def text(self, number: int, column: str, value: object) -> str:
        """Return ``value`` as text; if it is empty or not a text, record the row, and return ''."""
        try:
            return cell_text(value)
        except ValueError as error:
            is_empty = isinstance(error, EmptyTextError)
            if is_empty and self._skips:
                self.left_out.append(number)
            else:
                self.add(number, f"{column} {error}", empty=is_empty)
            return ""

    def raise_if_any(self) -> None:
        """Raise a ``UserError`` that names the first invalid row and lists the others, if any."""
        if self._first is None:
            return
        others = sorted(self._rows)[1:]
        listed = list_numbers(others)
        noun = f"{self._noun.removeprefix('data ')}{' is' if len(others) == 1 else 's are'}"
        note = f" ({len(others):,} more {noun} invalid: {listed})" if others else ""
        header = ". The header is not counted" if self._noun == "data row" else ""
        advice = f"Correct or remove {'them' if others else 'it'} and try again"
        if self._has_empty and self._can_skip:
            advice += ", or leave out rows without a text: --skip-empty"
        raise UserError(f"{self._first}{note}{header}. {advice}.")

    def report_left_out(self, numbers: Sequence[int], n_rows: int) -> None:
        """Log which of the rows are left out, as their texts are empty.

        Raises:
            UserError: all of them are.
        """
        if not numbers:
            return
        if len(numbers) == n_rows:
            raise UserError(f"{self.file}: the texts of all {n_rows:,} rows are empty.")
        noun = self._noun + ("" if len(numbers) == 1 else "s")
        log.info(
            f"{self.file}: left out {len(numbers):,} of {n_rows:,}, whose text is empty: {noun} "
            f"{list_numbers(numbers)}"
        )


def list_numbers(numbers: Sequence[int]) -> str:
    """Return the first numbers as text, and whether there are more."""
    shown = ", ".join(f"{number:,}" for number in numbers[:_MAX_LISTED])
    return f"{shown}, …" if len(numbers) > _MAX_LISTED else shown


def several_splits_error(source: Source) -> UserError:
    """Return the error about several splits where a single table is needed."""
    if source.tables:
        names = list(source.tables)
        return UserError(f"data has the splits {', '.join(names)}; give one: data[{names[0]!r}].")
    return UserError(f"{source.name} is a folder; name a single file.")


def text_reader(source: Source) -> Callable[[Any], str]:
    """Return the function that reads cells of texts, which may remove HTML."""
    if not source.options.strip_html:
        return cell_text

    def read(value: object) -> str:
        text = strip_html(cell_text(value))
        if not text:
            raise EmptyTextError("is empty without its HTML")
        return text

    return read


def read_candidates(path: Path, read: ReadOptions | None = None) -> list[str]:
    """Read candidates with ``read_text_file``; repeated ones are kept, and their number is logged.

    Raises:
        UserError: as ``read_text_file``, or there are fewer than two texts.
    """
    texts = read_text_file(path, "candidates", read=read)
    if len(texts) < 2:
        raise UserError(f"{path} contains {len(texts)} candidates; a choice needs at least 2.")
    repeats = len(texts) - len(set(texts))
    if repeats:
        log.info(
            f"{path}: {repeats:,} of {len(texts):,} candidates repeat an earlier one; all are kept"
        )
    return texts


def read_text_file(
    path: Path, what: str, column: str = "text", read: ReadOptions | None = None
) -> list[str]:
    """Read the texts of a file, one per line or those of a table's column, without outer spaces.

    Args:
        path: the file, or ``-`` for standard input.
        what: name of the texts in messages.
        column: the column of a table.
        read: how the file is read, as far as its format has these options; None: the command has
            none.

    Raises:
        UserError: there is no such file, it is not text, or a text is empty.
    """
    path = expand_home(path)
    if str(path) != STDIN and not path.is_file():
        raise UserError(
            f"{path} is not a file. Expected {what}: a .txt file with one per line, or a table "
            f"with a column {column}."
        )
    source = open_collection(str(path), read, lenient=True)
    (texts,), _ = read_columns(source, source.files, [(column, text_reader(source))])
    return [text.strip() for text in texts]


def open_collection(
    data: Any,
    read: ReadOptions | None = None,
    column: str | None = None,
    *,
    lenient: bool = False,
) -> Source:
    """Open a file of texts, a table, standard input, or texts or a table in memory.

    Args:
        data: as for ``open_source``, or a file with one text per line.
        read: how the texts are read; None: the command has no such options.
        column: column of the texts that the user named, so that standard input is a table.
        lenient: as for ``open_source``.

    Raises:
        UserError: as for ``open_source``.
    """
    columns = () if column else TEXT_COLUMNS
    source = open_source(data, (*SUFFIXES, *TEXT_SUFFIXES), read, columns, lenient=lenient)
    return replace(source, splits=None) if len(source.tables) == 1 else source


class HasColumns(Protocol):
    """A table of texts, or plain texts."""

    def has_column(self, name: str, /) -> bool:
        """Return whether there is a column of a name."""


def text_column(source: HasColumns, requested: str | None = None) -> str:
    """Return the name of the column of texts: the requested one, else text, else sentence."""
    if requested is not None:
        return requested
    first, second = TEXT_COLUMNS
    if not source.has_column(first):
        return second if source.has_column(second) else first
    if source.has_column(second):
        log.info(f"texts: the column {first}; to use the column {second}: --text {second}")
    return first


def resolve_conditions(
    source: HasColumns, condition: str | None, condition_text: str | None = None
) -> tuple[str | None, str | None]:
    """Decide whether conditions come from a column or are a single text for all rows.

    Args:
        source: the table.
        condition: name of a column if there is such a column, otherwise the text. Which of the two
            was chosen is logged.
        condition_text: the text.

    Returns:
        The name of the column, or None; and the text, or None. If neither argument is given, the
        column is called condition.

    Raises:
        UserError: both arguments are given, or the text is empty.
    """
    if condition is not None and condition_text is not None:
        raise UserError("both --condition and --condition-text are given; use only one of them.")
    if condition is None and condition_text is None:
        return "condition", None
    if condition is not None and source.has_column(condition):
        log.info(f"conditions: the column {condition!r}")
        return condition, None
    text = condition if condition_text is None else condition_text
    check_text(text, "--condition-text", "Give a text.")
    if condition is not None:
        log.info(f"condition: {condition!r} for every row, as there is no column of that name")
    return None, text


def is_missing(value: Any) -> bool:
    """Return whether a cell of a table is missing: None, NaN, NaT, pandas' NA, or blank."""
    return is_null(value) or (isinstance(value, str) and not value.strip())


def label_text(cell: object) -> str:
    """Return the text of a label; empty if there is none."""
    return "" if is_missing(cell) else str(cell).strip()


@dataclass(frozen=True, slots=True)
class Collection:
    """Texts with further columns.

    Attributes:
        texts: the texts.
        file: name of their file in messages.
        columns: further columns by name, with unconverted values.
        conditions: columns of conditions by name.
        has_types: whether the source has types, so that not all values of columns are texts.
        numbers: number of each row in the source, from 1.
    """

    texts: list[str]
    file: str
    columns: Mapping[str, list[Any]]
    conditions: Mapping[str | None, list[str]]
    has_types: bool
    numbers: Sequence[int]


def read_collection(
    data: Any,
    text: str | None = None,
    others: Sequence[str] = (),
    read: ReadOptions | None = None,
    conditions: Sequence[str] = (),
) -> Collection:
    """Read texts from a file or from memory, with further columns.

    Args:
        data: as for ``open_collection``.
        text: the column of a table that contains the texts; None: see ``text_column``.
        others: further columns of the table.
        read: how the texts are read; None: the command has no such options.
        conditions: columns of conditions, which must not be empty.

    Raises:
        UserError: as ``read_text_file``, or ``data`` is a folder, or further columns are requested
            from a text file.
        MissingColumnError: the table lacks a column.
    """
    source = open_collection(data, read, text)
    if source.splits is not None:
        raise several_splits_error(source)
    column = text_column(source, text)
    if not source.has_columns:
        for name in (*others, *conditions, column):
            if name not in TEXT_COLUMNS or name in others:
                what = "a list of texts" if source.tables else "read as one text per line"
                raise UserError(
                    f"{source.name} is {what}, so it has no column {name!r}. Name a table, or one "
                    "condition for every row: --condition TEXT."
                )
    readers = [(column, text_reader(source)), *((name, cell_text) for name in conditions)]
    readers += [(name, check_cell) for name in others]
    try:
        (texts, *values), numbers = read_columns(source, source.files, readers)
    except MissingColumnError as error:
        advice = "Name the column of the texts: --text COL."
        if error.column in conditions:
            advice = "Name the conditions: --condition COL_OR_TEXT."
        elif error.column != column:
            advice = "Name one of its columns."
        raise MissingColumnError(error.finding, advice, error.column) from error
    n_conditions, file = len(conditions), source.files[0]
    return Collection(
        texts,
        Path(file).name,
        columns=dict(zip(others, values[n_conditions:], strict=True)),
        conditions=dict(zip(conditions, values[:n_conditions], strict=True)),
        has_types=source.suffix(file) not in (".csv", ".tsv"),
        numbers=numbers,
    )


#: Elements within a line: their tags do not divide words.
_INLINE = frozenset(
    re.findall(
        r"\w+",
        "a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd mark nobr q s samp "
        "small span strike strong sub sup time tt u var wbr",
    )
)
#: Other tags without a prefix, such as ``<name>``, may be texts.
_BLOCKS = re.findall(
    r"\w+",
    "address applet area article aside audio base blockquote body br button canvas caption center "
    "col colgroup datalist dd details dialog dir div dl dt embed fieldset figcaption figure footer "
    "form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html iframe img input label "
    "legend li link main map menu meta nav noframes noscript object ol optgroup option output p "
    "param picture pre progress script section select slot source style summary svg table tbody td "
    "template textarea tfoot th thead title tr track ul video",
)
#: Attributes without a value; others need one, so that ``a<b and b>c`` is no tag.
_FLAGS = "checked|controls|compact|disabled|hidden|noshade|nowrap|open|readonly|required|selected"
_ATTRIBUTE = rf"""\s+(?:[^\s"'<>/=]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'=<>`]+)|{_FLAGS})"""
_NAME = rf"(?P<name>{'|'.join(sorted((*_INLINE, *_BLOCKS)))}|[a-z]\w*[:-][\w:.-]*)"
_TAG = re.compile(
    rf"</?{_NAME}(?:{_ATTRIBUTE})*\s*/?>",
    re.IGNORECASE,
)
#: Parts whose content is not text either.
_HIDDEN = re.compile(
    r"<!--.*?(?:-->|\Z)|<!(?:doctype|\[)[^>]*>|<\?xml[^>]*>"
    r"|<(script|style)\b[^>]*>.*?(?:</\1\s*>|\Z)",
    re.IGNORECASE | re.DOTALL,
)


def strip_html(text: str) -> str:
    """Return a text without HTML, in a single line.

    Tags, comments, scripts and styles are removed, and entities become characters. ``a < b`` and
    ``<name>`` are not HTML, and stay.
    """
    text = _TAG.sub(
        lambda tag: "" if tag["name"].lower() in _INLINE else " ", _HIDDEN.sub(" ", text)
    )
    return " ".join(html.unescape(text).split())
