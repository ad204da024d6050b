"""Extraction: nothing twice, nothing lost, and the same bits however often it is interrupted."""

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
from helpers.processes import FORKING
from helpers.waiting import PATIENCE
from safetensors.torch import load_file, save_file

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.spec import InputError
from llmcond.encoders.threads import Concurrency
from llmcond.errors import DiskFullError, LlmcondError
from llmcond.features.extract import Chunking, Extraction, extract, order_inputs
from llmcond.features.missing import count_in_background
from llmcond.features.store import FeatureStore

OPTIONS = EncoderOptions(dtype="float32", device="cpu", max_tokens_per_batch=128)
CHUNK = 16
WINDOW = 64


def make_inputs(n, seed=0):
    words = "two three men women dogs ride play read walk in on park beach red blue hat".split()
    draw = random.Random(seed)
    texts = {" ".join(draw.choices(words, k=draw.randint(1, 20))): None for _ in range(2 * n)}
    return [EncoderInput("", text) for text in list(texts)[:n]]


INPUTS = make_inputs(640)


class Silent:
    def start(self, inputs, characters):
        pass

    def advance(self, inputs, characters, tokens, seconds):
        pass


class Told:
    """A progress that remembers what it was told."""

    def __init__(self):
        self.started, self.advanced = [], []

    def start(self, inputs, characters):
        self.started.append((inputs, characters))

    def advance(self, inputs, characters, tokens, seconds):
        self.advanced.append((inputs, characters, tokens, seconds))


class Recording:
    """A real encoder that remembers what it was asked for, on one thread."""

    concurrency = Concurrency(1, 1)

    def __init__(self, encoder):
        self.encoder = encoder
        self.asked = []

    def encode_counted(self, inputs):
        self.asked.append(list(inputs))
        return self.encoder.encode_counted(inputs)


class Logged:
    """A real encoder that writes the keys of what it is asked for into a file."""

    def __init__(self, encoder, log):
        self.encoder, self.log, self.concurrency = encoder, log, encoder.concurrency

    def encode_counted(self, inputs):
        with self.log.open("ab") as stream:
            stream.write(b"".join(item.key for item in inputs))
        return self.encoder.encode_counted(inputs)


class FailingOnce:
    """A real encoder that fails for one input while another thread is computing."""

    def __init__(self, encoder, bad):
        self.encoder, self.bad, self.concurrency = encoder, bad, encoder.concurrency
        self.other_began, self.failing = threading.Event(), threading.Event()
        self.other = []

    def encode_counted(self, inputs):
        if self.bad in inputs:
            assert self.other_began.wait(PATIENCE)
            self.failing.set()
            raise LlmcondError("ran out of memory")
        if not self.other_began.is_set():
            self.other = list(inputs)
            self.other_began.set()
            assert self.failing.wait(PATIENCE)
            # So that the error is there before the vectors are.
            time.sleep(0.1)
        return self.encoder.encode_counted(inputs)


def never():
    raise AssertionError("the encoder was loaded")


def open_store(root, checkpoint, dtype="float32", options=OPTIONS):
    return FeatureStore(root, resolve(str(checkpoint), options).identity, dtype)


def contents(store):
    """Return what the store holds by key, after checking that no key is doubled."""
    rows = lance.dataset(str(store.folder / "vectors.lance")).to_table().to_pylist()
    by_key = {
        row["key"]: (np.array(row["vector"]).tobytes(), row["n_tokens"], row["truncated"])
        for row in rows
    }
    assert len(by_key) == len(rows)
    return by_key


def work(checkpoint, root, inputs, connection, file_limit=None, threads=1):
    """Extract in a process of its own: say when encoding begins, wait for the word, go on."""
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
        connection.send(extract(inputs, store, load, Silent(), Chunking(CHUNK)))
    except DiskFullError as error:
        connection.send(error)


def work_on_stream(checkpoint, root, inputs, connection, log):
    """The same from a generator, on two threads; say when half of it is read."""
    torch.set_num_threads(2)
    encoder = Encoder(resolve(str(checkpoint), OPTIONS))

    def stream():
        for place, item in enumerate(inputs):
            if place == len(inputs) // 2:
                connection.send("half")
            yield item

    connection.send("ready")
    connection.recv()
    store = open_store(root, checkpoint)
    done = extract(stream(), store, lambda: Logged(encoder, log), Silent(), Chunking(CHUNK, WINDOW))
    connection.send(done)


