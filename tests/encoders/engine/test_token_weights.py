"""Token weights: they are those that vectors are computed with, in every engine and router mode."""

import threading

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.standin import StandIn

from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine.forward import pool_routed
from llmcond.encoders.engine.interface import Routes, record_weights, recording_weights
from llmcond.encoders.spec import Router
from llmcond.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

SENTENCE, CONDITION = "three women sit on the beach at night", "the time"


def routed_input(text=SENTENCE, condition=CONDITION):
    return EncoderInput("", text, router=Router(condition, 0.7, False, True))


def load(folder, **options):
    return load_encoder(str(folder), dtype="float32", device="cpu", **options)


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roberta") / "model"
    checkpoints.build_checkpoint("simcse-roberta", folder)
    return folder


def states_of(network, ids):
    """Return the states of a text's tokens, by the network alone."""
    with torch.inference_mode():
        states = network(input_ids=torch.tensor([ids])).last_hidden_state
    return states[0].numpy()


# -- routed pooling ------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
@pytest.mark.parametrize("pool_over", ["all", "text"])
def test_pooled_states_give_vector(tiny_bert, runtime, pool_over):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    options = {"pooling": "mean", "pool_over": pool_over, "normalize": True}
    encoder = load(tiny_bert, runtime=runtime, **options)
    weighted = encoder.token_weights(routed_input())
    # The states come from PyTorch, without the engine.
    reference = load(tiny_bert, runtime="torch", **options)
    row = reference._tokenizer([EncoderInput("", SENTENCE)])[0]
    states = states_of(reference.engine.model.network, row.ids)[row.first : row.last]
    pooled = weighted.weights[0] @ states
    expected = encoder.encode([routed_input()])[0]
    np.testing.assert_allclose(pooled / np.linalg.norm(pooled), expected, atol=1e-5)
    np.testing.assert_allclose(weighted.states, states, atol=1e-5)
    np.testing.assert_array_equal(weighted.vector, expected)
    assert weighted.weights.sum() == pytest.approx(1, abs=1e-6)
    assert weighted.layers == []
    words = [token.text for token in weighted.tokens if not token.special]
    assert words == SENTENCE.split()
    assert len(weighted.tokens) - len(words) == (2 if pool_over == "all" else 0)


def test_weights_are_those_of_the_same_input_among_others(tiny_bert):
    encoder = load(tiny_bert, pooling="mean", runtime="torch")
    items = [routed_input(), routed_input("men ride", "the place"), routed_input("the rain")]
    weighted = encoder.token_weights(items[0])
    np.testing.assert_allclose(weighted.vector, encoder.encode(items)[0], atol=1e-6)
    assert not np.allclose(
        weighted.weights, encoder.token_weights(routed_input(condition="a red hat")).weights
    )


def test_pooling_on_gpu_records_weights_of_cpu():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 9, 8, generator=generator)
    routes = [Routes(torch.randn(1, 8, generator=generator), Router("", 0.5, True, True))]
    with recording_weights() as on_cpu:
        vectors = pool_routed(hidden, [(2, 7)], routes)
    with StandIn(), recording_weights() as on_gpu:
        pool_routed(hidden.to("cuda"), [(2, 7)], routes)
    np.testing.assert_allclose(on_gpu.weights[0], on_cpu.weights[0], atol=1e-6)
    np.testing.assert_allclose(on_gpu.states, hidden[0, 2:7], atol=1e-6)
    np.testing.assert_allclose(on_cpu.weights[0] @ on_cpu.states, vectors[0], atol=1e-5)


# -- routers inside the encoder ------------------------------------------------------------------


