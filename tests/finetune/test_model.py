"""Training every architecture: gradients of packed rows and shared texts, adapters, and files."""

import hashlib
import re
import shutil
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, TASKS, WORDS, Case, sample_inputs
from safetensors import safe_open
from torch import nn
from transformers import AutoModel

import llmcond
from llmcond.data.rows import Rows
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.engine.tokenizing import Tokens
from llmcond.encoders.loading.loading import load_model
from llmcond.errors import UserError
from llmcond.features.view import recipe_view
from llmcond.finetune.encoder import load_trainable, projections, save_encoder, select_projections
from llmcond.finetune.model import BiEncoderModel, HeadConfig, RatedInputs
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.heads.module import Batch
from llmcond.heads.settings import ObjectiveSettings
from llmcond.prompts import load_prompt

pytestmark = pytest.mark.usefixtures("one_thread")

#: Dropout is off unless a test sets it.
PLAIN = {"rank": 4, "encoder_dropout": False}
FULL = {"rank": 0, "encoder_dropout": False}
#: Cases for bitsandbytes, which quantises in blocks of 64. The other cases are too narrow.
QUANTISED = {
    "e5-mistral": replace(CASES["e5-mistral"], kind="wide-mistral"),
    "simcse-bert": replace(CASES["simcse-bert"], checkpoint_options={"hidden": 64}),
    "nv-embed": CASES["nv-embed"],
}
#: A BERT that reads pairs, which SimCSE's default pooling does not accept.
PAIRS = Case("simcse-bert", options={"pooling": "mean"})
SHARING = [name for name, case in CASES.items() if case.shares_prefixes]
#: One case per architecture, for tests in which pooling and settings make no difference.
ARCHITECTURES = ["sfr", "gte-qwen2", "qwen3", "gemma-wider", "e5-xlm-r", "simcse-roberta"]
ARCHITECTURES += ["simcse-bert", "nv-embed", "nv-embed-unfolded"]

