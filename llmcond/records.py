"""Reading and checking of llmcond's JSON records, with one-line errors for damaged ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcond.config import describe_validation_error, type_adapter
from llmcond.errors import LlmcondError
from llmcond.files import read_json

#: ``__pydantic_config__`` of every dataclass that declares the required keys of a record.
RECORD: dict[str, Any] = {"extra": "ignore", "strict": True, "allow_inf_nan": False}


def read_record(path: Path, schema: type[Any], remedy: str = "") -> dict[str, Any]:
    """Read and check a record; ``check_record`` describes the arguments.

    Raises:
        UserError: the file does not exist, or is not JSON.
        LlmcondError: the record is damaged.
    """
    values = read_json(path)
    check_record(values, schema, str(path), remedy)
    return values


def check_record(
    values: Mapping[str, Any], schema: type[Any], source: str, remedy: str = ""
) -> None:
    """Check that a record has all fields of a dataclass, with values of their types.

    Args:
        values: contents of the JSON file, which may have additional keys.
        schema: dataclass whose ``__pydantic_config__`` is ``RECORD``.
        source: name of the record, for messages.
        remedy: end of messages, which says what to do.

    Raises:
        LlmcondError: a key is missing, or its value has the wrong type or is out of range.
    """
    from pydantic import ValidationError

    try:
        type_adapter(schema).validate_json(json.dumps(values))
    except ValidationError as error:
        problem = describe_validation_error(error.errors()[0], ())
        raise LlmcondError(f"{source} was damaged: {problem} {remedy}".rstrip()) from error