def start(*arguments, target=work):
    """Start a worker; it stands where its encoder is loaded."""
    ours, theirs = FORKING.Pipe()
    process = FORKING.Process(target=target, args=(*arguments[:3], theirs, *arguments[3:]))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    return process, ours


def finish(process, connection):
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
def undisturbed(tmp_path_factory, checkpoint):
    """What one process stores that nobody interrupts."""
    root = tmp_path_factory.mktemp("undisturbed")
    process, connection = start(checkpoint, root, INPUTS)
    connection.send("go")
    assert finish(process, connection).n_computed == len(INPUTS)
    return contents(open_store(root, checkpoint))


def edited_weights(checkpoint, folder, name, edit):
    copy = shutil.copytree(checkpoint, folder)
    weights = load_file(copy / "model.safetensors")
    edit(weights[name])
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_vectors_are_those_of_the_encoder(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    inputs = INPUTS[:50]
    done = extract([*inputs, *inputs[:10]], store, lambda: encoder, Silent(), Chunking(CHUNK))
    expected = encoder.encode_counted(inputs)
    np.testing.assert_allclose(store.lookup(inputs).read(), expected.vectors, atol=1e-6)
    assert (done.n_inputs, done.n_computed, done.n_truncated) == (50, 50, 0)
    assert done.n_tokens == expected.n_tokens.sum()


def test_a_second_extraction_loads_no_encoder(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:50], store, lambda: encoder, Silent(), Chunking(CHUNK))
    before = contents(store)
    reopened = open_store(tmp_path, checkpoint)
    again = extract(INPUTS[49::-1], reopened, never, Silent(), Chunking(CHUNK))
    assert (again.n_inputs, again.n_computed, again.n_tokens) == (50, 0, 0)
    assert contents(store) == before


def test_only_what_is_missing_is_encoded(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:30], store, lambda: encoder, Silent(), Chunking(CHUNK))
    recording = Recording(encoder)
    done = extract(INPUTS[:70], store, lambda: recording, Silent(), Chunking(CHUNK))
    asked = [item for part in recording.asked for item in part]
    assert sorted(asked, key=INPUTS.index) == INPUTS[30:70]
    assert done.n_computed == 40


def test_nothing_to_extract_is_no_error(tmp_path, checkpoint):
    done = extract([], open_store(tmp_path, checkpoint), never, Silent())
    assert (done.n_inputs, done.n_computed, done.n_truncated) == (0, 0, 0)


def test_truncated_inputs_are_counted_again_in_a_later_extraction(tmp_path, checkpoint):
    options = EncoderOptions(dtype="float32", device="cpu", max_length=8)
    encoder = Encoder(resolve(str(checkpoint), options))
    store = open_store(tmp_path, checkpoint, options=options)
    inputs = [EncoderInput("", "red " * n) for n in (2, 6, 7, 12)]
    first = extract(inputs, store, lambda: encoder, Silent())
    assert (first.n_truncated, first.n_tokens) == (2, 4 + 8 + 9 + 14)
    assert extract(inputs[:3], store, never, Silent()).n_truncated == 1


def test_progress_is_told_of_every_stored_part(tmp_path, checkpoint, encoder):
    told = Told()
    inputs = INPUTS[:40]
    done = extract(inputs, open_store(tmp_path, checkpoint), lambda: encoder, told, Chunking(CHUNK))
    characters = sum(len(item.text) for item in inputs)
    assert told.started == [(40, characters)]
    # One thread computes half a chunk at a time.
    assert [row[0] for row in told.advanced] == [8, 8, 8, 8, 8]
    assert sum(row[1] for row in told.advanced) == characters
    assert sum(row[2] for row in told.advanced) == done.n_tokens


def test_time_is_that_of_batches_without_loading(tmp_path, checkpoint, encoder, monkeypatch):
    """By a clock of our own, on which loading takes 100 s and a batch 2 s."""
    clock, told = [1_000.0], Told()
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    monkeypatch.setattr("llmcond.features.extract.time", fake)

    class Timed(Recording):
        def encode_counted(self, inputs):
            clock[0] += 2
            return super().encode_counted(inputs)

    def load():
        clock[0] += 100
        return Timed(encoder)

    done = extract(INPUTS[:80], open_store(tmp_path, checkpoint), load, told, Chunking(CHUNK))
    assert [row[3] for row in told.advanced] == [2] * 5
    assert 2 <= done.seconds <= 10


