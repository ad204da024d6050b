"""Training an encoder with a roles head on dialogues: loss, dev score and resumption."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.training import compute_alone, cpu_accelerator, resume_training

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.errors import UserError
from llmcond.finetune.encoder import load_trainable
from llmcond.finetune.loop import Trainer, TrainingState
from llmcond.finetune.settings import TuneSettings
from llmcond.heads import load_recipe
from llmcond.kinds.dialogue.data import Turns
from llmcond.kinds.dialogue.heads import TurnArrays, distinct_utterances, fit_turns
from llmcond.kinds.dialogue.train import DialogueInputs, TurnModel

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = "men play park dogs run beach place mood women read book red blue old new tall".split()
TEXTS = [f"two {first} {second}" for first in WORDS[:6] for second in WORDS[8:12]]
N = len(TEXTS)
#: Dialogues of five different utterances, each of which follows from the two before it.
DIALOGUES = [[k * i % N for k in (1, 3, 4, 7, 11)] for i in range(1, 60) if i % 2 and i % 3]
TRAIN, DEV = Turns.from_lists(DIALOGUES[:12]), Turns.from_lists(DIALOGUES[12:])


def make_recipe(name, **changes):
    sizes = {"window": 4} if name != "none" else {}
    return load_recipe(name, "dialogue").with_settings({**sizes, **changes}, "test")


def make_model(tiny_bert, name="weighted", start=None, tuning=None, **changes):
    settings = tuning or TuneSettings(rank=4)
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean")
    trainable = load_trainable(resolve(str(tiny_bert), options), settings, seed=5)
    model = TurnModel(trainable.engine, make_recipe(name, **changes), 5, start)
    tokens = trainable.tokenizer([EncoderInput("", text) for text in TEXTS])
    inputs = (DialogueInputs(turns, tokens, model.head.settings) for turns in (TRAIN, DEV))
    return model, *inputs


@pytest.mark.parametrize("name", ["none", "ccl", "c3l-paper", "rank", "weighted"])
def test_loss_matches_cached_features(tiny_bert, name):
    model, inputs, _ = make_model(tiny_bert, name, dropout=0.0)
    model.eval()
    rows = np.flatnonzero(np.isin(model.groups(inputs), [0, 4, 7]))
    encoded, embed = [], model.engine.embed
    model.engine.embed = lambda tokens: encoded.append(len(tokens)) or embed(tokens)
    loss = model(inputs, rows, [5, 0])
    used, positions = distinct_utterances(inputs.windows(rows))
    assert encoded == [len(used)]
    features = torch.nn.functional.normalize(torch.from_numpy(model.vectors(inputs.tokens)))
    rng = np.random.Generator(np.random.SFC64([5, 0]))
    groups = torch.from_numpy(model.groups(inputs)[rows])
    expected = model.head.loss(features[used], torch.from_numpy(positions), rng, groups)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    trained_keys = [
        key for key, value in model.trained_parameters().items() if value.grad is not None
    ]
    assert any(key.startswith("encoder.") for key in trained_keys)
    assert (name == "none") == (not any(key.startswith("head.") for key in trained_keys))


def test_windows_are_grouped_by_dialogue(tiny_bert):
    model, inputs, _ = make_model(tiny_bert)
    # Three of five turns have at least two turns before them.
    assert len(inputs) == 3 * len(TRAIN)
    np.testing.assert_array_equal(model.groups(inputs), np.repeat(np.arange(12), 3))
    np.testing.assert_array_equal(inputs.windows(np.array([0]))[0], [-1, *DIALOGUES[0][:3]])


@pytest.mark.parametrize("name", ["none", "rank", "weighted"])
def test_score_is_average_rank_on_dev(tiny_bert, name):
    model, _, dev = make_model(tiny_bert, name)
    vectors = model.vectors(dev.tokens)
    head = model.fitted_head()
    after, means = head.after(vectors), []
    for h in (2, 3, 4):
        answers, ranks = [d[h] for d in DIALOGUES[12:]], []
        for dialogue in DIALOGUES[12:]:
            scores = head.start(vectors[dialogue[:h]]).scores(after[answers])
            answer_score = scores[answers.index(dialogue[h])]
            above, tied = (
                (scores > answer_score + 1e-6).sum(),
                (abs(scores - answer_score) < 1e-6).sum(),
            )
            ranks.append(above + (tied + 1) / 2)
        means.append(np.mean(ranks))
    assert model.score(dev, compute_alone) == pytest.approx(np.mean(means), abs=1e-6)


def make_trainer(tiny_bert, folder, name="weighted", changes=(), **settings):
    tuning = TuneSettings(rank=4, **{"batch_size": 12, "checkpoint_steps": 2, **settings})
    model, train, dev = make_model(tiny_bert, name, tuning=tuning, **dict(changes))
    state = TrainingState(folder, {"settings": tuning.to_json()})
    return Trainer(model, train, dev, tuning, cpu_accelerator(), state)


@pytest.mark.parametrize(
    ("name", "changes"),
    # The loss of ccl does not use all roles, so that some weights have no optimizer state.
    [("ccl", {}), ("c3l-released", {"dropout": 0.2}), ("weighted", {"map": "mlp"})],
)
def test_resumed_training_is_bit_identical(tiny_bert, tmp_path, name, changes):
    settings = {"epochs": 2, "adapter_dropout": 0.1}
    uninterrupted = make_trainer(tiny_bert, tmp_path / "whole", name, changes, **settings)
    uninterrupted.run(lambda *_: None)
    assert uninterrupted.steps == (8 if name == "ccl" else 6)
    expected = {
        key: value.clone() for key, value in uninterrupted.model.trained_parameters().items()
    }
    for stop in (1, 5):  # before the first checkpoint, and after one within an epoch
        restarted = resume_training(
            partial(make_trainer, tiny_bert, tmp_path / str(stop), name, changes, **settings), stop
        )
        assert restarted.progress.step == stop - 1
        restarted.run(lambda *_: None)
        assert restarted.progress.curve == uninterrupted.progress.curve
        for key, value in restarted.model.trained_parameters().items():
            assert torch.equal(value, expected[key]), (stop, key)


@pytest.mark.parametrize("name", ["weighted", "none"])
def test_training_reduces_loss_and_restores_best_weights(tiny_bert, tmp_path, name):
    settings = {"epochs": 6, "learning_rate": 5e-3, "encoder_dropout": False, "batch_size": 18}
    trainer = make_trainer(tiny_bert, tmp_path / "run", name, {"learning_rate": 1e-2}, **settings)
    trainer.run(lambda *_: None)
    curve = trainer.progress.curve
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.1
    assert trainer.progress.best_score == min(entry["dev_score"] for entry in curve)
    trainer.load_best_weights()
    assert trainer.model.score(trainer._dev, compute_alone) == trainer.progress.best_score


def test_training_starts_from_head_on_cached_features(tiny_bert):
    model, inputs, _ = make_model(tiny_bert)
    arrays = TurnArrays(model.vectors(inputs.tokens), TRAIN.utterances, TRAIN.starts)
    recipe = make_recipe("weighted", epochs=2, batch_size=20)
    fitted = fit_turns(recipe, arrays, None, 0, lambda *_: None)
    started = make_model(tiny_bert, start=fitted)[0]
    for name, value in fitted.module.state_dict().items():
        assert torch.equal(started.head.state_dict()[name], value)
    narrow_arrays = TurnArrays(arrays.utterances[:, :8], TRAIN.utterances, TRAIN.starts)
    narrow_head = fit_turns(recipe, narrow_arrays, None, 0, lambda *_: None)
    with pytest.raises(UserError, match="of b1, it has the shape 8x8, and the new head"):
        make_model(tiny_bert, start=narrow_head)
    with pytest.raises(UserError, match="the head mlp does not map utterances to roles"):
        TurnModel(model.engine, load_recipe("mlp"), 0)
