"""Training every architecture: gradients of packed rows, texts seen once, adapters, and files."""

import hashlib
import re
import shutil
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.cases import CASES, MAX_LENGTH, TASKS, WORDS, Case, mix
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
from llmcond.finetune.loading import load_trainable, projections, select_projections
from llmcond.finetune.model import BiEncoderModel, HeadConfig, RatedInputs
from llmcond.finetune.save import save_encoder
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.heads.module import Batch
from llmcond.heads.settings import ObjectiveSettings
from llmcond.prompts import load_prompt

pytestmark = pytest.mark.usefixtures("one_thread")

#: All dropout is off, unless a test says otherwise.
PLAIN = {"rank": 4, "encoder_dropout": False}
FULL = {"rank": 0, "encoder_dropout": False}
#: For bitsandbytes, which quantises in blocks of 64, the others are too narrow.
QUANTISED = {
    "e5-mistral": replace(CASES["e5-mistral"], kind="wide-mistral"),
    "simcse-bert": replace(CASES["simcse-bert"], made={"hidden": 64}),
    "nv-embed": CASES["nv-embed"],
}
#: A BERT that reads pairs, which SimCSE's own pooling does not take.
PAIRS = Case("simcse-bert", options={"pooling": "mean"})
SHARING = [name for name, case in CASES.items() if case.shares]
#: A case of each architecture, for what pooling and settings make no difference to.
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
#: By kind of checkpoint: what a block's number stands behind, and the projections in a block.
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
    """A maker of a case's folder, each made once."""
    made = {}

    def folder(case):
        key = case.kind, *case.made.items(), *case.config.items()
        if key not in made:
            path, kind = tmp_path_factory.mktemp("made") / "model", case.kind.removeprefix("wide-")
            with pytest.MonkeyPatch.context() as patch:
                if kind != case.kind:
                    patch.setattr(checkpoints, "HIDDEN", 64)
                made[key] = checkpoints.make(kind, path, **case.made).folder
            checkpoints.change_json(path / "config.json", **case.config)
        return made[key]

    return folder


