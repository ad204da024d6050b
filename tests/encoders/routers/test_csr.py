"""CSR's router inside an encoder, compared with plain implementations one text at a time."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, WORDS
from safetensors.torch import save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine.engine import embed_routed
from llmcond.encoders.engine.interface import router_inputs
from llmcond.encoders.routers.csr import HeavyRouter
from llmcond.encoders.settings import READING_MODES, RELEASED_MODES
from llmcond.encoders.spec import Router
from llmcond.errors import LlmcondError, UserError

pytestmark = pytest.mark.usefixtures("one_thread")

#: Gemma's norm after attention undoes the effect of any router.
ROUTABLE = [name for name in CASES if not name.startswith("gemma")]
#: The authors' code is for encoders that add positions to their embeddings.
ABSOLUTE = ["e5-xlm-r", "bge-m3", "simcse-roberta", "simcse-bert"]
#: One encoder of each kind: bidirectional and causal, with absolute and rotary positions.
WEIGHTED = ["simcse-bert", "sfr", "nv-embed"]
CONDITIONS = ["the mood", "dogs", "how far away the man is and what he says of it", "the place"]
STRENGTH = 5.0  # the paper's 1 hardly changes the vectors of tiny random encoders


def load(name, folder, mode="paper", layers=2, **options):
    case = CASES[name]
    if not (folder / "model").exists():
        checkpoints.build_checkpoint(case.kind, folder / "model", **case.checkpoint_options)
        checkpoints.change_json(folder / "model/config.json", **case.config)
    case_options = case.options if mode not in RELEASED_MODES else {}
    router = {"router": "csr", "router_mode": mode, "router_layers": layers}
    router |= {"router_strength": STRENGTH, "max_length": MAX_LENGTH, **case_options, **options}
    if mode == "heavy":
        torch.manual_seed(3)
        width = json.loads((folder / "model/config.json").read_text())["hidden_size"]
        save_file(HeavyRouter(layers, width).state_dict(), folder / "model/router.safetensors")
    model = str(folder / "model")
    return load_encoder(model, like=case.like, dtype="float32", device="cpu", **router)


@pytest.fixture(
    params=[
        *[(name, mode, "one-plus") for name in ROUTABLE for mode in ("paper", "hidden", "heavy")],
        *[(name, "paper", weight) for name in WEIGHTED for weight in ("only", "random")],
    ]
)
def encoder(request, tmp_path):
    name, mode, weight = request.param
    return load(name, tmp_path, mode, router_weight=weight)


def routed_input(text, condition):
    return EncoderInput("", text, router=Router(condition, 0.05, True, False))


def mixed_inputs(seed=0, n=8):
    """Return sentences under several conditions, some without router, one longer than fits."""
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=k)) for k in generator.choices(range(1, 30), k=n)]
    texts.append("the man " * 80)
    items = [routed_input(text, condition) for text in texts for condition in CONDITIONS]
    items += [EncoderInput("", text) for text in [*texts, *CONDITIONS]]
    generator.shuffle(items)
    return items


# -- the paper's equation ----------------------------------------------------------------------


def factor(identity, weights):
    """Return the factor of each token with these weights."""
    return (identity.router_weight != "only") + identity.router_strength * weights


def random_weights(ids, layers):
    scores = torch.from_numpy(np.random.default_rng(ids).standard_normal((layers, len(ids))))
    return scores.softmax(dim=1).float()


class EagerReference:
    """Equation 1 of the paper in eager attention, for one text and without the engine."""

    def __init__(self, encoder):
        self.network, self.identity = encoder.engine.model.network, encoder.identity
        self.tokenizer, self.heavy = (
            encoder._tokenizer,
            getattr(encoder.engine.model.network, "csr_router", None),
        )
        self.causal = self.identity.attention == "causal"
        self.states = {}
        modules = [m for m in self.network.modules() if type(m).__name__.endswith("SelfAttention")]
        modules = modules or [m for m in self.network.modules() if hasattr(m, "q_proj")]
        for layer, module in enumerate(modules):
            module.layer = layer
            module.register_forward_pre_hook(self.record_states, with_kwargs=True)
        self.n_layers = len(modules)

    def record_states(self, module, args, kwargs):
        self.states[module.layer] = (args[0] if args else kwargs["hidden_states"])[0]

    def attention(self, module, query, key, value, mask, scaling=None, **kwargs):
        query, key, value = query[0], key[0], value[0]
        key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
        n = query.shape[1]
        scores = query @ key.transpose(1, 2) * (scaling or query.shape[2] ** -0.5)
        if self.causal:
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        output = (scores.softmax(-1) @ value).transpose(0, 1)  # (tokens, heads, head_dim)
        queries, keys = (x.transpose(0, 1).flatten(1) for x in (query, key))
        if self.identity.router_mode != "paper":
            queries = keys = self.states[module.layer]
        position = n - 1 if self.causal else 0
        if self.query is None:
            self.condition_query = queries[position]
        elif (routed_layer := module.layer - self.n_layers + self.identity.router_layers) >= 0:
            query = self.query
            if self.heavy is not None:
                query = self.heavy.query[routed_layer] @ query
                keys = keys @ self.heavy.key[routed_layer].T
            weights = (keys @ query / len(query) ** 0.5).softmax(0)
            if self.identity.router_weight == "random":
                weights = random_weights(self.ids, self.identity.router_layers)[routed_layer]
            output = output * factor(self.identity, weights)[:, None, None]
        return output[None], None

    def run(self, row, query):
        self.query, self.ids = query, row.ids
        AttentionInterface.register("reference", self.attention)
        AttentionMaskInterface.register("reference", sdpa_mask)
        previous = self.network.config._attn_implementation
        self.network.set_attn_implementation("reference")
        inputs = {
            "input_ids": torch.tensor([row.ids]),
            "attention_mask": torch.ones(1, len(row.ids)),
        }
        if self.identity.pooling == "latent":
            inputs["pooled"] = torch.arange(len(row.ids))
        with torch.inference_mode():
            output = self.network(**inputs)
        self.network.set_attn_implementation(previous)
        return output

    def vector(self, item):
        condition, row = self.tokenizer(
            [EncoderInput("", item.router.text), EncoderInput("", item.text)]
        )
        self.run(condition, None)
        output = self.run(row, self.condition_query)
        hidden = output.last_hidden_state[0]
        pooled = {"cls": lambda: hidden[0], "last": lambda: hidden[row.last - 1]}
        pooled["pooler"] = lambda: output.pooler_output[0]
        vector = pooled.get(self.identity.pooling, lambda: hidden[row.first : row.last].mean(0))()
        return (vector / vector.norm() if self.identity.normalize else vector).numpy()


@pytest.mark.matrix
def test_vectors_match_equation_of_paper(encoder):
    items = [item for item in mixed_inputs(n=3) if item.router]
    vectors = encoder.encode_with_counts(items).vectors
    reference = EagerReference(encoder)
    for item, vector in zip(items, vectors, strict=True):
        np.testing.assert_allclose(vector, reference.vector(item), rtol=0, atol=1e-5)


@pytest.mark.processor
@pytest.mark.matrix
def test_vectors_do_not_depend_on_batch_or_packing(encoder, monkeypatch):
    items = mixed_inputs(1)
    encoded = encoder.encode_with_counts(items)
    alone = np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    np.testing.assert_allclose(encoded.vectors, alone, rtol=0, atol=1e-5)
    assert encoder.engine.packs
    monkeypatch.setattr(encoder.engine, "packs", False)
    padded = encoder.encode_with_counts(items).vectors
    np.testing.assert_allclose(padded, encoded.vectors, rtol=0, atol=1e-5)
    unrouted = encoder.encode_with_counts([EncoderInput("", item.text) for item in items]).vectors
    changes = np.abs(unrouted - encoded.vectors).max(axis=1)
    assert all(changes[index] > 1e-4 for index, item in enumerate(items) if item.router)


def test_random_weights_depend_on_sentence_only(tmp_path):
    encoder = load("simcse-bert", tmp_path, router_weight="random")
    texts = ["two dogs run over wet grass", "over wet grass run two dogs"]
    vectors = encoder.encode_with_counts(
        [routed_input(text, condition) for text in texts for condition in CONDITIONS[:2]]
    ).vectors
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert np.abs(vectors[0] - vectors[2]).max() > 1e-4
    ids = [tokens.ids for tokens in encoder._tokenizer([EncoderInput("", t) for t in texts])]
    random_weights = encoder.engine.passes.sample_weights(ids, len(ids[0]) + 1)
    assert random_weights[:, :, -1].eq(0).all()
    torch.testing.assert_close(random_weights.sum(dim=2), torch.ones(2, 2))
    assert not random_weights[0, 0].equal(random_weights[1, 0])  # each layer has its own


# -- the paper's bi-encoder ----------------------------------------------------------------------


class BiEncoderReference(EagerReference):
    """The bi-encoder of section 3.1 in eager attention, for one text and without the engine."""

    def attention(self, module, query, key, value, mask, scaling=None, **kwargs):
        query, key, value = query[0], key[0], value[0]
        key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
        n = query.shape[1]
        scores = query @ key.transpose(1, 2) * (scaling or query.shape[2] ** -0.5)
        if self.causal:
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        attention = scores.softmax(-1)
        output = (attention @ value).transpose(0, 1)
        layer = module.layer - self.n_layers + self.identity.router_layers
        if layer >= 0:
            row = n - 1 if self.causal else self.length
            weights = attention.mean(0)[row, : self.length]
            weights = weights / weights.sum()
            if self.identity.router_weight == "random":
                ids = self.ids[: self.length]
                weights = random_weights(ids, self.identity.router_layers)[layer]
            scale = torch.ones(n)
            scale[: self.length] = factor(self.identity, weights)
            output = output * scale[:, None, None]
        return output[None], None

    def vector(self, item):
        sentence, condition = self.tokenizer(
            [EncoderInput("", item.text), EncoderInput("", item.router.text)]
        )
        self.length = len(sentence.ids)
        joined = replace(sentence, ids=[*sentence.ids, *condition.ids])
        output = self.run(joined, None)
        hidden = output.last_hidden_state[0]
        pooled = {"cls": lambda: hidden[0], "last": lambda: hidden[len(joined.ids) - 1]}
        pooled["pooler"] = lambda: output.pooler_output[0]
        last = self.length + condition.last
        vector = pooled.get(self.identity.pooling, lambda: hidden[sentence.first : last].mean(0))()
        return (vector / vector.norm() if self.identity.normalize else vector).numpy()


@pytest.mark.parametrize("weight", ["one-plus", "only", "random"])
@pytest.mark.parametrize("name", ["e5-xlm-r", "simcse-bert", "sfr"])
def test_bi_encoder_matches_section_31(name, weight, tmp_path):
    encoder = load(name, tmp_path, "bi", router_weight=weight)
    # Longer sentences would be cut.
    items = [item for item in mixed_inputs(6, n=8) if item.router and len(item.text.split()) < 12]
    vectors = encoder.encode_with_counts(items).vectors
    reference = BiEncoderReference(encoder)
    for item, vector in zip(items, vectors, strict=True):
        np.testing.assert_allclose(vector, reference.vector(item), rtol=0, atol=1e-5)


def test_bi_encoder_cuts_sentence_and_not_condition(tmp_path):
    encoder = load("simcse-bert", tmp_path, "bi")
    text = "the man " * 80
    vectors = encoder.encode_with_counts(
        [routed_input(text, condition) for condition in ("the mood", "the place")]
        + [routed_input(text + " dogs", "the mood")]
    ).vectors
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-4
    np.testing.assert_allclose(vectors[0], vectors[2], rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="router_mode is 'bi', which reads sentence and condition"):
        encoder.encode_with_counts([routed_input("dogs", text)])


# -- the released code ---------------------------------------------------------------------------


def released_tri(encoder, item, *, layers):
    """Compute the released tri-encoder layer by layer."""
    network = encoder.engine.model.network
    tokens = encoder._tokenizer([EncoderInput("", item.router.text), EncoderInput("", item.text)])
    condition, row = (tokenised.ids for tokenised in tokens)
    with torch.inference_mode():
        c = network(input_ids=torch.tensor([condition])).last_hidden_state[0]
        x = network.embeddings(input_ids=torch.tensor([[row[-1], *row]]))[0]
        for number, layer in enumerate(network.encoder.layer):
            attention = layer.attention.self
            both = torch.cat([c, x])
            q, k, v = (
                part.unflatten(1, (attention.num_attention_heads, -1)).transpose(0, 1)
                for part in (attention.query(x), attention.key(both), attention.value(both))
            )
            weights = (q @ k.transpose(1, 2) / q.shape[2] ** 0.5).softmax(-1)
            context = (weights @ v).transpose(0, 1).flatten(1)
            if number >= len(network.encoder.layer) - layers:
                m = weights.mean(0)[0, -len(x) :]
                if encoder.identity.router_weight == "random":
                    ids = [row[-1], *row]
                    m = random_weights(ids, layers)[number - len(network.encoder.layer) + layers]
                context = context * factor(encoder.identity, m)[:, None]
            attended = layer.attention.output(context, x)
            x = layer.output(layer.intermediate(attended), attended)
    return x[0]


def released_bi(encoder, item, *, layers):
    """Compute the released bi-encoder layer by layer."""
    network = encoder.engine.model.network
    tokens = encoder._tokenizer([EncoderInput("", item.router.text), EncoderInput("", item.text)])
    condition, row = (tokenised.ids for tokenised in tokens)
    split = len(row) + 1
    with torch.inference_mode():
        x = network.embeddings(input_ids=torch.tensor([[*row, row[-1], *condition]]))[0]
        for number, layer in enumerate(network.encoder.layer):
            attention = layer.attention.self
            q, k, v = (
                part.unflatten(1, (attention.num_attention_heads, -1)).transpose(0, 1)
                for part in (attention.query(x), attention.key(x), attention.value(x))
            )
            scores = q @ k.transpose(1, 2) / q.shape[2] ** 0.5
            others = torch.arange(len(x)) != split
            scores[:, others, split] = -torch.inf
            weights = scores.softmax(-1)
            context = (weights @ v).transpose(0, 1).flatten(1)
            if number >= len(network.encoder.layer) - layers:
                m = weights.mean(0)[split, : len(row)]
                m = m / m.sum()
                if encoder.identity.router_weight == "random":
                    m = random_weights(row, layers)[number - len(network.encoder.layer) + layers]
                scale = torch.ones(len(x))
                scale[: len(row)] = factor(encoder.identity, m)
                context = context * scale[:, None]
            attended = layer.attention.output(context, x)
            x = layer.output(layer.intermediate(attended), attended)
    return x[0]


@pytest.mark.parametrize(
    ("name", "layers", "weight"),
    [
        *[(name, layers, "one-plus") for name in ABSOLUTE for layers in (1, 2)],
        *[("simcse-bert", 2, weight) for weight in ("only", "random")],
    ],
)
@pytest.mark.parametrize("mode", RELEASED_MODES)
def test_released_modes_match_authors_code(name, mode, layers, weight, tmp_path):
    encoder = load(name, tmp_path, mode, layers, router_weight=weight)
    assert encoder.identity.pooling == "cls"
    items = [item for item in mixed_inputs(3, n=4) if item.router and len(item.text.split()) < 60]
    vectors = encoder.encode_with_counts(items).vectors
    compute_reference = released_tri if mode == "released-tri" else released_bi
    for item, vector in zip(items, vectors, strict=True):
        expected = compute_reference(encoder, item, layers=layers)
        if encoder.identity.normalize:
            expected = expected / expected.norm()
        np.testing.assert_allclose(vector, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("weight", ["one-plus", "only", "random"])
@pytest.mark.parametrize("mode", READING_MODES)
def test_modes_that_read_conditions_do_not_depend_on_batch(mode, weight, tmp_path):
    encoder = load("simcse-roberta", tmp_path, mode, router_weight=weight)
    items = mixed_inputs(4)
    vectors = encoder.encode_with_counts(items).vectors
    alone = np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    np.testing.assert_allclose(vectors, alone, rtol=0, atol=1e-5)


# -- saved computation and gradients -------------------------------------------------------------


def test_layers_before_router_are_computed_once_per_sentence(tmp_path):
    encoder = load("e5-xlm-r", tmp_path, layers=1)
    blocks = encoder.engine.model.network.encoder.layer
    sizes_per_layer = [[], []]
    for block, sizes in zip(blocks, sizes_per_layer, strict=True):
        block.intermediate.register_forward_hook(
            lambda m, a, out, sizes=sizes: sizes.append(out.shape[1])
        )
    items = [routed_input("two dogs run over wet grass", condition) for condition in CONDITIONS]
    queries = encoder.queries(CONDITIONS)
    for sizes in sizes_per_layer:
        sizes.clear()
    encoder.encode_with_counts(items, queries)
    (first_size,), (second_size,) = sizes_per_layer
    assert second_size == len(CONDITIONS) * first_size


def test_condition_affects_only_vectors_routed_by_it(tmp_path):
    encoder = load("simcse-bert", tmp_path)
    texts = ["two dogs run over wet grass", "the man sits", "the gun is gone"]
    before = encoder.encode_with_counts([routed_input(text, "the mood") for text in texts]).vectors
    after = encoder.encode_with_counts(
        [
            routed_input(text, "dogs" if index == 1 else "the mood")
            for index, text in enumerate(texts)
        ]
    ).vectors
    np.testing.assert_allclose(after[[0, 2]], before[[0, 2]], rtol=0, atol=1e-6)
    assert np.abs(after[1] - before[1]).max() > 1e-4


def test_equal_keys_have_equal_weights(tmp_path):
    encoder = load("simcse-bert", tmp_path, layers=1, pooling="mean")
    csr = encoder.engine.passes
    module = next(m for m in csr._layer_of if csr.is_routed(m))
    scores = csr.scores(module, torch.randn(2, 32), torch.ones(2, 5, 32))
    torch.testing.assert_close(scores.softmax(1), torch.full((2, 5), 0.2))


@pytest.mark.parametrize(
    ("mode", "weight"),
    [
        *[(mode, "one-plus") for mode in ("paper", "hidden", "heavy", *READING_MODES)],
        ("paper", "only"),
        ("bi", "random"),
    ],
)
def test_gradients_match_finite_differences(mode, weight, tmp_path):
    encoder = load("e5-xlm-r", tmp_path, mode, router_weight=weight)
    network = encoder.engine.model.network
    items = [
        routed_input(text, c)
        for text in ("two dogs run", "the man sits down")
        for c in CONDITIONS[:2]
    ]
    tokens = encoder._tokenizer([EncoderInput("", item.text) for item in items])
    routers = router_inputs(items)
    queries = dict(zip(routers, encoder._tokenizer(list(routers.values())), strict=True))
    weight = network.embeddings.word_embeddings.weight.requires_grad_(True)
    torch.manual_seed(0)
    directions = torch.randn(len(items), encoder.dim)

    def loss():
        return (embed_routed(encoder.engine, items, tokens, queries) * directions).sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    # A word of a condition affects the loss through the router only, a word of a sentence directly.
    for token_id in (queries["the mood"].ids[1], tokens[0].ids[1]):
        step = torch.zeros_like(weight)
        step[token_id] = torch.randn(weight.shape[1], dtype=weight.dtype) * 1e-2
        with torch.no_grad():
            weight += step
            above = loss()
            weight -= 2 * step
            below = loss()
            weight += step
        expected = float(above - below) / 2
        assert float((gradient * step).sum()) == pytest.approx(expected, rel=2e-2, abs=2e-6)
        assert abs(expected) > 1e-6


# -- invalid settings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gemma", {}, "change nothing. Leave out --router: routed pooling works with any"),
        ("e5-xlm-r", {"layers": 3}, "router_layers is 3, but .* has 2 layers"),
        ("e5-xlm-r", {"layers": 0}, "router_layers is 0; it must be at least 1"),
        ("bge-m3", {"layers": 1}, "pools by cls, .* Use --router-layers 3, or --pooling mean"),
        ("e5-xlm-r", {"router_strength": 0.0}, "router_strength is 0; it must be above 0"),
        ("sfr", {"mode": "released-tri"}, "router_mode is 'released-tri', which is for bidirect"),
        ("nv-embed", {"mode": "released-bi"}, "router_mode is 'released-bi', which is for bidir"),
        ("e5-xlm-r", {"router": "none"}, "router_mode is 'paper', but the encoder has no router"),
        ("e5-xlm-r", {"mode": "released-bi", "pooling": "mean"}, "Leave out --pooling"),
        ("e5-xlm-r", {"router_weight": "uniform"}, "router_weight is 'uniform'"),
        ("e5-xlm-r", {"mode": "hidden", "router_weight": "random"}, "Use --router-mode paper"),
    ],
)
def test_invalid_router_settings_are_rejected(name, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load(name, tmp_path, **options)


def load_architecture(name, folder, kind="xlm-r", **config):
    """Load an architecture that no known model uses, with a router in its last two layers."""
    path = checkpoints.build_checkpoint(kind, folder / "model").folder
    config |= {"vocab_size": 3_000, "hidden_size": 32, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 128}
    network = getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(**config)
    )
    for weight in network.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    network.save_pretrained(path)
    if kind == "xlm-r":
        checkpoints.change_json(
            path / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast"
        )
    return load_encoder(
        str(path), device="cpu", dtype="float32", pooling="mean", router="csr", router_layers=2
    )


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        # One of its two kinds of layers has windows and different rotary embeddings.
        (
            "ModernBert",
            {**TOKENS, "global_attn_every_n_layers": 2, "local_attention": 64}
            | {"cls_token_id": 1, "sep_token_id": 2},
        ),
        # Its attention modules have no layer index.
        ("DistilBert", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}),
        ("EuroBert", {**TOKENS, "mask_token_id": 3}),
    ],
)
def test_router_supports_other_architectures(name, config, tmp_path):
    encoder = load_architecture(name, tmp_path, **config)
    assert encoder.engine.passes.first_layer == 1
    items = [item for item in mixed_inputs(5) if len(item.text) < 100]
    vectors = encoder.encode_with_counts(items).vectors
    alone = np.concatenate([encoder.encode_with_counts([item]).vectors for item in items])
    np.testing.assert_allclose(vectors, alone, rtol=0, atol=1e-5)
    assert encoder.engine.packs
    encoder.engine.packs = False
    np.testing.assert_allclose(
        encoder.encode_with_counts(items).vectors, vectors, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("name", ["MPNet", "Albert"])
def test_unsupported_attention_is_reported(name, tmp_path):
    with pytest.raises(UserError, match=r"(mpnet\) computes its att|albert\) shares its wei)"):
        load_architecture(name, tmp_path, "simcse-bert", embedding_size=32)


def test_heavy_router_needs_trained_weights(tmp_path):
    encoder = load("e5-xlm-r", tmp_path, "heavy")
    weights = encoder.identity.weights
    path = tmp_path / "model/router.safetensors"
    save_file(HeavyRouter(2, 32).state_dict(), path)
    reloaded = load_encoder(
        str(tmp_path / "model"), router="csr", router_mode="heavy", router_layers=2
    )
    assert reloaded.identity.weights != weights
    with pytest.raises(
        LlmcondError, match="does not contain a router of 1 layers and 32 dimensions"
    ):
        load_encoder(str(tmp_path / "model"), router="csr", router_mode="heavy", router_layers=1)
    path.unlink()
    with pytest.raises(UserError, match=r"which needs trained weights, but .* has none\. Train"):
        load_encoder(str(tmp_path / "model"), router="csr", router_mode="heavy", router_layers=2)
