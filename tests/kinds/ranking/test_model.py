"""An encoder trained on a graph, with a head that maps queries: its loss, its score, resumption."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers.training import alone, on_cpu, resumed

from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.errors import UserError
from llmcond.finetune.loading import load_trainable
from llmcond.finetune.loop import Trainer
from llmcond.finetune.settings import TuneSettings
from llmcond.finetune.state import TrainingState
from llmcond.heads import load_recipe
from llmcond.kinds.ranking.arrays import QueryArrays
from llmcond.kinds.ranking.contrastive import contrastive
from llmcond.kinds.ranking.fit import fit_queries
from llmcond.kinds.ranking.graph import KnownTriples, both_directions
from llmcond.kinds.ranking.model import GraphInputs, QueryModel

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = "men play park dogs run beach place mood women read book red blue old new tall".split()
TEXTS = [f"two {first} {second}" for first in WORDS[:8] for second in WORDS[8:11]]
RELATIONS = ["the place", "the mood", "the number of people"]
N, R = len(TEXTS), len(RELATIONS)
STEPS = [1, 5, 11]
TRIPLES = np.array([(i, r, (i + s) % N) for i in range(N) for r, s in enumerate(STEPS)], np.int32)
TRAIN, DEV = TRIPLES[:60], TRIPLES[60:]
SIZES = {"hypernet": {"rank": 4}, "mlp": {"hidden": 8}}


def recipe(name, **changes):
    made = load_recipe(name, "kgc")
    sizes = {"dim": 8} if hasattr(made.settings, "dim") else {}
    return made.with_settings({**sizes, **SIZES.get(name, {}), **changes}, "test")


def trainable_of(tiny, **settings):
    tuning = TuneSettings(rank=4, batch_size=20, checkpoint_steps=2, **settings)
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean")
    return load_trainable(resolve(str(tiny), options), tuning, seed=5), tuning


def inputs_of(trainable):
    """Train and dev, as a model takes them; each head with its relation as one text, too."""

    def tokens(texts):
        return trainable.tokenizer([EncoderInput("", text) for text in texts])

    directions = [*RELATIONS, *(f"inverse {text}" for text in RELATIONS)]
    train, every = (both_directions(own, R) for own in (TRAIN, TRIPLES))
    keys = np.unique(every[:, 0].astype(np.int64) * 2 * R + every[:, 1])
    joint = tokens([f"{TEXTS[key // (2 * R)]}; {directions[key % (2 * R)]}" for key in keys])
    given = tokens(TEXTS), tokens(directions), joint, keys
    return (
        GraphInputs(TRAIN, R, KnownTriples(train, N), *given),
        GraphInputs(DEV, R, KnownTriples(every, N), *given),
    )


def model_of(tiny, name="hypernet-full", start=None, seed=5, **changes):
    trainable, _ = trainable_of(tiny)
    train, dev = inputs_of(trainable)
    return QueryModel(trainable.engine, recipe(name, **changes), train, seed, start), train, dev


def arrays_of(model, inputs):
    """All texts of a graph as they are encoded now, for heads on cached features."""
    entities, relations, joint = (
        model.vectors(own) for own in (inputs.entities, inputs.relations, inputs.joint)
    )
    return QueryArrays(entities, inputs.triples, R, inputs.known, relations, joint, inputs.joint_of)


@pytest.mark.parametrize("name", ["hypernet-full", "hypernet", "matrices", "hadamard", "linear"])
@pytest.mark.parametrize("negatives", [True, False])
def test_the_loss_is_that_of_all_texts_encoded_at_once(tiny, name, negatives):
    model, inputs, _ = model_of(tiny, name, self_negatives=negatives, dropout=0.0)
    model.eval()
    rows = np.array([0, 4, 5, 30, 59])
    queries = both_directions(TRAIN[rows], R)
    head, relation, tail = queries.T
    fitted = model.fitted_head().bind(arrays_of(model, inputs))
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
    reached = [name for name, value in model.trained_parameters().items() if value.grad is not None]
    assert any(name.startswith("encoder.") for name in reached)
    assert "head.contrast.log_scale" in reached


def test_random_entities_and_other_relations_are_drawn_by_the_seed(tiny):
    changes = {"random_candidates": 9, "relation_negatives": 2, "dropout": 0.0}
    model, inputs, _ = model_of(tiny, **changes)
    plain = model_of(tiny, dropout=0.0)[0]
    rows = np.arange(6)
    losses = [float(model(inputs, rows, seed).detach()) for seed in ([5, 0], [5, 0], [5, 1])]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] > float(plain(inputs, rows, [5, 0]).detach())


@pytest.mark.parametrize("name", ["hypernet-full", "matrices", "linear"])
def test_the_score_is_the_filtered_mrr_on_dev(tiny, name):
    model, _, dev = model_of(tiny, name)
    fitted = model.fitted_head().bind(arrays_of(model, dev))
    reciprocal = []
    for h, r, t in both_directions(DEV, R):
        scores = fitted.queries([h], [r])[0] @ fitted.candidates()[:].T
        others = np.ones(N, dtype=bool)
        others[dev.known.gather([h], [r])[1]] = False
        above, level = (scores[others] > scores[t]).sum(), (scores[others] == scores[t]).sum()
        reciprocal.append(1 / (1 + above + level / 2))
    assert model.score(dev, alone) == pytest.approx(np.mean(reciprocal), abs=1e-6)


def test_a_sample_of_dev_is_scored_among_a_sample_of_entities(tiny, monkeypatch):
    monkeypatch.setattr("llmcond.kinds.ranking.model._DEV_TRIPLES", 3)
    monkeypatch.setattr("llmcond.kinds.ranking.model._DEV_CANDIDATES", 5)
    model, _, dev = model_of(tiny)
    encoded = []

    def shared(n, compute):
        encoded.append(n)
        return alone(n, compute)

    whole = model_of(tiny)[0].score(replace(dev), shared)
    assert encoded[0] <= 3 * 2 + 5 + 2 * R
    assert whole == model.score(dev, shared)  # always the same ones
    assert 0 < whole <= 1


def trainer_of(tiny, folder, name="hypernet-full", changes=(), **settings):
    trainable, tuning = trainable_of(tiny, **settings)
    train, dev = inputs_of(trainable)
    model = QueryModel(trainable.engine, recipe(name, **dict(changes)), train, 5)
    state = TrainingState(folder, {"settings": tuning.to_json()})
    return Trainer(model, train, dev, tuning, on_cpu(), state)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("hypernet", {"random_candidates": 3, "dropout": 0.2}), ("linear", {})],
)
def test_stopped_after_any_step_it_ends_bit_equal(tiny, tmp_path, name, changes):
    settings = {"epochs": 2, "adapter_dropout": 0.1}
    whole = trainer_of(tiny, tmp_path / "whole", name, changes, **settings)
    whole.run(lambda *_: None)
    expected = {key: value.clone() for key, value in whole.model.head.state_dict().items()}
    expected |= {key: value.clone() for key, value in whole.model.trained_parameters().items()}
    for stop in (1, 3, 5):
        again = resumed(
            partial(trainer_of, tiny, tmp_path / str(stop), name, changes, **settings), stop
        )
        assert again.progress.step < stop
        again.run(lambda *_: None)
        assert again.progress.curve == whole.progress.curve
        for key, value in (
            again.model.head.state_dict() | again.model.trained_parameters()
        ).items():
            assert torch.equal(value, expected[key]), (stop, key)


@pytest.mark.parametrize("name", ["hypernet-full", "none"])
def test_it_learns_and_keeps_the_best(tiny, tmp_path, name):
    given = {"epochs": 6, "learning_rate": 5e-3, "encoder_dropout": False}
    trainer = trainer_of(tiny, tmp_path / "run", name, **given)
    trainer.run(lambda *_: None)
    curve = trainer.progress.curve
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.2
    assert trainer.progress.best_score == max(entry["dev_score"] for entry in curve)
    trainer.load_best_weights()
    assert trainer.model.score(trainer._dev, alone) == trainer.progress.best_score


def test_it_begins_from_a_head_on_cached_features(tiny):
    model, inputs, dev = model_of(tiny)
    arrays = arrays_of(model, inputs)
    changed = {"epochs": 3, "batch_size": 30}
    fitted = fit_queries(recipe("hypernet-full", **changed), arrays, None, 0, lambda *_: None)
    begun = model_of(tiny, start=fitted)[0]
    for name, value in fitted.module.state_dict().items():
        assert torch.equal(begun.head.state_dict()[name], value)
    on_all = fitted.bind(arrays_of(begun, dev))
    rows = both_directions(DEV, R)
    scores = on_all.queries(rows[:, 0], rows[:, 1]) @ on_all.candidates()[:].T
    own = scores[np.arange(len(rows)), rows[:, 2]][:, None]
    left = ~dev.known.mask(rows[:, 0], rows[:, 1], np.arange(N))
    expected = float((1 / (1 + ((scores > own) & left).sum(1))).mean())
    assert begun.score(dev, alone) == pytest.approx(expected, abs=1e-6)
    narrow = replace(inputs, n_relations=2)
    with pytest.raises(UserError, match=r"the graph has 2 relations; this .* was fitted on 3"):
        QueryModel(model.engine, recipe("hypernet-full"), narrow, 0, fitted)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "hypernet",
            {"neighbours": True},
            "then fit a head on the features of the trained encoder",
        ),
        ("hypernet", {"queue": 2}, "Set queue to 0, and raise --batch-size"),
        ("linear", {"relation_negatives": 1}, "needs a head that reads relations separately"),
    ],
)
def test_what_needs_cached_features_is_refused(tiny, name, changes, told):
    with pytest.raises(UserError, match=told):
        model_of(tiny, name, **changes)
