"""Training an encoder with a query head on a graph: loss, dev score, resumption and the run."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from helpers.commands import run_json, run_rejected
from helpers.flags import change_flags
from helpers.training import cpu_accelerator, resume_training

from llmcond.cli import run
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.loop import Trainer, TrainingState
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
TRAIN, DEV = TRIPLES[:60], TRIPLES[60:]
SIZES = {"hypernet": {"rank": 4}, "mlp": {"hidden": 8}}


def make_recipe(name, **changes):
    recipe = load_recipe(name, "kgc")
    sizes = {"dim": 8} if hasattr(recipe.settings, "dim") else {}
    return recipe.with_settings({**sizes, **SIZES.get(name, {}), **changes}, "test")


def make_trainable(tiny_bert, **settings):
    tuning = TuneSettings(rank=4, batch_size=20, checkpoint_steps=2, **settings)
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean")
    return load_trainable(resolve(str(tiny_bert), options), tuning, seed=5), tuning


def make_inputs(trainable):
    """Make the inputs of train and dev, with texts of a head entity and its relation as well."""
    directions = [*RELATIONS, *(f"inverse {text}" for text in RELATIONS)]
    train, all_triples = (both_directions(triples, R) for triples in (TRAIN, TRIPLES))
    keys = np.unique(all_triples[:, 0].astype(np.int64) * 2 * R + all_triples[:, 1])
    joint = [f"{TEXTS[key // (2 * R)]}; {directions[key % (2 * R)]}" for key in keys]
    items = [EncoderInput("", text) for text in (*TEXTS, *directions, *joint)]
    shared = TokenizedInputs.of(items, trainable.tokenizer), keys
    return (
        GraphInputs(TRAIN, R, N, KnownTriples(train, N), *shared),
        GraphInputs(DEV, R, N, KnownTriples(all_triples, N), *shared),
    )


def make_model(tiny_bert, name="hypernet-full", start=None, seed=5, **changes):
    trainable, _ = make_trainable(tiny_bert)
    train, dev = make_inputs(trainable)
    return (
        QueryModel(trainable.engine, make_recipe(name, **changes), train, seed, start),
        train,
        dev,
    )


def encode_arrays(model, inputs):
    """Encode all texts of a graph with the current weights, for heads on cached features."""
    vectors = model.encode(inputs.texts, np.arange(len(inputs.texts)))
    entities, relations, joint = np.split(vectors, [N, N + 2 * R])
    return QueryArrays(entities, inputs.triples, R, inputs.known, relations, joint, inputs.joint_of)


@pytest.mark.parametrize(
    ("name", "negatives"), [("hypernet-full", True), ("hadamard", False), ("linear", True)]
)
def test_loss_matches_cached_features(tiny_bert, name, negatives):
    model, inputs, _ = make_model(tiny_bert, name, self_negatives=negatives, dropout=0.0)
    model.eval()
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


def make_trainer(tiny_bert, folder, name="hypernet-full", changes=(), **settings):
    trainable, tuning = make_trainable(tiny_bert, **settings)
    train, dev = make_inputs(trainable)
    model = QueryModel(trainable.engine, make_recipe(name, **dict(changes)), train, 5)
    state = TrainingState(folder, {"settings": tuning.to_json()})
    return Trainer(model, train, dev, tuning, cpu_accelerator(), state)


def test_resumed_training_is_bit_identical(tiny_bert, tmp_path):
    changes = {"random_candidates": 3, "dropout": 0.2}
    settings = {"epochs": 2, "adapter_dropout": 0.1}
    uninterrupted = make_trainer(tiny_bert, tmp_path / "whole", "hypernet", changes, **settings)
    uninterrupted.run(lambda *_: None)
    expected = uninterrupted.model.trained_parameters()
    for stop in (1, 5):
        folder = tmp_path / str(stop)
        make = partial(make_trainer, tiny_bert, folder, "hypernet", changes, **settings)
        restarted = resume_training(make, stop)
        restarted.run(lambda *_: None)
        assert restarted.progress.curve == uninterrupted.progress.curve
        for key, value in restarted.model.trained_parameters().items():
            assert torch.equal(value, expected[key]), (stop, key)


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
    record_text = (trained / "training.json").read_text()
    summary = json.loads(record_text)["summary"]
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
    message = run_rejected(capsys, "push", "ada/graph", "--run", trained)
    assert "data, which is never pushed" in message
    # The same command trains nothing again.
    run_json(capsys, "train-lora", *arguments)
    assert (trained / "training.json").read_text() == record_text
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
        (("--head", "hypernet", "--set", "queue=2"), "Set queue to 0"),
        (("--head", "linear", "--set", "relation_negatives=1"), "that reads relations separately"),
        (("--head", "linear", "--subtract"), "nothing can be subtracted"),
        (("--head", "concat", "--router", "csr"), "the prompt separate names no router"),
    ):
        command = make_arguments(graph, model, tmp_path / "run", *arguments)
        assert message in run_rejected(capsys, "train-lora", *command)
        assert not (tmp_path / "run").exists()
    message = run_rejected(capsys, "train-cross", *make_arguments(graph, model, tmp_path / "run"))
    assert "ranks candidates" in message
    assert "llmcond train-lora" in message
