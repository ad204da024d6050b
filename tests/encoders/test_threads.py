"""Worker threads and forked processes: order, lookahead, errors, cancellation, and hanging."""

import multiprocessing
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.checkpoints import load_on_cpu
from helpers.waiting import PATIENCE

import llmcond
from llmcond.base.errors import LlmcondError
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import (
    UNIT,
    CancelledError,
    Concurrency,
    WorkerThreads,
    check_cancelled,
    load_encoder,
)

# With the one thread of a test worker, tests could not see that the number is restored, and PyTorch
# would have no pool of threads that a fork loses.
pytestmark = pytest.mark.usefixtures("two_threads")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture
def workers():
    return WorkerThreads(Concurrency(3, 1))


def square(number):
    return number * number


def wait_for(event):
    assert event.wait(PATIENCE)


def check_usable(workers):
    """Check that the threads have ended, and that the next work is not cancelled."""
    check_cancelled()
    for n_items in (0, 1, 9):
        assert list(workers.map(square, range(n_items))) == [square(i) for i in range(n_items)]


def wait_until_cancelled(stopped):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            check_cancelled()
        except CancelledError:
            stopped.set()
            raise
        time.sleep(0.001)


def test_results_are_in_order_and_few_items_are_consumed_ahead(workers):
    events, consumed = [Event() for _ in range(3)], []

    def endless():
        for number in count():
            consumed.append(number)
            yield number

    def backwards(number):
        """Let the first three items, which begin together, end in reverse order."""
        if number < 2:
            wait_for(events[number + 1])
        if number < 3:
            events[number].set()
        return number

    results = workers.map(backwards, endless())
    for number in range(20):
        assert next(results) == number
        assert len(consumed) <= number + 1 + workers.concurrency.threads
    results.close()
    check_usable(workers)


# -- errors and cancellation -------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 2])
def test_running_items_finish_when_one_fails(workers, failing):
    together, begun, finished = threading.Barrier(3), [], []

    def work(number):
        begun.append(number)
        if number < 3:
            together.wait(PATIENCE)
        if number == failing:
            raise ValueError(f"item {number}")
        time.sleep(0.05)
        finished.append(number)

    with pytest.raises(ValueError, match=f"item {failing}"):
        list(workers.map(work, range(1_000)))
    assert sorted([*finished, failing]) == sorted(begun)
    assert max(begun) <= failing + 2 * workers.concurrency.threads
    n_begun = len(begun)
    check_usable(workers)
    assert len(begun) == n_begun


@pytest.mark.parametrize("interrupts", [True, False])
def test_interrupted_or_closed_results_cancel_the_work(workers, interrupts):
    running, stopped = Event(), Event()

    def items():
        yield from range(2)
        wait_for(running)
        if interrupts:
            raise KeyboardInterrupt

    def work(number):
        if number:
            running.set()
            wait_until_cancelled(stopped)
        return number

    results = workers.map(work, items())
    if interrupts:
        with pytest.raises(KeyboardInterrupt):
            list(results)
    else:
        assert next(results) == 0
        wait_for(running)
        results.close()
    assert stopped.is_set()
    check_usable(workers)


# -- threads -----------------------------------------------------------------------------------


def run_in_new_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_workers_do_not_change_thread_count_of_other_threads(workers):
    def start():
        list(workers.map(square, range(20)))
        return torch.get_num_threads()

    # A thread inherits its number when it first needs it, which may be after workers began.
    assert run_in_new_thread(start) == 2
    assert set(workers.map(lambda _: torch.get_num_threads(), range(20))) == {1}
    assert torch.get_num_threads() == 2
    assert run_in_new_thread(torch.get_num_threads) == 2


