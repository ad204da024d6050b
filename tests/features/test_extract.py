"""Extraction: every input is encoded once, and interruptions change no bit of the vectors."""

import json
import random
import resource
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import lance
import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.processes import FORK_CONTEXT
from helpers.waiting import PATIENCE
from safetensors.torch import load_file, save_file

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Concurrency, Encoder
from llmcond.encoders.spec import InputError
from llmcond.errors import DiskFullError, LlmcondError
from llmcond.features.extract import Chunking, Extraction, extract, order_inputs
from llmcond.features.missing import count_in_background
from llmcond.features.store import FeatureStore

OPTIONS = EncoderOptions(dtype="float32", device="cpu", max_tokens_per_batch=128)
CHUNK = 16
WINDOW = 64


def make_inputs(n, seed=0):
    words = "two three men women dogs ride play read walk in on park beach red blue hat".split()
    rng = random.Random(seed)
    texts = {" ".join(rng.choices(words, k=rng.randint(1, 20))): None for _ in range(2 * n)}
    return [EncoderInput("", text) for text in list(texts)[:n]]


INPUTS = make_inputs(640)


class SilentProgress:
    def start(self, inputs, characters):
        pass

    def advance(self, inputs, characters, tokens, seconds):
        pass


class RecordingProgress:
    """A progress that records the calls of its methods."""

    def __init__(self):
        self.started, self.advanced = [], []

    def start(self, inputs, characters):
        self.started.append((inputs, characters))

    def advance(self, inputs, characters, tokens, seconds):
        self.advanced.append((inputs, characters, tokens, seconds))


class RecordingEncoder:
    """A real encoder, on one thread, that records the batches it encodes."""

    concurrency = Concurrency(1, 1)

    def __init__(self, encoder):
        self.encoder = encoder
        self.batches = []

    def encode_with_counts(self, inputs):
        self.batches.append(list(inputs))
        return self.encoder.encode_with_counts(inputs)


class LoggingEncoder:
    """A real encoder that appends the keys of its inputs to a file."""

    def __init__(self, encoder, log):
        self.encoder, self.log, self.concurrency = encoder, log, encoder.concurrency

    def encode_with_counts(self, inputs):
        with self.log.open("ab") as stream:
            stream.write(b"".join(item.key for item in inputs))
        return self.encoder.encode_with_counts(inputs)


class FailingEncoder:
    """A real encoder that fails for one input while another thread is computing."""

    def __init__(self, encoder, bad_input):
        self.encoder, self.bad_input, self.concurrency = encoder, bad_input, encoder.concurrency
        self.other_started, self.failing = threading.Event(), threading.Event()
        self.other = []

    def encode_with_counts(self, inputs):
        if self.bad_input in inputs:
            assert self.other_started.wait(PATIENCE)
            self.failing.set()
            raise LlmcondError("ran out of memory")
        if not self.other_started.is_set():
            self.other = list(inputs)
            self.other_started.set()
            assert self.failing.wait(PATIENCE)
            # The error must be raised before these vectors are computed.
            time.sleep(0.1)
        return self.encoder.encode_with_counts(inputs)


def fail_to_load():
    raise AssertionError("the encoder was loaded")


def open_store(root, checkpoint, dtype="float32", options=OPTIONS):
    return FeatureStore(root, resolve(str(checkpoint), options).identity, dtype)


def read_rows(store):
    """Return the rows of the store by key, after checking that no key occurs twice."""
    rows = lance.dataset(str(store.folder / "vectors.lance")).to_table().to_pylist()
    by_key = {
        row["key"]: (np.array(row["vector"]).tobytes(), row["n_tokens"], row["truncated"])
        for row in rows
    }
    assert len(by_key) == len(rows)
    return by_key


def extract_in_worker(checkpoint, root, inputs, connection, file_limit=None, threads=1):
    """Extract in a process that sends "ready" before encoding and waits for a message to go on."""
    torch.set_num_threads(threads)
    resolved = resolve(str(checkpoint), OPTIONS)

    def load():
        encoder = Encoder(resolved)
        connection.send("ready")
        connection.recv()
        return encoder

    store = FeatureStore(root, resolved.identity, "float32")
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    try:
        connection.send(extract(inputs, store, load, SilentProgress(), Chunking(CHUNK)))
    except DiskFullError as error:
        connection.send(error)


