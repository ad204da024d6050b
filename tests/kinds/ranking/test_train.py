"""Training an encoder with a query head on a graph: loss, dev score, resumption and the run."""

import json
import re

import numpy as np
import pytest
import torch
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags

from llmcond.cli import run
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.model import TokenizedInputs
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.kinds.ranking.graph import KnownTriples, both_directions
from llmcond.kinds.ranking.heads import QueryArrays, contrastive
from llmcond.kinds.ranking.train import GraphInputs, QueryModel

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = "men play park dogs run beach place mood women read book red blue old new tall".split()
TEXTS = [f"two {first} {second}" for first in WORDS[:8] for second in WORDS[8:11]]
RELATIONS = ["the place", "the mood", "the number of people"]
N, R = len(TEXTS), len(RELATIONS)
STEPS = [1, 5, 11]
TRIPLES = np.array([(i, r, (i + s) % N) for i in range(N) for r, s in enumerate(STEPS)], np.int32)
TRAIN = TRIPLES[:60]
SIZES = {"hypernet": {"rank": 4}, "mlp": {"hidden": 8}}


def make_recipe(name, **changes):
    recipe = load_recipe(name, "kgc")
    sizes = {"dim": 8} if hasattr(recipe.settings, "dim") else {}
    return recipe.with_settings({**sizes, **SIZES.get(name, {}), **changes}, "test")


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
    ("name", "negatives"), [("hypernet-full", True), ("hadamard", False), ("linear", True)]
)
def test_loss_matches_cached_features(tiny_bert, name, negatives):
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean")
    trainable = load_trainable(resolve(str(tiny_bert), options), TuneSettings(rank=4), seed=5)
    inputs = make_inputs(trainable)
    recipe = make_recipe(name, self_negatives=negatives, dropout=0.0)
    model = QueryModel(trainable.engine, recipe, inputs, 5, None).eval()
    rows = np.array([0, 4, 5, 30, 59])
    queries = both_directions(TRAIN[rows], R)
    head, relation, tail = queries.T
    fitted = model.fitted_head().bind(encode_arrays(model, inputs))
    scores = torch.from_numpy(fitted.queries(head, relation) @ fitted.candidates()[:].T)
    used = np.unique(tail)
    mask = inputs.known.mask(head, relation, used)
    if not negatives:
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
    trained_names = [
        name for name, value in model.trained_parameters().items() if value.grad is not None
    ]
    assert any(name.startswith("encoder.") for name in trained_names)
    assert "head.contrast.log_scale" in trained_names


# -- the command --------------------------------------------------------------------------------

OPTIONS = "--pooling mean --dtype float32 --device cpu --epochs 2 --batch-size 14 --rank 4"


def make_arguments(graph, model, folder, *arguments):
    common = ["--task", "kgc", "--model", model, "--data", graph, "--run", folder, *OPTIONS.split()]
    return list(map(str, change_flags(common, *arguments)))


def test_trained_run_has_figures_of_evaluate_and_a_card(capsys, graph, model, tmp_path):
    trained = tmp_path / "run"
    arguments = make_arguments(graph, model, trained, "--head", "hypernet-full")
    assert run(["train-lora", *arguments]) == 0
    capsys.readouterr()
    summary = json.loads((trained / "training.json").read_text())["summary"]
    assert summary["head"] == "hypernet-full@separate"
    assert [scores["split"] for scores in summary["scores"]] == ["dev", "test"]
    for scores in summary["scores"]:
        rows = run_json(capsys, "evaluate", "--run", trained, "--split", scores["split"])["results"]
        assert scores in rows
    dev = summary["scores"][0]
    record = json.loads((trained / "heads/hypernet-full@separate/head.json").read_text())
    # The graph is so small that the sample which selected the weights holds all of dev.
    assert record["dev_mrr"] == dev["mrr"]
    assert record["dev_mrr"] == pytest.approx(summary["dev_score"], abs=1e-4)  # float16 in store
    assert [entry["epoch"] for entry in record["fit"]["curve"]] == [1, 2]
    card = re.sub(" +", " ", (trained / "README.md").read_text())
    assert "| split | queries | MRR | 95 % interval |" in card
    assert f"| dev | {dev['n']} | {100 * dev['mrr']:.1f} |" in card
    assert 'llmcond.load_completer("FOLDER")' in card
    # Heads are fitted on the features of the trained encoder.
    fit = ("fit-head", "--run", trained, "--head", "hypernet-full", "--name", "near")
    run_json(capsys, *fit, "--set", "epochs=3", "batch_size=16", "neighbours=true")
    rows = run_json(capsys, "evaluate", "--run", trained, "--reverse")["results"]
    assert {row["name"]: row["neighbours"] for row in rows}["near"] is True


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
def test_bi_encoders_matrices_and_routers_are_trained(capsys, graph, model, tmp_path, arguments):
    folder = tmp_path / "run"
    training = make_arguments(graph, model, folder, *arguments, "--epochs", "1")
    result = run_json(capsys, "train-lora", *training)
    expected_prompts = {"linear": "concat-sent-cond", "matrices": "separate", "none": "routed"}
    assert result["prompt"] == expected_prompts[arguments[1]]
    # Extraction encodes the inputs as training did; features are stored in float16.
    assert result["scores"][0]["mrr"] == pytest.approx(result["dev_score"], abs=1e-3)
    assert (folder / "router.safetensors").is_file() == ("heavy" in arguments)
    rows = run_json(capsys, "evaluate", "--run", folder)["results"]
    assert result["scores"][-1]["mrr"] in [row["mrr"] for row in rows]


def test_invalid_arguments_are_rejected(capsys, graph, model, tmp_path):
    for arguments, message in (
        ((), "no head is named"),
        (("--head", "hypernet", "--set", "neighbours=true"), "then fit a head on the features of"),
        (("--head", "linear", "--set", "relation_negatives=1"), "that reads relations separately"),
        (("--head", "concat", "--router", "csr"), "the prompt separate names no router"),
    ):
        command = make_arguments(graph, model, tmp_path / "run", *arguments)
        assert message in run_rejected(capsys, "train-lora", *command)
        assert not (tmp_path / "run").exists()
    message = run_rejected(capsys, "train-cross", *make_arguments(graph, model, tmp_path / "run"))
    assert "ranks candidates" in message
