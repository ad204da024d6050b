"""A record matches its dataclass, or causes a one-line error."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from llmcond.errors import LlmcondError, UserError
from llmcond.records import RECORD, read_record


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


def test_valid_record_is_returned_with_unknown_keys(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(VALID_RECORD))
    assert read_record(path, _Outer) == VALID_RECORD


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"inner": None}, "'inner' is None: it should be an object"),
        ({"inner": {"names": ["a"]}}, "the key 'inner.share' is missing"),
        ({"inner": {"names": "a", "share": 0.5}}, "'inner.names' is 'a'"),
        ({"inner": {"names": [1], "share": 0.5}}, "'inner.names.0' is 1"),
        ({"counts": {"x": True}}, "'counts.x' is True: it should be a valid integer"),
        ({"counts": {"x": "1" * 999}}, "1111…"),
    ],
)
def test_invalid_record_error_names_the_key(tmp_path, changes, expected):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**VALID_RECORD, **changes}))
    with pytest.raises(LlmcondError) as error:
        read_record(path, _Outer, "Do it again.")
    assert not isinstance(error.value, UserError)
    message = str(error.value)
    assert message.startswith(f"{path} was damaged: ")
    assert message.endswith(". Do it again.")
    assert expected in message
    assert len(message) < len(str(path)) + 200


def test_numbers_must_be_finite(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**VALID_RECORD, "inner": {"names": [], "share": float("nan")}}))
    with pytest.raises(LlmcondError, match=r"'inner\.share' is nan"):
        read_record(path, _Outer)
