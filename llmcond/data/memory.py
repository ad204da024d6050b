"""Texts and tables in memory: lists, NumPy, pandas, polars, Arrow and Hugging Face objects.

``open_table`` is the one entrance of all objects. Whatever implements Arrow's PyCapsule protocol
is read through pyarrow. pandas is not, because its columns may have values of several types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcond.errors import UserError, first_line, format_list, shortened_repr

#: Name in messages of rows that do not come from a file.
IN_MEMORY = "rows in memory"
#: Description of the objects that can be read, for help texts and messages.
OBJECTS = (
    "a list of texts, a table or column of pandas, polars, Arrow or Hugging Face datasets, columns "
    "by name, or a list of dicts"
)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTable:
    """A table in memory, whose columns are converted when they are read.

    Attributes:
        names: names of the columns, which may repeat; None: a list of texts without a name.
        length: number of rows.
        values: function that returns the values of a column, by its position; missing ones are
            None or NaN.
    """

    names: Sequence[str] | None
    length: int
    values: Callable[[int], Sequence[Any]]

    def __len__(self) -> int:
        return self.length


def open_table(data: Any) -> MemoryTable:
    """Return texts or a table in memory, of any kind.

    Raises:
        UserError: the object is of another kind, or cannot be read.
    """
    if isinstance(data, MemoryTable):
        return data
    if isinstance(data, Mapping):
        return _open_mapping(data)
    if hasattr(data, "collect") and hasattr(data, "collect_schema"):  # polars' LazyFrame
        data = data.collect()
    if hasattr(data, "with_format"):  # Hugging Face datasets, whose rows may be a selection
        is_sized = hasattr(data, "__len__")
        data = data.with_format("arrow")[:] if is_sized else list(data.with_format(None))
    if hasattr(data, "isna") and hasattr(data, "columns"):
        return _open_pandas(data)
    table: Any = _import_arrow(data) if _is_arrow(data) else None
    if hasattr(table, "column_names"):
        names = list(table.column_names)
        return MemoryTable(names, len(table), lambda i: _arrow_values(table.column(i)))
    values = column_values(data) if table is None else _arrow_values(table)
    if values and isinstance(values[0], Mapping):
        return _open_rows(values)
    return MemoryTable(None, len(values), lambda _: values)


def splits_of(data: Any) -> Mapping[Any, Any] | None:
    """Return data if it is a mapping from the names of splits to tables; None otherwise."""
    is_split = isinstance(data, Mapping) and any(map(_is_table, data.values()))
    return data if is_split else None


def list_texts(values: Any, name: str = "texts") -> list[Any]:
    """Return the items of a list or a column, or the texts of a table's column text or sentence.

    Args:
        values: the items, in any form that ``open_table`` reads.
        name: name of the items in messages.

    Raises:
        UserError: as ``open_table``, or a table has neither column.
    """
    if isinstance(values, str):
        raise UserError(f"{name} is a single string; give a list of texts.")
    table = open_table(values)
    if table.names is None:
        return list(table.values(0))
    for column in ("text", "sentence"):
        if table.names.count(column) == 1:
            return list(table.values(list(table.names).index(column)))
    raise UserError(
        f"a whole {type(values).__name__} was given as {name}, without a column text. Give one of "
        f"its columns: {format_list(list(table.names), 5)}."
    )


def column_values(column: Any) -> list[Any]:
    """Return the values of a list, column or array; missing ones are None or NaN.

    Raises:
        UserError: the object has no order or several dimensions, or is a single value.
    """
    if isinstance(column, set | frozenset):
        raise UserError("data is a set, which has no order; give a list.")
    is_single = isinstance(column, str | bytes | bytearray | Mapping)
    if is_single or not (isinstance(column, Iterable) or hasattr(column, "__getitem__")):
        raise UserError(f"data is {_describe(column)}; expected a path, {OBJECTS}.")
    if getattr(column, "ndim", 1) != 1:
        raise UserError(
            f"data is an array of the shape {tuple(column.shape)}; expected one dimension."
        )
    # NumPy would return nanoseconds as whole numbers, and pandas objects of its own.
    if getattr(getattr(column, "dtype", None), "kind", "O") in "mM":
        import pyarrow as pa

        return _arrow_values(pa.array(column))
    if hasattr(column, "isna"):  # pandas, which has several values for missing cells
        cells: Any = zip(column.astype(object), column.isna(), strict=True)
        return [None if is_missing else value for value, is_missing in cells]
    if _is_arrow(column):
        return _arrow_values(_import_arrow(column))
    if hasattr(column, "dtype") and hasattr(column, "tolist"):  # NumPy
        return list(column.tolist())
    return list(column)


def to_python(column: Any) -> list[Any]:
    """Return the values of an Arrow array as Python objects.

    Nanoseconds are cut to microseconds, which is all that Python's objects can hold.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if getattr(kind, "unit", None) == "ns":
        target = (
            pa.timestamp("us", kind.tz)
            if pa.types.is_timestamp(kind)
            else pa.duration("us")
            if pa.types.is_duration(kind)
            else pa.time64("us")
        )
        column = pc.cast(column, target, safe=False)
    return list(column.to_pylist())


