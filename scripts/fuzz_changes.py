"""What inputs of ``fuzz.py`` are made of: values, changes of files, and checked commands."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

VALUES: Final[Sequence[Any]] = (
    None, True, False, 0, -1, 1, 3, 10**9, 10**30, -0.5, 1e308, float("nan"), "", "x", "3", ".",
    "../..", "/", "\0", "\x1b[31m", "\u202e", "\ud800", "é" * 300, "{", "{sentence}", [], [[]],
    [None], ["x"], [1, 2], {}, {"x": {}}, {"": None},
)  # fmt: skip
TEXTS: Final = (
    "", " ", '"', "'", ",", "\t", "\r", "\n", "\r\n", "\0", "\x1b", "\ufeff", "\u202e", "{", "}",
    "{x}", "[", "]", "=", "nan", "inf", "-1", "1e999", "0", "6", "é" * 2_000, '"""', "#", "\\",
)  # fmt: skip


# -- what is changed ---------------------------------------------------------------------------


def change_bytes(chance: Random, content: bytes) -> bytes:
    """Return bytes with some flipped, cut, doubled, put in, or all gone."""
    at, more = chance.randrange(len(content) + 1), chance.randrange(1, 64)
    changed = bytearray(content)
    match chance.randrange(6):
        case 0:
            return b""
        case 1:
            return content[:at]
        case 2:
            del changed[at : at + more]
        case 3:
            changed[at:at] = content[at : at + more]
        case 4:
            changed[at:at] = chance.choice(TEXTS).encode()
        case _:
            for _ in range(chance.choice((1, 8))):
                if changed:
                    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def change_line(chance: Random, text: str) -> str:
    """Return a text with a line gone, doubled, moved, or a value of it changed."""
    lines = text.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    key, equals, _ = lines[at].partition("=")
    match chance.randrange(4):
        case 0:
            del lines[at]
        case 1:
            lines.insert(chance.randrange(len(lines)), lines[at])
        case 2 if equals:
            lines[at] = f"{key}= {json.dumps(chance.choice(VALUES))}\n"
        case _:
            place = chance.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + chance.choice(TEXTS) + lines[at][place:]
    return "".join(lines)


def change_json(chance: Random, text: str) -> str:
    """Return JSON with a value at any depth changed or gone."""
    try:
        record = json.loads(text)
    except ValueError:  # it was changed before
        return text[: len(text) // 2]
    places = list(_places(record))
    if not places:
        return json.dumps(chance.choice(VALUES))
    # Not all of a vocabulary or a curve, which are most of what is there.
    parent, key = chance.choice(places[:40] if chance.random() < 0.7 else places)
    if chance.random() < 0.3:
        del parent[key]
    else:
        parent[key] = chance.choice(VALUES)
    return json.dumps(record)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    level = [value]
    while level:
        own = [
            (one, k) for one in level for k in (one if isinstance(one, dict) else range(len(one)))
        ]
        yield from own
        level = [one[k] for one, k in own if isinstance(one[k], dict | list)]


def change_file(chance: Random, path: Path) -> None:
    """Change a file, or put something else in its place."""
    drawn = chance.random()
    if drawn < 0.08:
        path.unlink()
        other: Sequence[Callable[[], Any]] = (
            lambda: None,
            path.mkdir,
            lambda: path.symlink_to(path.name),
            lambda: path.symlink_to("nowhere"),
        )
        chance.choice(other)()
    elif path.suffix == ".json" and drawn < 0.8:
        path.write_text(change_json(chance, path.read_text("utf-8", "replace")), "utf-8")
    elif path.suffix == ".toml" and drawn < 0.8:
        text = change_line(chance, path.read_text("utf-8", "replace"))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    else:
        path.write_bytes(change_bytes(chance, path.read_bytes()))


def change_below(chance: Random, folder: Path, pattern: str = "*") -> None:
    """Change one or two files below a folder, each kind of file about as often."""
    for _ in range(chance.choice((1, 1, 2))):
        found = sorted(path for path in folder.rglob(pattern) if path.is_file())
        kinds = sorted({path.suffix for path in found})
        if kinds:
            kind = chance.choice(kinds)
            change_file(chance, chance.choice([path for path in found if path.suffix == kind]))


# -- inputs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The folder of what inputs are made of: ``run``, ``model``, ``rows.csv`` and others.

    Attributes:
        server: number of the process and log of a server that searches ``texts.index``.
    """

    folder: Path
    server: tuple[int, Path] | None = None

    def copy(self, name: str, into: Path) -> Path:
        """Return a copy of one of them."""
        source, target = self.folder / name, into / name
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        return target


class Input(Protocol):
    """An input that was made, and can be tried."""

    def failure(self) -> str:
        """Try it; return what is wrong with the outcome, empty if nothing is."""


@dataclass(frozen=True)
class Command:
    """A command as an input.

    Attributes:
        arguments: on the command line.
        check: returns what contradicts the input, given the exit code and standard output.
    """

    arguments: list[str]
    check: Callable[[int, str], str] = lambda code, printed: ""

    def failure(self) -> str:
        """Run the command in this process; return what is wrong with how it ended."""
        from llmcond.cli import run

        out, err = io.StringIO(), io.StringIO()
        name = " ".join(self.arguments[:2])
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = run(self.arguments)
        except BaseException as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else ""
            return f"{name}: {type(error).__name__}: {error} ({where})"
        said = err.getvalue()
        if code not in (0, 1, 2):
            return f"{name}: exit code {code}"
        if "Traceback" in said or (code and said.count("llmcond: error: ") != 1):
            return f"{name}: {said[-300:]}"
        wrong = self.check(code, out.getvalue())
        return wrong and f"{name}: {wrong} {said[-300:]}"


def succeed(*arguments: object) -> None:
    """Run a command that inputs are made with; end the process if it fails."""
    command = Command([*map(str, arguments)], lambda code, _: f"exit code {code}" if code else "")
    if wrong := command.failure():
        raise SystemExit(f"fuzz: nothing was tried: {wrong}")
