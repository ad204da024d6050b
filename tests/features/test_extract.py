"""Extraction: every input is encoded once, and interruptions change no bit of the vectors."""

import json
import random
import resource
import shutil
import signal
import threading
import time

import lance
import numpy as np
import pytest
import torch
from helpers.processes import FORK_CONTEXT
from helpers.waiting import PATIENCE
from safetensors.torch import load_file, save_file

from llmcond.base.errors import DiskFullError, LlmcondError
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Concurrency, Encoder
from llmcond.encoders.spec import InputError
from llmcond.features.extract import extract, order_inputs
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


class RecordingProgress:
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
        connection.send(extract(inputs, store, load, chunk=CHUNK))
    except DiskFullError as error:
        connection.send(error)


def start_worker(*arguments):
    """Start a worker process, and wait until its encoder is loaded."""
    parent_end, child_end = FORK_CONTEXT.Pipe()
    arguments = (*arguments[:3], child_end, *arguments[3:])
    process = FORK_CONTEXT.Process(target=extract_in_worker, args=arguments)
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


@pytest.fixture
def store(tmp_path, checkpoint):
    return open_store(tmp_path, checkpoint)


@pytest.fixture(scope="module")
def uninterrupted_rows(tmp_path_factory, checkpoint):
    """Rows that one process stores if nobody interrupts it."""
    root = tmp_path_factory.mktemp("undisturbed")
    process, connection = start_worker(checkpoint, root, INPUTS)
    connection.send("go")
    assert finish_worker(process, connection).n_computed == len(INPUTS)
    return read_rows(open_store(root, checkpoint))


# -- inputs and progress ---------------------------------------------------------------------------


def test_only_missing_inputs_are_encoded(store, checkpoint, encoder, tmp_path):
    result = extract([*INPUTS[:30], *INPUTS[:10]], store, lambda: encoder, chunk=CHUNK)
    assert (result.n_inputs, result.n_computed, result.n_truncated) == (30, 30, 0)
    recorder = RecordingEncoder(encoder)
    result = extract(INPUTS[:70], store, lambda: recorder, chunk=CHUNK)
    encoded = [item for batch in recorder.batches for item in batch]
    assert sorted(encoded, key=INPUTS.index) == INPUTS[30:70]
    assert (result.n_inputs, result.n_computed) == (70, 40)
    expected = encoder.encode_with_counts(INPUTS[:70])
    assert result.n_tokens == expected.n_tokens[30:].sum()
    np.testing.assert_allclose(store.lookup(INPUTS[:70]).read(), expected.vectors, atol=1e-6)
    reopened, rows = open_store(tmp_path, checkpoint), read_rows(store)
    for inputs in (INPUTS[69::-1], []):
        result = extract(inputs, reopened, fail_to_load)
        assert (result.n_inputs, result.n_computed, result.n_tokens) == (len(inputs), 0, 0)
    assert read_rows(store) == rows


def test_inputs_are_ordered_by_length_or_prefix():
    ordered = order_inputs(random.Random(1).sample([*INPUTS, *INPUTS[:99]], k=len(INPUTS) + 99))
    assert ordered == order_inputs(INPUTS)
    assert len(ordered) == len(INPUTS)
    sizes = [len(item.text) for item in ordered]
    assert sizes == sorted(sizes, reverse=True)

    inputs = make_inputs_with_shared_prefixes()
    ordered = order_inputs([*inputs, *inputs[:5]], by_prefix=True)
    assert ordered == order_inputs(inputs[::-1], by_prefix=True)
    assert sorted(ordered, key=inputs.index) == inputs
    prefixes = [item.instruction for item in ordered]
    runs = 1 + sum(prefixes[i] != prefixes[i - 1] for i in range(1, len(prefixes)))
    assert runs == len(set(prefixes))


def make_inputs_with_shared_prefixes():
    """Return every sentence under every condition, like prompts of LLMs, in random order."""
    inputs = [
        EncoderInput(f"Retrieve texts like the condition, given the sentence: {who} {what}", text)
        for who in ("two dogs", "a man", "the sun")
        for what in ("run", "sit")
        for text in ("the number of people", "what sport is played", "the time of the day")
    ]
    return random.Random(3).sample(inputs, k=len(inputs))


# -- chunks and interruptions ----------------------------------------------------------------------