def extract_stream_in_worker(checkpoint, root, inputs, connection, log):
    """Extract from a generator, on two threads; send "half" when half of it has been read."""
    torch.set_num_threads(2)
    encoder = Encoder(resolve(str(checkpoint), OPTIONS))

    def stream_inputs():
        for position, item in enumerate(inputs):
            if position == len(inputs) // 2:
                connection.send("half")
            yield item

    connection.send("ready")
    connection.recv()
    store = open_store(root, checkpoint)
    result = extract(
        stream_inputs(),
        store,
        lambda: LoggingEncoder(encoder, log),
        SilentProgress(),
        Chunking(CHUNK, WINDOW),
    )
    connection.send(result)


def start_worker(*arguments, target=extract_in_worker):
    """Start a worker process, and wait until its encoder is loaded."""
    parent_end, child_end = FORK_CONTEXT.Pipe()
    process = FORK_CONTEXT.Process(target=target, args=(*arguments[:3], child_end, *arguments[3:]))
    process.start()
    child_end.close()
    assert parent_end.recv() == "ready"
    return process, parent_end


def finish_worker(process, connection):
    result = connection.recv()
    process.join()
    return result


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return tiny_checkpoint()


@pytest.fixture(scope="module")
def encoder(checkpoint):
    """An encoder of two threads, however many cores there are."""
    encoder = Encoder(resolve(str(checkpoint), OPTIONS))
    encoder.concurrency = Concurrency(2, 1)
    return encoder


@pytest.fixture(scope="module")
def uninterrupted_rows(tmp_path_factory, checkpoint):
    """Rows that one process stores if nobody interrupts it."""
    root = tmp_path_factory.mktemp("undisturbed")
    process, connection = start_worker(checkpoint, root, INPUTS)
    connection.send("go")
    assert finish_worker(process, connection).n_computed == len(INPUTS)
    return read_rows(open_store(root, checkpoint))


