"""A record is what a dataclass says it is, or an error of one line."""

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


GOOD = {"inner": {"names": ["a"], "share": 1, "more": 2}, "counts": {"x": 1}, "later": {}}


def test_what_is_there_is_returned_with_what_later_versions_add(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(GOOD))
    assert read_record(path, _Outer) == GOOD


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"inner": None}, "'inner' is None: it should be an object"),
        ({"inner": {"names": ["a"]}}, "the key 'inner.share' is missing"),
        ({"inner": {"names": "a", "share": 0.5}}, "'inner.names' is 'a'"),
        ({"inner": {"names": [1], "share": 0.5}}, "'inner.names.0' is 1"),
        ({"counts": {"x": True}}, "'counts.x' is True: it should be a valid integer"),
        ({"counts": {"x": "1" * 999}}, "1111…"),
    ],
)
def test_what_is_not_is_one_line_that_says_where(tmp_path, changed, said):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**GOOD, **changed}))
    with pytest.raises(LlmcondError) as caught:
        read_record(path, _Outer, "Do it again.")
    assert not isinstance(caught.value, UserError)
    message = str(caught.value)
    assert message.startswith(f"{path} was damaged: ")
    assert message.endswith(". Do it again.")
    assert said in message
    assert len(message) < len(str(path)) + 200


def test_figures_must_be_finite(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**GOOD, "inner": {"names": [], "share": float("nan")}}))
    with pytest.raises(LlmcondError, match=r"'inner\.share' is nan"):
        read_record(path, _Outer)
