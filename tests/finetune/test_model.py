"""Training every architecture: gradients of packed rows and shared texts, adapters, and files."""

import shutil
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.adapters import save_adapter
from helpers.cases import CASES, MAX_LENGTH, Case, routed_inputs, sample_inputs
from torch import nn
from transformers import AutoModel, MistralForCausalLM

import llmcond
from llmcond.base.errors import UserError
from llmcond.data.rows import Rows
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.tokenizing import OutOfMemoryError, Tokens
from llmcond.features.view import recipe_view
from llmcond.finetune.encoder import (
    check_trainable,
    load_trainable,
    save_encoder,
    select_projections,
)
from llmcond.finetune.model import BiEncoderModel, RatedInputs, TokenizedInputs
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.heads.module import Batch
from llmcond.heads.settings import ObjectiveSettings
from llmcond.prompts import load_prompt

pytestmark = pytest.mark.usefixtures("one_thread")

#: Dropout is off unless a test sets it.
PLAIN = {"rank": 4, "encoder_dropout": False}
FULL = {"rank": 0, "encoder_dropout": False}
#: bitsandbytes quantises in blocks of 64; the other cases are too narrow.
QUANTISED = replace(CASES["e5-mistral"], kind="wide-mistral")
#: A BERT that reads pairs, which SimCSE's default pooling does not accept.
PAIRS = Case("simcse-bert", options={"pooling": "mean"})

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
    "gemma": ("layers", DECODER),
    "nv-embed": ("embedding_model.layers", DECODER),
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
                checkpoints.build_checkpoint(kind, path, **case.checkpoint_options)
            checkpoints.change_json(path / "config.json", **case.config)
            folders[key] = path
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


def perturb_weights(trainable):
    """Perturb trainable weights, because adapters start as zero maps, where A has no gradient."""
    generator = torch.Generator().manual_seed(0)
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


def embed_padded(engine, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "packs", False)
        return engine.embed(rows)


def loss_and_gradients(trainable, rows, padded=False):
    """Return a loss that weights each number of each vector differently, and its gradients."""
    packed_calls = set()
    hook = trainable.network.register_forward_pre_hook(
        lambda module, args, kwargs: packed_calls.add("packed" in kwargs), with_kwargs=True
    )
    engine = trainable.engine
    vectors = embed_padded(engine, rows) if padded else engine.embed(rows)
    hook.remove()
    assert (True in packed_calls) == (trainable.engine.packs and not padded)
    weights = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(1))
    loss = (weights * vectors).sum() / len(rows)
    loss.backward()
    return loss.item(), pop_gradients(trainable.network)


def assert_packed_equals_padded(trainable, rows):
    loss, gradients = loss_and_gradients(trainable, rows)
    expected_loss, expected = loss_and_gradients(trainable, rows, padded=True)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
    assert_same_gradients(gradients, expected)
    # The bias of a key adds the same to all scores of a query, so its gradient is zero.
    zero = [name for name, value in gradients.items() if not value.any()]
    assert not [name for name in zero if not name.endswith("key.bias")]
    return expected


def inputs_of_every_length(trainable):
    """Return an input of each length from one token to the maximum."""
    size = len(trainable.network.get_input_embeddings().weight)
    rng = np.random.default_rng(2)
    lengths = rng.permutation(np.arange(1, MAX_LENGTH + 1)).tolist()
    return [
        Tokens(rng.integers(size, size=length).tolist(), 0, length, 0, length) for length in lengths
    ]


