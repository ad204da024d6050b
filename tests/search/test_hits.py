"""Hits as JSON, whatever the types of the columns of an index are."""

import datetime
import decimal
import json
import math
from typing import Any

import pytest

from llmcond.search.query import Hits

MOMENT = datetime.datetime(2020, 2, 29, 12, 30, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"),
        (7, 7),
        (0.5, 0.5),
        (True, True),
        (None, None),
        (math.nan, None),
        (math.inf, None),
        (MOMENT.date(), "2020-02-29"),
        (MOMENT, "2020-02-29T12:30:00+00:00"),
        (MOMENT.time(), "12:30:00"),
        (datetime.timedelta(hours=1.5), "1:30:00"),
        (decimal.Decimal("1.50"), "1.50"),
        (b"\xff\0", "ff00"),
        ([MOMENT.date(), math.nan], ["2020-02-29", None]),
        ({"a": {"b": MOMENT.date()}}, {"a": {"b": "2020-02-29"}}),
    ],
)
def test_every_value_can_be_written_as_json(value: Any, expected: Any):
    hits = Hits("query", {"the topic": 1.0}, [{"rank": 1, "kept": value}], searched=1)
    result = json.loads(json.dumps(hits.to_json(), allow_nan=False))
    assert result["results"] == [{"rank": 1, "kept": expected}]
