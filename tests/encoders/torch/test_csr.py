"""CSR's router in an encoder, compared with plain implementations, and trained with one."""

import json

import numpy as np
import pytest
import torch
from helpers.cases import CASES, routed_input, routed_inputs
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags
from helpers.vectors import assert_close
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import llmcond
from llmcond.base.errors import LlmcondError, UserError
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.adapter import read_encoder_record
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.settings import RELEASED_MODES
from llmcond.encoders.tokenizing import router_inputs
from llmcond.encoders.torch.csr import HeavyRouter
from llmcond.encoders.torch.engine import embed_routed
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.settings import TuneSettings
from llmcond.runs import open_run
from llmcond.runs.portable import stage_run

pytestmark = pytest.mark.usefixtures("one_thread")

CONDITIONS = ["the mood", "dogs", "how far away the man is and what he says of it"]
STRENGTH = 5.0  # the paper's 1 hardly changes the vectors of tiny random encoders


def load(name, folder, mode="paper", layers=2, **options):
    case = CASES[name]
    path = case.build(folder)
    router = {"router": "csr", "router_mode": mode, "router_layers": layers}
    if mode in RELEASED_MODES:
        router["pooling"] = None
    if mode == "heavy":
        torch.manual_seed(3)
        width = json.loads((path / "config.json").read_text())["hidden_size"]
        save_file(HeavyRouter(layers, width).state_dict(), path / "router.safetensors")
    return case.load(path, **{"router_strength": STRENGTH, **router, **options})


def mixed_inputs(max_words=30):
    return routed_inputs(4, max_words, CONDITIONS, long=max_words == 30)


def check_vectors(encoder, reference, items):
    """Check vectors with and without packing, in a batch and alone, and that routers change them.

    ``reference`` computes the vector of a routed input before normalisation.
    """
    vectors = encoder.encode_with_counts(items).vectors
    unrouted = encoder.encode_with_counts([EncoderInput("", item.text) for item in items]).vectors
    alone = [encoder.encode_with_counts([item]).vectors for item in items]
    assert_close(np.concatenate(alone), vectors)
    assert encoder.engine.packs
    encoder.engine.packs = False
    assert_close(encoder.encode_with_counts(items).vectors, vectors)
    for item, vector, plain in zip(items, vectors, unrouted, strict=True):
        if item.router:
            expected = reference(item)
            expected = expected / expected.norm() if encoder.identity.normalize else expected
            assert_close(vector, expected.numpy())
            assert np.abs(vector - plain).max() > 1e-4


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
        self.tokenizer = encoder._tokenizer
        self.heavy = getattr(self.network, "csr_router", None)
        self.causal = self.identity.attention == "causal"
        self.states, self.weights = {}, []
        modules = [m for m in self.network.modules() if type(m).__name__.endswith("SelfAttention")]
        modules = modules or [m for m in self.network.modules() if hasattr(m, "q_proj")]
        for layer, module in enumerate(modules):
            module.layer = layer
            module.register_forward_pre_hook(self.record_states, with_kwargs=True)
        self.n_unrouted = len(modules) - self.identity.router_layers

    def record_states(self, module, args, kwargs):
        self.states[module.layer] = (args[0] if args else kwargs["hidden_states"])[0]

    def attention(self, module, query, key, value, mask, scaling=None, **kwargs):
        query, key, value = query[0], key[0], value[0]
        key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
        n = query.shape[1]
        scores = query @ key.transpose(1, 2) * (scaling or query.shape[2] ** -0.5)
        if self.causal:
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        attention = scores.softmax(-1)
        output = (attention @ value).transpose(0, 1)  # (tokens, heads, head_dim)
        weights = self.layer_weights(module, query, key, attention)
        if weights is not None:
            if self.identity.router_weight == "random":
                ids, layer = self.ids[: len(weights)], module.layer - self.n_unrouted
                weights = random_weights(ids, self.identity.router_layers)[layer]
            self.weights.append(weights)
            scale = torch.ones(n)
            scale[: len(weights)] = factor(self.identity, weights)
            output = output * scale[:, None, None]
        return output[None], None

    def layer_weights(self, module, query, key, attention):
        """Return the weights of the sentence's tokens; None in a layer without a router."""
        queries, keys = (x.transpose(0, 1).flatten(1) for x in (query, key))
        if self.identity.router_mode != "paper":
            queries = keys = self.states[module.layer]
        if self.query is None:
            self.condition_query = queries[len(queries) - 1 if self.causal else 0]
            return None
        layer, query = module.layer - self.n_unrouted, self.query
        if layer < 0:
            return None
        if self.heavy is not None:
            query, keys = self.heavy.query[layer] @ query, keys @ self.heavy.key[layer].T
        return (keys @ query / len(query) ** 0.5).softmax(0)

    def run(self, ids, query):
        self.query, self.ids, self.weights = query, ids, []
        AttentionInterface.register("reference", self.attention)
        AttentionMaskInterface.register("reference", sdpa_mask)
        previous = self.network.config._attn_implementation
        self.network.set_attn_implementation("reference")
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        if self.identity.pooling == "latent":
            inputs["pooled"] = torch.arange(len(ids))
        with torch.inference_mode():
            output = self.network(**inputs)
        self.network.set_attn_implementation(previous)
        return output

    def pool(self, output, first, last):
        hidden, pooling = output.last_hidden_state[0], self.identity.pooling
        if pooling == "pooler":
            return output.pooler_output[0]
        return {"cls": hidden[0], "last": hidden[last - 1]}.get(pooling, hidden[first:last].mean(0))

    def __call__(self, item):
        inputs = [EncoderInput("", item.router.text), EncoderInput("", item.text)]
        condition, row = self.tokenizer(inputs)
        self.run(condition.ids, None)
        return self.pool(self.run(row.ids, self.condition_query), row.first, row.last)