@pytest.fixture
def prepare(make):
    """A loader of encoders that are to be trained, in float32 on the CPU."""

    def load(case, quantize="none", folder=None, **settings):
        case = CASES[case] if isinstance(case, str) else case
        options = {**case.options, "max_length": MAX_LENGTH, "dtype": "float32", "device": "cpu"}
        given = EncoderOptions(like=case.like, quantize=quantize, **options)
        chosen = TuneSettings(**{**PLAIN, **settings})
        return load_trainable(resolve(str(folder or make(case)), given), chosen, seed=0)

    return load


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def shake(trainable, seed=0):
    """Move what is trained: adapters begin as the zero map, and A has no gradient then."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in trained(trainable.network).items():
            if "lora_A" not in name:
                value.add_(0.03 * torch.randn(value.shape, generator=generator))


def trained(module):
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def taken(module):
    """Take the gradients that a module has."""
    found = {name: value.grad for name, value in trained(module).items()}
    module.zero_grad(set_to_none=True)
    return found


def same(found, expected, most=1e-5):
    """See that gradients are the same, as a share of the largest."""
    assert found.keys() == expected.keys()
    assert all(value is not None for value in found.values())
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 0
    for name, value in expected.items():
        worst = float((found[name] - value).abs().max())
        assert worst <= most * largest, f"{name}: {worst / largest:.1e}"


def every_one_matters(gradients):
    # A key's bias adds the same to all scores of a query, so it has none.
    zero = [name for name, value in gradients.items() if not value.abs().max() > 0]
    assert not [name for name in zero if not name.endswith("key.bias")]


def loss_and_gradients(trainable, rows, **options):
    """Return a loss in which each number of each vector has a weight of its own."""
    ways = set()
    hook = trainable.network.register_forward_pre_hook(
        lambda module, given, named: ways.add("packed" in named), with_kwargs=True
    )
    vectors = trainable.engine.embed(rows, **options)
    hook.remove()
    assert (True in ways) == (trainable.engine.packs and not options.get("padded"))
    weights = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
    loss = (weights * vectors).sum() / len(rows)
    loss.backward()
    return loss.item(), taken(trainable.network)


def packed_rows(engine, rows):
    """Return the packed rows that inputs are computed in, and the inputs that are."""
    plan = list(engine._plan_batches(rows, list(range(len(rows))), engine.budget))
    plan = [(inputs, forward.batch) for inputs, forward in plan if hasattr(forward, "batch")]
    return [batch for _, batch in plan], sorted(i for inputs, _ in plan for i in inputs)


def every_length(trainable, typed=False):
    """Return inputs of one token up to the most that fit, some of them pairs."""
    size = len(trainable.network.get_input_embeddings().weight)
    chance = np.random.default_rng(2)
    rows = []
    for length in chance.permutation(np.arange(1, MAX_LENGTH + 1)).tolist():
        first, second = 0, length
        if typed and length % 2:
            second = int(chance.integers(length + 1))
            first = min(second, length - 1)
        rows.append(Tokens(chance.integers(size, size=length).tolist(), first, length, 0, second))
    return rows


# -- packed is padded --------------------------------------------------------------------------


@pytest.mark.matrix
def test_packed_rows_have_the_gradients_of_padded_ones(name, prepare):
    trainable, case = prepare(name), CASES[name]
    assert trainable.engine.packs == (case.window > 0)
    assert trainable.engine.shares_prefixes == case.shares
    shake(trainable)
    most = trainable.engine.budget
    mixed = trainable.tokenizer(mix(trainable.resolved, 3))
    for rows, budget in ((every_length(trainable), 150), (mixed, 100_000)):
        trainable.engine.budget = budget
        packed = packed_rows(trainable.engine, rows)[1]
        assert packed == [i for i, row in enumerate(rows) if len(row.ids) <= case.window]
        assert bool(packed) == (case.window > 0)
        loss, gradients = loss_and_gradients(trainable, rows)
        trainable.engine.budget = most
        expected_loss, expected = loss_and_gradients(trainable, rows, padded=True)
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        same(gradients, expected)
        every_one_matters(gradients)


@pytest.mark.parametrize("full", [False, True])
def test_typed_pairs_have_the_gradients_of_padded_ones(prepare, full):
    trainable = prepare(PAIRS, **(FULL if full else {}))
    assert trainable.engine.packs
    shake(trainable)
    chance = np.random.default_rng(0)
    texts = [" ".join(chance.choice(WORDS, size=size)) for size in range(1, 31)]
    contexts = [None, "", "the color", "dogs " * 60]
    items = [EncoderInput("", text, contexts[at % 4]) for at, text in enumerate(texts)]
    for rows in (every_length(trainable, typed=True), trainable.tokenizer(items)):
        assert any(0 < row.second < len(row.ids) for row in rows)
        loss, gradients = loss_and_gradients(trainable, rows)
        expected_loss, expected = loss_and_gradients(trainable, rows, padded=True)
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
        same(gradients, expected)
        every_one_matters(gradients)
    untyped = [replace(row, second=len(row.ids)) for row in rows]
    other = loss_and_gradients(trainable, untyped)[1]
    with pytest.raises(AssertionError):
        same(other, expected, 1e-3)


@pytest.mark.matrix
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", SHARING)
def test_shared_prefixes_have_the_gradients_of_all_that_begin_with_them(prepare, name, full):
    trainable = prepare(name, **(FULL if full else {}))
    shake(trainable)
    items = [
        EncoderInput(task, f"{text} {end}")
        for task in TASKS[2:]
        for text in WORDS[:5]
        for end in ("run over the wet grass", "run over the river", "play")
    ]
    rows = trainable.tokenizer(items)
    for budget in (100, 100_000):
        trainable.engine.budget = budget
        packed = packed_rows(trainable.engine, rows)[0]
        assert all(batch.shared for batch in packed)
        assert sum(batch.n_tokens for batch in packed) < 0.6 * sum(len(row.ids) for row in rows)
        _, gradients = loss_and_gradients(trainable, rows)
        _, expected = loss_and_gradients(trainable, rows, padded=True)
        same(gradients, expected)
        every_one_matters(gradients)


@pytest.mark.parametrize("name", ["simcse-bert", "roberta-mean", "e5-xlm-r", "e5-mistral", "gemma"])
def test_all_weights_have_the_gradients_of_padded_rows(prepare, name):
    trainable = prepare(name, **FULL)
    assert trainable.engine.packs == (CASES[name].window > 0)
    assert trainable.peft_model is None
    own = dict(trainable.network.named_parameters())
    assert trained(trainable.network).keys() == own.keys()
    rows = every_length(trainable)
    _, gradients = loss_and_gradients(trainable, rows)
    _, expected = loss_and_gradients(trainable, rows, padded=True)
    same(gradients, expected)
    every_one_matters(gradients)


def test_all_of_nv_embed_is_trained_with_its_latents(prepare):
    """Folded ones have no gradients of their own."""
    trainable = prepare("nv-embed", **FULL)
    rows = every_length(trainable)
    _, gradients = loss_and_gradients(trainable, rows)
    assert "latent_attention_model.latents" in gradients
    same(gradients, loss_and_gradients(trainable, rows, padded=True)[1])
    every_one_matters(gradients)


# -- once is each ------------------------------------------------------------------------------

S = [
    "two dogs run over wet grass",
    "a man plays the guitar",
    "three children read a book in the kitchen while it rains",
    "dogs",
]
C = ["the number of people", "the color of the dress", "dogs"]
#: Sentences, condition, rating; twos, a text with itself, and a condition that is a sentence.
RATED = [
    (S[0], S[1], C[0], 1.0),
    (S[0], S[1], C[1], 0.25),
    (S[2], S[0], C[0], 0.5),
    (S[2], S[0], C[2], 0.75),
    (S[1], S[3], C[1], 0.0),
    (S[1], S[3], C[0], float("nan")),
    (S[3], S[3], C[0], 1.0),
    (S[1], S[2], C[2], 0.5),
    (S[1], S[2], C[1], 0.5),
    (S[3], S[2], C[1], 0.25),
    (S[3], S[2], C[2], 1.0),
]


def as_rows(rated):
    first, second, condition, rating = zip(*rated, strict=True)
    return Rows(first, second, condition, np.array(rating), np.arange(len(rated)) + 1, "train.csv")


@dataclass(frozen=True)
class Task:
    """What is trained: ``terms`` are prompts, each with whether e(c) is subtracted."""

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

    def model(self, trainable):
        view, dim = self.view, trainable.engine.dim
        dims = dim * len(view.prompts), dim if view.conditioned else 0
        plan = HeadConfig(self.recipe, self.objective, seed=1)
        return BiEncoderModel(trainable.engine, plan, dims)

    def inputs(self, trainable, rated=RATED):
        return RatedInputs.from_rows(as_rows(rated), self.view, trainable.tokenizer)


NO_DROPOUT = (("dropout", 0.0),)
#: With their relu, some embeddings of so few numbers are all zero.
LOW_RANK = (("dim", 8), ("rank", 4), ("activation", "gelu"), *NO_DROPOUT)
TWOS = ObjectiveSettings(mse=0.5, info_nce=1.0)
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
    # Not subtracted: a sentence under itself would leave nothing but rounding.
    "routed": Task((("routed", False),), "linear", (("dim", 8), *NO_DROPOUT)),
    "twos": Task((("concat-sent-cond", True),), objective=TWOS),
    "conditioned-twos": Task(
        (("separate", False),), "hypernet", LOW_RANK, "separate", objective=TWOS
    ),
}


class OneByOne:
    """The loss of rows without llmcond's batches: each input of each row is encoded by itself."""

    def __init__(self, task, trainable, model):
        self.task, self.trainable, self.model = task, trainable, model
        self.prompts = {prompt.name: prompt for prompt in task.view.prompts}

    def states(self, text):
        """The states of a text's tokens, without the engine."""
        ids = torch.tensor([self.trainable.tokenizer([EncoderInput("", text)])[0].ids])
        network = self.trainable.engine.model.network
        return network(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]

    def routed(self, item):
        """Return the vector of an input with a router, of an encoder that pools the first token."""
        own, query = self.states(item.text), self.states(item.router.text)[0]
        centre = own.mean(dim=0) if item.router.centre else 0
        near = torch.cosine_similarity(own - centre, query[None], dim=1)
        if item.router.standardize:
            near = near / near.std(correction=0)
        vector = ((near / item.router.temperature).softmax(dim=0) @ own)[None]
        normalised = self.trainable.engine.identity.normalize
        return torch.nn.functional.normalize(vector, dim=1) if normalised else vector

    def vector(self, part, sentence, condition):
        if part.router is not None:
            return self.routed(part.render(sentence, condition))
        tokens = self.trainable.tokenizer([part.render(sentence, condition)])
        return self.trainable.engine.embed(tokens, padded=True)

    def features(self, sentence, condition):
        parts = []
        for name, subtract in self.task.terms:
            prompt = self.prompts[name]
            own = self.vector(prompt.conditional, sentence, condition)
            if subtract:
                own = own - self.vector(prompt.unconditional, sentence, condition)
            parts.append(own)
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
        """Take gradients row by row, and two by two; return the loss."""
        settings, total = self.task.objective, 0.0
        for row in rows:
            loss = settings.mse * (self.cosine(row) - row[3]) ** 2 / len(rows)
            loss.backward()
            total += loss.item()
        twos = [(a, b) for a, b in pairwise(rows) if a[:2] == b[:2]]
        twos = [sorted(two, key=lambda row: -row[3]) for two in twos if two[0][3] != two[1][3]]
        for high, low in twos if settings.info_nce else ():
            p, n = (self.cosine(row) / settings.temperature for row in (high, low))
            loss = -settings.info_nce * torch.log(p.exp() / (p.exp() + n.exp())) / len(twos)
            loss.backward()
            total += loss.item()
        return total


