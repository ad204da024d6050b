"""The request queue of a model: batching, fairness, cancellation and errors."""

import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
from helpers.waiting import PATIENCE, wait_until

from llmcond.encoders.spec import Encoded
from llmcond.serving.model import Batcher, ClosedError


class Model:
    """Model that embeds a text as its number; each batch waits for a permit from ``go``."""

    def __init__(self):
        self.batches, self.started, self.go = [], threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, rows):
        self.batches.append([text for text, _ in rows])
        self.started.release()
        self.go.acquire()
        if any(text == "bad" for text, _ in rows):
            raise ValueError("a text is bad")
        count = np.full(len(rows), 2, dtype=np.int32)
        vectors = np.array([[float(text)] for text, _ in rows], dtype=np.float32)
        return Encoded(vectors, count, count > 2, 0)

    def release_all(self):
        for _ in range(1_000):
            self.go.release()


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def batcher(model):
    batcher = Batcher(model, max_tokens=12, max_row_tokens=64)
    yield batcher
    model.release_all()
    batcher.close()


def make_rows(*texts):
    return [(str(text), "c") for text in texts]


def occupy(batcher, model):
    """Keep the model busy with a first batch, so that later requests wait."""
    first = batcher.submit(make_rows(0))
    model.started.acquire()
    return first


def test_waiting_requests_share_batch_and_get_their_vectors(batcher, model):
    first = occupy(batcher, model)
    others = [batcher.submit(make_rows(i, i + 10)) for i in range(1, 4)]
    assert batcher.waiting == 6
    model.release_all()
    assert first.result(30).vectors.tolist() == [[0.0]]
    for i, other in enumerate(others, 1):
        result = other.result(30)
        assert result.vectors.tolist() == [[i], [i + 10.0]]
        assert result.n_tokens.tolist() == [2, 2]
    assert batcher.waiting == 0
    assert len(model.batches) == 2


def test_short_request_joins_next_batch_despite_long_one(batcher, model):
    long = batcher.submit(make_rows(*range(1_000)))
    model.started.acquire()
    short = batcher.submit(make_rows(7_777))
    model.go.release()
    model.started.acquire()
    assert "7777" in model.batches[1]
    model.release_all()
    assert short.result(30).vectors.tolist() == [[7777.0]]
    assert long.result(30).vectors[:, 0].tolist() == list(range(1_000))
    assert max(map(len, model.batches)) <= 12


def test_cancelled_request_is_not_encoded_further(batcher, model):
    long = batcher.submit(make_rows(*range(1_000)))
    model.started.acquire()
    assert long.cancel()
    later = batcher.submit(make_rows(5))
    model.release_all()
    assert later.result(30).vectors.tolist() == [[5.0]]
    assert sum(map(len, model.batches)) < 20
    assert batcher.waiting == 0
    with pytest.raises(CancelledError):
        long.result(0)


def test_failed_request_does_not_fail_others(batcher, model):
    first = occupy(batcher, model)
    good, bad, other = (batcher.submit(make_rows(text)) for text in (1, "bad", 2))
    model.release_all()
    assert [request.result(30).vectors.item() for request in (first, good, other)] == [0, 1, 2]
    with pytest.raises(ValueError, match="a text is bad"):
        bad.result(30)
    assert batcher.submit(make_rows(3)).result(30).vectors.tolist() == [[3.0]]


def test_calls_run_in_model_thread_in_order(batcher, model):
    occupy(batcher, model)
    earlier = batcher.submit(make_rows(1))
    call = batcher.call(lambda: (threading.current_thread().name, len(model.batches)))
    failing_call = batcher.call(lambda: 1 / 0)
    model.release_all()
    assert call.result(30) == ("llmcond-model", 2)
    assert earlier.done()
    with pytest.raises(ZeroDivisionError):
        failing_call.result(30)


def test_close_finishes_accepted_requests_and_rejects_new_ones(batcher, model):
    accepted = [occupy(batcher, model), *(batcher.submit(make_rows(i)) for i in range(1, 30))]
    close_thread = threading.Thread(target=batcher.close)
    close_thread.start()
    wait_until(lambda: not batcher.alive)
    with pytest.raises(ClosedError):
        batcher.submit(make_rows(1))
    model.release_all()
    close_thread.join(PATIENCE)
    assert [request.result(0).vectors.item() for request in accepted] == list(range(30))