#: One encoder of each kind: bidirectional and causal, with absolute and rotary positions.
@pytest.mark.processor
@pytest.mark.parametrize(
    ("name", "mode", "weight"),
    [
        ("simcse-bert", "paper", "only"),
        ("simcse-bert", "hidden", "one-plus"),
        ("bge-m3", "paper", "one-plus"),
        ("sfr", "paper", "random"),
        ("sfr", "heavy", "one-plus"),
        ("nv-embed", "paper", "one-plus"),
    ],
)
def test_vectors_and_weights_match_equation_of_paper(name, mode, weight, tmp_path):
    encoder = load(name, tmp_path, mode, router_weight=weight)
    reference, item = EagerReference(encoder), routed_input("two dogs run", "the mood")
    check_vectors(encoder, reference, mixed_inputs())
    weighted = encoder.token_weights(item)
    reference(item)
    assert_close(weighted.weights, np.stack(reference.weights))
    assert weighted.layers == [reference.n_unrouted + 1, reference.n_unrouted + 2]
    assert weighted.states is None


# -- modes that read sentence and condition together ---------------------------------------------


class BiEncoderReference(EagerReference):
    """The bi-encoder of section 3.1 in eager attention, for one text and without the engine."""

    def layer_weights(self, module, query, key, attention):
        if module.layer < self.n_unrouted:
            return None
        row = len(attention[0]) - 1 if self.causal else self.length
        weights = attention.mean(0)[row, : self.length]
        return weights / weights.sum()

    def __call__(self, item):
        inputs = [EncoderInput("", item.text), EncoderInput("", item.router.text)]
        sentence, condition = self.tokenizer(inputs)
        self.length = len(sentence.ids)
        output = self.run([*sentence.ids, *condition.ids], None)
        return self.pool(output, sentence.first, self.length + condition.last)


@pytest.mark.parametrize(
    ("name", "weight"),
    [("e5-xlm-r", "one-plus"), ("simcse-bert", "only"), ("sfr", "random"), ("sfr", "one-plus")],
)
def test_bi_encoder_matches_section_31(name, weight, tmp_path):
    encoder = load(name, tmp_path, "bi", router_weight=weight)
    # Longer sentences would be cut.
    check_vectors(encoder, BiEncoderReference(encoder), mixed_inputs(max_words=12))


