"""A fixture that simulates one GPU."""

from collections.abc import Iterator

import pytest
from helpers.standin import StandIn


@pytest.fixture
def gpu() -> Iterator[StandIn]:
    with StandIn(gpus=1, gib=80) as gpu:
        yield gpu