def copy_with_edited_weights(checkpoint, folder, name, edit):
    copy = shutil.copytree(checkpoint, folder)
    weights = load_file(copy / "model.safetensors")
    edit(weights[name])
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_stored_vectors_match_the_encoder(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    inputs = INPUTS[:50]
    result = extract(
        [*inputs, *inputs[:10]], store, lambda: encoder, SilentProgress(), Chunking(CHUNK)
    )
    expected = encoder.encode_with_counts(inputs)
    np.testing.assert_allclose(store.lookup(inputs).read(), expected.vectors, atol=1e-6)
    assert (result.n_inputs, result.n_computed, result.n_truncated) == (50, 50, 0)
    assert result.n_tokens == expected.n_tokens.sum()


def test_second_extraction_loads_no_encoder(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:50], store, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    before = read_rows(store)
    reopened = open_store(tmp_path, checkpoint)
    second = extract(INPUTS[49::-1], reopened, fail_to_load, SilentProgress(), Chunking(CHUNK))
    assert (second.n_inputs, second.n_computed, second.n_tokens) == (50, 0, 0)
    assert read_rows(store) == before


def test_only_missing_inputs_are_encoded(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:30], store, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    recorder = RecordingEncoder(encoder)
    result = extract(INPUTS[:70], store, lambda: recorder, SilentProgress(), Chunking(CHUNK))
    encoded = [item for batch in recorder.batches for item in batch]
    assert sorted(encoded, key=INPUTS.index) == INPUTS[30:70]
    assert result.n_computed == 40


def test_extracting_no_inputs_is_not_an_error(tmp_path, checkpoint):
    result = extract([], open_store(tmp_path, checkpoint), fail_to_load, SilentProgress())
    assert (result.n_inputs, result.n_computed, result.n_truncated) == (0, 0, 0)


def test_later_extraction_counts_truncated_inputs_again(tmp_path, checkpoint):
    options = EncoderOptions(dtype="float32", device="cpu", max_length=8)
    encoder = Encoder(resolve(str(checkpoint), options))
    store = open_store(tmp_path, checkpoint, options=options)
    inputs = [EncoderInput("", "red " * n) for n in (2, 6, 7, 12)]
    first = extract(inputs, store, lambda: encoder, SilentProgress())
    assert (first.n_truncated, first.n_tokens) == (2, 4 + 8 + 9 + 14)
    assert extract(inputs[:3], store, fail_to_load, SilentProgress()).n_truncated == 1


def test_progress_reports_every_stored_batch(tmp_path, checkpoint, encoder):
    progress = RecordingProgress()
    inputs = INPUTS[:40]
    result = extract(
        inputs, open_store(tmp_path, checkpoint), lambda: encoder, progress, Chunking(CHUNK)
    )
    characters = sum(len(item.text) for item in inputs)
    assert progress.started == [(40, characters)]
    # One thread computes half a chunk at a time.
    assert [row[0] for row in progress.advanced] == [8, 8, 8, 8, 8]
    assert sum(row[1] for row in progress.advanced) == characters
    assert sum(row[2] for row in progress.advanced) == result.n_tokens


def test_reported_time_excludes_loading(tmp_path, checkpoint, encoder, monkeypatch):
    """On the fake clock, loading takes 100 s and a batch takes 2 s."""
    clock, progress = [1_000.0], RecordingProgress()
    fake_time = SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    monkeypatch.setattr("llmcond.features.extract.time", fake_time)

    class TimedEncoder(RecordingEncoder):
        def encode_with_counts(self, inputs):
            clock[0] += 2
            return super().encode_with_counts(inputs)

    def load():
        clock[0] += 100
        return TimedEncoder(encoder)

    result = extract(INPUTS[:80], open_store(tmp_path, checkpoint), load, progress, Chunking(CHUNK))
    assert [row[3] for row in progress.advanced] == [2] * 5
    assert 2 <= result.seconds <= 10


def test_many_inputs_are_counted_during_encoding(tmp_path, checkpoint, encoder, monkeypatch):
    progress, inputs, counted = RecordingProgress(), INPUTS[:40], threading.Event()
    monkeypatch.setattr("llmcond.features.extract.COUNTED_FIRST", 39)
    progress.start = lambda *amount: (progress.started.append(amount), amount[0] and counted.set())
    progress.advance = lambda *_: counted.wait(PATIENCE)
    store = open_store(tmp_path, checkpoint)
    extract(inputs, store, lambda: encoder, progress, Chunking(CHUNK))
    assert sorted(progress.started, key=str) == [
        (40, sum(len(item.text) for item in inputs)),
        (None, None),
    ]
    progress.started.clear()
    extract(inputs, store, fail_to_load, progress, Chunking(CHUNK))
    assert progress.started == []


def test_counting_ends_with_the_extraction(tmp_path, checkpoint):
    def stream_endlessly():
        yield from INPUTS
        while True:
            yield INPUTS[0]

    counts = []
    with count_in_background(
        open_store(tmp_path, checkpoint), stream_endlessly(), 16, counts.append
    ):
        assert threading.active_count() > 1
    assert not counts


def test_order_inputs_deduplicates_and_sorts_by_length():
    shuffled = random.Random(1).sample([*INPUTS, *INPUTS[:99]], k=len(INPUTS) + 99)
    ordered = order_inputs(shuffled)
    assert ordered == order_inputs(INPUTS)
    assert len(ordered) == len(INPUTS)
    sizes = [len(item.text) for item in ordered]
    assert sizes == sorted(sizes, reverse=True)


def test_stored_chunks_do_not_shift_other_chunks(tmp_path, checkpoint, encoder):
    inputs = order_inputs(INPUTS[:80])
    chunks = [inputs[i : i + CHUNK] for i in range(0, 80, CHUNK)]
    store = open_store(tmp_path, checkpoint)
    for stored in (chunks[3], chunks[1]):
        extract(stored, store, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    recorder = RecordingEncoder(encoder)
    extract(INPUTS[:80], store, lambda: recorder, SilentProgress(), Chunking(CHUNK))
    assert recorder.batches == [chunks[0], chunks[2], chunks[4]]


def test_partly_stored_chunks_are_completed_without_changes(tmp_path, checkpoint, encoder):
    whole, partial = (open_store(tmp_path / name, checkpoint) for name in ("whole", "partial"))
    extract(INPUTS[:200], whole, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    extract(INPUTS[:200:3], partial, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    stored = read_rows(partial)
    extract(INPUTS[:200], partial, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    assert stored.items() <= read_rows(partial).items()
    np.testing.assert_allclose(
        partial.lookup(INPUTS[:200]).read(), whole.lookup(INPUTS[:200]).read(), atol=1e-6
    )


def test_killed_extractions_resume_bit_for_bit(tmp_path, checkpoint, uninterrupted_rows):
    rng = random.Random(7)
    store = open_store(tmp_path, checkpoint)
    sizes = []
    partial_sizes = set()
    versions = store.folder / "vectors.lance" / "_versions"
    # How far an extraction gets depends on how busy the machine is, so it is killed shortly after
    # it has stored something.
    while len(partial_sizes) < 4 and len(sizes) < 60:
        process, connection = start_worker(checkpoint, tmp_path, INPUTS)
        before = len(list(versions.glob("*")))
        connection.send("go")
        while process.is_alive() and len(list(versions.glob("*"))) == before:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        store.refresh()
        sizes.append(len(store))
        partial_sizes |= {len(store)} - {0, len(INPUTS)}
    assert len(partial_sizes) >= 4, sizes
    process, connection = start_worker(checkpoint, tmp_path, INPUTS)
    connection.send("go")
    assert finish_worker(process, connection).n_computed == len(INPUTS) - sizes[-1]
    assert read_rows(store) == uninterrupted_rows


def test_two_processes_share_one_extraction(tmp_path, checkpoint, uninterrupted_rows):
    workers = [start_worker(checkpoint, tmp_path, INPUTS) for _ in range(2)]
    for _, connection in workers:
        connection.send("go")
    computed = [finish_worker(*worker).n_computed for worker in workers]
    assert min(computed) > 0
    assert sum(computed) == len(INPUTS)
    assert read_rows(open_store(tmp_path, checkpoint)) == uninterrupted_rows


def test_process_takes_over_from_killed_process(tmp_path, checkpoint, uninterrupted_rows):
    (killed, killed_connection), (survivor, connection) = (
        start_worker(checkpoint, tmp_path, INPUTS) for _ in range(2)
    )
    killed_connection.send("go")
    connection.send("go")
    time.sleep(0.05)
    killed.kill()
    result = finish_worker(survivor, connection)
    assert isinstance(result, Extraction)
    assert read_rows(open_store(tmp_path, checkpoint)) == uninterrupted_rows


@pytest.mark.parametrize("threads", [1, 3])
def test_full_disk_keeps_stored_features(tmp_path, checkpoint, encoder, threads):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:40], store, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    before = read_rows(store)
    # The limit is below the size of a commit's manifest, as Lance overlooks truncated data files.
    process, connection = start_worker(checkpoint, tmp_path, INPUTS, 512, threads)
    connection.send("go")
    error = finish_worker(process, connection)
    assert isinstance(error, DiskFullError)
    assert "the 40 features already stored are kept" in str(error)
    reopened = open_store(tmp_path, checkpoint)
    assert read_rows(reopened) == before
    extract(INPUTS, reopened, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    assert len(read_rows(reopened)) == len(INPUTS)


# -- streams ---------------------------------------------------------------------------------------


def test_inputs_may_come_from_a_generator(tmp_path, checkpoint, encoder):
    progress, store = RecordingProgress(), open_store(tmp_path, checkpoint)
    inputs = INPUTS[:150]
    result = extract(iter(inputs), store, lambda: encoder, progress, Chunking(CHUNK, WINDOW))
    # The number of inputs of a generator is unknown.
    assert progress.started == [(None, None)]
    assert sum(row[0] for row in progress.advanced) == 150
    expected = encoder.encode_with_counts(inputs)
    assert (result.n_inputs, result.n_computed) == (150, 150)
    assert result.n_tokens == expected.n_tokens.sum()
    np.testing.assert_allclose(store.lookup(inputs).read(), expected.vectors, atol=1e-6)


def test_generator_of_stored_inputs_loads_no_encoder(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:150], store, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    progress = RecordingProgress()
    second = extract(iter(INPUTS[:150]), store, fail_to_load, progress, Chunking(CHUNK, WINDOW))
    assert (second.n_inputs, second.n_computed) == (150, 0)
    assert progress.started == []


def test_generator_is_read_little_ahead_of_stored_inputs(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    ahead = []

    def stream_inputs():
        for n_read, item in enumerate(INPUTS, start=1):
            ahead.append(n_read - len(store))
            yield item

    extract(stream_inputs(), store, lambda: encoder, SilentProgress(), Chunking(CHUNK, WINDOW))
    assert len(ahead) == len(INPUTS)
    assert max(ahead) <= WINDOW + 2 * CHUNK


def test_repeats_across_windows_are_encoded_and_counted_once(tmp_path, checkpoint, encoder):
    recorder, progress = RecordingEncoder(encoder), RecordingProgress()
    stream = iter([*INPUTS[:64], *INPUTS[32:96], *INPUTS[:96]])
    store = open_store(tmp_path, checkpoint)
    result = extract(stream, store, lambda: recorder, progress, Chunking(CHUNK, WINDOW))
    encoded = [item for batch in recorder.batches for item in batch]
    assert sorted(encoded, key=INPUTS.index) == INPUTS[:96]
    assert (result.n_inputs, result.n_computed) == (96, 96)
    assert result.n_tokens == encoder.encode_with_counts(INPUTS[:96]).n_tokens.sum()
    assert sum(row[0] for row in progress.advanced) == 96


@pytest.mark.parametrize("step", [4, 8])
def test_immediate_repeats_are_stored_and_counted_once(tmp_path, checkpoint, encoder, step):
    """While one thread encodes an input, another one meets it again, in the same batch or not."""
    store = open_store(tmp_path, checkpoint)
    starts = sorted([*range(0, 153, step), *range(0, 153, 8)])
    stream = (item for start in starts for item in INPUTS[start : start + 8])
    result = extract(stream, store, lambda: encoder, SilentProgress(), Chunking(CHUNK, 8))
    assert (result.n_inputs, result.n_computed) == (160, 160)
    assert len(read_rows(store)) == 160


def test_truncated_inputs_are_counted_once_across_windows(tmp_path, checkpoint):
    options = EncoderOptions(dtype="float32", device="cpu", max_length=8)
    encoder = Encoder(resolve(str(checkpoint), options))
    store = open_store(tmp_path, checkpoint, options=options)
    inputs = [EncoderInput("", "red " * n) for n in (7, 2, 7, 12, 6, 12, 9, 3, 7)]
    first = extract(iter(inputs), store, lambda: encoder, SilentProgress(), Chunking(window=2))
    # 7, 9 and 12 words are more than 8 tokens, with the two special tokens.
    assert (first.n_inputs, first.n_truncated) == (6, 3)
    second = extract(iter(inputs[:4]), store, fail_to_load, SilentProgress(), Chunking(window=2))
    assert (second.n_inputs, second.n_truncated) == (3, 2)


def test_killed_stream_recomputes_at_most_one_chunk(tmp_path, checkpoint):
    def begin(name, log):
        arguments = (checkpoint, tmp_path / name, INPUTS, tmp_path / log)
        process, connection = start_worker(*arguments, target=extract_stream_in_worker)
        connection.send("go")
        assert connection.recv() == "half"
        return process, connection

    assert finish_worker(*begin("whole", "whole.log")).n_computed == len(INPUTS)
    killed, _ = begin("killed", "killed.log")
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    stored = len(open_store(tmp_path / "killed", checkpoint))
    assert 0 < stored < len(INPUTS)
    result = finish_worker(*begin("killed", "resumed.log"))
    assert (result.n_inputs, result.n_computed) == (len(INPUTS), len(INPUTS) - stored)

    logs = (tmp_path / "killed.log").read_bytes() + (tmp_path / "resumed.log").read_bytes()
    encoded_keys = [logs[start : start + 16] for start in range(0, len(logs), 16)]
    assert set(encoded_keys) == {item.key for item in INPUTS}
    assert len(encoded_keys) <= len(INPUTS) + CHUNK
    whole, resumed = (open_store(tmp_path / name, checkpoint) for name in ("whole", "killed"))
    assert read_rows(resumed) == read_rows(whole)


# -- threads ---------------------------------------------------------------------------------------


def test_error_in_one_thread_keeps_vectors_of_other_threads(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    inputs = order_inputs(INPUTS[:64])
    failing = FailingEncoder(encoder, inputs[0])
    with pytest.raises(LlmcondError, match="ran out of memory"):
        extract(inputs, store, lambda: failing, SilentProgress(), Chunking(CHUNK))
    assert len(failing.other) == CHUNK // 2
    assert store.missing(failing.other) == []
    assert 0 in store.missing(inputs)
    stored = read_rows(store)
    result = extract(inputs, store, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    assert result.n_computed == 64 - len(stored)
    assert stored.items() <= read_rows(store).items()


@pytest.fixture
def interruptible(checkpoint):
    """An encoder with one input per forward pass, which interrupts the process at a given pass."""
    options = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    encoder = Encoder(resolve(str(checkpoint), EncoderOptions(**options)))
    encoder.concurrency = Concurrency(2, 1)
    encoder.engine.budget = 1
    encoder.passes, encoder.interrupted_at = 0, None
    counting = threading.Lock()

    def count_passes(*_):
        # Two threads with the same count would both interrupt, the second after the test has ended.
        with counting:
            encoder.passes += 1
            if encoder.passes == encoder.interrupted_at:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if encoder.interrupted_at and encoder.passes >= encoder.interrupted_at:
            # Slow passes let the main thread run, however busy the machine is.
            time.sleep(0.01)

    encoder.engine.model.network.register_forward_pre_hook(count_passes)
    return encoder


@pytest.mark.parametrize(
    ("chunk", "interrupted_at"), [(32, 100), (320, 10), (640, 10)], ids=["many", "two", "one"]
)
def test_interrupt_stops_all_threads_immediately(
    tmp_path, checkpoint, interruptible, chunk, interrupted_at
):
    """Many batches are left, or one for each thread, or one in all."""
    store = open_store(tmp_path, checkpoint)
    inputs = order_inputs(INPUTS[:300])
    extract(inputs[:20], store, lambda: interruptible, SilentProgress(), Chunking(chunk))
    stored = read_rows(store)
    interruptible.passes, interruptible.interrupted_at = 0, interrupted_at
    with pytest.raises(KeyboardInterrupt):
        extract(inputs, store, lambda: interruptible, SilentProgress(), Chunking(chunk))
    passes = interruptible.passes
    time.sleep(0.1)
    # 280 inputs were missing. No thread goes on in the background.
    assert passes <= interrupted_at + 24
    assert interruptible.passes == passes
    store.refresh()
    n_stored = len(read_rows(store))
    assert stored.items() <= read_rows(store).items()
    assert n_stored <= 20 + passes

    interruptible.interrupted_at = None
    result = extract(inputs, store, lambda: interruptible, SilentProgress(), Chunking(chunk))
    assert (result.n_inputs, result.n_computed) == (300, 300 - n_stored)
    assert len(read_rows(store)) == 300


# -- prefixes --------------------------------------------------------------------------------------

SENTENCES = [f"{who} {what}" for who in ("two dogs", "a man", "the sun") for what in ("run", "sit")]
CONDITIONS = ["the number of people", "what sport is played", "the time of the day", "the color"]


def make_inputs_with_shared_prefixes():
    """Return every sentence under every condition, like prompts of LLMs, in random order."""
    inputs = [
        EncoderInput(f"Retrieve texts like the condition, given the sentence: {sentence}", text)
        for sentence in SENTENCES
        for text in CONDITIONS
    ]
    return random.Random(3).sample(inputs, k=len(inputs))


def test_order_by_prefix_groups_equal_prefixes():
    inputs = make_inputs_with_shared_prefixes()
    ordered = order_inputs([*inputs, *inputs[:5]], by_prefix=True)
    assert ordered == order_inputs(inputs[::-1], by_prefix=True)
    assert sorted(ordered, key=inputs.index) == inputs
    prefixes = [item.instruction for item in ordered]
    runs = 1 + sum(prefixes[i] != prefixes[i - 1] for i in range(1, len(prefixes)))
    assert runs == len(SENTENCES)


def test_sharing_prefixes_changes_no_vector(tmp_path):
    model = str(checkpoints.build_checkpoint("mistral", tmp_path / "model").folder)
    inputs = make_inputs_with_shared_prefixes()
    stores, n_computed = [], []
    for shared in (True, False):
        options = EncoderOptions(
            dtype="float32",
            device="cpu",
            like="intfloat/e5-mistral-7b-instruct",
            share_prefixes=shared,
        )
        encoder = Encoder(resolve(model, options))
        assert encoder.resolved.shares_prefixes is shared
        store = open_store(tmp_path / str(shared), model, options=options)
        extract(
            inputs,
            store,
            lambda e=encoder: e,
            SilentProgress(),
            Chunking(12, by_prefix=shared),
        )
        stores.append(store)
        n_computed.append(encoder.encode_with_counts(inputs).n_computed)
    assert stores[0].folder.name == stores[1].folder.name
    np.testing.assert_allclose(
        stores[0].lookup(inputs).read(), stores[1].lookup(inputs).read(), atol=1e-5
    )
    assert n_computed[0] < 0.7 * n_computed[1]


# -- vectors that are not finite -------------------------------------------------------------------


@pytest.fixture(scope="module")
def nan_checkpoint(tmp_path_factory, checkpoint):
    """A checkpoint that returns NaN for texts with the word ``rain``."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    return copy_with_edited_weights(
        checkpoint,
        tmp_path_factory.mktemp("broken") / "model",
        "embeddings.word_embeddings.weight",
        lambda weight: weight[vocabulary["rain"]].fill_(float("nan")),
    )


def test_error_names_the_input_with_nan_vector(tmp_path, nan_checkpoint):
    encoder = Encoder(resolve(str(nan_checkpoint), OPTIONS))
    store = open_store(tmp_path, nan_checkpoint)
    bad_input = EncoderInput("", "two dogs walk in the rain")
    inputs = [*INPUTS[:12], bad_input]
    with pytest.raises(InputError, match="two dogs walk in the rain") as raised:
        extract(inputs, store, lambda: encoder, SilentProgress(), Chunking(CHUNK))
    assert raised.value.item == bad_input
    assert raised.value.exit_code == 2
    assert store.missing(inputs) == [12]
    assert np.isfinite(store.lookup(INPUTS[:12]).read()).all()


@pytest.fixture(scope="module")
def overflowing_checkpoint(tmp_path_factory, checkpoint):
    """A checkpoint whose vectors are too large for float16."""
    return copy_with_edited_weights(
        checkpoint,
        tmp_path_factory.mktemp("overflowing") / "model",
        "encoder.layer.1.output.LayerNorm.weight",
        lambda weight: weight.mul_(1e7),
    )


def test_float16_overflow_is_rejected(tmp_path, overflowing_checkpoint):
    options = EncoderOptions(dtype="float32", device="cpu", normalize=False)
    encoder = Encoder(resolve(str(overflowing_checkpoint), options))
    store = open_store(tmp_path, overflowing_checkpoint, "float16", options)
    with pytest.raises(InputError, match="store float32 if vectors overflow float16"):
        extract(INPUTS[:5], store, lambda: encoder, SilentProgress())
    assert store.missing(INPUTS[:5]) == [0, 1, 2, 3, 4]
    float32_store = open_store(tmp_path, overflowing_checkpoint, "float32", options)
    extract(INPUTS[:5], float32_store, lambda: encoder, SilentProgress())
    assert np.abs(float32_store.lookup(INPUTS[:5]).read()).max() > np.finfo(np.float16).max
