"""One embedder and one server for all tests of this folder that change neither."""

import pytest
from helpers.serving import served

from llmcond.runs.embedder import load_embedder
from llmcond.serving.model import ServedModel


@pytest.fixture(scope="session")
def embedder(tiny_run):
    return load_embedder(tiny_run, device="cpu")


@pytest.fixture(scope="session")
def client(embedder):
    with served(ServedModel(embedder), max_client_batch_size=50, payload_limit=20_000) as (own, _):
        yield own
