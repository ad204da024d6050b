"""The Arrow columns of an index: from Python values, and from the strings of files such as CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from llmcond.data.rows import to_arrow
from llmcond.errors import UserError, shortened_repr

#: Pattern that all values of a column must match, and the type that the column then gets. Values
#: with leading zeros, or with more digits than the type can hold, are keys rather than amounts:
#: such a column remains a text column.
_TYPES = (
    (r"^-?(0|[1-9]\d{0,17})$", pa.int64()),
    (r"^-?(0|[1-9]\d{0,15})(\.\d+)?(e[-+]?\d{1,2})?$", pa.float64()),
    (r"^(true|false)$", pa.bool_()),
)


def infer_types(
    columns: Mapping[str, Sequence[str]], schema: pa.Schema | None = None
) -> dict[str, Any]:
    """Convert columns of strings to Arrow arrays of the type that all values of a column share.

    An empty value becomes null in a column of numbers or Boolean values.

    Args:
        columns: the strings of each column, by column name.
        schema: the schema of an index that the columns will be added to, if there is one. Columns
            that it declares as text remain text. Its other columns are returned as strings, because
            they are cast to the index's types when the rows are added.

    Raises:
        UserError: as ``to_column``.
    """
    known_types = {} if schema is None else {field.name: field.type for field in schema}
    return {
        name: _infer_column(to_column(name, texts), known_types.get(name))
        for name, texts in columns.items()
    }


def to_column(name: str, values: Sequence[Any]) -> Any:
    """Return the values of a column as an Arrow array; a column without values is one of texts.

    Raises:
        UserError: a text contains half of a surrogate pair.
    """
    try:
        column = to_arrow(values)
    except UnicodeEncodeError:
        raise UserError(
            f"the column {shortened_repr(name)} has a text that contains half of a surrogate pair, "
            "which is not a valid character. Correct it."
        ) from None
    return column.cast(pa.string()) if pa.types.is_null(column.type) else column


def _infer_column(texts: Any, known_type: Any) -> Any:
    if known_type is not None and pa.types.is_string(known_type):
        return texts
    trimmed = pc.utf8_trim_whitespace(texts)
    values = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
    if known_type is not None:
        return values
    for pattern, arrow_type in _TYPES if values.null_count < len(values) else ():
        if pc.all(pc.match_substring_regex(values, pattern, ignore_case=True)).as_py():
            return values.cast(arrow_type)
    return texts