def once_is_each(task, trainable):
    """See that a batch, and a part of it in another order, has the gradients of its rows."""
    shake(trainable)
    model = task.model(trainable)
    inputs = task.inputs(trainable)
    rated = [row for row in RATED if row[3] == row[3]]
    assert len(inputs) == len(rated)
    seen = []
    embed = trainable.engine.embed

    def counted(rows, **options):
        seen.append([tuple(row.ids) for row in rows])
        return embed(rows, **options)

    for rows in (np.arange(len(rated)), np.array([5, 8, 9, 2, 3, 4])):
        model.train()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainable.engine, "embed", counted)
            loss = model(inputs, rows, [0, 1])
        assert len(set(seen[-1])) == len(seen[-1]) < 2 * len(rows) * len(task.view.required_parts())
        loss.backward()
        gradients = taken(model)
        model.eval()
        expected = OneByOne(task, trainable, model).loss([rated[row] for row in rows])
        assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        # Differences of vectors that are nearly the same have fewer digits.
        subtracts = any(subtract for _, subtract in task.terms)
        same(gradients, taken(model), 1e-4 if subtracts else 1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize("task", TASKS_OF_HEADS)
def test_texts_encoded_once_have_the_gradients_of_each_by_itself(prepare, task):
    once_is_each(TASKS_OF_HEADS[task], prepare("simcse-bert-cls"))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_the_gradients_of_each_text_by_itself(prepare, name):
    once_is_each(TASKS_OF_HEADS["hypernet-joint"], prepare(name))


def test_pairs_encoded_once_have_the_gradients_of_each_by_itself(prepare):
    task = Task((("pair-cond", True),), "hadamard", (("features", "joint"), *NO_DROPOUT))
    once_is_each(replace(task, conditions="pair-cond"), prepare(PAIRS))


def test_instructions_encoded_once_have_the_gradients_of_each_by_itself(prepare):
    once_is_each(Task((("retrieval-cond", True),)), prepare("nv-embed"))


# -- dropout -----------------------------------------------------------------------------------


def vectors(engine, rows, **options):
    torch.manual_seed(3)
    with torch.no_grad():
        return engine.embed(rows, **options).numpy()


def close(found, expected, most=1e-5):
    np.testing.assert_allclose(found, expected, rtol=0, atol=most * np.abs(expected).max())


def differ(found, expected):
    return np.abs(found - expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.matrix
@pytest.mark.parametrize("padded", [False, True])
def test_dropout_that_is_off_changes_no_vector(name, prepare, padded):
    trainable = prepare(name)
    shake(trainable)
    rows = every_length(trainable)[:30]
    model = Task().model(trainable)
    model.eval()
    expected = vectors(trainable.engine, rows, padded=padded)
    model.train()
    close(vectors(trainable.engine, rows, padded=padded), expected)


@pytest.mark.parametrize(
    ("name", "drops"), [("simcse-bert", True), ("roberta-mean", True), ("qwen3", False)]
)
def test_an_encoder_s_own_dropout_is_on_in_training_only(prepare, name, drops):
    trainable = prepare(name, encoder_dropout=True)
    shake(trainable)
    task = Task()
    model, inputs = task.model(trainable), task.inputs(trainable)
    model.eval()
    expected = vectors(trainable.engine, inputs.tokens)
    model.train()
    assert differ(vectors(trainable.engine, inputs.tokens), expected) == drops
    # In between it is off, and on again afterwards.
    close(model.encode(inputs, np.arange(len(inputs.items))), expected)
    assert differ(vectors(trainable.engine, inputs.tokens), expected) == drops


def test_dropout_of_adapters_is_on_where_the_encoder_s_is_off(prepare):
    trainable = prepare("simcse-bert", adapter_dropout=0.5)
    shake(trainable)
    rows = every_length(trainable)[:30]
    model = Task().model(trainable)
    model.eval()
    expected = vectors(trainable.engine, rows)
    model.train()
    assert differ(vectors(trainable.engine, rows), expected)


# -- adapters ----------------------------------------------------------------------------------


def digests(network):
    """Identify every weight and buffer that is no adapter's, quantisation's own numbers too."""
    values = {**dict(network.named_buffers()), **network.state_dict()}
    return {
        name.replace(".base_layer", ""): hashlib.sha256(
            value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, value in values.items()
        if "lora_" not in name
    }


def expected_modules(case, within=lambda name: True):
    before, names = BLOCKS[case.kind]
    numbers = range(checkpoints.LAYERS)
    return {f"{before}.{at}.{name}" for at in numbers for name in names if within(name)}


def adapted(network):
    return [(name, module) for name, module in network.named_modules() if hasattr(module, "lora_A")]


def adapted_modules(network):
    return {name for name, _ in adapted(network)}


def descend(model, inputs, steps=15, rate=3e-3):
    """Train on all rows at once; return the losses."""
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


def adapters_alone_learn(trainable, case, task):
    """See that training lowers the loss, and moves adapters and head and nothing else."""
    network = trainable.network
    assert adapted_modules(network) == expected_modules(case)
    model, inputs = task.model(trainable), task.inputs(trainable)
    own = trained(model)
    lora = {f"encoder.{at}.lora_{m}.default.weight" for at in expected_modules(case) for m in "AB"}
    assert own.keys() == lora | {f"head.{name}" for name, _ in model.head.named_parameters()}
    base, before = digests(network), {name: value.clone() for name, value in own.items()}
    losses = descend(model, inputs)
    assert losses[-1] < 0.3 * losses[0]
    assert digests(network) == base
    for name, value in own.items():
        assert not torch.equal(value, before[name]), name
    return base


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapters_alone_learn_on_every_architecture(name, prepare):
    case, trainable = CASES[name], prepare(name)
    base = adapters_alone_learn(trainable, case, Task())
    # Nor has putting them there changed a weight of the checkpoint.
    plain = load_model(trainable.resolved, trainable.network.config)
    assert digests(plain.network) == base


@pytest.mark.parametrize("name", ["e5-mistral", "simcse-bert", "nv-embed"])
def test_adapters_and_head_learn_together(prepare, name):
    adapters_alone_learn(prepare(name), CASES[name], TASKS_OF_HEADS["hadamard"])


@pytest.mark.parametrize("name", QUANTISED)
def test_adapters_alone_learn_on_4_bit_weights(prepare, name):
    pytest.importorskip("bitsandbytes")
    case = QUANTISED[name]
    trainable = prepare(case, quantize="4bit")
    layers = {name: module.base_layer for name, module in adapted(trainable.network)}
    assert {type(layer).__name__ for layer in layers.values()} == {"Linear4bit"}
    assert {layer.weight.dtype for layer in layers.values()} == {torch.uint8}
    base = adapters_alone_learn(trainable, case, TASKS_OF_HEADS["hadamard"])
    assert base.keys() >= {f"{name}.weight{part}" for name in layers for part in ("", ".absmax")}


@pytest.mark.parametrize("name", QUANTISED)
def test_4_bit_weights_have_the_gradients_of_what_they_stand_for(prepare, name):
    """On some CPUs bitsandbytes packs weights anew when they are first used, for inference only."""
    bits = pytest.importorskip("bitsandbytes")
    trainable, reference = (prepare(QUANTISED[name], quantize=kind) for kind in ("4bit", "none"))
    shake(trainable)
    rows = every_length(trainable)
    assert trainable.engine.packs
    loss, gradients = loss_and_gradients(trainable, rows)
    same(gradients, loss_and_gradients(trainable, rows, padded=True)[1], 1e-4)
    every_one_matters(gradients)
    trainable.network.state_dict()  # packs them as they were
    values = dict(trainable.network.named_parameters())
    with torch.no_grad():
        for key, value in reference.network.named_parameters():
            own = values[key]
            if own.dtype == torch.uint8:
                own = bits.functional.dequantize_4bit(own.data, own.quant_state)
            value.copy_(own)
    expected_loss, expected = loss_and_gradients(reference, rows)
    assert loss == pytest.approx(expected_loss, rel=1e-4, abs=1e-4)
    same(gradients, expected, 1e-4)


def in_attention(name):
    return name.startswith(("self_attn.", "attention."))


@pytest.mark.matrix
@pytest.mark.parametrize("target", ["attention", "mlp"])
def test_groups_of_projections_are_what_they_say(name, prepare, target):
    trainable = prepare(name, target=(target,))
    expected = expected_modules(
        CASES[name], lambda own: in_attention(own) == (target == "attention")
    )
    assert adapted_modules(trainable.network) == expected


@pytest.mark.parametrize(
    ("name", "target", "chosen"),
    [
        ("e5-mistral", ("q_proj", "v_proj"), ("self_attn.q_proj", "self_attn.v_proj")),
        ("e5-mistral", ("mlp.up_proj",), ("mlp.up_proj",)),
        ("e5-mistral", ("mlp", "q_proj", "up_proj"), ("self_attn.q_proj", *DECODER[4:])),
        ("nv-embed", ("o_proj",), ("self_attn.o_proj",)),
        ("simcse-bert", ("query",), ("attention.self.query",)),
        ("simcse-bert", ("self.key", "intermediate.dense"), (ENCODER[1], ENCODER[4])),
        ("simcse-bert", ("attention.output.dense",), ("attention.output.dense",)),
        # A whole name is that one, though it is the end of another's.
        ("simcse-bert", ("output.dense",), ("output.dense",)),
        ("simcse-bert", ("dense",), ENCODER[3:]),
    ],
)
def test_projections_are_named(prepare, name, target, chosen):
    trainable = prepare(name, target=target)
    expected = expected_modules(CASES[name], lambda own: own in chosen)
    assert adapted_modules(trainable.network) == expected


@pytest.mark.parametrize("name", ["e5-mistral", "simcse-bert", "gemma", "nv-embed-unfolded"])
def test_unknown_projections_are_refused_with_the_legal_ones(prepare, name):
    legal = BLOCKS[CASES[name].kind][1]
    # What pools is none of them, and neither are norms, embeddings, or parts of a name.
    for wrong in ("to_q", "pooler.dense", "fn.net.0", "norm", "proj", "embed_tokens", "", "MLP"):
        with pytest.raises(UserError, match=f"--target is {wrong!r}, which .* does not") as raised:
            prepare(name, target=("attention", wrong))
        assert str(raised.value).endswith(f"Legal: auto, attention, mlp, {', '.join(legal)}.")
    with pytest.raises(UserError, match=f"Did you mean '{re.escape(legal[-1])}'"):
        prepare(name, target=(legal[-1][:-1],))


def test_network_without_numbered_blocks_is_refused():
    network = nn.Sequential()
    network.add_module("layer", nn.Linear(2, 2))
    assert projections(network) == []
    with pytest.raises(UserError, match="--rank full"):
        select_projections(network, ("auto",), "it")


# -- files -------------------------------------------------------------------------------------


def computed(trainable, items):
    """Return the vectors that a trained network gives, in either way through it."""
    trainable.network.eval()
    rows = trainable.tokenizer(items)
    with torch.no_grad():
        expected = trainable.engine.embed(rows).numpy()
    found = np.empty_like(expected)
    for done in trainable.engine.run(rows):
        found[done.inputs] = done.vectors
    close(found, expected)
    return expected


def saved(trainable, folder, merge=False, **options):
    """Write a trained encoder, and load it by nothing but its folder."""
    save_encoder(trainable, str(trainable.resolved.checkpoint.folder), folder, merge=merge)
    return llmcond.load_encoder(str(folder), dtype="float32", device="cpu", **options)


def keys_of(path):
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def learnt(trainable, steps=3):
    """Train a little, so that what is saved is what training leaves."""
    shake(trainable)
    task = Task()
    descend(task.model(trainable), task.inputs(trainable), steps, 1e-3)


def moved(trainable, items, expected):
    """See that training changed vectors by more than rounding does."""
    before = Encoder(trainable.resolved).encode_counted(items).vectors
    return differ(before, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_saved_adapter_gives_the_vectors_of_the_trained_network(name, prepare, tmp_path):
    trainable = prepare(name)
    learnt(trainable)
    items = mix(trainable.resolved, 5, n_inputs=15)
    expected = computed(trainable, items)
    encoder = saved(trainable, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert keys_of(tmp_path / "out" / "adapter_model.safetensors") == {
        f"base_model.model.{at}.lora_{matrix}.weight"
        for at in expected_modules(CASES[name])
        for matrix in "AB"
    }
    assert replace(encoder.identity, weights="") == replace(trainable.resolved.identity, weights="")
    close(encoder.encode_counted(items).vectors, expected)
    assert moved(trainable, items, expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_merged_adapter_gives_the_vectors_of_the_trained_network(name, prepare, tmp_path):
    trainable = prepare(name)
    learnt(trainable)
    items = mix(trainable.resolved, 6, n_inputs=15)
    expected = computed(trainable, items)
    encoder = saved(trainable, tmp_path / "out", merge=True)
    assert not [key for key in keys_of(tmp_path / "out" / "model.safetensors") if "lora" in key]
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    close(encoder.encode_counted(items).vectors, expected, 1e-4)
    if CASES[name].kind != "nv-embed":
        plain(trainable, tmp_path / "out")


def plain(trainable, folder):
    """See that plain transformers loads a folder to the same weights, with none of ours."""
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
def test_fully_trained_encoder_is_saved_whole(name, prepare, tmp_path):
    trainable = prepare(name, **FULL)
    learnt(trainable)
    items = mix(trainable.resolved, 7, n_inputs=15)
    expected = computed(trainable, items)
    encoder = saved(trainable, tmp_path / "out")
    # NV-Embed's latents are trained as they are, and folded when they are loaded.
    close(encoder.encode_counted(items).vectors, expected)
    assert moved(trainable, items, expected)
    if CASES[name].kind != "nv-embed":
        plain(trainable, tmp_path / "out")


@pytest.mark.parametrize("kind", [FULL, PLAIN])
def test_files_of_another_run_are_not_taken_for_a_checkpoint_s(prepare, make, tmp_path, kind):
    """A base may be a trained run itself: its account would stand for that of the new one."""
    base = shutil.copytree(make(CASES["gemma"]), tmp_path / "base")
    for file in ("run.json", "training.json", "heads/config.json"):
        checkpoints.write_json(base / file, {})
    trainable = prepare("gemma", folder=base, **kind)
    saved(trainable, tmp_path / "out", merge=True)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.json")}
    assert found == {
        "config.json",
        "encoder.json",
        "modules.json",
        "tokenizer.json",
        "tokenizer_config.json",
        *(f"{folder}/config.json" for folder in ("1_Pooling", "2_Dense", "3_Dense")),
    }


@pytest.mark.parametrize("name", QUANTISED)
def test_adapter_trained_on_4_bit_weights_is_loaded_onto_such(prepare, name, tmp_path, monkeypatch):
    bits = pytest.importorskip("bitsandbytes")
    trainable = prepare(QUANTISED[name], quantize="4bit")
    learnt(trainable)
    items = mix(trainable.resolved, 8, n_inputs=15)
    expected = computed(trainable, items)
    assert moved(trainable, items, expected)
    encoder = saved(trainable, tmp_path / "out", quantize="4bit")
    assert encoder.identity.quantize == "4bit"
    # For inference, some CPUs multiply 4 bit weights in bfloat16 whatever the type.
    close(encoder.encode_counted(items).vectors, expected, 0.05)
    monkeypatch.setattr(bits.nn.modules, "has_avx512bf16", lambda: False)
    encoder = saved(trainable, tmp_path / "out", quantize="4bit")
    close(encoder.encode_counted(items).vectors, expected, 1e-4)
    # That it had another base in training is said, and not refused.
    assumed = saved(trainable, tmp_path / "out").resolved.assumed
    assert "unquantised weights of the base, although its adapter was trained on 4bit" in str(
        assumed
    )


@pytest.mark.parametrize("name", ["simcse-bert", "e5-mistral"])
def test_peft_itself_reads_the_adapter(prepare, name, tmp_path):
    from peft import PeftModel

    trainable = prepare(name)
    learnt(trainable)
    base = trainable.resolved.checkpoint.folder
    items = [EncoderInput("", text) for text in ("two dogs run", "a man", "dogs " * 20)]
    expected = computed(trainable, items)
    save_encoder(trainable, str(base), tmp_path, merge=False)
    network = AutoModel.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    network = PeftModel.from_pretrained(network, str(tmp_path)).eval()
    for row, vector in zip(trainable.tokenizer(items), expected, strict=True):
        with torch.no_grad():
            output = network(input_ids=torch.tensor([row.ids]))
        last = output.last_hidden_state[0, -1]
        pooled = output.pooler_output[0] if name == "simcse-bert" else last
        pooled = pooled / pooled.norm() if trainable.resolved.identity.normalize else pooled
        close(pooled.numpy(), vector)


# -- activations that are computed again -------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "full"),
    [*((name, False) for name in ARCHITECTURES), *((name, True) for name in QUANTISED)],
)
def test_activations_computed_again_give_the_same_gradients(prepare, name, full):
    kind, task = (FULL if full else {}), TASKS_OF_HEADS["linear"]
    found = []
    for again in (False, True):
        trainable = prepare(name, gradient_checkpointing=again, **kind)
        shake(trainable)
        model, inputs = task.model(trainable), task.inputs(trainable)
        before, names = BLOCKS[CASES[name].kind]
        calls = []
        # The last ones of a block are not needed again.
        layer = trainable.network.get_submodule(f"{before}.0.{names[0]}")
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.train()
        loss = model(inputs, np.arange(len(inputs)), [0])
        once = len(calls)
        loss.backward()
        assert len(calls) == (2 * once if again else once)
        found.append((loss.item(), taken(model)))
    (expected_loss, expected), (loss, gradients) = found
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    same(gradients, expected)
