"""Records, strict TOML and encodings: valid files are read, others cause one-line errors."""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.package import bundled_names
from llmcond.base.records import (
    as_json,
    build,
    check_record,
    fields_as_json,
    read_record,
    read_toml,
    resolve_toml,
    write_record,
)
from llmcond.base.text import check_encoding, read_text_file


@dataclass(frozen=True)
class _Inner:
    names: Sequence[str]
    share: float | None


@dataclass(frozen=True)
class _Outer:
    inner: _Inner
    counts: Mapping[str, int]


VALID_RECORD = {"inner": {"names": ["a"], "share": 1, "more": 2}, "counts": {"x": 1}, "later": {}}


def test_valid_record_is_read_without_unknown_keys(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(VALID_RECORD))
    assert read_record(path, _Outer) == _Outer(_Inner(["a"], 1), {"x": 1})


def test_invalid_record_error_names_the_key(tmp_path):
    path = tmp_path / "record.json"
    for changes, expected in (
        ({"inner": None}, "'inner' is None: it should be an object"),
        ({"inner": {"names": ["a"]}}, "the key 'inner.share' is missing"),
        (
            {"inner": {"names": [], "share": float("nan")}},
            "'inner.share' is nan: it should be a finite number",
        ),
        ({"counts": {"x": True}}, "'counts.x' is True: it should be a whole number"),
        ({"counts": {"x": "1" * 999}}, "1111…"),
    ):
        path.write_text(json.dumps({**VALID_RECORD, **changes}))
        with pytest.raises(LlmcondError) as error:
            read_record(path, _Outer, "Do it again.")
        message = str(error.value)
        assert not isinstance(error.value, UserError)
        assert message.startswith(f"{path} was damaged: ")
        assert message.endswith(". Do it again.")
        assert expected in message
        assert len(message) < len(str(path)) + 200
    path.write_text(json.dumps({"format": 3, **VALID_RECORD}))
    with pytest.raises(UserError, match=r"a newer version .*format 3.* Upgrade llmcond"):
        read_record(path, _Outer, version=2)
    with pytest.raises(UserError, match=r"an earlier version .*format 3.* Create it again"):
        read_record(path, _Outer, version=4)
    assert read_record(path, _Outer, version=3) == check_record(VALID_RECORD, _Outer, "x")


@dataclass(frozen=True)
class _Values:
    path: Path
    scores: Mapping[str, tuple[float, ...]] = field(metadata={"digits": 2})
    nested: tuple[_Inner, ...]
    total: int = field(metadata={"json": "n"})
    hidden: str = field(default="x", metadata={"json": ""})


def test_values_become_json_and_are_read_again(tmp_path):
    values = _Values(
        Path("a"), {"x": (0.126, np.float32(1))}, (_Inner(("a",), np.nan),), np.int64(2)
    )
    expected = {
        "path": "a",
        "scores": {"x": [0.13, 1.0]},
        "nested": [{"names": ["a"], "share": None}],
        "n": 2,
    }
    assert as_json(values) == fields_as_json(values) == expected
    assert as_json([values, None, True, np.arange(2)]) == [expected, None, True, [0, 1]]
    assert [type(value) for value in as_json((np.int64(2), np.float32(1)))] == [int, float]
    assert as_json([b"\x0a", date(2026, 1, 2), Decimal("0.10")]) == ["0a", "2026-01-02", "0.10"]
    record = _Outer(_Inner(("a",), 0.5), {"x": 1})
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json", _Outer) == _Outer(_Inner(["a"], 0.5), {"x": 1})


# -- TOML --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    width: int
    label: str = ""


@dataclass(frozen=True)
class Outer:
    rate: float
    inner: Inner
    epochs: int = 3
    more: Any = None

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError("Epochs must be at least 1")


VALID_VALUES = {"rate": 0.5, "inner": {"width": 4}}


@dataclass(frozen=True)
class _Unreadable:
    folder: Path


