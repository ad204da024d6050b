"""Records of ours in JSON, checked as they are read: a damaged one is an error of one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmcond.config import explain
from llmcond.errors import LlmcondError
from llmcond.files import read_json

#: ``__pydantic_config__`` of every dataclass that says what a record holds at least.
RECORD: dict[str, Any] = {"extra": "ignore", "strict": True, "allow_inf_nan": False}


def read_record(path: Path, schema: type[Any], remedy: str = "") -> dict[str, Any]:
    """Read a record; see :func:`check_record`.

    Raises:
        UserError: the file is missing, or is no JSON.
        LlmcondError: it holds something else.
    """
    values = read_json(path)
    check_record(values, schema, str(path), remedy)
    return values


def check_record(
    values: Mapping[str, Any], schema: type[Any], source: str, remedy: str = ""
) -> None:
    """Check what a JSON file held: all fields of a dataclass, of their types; others may be more.

    Its ``__pydantic_config__`` is :data:`RECORD`. Errors name ``source``, and end in ``remedy``.

    Raises:
        LlmcondError: a key is missing, or its value is of another type or out of range.
    """
    from pydantic import ValidationError

    try:
        _adapter(schema).validate_json(json.dumps(values))
    except ValidationError as error:
        problem = explain(error.errors()[0], ())
        raise LlmcondError(f"{source} was damaged: {problem} {remedy}".rstrip()) from error


def _made(schema: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


_adapter: Callable[[Any], Any] = cache(_made)
