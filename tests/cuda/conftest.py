"""One GPU, that there is not."""

from collections.abc import Iterator

import pytest
from helpers.standin import StandIn


@pytest.fixture
def gpu() -> Iterator[StandIn]:
    with StandIn(gpus=1, gib=80) as stand:
        yield stand
