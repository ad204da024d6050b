"""A record matches its dataclass, or causes a one-line error."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.records import (
    RECORD,
    as_json,
    check_record,
    fields_as_json,
    read_record,
    write_record,
)


@dataclass(frozen=True)
class _Inner:
    names: Sequence[str]
    share: float | None


@dataclass(frozen=True)
class _Outer:
    __pydantic_config__: ClassVar = RECORD

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
        ({"inner": {"names": [], "share": float("nan")}}, "'inner.share' is nan"),
        ({"counts": {"x": True}}, "'counts.x' is True: it should be a valid integer"),
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
    empty: str = field(default="", metadata={"omit": True})


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
    record = _Outer(_Inner(("a",), 0.5), {"x": 1})
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json", _Outer) == _Outer(_Inner(["a"], 0.5), {"x": 1})
