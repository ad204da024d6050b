"""Types of columns that come from a file of texts: numbers and truth values are read as such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: What all values of a column look like, and its type. Leading zeros and more digits than a number
#: has make it a text: these are keys, not amounts.
_TYPES = (
    (r"^-?(0|[1-9]\d{0,17})$", pa.int64()),
    (r"^-?(0|[1-9]\d{0,15})(\.\d+)?(e[-+]?\d{1,2})?$", pa.float64()),
    (r"^(true|false)$", pa.bool_()),
)


def infer_types(
    columns: Mapping[str, Sequence[str]], schema: pa.Schema | None = None
) -> dict[str, Any]:
    """Return columns of texts as Arrow arrays of the type that all their values have.

    Empty values are missing where the others are numbers or truth values. Columns that ``schema``,
    an index's, has as texts stay texts; others that it has are read as its types where they are
    added.
    """
    known = {} if schema is None else {field.name: field.type for field in schema}
    return {
        name: _infer(pa.array(texts, pa.string()), known.get(name))
        for name, texts in columns.items()
    }


def _infer(texts: Any, known: Any) -> Any:
    if known is not None and pa.types.is_string(known):
        return texts
    trimmed = pc.utf8_trim_whitespace(texts)
    values = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
    if known is not None:
        return values
    for pattern, kind in _TYPES if values.null_count < len(values) else ():
        if pc.all(pc.match_substring_regex(values, pattern, ignore_case=True)).as_py():
            return values.cast(kind)
    return texts