DECODER = [
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
ENCODER = [
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
]
#: For each kind of checkpoint, the prefix of a block's number and the projections in a block.
BLOCKS = {
    "mistral": ("layers", DECODER),
    "wide-mistral": ("layers", DECODER),
    "qwen": ("layers", DECODER),
    "gte-qwen2": ("layers", DECODER),
    "gemma": ("layers", DECODER),
    "nv-embed": ("embedding_model.layers", DECODER),
    "xlm-r": ("encoder.layer", ENCODER),
    "simcse-roberta": ("encoder.layer", ENCODER),
    "simcse-bert": ("encoder.layer", ENCODER),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that builds the checkpoint of a case, once per case."""
    folders = {}

    def build(case):
        key = case.kind, *case.checkpoint_options.items(), *case.config.items()
        if key not in folders:
            path, kind = tmp_path_factory.mktemp("made") / "model", case.kind.removeprefix("wide-")
            with pytest.MonkeyPatch.context() as patch:
                if kind != case.kind:
                    patch.setattr(checkpoints, "HIDDEN", 64)
                folders[key] = checkpoints.build_checkpoint(
                    kind, path, **case.checkpoint_options
                ).folder
            checkpoints.change_json(path / "config.json", **case.config)
        return folders[key]

    return build


@pytest.fixture
def prepare(make):
    """Return a function that loads an encoder for training, in float32 on the CPU."""

    def load(case, quantize="none", folder=None, **settings):
        case = CASES[case] if isinstance(case, str) else case
        options = {**case.options, "max_length": MAX_LENGTH, "dtype": "float32", "device": "cpu"}
        encoder_options = EncoderOptions(like=case.like, quantize=quantize, **options)
        tuning = TuneSettings(**{**PLAIN, **settings})
        return load_trainable(resolve(str(folder or make(case)), encoder_options), tuning, seed=0)

    return load


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def perturb_weights(trainable, seed=0):
    """Perturb trainable weights, because adapters start as zero maps, where A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in trainable_parameters(trainable.network).items():
            if "lora_A" not in name:
                value.add_(0.03 * torch.randn(value.shape, generator=generator))


def trainable_parameters(module):
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def pop_gradients(module):
    """Return the gradients of a module, and clear them."""
    gradients = {name: value.grad for name, value in trainable_parameters(module).items()}
    module.zero_grad(set_to_none=True)
    return gradients


def assert_same_gradients(actual, expected, tolerance=1e-5):
    """Check that gradients differ by at most ``tolerance`` times the largest one."""
    assert actual.keys() == expected.keys()
    assert all(value is not None for value in actual.values())
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 0
    for name, value in expected.items():
        difference = float((actual[name] - value).abs().max())
        assert difference <= tolerance * largest, f"{name}: {difference / largest:.1e}"


def assert_all_nonzero(gradients):
    # The bias of a key adds the same to all scores of a query, so its gradient is zero.
    zero = [name for name, value in gradients.items() if not value.abs().max() > 0]
    assert not [name for name in zero if not name.endswith("key.bias")]


def loss_and_gradients(trainable, rows, **options):
    """Return a loss that weights each number of each vector differently, and its gradients."""
    packed_calls = set()
    hook = trainable.network.register_forward_pre_hook(
        lambda module, args, kwargs: packed_calls.add("packed" in kwargs), with_kwargs=True
    )
    vectors = trainable.engine.embed(rows, **options)
    hook.remove()
    assert (True in packed_calls) == (trainable.engine.packs and not options.get("padded"))
    weights = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
    loss = (weights * vectors).sum() / len(rows)
    loss.backward()
    return loss.item(), pop_gradients(trainable.network)


def plan_packing(engine, rows):
    """Return the packed batches, and the indices of the inputs in them."""
    plan = list(engine._plan_batches(rows, list(range(len(rows))), engine.budget))
    plan = [(inputs, forward.batch) for inputs, forward in plan if hasattr(forward, "batch")]
    return [batch for _, batch in plan], sorted(i for inputs, _ in plan for i in inputs)


def inputs_of_every_length(trainable, typed=False):
    """Return an input of each length from one token to the maximum; ``typed`` makes some pairs."""
    size = len(trainable.network.get_input_embeddings().weight)
    rng = np.random.default_rng(2)
    rows = []
    for length in rng.permutation(np.arange(1, MAX_LENGTH + 1)).tolist():
        first, second = 0, length
        if typed and length % 2:
            second = int(rng.integers(length + 1))
            first = min(second, length - 1)
        rows.append(Tokens(rng.integers(size, size=length).tolist(), first, length, 0, second))
    return rows


# -- packed and padded rows --------------------------------------------------------------------


@pytest.mark.matrix
def test_packed_rows_match_gradients_of_padded_rows(name, prepare):
    trainable, case = prepare(name), CASES[name]
    assert trainable.engine.packs == (case.window > 0)
    assert trainable.engine.shares_prefixes == case.shares_prefixes
    perturb_weights(trainable)
    full_budget = trainable.engine.budget
    mixed = trainable.tokenizer(sample_inputs(trainable.resolved, 3))
    for rows, budget in ((inputs_of_every_length(trainable), 150), (mixed, 100_000)):
        trainable.engine.budget = budget
        packed = plan_packing(trainable.engine, rows)[1]
        assert packed == [i for i, row in enumerate(rows) if len(row.ids) <= case.window]
        assert bool(packed) == (case.window > 0)
        loss, gradients = loss_and_gradients(trainable, rows)
        trainable.engine.budget = full_budget
        expected_loss, expected = loss_and_gradients(trainable, rows, padded=True)
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        assert_same_gradients(gradients, expected)
        assert_all_nonzero(gradients)


@pytest.mark.parametrize("full", [False, True])
def test_packed_typed_pairs_match_gradients_of_padded_rows(prepare, full):
    trainable = prepare(PAIRS, **(FULL if full else {}))
    assert trainable.engine.packs
    perturb_weights(trainable)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=size)) for size in range(1, 31)]
    contexts = [None, "", "the color", "dogs " * 60]
    items = [EncoderInput("", text, contexts[i % 4]) for i, text in enumerate(texts)]
    for rows in (inputs_of_every_length(trainable, typed=True), trainable.tokenizer(items)):
        assert any(0 < row.second < len(row.ids) for row in rows)
        loss, gradients = loss_and_gradients(trainable, rows)
        expected_loss, expected = loss_and_gradients(trainable, rows, padded=True)
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        assert_same_gradients(gradients, expected)
        assert_all_nonzero(gradients)
    untyped = [replace(row, second=len(row.ids)) for row in rows]
    other = loss_and_gradients(trainable, untyped)[1]
    with pytest.raises(AssertionError):
        assert_same_gradients(other, expected, 1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", SHARING)
def test_shared_prefixes_match_gradients_of_padded_rows(prepare, name, full):
    trainable = prepare(name, **(FULL if full else {}))
    perturb_weights(trainable)
    items = [
        EncoderInput(task, f"{text} {end}")
        for task in TASKS[2:]
        for text in WORDS[:5]
        for end in ("run over the wet grass", "run over the river", "play")
    ]
    rows = trainable.tokenizer(items)
    for budget in (100, 100_000):
        trainable.engine.budget = budget
        packed = plan_packing(trainable.engine, rows)[0]
        assert all(batch.shared for batch in packed)
        assert sum(batch.n_tokens for batch in packed) < 0.6 * sum(len(row.ids) for row in rows)
        _, gradients = loss_and_gradients(trainable, rows)
        _, expected = loss_and_gradients(trainable, rows, padded=True)
        assert_same_gradients(gradients, expected)
        assert_all_nonzero(gradients)


@pytest.mark.parametrize("name", ["simcse-bert", "roberta-mean", "e5-xlm-r", "e5-mistral", "gemma"])
def test_full_training_matches_gradients_of_padded_rows(prepare, name):
    trainable = prepare(name, **FULL)
    assert trainable.engine.packs == (CASES[name].window > 0)
    assert trainable.peft_model is None
    parameters = dict(trainable.network.named_parameters())
    assert trainable_parameters(trainable.network).keys() == parameters.keys()
    rows = inputs_of_every_length(trainable)
    _, gradients = loss_and_gradients(trainable, rows)
    _, expected = loss_and_gradients(trainable, rows, padded=True)
    assert_same_gradients(gradients, expected)
    assert_all_nonzero(gradients)


def test_full_training_of_nv_embed_includes_latents(prepare):
    """Folded latents would have no gradients."""
    trainable = prepare("nv-embed", **FULL)
    rows = inputs_of_every_length(trainable)
    _, gradients = loss_and_gradients(trainable, rows)
    assert "latent_attention_model.latents" in gradients
    assert_same_gradients(gradients, loss_and_gradients(trainable, rows, padded=True)[1])
    assert_all_nonzero(gradients)


# -- texts encoded once ------------------------------------------------------------------------

SENTENCES = [
    "two dogs run over wet grass",
    "a man plays the guitar",
    "three children read a book in the kitchen while it rains",
    "dogs",
]
CONDITIONS = ["the number of people", "the color of the dress", "dogs"]
#: Sentences, condition, rating: pairs with two conditions, a text with itself, and a condition that
#: is also a sentence.
RATED = [
    (SENTENCES[0], SENTENCES[1], CONDITIONS[0], 1.0),
    (SENTENCES[0], SENTENCES[1], CONDITIONS[1], 0.25),
    (SENTENCES[2], SENTENCES[0], CONDITIONS[0], 0.5),
    (SENTENCES[2], SENTENCES[0], CONDITIONS[2], 0.75),
    (SENTENCES[1], SENTENCES[3], CONDITIONS[1], 0.0),
    (SENTENCES[1], SENTENCES[3], CONDITIONS[0], float("nan")),
    (SENTENCES[3], SENTENCES[3], CONDITIONS[0], 1.0),
    (SENTENCES[1], SENTENCES[2], CONDITIONS[2], 0.5),
    (SENTENCES[1], SENTENCES[2], CONDITIONS[1], 0.5),
    (SENTENCES[3], SENTENCES[2], CONDITIONS[1], 0.25),
    (SENTENCES[3], SENTENCES[2], CONDITIONS[2], 1.0),
]


def build_rows(rated):
    first, second, condition, rating = zip(*rated, strict=True)
    return Rows(first, second, condition, np.array(rating), np.arange(len(rated)) + 1, "train.csv")


@dataclass(frozen=True)
class Task:
    """A training task; ``terms`` are prompts, each with whether e(c) is subtracted."""

    terms: tuple = (("concat-sent-cond", False),)
    head: str = "none"
    changes: tuple = ()
    conditions: str | None = None
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)

    @property
    def recipe(self):
        recipe = load_recipe(self.head)
        return recipe.with_settings(dict(self.changes), "test") if self.changes else recipe

    @property
    def view(self):
        prompts = [load_prompt(name) for name, _ in self.terms]
        return recipe_view(self.recipe, prompts, any(subtract for _, subtract in self.terms))

    def build_model(self, trainable):
        view, dim = self.view, trainable.engine.dim
        dims = dim * len(view.prompts), dim if view.conditioned else 0
        config = HeadConfig(self.recipe, self.objective, seed=1)
        return BiEncoderModel(trainable.engine, config, dims)

    def build_inputs(self, trainable, rated=RATED):
        return RatedInputs.from_rows(build_rows(rated), self.view, trainable.tokenizer)


