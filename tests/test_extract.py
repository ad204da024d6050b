"""Extraction: nothing twice, nothing lost, and the same bits however often it is interrupted."""

import json
import multiprocessing
import random
import resource
import shutil
import signal
import time

import lance
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.errors import DiskFullError
from llmcond.features.extract import Extraction, NonFiniteError, extract, plan
from llmcond.features.store import FeatureStore

OPTIONS = EncoderOptions(dtype="float32", device="cpu", max_tokens_per_batch=128)
CHUNK = 16

# A server that has imported everything forks each worker: a fresh process in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["test_extract", "transformers.models.bert.modeling_bert"])


def make_inputs(n, seed=0):
    words = "two three men women dogs ride play read walk in on park beach red blue hat".split()
    draw = random.Random(seed)
    texts = {" ".join(draw.choices(words, k=draw.randint(1, 20))): None for _ in range(2 * n)}
    return [EncoderInput("", text) for text in list(texts)[:n]]


INPUTS = make_inputs(640)


class Silent:
    def start(self, inputs, characters):
        pass

    def advance(self, inputs, characters, tokens):
        pass


class Recording:
    """A real encoder that remembers what it was asked for."""

    def __init__(self, encoder):
        self.encoder = encoder
        self.asked = []

    def encode_counted(self, inputs):
        self.asked.append(list(inputs))
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


def work(checkpoint, root, inputs, connection, file_limit=None):
    """Extract in a process of its own: say when encoding begins, wait for the word, go on."""
    torch.set_num_threads(1)
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
        connection.send(extract(inputs, store, load, Silent(), CHUNK))
    except DiskFullError as error:
        connection.send(error)


def start(*arguments):
    """Start a worker; it stands where its encoder is loaded."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=work, args=(*arguments[:3], theirs, *arguments[3:]))
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
    return Encoder(resolve(str(checkpoint), OPTIONS))


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
    done = extract([*inputs, *inputs[:10]], store, lambda: encoder, Silent(), CHUNK)
    expected = encoder.encode_counted(inputs)
    np.testing.assert_allclose(store.read(inputs), expected.vectors, atol=1e-6)
    assert (done.n_inputs, done.n_computed, done.n_truncated) == (50, 50, 0)
    assert done.n_tokens == expected.n_tokens.sum()


def test_a_second_extraction_loads_no_encoder(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:50], store, lambda: encoder, Silent(), CHUNK)
    before = contents(store)
    again = extract(INPUTS[49::-1], open_store(tmp_path, checkpoint), never, Silent(), CHUNK)
    assert (again.n_inputs, again.n_computed, again.n_tokens) == (50, 0, 0)
    assert contents(store) == before


def test_only_what_is_missing_is_encoded(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:30], store, lambda: encoder, Silent(), CHUNK)
    recording = Recording(encoder)
    done = extract(INPUTS[:70], store, lambda: recording, Silent(), CHUNK)
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


def test_progress_is_told_of_every_stored_input(tmp_path, checkpoint, encoder):
    told = []

    class Progress:
        def start(self, inputs, characters):
            told.append(("start", inputs, characters))

        def advance(self, inputs, characters, tokens):
            told.append((inputs, characters, tokens))

    inputs = INPUTS[:40]
    done = extract(inputs, open_store(tmp_path, checkpoint), lambda: encoder, Progress(), CHUNK)
    characters = sum(len(item.text) for item in inputs)
    assert told[0] == ("start", 40, characters)
    assert [row[0] for row in told[1:]] == [16, 16, 8]
    assert sum(row[1] for row in told[1:]) == characters
    assert sum(row[2] for row in told[1:]) == done.n_tokens


def test_plan_is_distinct_longest_first_and_blind_to_order():
    shuffled = random.Random(1).sample([*INPUTS, *INPUTS[:99]], k=len(INPUTS) + 99)
    planned = plan(shuffled)
    assert planned == plan(INPUTS)
    assert len(planned) == len(INPUTS)
    sizes = [len(item.text) for item in planned]
    assert sizes == sorted(sizes, reverse=True)


def test_stored_chunks_do_not_shift_the_others(tmp_path, checkpoint, encoder):
    inputs = plan(INPUTS[:80])
    chunks = [inputs[i : i + CHUNK] for i in range(0, 80, CHUNK)]
    store = open_store(tmp_path, checkpoint)
    for stored in (chunks[3], chunks[1]):
        extract(stored, store, lambda: encoder, Silent(), CHUNK)
    recording = Recording(encoder)
    extract(INPUTS[:80], store, lambda: recording, Silent(), CHUNK)
    assert recording.asked == [chunks[0], chunks[2], chunks[4]]


def test_partly_stored_chunks_keep_their_bits_and_gain_the_rest(tmp_path, checkpoint, encoder):
    whole, parted = (open_store(tmp_path / name, checkpoint) for name in ("whole", "parted"))
    extract(INPUTS[:200], whole, lambda: encoder, Silent(), CHUNK)
    extract(INPUTS[:200:3], parted, lambda: encoder, Silent(), CHUNK)
    stored = contents(parted)
    extract(INPUTS[:200], parted, lambda: encoder, Silent(), CHUNK)
    assert stored.items() <= contents(parted).items()
    np.testing.assert_allclose(parted.read(INPUTS[:200]), whole.read(INPUTS[:200]), atol=1e-6)


def test_killed_extractions_resume_to_the_same_bits(tmp_path, checkpoint, undisturbed):
    draw = random.Random(7)
    store = open_store(tmp_path, checkpoint)
    sizes = []
    partial = set()
    # How far an extraction gets before it is killed depends on how busy the machine is.
    while len(partial) < 4 and len(sizes) < 60:
        process, connection = start(checkpoint, tmp_path, INPUTS)
        connection.send("go")
        time.sleep(draw.uniform(0, 0.08))
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


def test_full_disk_keeps_what_was_stored(tmp_path, checkpoint, encoder):
    store = open_store(tmp_path, checkpoint)
    extract(INPUTS[:40], store, lambda: encoder, Silent(), CHUNK)
    before = contents(store)
    process, connection = start(checkpoint, tmp_path, INPUTS, 1_024)
    connection.send("go")
    error = finish(process, connection)
    assert isinstance(error, DiskFullError)
    assert "the 40 features already stored are kept" in str(error)
    reopened = open_store(tmp_path, checkpoint)
    assert contents(reopened) == before
    extract(INPUTS, reopened, lambda: encoder, Silent(), CHUNK)
    assert len(contents(reopened)) == len(INPUTS)


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
    with pytest.raises(NonFiniteError, match="two dogs walk in the rain") as raised:
        extract(inputs, store, lambda: encoder, Silent(), CHUNK)
    assert raised.value.item == bad
    assert raised.value.exit_code == 2
    assert store.missing(inputs) == [12]
    assert np.isfinite(store.read(INPUTS[:12])).all()


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
    with pytest.raises(NonFiniteError, match="--store-dtype float32 if vectors overflow float16"):
        extract(INPUTS[:5], store, lambda: encoder, Silent())
    assert store.missing(INPUTS[:5]) == [0, 1, 2, 3, 4]
    wide = open_store(tmp_path, overflowing, "float32", options)
    extract(INPUTS[:5], wide, lambda: encoder, Silent())
    assert np.abs(wide.read(INPUTS[:5])).max() > np.finfo(np.float16).max
