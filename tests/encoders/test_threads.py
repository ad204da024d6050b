"""Worker threads: order, lookahead, errors and cancellation."""

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
from llmcond.encoders.encoder import (
    UNIT,
    CancelledError,
    Concurrency,
    WorkerThreads,
    check_cancelled,
    load_encoder,
)

# With the one thread of a test worker, tests could not see that the number is restored.
pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def workers():
    return WorkerThreads(Concurrency(3, 1))


def square(number):
    return number * number


def wait_for(event):
    assert event.wait(PATIENCE)


# -- order -------------------------------------------------------------------------------------


def test_results_are_in_item_order(workers):
    events = [Event() for _ in range(3)]

    def backwards(number):
        """Let the first three items, which begin together, end in reverse order."""
        if number < 2:
            wait_for(events[number + 1])
        if number < 3:
            events[number].set()
        return number

    assert list(workers.map(backwards, range(30))) == list(range(30))


def test_items_run_concurrently(workers):
    barrier = threading.Barrier(3)
    list(workers.map(lambda _: barrier.wait(PATIENCE), range(3)))


@pytest.mark.parametrize("n_items", [0, 1, 2, 3, 4, 50])
def test_map_can_be_repeated_with_any_number_of_items(workers, n_items):
    for _ in range(3):
        assert list(workers.map(square, range(n_items))) == [square(i) for i in range(n_items)]


def test_few_items_are_consumed_ahead_of_results(workers):
    consumed = []

    def endless():
        for number in count():
            consumed.append(number)
            yield number

    results = workers.map(square, endless())
    for number in range(20):
        assert next(results) == square(number)
        assert len(consumed) <= number + 1 + workers.concurrency.threads
    results.close()


def test_map_is_lazy(workers):
    begun = []
    results = workers.map(begun.append, range(5))
    assert begun == []
    list(results)
    assert sorted(begun) == list(range(5))


# -- errors ------------------------------------------------------------------------------------


class FailingWork:
    """Work on items of which one fails while others are running."""

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
def test_running_items_finish_when_one_fails(workers, failing):
    work = FailingWork(failing)
    with pytest.raises(ValueError, match=f"item {failing}"):
        list(workers.map(work, range(1_000)))
    assert sorted([*work.finished, failing]) == sorted(work.begun)
    begun = list(work.begun)
    assert max(begun) <= failing + 2 * workers.concurrency.threads
    assert list(workers.map(square, range(9))) == [square(i) for i in range(9)]
    assert work.begun == begun


def test_waiting_items_do_not_begin_when_one_fails(workers):
    occupied, release, begun = threading.Barrier(3), Event(), []

    def occupy(_):
        occupied.wait(PATIENCE)
        wait_for(release)

    def fail_first(number):
        begun.append(number)
        if number == 0:
            raise ValueError("item 0")
        time.sleep(0.1)

    other = threading.Thread(target=lambda: list(workers.map(occupy, range(2))))
    other.start()
    occupied.wait(PATIENCE)
    with pytest.raises(ValueError, match="item 0"):
        list(workers.map(fail_first, range(1_000)))
    release.set()
    other.join(PATIENCE)
    assert list(workers.map(square, range(9))) == [square(i) for i in range(9)]
    assert set(begun) <= {0, 1}


def test_error_in_items_ends_the_work(workers):
    finished = []

    def items():
        yield from range(3)
        raise OSError("cannot be read")

    def slow(number):
        time.sleep(0.05)
        finished.append(number)

    with pytest.raises(OSError, match="cannot be read"):
        list(workers.map(slow, items()))
    finished_before = list(finished)
    assert set(finished_before) <= {0, 1, 2}
    assert list(workers.map(square, range(4))) == [0, 1, 4, 9]
    assert finished == finished_before


def test_error_does_not_cancel_later_work(workers):
    with pytest.raises(ValueError, match="item 1"):
        list(workers.map(FailingWork(1), range(5)))
    check_cancelled()


# -- cancellation ------------------------------------------------------------------------------


def test_closed_results_cancel_the_work(workers):
    running, stopped = Event(), []

    def work(number):
        if number == 0:
            return number
        running.set()
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
    wait_for(running)
    results.close()
    assert stopped
    assert len(stopped) <= workers.concurrency.threads
    # All threads have ended, and the next work is not cancelled.
    check_cancelled()
    assert list(workers.map(square, range(9))) == [square(i) for i in range(9)]


def test_keyboard_interrupt_cancels_the_work(workers):
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
        wait_for(begun)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(workers.map(work, interrupted()))
    assert stopped.is_set()
    check_cancelled()


def test_work_is_not_cancelled_by_default(workers):
    check_cancelled()
    assert list(workers.map(lambda _: check_cancelled(), range(20))) == [None] * 20