def test_stored_chunks_do_not_shift_other_chunks(store, encoder):
    inputs = order_inputs(INPUTS[:80])
    chunks = [inputs[i : i + CHUNK] for i in range(0, 80, CHUNK)]
    for stored in (chunks[3], chunks[1]):
        extract(stored, store, lambda: encoder, chunk=CHUNK)
    recorder = RecordingEncoder(encoder)
    extract(INPUTS[:80], store, lambda: recorder, chunk=CHUNK)
    assert recorder.batches == [chunks[0], chunks[2], chunks[4]]


def test_threads_get_equally_many_inputs(store, encoder):
    recorder = RecordingEncoder(encoder)
    recorder.concurrency = Concurrency(2, 1)
    extract(INPUTS[:70], store, lambda: recorder, chunk=32)
    assert sorted(map(len, recorder.batches)) == [10, 12, 12, 12, 12, 12]


def test_killed_extractions_resume_bit_for_bit(tmp_path, checkpoint, store, uninterrupted_rows):
    rng, sizes = random.Random(7), []
    versions = store.folder / "vectors.lance" / "_versions"
    # How far an extraction gets depends on how busy the machine is, so it is killed shortly after
    # it has stored something.
    while len(set(sizes) - {0, len(INPUTS)}) < 2 and len(sizes) < 60:
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
    assert len(set(sizes) - {0, len(INPUTS)}) >= 2, sizes
    process, connection = start_worker(checkpoint, tmp_path, INPUTS)
    connection.send("go")
    assert finish_worker(process, connection).n_computed == len(INPUTS) - sizes[-1]
    assert read_rows(store) == uninterrupted_rows


@pytest.mark.parametrize("killed", [False, True])
def test_two_processes_share_one_extraction(tmp_path, checkpoint, uninterrupted_rows, killed):
    workers = [start_worker(checkpoint, tmp_path, INPUTS) for _ in range(2)]
    for _, connection in workers:
        connection.send("go")
    if killed:
        time.sleep(0.05)
        process, _ = workers.pop()
        process.kill()
    n_computed = [finish_worker(*worker).n_computed for worker in workers]
    assert min(n_computed) > 0
    assert sum(n_computed) == len(INPUTS) or killed
    assert read_rows(open_store(tmp_path, checkpoint)) == uninterrupted_rows


def test_full_disk_keeps_stored_features(tmp_path, checkpoint, store, encoder):
    extract(INPUTS[:40], store, lambda: encoder, chunk=CHUNK)
    before = read_rows(store)
    # The limit is below the size of a commit's manifest, as Lance overlooks truncated data files.
    process, connection = start_worker(checkpoint, tmp_path, INPUTS, 512, 3)
    connection.send("go")
    error = finish_worker(process, connection)
    assert isinstance(error, DiskFullError)
    assert "the features already stored are kept" in str(error)
    reopened = open_store(tmp_path, checkpoint)
    assert read_rows(reopened) == before
    extract(INPUTS, reopened, lambda: encoder, chunk=CHUNK)
    assert len(read_rows(reopened)) == len(INPUTS)


# -- streams ---------------------------------------------------------------------------------------


def test_generator_is_read_little_ahead_of_stored_inputs(store, encoder):
    progress, ahead = RecordingProgress(), []

    def stream_inputs():
        for n_read, item in enumerate(INPUTS, start=1):
            ahead.append(n_read - len(store))
            yield item

    result = extract(stream_inputs(), store, lambda: encoder, progress, chunk=CHUNK, window=WINDOW)
    assert len(ahead) == result.n_inputs == result.n_computed == len(INPUTS)
    assert max(ahead) <= WINDOW + 2 * CHUNK
    # The number of inputs of a generator is unknown.
    assert progress.started == [(None, None)]
    assert sum(row[0] for row in progress.advanced) == len(INPUTS)
    second = extract(stream_inputs(), store, fail_to_load, progress, chunk=CHUNK, window=WINDOW)
    assert (second.n_inputs, second.n_computed) == (len(INPUTS), 0)
    assert len(progress.started) == 1


def test_repeats_across_windows_are_encoded_and_counted_once(store, encoder):
    recorder, progress = RecordingEncoder(encoder), RecordingProgress()
    stream = iter([*INPUTS[:64], *INPUTS[32:96], *INPUTS[:96]])
    result = extract(stream, store, lambda: recorder, progress, chunk=CHUNK, window=WINDOW)
    encoded = [item for batch in recorder.batches for item in batch]
    assert sorted(encoded, key=INPUTS.index) == INPUTS[:96]
    assert (result.n_inputs, result.n_computed) == (96, 96)
    assert result.n_tokens == encoder.encode_with_counts(INPUTS[:96]).n_tokens.sum()
    assert sum(row[0] for row in progress.advanced) == 96


