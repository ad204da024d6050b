"""Records as dataclasses, read from JSON and TOML with one-line errors, and written atomically."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from llmcond.base.errors import LlmcondError, UserError, did_you_mean, nearest, shortened_repr
from llmcond.base.files import as_json, check_format, fields_as_json, read_json, write_json
from llmcond.base.options import LIMITS
from llmcond.base.package import bundled_folder, bundled_names
from llmcond.base.text import read_text_file

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


#: ``__pydantic_config__`` of every dataclass that is read from a file.
STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: the file does not exist, or is not TOML in UTF-8.
    """
    try:
        return tomllib.loads(read_text_file(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.") from error
    except (OSError, RecursionError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}.") from error


def build(cls: type[T], values: dict[str, Any], source: str) -> T:
    """Check values read from TOML or JSON, and return them as an instance of a dataclass.

    Args:
        cls: dataclass whose ``__pydantic_config__`` is ``STRICT``.
        values: values of its fields.
        source: name of the source, for messages.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    from pydantic import ValidationError

    try:
        text = json.dumps(values)
    except (TypeError, RecursionError) as error:  # TOML has dates, which no setting of ours uses.
        raise UserError(f"{source}: {error}.") from error
    try:
        result: T = type_adapter(cls).validate_json(text)
        return result
    except ValidationError as error:
        problems = [
            describe_validation_error(problem, _legal_keys(cls, problem["loc"][:-1]))
            for problem in error.errors()
        ]
        raise UserError(f"{source}: {'; '.join(problems)}") from error


def _create_type_adapter(schema: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


#: Returns pydantic's checks of a type, which take milliseconds to create.
type_adapter: Callable[[Any], Any] = lru_cache(maxsize=128)(_create_type_adapter)


#: Names of limits in pydantic's errors, with their wording in messages.
_LIMITS = {**LIMITS, "expected": "one of"}


def describe_validation_error(problem: Mapping[str, Any], legal_keys: Sequence[str]) -> str:
    """Return one of pydantic's ``errors()`` as a sentence.

    Args:
        problem: the error.
        legal_keys: legal keys at the place of the error; for an unknown key, the sentence suggests
            the nearest ones.
    """
    location = [str(part) for part in problem["loc"]]
    key = shortened_repr(".".join(location))
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should", "it should")
    for name, limit in problem.get("ctx", {}).items():
        if name in _LIMITS:
            shown = limit if isinstance(limit, str) else f"{limit:,}"
            message = f"it must be {_LIMITS[name]} {shown}"
    message = message[:1].lower() + message[1:]
    if not location:  # A check of several settings, which names them in its message.
        return f"{message}."
    known = f"Legal keys: {', '.join(legal_keys)}." if legal_keys else ""
    if problem["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        hint = did_you_mean(location[-1], legal_keys)
        return " ".join(filter(None, (f"unknown key {key}.", hint, known)))
    if problem["type"] in {"missing", "missing_argument"}:
        return f"the key {key} is missing. {known}".rstrip()
    return f"{key} is {shortened_repr(problem['input'])}: {message}."


def _legal_keys(cls: Any, location: Sequence[int | str]) -> list[str]:
    for part in location:
        cls = get_type_hints(cls).get(str(part)) if dataclasses.is_dataclass(cls) else None
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def resolve_toml(name_or_file: str, kind: str, task: str | None = None) -> Path:
    """Return the path of a TOML file that is given by a bundled name or a path.

    Args:
        name_or_file: a bundled name, such as ``mlp``, or a path, such as ``my/head.toml``.
        kind: ``prompts`` or ``heads``.
        task: task whose bundled files are searched if it has any.

    Raises:
        UserError: there is no such file or bundled name; the message suggests the nearest names.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UserError(f"the {kind[:-1]} file {name_or_file} does not exist.")
        return Path(path.parent, f"{check_name(path.stem, f'the {kind[:-1]} file')}.toml")
    known = bundled_names(kind, task)
    if name_or_file not in known:
        raise UserError(
            f"unknown {kind[:-1]} {name_or_file!r}. {nearest(name_or_file, known)} `llmcond "
            f"{kind}` lists the bundled ones; the path of any other file must end in .toml."
        )
    return bundled_folder(kind, task) / f"{name_or_file}.toml"


def check_name(name: str, what: str, joiners: str = "") -> str:
    """Check that a name is valid as a folder name, or as part of one, on any system.

    Args:
        name: the name.
        what: description of the named object, for the message.
        joiners: additional legal characters, which join several names.

    Returns:
        The name.

    Raises:
        UserError: the name has other characters.
    """
    legal = f"._=-{joiners}"
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9{re.escape(legal)}]*", name):
        raise UserError(
            f"{what} cannot be called {name!r}. Use letters, digits and {' '.join(legal)}, "
            "beginning with a letter or digit."
        )
    return name
