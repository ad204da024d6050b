"""Threads side by side: in order, few ahead, and nothing lost or left running when one fails."""

import threading
import time
from itertools import count
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.waiting import PATIENCE

from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import UNIT, load_encoder
from llmcond.encoders.threads import CancelledError, Concurrency, WorkerThreads, check_cancelled

# The one thread that a worker has would not show that the number of threads is set back.
pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def workers():
    return WorkerThreads(Concurrency(3, 1))


def square(number):
    return number * number


def wait(event):
    assert event.wait(PATIENCE)


# -- order -------------------------------------------------------------------------------------


def test_results_come_in_the_order_of_their_items(workers):
    later = [Event() for _ in range(3)]

    def backwards(number):
        """Let those that begin together end in reverse."""
        if number < 2:
            wait(later[number + 1])
        if number < 3:
            later[number].set()
        return number

    assert list(workers.map(backwards, range(30))) == list(range(30))


def test_items_run_side_by_side(workers):
    together = threading.Barrier(3)
    list(workers.map(lambda _: together.wait(PATIENCE), range(3)))


@pytest.mark.parametrize("n_items", [0, 1, 2, 3, 4, 50])
def test_any_number_of_items_is_mapped_again_and_again(workers, n_items):
    for _ in range(3):
        assert list(workers.map(square, range(n_items))) == [square(i) for i in range(n_items)]


def test_few_items_are_taken_ahead_of_the_results(workers):
    taken = []

    def endless():
        for number in count():
            taken.append(number)
            yield number

    results = workers.map(square, endless())
    for number in range(20):
        assert next(results) == square(number)
        assert len(taken) <= number + 1 + workers.concurrency.threads
    results.close()


def test_nothing_begins_before_the_first_result_is_asked_for(workers):
    begun = []
    results = workers.map(begun.append, range(5))
    assert begun == []
    list(results)
    assert sorted(begun) == list(range(5))


# -- errors ------------------------------------------------------------------------------------


class Work:
    """Items that all begin, of which one fails while the others are under way."""

    def __init__(self, failing):
        self.failing, self.together = failing, threading.Barrier(3)
        self.begun, self.finished = [], []

    def __call__(self, number):
        self.begun.append(number)
        if number < 3:
            self.together.wait(PATIENCE)
        if number == self.failing:
            raise ValueError(f"item {number}")
        time.sleep(0.05)
        self.finished.append(number)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_items_that_have_begun_are_finished_when_one_fails(workers, failing):
    work = Work(failing)
    with pytest.raises(ValueError, match=f"item {failing}"):
        list(workers.map(work, range(1_000)))
    assert sorted([*work.finished, failing]) == sorted(work.begun)
    begun = list(work.begun)
    assert max(begun) <= failing + 2 * workers.concurrency.threads
    assert list(workers.map(square, range(9))) == [square(i) for i in range(9)]
    assert work.begun == begun


def test_items_that_wait_for_a_thread_never_begin_when_one_fails(workers):
    taken, let_go, begun = threading.Barrier(3), Event(), []

    def occupy(_):
        taken.wait(PATIENCE)
        wait(let_go)

    def fail_first(number):
        begun.append(number)
        if number == 0:
            raise ValueError("item 0")
        time.sleep(0.1)

    other = threading.Thread(target=lambda: list(workers.map(occupy, range(2))))
    other.start()
    taken.wait(PATIENCE)
    with pytest.raises(ValueError, match="item 0"):
        list(workers.map(fail_first, range(1_000)))
    let_go.set()
    other.join(PATIENCE)
    assert list(workers.map(square, range(9))) == [square(i) for i in range(9)]
    assert set(begun) <= {0, 1}


def test_items_that_cannot_be_made_end_the_work(workers):
    finished = []

    def items():
        yield from range(3)
        raise OSError("cannot be read")

    def slow(number):
        time.sleep(0.05)
        finished.append(number)

    with pytest.raises(OSError, match="cannot be read"):
        list(workers.map(slow, items()))
    before = list(finished)
    assert set(before) <= {0, 1, 2}
    assert list(workers.map(square, range(4))) == [0, 1, 4, 9]
    assert finished == before


def test_error_does_not_stop_the_work_that_comes_after(workers):
    with pytest.raises(ValueError, match="item 1"):
        list(workers.map(Work(1), range(5)))
    check_cancelled()


# -- giving up ---------------------------------------------------------------------------------


def test_work_that_is_given_up_is_told_to_stop(workers):
    under_way, stopped = Event(), []

    def work(number):
        if number == 0:
            return number
        under_way.set()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                check_cancelled()
            except CancelledError:
                stopped.append(number)
                raise
            time.sleep(0.001)
        return number

    results = workers.map(work, count())
    assert next(results) == 0
    wait(under_way)
    results.close()
    assert stopped
    assert len(stopped) <= workers.concurrency.threads
    # All are done, and the next work is not told to stop.
    check_cancelled()
    assert list(workers.map(square, range(9))) == [square(i) for i in range(9)]


def test_work_is_told_to_stop_when_its_user_is_interrupted(workers):
    begun, stopped = Event(), Event()

    def work(number):
        if number:
            begun.set()
            while True:
                try:
                    check_cancelled()
                except CancelledError:
                    stopped.set()
                    raise
                time.sleep(0.001)

    def interrupted():
        yield 0
        yield 1
        wait(begun)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(workers.map(work, interrupted()))
    assert stopped.is_set()
    check_cancelled()


def test_work_goes_on_where_nobody_gives_up(workers):
    check_cancelled()
    assert list(workers.map(lambda _: check_cancelled(), range(20))) == [None] * 20


# -- threads -----------------------------------------------------------------------------------


