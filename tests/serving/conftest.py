"""A server that all tests of this folder share; they must not change its state."""

import pytest
from helpers.serving import serve

from llmcond.serving.model import ServedModel


@pytest.fixture(scope="session")
def client(embedder):
    settings = {"max_client_batch_size": 50, "payload_limit": 20_000}
    with serve(ServedModel(embedder), **settings) as (client, _):
        yield client
