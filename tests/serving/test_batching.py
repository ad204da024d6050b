"""The queue in front of a model: batches, fair turns, and what happens to work nobody waits for."""

import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from helpers.waiting import PATIENCE

from llmcond.encoders.encoder import Encoded
from llmcond.serving.batching import Batcher, ClosedError


class Model:
    """Embeds a text as its number; waits, where it is told to, before it goes on."""

    def __init__(self):
        self.batches, self.begun, self.go = [], threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, rows):
        self.batches.append([text for text, _ in rows])
        self.begun.release()
        self.go.acquire()
        if any(text == "bad" for text, _ in rows):
            raise ValueError("a text is bad")
        count = np.full(len(rows), 2, dtype=np.int32)
        vectors = np.array([[float(text)] for text, _ in rows], dtype=np.float32)
        return Encoded(vectors, count, count > 2, 0)

    def free(self):
        for _ in range(1_000):
            self.go.release()


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def batcher(model):
    found = Batcher(model, max_tokens=12, max_row_tokens=64)
    yield found
    model.free()
    found.close()


def rows(*texts):
    return [(str(text), "c") for text in texts]


def busy(batcher, model):
    """Keep the model at a first batch, so that what comes then waits."""
    first = batcher.submit(rows(0))
    model.begun.acquire()
    return first


def test_requests_that_came_meanwhile_share_a_batch_and_get_their_own_vectors(batcher, model):
    first = busy(batcher, model)
    others = [batcher.submit(rows(i, i + 10)) for i in range(1, 4)]
    assert batcher.waiting == 6
    model.free()
    assert first.result(30).vectors.tolist() == [[0.0]]
    for i, other in enumerate(others, 1):
        found = other.result(30)
        assert found.vectors.tolist() == [[i], [i + 10.0]]
        assert found.n_tokens.tolist() == [2, 2]
    assert batcher.waiting == 0
    assert len(model.batches) == 2


def test_a_short_request_is_in_the_next_batch_however_long_others_are(batcher, model):
    long = batcher.submit(rows(*range(1_000)))
    model.begun.acquire()
    short = batcher.submit(rows(7_777))
    model.go.release()
    model.begun.acquire()
    assert "7777" in model.batches[1]
    model.free()
    assert short.result(30).vectors.tolist() == [[7777.0]]
    assert long.result(30).vectors[:, 0].tolist() == list(range(1_000))
    assert max(map(len, model.batches)) <= 12


def test_what_was_given_up_is_encoded_no_further(batcher, model):
    long = batcher.submit(rows(*range(1_000)))
    model.begun.acquire()
    assert long.cancel()
    after = batcher.submit(rows(5))
    model.free()
    assert after.result(30).vectors.tolist() == [[5.0]]
    assert sum(map(len, model.batches)) < 20
    assert batcher.waiting == 0
    with pytest.raises(CancelledError):
        long.result(0)


def test_a_request_that_fails_takes_no_other_with_it(batcher, model):
    first = busy(batcher, model)
    good, bad, other = (batcher.submit(rows(text)) for text in (1, "bad", 2))
    model.free()
    assert [one.result(30).vectors.item() for one in (first, good, other)] == [0, 1, 2]
    with pytest.raises(ValueError, match="a text is bad"):
        bad.result(30)
    assert batcher.submit(rows(3)).result(30).vectors.tolist() == [[3.0]]


def test_clients_that_ask_again_at_once_are_in_the_next_batch_with_those_who_wait(batcher, model):
    busy(batcher, model)
    first, second = batcher.submit(rows(1)), batcher.submit(rows(2))
    model.go.release()
    model.begun.acquire()
    third = batcher.submit(rows(3))
    batcher.awaited = 3
    time.sleep(1)  # a batch of a second is followed by a wait of 200 ms at most
    model.go.release()
    first.result(30), second.result(30)
    again = batcher.submit(rows(4))
    batcher.awaited = 2
    model.free()
    assert third.result(30).vectors.item() + again.result(30).vectors.item() == 7
    assert model.batches[2:] == [["3", "4"]]


def test_the_wait_between_two_batches_ends_where_nobody_asks_again(batcher, model):
    busy(batcher, model)
    both = batcher.submit(rows(1)), batcher.submit(rows(2))
    model.go.release()
    model.begun.acquire()
    third = batcher.submit(rows(3))
    batcher.awaited = 1_000
    model.free()
    assert [one.result(30).vectors.item() for one in (*both, third)] == [1, 2, 3]


def test_calls_are_made_by_the_thread_of_the_model_in_their_turn(batcher, model):
    busy(batcher, model)
    before = batcher.submit(rows(1))
    called = batcher.call(lambda: (threading.current_thread().name, len(model.batches)))
    failed = batcher.call(lambda: 1 / 0)
    model.free()
    assert called.result(30) == ("llmcond-model", 2)
    assert before.done()
    with pytest.raises(ZeroDivisionError):
        failed.result(30)


def test_closing_finishes_what_was_accepted_and_takes_no_more(batcher, model):
    accepted = [busy(batcher, model), *(batcher.submit(rows(i)) for i in range(1, 30))]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    while batcher.alive:
        pass
    with pytest.raises(ClosedError):
        batcher.submit(rows(1))
    model.free()
    closing.join(PATIENCE)
    assert [one.result(0).vectors.item() for one in accepted] == list(range(30))


def test_long_texts_count_as_what_they_are_cut_to(model):
    batcher = Batcher(model, max_tokens=100, max_row_tokens=40)
    first = busy(batcher, model)
    others = [batcher.submit([("1" * 10, "c" * 10_000)]) for _ in range(3)]
    model.free()
    for one in (first, *others):
        one.result(30)
    batcher.close()
    assert [len(batch) for batch in model.batches] == [1, 3]