def test_bi_encoder_cuts_sentence_and_not_condition(tmp_path):
    encoder = load("simcse-bert", tmp_path, "bi")
    text = "the man " * 80
    items = [routed_input(text, condition) for condition in ("the mood", "the place")]
    vectors = encoder.encode_with_counts([*items, routed_input(text + " dogs", "the mood")]).vectors
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-4
    assert_close(vectors[0], vectors[2])
    with pytest.raises(UserError, match="router_mode is 'bi', which reads sentence and condition"):
        encoder.encode_with_counts([routed_input("dogs", text)])


def split_heads(attention, queries, keys):
    """Return the queries, keys and values of a BERT layer, (heads, tokens, head_dim)."""
    parts = attention.query(queries), attention.key(keys), attention.value(keys)
    return [x.unflatten(1, (attention.num_attention_heads, -1)).transpose(0, 1) for x in parts]


class ReleasedReference:
    """The authors' code for BERT and RoBERTa, layer by layer."""

    def __init__(self, encoder, layers):
        self.network, self.identity = encoder.engine.model.network, encoder.identity
        self.tokenizer, self.layers = encoder._tokenizer, layers
        self.tri = self.identity.router_mode == "released-tri"

    @torch.inference_mode()
    def __call__(self, item):
        inputs = [EncoderInput("", item.router.text), EncoderInput("", item.text)]
        condition, row = (tokens.ids for tokens in self.tokenizer(inputs))
        separator, outside = row[-1], torch.empty(0, self.network.config.hidden_size)
        if self.tri:
            ids = sentence = [separator, *row]
            outside = self.network(input_ids=torch.tensor([condition])).last_hidden_state[0]
        else:
            ids, sentence = [*row, separator, *condition], row
        x = self.network.embeddings(input_ids=torch.tensor([ids]))[0]
        for layer in self.network.encoder.layer:
            q, k, v = split_heads(layer.attention.self, x, torch.cat([outside, x]))
            scores = q @ k.transpose(1, 2) / q.shape[2] ** 0.5
            if not self.tri:  # only the condition's first token sees itself
                split = len(row) + 1
                scores[:, torch.arange(len(x)) != split, split] = -torch.inf
            weights = scores.softmax(-1)
            context = (weights @ v).transpose(0, 1).flatten(1)
            number = list(self.network.encoder.layer).index(layer) - len(self.network.encoder.layer)
            if number >= -self.layers:
                m = weights.mean(0)[0, len(outside) :] if self.tri else weights.mean(0)[split]
                m = m if self.tri else m[: len(row)] / m[: len(row)].sum()
                if self.identity.router_weight == "random":
                    m = random_weights(sentence, self.layers)[number]
                scale = torch.ones(len(x))
                scale[: len(m)] = factor(self.identity, m)
                context = context * scale[:, None]
            attended = layer.attention.output(context, x)
            x = layer.output(layer.intermediate(attended), attended)
        return x[0]


@pytest.mark.parametrize(
    ("name", "layers", "weight"),
    [("e5-xlm-r", 2, "one-plus"), ("simcse-bert", 1, "only"), ("simcse-roberta", 2, "random")],
)
@pytest.mark.parametrize("mode", RELEASED_MODES)
def test_released_modes_match_authors_code(name, mode, layers, weight, tmp_path):
    encoder = load(name, tmp_path, mode, layers, router_weight=weight)
    assert encoder.identity.pooling == "cls"
    check_vectors(encoder, ReleasedReference(encoder, layers), mixed_inputs(max_words=12))


