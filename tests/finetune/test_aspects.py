"""Training on texts with attributes: the groups that are drawn, their loss, and the command."""

import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import ok, refused

import llmcond
from llmcond.cli import run
from llmcond.conditions import Condition
from llmcond.data.aspects import read_aspect_datasets
from llmcond.errors import UserError
from llmcond.files import digest_file
from llmcond.finetune.aspects import SHAPES, AspectSampler, supervised_contrast
from llmcond.finetune.settings import AspectSettings
from llmcond.progress import TrainBar

pytestmark = pytest.mark.usefixtures("one_thread")

PEOPLE = ["two men", "three women", "children", "two dogs"]
PLACES = ["in the park", "at the beach", "in the kitchen", "on the street"]
VERBS = ["play", "sit", "read", "walk"]


@pytest.fixture(scope="module")
def aspects(tmp_path_factory) -> Path:
    """A folder with one set: people who do something somewhere, every combination once."""
    folder = tmp_path_factory.mktemp("aspects")
    texts = [
        {"text": f"{who} {verb} {where}", "attrs": {"who": who, "where": where, "verb": verb}}
        for who, where, verb in itertools.product(PEOPLE, PLACES, VERBS)
    ]
    conditions = {
        "who": {"text": "the number of people", "question": "who", "para": ["people"]},
        "where": {"text": "the place", "para": ["park or street"]},
    }
    (folder / "scenes.json").write_text(json.dumps({"texts": texts, "conds": conditions}))
    return folder


def groups_of(folder: Path, **settings) -> AspectSampler:
    return AspectSampler(
        read_aspect_datasets(folder), AspectSettings(aspects=str(folder), **settings)
    )


def test_texts_of_a_group_have_a_value_in_common_or_not_as_their_numbers_say(aspects):
    batch = groups_of(aspects, aspects_texts=500, aspects_values=0).sample([0, 1])
    values = {"the number of people": PEOPLE, "who": PEOPLE, "people": PEOPLE}
    values |= {"the place": PLACES, "park or street": PLACES}
    rows = batch.rows
    assert list(rows.sentence1) == list(rows.sentence2)
    assert set(rows.condition) == set(values)
    for group in range(batch.group.max() + 1):
        chosen = np.flatnonzero(batch.group == group)
        assert len({rows.condition[i] for i in chosen}) == 1
        assert len({rows.sentence1[i] for i in chosen}) == len(chosen)
        legal = values[rows.condition[chosen[0]]]
        named = [next(own for own in legal if own in rows.sentence1[i]) for i in chosen]
        for i, j in itertools.combinations(range(len(chosen)), 2):
            assert (batch.value[chosen[i]] == batch.value[chosen[j]]) == (named[i] == named[j])
        sizes = Counter(batch.value[chosen].tolist())
        assert (len(sizes), sizes[0]) in {(min(n, 4), m) for n, m in SHAPES}


def test_texts_of_other_values_share_other_attributes_with_those_of_the_first(aspects):
    batch = groups_of(aspects, aspects_texts=500, aspects_values=0).sample([0, 2])
    texts, shared = batch.rows.sentence1, []
    for i in np.flatnonzero(batch.value > 0):
        first = np.flatnonzero((batch.group == batch.group[i]) & (batch.value == 0))
        values = (*PEOPLE, *PLACES, *VERBS)
        counts = [sum(own in texts[k] and own in texts[i] for own in values) for k in first]
        shared.append(max(counts))
    # Two can be shared. Of texts drawn at random about one in four attributes would be.
    assert np.mean(shared) > 1.6


def test_the_same_seed_draws_the_same_groups(aspects):
    groups = groups_of(aspects)
    first, again, other = groups.sample([0, 1]), groups.sample([0, 1]), groups.sample([0, 2])
    assert first.rows.texts == again.rows.texts
    assert first.value.tolist() == again.value.tolist()
    assert first.rows.texts != other.rows.texts


def test_conditions_name_example_values_as_often_as_asked(aspects):
    named = {}
    for share in (0, 0.5, 1):
        batch = groups_of(aspects, aspects_texts=1800, aspects_values=share).sample([1])
        conditions = dict(zip(batch.group.tolist(), batch.rows.condition, strict=True))
        named[share] = [own for own in conditions.values() if isinstance(own, Condition)]
        count = len(conditions)
    assert not named[0]
    assert 0.35 * count < len(named[0.5]) < 0.65 * count
    assert len(named[1]) == count
    examples = [own.values for own in named[1]]
    assert {len(own) for own in examples} == {2, 3, 4}
    assert all(set(own) <= set(PEOPLE) or set(own) <= set(PLACES) for own in examples)