def test_very_many_inputs_are_counted_while_they_are_encoded(
    tmp_path, checkpoint, encoder, monkeypatch
):
    told, inputs, counted = Told(), INPUTS[:40], threading.Event()
    monkeypatch.setattr("llmcond.features.extract.COUNTED_FIRST", 39)
    told.start = lambda *amount: (told.started.append(amount), amount[0] and counted.set())
    told.advance = lambda *_: counted.wait(PATIENCE)
    store = open_store(tmp_path, checkpoint)
    extract(inputs, store, lambda: encoder, told, Chunking(CHUNK))
    assert sorted(told.started, key=str) == [
        (40, sum(len(item.text) for item in inputs)),
        (None, None),
    ]
    told.started.clear()
    extract(inputs, store, never, told, Chunking(CHUNK))
    assert told.started == []


def test_counting_ends_with_the_extraction(tmp_path, checkpoint):
    def endless():
        yield from INPUTS
        while True:
            yield INPUTS[0]

    found = []
    with count_in_background(open_store(tmp_path, checkpoint), endless(), 16, found.append):
        assert threading.active_count() > 1
    assert not found


def test_plan_is_distinct_longest_first_and_blind_to_order():
    shuffled = random.Random(1).sample([*INPUTS, *INPUTS[:99]], k=len(INPUTS) + 99)
    planned = order_inputs(shuffled)
    assert planned == order_inputs(INPUTS)
    assert len(planned) == len(INPUTS)
    sizes = [len(item.text) for item in planned]
    assert sizes == sorted(sizes, reverse=True)


def test_stored_chunks_do_not_shift_the_others(tmp_path, checkpoint, encoder):
    inputs = order_inputs(INPUTS[:80])
    chunks = [inputs[i : i + CHUNK] for i in range(0, 80, CHUNK)]
    store = open_store(tmp_path, checkpoint)
    for stored in (chunks[3], chunks[1]):
        extract(stored, store, lambda: encoder, Silent(), Chunking(CHUNK))
    recording = Recording(encoder)
    extract(INPUTS[:80], store, lambda: recording, Silent(), Chunking(CHUNK))
    assert recording.asked == [chunks[0], chunks[2], chunks[4]]


def test_partly_stored_chunks_keep_their_bits_and_gain_the_rest(tmp_path, checkpoint, encoder):
    whole, parted = (open_store(tmp_path / name, checkpoint) for name in ("whole", "parted"))
    extract(INPUTS[:200], whole, lambda: encoder, Silent(), Chunking(CHUNK))
    extract(INPUTS[:200:3], parted, lambda: encoder, Silent(), Chunking(CHUNK))
    stored = contents(parted)
    extract(INPUTS[:200], parted, lambda: encoder, Silent(), Chunking(CHUNK))
    assert stored.items() <= contents(parted).items()
    np.testing.assert_allclose(
        parted.lookup(INPUTS[:200]).read(), whole.lookup(INPUTS[:200]).read(), atol=1e-6
    )


def test_killed_extractions_resume_to_the_same_bits(tmp_path, checkpoint, undisturbed):
    draw = random.Random(7)
    store = open_store(tmp_path, checkpoint)
    sizes = []
    partial = set()
    versions = store.folder / "vectors.lance" / "_versions"
    # How far an extraction gets before it is killed depends on how busy the machine is: it is given
    # until it has stored something, and a little more.
    while len(partial) < 4 and len(sizes) < 60:
        process, connection = start(checkpoint, tmp_path, INPUTS)
        before = len(list(versions.glob("*")))
        connection.send("go")
        while process.is_alive() and len(list(versions.glob("*"))) == before:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        store.refresh()
        sizes.append(len(store))
        partial |= {len(store)} - {0, len(INPUTS)}
    assert len(partial) >= 4, sizes
    process, connection = start(checkpoint, tmp_path, INPUTS)
    connection.send("go")
    assert finish(process, connection).n_computed == len(INPUTS) - sizes[-1]
    assert contents(store) == undisturbed


def test_two_processes_share_one_extraction(tmp_path, checkpoint, undisturbed):
    workers = [start(checkpoint, tmp_path, INPUTS) for _ in range(2)]
    for _, connection in workers:
        connection.send("go")
    computed = [finish(*worker).n_computed for worker in workers]
    assert min(computed) > 0
    assert sum(computed) == len(INPUTS)
    assert contents(open_store(tmp_path, checkpoint)) == undisturbed