def test_truncated_inputs_are_counted_once_across_windows(tmp_path, checkpoint):
    options = EncoderOptions(dtype="float32", device="cpu", max_length=8)
    encoder = Encoder(resolve(str(checkpoint), options))
    store = open_store(tmp_path, checkpoint, options=options)
    inputs = [EncoderInput("", "red " * n) for n in (7, 2, 7, 12, 6, 12, 9, 3, 7)]
    first = extract(iter(inputs), store, lambda: encoder, window=2)
    # 7, 9 and 12 words are more than 8 tokens, with the two special tokens.
    assert (first.n_inputs, first.n_truncated) == (6, 3)
    assert first.n_tokens == sum(n + 2 for n in (7, 2, 12, 6, 9, 3))
    second = extract(iter(inputs[:4]), store, fail_to_load, window=2)
    assert (second.n_inputs, second.n_truncated) == (3, 2)


# -- threads ---------------------------------------------------------------------------------------


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


def test_error_in_one_thread_keeps_vectors_of_other_threads(store, encoder):
    inputs = order_inputs(INPUTS[:64])
    failing = FailingEncoder(encoder, inputs[0])
    with pytest.raises(LlmcondError, match="ran out of memory"):
        extract(inputs, store, lambda: failing, chunk=CHUNK)
    assert len(failing.other) == CHUNK // 2
    assert store.missing(failing.other) == []
    assert 0 in store.missing(inputs)
    stored = read_rows(store)
    result = extract(inputs, store, lambda: encoder, chunk=CHUNK)
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


def test_interrupt_stops_all_threads_immediately(store, interruptible):
    chunk, interrupted_at = 32, 100
    inputs = order_inputs(INPUTS[:300])
    extract(inputs[:20], store, lambda: interruptible, chunk=chunk)
    stored = read_rows(store)
    interruptible.passes, interruptible.interrupted_at = 0, interrupted_at
    with pytest.raises(KeyboardInterrupt):
        extract(inputs, store, lambda: interruptible, chunk=chunk)
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
    result = extract(inputs, store, lambda: interruptible, chunk=chunk)
    assert (result.n_inputs, result.n_computed) == (300, 300 - n_stored)
    assert len(read_rows(store)) == 300


# -- vectors that are not finite -------------------------------------------------------------------


def copy_with_edited_weights(checkpoint, folder, name, edit):
    copy = shutil.copytree(checkpoint, folder)
    weights = load_file(copy / "model.safetensors")
    edit(weights[name])
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_error_names_the_input_with_nan_vector(tmp_path, checkpoint):
    rain = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]["rain"]
    broken = copy_with_edited_weights(
        checkpoint,
        tmp_path / "model",
        "embeddings.word_embeddings.weight",
        lambda weight: weight[rain].fill_(float("nan")),
    )
    encoder = Encoder(resolve(str(broken), OPTIONS))
    store = open_store(tmp_path, broken)
    bad_input = EncoderInput("", "two dogs walk in the rain")
    inputs = [*INPUTS[:12], bad_input]
    with pytest.raises(InputError, match="two dogs walk in the rain") as raised:
        extract(inputs, store, lambda: encoder, chunk=CHUNK)
    assert (raised.value.item, raised.value.exit_code) == (bad_input, 2)
    assert store.missing(inputs) == [12]
    assert np.isfinite(store.lookup(INPUTS[:12]).read()).all()


def test_float16_overflow_is_rejected(tmp_path, checkpoint):
    overflowing = copy_with_edited_weights(
        checkpoint,
        tmp_path / "model",
        "encoder.layer.1.output.LayerNorm.weight",
        lambda weight: weight.mul_(1e7),
    )
    options = EncoderOptions(dtype="float32", device="cpu", normalize=False)
    encoder = Encoder(resolve(str(overflowing), options))
    store = open_store(tmp_path, overflowing, "float16", options)
    with pytest.raises(InputError, match="store float32 if vectors overflow float16"):
        extract(INPUTS[:5], store, lambda: encoder)
    assert store.missing(INPUTS[:5]) == [0, 1, 2, 3, 4]
    float32_store = open_store(tmp_path, overflowing, "float32", options)
    extract(INPUTS[:5], float32_store, lambda: encoder)
    assert np.abs(float32_store.lookup(INPUTS[:5]).read()).max() > np.finfo(np.float16).max
