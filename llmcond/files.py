"""Writing files so that each is complete or absent, and digests of what they hold."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmcond.errors import DiskFullError, LlmcondError, UserError, disk_full_error, is_disk_full

#: Temporary files that are in use are written to more often.
_STALE_SECONDS = 3_600
#: Left free beside what is written.
_SPARE_BYTES = 2**20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` that takes its place when the block succeeds.

    A reader sees the old file or the new one, never a part. On any error the temporary file is
    removed and ``path`` is as it was.

    Raises:
        DiskFullError: the disk has no room.
        UserError: the folder cannot be written.
    """
    # Not tempfile: its files can be read by their owner alone, and would stay so.
    temporary = temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        remove_stale(temporary, path)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"the disk is full: {path} could not be written. Free some space and run the same "
                "command again; what was stored before is kept."
            ) from error
        raise UserError(
            f"cannot write {path}: {error.strerror or error}. Name a place that can be written."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``folder`` that becomes it when the block succeeds.

    There is nothing at ``folder``, or a folder without anything in it. On any error it is as it
    was.

    Raises:
        DiskFullError: the disk has no room.
        UserError: the folder cannot be made.
    """
    # Not tempfile, whose folders are their owner's alone, whatever the umask.
    temporary = temporary_sibling(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        remove_stale(temporary, folder)
        yield temporary
        # Atomic, also over an empty folder that the user made beforehand.
        temporary.rename(folder)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(f"the disk is full: {folder} could not be made.") from error
        raise UserError(f"cannot make {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_room(folder: Path, n_bytes: int) -> None:
    """Raise an OSError, as of a full disk, where it lacks so many bytes and some to spare.

    Lance commits a file whose very end could not be written: better not to begin.
    """
    if shutil.disk_usage(folder).free < n_bytes + _SPARE_BYTES:
        raise disk_full_error()


def temporary_sibling(path: Path) -> Path:
    """Return a new name beside ``path`` for what is to take its place."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def remove_stale(temporary: Path, path: Path) -> None:
    """Remove temporary siblings of ``path`` that killed processes left.

    They are those that nothing was written to for an hour before ``temporary`` was.
    """
    now = temporary.stat().st_mtime
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if (
                entry.name.startswith(f".{path.name}.")
                and re.fullmatch("[0-9a-f]{8}", entry.name[len(path.name) + 2 :])
                and now - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
            ):
                left = Path(entry)
                shutil.rmtree(left) if entry.is_dir() else left.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_csv(path: Path, headings: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table as CSV in UTF-8, atomically; its lines end in a line feed."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        # With its own line ends only it quotes carriage returns within texts: taken off behind it.
        lines = SimpleNamespace(write=lambda row: stream.write(f"{row[:-2]}\n"))
        writer = csv.writer(lines)
        writer.writerow(headings)
        writer.writerows(rows)


def check_output(path: Path | None, suffixes: Sequence[str], inputs: Iterable[Any] = ()) -> None:
    """Check before long work that a file of results can be written, and takes no input's place.

    None: no file is asked for. ``inputs`` are files, or folders of data by split; what is no path
    is not looked at.

    Raises:
        UserError: another suffix, a file that is read, or as :func:`check_writable`.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        article = "an" if suffixes[0] == ".html" else "a"
        raise UserError(
            f"{path} ends in {path.suffix or 'nothing'}; name {article} {' or '.join(suffixes)} "
            "file."
        )
    for given in inputs:
        if isinstance(given, str | Path) and _is_read(
            path, Path(str(given).removeprefix("file://"))
        ):
            raise UserError(f"{path} is the file that is read, or one of them; name another file.")
    check_writable(path)


def _is_read(path: Path, source: Path) -> bool:
    if not (path.exists() and source.exists()):
        return False
    if source.is_dir():
        within = source.resolve() in path.resolve().parents
        return within and re.search("train|dev|val|test", path.name, re.IGNORECASE) is not None
    return path.samefile(source)


def check_writable(path: Path) -> None:
    """Check before long work that its result can be written; nothing is left behind.

    Raises:
        UserError: ``path`` is a folder, or its folder cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file.")
    # Folders are made when there is something to put into them: tried out where one is now.
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    tried = temporary_sibling(folder / path.name)
    try:
        tried.touch(exist_ok=False)
        tried.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}. Name a place that can be written."
        ) from error


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, atomically. NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file is missing or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable JSON file: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def check_format(record: dict[str, Any], supported: int, what: str) -> None:
    """Check that no newer version wrote a record.

    Raises:
        UserError: its format is newer than ``supported``.
        LlmcondError: it states no format; they count from 1.
    """
    found = record.get("format")
    if type(found) is not int or found < 1:  # not isinstance: true is an int as well
        raise LlmcondError(f"{what} states no format version; it was damaged or is not ours.")
    if found > supported:
        raise UserError(
            f"{what} was written by a newer version of llmcond (format {found}; this one reads up "
            f"to {supported}). Upgrade llmcond to read it."
        )


def digest_text(*parts: str, size: int = 16) -> str:
    """Return a hexadecimal BLAKE2b digest of ``size`` bytes; the boundaries of parts count."""
    return digest_bytes(json.dumps(parts).encode(), size=size).hex()


def digest_bytes(data: bytes, *, size: int) -> bytes:
    """Return the BLAKE2b digest of ``data`` with ``size`` bytes."""
    return hashlib.blake2b(data, digest_size=size).digest()


def digest_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, which is read once as long as it stays as it is."""
    stat = path.stat()
    return _digest_state(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _digest_state(path: Path, *_state: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(root: Path, paths: Iterable[Path]) -> str:
    """Return one SHA-256 over the names (relative to ``root``) and contents of ``paths``."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.relative_to(root).as_posix()}\0{digest_file(path)}\n".encode())
    return total.hexdigest()


def gib(n_bytes: int) -> str:
    """Write a number of bytes for people."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
