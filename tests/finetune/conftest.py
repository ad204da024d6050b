"""What tests of training share: a small encoder, and small rows."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tiny_bert: Path) -> Path:
    """A small random BERT."""
    return tiny_bert


@pytest.fixture
def data(write_rows: Callable[..., Path], small_rows: list[tuple[str, str, str, int]]) -> Path:
    """Small rows in a CSV file."""
    return write_rows(small_rows)