# -- packed and padded rows --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("simcse-bert", PLAIN),
        ("e5-mistral", PLAIN),
        ("gemma-wider", FULL),
        ("nv-embed", FULL),
        *(
            pytest.param(name, PLAIN, marks=pytest.mark.slow)
            for name in ("simcse-roberta", "e5-xlm-r", "gte-qwen2", "qwen3")
        ),
    ],
)
def test_packed_rows_match_gradients_of_padded_rows(prepare, name, settings):
    trainable = prepare(name, **settings)
    assert trainable.engine.packs == (CASES[name].window > 0)
    assert trainable.engine.shares_prefixes == CASES[name].shares_prefixes
    assert (trainable.peft_model is None) == (settings is FULL)
    perturb_weights(trainable)
    mixed = trainable.tokenizer(sample_inputs(trainable.resolved, 3))
    for rows, budget in ((inputs_of_every_length(trainable), 150), (mixed, 100_000)):
        trainable.engine.budget = budget
        gradients = assert_packed_equals_padded(trainable, rows)
    if settings is FULL:
        assert gradients.keys() == dict(trainable.network.named_parameters()).keys()
        # Folded latents would have no gradients.
        assert ("latent_attention_model.latents" in gradients) == (name == "nv-embed")


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
    (SENTENCES[1], SENTENCES[3], CONDITIONS[0], float("nan")),
    (SENTENCES[3], SENTENCES[3], CONDITIONS[0], 1.0),
    (SENTENCES[1], SENTENCES[2], CONDITIONS[2], 0.5),
    (SENTENCES[1], SENTENCES[2], CONDITIONS[1], 0.5),
]


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
        return BiEncoderModel(trainable.engine, self.recipe, self.objective, dims, seed=1)

    def build_inputs(self, trainable):
        first, second, condition, rating = zip(*RATED, strict=True)
        numbers = np.arange(len(RATED)) + 1
        rows = Rows(first, second, condition, np.array(rating), numbers, "train.csv")
        return RatedInputs.from_rows(rows, self.view, trainable.tokenizer)


NO_DROPOUT = (("dropout", 0.0),)
#: GELU, because with ReLU some embeddings of so few dimensions are all zero.
LOW_RANK = (("dim", 8), ("rank", 4), ("activation", "gelu"), *NO_DROPOUT)
CONTRASTIVE = ObjectiveSettings(mse=0.5, info_nce=1.0)
JOINT, SEPARATE = ("concat-sent-cond", True), ("separate", False)
HADAMARD = Task((SEPARATE,), "hadamard", NO_DROPOUT, "separate")
HYPERNET = Task((JOINT,), "hypernet-joint", LOW_RANK, "concat-sent-cond", CONTRASTIVE)
#: The case and the task of each test.
ENCODED_ONCE = {
    "several": ("simcse-bert-cls", Task((JOINT, ("concat-cond-sent", True)))),
    "hypernet": ("simcse-bert-cls", HYPERNET),
    "decoder": ("e5-mistral", HYPERNET),
    "instructions": ("nv-embed", Task((("retrieval-cond", True),))),
    "pairs": (
        PAIRS,
        Task((("pair-cond", True),), "hadamard", (("features", "joint"), *NO_DROPOUT), "pair-cond"),
    ),
}


class ReferenceLoss:
    """The loss of rows without batches: each input of each row is encoded separately."""

    def __init__(self, task, trainable, model):
        self.task, self.trainable, self.model = task, trainable, model
        self.prompts = {prompt.name: prompt for prompt in task.view.prompts}

    def vector(self, part, sentence, condition):
        tokens = self.trainable.tokenizer([part.render(sentence, condition)])
        return embed_padded(self.trainable.engine, tokens)

    def features(self, sentence, condition):
        parts = []
        for name, subtract in self.task.terms:
            prompt = self.prompts[name]
            vector = self.vector(prompt.conditional, sentence, condition)
            if subtract:
                vector = vector - self.vector(prompt.unconditional, sentence, condition)
            parts.append(vector)
        return torch.cat(parts, dim=1)

    def cosine(self, row):
        first, second, condition, _ = row
        x = torch.cat([self.features(text, condition) for text in (first, second)])
        batch = Batch(x)
        if self.task.conditions:
            part = self.prompts[self.task.conditions].unconditional
            batch = Batch(x, self.vector(part, first, condition), torch.zeros(2, dtype=torch.long))
        first, second = self.model.head(*batch)
        return first @ second / (first.norm() * second.norm())

    def loss(self, rows):
        """Accumulate gradients row by row and pair by pair, and return the loss."""
        settings, total = self.task.objective, 0.0
        for row in rows:
            loss = settings.mse * (self.cosine(row) - row[3]) ** 2 / len(rows)
            loss.backward()
            total += loss.item()
        pairs = [
            sorted((a, b), key=lambda row: -row[3])
            for a, b in pairwise(rows)
            if a[:2] == b[:2] and a[3] != b[3]
        ]
        for high, low in pairs if settings.info_nce else ():
            positive, negative = (self.cosine(row) / settings.temperature for row in (high, low))
            share = positive.exp() / (positive.exp() + negative.exp())
            loss = -settings.info_nce * share.log() / len(pairs)
            loss.backward()
            total += loss.item()
        return total