def test_a_process_takes_over_from_one_that_dies(tmp_path, checkpoint, undisturbed):
    (dying, first), (living, second) = (start(checkpoint, tmp_path, INPUTS) for _ in range(2))
    first.send("go")
    second.send("go")
    time.sleep(0.05)
    dying.kill()
    result = finish(living, second)
    assert isinstance(result, Extraction)
    assert contents(open_store(tmp_path, checkpoint)) == undisturbed


@pytest.mark.parametrize("threads", [1, 3])
def test_full_disk_keeps_what_was_stored(tmp_path, checkpoint, encoder, threads):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:40], store, lambda: encoder, Silent(), Chunking(CHUNK))
    before = contents(store)
    # Too little for the manifest of a commit: Lance overlooks it if a data file lacks its end.
    process, connection = start(checkpoint, tmp_path, INPUTS, 512, threads)
    connection.send("go")
    error = finish(process, connection)
    assert isinstance(error, DiskFullError)
    assert "the 40 features already stored are kept" in str(error)
    reopened = open_store(tmp_path, checkpoint)
    assert contents(reopened) == before
    extract(INPUTS, reopened, lambda: encoder, Silent(), Chunking(CHUNK))
    assert len(contents(reopened)) == len(INPUTS)


# -- streams ---------------------------------------------------------------------------------------


def test_inputs_may_come_from_a_generator(tmp_path, checkpoint, encoder):
    told, store = Told(), open_store(tmp_path, checkpoint)
    inputs = INPUTS[:150]
    done = extract(iter(inputs), store, lambda: encoder, told, Chunking(CHUNK, WINDOW))
    # Nobody knows how many are still to come.
    assert told.started == [(None, None)]
    assert sum(row[0] for row in told.advanced) == 150
    expected = encoder.encode_counted(inputs)
    assert (done.n_inputs, done.n_computed) == (150, 150)
    assert done.n_tokens == expected.n_tokens.sum()
    np.testing.assert_allclose(store.lookup(inputs).read(), expected.vectors, atol=1e-6)


def test_a_generator_of_what_is_stored_loads_no_encoder(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:150], store, lambda: encoder, Silent(), Chunking(CHUNK))
    told = Told()
    again = extract(iter(INPUTS[:150]), store, never, told, Chunking(CHUNK, WINDOW))
    assert (again.n_inputs, again.n_computed) == (150, 0)
    assert told.started == []


