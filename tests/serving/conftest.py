"""One server for all tests of this folder that do not change it."""

import pytest
from helpers.serving import served

from llmcond.serving.model import ServedModel


@pytest.fixture(scope="session")
def client(embedder):
    with served(ServedModel(embedder), max_client_batch_size=50, payload_limit=20_000) as (own, _):
        yield own
