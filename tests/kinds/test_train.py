"""Training encoders on graphs and dialogues: loss, dev score and the run."""

import json
import re

import numpy as np
import pytest
import torch
from helpers.commands import run_json, run_rejected
from helpers.dialogues import write_dialogues
from helpers.flags import change_flags
from helpers.training import ON_CPU

import llmcond
from llmcond.encoders import EncoderInput, resolve
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.model import TokenizedInputs
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.kinds.dialogue.data import Turns
from llmcond.kinds.dialogue.heads import distinct_utterances
from llmcond.kinds.dialogue.train import DialogueInputs, TurnModel
from llmcond.kinds.ranking.graph import KnownTriples, both_directions
from llmcond.kinds.ranking.heads import QueryArrays, contrastive
from llmcond.kinds.ranking.train import GraphInputs, QueryModel

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = "men play park dogs run beach place mood women read book red blue old new tall".split()
TEXTS = [f"two {first} {second}" for first in WORDS[:8] for second in WORDS[8:11]]
N = len(TEXTS)


def make_trainable(tiny_bert, **settings):
    return load_trainable(resolve(str(tiny_bert), ON_CPU), TuneSettings(rank=4, **settings), seed=5)


# -- graphs ------------------------------------------------------------------------------------

RELATIONS = ["the place", "the mood", "the number of people"]
R = len(RELATIONS)
STEPS = [1, 5, 11]
TRIPLES = np.array([(i, r, (i + s) % N) for i in range(N) for r, s in enumerate(STEPS)], np.int32)
TRAIN = TRIPLES[:60]


def make_inputs(trainable):
    """Make the inputs of train, with texts of a head entity and its relation as well."""
    directions = [*RELATIONS, *(f"inverse {text}" for text in RELATIONS)]
    train, all_triples = (both_directions(triples, R) for triples in (TRAIN, TRIPLES))
    keys = np.unique(all_triples[:, 0].astype(np.int64) * 2 * R + all_triples[:, 1])
    joint = [f"{TEXTS[key // (2 * R)]}; {directions[key % (2 * R)]}" for key in keys]
    items = [EncoderInput("", text) for text in (*TEXTS, *directions, *joint)]
    texts = TokenizedInputs.of(items, trainable.tokenizer)
    return GraphInputs(TRAIN, R, N, KnownTriples(train, N), texts, keys)


def encode_arrays(model, inputs):
    """Encode all texts of a graph with the current weights, for heads on cached features."""
    vectors = model.encode(inputs.texts, np.arange(len(inputs.texts)))
    entities, relations, joint = np.split(vectors, [N, N + 2 * R])
    return QueryArrays(entities, inputs.triples, R, inputs.known, relations, joint, inputs.joint_of)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("hypernet-full", {"dim": 8, "self_negatives": True}),
        ("hadamard", {"self_negatives": False}),
        ("linear", {"dim": 8, "self_negatives": True}),
    ],
)
def test_loss_of_graph_matches_cached_features(tiny_bert, name, settings):
    trainable = make_trainable(tiny_bert)
    inputs = make_inputs(trainable)
    recipe = load_recipe(name, "kgc").with_settings({"dropout": 0.0, **settings}, "test")
    model = QueryModel(trainable.engine, recipe, inputs, 5, None).eval()
    rows = np.array([0, 4, 5, 30, 59])
    head, relation, tail = both_directions(TRAIN[rows], R).T
    fitted = model.fitted_head().bind(encode_arrays(model, inputs))
    scores = torch.from_numpy(fitted.queries(head, relation) @ fitted.candidates()[:].T)
    used = np.unique(tail)
    mask = inputs.known.mask(head, relation, used)
    if not settings["self_negatives"]:
        mask |= head[:, None] == used
    expected = contrastive(
        scores[:, used],
        torch.from_numpy(np.searchsorted(used, tail)),
        torch.from_numpy(mask),
        model.head.settings,
        fitted.module.scale,
    )
    loss = model(inputs, rows, [5, 0])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    parameters = model.trained_parameters().items()
    trained_names = [key for key, value in parameters if value.grad is not None]
    assert any(key.startswith("encoder.") for key in trained_names)
    assert "head.contrast.log_scale" in trained_names


# -- dialogues ---------------------------------------------------------------------------------


def test_loss_of_dialogues_matches_cached_features(tiny_bert):
    trainable = make_trainable(tiny_bert)
    settings = {"window": 4, "dropout": 0.0}
    recipe = load_recipe("weighted", "dialogue").with_settings(settings, "test")
    model = TurnModel(trainable.engine, recipe, 5, None).eval()
    tokens = trainable.tokenizer([EncoderInput("", text) for text in TEXTS])
    dialogues = [[k * i % N for k in (1, 3, 4, 7, 11)] for i in range(1, 13)]
    inputs = DialogueInputs(Turns.from_lists(dialogues), tokens, recipe.settings)
    # Three of five turns have at least two turns before them.
    np.testing.assert_array_equal(model.groups(inputs), np.repeat(np.arange(12), 3))
    np.testing.assert_array_equal(inputs.windows(np.array([0]))[0], [-1, *dialogues[0][:3]])
    rows = np.flatnonzero(np.isin(model.groups(inputs), [0, 4, 7]))
    loss = model(inputs, rows, [5, 0])
    used, positions = distinct_utterances(inputs.windows(rows))
    features = torch.nn.functional.normalize(torch.from_numpy(model.vectors(inputs.tokens)))
    rng = np.random.Generator(np.random.SFC64([5, 0]))
    groups = torch.from_numpy(model.groups(inputs)[rows])
    expected = model.head.loss(features[used], torch.from_numpy(positions), rng, groups)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    parameters = model.trained_parameters().items()
    trained_parts = {key.split(".")[0] for key, value in parameters if value.grad is not None}
    assert trained_parts == {"encoder", "head"}


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def train(capsys, graph, model, tmp_path):
    """Return a function that trains an encoder on a graph or on dialogues."""
    data = {"kgc": graph, "dialogue": write_dialogues(tmp_path / "dialogues")}
    options = "--pooling mean --dtype float32 --device cpu --epochs 2 --batch-size 14 --rank 4"

    def call(task, *arguments, command=run_json, verb="train-lora"):
        common = ["--task", task, "--model", model, "--data", data[task], *options.split()]
        common += ["--run", tmp_path / "run"]
        return command(capsys, verb, *change_flags(common, *arguments))

    return call


