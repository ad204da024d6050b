"""Encoders behind a server: a real server that speaks the embeddings protocol, and its faults."""

import threading
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.model_server import JSON_HEADERS, RETRY_AT_ONCE, EmbeddingServer, Fault

from llmcond.base.errors import LlmcondError, UserError
from llmcond.cli import run
from llmcond.encoders import EncoderInput, server
from llmcond.encoders.encoder import load_encoder
from llmcond.prompts import load_prompt
from llmcond.runs.open import open_run

E5 = "intfloat/e5-mistral-7b-instruct"
#: More texts than the server is sent at a time.
TEXTS = [f"the man rides horse {number}" for number in range(300)]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Forget former models and keys, and retry once."""
    server.probe.cache_clear()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(server, "_RETRIES", 1)


def after_probe(fault):
    """Return a function that finds the same fault in each request after the first one."""
    return lambda _, number: fault if number else None


def expected(server, texts):
    return np.array([server.embed(text) for text in texts], dtype=np.float32)


# -- vectors -----------------------------------------------------------------------------------


def test_vectors_are_those_of_the_server_in_order():
    def reverse(answer):
        return {**answer, "data": answer["data"][::-1], "usage": None}

    with EmbeddingServer(change=reverse) as there:
        encoder = load_encoder(there.url, server_model="embedder")
        encoded = encoder.encode_with_counts([EncoderInput("", text) for text in TEXTS])
        np.testing.assert_allclose(encoded.vectors, expected(there, TEXTS), atol=1e-6)
    assert all(len(body["input"]) <= server.BATCH for body in there.bodies)
    assert encoded.n_tokens.min() >= 4  # estimated, as the server counts none
    assert not encoded.truncated.any()
    identity = encoder.identity
    assert (identity.known_length, identity.limit) == (None, "the server's limit")


def test_empty_text_has_a_vector():
    with EmbeddingServer() as there:
        there.embed = lambda _: np.ones(1)
        assert load_encoder(there.name).encode([""]).shape == (1, 1)


def test_instruction_is_part_of_the_text():
    with EmbeddingServer(models=(E5, "other")) as there:
        item = EncoderInput("Find the animal", "a dog")
        load_encoder(f"{there.url}#other", instruction_format="{instruction}: {text}").encode(
            [item]
        )
        assert there.texts[-1] == "Find the animal: a dog"
        load_encoder(there.url, server_model="other", like=E5).encode([item])
        assert there.texts[-1] == "Instruct: Find the animal\nQuery: a dog"
        with pytest.raises(UserError, match="takes no instruction"):
            load_encoder(f"{there.url}#other").encode([item])


def test_several_requests_are_in_flight():
    together = threading.Barrier(server.REQUESTS, timeout=30)

    def wait_for_others(_, number):
        if number:  # all but the probe
            together.wait()

    with EmbeddingServer(wait_for_others) as there:
        load_encoder(there.name).encode(TEXTS[: server.REQUESTS * server.BATCH])
    assert not together.broken


def test_key_is_sent_and_not_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-never-to-be-seen-0123")
    refusal = Fault(401, text="Incorrect API key provided: sk-never-to-be-seen-0123")
    with EmbeddingServer(after_probe(refusal)) as there:
        encoder = load_encoder(there.name)
        with pytest.raises(UserError, match="rejects the key in OPENAI_API_KEY") as caught:
            encoder.encode(["a"])
    assert "never" not in str(caught.value)
    assert set(there.keys) == {"Bearer sk-never-to-be-seen-0123"}


# -- limits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 422])
def test_fewer_texts_are_sent_to_a_server_that_takes_fewer(status):
    too_many = Fault(status, text="batch size 32 > maximum allowed batch size 5")
    with EmbeddingServer(lambda body, _: too_many if len(body["input"]) > 5 else None) as there:
        encoder = load_encoder(there.name)
        np.testing.assert_allclose(encoder.encode(TEXTS), expected(there, TEXTS), atol=1e-6)
        there.bodies.clear()
        encoder.encode(TEXTS)
    assert max(len(body["input"]) for body in there.bodies) <= 5  # it remembers


@pytest.mark.parametrize(
    "fault",
    [
        Fault(400, text="This model's maximum context length is 512 tokens"),
        Fault(413, text="Payload Too Large"),
        Fault(500, text="input (1500 tokens) is too large to process. increase the batch size"),
    ],
)
def test_long_texts_are_cut_in_the_sentence_and_counted(fault):
    long = "word " * 100
    item = EncoderInput("", f"{long}the condition", sentence=(("text", 0, len(long)),))
    with EmbeddingServer(lambda b, _: fault if max(map(len, b["input"])) > 200 else None) as there:
        encoder = load_encoder(there.name)
        with pytest.warns(UserWarning, match="1 of 2 inputs are longer than the server's limit"):
            vectors = encoder.encode([item, "short"])
        cut = max(there.texts, key=lambda text: len(text) if len(text) <= 200 else 0)
        np.testing.assert_allclose(vectors, expected(there, [cut, "short"]), atol=1e-6)
        assert cut.endswith("the condition")
        assert len(cut) > 160
        condition = EncoderInput("", long, sentence=(("text", 0, 1),))
        with pytest.raises(UserError, match="condition and instruction leave no room"):
            encoder.encode([condition])


def test_rejected_text_is_named():
    no_dogs = Fault(400, text="no dogs")
    with (
        EmbeddingServer(lambda body, _: no_dogs if "dog" in body["input"] else None) as there,
        pytest.raises(UserError, match=r"rejects the text: .*no dogs\. The text is 'dog'"),
    ):
        load_encoder(there.name).encode(["cat", "dog"])


def test_text_that_the_server_would_cut_is_cut_in_the_sentence():
    long = "word " * 100
    item = EncoderInput("", f"{long}the condition", sentence=(("text", 0, len(long)),))
    with EmbeddingServer() as there:
        answer = there.respond

        def cut(body):  # as llmcond serve does
            shorter = [text[:200] for text in body["input"]]
            truncated = sum(len(text) > 200 for text in body["input"])
            return {**answer({**body, "input": shorter}), "truncated": truncated}

        there.respond = cut
        with pytest.warns(UserWarning, match="1 of 2 inputs are longer"):
            vectors = load_encoder(there.name).encode([item, "short"])
        sent = max(there.texts, key=lambda text: len(text) if len(text) <= 200 else 0)
        np.testing.assert_allclose(vectors, expected(there, [sent, "short"]), atol=1e-6)
    assert sent.endswith("the condition")


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_temporary_error_is_retried(status):
    faults = {3: Fault(status, headers=RETRY_AT_ONCE)}
    with EmbeddingServer(lambda _, number: faults.get(number)) as there:
        vectors = load_encoder(there.name).encode(TEXTS)
        np.testing.assert_allclose(vectors, expected(there, TEXTS), atol=1e-6)


def shorten(entry):
    return {**entry, "embedding": entry["embedding"][:3]}


def of_data(change):
    """Return a function that changes the list of vectors in an answer."""
    return lambda answer: {**answer, "data": change(answer["data"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_data(lambda data: data[1:]), "returned 1 vectors for 2 texts"),
        (of_data(lambda data: data[:1] * 2), "returned 2 vectors for 2 texts"),
        (of_data(lambda data: [shorten(data[0]), data[1]]), "one vector for each text"),
        (of_data(lambda data: [*map(shorten, data)]), "vectors of 3 numbers, and of 16 before"),
        (of_data(lambda data: [{**e, "embedding": [None] * 16} for e in data]), "NaN or inf.*'a'"),
        (of_data(lambda data: [{**e, "embedding": [[1.0], [2.0]]} for e in data]), "--pooling"),
        (lambda _: {"error": "no quota"}, "not answer in the embeddings protocol: .*no quota"),
        (lambda _: [1, 2], "does not answer in the embeddings protocol"),
    ],
)
def test_invalid_answer_is_an_error(change, message):
    with EmbeddingServer() as there:
        encoder = load_encoder(there.name)
        there.change = change
        with pytest.raises(LlmcondError, match=message) as caught:
            encoder.encode(["a", "b"])
    assert there.url in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(200, body='{"data": [{"emb', headers=JSON_HEADERS), "embeddings protocol"),
        (Fault(200, body="<html>A page</html>"), "<html>A page"),
        (Fault(500, headers=RETRY_AT_ONCE), r"fails \(after 1 retries\): .*out of order"),
        (Fault(0), r"fails \(after 1 retries\): Connection error"),
        (Fault(404, text="not here"), "has no model 'embedder', or no embeddings protocol"),
        (Fault(307, headers={"Location": "http://elsewhere"}), "Redirects are not followed"),
    ],
)
def test_failing_server_is_an_error(fault, message):
    with EmbeddingServer(after_probe(fault)) as there:
        encoder = load_encoder(there.name)
        with pytest.raises(LlmcondError, match=message) as caught:
            encoder.encode(["a", "b"])
    assert there.url in str(caught.value)


def test_slow_server_is_an_error(monkeypatch):
    monkeypatch.setattr(server, "_TIMEOUT", 0.2)
    with EmbeddingServer(after_probe(Fault(200, without_end=b" ", pause=0.05))) as there:
        encoder = load_encoder(there.name)
        with pytest.raises(LlmcondError, match=r"fails \(after 1 retries\): Request timed out"):
            encoder.encode(["a"])


# -- commands ----------------------------------------------------------------------------------


@pytest.fixture
def extract(data, in_tmp):
    """Return a function that makes a command."""

    def command(there, *options, folder="run"):
        model = ("--model", there.url, "--server-model", "embedder", "--prompt", "concat-sent-cond")
        return [str(x) for x in ("extract", *model, "--run", folder, "--data", data, *options)]

    return command


def stored(folder):
    opened = open_run(Path(folder))
    inputs = [*opened.task.inputs(opened.data, load_prompt("concat-sent-cond"))]
    return opened.store().lookup(inputs).read()


def test_features_of_a_server_are_a_run_like_others(extract, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-never-to-be-seen-0123")
    with EmbeddingServer() as there:
        done = run_json(capsys, *extract(there))
        assert done["encoder"] == there.name
        assert "never" not in Path("run/run.json").read_text()
        there.bodies.clear()
        assert run(["fit-head", "--run", "run", "--head", "pca", "--dim", "4"]) == 0
        assert run(["evaluate", "--run", "run"]) == 0
        assert run(extract(there)) == 0
        assert there.texts == []
        similar = ("similarity", "a dog runs", "a dog sits", "--run", "run", "--head", "none")
        assert run([*similar, "--condition", "the animal"]) == 0
        assert "a dog runs the animal" in there.texts


def test_plan_sends_nothing_but_a_probe(extract, capsys):
    with EmbeddingServer() as there:
        plan = run_json(capsys, *extract(there, "--plan", "--price", "2"))
        assert len(there.texts) == 1
        assert not Path("run").exists()
        assert run(extract(there)) == 0
        texts = there.texts[1:]
    assert plan["requests"] == -(-len(texts) // server.BATCH)
    assert plan["tokens"]["value"] == pytest.approx(sum(map(len, texts)) / 4, rel=0.1)
    assert plan["cost"]["value"] == pytest.approx(plan["tokens"]["value"] * 2e-6)
    assert plan["dim"] == there.dim


def test_extraction_resumes_after_the_server_has_stopped(extract, capsys, monkeypatch):
    monkeypatch.setattr("llmcond.features.extract.CHUNK", 32)
    with EmbeddingServer() as there:
        assert run(extract(there, folder="whole")) == 0
    with EmbeddingServer(lambda _, number: Fault(0) if number > 3 else None) as there:
        assert run(extract(there)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "Vectors that are stored already are not computed again." in error
    assert 0 < len(open_run(Path("run")).store()) < len(open_run(Path("whole")).store())
    server.probe.cache_clear()
    rest = ("--run", "whole", "--condition", "c")
    assert "no server answers at" in run_rejected(capsys, "similarity", "a", "b", *rest)
    with EmbeddingServer(port=there.server_address[1]) as again:
        assert run(extract(again)) == 0
    np.testing.assert_array_equal(stored("run"), stored("whole"))


def test_another_model_under_the_name_is_noticed(extract, capsys):
    with EmbeddingServer() as there:
        assert run(extract(there)) == 0
    server.probe.cache_clear()
    capsys.readouterr()
    with EmbeddingServer(seed=1, port=there.server_address[1]) as other:
        assert "gives other vectors than before" in run_rejected(capsys, *extract(other))
        rest = ("--run", "run", "--condition", "c")
        assert "gives other vectors" in run_rejected(capsys, "similarity", "a", "b", *rest)


def test_check_sends_a_probe_and_lists_models(capsys):
    with EmbeddingServer(models=("embedder", "other")) as there:
        report = run_json(capsys, "models", "--check", there.name)
        assert (report["dim"], report["server_models"]) == (16, ["embedder", "other"])
        assert run(["models", "--check", there.name]) == 0
        assert len(there.texts) == 1
    assert "the number of people" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train-lora", "--head", "none"], "training needs the weights"),
        (["train-cross"], "training needs the weights"),
        (["bench"], "timing needs the weights"),
        (["extract", "--prompt", "routed"], "it has a router, which weights states of tokens"),
        (["extract", "--prompt", "pair-cond"], "it has pairs of texts"),
        (["extract", "--pooling", "cls"], "pooling is 'cls', which needs the weights"),
        (["extract", "--plan", "--bench", "x.json"], "--bench needs the weights"),
    ],
)
def test_what_needs_the_weights_is_rejected(command, message, data, capsys, in_tmp):
    with EmbeddingServer() as there:
        source = () if command[0] == "bench" else ("--data", data)
        assert message in run_rejected(capsys, *command, "--model", there.name, *source)
    assert not Path("runs").exists()


# -- names and options -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("{url}", {}, "model is not named.*It has 'embedder'"),
        ("{url}#embedder", {"server_model": "other"}, "Give only one of them"),
        ("http://127.0.0.1:1/v1#a", {}, "no server answers at http://127.0.0.1:1/v1"),
        ("https://127.0.0.1:{port}/v1#a", {}, "no server answers at https://127.0.0.1"),
        ("http://user:word@host/v1#a", {}, "contains a user name"),
        ("{url}#embeder", {}, "has no model 'embeder'.*Did you mean 'embedder'"),
        ("{url}#embedder", {"pooling": "cls"}, "pooling is 'cls', which needs the weights"),
        ("{url}#embedder", {"quantize": "4bit"}, "quantize is '4bit', which needs the weights"),
        ("{url}#embedder", {"dtype": "bfloat16"}, "dtype is 'bfloat16', which needs the weights"),
        ("{url}#embedder", {"runtime": "openvino"}, "runtime is 'openvino', which needs the w"),
        ("{url}#embedder", {"max_length": 64}, "max_length is 64, which needs the weights"),
        ("{url}#embedder", {"normalize": False}, "scales its vectors to unit norm"),
        ("{url}#embedder", {"revision": "main"}, "a server's model has none"),
        ("minilm", {"server_model": "a"}, "minilm is no address of a server"),
    ],
)
def test_invalid_option_is_rejected(name, options, message):
    with EmbeddingServer() as there, pytest.raises(UserError, match=message):
        load_encoder(name.format(url=there.url, port=there.server_address[1]), **options)


def test_gguf_file_names_the_way_of_a_server(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"llama-server -m .*a\.gguf --embeddings"):
        load_encoder(str(tmp_path / "a.gguf"))