# -- threads -----------------------------------------------------------------------------------


def run_in_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_workers_do_not_change_thread_count_of_other_threads(workers):
    assert set(workers.map(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert torch.get_num_threads() == 2
    assert run_in_new_thread(torch.get_num_threads) == 2
    list(workers.map(square, range(20)))
    assert torch.get_num_threads() == 2
    assert run_in_new_thread(torch.get_num_threads) == 2


def test_workers_do_not_change_thread_count_of_their_caller(workers):
    """A thread inherits its number when it first needs it, which may be after workers began."""

    def start():
        list(workers.map(square, range(20)))
        return torch.get_num_threads()

    assert run_in_new_thread(start) == 2
    assert torch.get_num_threads() == 2
    assert run_in_new_thread(torch.get_num_threads) == 2
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


def test_threads_share_the_workers(workers):
    results, barrier = {}, threading.Barrier(5)

    def use(number):
        barrier.wait(PATIENCE)
        results[number] = list(workers.map(square, range(number, number + 40)))

    users = [threading.Thread(target=use, args=(number,)) for number in range(5)]
    for user in users:
        user.start()
    for user in users:
        user.join(PATIENCE)
    assert results == {n: [square(i) for i in range(n, n + 40)] for n in range(5)}


# -- encoders on worker threads ----------------------------------------------------------------


@pytest.fixture(scope="module")
def encoders(tiny_checkpoint):
    """A bidirectional encoder and a causal one with shared prefixes, with three threads each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    options = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    encoders_by_kind = {
        "bert": load_encoder(str(tiny_checkpoint()), **options),
        "mistral": load_encoder(str(tiny_checkpoint("mistral")), pooling="last", **options),
    }
    torch.set_num_threads(threads)
    return encoders_by_kind


def random_inputs(seed, n_texts):
    words = "two dogs play red hat walk in the park at night children read".split()
    generator = np.random.default_rng(seed)
    return [
        EncoderInput("", " ".join(generator.choice(words, size=generator.integers(1, 20))))
        for _ in range(n_texts)
    ]


@pytest.mark.processor
@pytest.mark.parametrize("kind", ["bert", "mistral"])
def test_threads_that_encode_concurrently_get_correct_vectors(encoders, kind):
    encoder = encoders[kind]
    assert encoder.concurrency.threads == 3
    # These are less than one thread takes at a time, exactly as much, and more than two take.
    batches = [random_inputs(seed, n) for seed, n in enumerate([3, UNIT, 2 * UNIT + 1])]
    expected = [
        np.concatenate(
            [encoder.encode(items[start : start + 50]) for start in range(0, len(items), 50)]
        )
        for items in batches
    ]
    encoded, barrier = {}, threading.Barrier(len(batches))

    def use(number):
        barrier.wait(PATIENCE)
        encoded[number] = encoder.encode_with_counts(batches[number])

    users = [threading.Thread(target=use, args=(number,)) for number in range(len(batches))]
    for user in users:
        user.start()
    for user in users:
        user.join(PATIENCE)
    for number, items in enumerate(batches):
        np.testing.assert_allclose(encoded[number].vectors, expected[number], rtol=0, atol=1e-5)
        lengths = [len(item.text.split()) + 2 for item in items]
        assert encoded[number].n_tokens.tolist() == lengths
        assert 0 < encoded[number].n_computed <= sum(lengths)


def test_error_in_worker_is_raised_by_encode(encoders, monkeypatch):
    encoder, items = encoders["bert"], random_inputs(10, 3 * UNIT)

    def fail(module, args, kwargs):
        raise RuntimeError("mat1 and mat2 shapes differ")

    hook = encoder.engine.model.network.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            encoder.encode(items)
    finally:
        hook.remove()
    assert np.isfinite(encoder.encode_with_counts(items).vectors).all()


def test_cancelled_extraction_stops_between_batches(encoders):
    encoder, items = encoders["bert"], random_inputs(11, 3 * UNIT)
    begun, released = Event(), Event()
    forwards = []

    def slow(module, args, kwargs):
        forwards.append(len(forwards))
        begun.set()
        wait_for(released)

    budget = encoder.engine.budget
    encoder.engine.budget = 64
    hook = encoder.engine.model.network.register_forward_pre_hook(slow, with_kwargs=True)
    try:
        workers = WorkerThreads(encoder.concurrency)
        results = workers.map(encoder.encode_with_counts, [[items[0]], items, items])
        timer = threading.Timer(0.2, released.set)
        timer.start()
        next(results)
        results.close()
    finally:
        hook.remove()
        encoder.engine.budget = budget
    assert begun.is_set()
    # Without cancellation there would be hundreds.
    assert len(forwards) < 100
    assert encoder.encode_with_counts(items[:5]).vectors.shape == (5, encoder.dim)