@pytest.mark.parametrize("mode", ["bi", *RELEASED_MODES])
def test_tokens_are_those_that_the_network_weights(mode, tmp_path):
    encoder = load("simcse-roberta", tmp_path, mode, pooling="cls" if mode == "bi" else None)
    text = "two dogs run"
    weighted = encoder.token_weights(routed_input(text, "the time"))
    before = ["</s>", "<s>"] if mode == "released-tri" else ["<s>"]
    special = [token.text for token in weighted.tokens if token.special]
    assert special == [*before, "</s>"]
    inside = weighted.tokens[len(before) : -1]
    assert "".join(text[token.start : token.end] for token in inside) == text.replace(" ", "")
    assert weighted.weights.shape == (2, len(weighted.tokens))
    sums = weighted.weights.sum(axis=1)
    # In the tri-encoder, the rest of the attention goes to the condition.
    assert ((sums > 0) & (sums < 0.999)).all() if len(before) > 1 else np.allclose(sums, 1)


# -- saved computation and gradients -------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "weight"),
    [
        ("paper", "only"),
        ("heavy", "one-plus"),
        ("bi", "random"),
        ("released-tri", "one-plus"),
        ("released-bi", "one-plus"),
    ],
)
def test_gradients_match_finite_differences(mode, weight, tmp_path):
    encoder = load("e5-xlm-r", tmp_path, mode, router_weight=weight)
    items = [routed_input(t, c) for t in ("two dogs run", "the man sits") for c in CONDITIONS[:2]]
    tokens = encoder._tokenizer([EncoderInput("", item.text) for item in items])
    routers = router_inputs(items)
    queries = dict(zip(routers, encoder._tokenizer(list(routers.values())), strict=True))
    weight = encoder.engine.model.network.embeddings.word_embeddings.weight.requires_grad_(True)
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


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        # Gemma's norm after attention undoes the effect of any router.
        ("gemma", {}, "fixed norm, .* Leave out --router: routed pooling works with any"),
        ("e5-xlm-r", {"layers": 3}, "router_layers is 3, but .* has 2 layers"),
        ("bge-m3", {"layers": 1}, "pools by cls, .* Use --router-layers 3, or --pooling mean"),
        ("sfr", {"mode": "released-tri"}, "router_mode is 'released-tri', which is for bidirect"),
        ("e5-xlm-r", {"router": "none"}, "router_mode is 'paper', but the encoder has no router"),
        ("e5-xlm-r", {"mode": "released-bi", "pooling": "mean"}, "Leave out --pooling"),
        ("e5-xlm-r", {"mode": "hidden", "router_weight": "random"}, "Use --router-mode paper"),
    ],
)
def test_invalid_router_settings_are_rejected(name, options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load(name, tmp_path, **options)


def test_router_is_rejected_if_only_rounding_changes_the_states(tmp_path):
    path = CASES["gemma"].build(tmp_path)
    config = json.loads((path / "config.json").read_text())
    # As in Gemma's real weights, the norm's epsilon counts, and bfloat16 amplifies its effect.
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    with pytest.raises(UserError, match="fixed norm"):
        CASES["gemma"].load(path, router="csr", dtype="bfloat16")


def test_heavy_router_needs_trained_weights(tmp_path):
    weights = load("e5-xlm-r", tmp_path, "heavy").identity.weights
    path = tmp_path / "model/router.safetensors"
    save_file(HeavyRouter(2, 32).state_dict(), path)

    def load_heavy(layers=2):
        options = {"router": "csr", "router_mode": "heavy", "router_layers": layers}
        return load_encoder(str(tmp_path / "model"), **options)

    assert load_heavy().identity.weights != weights
    with pytest.raises(LlmcondError, match="does not contain a router of 1 layers and 32 dim"):
        load_heavy(layers=1)
    path.unlink()
    with pytest.raises(UserError, match=r"which needs trained weights, but .* has none\. Train"):
        load_heavy()


# -- training -----------------------------------------------------------------------------------

ITEMS = [
    routed_input(text, condition)
    for text in ("two men play in the park", "a dog sits")
    for condition in ("the place", "the number of people in it")
]


@pytest.fixture
def train(tiny_bert, write_rows, small_rows, tmp_path, capsys):
    """A function that runs the command on small data and returns its output."""
    defaults = "--pooling mean --normalize --dtype float32 --epochs 2 --batch-size 16 --rank 4"
    defaults += " --router csr --router-layers 2 --head none --learning-rate 1e-2"
    data = write_rows(small_rows)

    def run_train_lora(folder, *arguments, command=run_json):
        options = ["--data", data, "--run", tmp_path / folder, *defaults.split()]
        options = change_flags(options, *arguments)
        return command(capsys, "train-lora", "--model", tiny_bert, *options)

    return run_train_lora


@pytest.mark.parametrize(
    ("mode", "options"), [("paper", ""), ("heavy", "--merge"), ("hidden", "--rank full")]
)
def test_trained_folder_records_its_router(train, tmp_path, capsys, mode, options):
    report = train("run", "--router-mode", mode, "--router-strength", "4", *options.split())
    assert report["head"] == "none@routed+c"
    folder = tmp_path / "run"
    encoder = llmcond.load_encoder(folder, dtype="float32")
    identity = encoder.identity
    assert (identity.router, identity.router_mode, identity.router_strength) == ("csr", mode, 4.0)
    assert (folder / "router.safetensors").exists() == (mode == "heavy")
    vectors = encoder.encode(ITEMS)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-6
    scores = run_json(capsys, "evaluate", "--run", folder, "--split", "dev")["results"]
    (spearman,) = (row["spearman"] for row in scores if row["name"] == "none@routed+c")
    assert spearman == next(
        score["spearman"] for score in report["scores"] if score["split"] == "dev"
    )
    with pytest.raises(llmcond.UserError, match="was trained with --router csr"):
        llmcond.load_encoder(folder, router="none")
    if "--merge" in options:  # the router is pushed with its encoder
        staged = tmp_path / "staged"
        staged.mkdir()
        stage_run(open_run(folder), read_encoder_record(folder), staged)
        pushed = llmcond.load_encoder(staged, dtype="float32").encode(ITEMS)
        np.testing.assert_array_equal(pushed, vectors)


def test_prompt_without_a_router_is_rejected(train, tmp_path):
    message = train("idle", "--prompt", "concat-sent-cond", command=run_rejected)
    assert "it puts the condition into the text, but the encoder expects it in" in message
    assert not (tmp_path / "idle").exists()


def test_heavy_router_is_trained_and_depends_on_seed(train, tmp_path):
    weights = []
    for name, seed, epochs in (("a", 1, 1), ("b", 1, 1), ("c", 2, 1), ("d", 1, 2)):
        options = ["--router-mode", "heavy", "--seed", str(seed), "--epochs", str(epochs)]
        train(name, *options)
        weights.append(load_file(tmp_path / name / "router.safetensors"))
    for key, value in weights[0].items():
        equal = [torch.equal(other[key], value) for other in weights[1:]]
        assert equal == [True, False, False]


@pytest.mark.parametrize("mode", ["heavy", "released-tri"])
def test_gradient_checkpointing_gives_the_same_gradients(tiny_bert, mode):
    gradients = []
    for checkpointing in (False, True):
        options = EncoderOptions(
            dtype="float32", device="cpu", router="csr", router_mode=mode, router_layers=2,
            pooling=None if mode == "released-tri" else "mean",
        )  # fmt: skip
        settings = TuneSettings(rank=0, gradient_checkpointing=checkpointing)
        trainable = load_trainable(resolve(str(tiny_bert), options), settings, seed=0)
        trainable.network.eval()
        for module in trainable.network.modules():
            module.training = hasattr(module, "gradient_checkpointing")
        tokens = trainable.tokenizer([EncoderInput("", item.text) for item in ITEMS])
        routers = router_inputs(ITEMS)
        queries = dict(zip(routers, trainable.tokenizer(list(routers.values())), strict=True))
        vectors = embed_routed(trainable.engine, ITEMS, tokens, queries)
        (vectors * torch.linspace(-1, 1, vectors.numel()).view(vectors.shape)).sum().backward()
        gradients.append([value.grad for value in trainable.network.parameters()])
    for first, second in zip(*gradients, strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
