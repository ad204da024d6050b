"""Strict TOML: a file becomes a frozen dataclass, or an error that lists the legal names."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from llmcond.bundled import bundled, bundled_names
from llmcond.errors import UserError, brief, did_you_mean, nearest
from llmcond.options import LIMITS

T = TypeVar("T")

#: ``__pydantic_config__`` of every dataclass that is read from a file.
STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: the file is missing, not UTF-8 or not TOML.
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}.") from error
    except (OSError, RecursionError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} cannot be read as TOML: {error}.") from error


def build(cls: type[T], values: dict[str, Any], source: str) -> T:
    """Check ``values``, as TOML or JSON gives them, and return an instance of a dataclass.

    Its ``__pydantic_config__`` is :data:`STRICT`. Errors name ``source``.

    Raises:
        UserError: an unknown key, a missing key, or a value of the wrong type or range.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        text = json.dumps(values)
    except (TypeError, RecursionError) as error:  # TOML has dates, which no setting of ours uses
        raise UserError(f"{source}: {error}.") from error
    try:
        return TypeAdapter(cls).validate_json(text)
    except ValidationError as error:
        problems = [
            explain(problem, _legal_keys(cls, problem["loc"][:-1])) for problem in error.errors()
        ]
        raise UserError(f"{source}: {'; '.join(problems)}") from error


#: What pydantic calls a limit -> how messages say it.
_LIMITS = {**LIMITS, "expected": "one of"}


def explain(problem: Mapping[str, Any], legal: Sequence[str]) -> str:
    """Return one of the ``errors()`` of pydantic as a sentence.

    ``legal`` are the keys that may stand where the problem is; of an unknown key the sentence names
    the nearest of them.
    """
    location = [str(part) for part in problem["loc"]]
    key = brief(".".join(location))
    message = str(problem["msg"]).removeprefix("Value error, ").replace("Input should", "it should")
    for name, limit in problem.get("ctx", {}).items():
        if name in _LIMITS:
            shown = limit if isinstance(limit, str) else f"{limit:,}"
            message = f"it must be {_LIMITS[name]} {shown}"
    message = message[:1].lower() + message[1:]
    if not location:  # a check of several settings together; it names them itself
        return f"{message}."
    known = f"Legal keys: {', '.join(legal)}." if legal else ""
    if problem["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        hint = did_you_mean(location[-1], legal)
        return " ".join(filter(None, (f"unknown key {key}.", hint, known)))
    if problem["type"] in {"missing", "missing_argument"}:
        return f"the key {key} is missing. {known}".rstrip()
    return f"{key} is {brief(problem['input'])}: {message}."


def _legal_keys(cls: Any, location: Sequence[int | str]) -> list[str]:
    for part in location:
        cls = get_type_hints(cls).get(str(part)) if dataclasses.is_dataclass(cls) else None
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def find_toml(name_or_file: str, kind: str, task: str | None = None) -> Path:
    """Return the TOML file that a name (``mlp``) or a path (``my/head.toml``) stands for.

    Names are those of a ``task`` where it has files of its own.

    Raises:
        UserError: no such file, or no bundled file of that name; the nearest names are given.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UserError(f"the {kind[:-1]} file {name_or_file} does not exist.")
        return Path(path.parent, f"{check_name(path.stem, f'the {kind[:-1]} file')}.toml")
    known = bundled_names(kind, task)
    if name_or_file not in known:
        raise UserError(
            f"unknown {kind[:-1]} {name_or_file!r}. {nearest(name_or_file, known)} "
            f"A file is named by a path that ends in .toml; `llmcond {kind}` lists what is bundled."
        )
    return bundled(kind, task) / f"{name_or_file}.toml"


def check_name(name: str, what: str, joiners: str = "") -> str:
    """Return a name that can be a folder's on any system, or part of one.

    ``joiners`` join several names into one, and are legal in the joined name only.

    Raises:
        UserError: it cannot be.
    """
    legal = f"._=-{joiners}"
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9{re.escape(legal)}]*", name):
        raise UserError(
            f"{what} cannot be called {name!r}. Use letters, digits and {' '.join(legal)}, "
            "beginning with a letter or digit."
        )
    return name
