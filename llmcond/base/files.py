"""Atomic writing of files and folders, and digests of their contents."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

from llmcond.base.errors import (
    DiskFullError,
    LlmcondError,
    UserError,
    disk_full_error,
    install_command,
    is_disk_full,
    shortened_repr,
)

#: Age from which a temporary file counts as abandoned. Files in use are written to more often.
_STALE_SECONDS = 3_600
#: The split of each name that may be part of the name of a file of data.
SPLIT_NAMES = {"train": "train", "test": "test"}
SPLIT_NAMES |= dict.fromkeys(("dev", "validation", "valid", "val"), "dev")
SPLIT_TOKEN = re.compile(rf"(?:^|[-_.])({'|'.join(SPLIT_NAMES)})(?=[-_.])", re.IGNORECASE)
#: Suffixes of figures and of pages, as legal suffixes of outputs.
FIGURE_SUFFIXES, PAGE_SUFFIXES = (".png", ".svg", ".pdf"), (".html", ".htm")
MISSING_LIBRARIES = "Altair and vl-convert, which draw figures, are not both installed"
#: Bytes of the disk that are left free.
_SPARE_BYTES = 2**20


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes that lock a file too from writing it.

    Raises:
        UserError: another process has locked it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"another process writes {path}. Wait until it has finished, or name another --out."
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to ``path``, which replaces ``path`` if the block succeeds.

    A reader sees the old file or the new one, never a part of it. On any error the temporary file
    is removed, and ``path`` is unchanged. If ``path`` is a link, it is replaced, not its target.

    Raises:
        DiskFullError: the disk is full.
        UserError: the folder cannot be written.
    """
    # Files of tempfile are readable by their owner only, and would remain so.
    temporary = temporary_sibling(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        remove_stale(temporary, path)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        with suppress(OSError):  # There is no such file yet, or the disk has no modes.
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"the disk is full: {path} could not be written. Free some space and run the same "
                "command again; stored results are kept."
            ) from error
        raise UserError(
            f"cannot write {path}: {error.strerror or error}. Name a file in a writable folder."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def create_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder``, which becomes ``folder`` if the block succeeds.

    ``folder`` must not exist, or be empty; it may be a link to such a folder. On any error it is
    unchanged.

    Raises:
        DiskFullError: the disk is full.
        UserError: the folder cannot be created.
    """
    # Folders of tempfile are accessible to their owner only, whatever the umask.
    folder = folder.resolve() if folder.is_symlink() else folder
    temporary = temporary_sibling(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        remove_stale(temporary, folder)
        yield temporary
        if is_vacant(folder):  # A lock would be in the way of the rename.
            (folder / ".lock").unlink(missing_ok=True)
        # The rename is atomic, even if an empty folder exists.
        temporary.rename(folder)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"the disk is full: {folder} could not be created. Free some space, and run the "
                "same command again."
            ) from error
        raise UserError(f"cannot create {folder}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free_space(folder: Path, n_bytes: int) -> None:
    """Raise the OSError of a full disk if ``n_bytes`` and a reserve do not fit on it.

    Checking first is necessary because Lance commits a file even if its end could not be written.
    """
    if shutil.disk_usage(folder).free < n_bytes + _SPARE_BYTES:
        raise disk_full_error()


def temporary_sibling(path: Path) -> Path:
    """Return a new path next to ``path`` for a file or folder that will replace it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def remove_stale(temporary: Path, path: Path) -> None:
    """Remove temporary siblings of ``path`` that killed processes have left.

    A sibling is removed if it was last written more than an hour before ``temporary``.
    """
    now = temporary.stat().st_mtime
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if (
                entry.name.startswith(f".{path.name}.")
                and re.fullmatch("[0-9a-f]{8}", entry.name[len(path.name) + 2 :])
                and now - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS
            ):
                stale = Path(entry)
                shutil.rmtree(stale) if entry.is_dir() else stale.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, atomically."""
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_csv(path: Path, headings: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Write a table as CSV in UTF-8, atomically. Lines end in a line feed."""
    with (
        replace_atomically(path) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as stream,
    ):
        # csv quotes carriage returns within texts only with its default line ends, \r\n, so these
        # are kept in the writer and removed from each line.
        lines = SimpleNamespace(write=lambda row: stream.write(f"{row[:-2]}\n"))
        writer = csv.writer(lines)
        writer.writerow(headings)
        writer.writerows(rows)


def suffix(path: str | Path) -> str:
    """Return the suffix of a file's name in lower case: ``.csv`` for ``V.CSV``."""
    return PurePath(path).suffix.lower()


def check_output(path: Path | None, suffixes: Sequence[str], inputs: Iterable[Any] = ()) -> None:
    """Check before any work that a file of results can be written, and is not an input file.

    Args:
        path: the file; None: nothing will be written.
        suffixes: legal suffixes of the file, in lower case; it may have them in capitals.
        inputs: input files, or folders with one file per split; objects that are not paths are
            ignored.

    Raises:
        UserError: the file has another suffix, is an input, or cannot be written.
    """
    if path is None:
        return
    if suffix(path) not in suffixes:
        article = "an" if suffixes[0] == ".html" else "a"
        raise UserError(
            f"{path} has {f'the suffix {path.suffix}' if path.suffix else 'no suffix'}; name "
            f"{article} {' or '.join(suffixes)} file."
        )
    check_writable(path)
    for source in inputs:
        if isinstance(source, str | Path) and _is_input(
            path, Path(str(source).removeprefix("file://"))
        ):
            raise UserError(f"{path} is an input of the same command; name another file.")


def file_output(*suffixes: str) -> Callable[[Path, Iterable[Any]], None]:
    """Return ``check_output`` for some suffixes, as a check of an option that names a file."""
    return lambda path, inputs: check_output(path, suffixes, inputs)


def data_path(path: Path) -> Path:
    """Return the file of the numbers that a figure shows: ``steps-data.csv`` for ``steps.svg``."""
    return path.with_name(f"{path.stem}-data.csv")


def can_draw() -> bool:
    """Return whether the libraries that draw and save charts are installed."""
    return all(find_spec(name) is not None for name in ("altair", "vl_convert"))


def check_figure(
    path: Path, inputs: Iterable[Any] = (), pages: Sequence[str] = ()
) -> Sequence[Path]:
    """Check before any work that a figure, and the CSV file of its numbers, can be written.

    Args:
        path: the file of the figure.
        inputs: input files; see ``check_output``.
        pages: legal suffixes besides ``FIGURE_SUFFIXES``, of pages that need no library.

    Returns:
        Both files.

    Raises:
        UserError: as ``check_output``, or a library is not installed.
    """
    check_output(path, (*pages, *FIGURE_SUFFIXES), inputs)
    check_output(data_path(path), (".csv",), inputs)
    if suffix(path) not in pages and not can_draw():
        raise UserError(f"{MISSING_LIBRARIES}. Install them: {install_command('report')}.")
    return path, data_path(path)


def _is_input(path: Path, source: Path) -> bool:
    if not (_mode(path) and _mode(source)):
        return False
    if source.is_dir():
        within = source.resolve() in path.resolve().parents
        return within and SPLIT_TOKEN.search(path.name) is not None
    return path.samefile(source)


def check_writable(path: Path) -> None:
    """Check before any work that a file can be written, without leaving one.

    Raises:
        UserError: ``path`` is a folder or a device, or as ``_check_creatable``.
    """
    if is_folder(path):
        raise UserError(f"{path} is a folder; name a file.")
    if (mode := _mode(path)) and not stat.S_ISREG(mode):
        raise UserError(f"{path} is not a regular file; name another file.")
    _check_creatable(path)


def check_folder(path: Path, inputs: Iterable[Any] = ()) -> None:
    """Check before any work that files can be written into a folder, which need not exist.

    Raises:
        UserError: ``path`` is a file, or as ``_check_creatable``.
    """
    if _mode(path) and not is_folder(path):
        raise UserError(f"{path} is a file; name a folder.")
    _check_creatable(path / "x" if is_folder(path) else path)


def check_new_folder(path: Path, inputs: Iterable[Any] = ()) -> None:
    """Check before any work that a folder can be created, or exists and is empty.

    Raises:
        UserError: ``path`` is a file or a folder that is not empty, or the current folder, or as
            ``_check_creatable``.
    """
    if not is_vacant(path):
        raise UserError(f"{path} already exists. Name another folder, or remove it.")
    check_not_current(path)
    _check_creatable(path)


def check_not_current(folder: Path) -> None:
    """Raise a UserError for the current folder, which no other folder can replace."""
    if folder.resolve() == Path.cwd():
        raise UserError(f"{folder} is the current folder. Name a new folder.")


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` as the home folder; that of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for unknown users


def is_folder(path: Path) -> bool:
    """Return whether a path is that of a folder, which one with a name too long is not."""
    return stat.S_ISDIR(_mode(path))


def is_vacant(path: Path) -> bool:
    """Return whether a path does not exist, or is a folder that is empty except for a lock."""
    if not _mode(path):
        return True
    return is_folder(path) and all(item.name == ".lock" for item in path.iterdir())


def path_exists(path: Path) -> bool:
    """Return whether there is a file or folder; a name that is too long names none."""
    return _mode(path) != 0


def _mode(path: Path) -> int:
    """Return the mode of a file or folder; 0 if there is none, or the name is too long."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _check_creatable(path: Path) -> None:
    """Check that a file or folder can be created at a path, or in missing folders above it.

    Raises:
        UserError: the path has control characters or leads through a link to nothing, or the
            nearest folder that exists cannot be written.
    """
    if re.search(r"[\x00-\x1f\x7f]", str(path)):
        raise UserError(f"{str(path)!r} contains a control character; name another file or folder.")
    whole = path.absolute()
    present = next(part for part in (whole, *whole.parents) if os.path.lexists(part))
    if not _mode(present):
        raise UserError(
            f"{present} is a link to {present.readlink()}, which does not exist. Remove the "
            "link, or name another file or folder."
        )
    folder = Path(os.path.realpath(present))
    if present == whole:
        folder = folder.parent
    test_file = temporary_sibling(folder / path.name)
    try:
        with suppress(FileNotFoundError):
            whole.lstat()  # raises an error if a folder on the way is a file or has a name too long
        test_file.touch(exist_ok=False)
        test_file.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}. Name a file or folder that can be "
            "written."
        ) from error


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, atomically. NaN and infinity raise a ValueError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def as_json(value: Any, digits: int | None = None) -> Any:
    """Return a value as JSON: dataclasses and mappings as objects, other iterables as lists.

    An object with a method ``to_json`` is converted by it. NumPy's numbers and arrays become
    numbers and lists, and numbers that are not finite become None. Bytes become hexadecimal digits,
    dates and times have the form of ISO 8601, and other objects, such as paths, become texts.

    Args:
        value: the value.
        digits: number of decimals that floats are rounded to; None: all.
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return fields_as_json(value)
    if hasattr(value, "tolist"):  # an array or a number of NumPy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: as_json(item, digits) for key, item in value.items()}
    if isinstance(value, bytes):
        value = value.hex()
    elif hasattr(value, "isoformat"):
        value = value.isoformat()
    elif isinstance(value, Iterable) and not isinstance(value, str):
        value = [as_json(item, digits) for item in value]
    elif isinstance(value, float):
        value = value if digits is None else round(value, digits)
        value = value if math.isfinite(value) else None
    elif value is not None and not isinstance(value, str | int):
        value = str(value)
    return value


def fields_as_json(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as a JSON object, for ``as_json`` and methods ``to_json``.

    The metadata of a field can have two keys. ``digits``: number of decimals that its floats are
    rounded to. ``json``: its key in the object; an empty one leaves the field out.
    """
    values = {}
    for field in fields(instance):
        if name := field.metadata.get("json", field.name):
            values[name] = as_json(getattr(instance, field.name), field.metadata.get("digits"))
    return values


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file does not exist, or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable JSON file: {error}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} contains {shortened_repr(value)}; expected a JSON object.")
    return value


def check_format(record: dict[str, Any], supported: int, what: str) -> None:
    """Check that this version can read the format of a record.

    Args:
        record: the record, whose key ``format`` is a number from 1.
        supported: the format that this version reads.
        what: description of the record, for messages.

    Raises:
        UserError: the record has another format.
        LlmcondError: the record states no format.
    """
    version = record.get("format")
    if type(version) is not int or version < 1:  # isinstance would accept True.
        raise LlmcondError(
            f"{what} states no format version. It is damaged, or was not written by llmcond."
        )
    if version != supported:
        age, remedy = ("a newer", "Upgrade llmcond to read it")
        if version < supported:
            age, remedy = ("an earlier", "Create it again with this version")
        raise UserError(
            f"{what} was written by {age} version of llmcond (format {version}; this version reads "
            f"format {supported}). {remedy}."
        )


def digest_text(*parts: str, size: int = 16) -> str:
    """Return a hexadecimal BLAKE2b digest of ``size`` bytes of texts and their boundaries."""
    return digest_bytes(json.dumps(parts).encode(), size=size).hex()


def digest_bytes(data: bytes, *, size: int) -> bytes:
    """Return a BLAKE2b digest of ``size`` bytes."""
    return hashlib.blake2b(data, digest_size=size).digest()


def digest_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, which is read again only if it has changed."""
    stat = path.stat()
    return _digest_state(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _digest_state(path: Path, *_state: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(root: Path, paths: Iterable[Path]) -> str:
    """Return one hexadecimal SHA-256 of the contents of files and their names below ``root``."""
    total = hashlib.sha256()
    for path in sorted(paths):
        total.update(f"{path.relative_to(root).as_posix()}\0{digest_file(path)}\n".encode())
    return total.hexdigest()


def format_bytes(n_bytes: int) -> str:
    """Format a number of bytes in GiB or MiB."""
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.1f} MiB"