def recompute(network, item, tokenize, layers):
    """Compute the weights and the vector of CSR in a BERT, layer by layer, for one sentence."""
    condition, row = tokenize([EncoderInput("", item.router.text), EncoderInput("", item.text)])

    def run(ids, query=None):
        x, every = network.embeddings(input_ids=torch.tensor([ids]))[0], []
        for number, layer in enumerate(network.encoder.layer):
            part, n_heads = layer.attention.self, layer.attention.self.num_attention_heads
            q, k, v = part.query(x), part.key(x), part.value(x)
            heads = (each.unflatten(1, (n_heads, -1)).transpose(0, 1) for each in (q, k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(*heads)
            attended = attended.transpose(0, 1).flatten(1)
            if query is not None and number >= len(network.encoder.layer) - layers:
                every.append((k @ query / len(query) ** 0.5).softmax(0))
                attended = attended * (1 + every[-1])[:, None]
            x_attended = layer.attention.output(attended, x)
            x = layer.output(layer.intermediate(x_attended), x_attended)
        return x, q, every

    with torch.inference_mode():
        _, queries, _ = run(condition.ids)
        states, _, weights = run(row.ids, queries[0])
    return np.stack(weights), states.mean(0).numpy()


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_weights_of_csr_match_plain_computation(tiny_bert, layers, packs, monkeypatch):
    options = {"pooling": "mean", "normalize": False}
    encoder = load(tiny_bert, router="csr", router_layers=layers, **options)
    monkeypatch.setattr(encoder.engine, "packs", packs)
    network = load(tiny_bert, pooling="mean", runtime="torch").engine.model.network
    weighted = encoder.token_weights(routed_input())
    weights, vector = recompute(network, routed_input(), encoder._tokenizer, layers)
    np.testing.assert_allclose(weighted.weights, weights, atol=1e-6)
    np.testing.assert_allclose(weighted.vector, vector, atol=1e-5)
    np.testing.assert_array_equal(weighted.vector, encoder.encode([routed_input()])[0])
    assert weighted.layers == [1, 2][-layers:]
    assert [token.text for token in weighted.tokens] == ["[CLS]", *SENTENCE.split(), "[SEP]"]
    assert weighted.states is None


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        ("hidden", ["<s>"], ["</s>"]),
        ("bi", ["<s>"], ["</s>"]),
        ("released-bi", ["<s>"], ["</s>"]),
        ("released-tri", ["</s>", "<s>"], ["</s>"]),
    ],
)
def test_tokens_are_those_that_the_network_weights(roberta, mode, before, after):
    encoder = load(roberta, router="csr", router_mode=mode, router_layers=2, pooling="cls")
    text = "two dogs run"
    weighted = encoder.token_weights(routed_input(text))
    inside = [token for token in weighted.tokens if token.start is not None]
    names = [token.text for token in weighted.tokens]
    assert names[: len(before)] == before
    assert names[-len(after) :] == after
    assert len(names) == len(before) + len(inside) + len(after)
    assert "".join(text[token.start : token.end] for token in inside) == text.replace(" ", "")
    assert [token.special for token in weighted.tokens] == [
        t.start is None for t in weighted.tokens
    ]
    assert weighted.weights.shape == (2, len(names))
    sums = weighted.weights.sum(axis=1)
    # In the tri-encoder, the rest of the attention goes to the condition.
    assert ((sums > 0) & (sums < 1)).all() if mode == "released-tri" else np.allclose(sums, 1)


# -- tokens and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["simcse-roberta", "xlm-r", "qwen"])
def test_tokens_have_characters_of_sentence(kind, tmp_path):
    checkpoints.build_checkpoint(kind, tmp_path / "model")
    encoder = load(tmp_path / "model")
    text = "  two dogs, running\tover the café"
    tokens = encoder.tokenize(text)
    spans = [(token.start, token.end) for token in tokens if token.start is not None]
    pieces = [text[start:end] for start, end in spans]
    assert all(piece.strip() == piece != "" for piece in pieces)
    assert spans == sorted(spans)
    covered = {index for span in spans for index in range(*span)}
    assert covered == {index for index, letter in enumerate(text) if not letter.isspace()}
    # The other tokens without characters are those of spaces.
    special = [position for position, token in enumerate(tokens) if token.special]
    assert special == ([] if kind == "qwen" else [0, len(tokens) - 1])


def test_positions_count_from_sentence_in_every_template(tiny_bert):
    tokenizer = load(tiny_bert)._tokenizer
    text = "the place: two dogs ride"
    item = EncoderInput("", text, sentence=(("text", 11, len(text)),))
    (row,) = tokenizer([item])
    tokens = tokenizer.describe(item, row)
    assert [(t.text, t.start, t.end) for t in tokens if t.start is not None] == [
        ("two", 0, 3),
        ("dogs", 4, 8),
        ("ride", 9, 13),
    ]
    assert [t.text for t in tokens if t.start is None and not t.special] == ["the", "place", ":"]


def test_truncated_text_has_weights_of_its_beginning(tiny_bert):
    encoder = load(tiny_bert, pooling="mean", max_length=8)
    with pytest.warns(UserWarning, match="its end has no weights"):
        weighted = encoder.token_weights(routed_input())
    assert [t.text for t in weighted.tokens] == ["[CLS]", *SENTENCE.split()[:6], "[SEP]"]
    assert weighted.weights.shape == (1, 8)


def test_inputs_without_single_weighting_are_rejected(tiny_bert):
    encoder = load(tiny_bert, pooling="mean", max_length=8, long_texts="windows")
    with pytest.raises(UserError, match="has no router"):
        encoder.token_weights(EncoderInput("", SENTENCE))
    with pytest.raises(UserError, match="10 tokens, more than the 8"):
        encoder.token_weights(routed_input())


def test_other_threads_are_not_recorded(tiny_bert):
    encoder = load(tiny_bert, pooling="mean")
    with recording_weights() as recording:
        thread = threading.Thread(target=encoder.encode, args=([routed_input()],))
        thread.start()
        thread.join()
        assert recording.weights == []
        record_weights(np.ones((1, 2)))
    record_weights(np.zeros((1, 2)))
    np.testing.assert_array_equal(recording.weights, [[1, 1]])
