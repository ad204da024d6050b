"""Building blocks of the inputs of ``fuzz.py``: values, changes of files, and checked commands."""

from __future__ import annotations

import io
import json
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

VALUES: Final[Sequence[Any]] = (
    None, True, False, 0, -1, 1, 3, 10**9, 10**30, -0.5, 1e308, float("nan"), "", "x", "3", ".",
    "../..", "/", "\0", "\x1b[31m", "\u202e", "\ud800", "é" * 300, "{", "{sentence}", [], [[]],
    [None], ["x"], [1, 2], {}, {"x": {}}, {"": None},
)  # fmt: skip
TEXTS: Final = (
    "", " ", '"', "'", ",", "\t", "\r", "\n", "\r\n", "\0", "\x1b", "\ufeff", "\u202e", "{", "}",
    "{x}", "[", "]", "=", "nan", "inf", "-1", "1e999", "0", "6", "é" * 2_000, '"""', "#", "\\",
)  # fmt: skip


# -- changes ------------------------------------------------------------------------------------


def change_bytes(chance: Random, content: bytes) -> bytes:
    """Return bytes with some of them flipped, cut, doubled or inserted, or no bytes at all."""
    position, length = chance.randrange(len(content) + 1), chance.randrange(1, 64)
    changed = bytearray(content)
    match chance.randrange(6):
        case 0:
            return b""
        case 1:
            return content[:position]
        case 2:
            del changed[position : position + length]
        case 3:
            changed[position:position] = content[position : position + length]
        case 4:
            changed[position:position] = chance.choice(TEXTS).encode()
        case _:
            for _ in range(chance.choice((1, 8))):
                if changed:
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def change_line(chance: Random, text: str) -> str:
    """Return a text with a line removed, doubled or moved, or with one of its values changed."""
    lines = text.splitlines(keepends=True)
    index = chance.randrange(len(lines))
    key, equals, _ = lines[index].partition("=")
    match chance.randrange(4):
        case 0:
            del lines[index]
        case 1:
            lines.insert(chance.randrange(len(lines)), lines[index])
        case 2 if equals:
            lines[index] = f"{key}= {json.dumps(chance.choice(VALUES))}\n"
        case _:
            position = chance.randrange(len(lines[index]) + 1)
            lines[index] = lines[index][:position] + chance.choice(TEXTS) + lines[index][position:]
    return "".join(lines)


def change_json(chance: Random, text: str) -> str:
    """Return JSON with a value at any depth changed or removed."""
    try:
        record = json.loads(text)
    except ValueError:  # an earlier change made it invalid
        return text[: len(text) // 2]
    keys = list(_iterate_keys(record))
    if not keys:
        return json.dumps(chance.choice(VALUES))
    # Usually among the first keys only: most keys belong to a vocabulary or a curve.
    parent, key = chance.choice(keys[:40] if chance.random() < 0.7 else keys)
    if chance.random() < 0.3:
        del parent[key]
    else:
        parent[key] = chance.choice(VALUES)
    return json.dumps(record)


def _iterate_keys(value: Any) -> Iterator[tuple[Any, Any]]:
    level = [value]
    while level:
        keys = [
            (container, k)
            for container in level
            for k in (container if isinstance(container, dict) else range(len(container)))
        ]
        yield from keys
        level = [container[k] for container, k in keys if isinstance(container[k], dict | list)]


def change_file(chance: Random, path: Path) -> None:
    """Change a file, or replace it by nothing, a folder or a broken link."""
    random_number = chance.random()
    if random_number < 0.08:
        path.unlink()
        replacements: Sequence[Callable[[], Any]] = (
            lambda: None,
            path.mkdir,
            lambda: path.symlink_to(path.name),
            lambda: path.symlink_to("nowhere"),
        )
        chance.choice(replacements)()
    elif path.suffix == ".json" and random_number < 0.8:
        path.write_text(change_json(chance, path.read_text("utf-8", "replace")), "utf-8")
    elif path.suffix == ".toml" and random_number < 0.8:
        text = change_line(chance, path.read_text("utf-8", "replace"))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(change_bytes(chance, path.read_bytes()))


def change_below(chance: Random, folder: Path, pattern: str = "*") -> None:
    """Change one or two files below a folder, choosing each file type with equal probability."""
    for _ in range(chance.choice((1, 1, 2))):
        paths = sorted(path for path in folder.rglob(pattern) if path.is_file())
        kinds = sorted({path.suffix for path in paths})
        if kinds:
            kind = chance.choice(kinds)
            change_file(chance, chance.choice([path for path in paths if path.suffix == kind]))


# -- inputs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The folder from which inputs are copied: ``run``, ``model``, ``rows.csv`` and others."""

    folder: Path

    def copy(self, name: str, into: Path) -> Path:
        """Copy a file or folder into another folder, and return the path of the copy."""
        source, target = self.folder / name, into / name
        if source.is_dir():  # without temporary files of processes that use it
            ignore = shutil.ignore_patterns(".tmp*")
            shutil.copytree(source, target, ignore=ignore)
        else:
            shutil.copyfile(source, target)
        return target


@dataclass(frozen=True)
class Input:
    """A command, or a call of a function, that can be tried.

    Attributes:
        name: what is tried, for messages.
        run: function that does it and returns the exit code.
        check: function from the exit code and standard output to what contradicts the input.
    """

    name: str
    run: Callable[[], int]
    check: Callable[[int, str], str] = lambda code, printed: ""

    def failure(self) -> str:
        """Try the input in this process; return what is wrong with how it ended."""
        out, err = io.StringIO(), io.StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = self.run()
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}:{frame.lineno}"
            return f"{self.name}: {type(error).__name__}: {error} ({where})"
        errors = err.getvalue()
        if code not in (0, 1, 2):
            return f"{self.name}: exit code {code}"
        if "Traceback" in errors or (code and errors.count("llmcond: error: ") != 1):
            return f"{self.name}: {errors[-300:]}"
        wrong = self.check(code, out.getvalue())
        return wrong and f"{self.name}: {wrong} {errors[-300:]}"


def command(arguments: Sequence[str], check: Callable[[int, str], str] | None = None) -> Input:
    """Return a command of llmcond as an input."""
    from llmcond import cli

    run = partial(cli.run, arguments)
    return Input(" ".join(arguments[:2]), run, *([check] if check else []))


def succeed(*arguments: object) -> None:
    """Run a command that prepares inputs; end the process if it fails."""
    words = [*map(str, arguments)]
    if failure := command(words, lambda code, _: f"exit code {code}" if code else "").failure():
        raise SystemExit(f"fuzz: no input was tried, because a preparation failed: {failure}")