@pytest.mark.parametrize("name", ENCODED_ONCE)
def test_texts_encoded_once_match_gradients_of_separate_encoding(prepare, name):
    """A batch, and a reordered part of it, has the gradients of its separate rows."""
    case, task = ENCODED_ONCE[name]
    trainable = prepare(case)
    perturb_weights(trainable)
    model, inputs = task.build_model(trainable), task.build_inputs(trainable)
    rated = [row for row in RATED if row[3] == row[3]]
    assert len(inputs) == len(rated)
    encoded, embed = [], trainable.engine.embed

    def record_and_embed(rows, **options):
        encoded.append([tuple(row.ids) for row in rows])
        return embed(rows, **options)

    for rows in (np.arange(len(rated)), np.array([5, 6, 2, 3, 4])):
        model.train()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainable.engine, "embed", record_and_embed)
            loss = model(inputs, rows, [0, 1])
        n_inputs = 2 * len(rows) * len(task.view.required_parts())
        assert len(set(encoded[-1])) == len(encoded[-1]) < n_inputs
        loss.backward()
        gradients = pop_gradients(model)
        model.eval()
        expected = ReferenceLoss(task, trainable, model).loss([rated[row] for row in rows])
        assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        # Differences of nearly equal vectors have fewer significant digits.
        subtracts = any(subtract for _, subtract in task.terms)
        assert_same_gradients(gradients, pop_gradients(model), 1e-4 if subtracts else 1e-5)


def test_routed_inputs_are_encoded_in_smaller_batches_if_memory_runs_out(prepare):
    trainable = prepare("e5-xlm-r")
    model = Task().build_model(trainable)
    inputs = TokenizedInputs.of(routed_inputs(4, 30, CONDITIONS), trainable.tokenizer)
    which = np.arange(len(inputs))[::-1]
    expected, limit = model.encode(inputs, which), 2 * MAX_LENGTH

    def check_memory(module, args, kwargs):
        if kwargs["input_ids"].numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainable.network.register_forward_pre_hook(check_memory, with_kwargs=True)
    assert_close(model.encode(inputs, which), expected)
    limit = 1
    with pytest.raises(OutOfMemoryError):
        model.encode(inputs, which)


# -- dropout, adapters and gradient checkpointing ----------------------------------------------


def are_different(actual, expected):
    return np.abs(actual - expected).max() > 0.01 * np.abs(expected).max()


def assert_close(actual, expected, tolerance=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "settings", "drops"),
    [
        ("simcse-bert", {"encoder_dropout": True}, True),
        ("simcse-bert", {"encoder_dropout": False}, False),
        ("simcse-bert", {"encoder_dropout": False, "adapter_dropout": 0.5}, True),
        ("qwen3", {"encoder_dropout": True}, False),  # its config has no dropout
    ],
)
def test_dropout_is_active_in_training_only(prepare, name, settings, drops):
    trainable, task = prepare(name, **settings), Task()
    perturb_weights(trainable)
    model, texts = task.build_model(trainable), task.build_inputs(trainable).texts

    def embed():
        torch.manual_seed(3)
        with torch.no_grad():
            return trainable.engine.embed(texts.tokens).numpy()

    model.eval()
    expected = embed()
    model.train()
    assert are_different(embed(), expected) == drops
    # ``encode`` turns dropout off, and on again afterwards.
    assert_close(model.encode(texts, np.arange(len(texts))), expected)
    assert are_different(embed(), expected) == drops