@pytest.mark.parametrize(
    ("cores", "device", "quantize", "runtime", "expected"),
    [
        (6, "cpu", "none", "torch", (6, 1)),
        (6, "cpu", "4bit", "torch", (1, 6)),
        (32, "cpu", "none", "torch", (8, 4)),
        (4, "cuda:0", "none", "torch", (2, 4)),
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


def run_together(function, arguments):
    """Call a function in one thread per argument, all at once, and return the results."""
    barrier = threading.Barrier(len(arguments))

    def use(argument):
        barrier.wait(PATIENCE)
        return function(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(use, arguments))


# -- encoders on worker threads ----------------------------------------------------------------


def make_encoder(tiny_checkpoint, kind, **options):
    """Load an encoder with three threads."""
    torch.set_num_threads(3)
    encoder = load_on_cpu(tiny_checkpoint(kind), **options)
    torch.set_num_threads(2)
    assert encoder.concurrency.threads == 3
    return encoder


def random_inputs(seed, n_texts):
    words = "two dogs play red hat walk in the park at night children read".split()
    generator = np.random.default_rng(seed)
    return [
        EncoderInput("", " ".join(generator.choice(words, size=generator.integers(1, 20))))
        for _ in range(n_texts)
    ]


@pytest.mark.processor
@pytest.mark.parametrize(("kind", "options"), [("bert", {}), ("mistral", {"pooling": "last"})])
def test_threads_that_encode_concurrently_get_correct_vectors(tiny_checkpoint, kind, options):
    encoder = make_encoder(tiny_checkpoint, kind, **options)
    # These are less than one thread takes at a time, exactly as much, and more than two take.
    batches = [random_inputs(seed, n) for seed, n in enumerate([3, UNIT, 2 * UNIT + 1])]
    encoded = run_together(lambda n: encoder.encode_with_counts(batches[n]), range(len(batches)))
    for number, items in enumerate(batches):
        parts = [encoder.encode(items[start : start + 50]) for start in range(0, len(items), 50)]
        vectors, expected = encoded[number].vectors, np.concatenate(parts)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
        lengths = [len(item.text.split()) + 2 for item in items]
        assert encoded[number].n_tokens.tolist() == lengths
        assert 0 < encoded[number].n_computed <= sum(lengths)


def test_cancelled_extraction_stops_between_batches(tiny_checkpoint):
    encoder = make_encoder(tiny_checkpoint, "bert")
    items, released, forwards = random_inputs(11, 3 * UNIT), Event(), []

    def slow(module, args, kwargs):
        forwards.append(len(forwards))
        wait_for(released)

    encoder.engine.budget = 64
    hook = encoder.engine.model.network.register_forward_pre_hook(slow, with_kwargs=True)
    results = WorkerThreads(encoder.concurrency).map(
        encoder.encode_with_counts, [[items[0]], items, items]
    )
    threading.Timer(0.2, released.set).start()
    next(results)
    results.close()
    hook.remove()
    # Without cancellation there would be hundreds.
    assert 0 < len(forwards) < 100
    assert encoder.encode_with_counts(items[:5]).vectors.shape == (5, encoder.dim)


# -- forked processes --------------------------------------------------------------------------

TEXTS = [f"A man rides horse number {number}." for number in range(40)]


def result_in_child(work):
    """Return the result of ``work`` in a forked process, or the message of its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def report():
        try:
            sender.send(work())
        except LlmcondError as error:
            sender.send(str(error))

    process = context.Process(target=report)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and Lance warn of forks
        process.start()
    if not receiver.poll(PATIENCE):
        process.kill()
        pytest.fail("the forked process hangs")
    result = receiver.recv()
    process.join(PATIENCE)
    return result


@needs_fork
@pytest.mark.parametrize(
    ("runtime", "used"), [("openvino", True), ("torch", True), ("torch", False)]
)
def test_encoder_works_in_forked_process(runtime, used):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    encoder = load_encoder("minilm", device="cpu", dtype="float32", runtime=runtime)
    texts = TEXTS[:8]
    expected = encoder.encode(texts) if used else None

    def compare():
        first, second = encoder.encode(texts), encoder.encode(texts[::-1])[::-1]
        return np.abs(first - (second if expected is None else expected)).max()

    # A process that is forked from the forked process works too.
    assert result_in_child(lambda: max(compare(), result_in_child(compare))) < 1e-5
    # The parent is not affected.
    np.testing.assert_array_equal(encoder.encode(texts), encoder.encode(texts))


@needs_fork
def test_encoder_on_gpu_is_rejected_at_once(minilm):
    encoder = load_encoder("minilm", device="cpu", dtype="float32")
    encoder.resolved = replace(encoder.resolved, device="cuda:0")  # as on a machine with a GPU
    message = result_in_child(lambda: encoder.encode(TEXTS))
    assert "minilm was loaded on cuda:0 before this process was forked" in message
    assert "get_context('spawn')" in message


@needs_fork
def test_lance_is_rejected_in_forked_process_at_once(tmp_path):
    index = llmcond.Index.build(tmp_path / "index", TEXTS, device="cpu")
    index.search("dogs", condition="the animal")
    texts, out = index.folder / "texts.lance", tmp_path / "vectors.lance"
    for use in (
        lambda: index.search("cats", condition="the animal"),
        lambda: index.add(["A new text."]),
        lambda: llmcond.extract(model="minilm", run=tmp_path / "run"),
        lambda: llmcond.embed(texts=texts, out=out, condition="c"),
    ):
        assert "does not work after a fork. Start processes with" in result_in_child(use)