def in_a_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_workers_leave_the_number_of_threads_elsewhere_as_it_was(workers):
    assert set(workers.map(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert torch.get_num_threads() == 2
    assert in_a_new_thread(torch.get_num_threads) == 2
    list(workers.map(square, range(20)))
    assert torch.get_num_threads() == 2
    assert in_a_new_thread(torch.get_num_threads) == 2


def test_workers_that_a_new_thread_starts_leave_its_number_as_it_was(workers):
    """A thread takes its number over when it first needs one, which may be after workers began."""

    def start():
        list(workers.map(square, range(20)))
        return torch.get_num_threads()

    assert in_a_new_thread(start) == 2
    assert torch.get_num_threads() == 2
    assert in_a_new_thread(torch.get_num_threads) == 2
    assert set(workers.map(lambda _: torch.get_num_threads(), range(20))) == {1}


@pytest.mark.parametrize(
    ("cores", "device", "quantize", "runtime", "expected"),
    [
        (1, "cpu", "none", "torch", (1, 1)),
        (2, "cpu", "none", "torch", (2, 1)),
        (6, "cpu", "none", "torch", (6, 1)),
        (6, "cpu", "4bit", "torch", (1, 6)),
        (32, "cpu", "none", "torch", (8, 4)),
        (4, "cuda:0", "none", "torch", (2, 4)),
        (1, "cpu", "none", "openvino", (1, 1)),
        (6, "cpu", "none", "openvino", (2, 6)),
    ],
)
def test_workers_share_the_cores(cores, device, quantize, runtime, expected):
    torch.set_num_threads(cores)
    identity = SimpleNamespace(quantize=quantize)
    resolved = SimpleNamespace(device=device, identity=identity, runtime=runtime)
    workers = WorkerThreads(Concurrency.for_encoder(resolved))
    (threads,) = set(workers.map(lambda _: torch.get_num_threads(), range(20)))
    assert (workers.concurrency.threads, threads) == expected


def test_threads_that_begin_at_once_share_the_workers(workers):
    found, together = {}, threading.Barrier(5)

    def use(number):
        together.wait(PATIENCE)
        found[number] = list(workers.map(square, range(number, number + 40)))

    users = [threading.Thread(target=use, args=(number,)) for number in range(5)]
    for user in users:
        user.start()
    for user in users:
        user.join(PATIENCE)
    assert found == {n: [square(i) for i in range(n, n + 40)] for n in range(5)}


# -- encoders on worker threads ----------------------------------------------------------------


@pytest.fixture(scope="module")
def encoders(tiny_checkpoint):
    """A bidirectional encoder and a causal one that shares prefixes, of three threads each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    options = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    made = {
        "bert": load_encoder(str(tiny_checkpoint()), **options),
        "mistral": load_encoder(str(tiny_checkpoint("mistral")), pooling="last", **options),
    }
    torch.set_num_threads(threads)
    return made


def texts(seed, n_texts):
    words = "two dogs play red hat walk in the park at night children read".split()
    chance = np.random.default_rng(seed)
    return [
        EncoderInput("", " ".join(chance.choice(words, size=chance.integers(1, 20))))
        for _ in range(n_texts)
    ]


@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_threads_that_encode_at_once_get_the_right_vectors(encoders, kind):
    encoder = encoders[kind]
    assert encoder.concurrency.threads == 3
    # Less than one thread takes, and more than all do.
    asked = [texts(seed, n) for seed, n in enumerate([3, UNIT, 2 * UNIT + 1])]
    expected = [
        np.concatenate(
            [encoder.encode_counted(items[at : at + 50]).vectors for at in range(0, len(items), 50)]
        )
        for items in asked
    ]
    found, together = {}, threading.Barrier(len(asked))

    def use(number):
        together.wait(PATIENCE)
        found[number] = encoder.encode(asked[number])

    users = [threading.Thread(target=use, args=(number,)) for number in range(len(asked))]
    for user in users:
        user.start()
    for user in users:
        user.join(PATIENCE)
    for number, items in enumerate(asked):
        np.testing.assert_allclose(found[number], expected[number], rtol=0, atol=1e-5)
        encoded = encoder.encode_counted(items)
        lengths = [len(item.text.split()) + 2 for item in items]
        assert encoded.n_tokens.tolist() == lengths
        assert 0 < encoded.n_computed <= sum(lengths)


def test_error_in_a_worker_is_raised_where_encoding_was_asked_for(encoders, monkeypatch):
    encoder, items = encoders["bert"], texts(10, 3 * UNIT)

    def fail(module, args, kwargs):
        raise RuntimeError("mat1 and mat2 shapes differ")

    hook = encoder.engine.model.network.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            encoder.encode(items)
    finally:
        hook.remove()
    assert np.isfinite(encoder.encode_counted(items).vectors).all()


def test_extraction_that_is_given_up_stops_between_batches(encoders):
    encoder, items = encoders["bert"], texts(11, 3 * UNIT)
    begun, waiting = Event(), Event()
    forwards = []

    def slow(module, args, kwargs):
        forwards.append(len(forwards))
        begun.set()
        wait(waiting)

    before = encoder.engine.budget
    encoder.engine.budget = 64
    hook = encoder.engine.model.network.register_forward_pre_hook(slow, with_kwargs=True)
    try:
        workers = WorkerThreads(encoder.concurrency)
        results = workers.map(encoder.encode_counted, [[items[0]], items, items])
        closing = threading.Timer(0.2, waiting.set)
        closing.start()
        next(results)
        results.close()
    finally:
        hook.remove()
        encoder.engine.budget = before
    assert begun.is_set()
    # Hundreds were to come.
    assert len(forwards) < 100
    assert encoder.encode_counted(items[:5]).vectors.shape == (5, encoder.dim)
