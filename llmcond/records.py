"""JSON records of dataclasses: reading with one-line errors, and atomic writing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from llmcond.config import describe_validation_error, type_adapter
from llmcond.errors import LlmcondError
from llmcond.files import as_json, check_format, fields_as_json, read_json, write_json

__all__ = ["RECORD", "as_json", "check_record", "fields_as_json", "read_record", "write_record"]

T = TypeVar("T")

#: ``__pydantic_config__`` of every dataclass that declares the required keys of a record.
RECORD: dict[str, Any] = {"extra": "ignore", "strict": True, "allow_inf_nan": False}


def read_record(path: Path, schema: type[T], remedy: str = "", version: int = 0) -> T:
    """Read and check a record; ``check_record`` describes the arguments.

    Args:
        path: the JSON file.
        schema: dataclass of the record.
        remedy: end of messages, which says what to do.
        version: the ``format`` that is read; 0: the record has none.

    Raises:
        UserError: the file does not exist, is not JSON, or a newer version wrote it.
        LlmcondError: the record is damaged.
    """
    values = read_json(path)
    if version:
        check_format(values, version, str(path))
    return check_record(values, schema, str(path), remedy)


def check_record(values: Mapping[str, Any], schema: type[T], source: str, remedy: str = "") -> T:
    """Check that a record has all fields of a dataclass, with values of their types.

    Args:
        values: contents of the JSON file, which may have additional keys.
        schema: dataclass whose ``__pydantic_config__`` is ``RECORD``.
        source: name of the record, for messages.
        remedy: end of messages, which says what to do.

    Returns:
        An instance of the dataclass, without the additional keys.

    Raises:
        LlmcondError: a key is missing, or its value has the wrong type or is out of range.
    """
    from pydantic import ValidationError

    try:
        record: T = type_adapter(schema).validate_json(json.dumps(values))
        return record
    except ValidationError as error:
        problem = describe_validation_error(error.errors()[0], ())
        raise LlmcondError(f"{source} was damaged: {problem} {remedy}".rstrip()) from error


def write_record(path: Path, value: object) -> None:
    """Write a value as indented JSON, atomically; ``as_json`` describes its form."""
    write_json(path, as_json(value))