def test_valid_values_become_nested_dataclasses_with_defaults():
    with pytest.raises(UserError, match="'folder' is 'a': a file cannot have values of the type"):
        build(_Unreadable, {"folder": "a"}, "x.toml")
    assert build(Outer, VALID_VALUES, "x.toml") == Outer(0.5, Inner(4, ""), 3)
    assert build(Outer, {**VALID_VALUES, "rate": 2}, "x.toml").rate == 2.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**VALID_VALUES, "epoch": 1}, ["'epoch'", "Did you mean 'epochs'", "rate, inner, epochs"]),
        (
            {**VALID_VALUES, "inner": {"width": 1, "widht": 2}},
            ["unknown key 'inner.widht'", "Did you mean 'width'", "Legal keys: width, label."],
        ),
        ({**VALID_VALUES, "inner": {"width": "4"}}, ["'inner.width' is '4'", "a whole number"]),
        ({**VALID_VALUES, "rate": float("nan")}, ["'rate' is nan", "finite"]),
        ({**VALID_VALUES, "epochs": "a" * 1_000_000}, ["'epochs' is 'aaa"]),
        (
            {**VALID_VALUES, "rate": datetime.date(2024, 1, 1)},
            ["date", "should be a finite number"],
        ),
        ({**VALID_VALUES, "more": [datetime.date(2024, 1, 1)]}, ["not JSON serializable"]),
        ({**VALID_VALUES, "epochs": 0}, ["epochs must be at least 1"]),
    ],
)
def test_invalid_value_error_names_valid_alternatives(values: dict[str, Any], words: list[str]):
    with pytest.raises(UserError) as error:
        build(Outer, values, "x.toml")
    message = str(error.value)
    assert message.startswith("x.toml: ")
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"dim = ", "cannot be read as TOML"),
        (b"dim = " + 5_000 * b"1", "cannot be read as TOML: Exceeds the limit"),
        (b"a = " + 5_000 * b"[", "cannot be read as TOML: maximum recursion"),
        (b"name = 'caf\xe9'\n", "not UTF-8.*iconv -f WINDOWS-1252 -t UTF-8 '.*my file.toml'"),
        ("name = 1\n".encode("utf-16-be"), "UTF-16 without .*iconv -f UTF-16-BE"),
        (b"PK\x03\x04\0\0", "is a ZIP archive"),
        (None, "does not exist"),
    ],
)
def test_unreadable_toml_is_a_user_error(tmp_path: Path, content: bytes | None, words: str):
    path = tmp_path / "my file.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        read_toml(path)
    assert str(path) in str(error.value)
    assert "--encoding" not in str(error.value)  # an option that some commands do not have


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_marked_files_are_decoded(tmp_path: Path, encoding: str):
    path = tmp_path / "a.toml"
    path.write_bytes("name = 'café'\n".encode(encoding))
    assert read_text_file(path) == "name = 'café'\n"
    assert read_toml(path) == {"name": "café"}
    assert check_encoding(encoding) == encoding
    for name in ("", "cp125", "hex", "rot13", "undefined", "é"):
        with pytest.raises(UserError, match=r"^--encoding is .*, which is not an encoding of"):
            check_encoding(name)


@pytest.mark.parametrize("kind", ["prompts", "heads"])
def test_names_and_paths_are_resolved(kind: str, tmp_path: Path):
    files = list((ROOT / kind).glob("*.toml"))
    assert bundled_names(kind) == sorted(path.stem for path in files)
    for path in files:
        assert resolve_toml(path.stem, kind).read_bytes() == path.read_bytes()
    path = tmp_path / "mine.toml"
    path.touch()
    assert resolve_toml(str(path), kind) == path
    for name, message in (
        (f"{path.stem}x", rf"unknown {kind[:-1]} 'minex'.*llmcond {kind}"),
        ("nowhere/a.toml", rf"the {kind[:-1]} file nowhere/a\.toml does not exist"),
        (f"../{kind}/{bundled_names(kind)[0]}", rf"unknown {kind[:-1]} '\.\."),
    ):
        with pytest.raises(UserError, match=message):
            resolve_toml(name, kind)