NO_DROPOUT = (("dropout", 0.0),)
#: GELU, because with ReLU some embeddings of so few dimensions are all zero.
LOW_RANK = (("dim", 8), ("rank", 4), ("activation", "gelu"), *NO_DROPOUT)
CONTRASTIVE = ObjectiveSettings(mse=0.5, info_nce=1.0)
TASKS_OF_HEADS = {
    "joint": Task(),
    "several": Task((("concat-sent-cond", True), ("concat-cond-sent", True))),
    "subtracted": Task((("concat-sent-cond", True),)),
    "linear": Task((("concat-sent-cond", True),), "linear", (("dim", 8), *NO_DROPOUT)),
    "hadamard": Task((("separate", False),), "hadamard", NO_DROPOUT, "separate"),
    "hypernet": Task((("separate", False),), "hypernet", LOW_RANK, "separate"),
    "hypernet-joint": Task(
        (("concat-sent-cond", True),), "hypernet-joint", LOW_RANK, "concat-sent-cond"
    ),
    "both": Task(
        (("concat-sent-cond", True), ("separate", False)),
        "towers",
        (*LOW_RANK, ("hidden", 8)),
        "separate",
    ),
    # e(c) is not subtracted: a sentence with itself as condition would leave only rounding errors.
    "routed": Task((("routed", False),), "linear", (("dim", 8), *NO_DROPOUT)),
    "contrastive": Task((("concat-sent-cond", True),), objective=CONTRASTIVE),
    "conditioned-contrastive": Task(
        (("separate", False),), "hypernet", LOW_RANK, "separate", objective=CONTRASTIVE
    ),
}


