"""Records as dataclasses, read from JSON and TOML with one-line errors, and written atomically."""

from __future__ import annotations

import dataclasses
import json
import operator
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from llmcond.base.errors import LlmcondError, UserError, did_you_mean, nearest, shortened_repr
from llmcond.base.files import as_json, check_format, fields_as_json, read_json, write_json
from llmcond.base.options import LIMITS
from llmcond.base.package import bundled_folder, bundled_names
from llmcond.base.text import read_text_file

__all__ = ["as_json", "check_record", "fields_as_json", "read_record", "write_record"]

T = TypeVar("T")


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
        schema: dataclass of the record.
        source: name of the record, for messages.
        remedy: end of messages, which says what to do.

    Returns:
        An instance of the dataclass, without the additional keys.

    Raises:
        LlmcondError: a key is missing, or its value has the wrong type or is out of range.
    """
    try:
        record: T = _read_object(values, schema, "", strict=False)
    except ValueError as error:
        raise LlmcondError(f"{source} was damaged: {error} {remedy}".rstrip()) from error
    return record


def write_record(path: Path, value: object) -> None:
    """Write a value as indented JSON, atomically; ``as_json`` describes its form."""
    write_json(path, as_json(value))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: the file does not exist, or is not TOML in UTF-8.
    """
    try:
        return tomllib.loads(read_text_file(path))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.") from error
    except (OSError, RecursionError, ValueError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}.") from error


def build(cls: type[T], values: Mapping[str, Any], source: str) -> T:
    """Check values read from TOML or JSON, and return them as an instance of a dataclass.

    Args:
        cls: the dataclass.
        values: values of its fields.
        source: name of the source, for messages.

    Raises:
        UserError: a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    try:
        result: T = _read_object(values, cls, "", strict=True)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error
    try:
        json.dumps(values)
    except (TypeError, RecursionError) as error:  # a date of TOML where any value is legal
        raise UserError(f"{source}: {error}.") from error
    return result


#: The values that a type accepts, and their name in messages.
_TYPES: Mapping[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a finite number"),
    str: (str, "a text"),
    **dict.fromkeys((dict, Mapping), (Mapping, "an object")),
    **dict.fromkeys((list, tuple, Sequence), ((list, tuple), "a list")),
}

#: The types of a dataclass's fields; evaluating them takes longer than a check.
_field_types: Any = cache(partial(get_type_hints, include_extras=True))


def _read_object(values: Any, cls: type[Any], key: str, *, strict: bool) -> Any:
    """Return a JSON object as an instance of a dataclass.

    Args:
        values: the object.
        cls: the dataclass.
        key: place of the object, for messages; empty for the whole record.
        strict: whether all keys must be fields.

    Raises:
        ValueError: a value is invalid; the message is a sentence.
    """
    if not isinstance(values, Mapping):
        raise _invalid(key, values, "it should be an object")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    known = f" Legal keys: {', '.join(fields)}." if strict else ""
    arguments, prefix = {}, f"{key}." if key else ""
    for name in values:
        if strict and name not in fields:
            hint = did_you_mean(name, fields)
            unknown = f"unknown key {shortened_repr(prefix + name)}. {hint}".rstrip()
            raise ValueError(f"{unknown}{known}")
    for name, field in fields.items():
        if name in values:
            hint = _field_types(cls)[name]
            arguments[name] = _read(values[name], hint, f"{prefix}{name}", strict=strict)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"the key {shortened_repr(prefix + name)} is missing.{known}")
    try:
        return cls(**arguments)
    except ValueError as error:  # A check of several fields, which names them in its message.
        raise ValueError(f"{str(error)[:1].lower()}{str(error)[1:]}.") from error


def _read(value: Any, hint: Any, key: str, *, strict: bool) -> Any:
    """Return a JSON value as the type of a field; the other arguments are as above."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [kind for kind in inner if kind is not NoneType]
        for kind in kinds[:-1]:
            with suppress(ValueError):
                return _read(value, kind, key, strict=strict)
        if value is not None or NoneType not in inner:
            return _read(value, kinds[-1], key, strict=strict)
    elif origin is Annotated:
        value = _read(value, inner[0], key, strict=strict)
        _check_limits(value, inner[1:], key)
    elif dataclasses.is_dataclass(hint):
        value = _read_object(value, cast("type", hint), key, strict=strict)
    elif origin is Literal:
        if not isinstance(value, str) or value not in inner:
            legal = " or ".join(", ".join(map(repr, inner)).rsplit(", ", 1))
            raise _invalid(key, value, f"it should be {legal}")
    elif hint is not Any:
        return _read_value(value, hint, key, strict=strict)
    return value


def _read_value(value: Any, hint: Any, key: str, *, strict: bool) -> Any:
    """Return a text, a number, a truth value, a list or an object without fields."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind not in _TYPES:  # in a user's own settings
        raise _invalid(key, value, f"a file cannot have values of the type {hint}")
    accepted, expected = _TYPES[kind]
    largest = sys.float_info.max
    if (
        not isinstance(value, accepted)
        or isinstance(value, bool) != (kind is bool)
        or (kind is float and not -largest <= value <= largest)
    ):
        raise _invalid(key, value, f"it should be {expected}")
    if isinstance(value, Mapping):
        of_key, of_item = inner or (Any, Any)
        return {
            _read(name, of_key, key, strict=strict): _read(
                item, of_item, f"{key}.{name}", strict=strict
            )
            for name, item in value.items()
        }
    if not isinstance(value, list | tuple):
        return float(value) if kind is float else value
    kinds = inner if kind is tuple and inner[-1] is not Ellipsis else [*inner[:1]] * len(value)
    if len(kinds) != len(value) and inner:
        raise _invalid(key, value, f"it should have {len(kinds)} values")
    items = [
        _read(item, kinds[number] if inner else Any, f"{key}.{number}", strict=strict)
        for number, item in enumerate(value)
    ]
    return tuple(items) if kind is tuple else items


def _check_limits(value: Any, limits: Sequence[Any], key: str) -> None:
    for limit in limits if value is not None else ():
        for name, words in LIMITS.items():
            bound = getattr(limit, name, None)
            if bound is not None and not getattr(operator, name)(value, bound):
                raise _invalid(key, value, f"it must be {words} {bound:,}")
        if hasattr(limit, "min_length") and len(value) < limit.min_length:
            raise _invalid(key, value, f"it must have {limit.min_length} or more values")
        if hasattr(limit, "multiple_of") and value % limit.multiple_of:
            raise _invalid(key, value, f"it must be a multiple of {limit.multiple_of}")


def _invalid(key: str, value: object, problem: str) -> ValueError:
    return ValueError(f"{shortened_repr(key)} is {shortened_repr(value)}: {problem}.")


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


def check_named_once(what: str, names: Sequence[str]) -> None:
    """Raise a ``UserError`` if two named things, such as prompts, have the same name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(
                f"the {what} {name} was given {count} times. Give it once; rename files that have "
                "the same name in different folders."
            )


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