def copy_frozen_weights(network):
    """Return copies of all weights except adapters, with the quantisation state."""
    state = network.state_dict().items()
    return {name: value.clone() for name, value in state if "lora_" not in name}


def expected_modules(case):
    prefix, names = BLOCKS[case.kind]
    return {f"{prefix}.{number}.{name}" for number in range(checkpoints.LAYERS) for name in names}


def train_steps(model, inputs, steps, rate):
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


@pytest.mark.parametrize(
    ("case", "quantize"),
    [(CASES["simcse-bert"], "none"), (CASES["nv-embed"], "none"), (QUANTISED, "4bit")],
)
def test_only_adapters_and_head_learn(prepare, case, quantize):
    if quantize == "4bit":
        pytest.importorskip("bitsandbytes")
    trainable = prepare(case, quantize=quantize)
    network, modules = trainable.network, expected_modules(case)
    model, inputs = HADAMARD.build_model(trainable), HADAMARD.build_inputs(trainable)
    parameters = trainable_parameters(model)
    lora = {
        f"encoder.{module}.lora_{matrix}.default.weight" for module in modules for matrix in "AB"
    }
    assert parameters.keys() == lora | {f"head.{name}" for name, _ in model.head.named_parameters()}
    if quantize == "4bit":
        layers = {network.get_submodule(f"{module}.base_layer") for module in modules}
        assert {type(layer).__name__ for layer in layers} == {"Linear4bit"}
    frozen = copy_frozen_weights(network)
    initial = {name: value.clone() for name, value in parameters.items()}
    losses = train_steps(model, inputs, 15, 3e-3)
    assert losses[-1] < 0.4 * losses[0]
    torch.testing.assert_close(copy_frozen_weights(network), frozen, rtol=0, atol=0)
    assert not [name for name, value in parameters.items() if torch.equal(value, initial[name])]


def test_targets_select_projections(prepare):
    attention, mlp = DECODER[:4], DECODER[4:]
    cases = [
        ("e5-mistral", ("attention",), attention),
        ("e5-mistral", ("mlp.up_proj",), ["mlp.up_proj"]),
        ("e5-mistral", ("up_proj", "mlp", "q_proj"), ["self_attn.q_proj", *mlp]),
        ("nv-embed", ("o_proj",), ["self_attn.o_proj"]),
        ("simcse-bert", ("attention",), ENCODER[:4]),
        ("simcse-bert", ("self.key", "intermediate.dense"), [ENCODER[1], ENCODER[4]]),
        # A full name selects only that projection, although another name ends with it.
        ("simcse-bert", ("output.dense",), ["output.dense"]),
    ]
    networks = {
        name: prepare(name, **FULL).network for name in ("e5-mistral", "nv-embed", "simcse-bert")
    }
    for name, target, selected in cases:
        assert select_projections(networks[name], target, "it") == selected
    # Poolers, norms, embeddings and parts of a name are not legal.
    for target in ("pooler.dense", "norm", "proj", ""):
        for name, network in networks.items():
            legal = BLOCKS[CASES[name].kind][1]
            with pytest.raises(UserError, match=f"--target is {target!r}, which it does") as error:
                select_projections(network, ("attention", target), "it")
            assert str(error.value).endswith(f"Legal: auto, attention, mlp, {', '.join(legal)}.")
    with pytest.raises(UserError, match="--rank full"):
        select_projections(nn.Sequential(nn.Linear(2, 2)), ("auto",), "it")