class ReferenceLoss:
    """The loss of rows without batches: each input of each row is encoded separately."""

    def __init__(self, task, trainable, model):
        self.task, self.trainable, self.model = task, trainable, model
        self.prompts = {prompt.name: prompt for prompt in task.view.prompts}

    def states(self, text):
        """Return the states of a text's tokens, computed without the engine."""
        ids = torch.tensor([self.trainable.tokenizer([EncoderInput("", text)])[0].ids])
        network = self.trainable.engine.model.network
        return network(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]

    def routed_vector(self, item):
        """Return the vector of an input with a router; the encoder must pool the first token."""
        states, query = self.states(item.text), self.states(item.router.text)[0]
        centre = states.mean(dim=0) if item.router.centre else 0
        similarity = torch.cosine_similarity(states - centre, query[None], dim=1)
        if item.router.standardize:
            similarity = similarity / similarity.std(correction=0)
        vector = ((similarity / item.router.temperature).softmax(dim=0) @ states)[None]
        normalize = self.trainable.engine.identity.normalize
        return torch.nn.functional.normalize(vector, dim=1) if normalize else vector

    def vector(self, part, sentence, condition):
        if part.router is not None:
            return self.routed_vector(part.render(sentence, condition))
        tokens = self.trainable.tokenizer([part.render(sentence, condition)])
        return self.trainable.engine.embed(tokens, padded=True)

    def features(self, sentence, condition):
        parts = []
        for name, subtract in self.task.terms:
            prompt = self.prompts[name]
            vector = self.vector(prompt.conditional, sentence, condition)
            if subtract:
                vector = vector - self.vector(prompt.unconditional, sentence, condition)
            parts.append(vector)
        return torch.cat(parts, dim=1)

    def embeddings(self, row):
        first, second, condition, _ = row
        x = torch.cat([self.features(text, condition) for text in (first, second)])
        batch = Batch(x)
        if self.task.conditions:
            part = self.prompts[self.task.conditions].unconditional
            batch = Batch(x, self.vector(part, first, condition), torch.zeros(2, dtype=torch.long))
        return self.model.head(*batch)

    def cosine(self, row):
        first, second = self.embeddings(row)
        return first @ second / (first.norm() * second.norm())

    def loss(self, rows):
        """Accumulate gradients row by row and pair by pair, and return the loss."""
        settings, total = self.task.objective, 0.0
        for row in rows:
            loss = settings.mse * (self.cosine(row) - row[3]) ** 2 / len(rows)
            loss.backward()
            total += loss.item()
        pairs = [(a, b) for a, b in pairwise(rows) if a[:2] == b[:2]]
        pairs = [
            sorted(pair, key=lambda row: -row[3]) for pair in pairs if pair[0][3] != pair[1][3]
        ]
        for high, low in pairs if settings.info_nce else ():
            positive, negative = (self.cosine(row) / settings.temperature for row in (high, low))
            loss = (
                -settings.info_nce
                * torch.log(positive.exp() / (positive.exp() + negative.exp()))
                / len(pairs)
            )
            loss.backward()
            total += loss.item()
        return total


