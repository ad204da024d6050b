"""Encodings that users name, and advice about files with another encoding."""

from pathlib import Path

import pytest

from llmcond.config import read_toml
from llmcond.decoding import check_encoding, read_text_file
from llmcond.errors import UserError


@pytest.mark.parametrize("name", ["cp1252", "Latin-1", "utf8", "UTF-16-LE", "gb18030", "mac-roman"])
def test_encodings_of_python_are_known(name: str):
    assert check_encoding(name) == name


@pytest.mark.parametrize("name", ["", "cp125", "hex", "zlib", "rot13", "undefined", "é", "a b"])
def test_other_encodings_are_refused(name: str):
    with pytest.raises(UserError, match=r"^--encoding is .*, which is not an encoding of texts"):
        check_encoding(name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_marked_files_are_decoded(tmp_path: Path, encoding: str):
    path = tmp_path / "a.toml"
    path.write_bytes("name = 'café'\n".encode(encoding))
    assert read_text_file(path) == "name = 'café'\n"
    assert read_toml(path) == {"name": "café"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name = 'caf\xe9'\n", "iconv -f WINDOWS-1252 -t UTF-8 '.*my file.toml'"),
        ("name = 1\n".encode("utf-16-be"), "UTF-16 without .*iconv -f UTF-16-BE"),
        (b"PK\x03\x04\0\0", "is a ZIP archive"),
    ],
)
def test_advice_does_not_name_options_that_do_not_exist(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "my file.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_toml(path)
    assert "--encoding" not in str(caught.value)