@pytest.mark.parametrize(("name", "settings"), [("e5-mistral", PLAIN), ("simcse-bert", FULL)])
def test_gradient_checkpointing_gives_same_gradients(prepare, name, settings):
    results = []
    for checkpointing in (False, True):
        trainable = prepare(name, gradient_checkpointing=checkpointing, **settings)
        perturb_weights(trainable)
        model, inputs = Task().build_model(trainable), Task().build_inputs(trainable)
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


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("target", [["q_proj", "down_proj"], r".*\.1\.mlp\.up_proj"])
def test_adapter_of_another_library_is_trained_further(prepare, tmp_path, target):
    """Its names begin with the encoder's name, and its scale is alpha / sqrt(r)."""
    base = checkpoints.build_checkpoint("mistral", tmp_path / "base", head=True).folder
    language_model = MistralForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"target_modules": target, "task_type": "CAUSAL_LM", "use_rslora": True}
    save_adapter(language_model, tmp_path / "tuned", base, **config)
    options = EncoderOptions(like=CASES["e5-mistral"].like, dtype="float32", device="cpu")
    resolved = resolve(str(tmp_path / "tuned"), options)
    settings = check_trainable(resolved, TuneSettings(), merge=False)
    assert (settings.rank, settings.alpha) == (4, 16)
    if isinstance(target, str):
        with pytest.raises(UserError, match=r"only some of the layers .* 2 tensors"):
            load_trainable(resolved, settings, seed=0)
        return
    trainable, items = load_trainable(resolved, settings, seed=0), sample_inputs(resolved, 3)
    with torch.no_grad():
        vectors = trainable.engine.embed(trainable.tokenizer(items)).numpy()
    assert_close(vectors, Encoder(resolved).encode_with_counts(items).vectors, 1e-4)


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "settings", "merge", "quantize"),
    [
        (CASES["simcse-bert"], PLAIN, False, "none"),
        (CASES["e5-mistral"], PLAIN, True, "none"),
        (CASES["nv-embed"], FULL, False, "none"),
        (CASES["gemma"], FULL, False, "none"),
        (QUANTISED, PLAIN, False, "4bit"),
    ],
)
def test_loaded_encoder_gives_vectors_of_trained_network(
    prepare, make, tmp_path, monkeypatch, case, settings, merge, quantize
):
    """The base may be a trained run, whose records must not pass for those of the new run."""
    if quantize == "4bit":
        bits = pytest.importorskip("bitsandbytes")
        # For inference, some CPUs would multiply 4-bit weights in bfloat16 whatever the dtype.
        monkeypatch.setattr(bits.nn.modules, "has_avx512bf16", lambda: False)
    base, folder = shutil.copytree(make(case), tmp_path / "base"), tmp_path / "out"
    for file in ("run.json", "training.json", "heads/config.json"):
        checkpoints.write_json(base / file, {})
    trainable = prepare(case, quantize, base, **settings)
    perturb_weights(trainable)
    train_steps(Task().build_model(trainable), Task().build_inputs(trainable), 3, 1e-3)
    items = sample_inputs(trainable.resolved, 5, n_inputs=15)
    trainable.network.eval()
    with torch.no_grad():
        expected = trainable.engine.embed(trainable.tokenizer(items)).numpy()
    save_encoder(trainable, str(base), folder, merge=merge)
    options = {"dtype": "float32", "device": "cpu", "quantize": quantize}
    encoder = llmcond.load_encoder(str(folder), **options)
    assert replace(encoder.identity, weights="") == replace(trainable.resolved.identity, weights="")
    assert_close(encoder.encode_with_counts(items).vectors, expected, 1e-4)
    assert are_different(Encoder(trainable.resolved).encode_with_counts(items).vectors, expected)
    whole = merge or settings is FULL
    assert (folder / "model.safetensors").exists() == whole
    assert (folder / "adapter_config.json").exists() == (not whole)
    assert not any((folder / file).exists() for file in ("run.json", "training.json", "heads"))
    if whole and case.kind != "nv-embed":
        _, report = AutoModel.from_pretrained(
            folder, trust_remote_code=False, output_loading_info=True
        )
        assert not report["missing_keys"] | report["unexpected_keys"]
    if quantize == "4bit":
        assumed = llmcond.load_encoder(str(folder), **{**options, "quantize": "none"}).resolved
        message = "unquantised weights of the base, although its adapter was trained on 4bit"
        assert message in str(assumed.assumed)
