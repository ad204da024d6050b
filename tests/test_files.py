"""Files are written completely or not at all, and digests detect changes."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmcond.errors import UserError, nearest
from llmcond.files import (
    digest_file,
    digest_files,
    digest_text,
    read_json,
    replace_atomically,
    write_json,
    write_text,
)

WRITE_TOO_MUCH = """
import resource, signal, sys
from pathlib import Path
from llmcond.errors import DiskFullError
from llmcond.files import write_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_text(Path(sys.argv[1]), "x" * 5000)
except DiskFullError as error:
    print(error)
"""


def test_new_content_replaces_old_atomically(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replace_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_folders_are_created(tmp_path: Path):
    write_text(tmp_path / "a" / "b" / "c.txt", "é\n")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == b"\xc3\xa9\n"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_error_keeps_old_content_and_leaves_no_temporary_file(
    tmp_path: Path, error: type[BaseException]
):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half():
        with replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_file_mode_equals_that_of_open(tmp_path: Path, umask: int):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "ours", "x")
        (tmp_path / "plain").write_text("x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "plain")]
    assert modes[0] == modes[1] == 0o666 & ~umask


def test_writing_does_not_change_umask(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_full_disk_is_reported_and_old_content_stays(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    process = subprocess.run(
        [sys.executable, "-c", WRITE_TOO_MUCH, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the disk is full" in process.stdout
    assert str(path) in process.stdout
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_path_below_a_file_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "sub" / "a.txt"
    with pytest.raises(UserError, match="cannot write") as error:
        write_text(path, "x")
    assert str(path) in str(error.value)


def test_folder_is_not_replaced_by_file(tmp_path: Path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(UserError, match="cannot write"):
        write_text(path, "x")
    assert path.is_dir()
    assert list(tmp_path.iterdir()) == [path]


def test_json_round_trip(tmp_path: Path):
    value = {"é": [1, 2.5, None, {"a": True}]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "é" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_json_with_nan_is_not_written(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable JSON file"),
        (b"{", "not a readable JSON file"),
        (b'{"a": "\xe9"}', "not a readable JSON file"),
        (b"[1]", "holds a JSON list, not an object"),
        (None, "does not exist"),
    ],
)
def test_file_without_json_object_is_a_user_error(
    tmp_path: Path, content: bytes | None, message: str
):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_json(path)
    assert str(path) in str(error.value)


def test_digest_of_texts_depends_on_boundaries_and_order():
    digests = {digest_text(*parts) for parts in [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc",)]}
    assert len(digests) == 4
    assert digest_text("ab", "c") == digest_text("ab", "c")


def test_digest_of_files_depends_on_names_and_contents_not_order(tmp_path: Path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    first = digest_files(tmp_path, [a, b])
    assert digest_files(tmp_path, [b, a]) == first
    b.write_text("3")
    changed = digest_files(tmp_path, [a, b])
    renamed = digest_files(tmp_path, [a, b.rename(tmp_path / "c")])
    assert len({first, changed, renamed}) == 3


def test_digest_of_file_is_sha256_of_its_bytes(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digest_file(tmp_path / "a") == expected


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("mpl", ["mlp", "pca"], "Did you mean 'mlp'?"),
        ("sent", ["cond-sent", "sent-cond"], "Did you mean 'sent-cond' or 'cond-sent'?"),
        ("zzz", ["mlp", "ica"], "Known: ica, mlp."),
        ("zzz", [], "Known: none."),
    ],
)
def test_nearest_names_are_suggested_or_all_are_listed(name: str, known: list[str], expected: str):
    assert nearest(name, known) == expected