def test_the_loss_compares_texts_of_one_group_only():
    vectors = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0.6, 0.8], [0.8, 0.6]])
    group, value = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 0, 0])
    loss = supervised_contrast(3 * vectors, group, value, temperature=0.5)
    # The first two are each other's positives, beside one negative; the last two have no negative.
    expected = math.log(math.exp(2) + 1) - 2
    assert float(loss) == pytest.approx(expected * 2 / 4, abs=1e-6)


def test_the_loss_of_copies_of_one_vector_is_that_of_chance():
    vectors = torch.ones(6, 4)
    value = torch.tensor([0, 0, 1, 2, 3, 4])
    loss = supervised_contrast(vectors, torch.zeros(6), value, temperature=0.07)
    assert float(loss) == pytest.approx(math.log(5), abs=1e-5)


# -- the command -------------------------------------------------------------------------------

PLAIN = "--head none --pooling mean --dtype float32 --rank full --batch-size 20 --epochs 2"


@pytest.fixture(scope="module")
def command(tiny_checkpoint, small_rows, aspects, tmp_path_factory) -> list[str]:
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    given = ["train-lora", "--model", str(tiny_checkpoint()), "--data", str(data)]
    return [*given, *PLAIN.split(), "--aspects", str(aspects), "--aspects-texts", "24"]


def test_training_on_aspects_resumes_bit_equal_and_is_recorded(
    command, aspects, tmp_path, monkeypatch, capsys
):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    record = ok(capsys, *command, "--checkpoint-steps", "1", "--run", whole)
    assert record["aspects"] == ["scenes"]
    made_of = json.loads((whole / "training.json").read_text())["made_of"]["aspects"]
    assert made_of["aspects"] == {"scenes": digest_file(aspects / "scenes.json")}
    assert made_of["aspects_texts"] == 24
    card = (whole / "README.md").read_text()
    assert "Each step also used 24 texts with known attributes" in card
    assert "from the sets `scenes`." in card

    class Stopped(Exception):  # noqa: N818 - it stands for a kill
        pass

    def stop(_, done, *__):
        if done.step == 2:
            raise Stopped

    monkeypatch.setattr(TrainBar, "on_step", stop)
    with pytest.raises(Stopped):
        run([*command, "--checkpoint-steps", "1", "--run", str(stopped)])
    monkeypatch.undo()
    ok(capsys, *command, "--checkpoint-steps", "1", "--run", stopped)
    name = "model.safetensors"
    assert digest_file(whole / name) == digest_file(stopped / name)
    without = tmp_path / "without"
    ok(capsys, *command[: command.index("--aspects")], "--run", without)
    assert digest_file(whole / name) != digest_file(without / name)


def test_training_lowers_the_contrastive_loss(command, tmp_path, capsys):
    options = "--epochs 12 --learning-rate 5e-3 --aspects-weight 1 --aspects-texts 96"
    options += " --early-stopping-patience 12"
    ok(capsys, *command, *options.split(), "--run", tmp_path / "run")
    curve = json.loads((tmp_path / "run" / "training.json").read_text())["curve"]
    losses = [entry["loss"] for entry in curve]
    # That of ratings is below 0.4 from the first epoch on.
    assert losses[-1] < losses[0] - 0.5, losses


def test_mistakes_are_told(command, aspects, tmp_path, capsys):
    base = command[: command.index("--aspects")]

    def said(*given: object) -> str:
        return refused(capsys, *base, "--run", tmp_path / "run", *given)

    assert said("--aspects-texts", 30) == (
        "--aspects-texts needs --aspects FOLDER. Add it, or leave out --aspects-texts."
    )
    assert "contains no dataset" in said("--aspects", tmp_path)
    assert "--aspects-texts is 3; it must be at least 4" in said(
        "--aspects", aspects, "--aspects-texts", 3
    )
    (tmp_path / "odd").mkdir()
    single = {"texts": [{"text": "a", "attrs": {"c": 1}}], "conds": {"c": "the c"}}
    (tmp_path / "odd" / "one.json").write_text(json.dumps(single))
    assert "nothing to learn from" in said("--aspects", tmp_path / "odd")
    shutil.rmtree(tmp_path / "odd")
    with pytest.raises(UserError, match="for rated pairs, and the task kgc has none"):
        llmcond.train_lora(model="minilm", head="linear", task="kgc", aspects=aspects)