def check_figures(capsys, trained, head, dev_score):
    """Check that all records have the figures of evaluate, and return summary and fit."""
    summary = json.loads((trained / "training.json").read_text())["summary"]
    assert summary["head"] == head
    assert [scores["split"] for scores in summary["scores"]] == ["dev", "test"]
    for scores in summary["scores"]:
        rows = run_json(capsys, "evaluate", "--run", trained, "--split", scores["split"])["results"]
        assert scores in rows
    record = json.loads((trained / "heads" / head / "head.json").read_text())
    assert record[f"dev_{dev_score}"] == summary["scores"][0][dev_score]
    assert [entry["epoch"] for entry in record["fit"]["curve"]] == [1, 2]
    return summary, record["fit"]


def test_run_trained_on_graph_has_figures_of_evaluate_and_a_card(capsys, train, tmp_path):
    train("kgc", "--head", "hypernet-full")
    trained = tmp_path / "run"
    summary, _ = check_figures(capsys, trained, "hypernet-full@separate", "mrr")
    dev = summary["scores"][0]
    # The graph is so small that the sample which selected the weights holds all of dev.
    assert dev["mrr"] == pytest.approx(summary["dev_score"], abs=1e-4)  # float16 in store
    card = re.sub(" +", " ", (trained / "README.md").read_text())
    assert "| split | queries | MRR | 95 % interval |" in card
    assert f"| dev | {dev['n']} | {100 * dev['mrr']:.1f} |" in card
    assert 'llmcond.load_completer("FOLDER")' in card
    # Heads are fitted on the features of the trained encoder.
    fit = ("fit-head", "--run", trained, "--head", "hypernet-full", "--name", "near")
    run_json(capsys, *fit, "--set", "epochs=3", "batch_size=16", "neighbours=true")
    rows = run_json(capsys, "evaluate", "--run", trained, "--reverse")["results"]
    assert {row["name"]: row["neighbours"] for row in rows}["near"] is True


def test_run_trained_on_dialogues_has_figures_of_evaluate(capsys, train, model, tmp_path):
    train("dialogue", "--head", "weighted", "--batch-size", 32)
    trained = tmp_path / "run"
    summary, fit = check_figures(capsys, trained, "weighted@separate", "average_rank")
    # Few dialogues give few distinct ranks, and stored features are float16.
    score = summary["scores"][0]["average_rank"]
    assert score == pytest.approx(summary["dev_score"], abs=0.1)
    assert min(entry["dev_score"] for entry in fit["curve"]) == summary["dev_score"]
    base = llmcond.load_encoder(model, dtype="float32", pooling="mean")
    item = [llmcond.EncoderInput("", "two men ?")]
    trained_vectors = llmcond.load_encoder(trained).encode(item)
    assert not np.allclose(trained_vectors, base.encode(item), atol=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--head", "linear"),
        ("--head", "matrices"),
        ("--head", "none", "--prompt", "routed"),
        ("--head", "none", "--router", "csr", "--router-layers", "1", "--router-mode", "heavy"),
    ],
    ids=lambda arguments: " ".join(arguments[1::2]),
)
def test_bi_encoders_matrices_and_routers_are_trained(capsys, train, tmp_path, arguments):
    result, folder = train("kgc", *arguments, "--epochs", "1"), tmp_path / "run"
    expected_prompts = {"linear": "concat-sent-cond", "matrices": "separate", "none": "routed"}
    assert result["prompt"] == expected_prompts[arguments[1]]
    # Extraction encodes the inputs as training did; features are stored in float16.
    assert result["scores"][0]["mrr"] == pytest.approx(result["dev_score"], abs=1e-3)
    assert (folder / "router.safetensors").is_file() == ("heavy" in arguments)
    rows = run_json(capsys, "evaluate", "--run", folder)["results"]
    assert result["scores"][-1]["mrr"] in [row["mrr"] for row in rows]


def test_invalid_arguments_are_rejected(train, tmp_path):
    for task, arguments, message in (
        ("dialogue", "", "no head is named"),
        ("dialogue", "--head rank --dim 8", "have the size of the features"),
        ("kgc", "--head hypernet --set neighbours=true", "then fit a head on the features of"),
        ("kgc", "--head linear --set relation_negatives=1", "that reads relations separately"),
        ("kgc", "--head concat --router csr", "the prompt separate names no router"),
    ):
        assert message in train(task, *arguments.split(), command=run_rejected)
        assert not (tmp_path / "run").exists()
    short = write_dialogues(tmp_path / "short")
    (short / "test.txt").write_text("two men ? __eou__ children __eou__\n" * 2)
    options = ("--head", "rank", "--data", short)
    message = train("dialogue", *options, command=run_rejected)
    assert "a history of 2 turns needs at least two longer test dialogues, and of 2" in message
    assert not (tmp_path / "run").exists()
    assert "ranks candidates" in train("kgc", command=run_rejected, verb="train-cross")
