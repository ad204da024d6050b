"""Files are written completely or not at all, and digests detect changes."""

import os
import stat
from pathlib import Path

import pytest

from llmcond.base.errors import UserError
from llmcond.base.files import (
    check_new_folder,
    check_output,
    create_folder_atomically,
    digest_file,
    digest_files,
    digest_text,
    read_json,
    replace_atomically,
    write_json,
    write_text,
)


@pytest.fixture
def path(tmp_path):
    """A file in an otherwise empty folder."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    return path


def test_new_content_replaces_old_atomically(path):
    with replace_atomically(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
    write_text(path.parent / "b" / "c" / "d.txt", "é\n")  # missing folders are created
    assert (path.parent / "b" / "c" / "d.txt").read_bytes() == b"\xc3\xa9\n"


def test_rewritten_file_keeps_its_mode(path):
    path.chmod(0o600)
    write_text(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o600)


def test_new_folder_may_have_lock_and_is_not_current_folder(tmp_path, monkeypatch):
    (tmp_path / ".lock").touch()
    with create_folder_atomically(tmp_path) as temporary:
        (temporary / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for folder in (".", "../empty", empty):
        with pytest.raises(UserError, match="is the current folder"):
            check_new_folder(Path(folder))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_error_keeps_old_content_and_leaves_no_temporary_file(path, error):
    def write_half():
        with replace_atomically(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_file_mode_follows_umask_and_does_not_change_it(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_paths_that_cannot_be_files_are_reported(path):
    (path.parent / "folder").mkdir()
    for wrong in (path / "sub" / "a.txt", path.parent / "folder"):
        with pytest.raises(UserError, match=f"cannot write {wrong}"):
            write_text(wrong, "x")
    assert sorted(path.parent.iterdir()) == [path, path.parent / "folder"]


def test_only_files_of_splits_are_inputs_of_a_folder(tmp_path):
    for name in ("evaluation.html", "latest.csv", "dev.csv", "my-test.csv"):
        (tmp_path / name).touch()
    for name in ("evaluation.html", "latest.csv"):
        check_output(tmp_path / name, (".html", ".csv"), [tmp_path])
    for name in ("dev.csv", "my-test.csv"):
        with pytest.raises(UserError, match="is an input of the same command"):
            check_output(tmp_path / name, (".csv",), [tmp_path])


def test_json_round_trip(tmp_path):
    value = {"é": [1, 2.5, None, {"a": True}]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "é" in (tmp_path / "a.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "b.json", {"a": float("nan")})
    assert not (tmp_path / "b.json").exists()


def test_file_without_json_object_is_a_user_error(path):
    for content, message in (
        (b"{", "not a readable JSON file"),
        (b'{"a": "\xe9"}', "not a readable JSON file"),
        (b"[1]", r"contains \[1\]; expected a JSON object"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path}.*{message}"):
            read_json(path)
    with pytest.raises(UserError, match="does not exist"):
        read_json(path.parent / "b")


def test_digests_depend_on_everything_but_the_order_of_files(tmp_path):
    digests = {digest_text(*parts) for parts in [("ab", "c"), ("a", "bc"), ("c", "ab"), ("abc",)]}
    assert len(digests) == 4
    assert digest_text("ab", "c") in digests
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"abc")
    b.write_text("2")
    assert digest_file(a) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    first = digest_files(tmp_path, [a, b])
    assert digest_files(tmp_path, [b, a]) == first
    b.write_text("3")
    changed = digest_files(tmp_path, [a, b])
    renamed = digest_files(tmp_path, [a, b.rename(tmp_path / "c")])
    assert len({first, changed, renamed}) == 3