def assert_batches_match_reference(task, trainable):
    """Check that a batch, and a reordered part of it, has the gradients of its separate rows."""
    perturb_weights(trainable)
    model = task.build_model(trainable)
    inputs = task.build_inputs(trainable)
    rated = [row for row in RATED if row[3] == row[3]]
    assert len(inputs) == len(rated)
    encoded = []
    embed = trainable.engine.embed

    def record_and_embed(rows, **options):
        encoded.append([tuple(row.ids) for row in rows])
        return embed(rows, **options)

    for rows in (np.arange(len(rated)), np.array([5, 8, 9, 2, 3, 4])):
        model.train()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainable.engine, "embed", record_and_embed)
            loss = model(inputs, rows, [0, 1])
        assert (
            len(set(encoded[-1]))
            == len(encoded[-1])
            < 2 * len(rows) * len(task.view.required_parts())
        )
        loss.backward()
        gradients = pop_gradients(model)
        model.eval()
        expected = ReferenceLoss(task, trainable, model).loss([rated[row] for row in rows])
        assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        # Differences of nearly equal vectors have fewer significant digits.
        subtracts = any(subtract for _, subtract in task.terms)
        assert_same_gradients(gradients, pop_gradients(model), 1e-4 if subtracts else 1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("task", TASKS_OF_HEADS)
def test_texts_encoded_once_match_gradients_of_separate_encoding(prepare, task):
    assert_batches_match_reference(TASKS_OF_HEADS[task], prepare("simcse-bert-cls"))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_matches_gradients_of_separate_encoding(prepare, name):
    assert_batches_match_reference(TASKS_OF_HEADS["hypernet-joint"], prepare(name))


def test_pairs_encoded_once_match_gradients_of_separate_encoding(prepare):
    task = Task((("pair-cond", True),), "hadamard", (("features", "joint"), *NO_DROPOUT))
    assert_batches_match_reference(replace(task, conditions="pair-cond"), prepare(PAIRS))


def test_instructions_encoded_once_match_gradients_of_separate_encoding(prepare):
    assert_batches_match_reference(Task((("retrieval-cond", True),)), prepare("nv-embed"))


# -- dropout -----------------------------------------------------------------------------------


def encode_rows(engine, rows, **options):
    torch.manual_seed(3)
    with torch.no_grad():
        return engine.embed(rows, **options).numpy()


def assert_close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def are_different(actual, expected):
    return np.abs(actual - expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.matrix
@pytest.mark.parametrize("padded", [False, True])
def test_disabled_dropout_changes_no_vector(name, prepare, padded):
    trainable = prepare(name)
    perturb_weights(trainable)
    rows = inputs_of_every_length(trainable)[:30]
    model = Task().build_model(trainable)
    model.eval()
    expected = encode_rows(trainable.engine, rows, padded=padded)
    model.train()
    assert_close(encode_rows(trainable.engine, rows, padded=padded), expected)


@pytest.mark.parametrize(
    ("name", "drops"), [("simcse-bert", True), ("roberta-mean", True), ("qwen3", False)]
)
def test_encoder_dropout_is_active_in_training_only(prepare, name, drops):
    trainable = prepare(name, encoder_dropout=True)
    perturb_weights(trainable)
    task = Task()
    model, inputs = task.build_model(trainable), task.build_inputs(trainable)
    model.eval()
    expected = encode_rows(trainable.engine, inputs.texts.tokens)
    model.train()
    assert are_different(encode_rows(trainable.engine, inputs.texts.tokens), expected) == drops
    # ``encode`` turns dropout off, and on again afterwards.
    assert_close(model.encode(inputs.texts, np.arange(len(inputs.texts))), expected)
    assert are_different(encode_rows(trainable.engine, inputs.texts.tokens), expected) == drops


def test_adapter_dropout_is_active_without_encoder_dropout(prepare):
    trainable = prepare("simcse-bert", adapter_dropout=0.5)
    perturb_weights(trainable)
    rows = inputs_of_every_length(trainable)[:30]
    model = Task().build_model(trainable)
    model.eval()
    expected = encode_rows(trainable.engine, rows)
    model.train()
    assert are_different(encode_rows(trainable.engine, rows), expected)


# -- adapters ----------------------------------------------------------------------------------


def digest_weights(network):
    """Return digests of all weights and buffers except adapters, with the quantisation state."""
    values = {**dict(network.named_buffers()), **network.state_dict()}
    return {
        name.replace(".base_layer", ""): hashlib.sha256(
            value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, value in values.items()
        if "lora_" not in name
    }


def expected_modules(case, is_selected=lambda name: True):
    prefix, names = BLOCKS[case.kind]
    numbers = range(checkpoints.LAYERS)
    return {f"{prefix}.{index}.{name}" for index in numbers for name in names if is_selected(name)}


def list_adapted_modules(network):
    return [(name, module) for name, module in network.named_modules() if hasattr(module, "lora_A")]


def list_adapted_names(network):
    return {name for name, _ in list_adapted_modules(network)}


def train_steps(model, inputs, steps=15, rate=3e-3):
    """Train on all rows in each step, and return the losses."""
    optimiser = torch.optim.AdamW(model.trained_parameters().values(), lr=rate, weight_decay=0.0)
    rows, losses = np.arange(len(inputs)), []
    model.train()
    for step in range(steps):
        optimiser.zero_grad()
        loss = model(inputs, rows, [0, step])
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def assert_only_adapters_and_head_learn(trainable, case, task):
    """Check that training lowers the loss, and changes only the adapters and the head."""
    network = trainable.network
    assert list_adapted_names(network) == expected_modules(case)
    model, inputs = task.build_model(trainable), task.build_inputs(trainable)
    parameters = trainable_parameters(model)
    lora = {
        f"encoder.{module}.lora_{matrix}.default.weight"
        for module in expected_modules(case)
        for matrix in "AB"
    }
    assert parameters.keys() == lora | {f"head.{name}" for name, _ in model.head.named_parameters()}
    base_digests, initial = (
        digest_weights(network),
        {name: value.clone() for name, value in parameters.items()},
    )
    losses = train_steps(model, inputs)
    assert losses[-1] < 0.3 * losses[0]
    assert digest_weights(network) == base_digests
    for name, value in parameters.items():
        assert not torch.equal(value, initial[name]), name
    return base_digests


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_adapters_learn_on_every_architecture(name, prepare):
    case, trainable = CASES[name], prepare(name)
    base = assert_only_adapters_and_head_learn(trainable, case, Task())
    # Adding the adapters has not changed a weight of the checkpoint either.
    plain = load_model(trainable.resolved, trainable.network.config)
    assert digest_weights(plain.network) == base


@pytest.mark.parametrize("name", ["e5-mistral", "simcse-bert", "nv-embed"])
def test_adapters_and_head_learn_together(prepare, name):
    assert_only_adapters_and_head_learn(prepare(name), CASES[name], TASKS_OF_HEADS["hadamard"])


@pytest.mark.parametrize("name", QUANTISED)
def test_only_adapters_learn_on_4_bit_weights(prepare, name):
    pytest.importorskip("bitsandbytes")
    case = QUANTISED[name]
    trainable = prepare(case, quantize="4bit")
    layers = {name: module.base_layer for name, module in list_adapted_modules(trainable.network)}
    assert {type(layer).__name__ for layer in layers.values()} == {"Linear4bit"}
    assert {layer.weight.dtype for layer in layers.values()} == {torch.uint8}
    base = assert_only_adapters_and_head_learn(trainable, case, TASKS_OF_HEADS["hadamard"])
    assert base.keys() >= {f"{name}.weight{part}" for name in layers for part in ("", ".absmax")}


@pytest.mark.parametrize("name", QUANTISED)
def test_4_bit_weights_match_gradients_of_dequantised_weights(prepare, name):
    """On some CPUs, bitsandbytes repacks weights at their first use, for inference only."""
    bits = pytest.importorskip("bitsandbytes")
    trainable, reference = (prepare(QUANTISED[name], quantize=kind) for kind in ("4bit", "none"))
    perturb_weights(trainable)
    rows = inputs_of_every_length(trainable)
    assert trainable.engine.packs
    loss, gradients = loss_and_gradients(trainable, rows)
    assert_same_gradients(gradients, loss_and_gradients(trainable, rows, padded=True)[1], 1e-4)
    assert_all_nonzero(gradients)
    trainable.network.state_dict()  # restores the original packing
    values = dict(trainable.network.named_parameters())
    with torch.no_grad():
        for key, value in reference.network.named_parameters():
            weight = values[key]
            if weight.dtype == torch.uint8:
                weight = bits.functional.dequantize_4bit(weight.data, weight.quant_state)
            value.copy_(weight)
    expected_loss, expected = loss_and_gradients(reference, rows)
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-4)
    assert_same_gradients(gradients, expected, 1e-4)


def is_in_attention(name):
    return name.startswith(("self_attn.", "attention."))


@pytest.mark.matrix
@pytest.mark.parametrize("target", ["attention", "mlp"])
def test_target_groups_select_their_projections(name, prepare, target):
    trainable = prepare(name, target=(target,))
    expected = expected_modules(
        CASES[name], lambda module: is_in_attention(module) == (target == "attention")
    )
    assert list_adapted_names(trainable.network) == expected


@pytest.mark.parametrize(
    ("name", "target", "selected"),
    [
        ("e5-mistral", ("q_proj", "v_proj"), ("self_attn.q_proj", "self_attn.v_proj")),
        ("e5-mistral", ("mlp.up_proj",), ("mlp.up_proj",)),
        ("e5-mistral", ("mlp", "q_proj", "up_proj"), ("self_attn.q_proj", *DECODER[4:])),
        ("nv-embed", ("o_proj",), ("self_attn.o_proj",)),
        ("simcse-bert", ("query",), ("attention.self.query",)),
        ("simcse-bert", ("self.key", "intermediate.dense"), (ENCODER[1], ENCODER[4])),
        ("simcse-bert", ("attention.output.dense",), ("attention.output.dense",)),
        # A full name selects only that projection, although another name ends with it.
        ("simcse-bert", ("output.dense",), ("output.dense",)),
        ("simcse-bert", ("dense",), ENCODER[3:]),
    ],
)
def test_targets_select_projections_by_name(prepare, name, target, selected):
    trainable = prepare(name, target=target)
    expected = expected_modules(CASES[name], lambda module: module in selected)
    assert list_adapted_names(trainable.network) == expected


@pytest.mark.parametrize("name", ["e5-mistral", "simcse-bert", "gemma", "nv-embed-unfolded"])
def test_unknown_projections_are_rejected_with_legal_names(prepare, name):
    legal = BLOCKS[CASES[name].kind][1]
    # Poolers, norms, embeddings and parts of a name are not legal.
    for target in ("to_q", "pooler.dense", "fn.net.0", "norm", "proj", "embed_tokens", "", "MLP"):
        with pytest.raises(UserError, match=f"--target is {target!r}, which .* does not") as error:
            prepare(name, target=("attention", target))
        assert str(error.value).endswith(f"Legal: auto, attention, mlp, {', '.join(legal)}.")
    with pytest.raises(UserError, match=f"Did you mean '{re.escape(legal[-1])}'"):
        prepare(name, target=(legal[-1][:-1],))


def test_network_without_numbered_blocks_is_rejected():
    network = nn.Sequential()
    network.add_module("layer", nn.Linear(2, 2))
    assert projections(network) == []
    with pytest.raises(UserError, match="--rank full"):
        select_projections(network, ("auto",), "it")


# -- files -------------------------------------------------------------------------------------


def compute_vectors(trainable, items):
    """Return the vectors of a trained network, which ``embed`` and ``run`` must agree on."""
    trainable.network.eval()
    rows = trainable.tokenizer(items)
    with torch.no_grad():
        expected = trainable.engine.embed(rows).numpy()
    streamed = np.empty_like(expected)
    for batch in trainable.engine.run(rows):
        streamed[batch.inputs] = batch.vectors
    assert_close(streamed, expected)
    return expected


def save_and_load(trainable, folder, merge=False, **options):
    """Save a trained encoder, and load it from its folder alone."""
    save_encoder(trainable, str(trainable.resolved.checkpoint.folder), folder, merge=merge)
    return llmcond.load_encoder(str(folder), dtype="float32", device="cpu", **options)


def read_tensor_names(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def train_briefly(trainable, steps=3):
    """Train for a few steps, so that the saved weights differ from the initial ones."""
    perturb_weights(trainable)
    task = Task()
    train_steps(task.build_model(trainable), task.build_inputs(trainable), steps, 1e-3)


def has_changed(trainable, items, expected):
    """Return whether training changed the vectors by more than rounding does."""
    before = Encoder(trainable.resolved).encode_with_counts(items).vectors
    return are_different(before, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_adapter_gives_vectors_of_trained_network(name, prepare, tmp_path):
    trainable = prepare(name)
    train_briefly(trainable)
    items = sample_inputs(trainable.resolved, 5, n_inputs=15)
    expected = compute_vectors(trainable, items)
    encoder = save_and_load(trainable, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert read_tensor_names(tmp_path / "out" / "adapter_model.safetensors") == {
        f"base_model.model.{module}.lora_{matrix}.weight"
        for module in expected_modules(CASES[name])
        for matrix in "AB"
    }
    assert replace(encoder.identity, weights="") == replace(trainable.resolved.identity, weights="")
    assert_close(encoder.encode_with_counts(items).vectors, expected)
    assert has_changed(trainable, items, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_merged_adapter_gives_vectors_of_trained_network(name, prepare, tmp_path):
    trainable = prepare(name)
    train_briefly(trainable)
    items = sample_inputs(trainable.resolved, 6, n_inputs=15)
    expected = compute_vectors(trainable, items)
    encoder = save_and_load(trainable, tmp_path / "out", merge=True)
    assert not [
        key for key in read_tensor_names(tmp_path / "out" / "model.safetensors") if "lora" in key
    ]
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert_close(encoder.encode_with_counts(items).vectors, expected, 1e-4)
    if CASES[name].kind != "nv-embed":
        assert_transformers_loads(trainable, tmp_path / "out")


def assert_transformers_loads(trainable, folder):
    """Check that transformers loads the same weights from a folder, without further keys."""
    network, report = AutoModel.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
    )
    unused = trainable.resolved.identity.pooling != "pooler"
    assert not [key for key in report["missing_keys"] if not (unused and "pooler." in key)]
    assert not report["unexpected_keys"]
    ours, theirs = trainable.network.state_dict(), network.state_dict()
    assert ours.keys() == {key for key in theirs if not (unused and "pooler." in key)}
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_fully_trained_encoder_gives_same_vectors_after_loading(name, prepare, tmp_path):
    trainable = prepare(name, **FULL)
    train_briefly(trainable)
    items = sample_inputs(trainable.resolved, 7, n_inputs=15)
    expected = compute_vectors(trainable, items)
    encoder = save_and_load(trainable, tmp_path / "out")
    # NV-Embed's latents are trained as they are, and folded when they are loaded.
    assert_close(encoder.encode_with_counts(items).vectors, expected)
    assert has_changed(trainable, items, expected)
    if CASES[name].kind != "nv-embed":
        assert_transformers_loads(trainable, tmp_path / "out")


@pytest.mark.parametrize("settings", [FULL, PLAIN])
def test_records_of_base_run_are_not_copied(prepare, make, tmp_path, settings):
    """The base may be a trained run, whose records must not pass for those of the new run."""
    base = shutil.copytree(make(CASES["gemma"]), tmp_path / "base")
    for file in ("run.json", "training.json", "heads/config.json"):
        checkpoints.write_json(base / file, {})
    trainable = prepare("gemma", folder=base, **settings)
    save_and_load(trainable, tmp_path / "out", merge=True)
    paths = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.json")}
    assert paths == {
        "config.json",
        "encoder.json",
        "modules.json",
        "tokenizer.json",
        "tokenizer_config.json",
        *(f"{folder}/config.json" for folder in ("1_Pooling", "2_Dense", "3_Dense")),
    }


@pytest.mark.parametrize("name", QUANTISED)
def test_adapter_trained_on_4_bit_weights_is_loaded_again(prepare, name, tmp_path, monkeypatch):
    bits = pytest.importorskip("bitsandbytes")
    trainable = prepare(QUANTISED[name], quantize="4bit")
    train_briefly(trainable)
    items = sample_inputs(trainable.resolved, 8, n_inputs=15)
    expected = compute_vectors(trainable, items)
    assert has_changed(trainable, items, expected)
    encoder = save_and_load(trainable, tmp_path / "out", quantize="4bit")
    assert encoder.identity.quantize == "4bit"
    # For inference, some CPUs multiply 4-bit weights in bfloat16 whatever the dtype.
    assert_close(encoder.encode_with_counts(items).vectors, expected, 0.05)
    monkeypatch.setattr(bits.nn.modules, "has_avx512bf16", lambda: False)
    encoder = save_and_load(trainable, tmp_path / "out", quantize="4bit")
    assert_close(encoder.encode_with_counts(items).vectors, expected, 1e-4)
    # Loading onto a base other than that of training is reported, and not rejected.
    assumed = save_and_load(trainable, tmp_path / "out").resolved.assumed
    assert "unquantised weights of the base, although its adapter was trained on 4bit" in str(
        assumed
    )


@pytest.mark.parametrize("name", ["simcse-bert", "e5-mistral"])
def test_peft_loads_saved_adapter(prepare, name, tmp_path):
    from peft import PeftModel

    trainable = prepare(name)
    train_briefly(trainable)
    base = trainable.resolved.checkpoint.folder
    items = [EncoderInput("", text) for text in ("two dogs run", "a man", "dogs " * 20)]
    expected = compute_vectors(trainable, items)
    save_encoder(trainable, str(base), tmp_path, merge=False)
    network = AutoModel.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    network = PeftModel.from_pretrained(network, str(tmp_path)).eval()
    for row, vector in zip(trainable.tokenizer(items), expected, strict=True):
        with torch.no_grad():
            output = network(input_ids=torch.tensor([row.ids]))
        last = output.last_hidden_state[0, -1]
        pooled = output.pooler_output[0] if name == "simcse-bert" else last
        pooled = pooled / pooled.norm() if trainable.resolved.identity.normalize else pooled
        assert_close(pooled.numpy(), vector)


# -- gradient checkpointing --------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "full"),
    [*((name, False) for name in ARCHITECTURES), *((name, True) for name in QUANTISED)],
)
def test_gradient_checkpointing_gives_same_gradients(prepare, name, full):
    settings, task = (FULL if full else {}), TASKS_OF_HEADS["linear"]
    results = []
    for checkpointing in (False, True):
        trainable = prepare(name, gradient_checkpointing=checkpointing, **settings)
        perturb_weights(trainable)
        model, inputs = task.build_model(trainable), task.build_inputs(trainable)
        prefix, names = BLOCKS[CASES[name].kind]
        calls = []
        # The last projections of a block are not computed again, so the first one is counted.
        layer = trainable.network.get_submodule(f"{prefix}.0.{names[0]}")
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.train()
        loss = model(inputs, np.arange(len(inputs)), [0])
        n_forward_calls = len(calls)
        loss.backward()
        assert len(calls) == (2 * n_forward_calls if checkpointing else n_forward_calls)
        results.append((loss.item(), pop_gradients(model)))
    (expected_loss, expected), (loss, gradients) = results
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_same_gradients(gradients, expected)