def _open_mapping(data: Mapping[Any, Any]) -> MemoryTable:
    splits = splits_of(data)
    if splits is not None and len(splits) == 1:
        return open_table(next(iter(splits.values())))
    if splits is not None:
        first = next(iter(splits))
        raise UserError(
            f"data has the splits {format_list(list(splits))}; give one of them, such as "
            f"data[{first!r}]."
        )
    names, columns = list(map(str, data)), list(map(column_values, data.values()))
    lengths = sorted(set(map(len, columns)))
    if len(lengths) > 1:
        raise UserError(f"the columns in memory have different lengths: {lengths} rows.")
    return MemoryTable(names, lengths[0] if lengths else 0, columns.__getitem__)


def _open_pandas(frame: Any) -> MemoryTable:
    if frame.columns.nlevels > 1:
        raise UserError(
            "the table has columns on several levels (MultiIndex). Give each column one name, such "
            'as: table.columns = ["_".join(map(str, names)) for names in table.columns]'
        )
    names = list(map(str, frame.columns))
    return MemoryTable(names, len(frame), lambda i: column_values(frame.iloc[:, i]))


def _open_rows(rows: Sequence[Any]) -> MemoryTable:
    names: dict[str, Any] = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError(
                f"row {number} of {IN_MEMORY} is {_describe(row)}; expected a dict, as row 1."
            )
        for name in row:
            names.setdefault(str(name), name)
    keys = list(names.values())
    return MemoryTable(list(names), len(rows), lambda i: [row.get(keys[i]) for row in rows])


def _is_arrow(data: Any) -> bool:
    has_protocol = hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")
    return has_protocol and not hasattr(data, "isna")  # pandas


def _import_arrow(data: Any) -> Any:
    """Return a table or a chunked array of any object that implements Arrow's protocol."""
    import pyarrow as pa

    try:
        if hasattr(data, "__arrow_c_stream__"):
            try:
                return pa.RecordBatchReader.from_stream(data).read_all()
            except pa.ArrowInvalid:  # a column
                return pa.chunked_array(data)
        array = pa.array(data)
        if pa.types.is_struct(array.type):
            return pa.Table.from_batches([pa.RecordBatch.from_struct_array(array)])
        return pa.chunked_array([array])
    except Exception as error:  # the errors of any library
        raise UserError(f"{_describe(data)} cannot be read: {first_line(error)}") from error


def _arrow_values(column: Any) -> list[Any]:
    import pyarrow as pa

    try:
        return to_python(column)
    except MemoryError:
        raise
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise UserError(
            f"{IN_MEMORY} are damaged, or contain values that cannot be read: {first_line(error)}"
        ) from error


def _is_table(data: Any) -> bool:
    return hasattr(data, "columns") or hasattr(data, "column_names")


def _describe(value: object) -> str:
    shown = f" {shortened_repr(value, 40)}" if isinstance(value, str | bytes | int | float) else ""
    return f"the {type(value).__name__}{shown}"
