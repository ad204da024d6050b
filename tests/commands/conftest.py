"""What tests of commands share: the name of a small encoder, and a small graph."""

from pathlib import Path

import pytest
from helpers.graphs import write_graph


@pytest.fixture(scope="session")
def model(tiny_bert: Path) -> str:
    """The folder of a small random BERT, as `--model` takes it."""
    return str(tiny_bert)


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small knowledge graph."""
    return write_graph(tmp_path_factory.mktemp("graph") / "graph")