def test_a_generator_is_read_little_ahead_of_what_is_stored(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    ahead = []

    def counted():
        for n_read, item in enumerate(INPUTS, start=1):
            ahead.append(n_read - len(store))
            yield item

    extract(counted(), store, lambda: encoder, Silent(), Chunking(CHUNK, WINDOW))
    assert len(ahead) == len(INPUTS)
    assert max(ahead) <= WINDOW + 2 * CHUNK


def test_repeats_in_other_windows_are_encoded_and_counted_once(tmp_path, checkpoint, encoder):
    recording, told = Recording(encoder), Told()
    stream = iter([*INPUTS[:64], *INPUTS[32:96], *INPUTS[:96]])
    store = open_store(tmp_path, checkpoint)
    done = extract(stream, store, lambda: recording, told, Chunking(CHUNK, WINDOW))
    asked = [item for part in recording.asked for item in part]
    assert sorted(asked, key=INPUTS.index) == INPUTS[:96]
    assert (done.n_inputs, done.n_computed) == (96, 96)
    assert done.n_tokens == encoder.encode_counted(INPUTS[:96]).n_tokens.sum()
    assert sum(row[0] for row in told.advanced) == 96


@pytest.mark.parametrize("step", [4, 8])
def test_repeats_that_follow_at_once_are_stored_and_counted_once(
    tmp_path, checkpoint, encoder, step
):
    """While one thread is at an input, another comes upon it again: in the same part or another."""
    store = open_store(tmp_path, checkpoint)
    starts = sorted([*range(0, 153, step), *range(0, 153, 8)])
    stream = (item for start in starts for item in INPUTS[start : start + 8])
    done = extract(stream, store, lambda: encoder, Silent(), Chunking(CHUNK, 8))
    assert (done.n_inputs, done.n_computed) == (160, 160)
    assert len(contents(store)) == 160


def test_truncated_inputs_are_counted_once_over_all_windows(tmp_path, checkpoint):
    options = EncoderOptions(dtype="float32", device="cpu", max_length=8)
    encoder = Encoder(resolve(str(checkpoint), options))
    store = open_store(tmp_path, checkpoint, options=options)
    inputs = [EncoderInput("", "red " * n) for n in (7, 2, 7, 12, 6, 12, 9, 3, 7)]
    first = extract(iter(inputs), store, lambda: encoder, Silent(), Chunking(window=2))
    # 7, 9 and 12 words, and the two special tokens.
    assert (first.n_inputs, first.n_truncated) == (6, 3)
    again = extract(iter(inputs[:4]), store, never, Silent(), Chunking(window=2))
    assert (again.n_inputs, again.n_truncated) == (3, 2)


def test_a_killed_stream_computes_at_most_a_chunk_again(tmp_path, checkpoint):
    def begin(name, log):
        arguments = (checkpoint, tmp_path / name, INPUTS, tmp_path / log)
        process, connection = start(*arguments, target=work_on_stream)
        connection.send("go")
        assert connection.recv() == "half"
        return process, connection

    assert finish(*begin("whole", "whole.log")).n_computed == len(INPUTS)
    killed, _ = begin("killed", "killed.log")
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    stored = len(open_store(tmp_path / "killed", checkpoint))
    assert 0 < stored < len(INPUTS)
    done = finish(*begin("killed", "resumed.log"))
    assert (done.n_inputs, done.n_computed) == (len(INPUTS), len(INPUTS) - stored)

    logs = (tmp_path / "killed.log").read_bytes() + (tmp_path / "resumed.log").read_bytes()
    asked = [logs[start : start + 16] for start in range(0, len(logs), 16)]
    assert set(asked) == {item.key for item in INPUTS}
    assert len(asked) <= len(INPUTS) + CHUNK
    whole, resumed = (open_store(tmp_path / name, checkpoint) for name in ("whole", "killed"))
    assert contents(resumed) == contents(whole)


# -- threads ---------------------------------------------------------------------------------------


def test_an_error_in_a_thread_keeps_what_the_others_compute(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    inputs = order_inputs(INPUTS[:64])
    failing = FailingOnce(encoder, inputs[0])
    with pytest.raises(LlmcondError, match="ran out of memory"):
        extract(inputs, store, lambda: failing, Silent(), Chunking(CHUNK))
    assert len(failing.other) == CHUNK // 2
    assert store.missing(failing.other) == []
    assert 0 in store.missing(inputs)
    kept = contents(store)
    done = extract(inputs, store, lambda: encoder, Silent(), Chunking(CHUNK))
    assert done.n_computed == 64 - len(kept)
    assert kept.items() <= contents(store).items()


@pytest.fixture
def interruptible(checkpoint):
    """An encoder that computes one input at a time, and is interrupted at a forward pass."""
    own = {"dtype": "float32", "device": "cpu", "runtime": "torch"}
    encoder = Encoder(resolve(str(checkpoint), EncoderOptions(**own)))
    encoder.concurrency = Concurrency(2, 1)
    encoder.engine.budget = 1
    encoder.passes, encoder.interrupted_at = 0, None

    def count(*_):
        encoder.passes += 1
        if encoder.passes == encoder.interrupted_at:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if encoder.interrupted_at and encoder.passes >= encoder.interrupted_at:
            # So slow that the main thread has its turn, however busy the machine is.
            time.sleep(0.01)

    encoder.engine.model.network.register_forward_pre_hook(count)
    return encoder


@pytest.mark.parametrize(
    ("chunk", "interrupted_at"), [(32, 100), (320, 10), (640, 10)], ids=["many", "two", "one"]
)
def test_an_interrupt_stops_all_threads_at_once(
    tmp_path, checkpoint, interruptible, chunk, interrupted_at
):
    """With many parts to come, with one in each thread, and with one in all."""
    store = open_store(tmp_path, checkpoint)
    inputs = order_inputs(INPUTS[:300])
    extract(inputs[:20], store, lambda: interruptible, Silent(), Chunking(chunk))
    kept = contents(store)
    interruptible.passes, interruptible.interrupted_at = 0, interrupted_at
    with pytest.raises(KeyboardInterrupt):
        extract(inputs, store, lambda: interruptible, Silent(), Chunking(chunk))
    passes = interruptible.passes
    time.sleep(0.1)
    # Of the 280 that there were to do; nobody computes on behind one's back.
    assert passes <= interrupted_at + 24
    assert interruptible.passes == passes
    store.refresh()
    n_stored = len(contents(store))
    assert kept.items() <= contents(store).items()
    assert n_stored <= 20 + passes

    interruptible.interrupted_at = None
    done = extract(inputs, store, lambda: interruptible, Silent(), Chunking(chunk))
    assert (done.n_inputs, done.n_computed) == (300, 300 - n_stored)
    assert len(contents(store)) == 300


# -- prefixes --------------------------------------------------------------------------------------

SENTENCES = [f"{who} {what}" for who in ("two dogs", "a man", "the sun") for what in ("run", "sit")]
CONDITIONS = ["the number of people", "what sport is played", "the time of the day", "the color"]


def shared_prefixes():
    """Every sentence under every condition, as LLMs are given them, in no order."""
    inputs = [
        EncoderInput(f"Retrieve texts like the condition, given the sentence: {sentence}", text)
        for sentence in SENTENCES
        for text in CONDITIONS
    ]
    return random.Random(3).sample(inputs, k=len(inputs))


def test_by_prefix_inputs_that_begin_alike_stand_side_by_side():
    inputs = shared_prefixes()
    planned = order_inputs([*inputs, *inputs[:5]], by_prefix=True)
    assert planned == order_inputs(inputs[::-1], by_prefix=True)
    assert sorted(planned, key=inputs.index) == inputs
    prefixes = [item.instruction for item in planned]
    runs = 1 + sum(prefixes[i] != prefixes[i - 1] for i in range(1, len(prefixes)))
    assert runs == len(SENTENCES)


def test_prefixes_that_are_computed_once_change_no_vector(tmp_path):
    model = str(checkpoints.make("mistral", tmp_path / "model").folder)
    inputs = shared_prefixes()
    stores, computed = [], []
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
        extract(inputs, store, lambda e=encoder: e, Silent(), Chunking(12, by_prefix=shared))
        stores.append(store)
        computed.append(encoder.encode_counted(inputs).n_computed)
    assert stores[0].folder.name == stores[1].folder.name
    np.testing.assert_allclose(
        stores[0].lookup(inputs).read(), stores[1].lookup(inputs).read(), atol=1e-5
    )
    assert computed[0] < 0.7 * computed[1]


# -- vectors that are no numbers -------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory, checkpoint):
    """A checkpoint that gives NaN for texts with the word `rain`."""
    vocabulary = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["vocab"]
    return edited_weights(
        checkpoint,
        tmp_path_factory.mktemp("broken") / "model",
        "embeddings.word_embeddings.weight",
        lambda weight: weight[vocabulary["rain"]].fill_(float("nan")),
    )


def test_input_that_gives_nan_is_named(tmp_path, broken):
    encoder = Encoder(resolve(str(broken), OPTIONS))
    store = open_store(tmp_path, broken)
    bad = EncoderInput("", "two dogs walk in the rain")
    inputs = [*INPUTS[:12], bad]
    with pytest.raises(InputError, match="two dogs walk in the rain") as raised:
        extract(inputs, store, lambda: encoder, Silent(), Chunking(CHUNK))
    assert raised.value.item == bad
    assert raised.value.exit_code == 2
    assert store.missing(inputs) == [12]
    assert np.isfinite(store.lookup(INPUTS[:12]).read()).all()


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory, checkpoint):
    """A checkpoint whose vectors are too large for float16."""
    return edited_weights(
        checkpoint,
        tmp_path_factory.mktemp("overflowing") / "model",
        "encoder.layer.1.output.LayerNorm.weight",
        lambda weight: weight.mul_(1e7),
    )


def test_vectors_that_overflow_float16_are_refused(tmp_path, overflowing):
    options = EncoderOptions(dtype="float32", device="cpu", normalize=False)
    encoder = Encoder(resolve(str(overflowing), options))
    store = open_store(tmp_path, overflowing, "float16", options)
    with pytest.raises(InputError, match="--store-dtype float32 if vectors overflow float16"):
        extract(INPUTS[:5], store, lambda: encoder, Silent())
    assert store.missing(INPUTS[:5]) == [0, 1, 2, 3, 4]
    wide = open_store(tmp_path, overflowing, "float32", options)
    extract(INPUTS[:5], wide, lambda: encoder, Silent())
    assert np.abs(wide.lookup(INPUTS[:5]).read()).max() > np.finfo(np.float16).max
