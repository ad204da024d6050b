"""Training on texts with attributes: sampled groups, the contrastive loss, and the command."""

import itertools
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.cli import run
from llmcond.conditions import Condition
from llmcond.data.aspects import read_aspect_datasets
from llmcond.errors import UserError
from llmcond.files import digest_file
from llmcond.finetune.model import SHAPES, AspectSampler, supervised_contrast
from llmcond.finetune.settings import AspectSettings
from llmcond.progress import FitBar

pytestmark = pytest.mark.usefixtures("one_thread")

PEOPLE = ["two men", "three women", "children", "two dogs"]
LOCATIONS = ["in the park", "at the beach", "in the kitchen", "on the street"]
VERBS = ["play", "sit", "read", "walk"]


@pytest.fixture(scope="module")
def aspects(tmp_path_factory) -> Path:
    """A folder with one dataset, which has every combination of people, verb and location once."""
    folder = tmp_path_factory.mktemp("aspects")
    texts = [
        {"text": f"{who} {verb} {location}", "attrs": {"who": who, "where": location, "verb": verb}}
        for who, location, verb in itertools.product(PEOPLE, LOCATIONS, VERBS)
    ]
    conditions = {
        "who": {"text": "the number of people", "question": "who", "para": ["people"]},
        "where": {"text": "the place", "para": ["park or street"]},
    }
    (folder / "scenes.json").write_text(json.dumps({"texts": texts, "conds": conditions}))
    return folder


def build_sampler(folder: Path, **settings) -> AspectSampler:
    return AspectSampler(
        read_aspect_datasets(folder), AspectSettings(aspects=str(folder), **settings)
    )


def test_value_numbers_match_attribute_values_in_each_group(aspects):
    batch = build_sampler(aspects, aspects_texts=500, aspects_values=0).sample([0, 1])
    legal_values = {"the number of people": PEOPLE, "who": PEOPLE, "people": PEOPLE}
    legal_values |= {"the place": LOCATIONS, "park or street": LOCATIONS}
    rows = batch.rows
    assert list(rows.sentence1) == list(rows.sentence2)
    assert set(rows.condition) == set(legal_values)
    for group in range(batch.group.max() + 1):
        members = np.flatnonzero(batch.group == group)
        assert len({rows.condition[i] for i in members}) == 1
        assert len({rows.sentence1[i] for i in members}) == len(members)
        group_values = legal_values[rows.condition[members[0]]]
        member_values = [
            next(value for value in group_values if value in rows.sentence1[i]) for i in members
        ]
        for i, j in itertools.combinations(range(len(members)), 2):
            assert (batch.value[members[i]] == batch.value[members[j]]) == (
                member_values[i] == member_values[j]
            )
        sizes = Counter(batch.value[members].tolist())
        assert (len(sizes), sizes[0]) in {(min(n, 4), m) for n, m in SHAPES}


def test_negatives_share_other_attributes_with_positives(aspects):
    batch = build_sampler(aspects, aspects_texts=500, aspects_values=0).sample([0, 2])
    texts, shared = batch.rows.sentence1, []
    for i in np.flatnonzero(batch.value > 0):
        first = np.flatnonzero((batch.group == batch.group[i]) & (batch.value == 0))
        values = (*PEOPLE, *LOCATIONS, *VERBS)
        counts = [sum(value in texts[k] and value in texts[i] for value in values) for k in first]
        shared.append(max(counts))
    # At most two attributes can be shared. Random texts would share about one in four.
    assert np.mean(shared) > 1.6


def test_share_of_conditions_with_values_follows_setting(aspects):
    for share in (0, 0.5, 1):
        sampler = build_sampler(aspects, aspects_texts=900, aspects_values=share)
        batch = sampler.sample([1])
        conditions = dict(zip(batch.group.tolist(), batch.rows.condition, strict=True)).values()
        values = [condition.values for condition in conditions if isinstance(condition, Condition)]
        assert abs(len(values) / len(conditions) - share) <= (0.15 if share == 0.5 else 0)
        assert all(set(each) <= set(PEOPLE) or set(each) <= set(LOCATIONS) for each in values)
    assert {len(each) for each in values} == {2, 3, 4}
    assert sampler.sample([1]).rows.texts == batch.rows.texts != sampler.sample([2]).rows.texts


def test_loss_compares_texts_within_groups_only():
    vectors = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0.6, 0.8], [0.8, 0.6]])
    group, value = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 1, 0, 0])
    loss = supervised_contrast(3 * vectors, group, value, temperature=0.5)
    # The first two are each other's positives and have one negative; the last two have none.
    expected = math.log(math.exp(2) + 1) - 2
    assert float(loss) == pytest.approx(expected * 2 / 4, abs=1e-6)
    # Identical vectors have the loss of a random choice.
    value = torch.tensor([0, 0, 1, 2, 3, 4])
    loss = supervised_contrast(torch.ones(6, 4), torch.zeros(6), value, temperature=0.07)
    assert float(loss) == pytest.approx(math.log(5), abs=1e-5)


# -- the command -------------------------------------------------------------------------------

PLAIN = "--head none --pooling mean --dtype float32 --rank full --batch-size 20 --epochs 2"


@pytest.fixture(scope="module")
def command(tiny_checkpoint, small_rows, aspects, tmp_path_factory) -> list[str]:
    data = tmp_path_factory.mktemp("data") / "rows.csv"
    lines = ["sentence1,sentence2,condition,label"]
    lines += [",".join(str(value) for value in row) for row in small_rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = ["train-lora", "--model", str(tiny_checkpoint()), "--data", str(data)]
    return [*arguments, *PLAIN.split(), "--aspects", str(aspects), "--aspects-texts", "24"]


def test_training_on_aspects_resumes_bit_equal_and_is_recorded(
    command, aspects, tmp_path, monkeypatch, capsys
):
    uninterrupted, stopped = tmp_path / "whole", tmp_path / "stopped"
    summary = run_json(capsys, *command, "--checkpoint-steps", "1", "--run", uninterrupted)
    assert summary["aspects"] == ["scenes"]
    config = json.loads((uninterrupted / "training.json").read_text())["made_of"]["aspects"]
    assert config["aspects"] == {"scenes": digest_file(aspects / "scenes.json")}
    assert config["aspects_texts"] == 24
    assert llmcond.load_embedder(uninterrupted).fitted_on.endswith(
        "rows.csv and texts of 1 dataset"
    )
    card = (uninterrupted / "README.md").read_text()
    assert "Each step also used 24 texts with known attributes" in card
    assert "They are from 1 dataset, which the training record below names." in card

    class Stopped(Exception):  # noqa: N818 - it stands in for a kill
        pass

    def stop(_, done, *__):
        if done.step == 2:
            raise Stopped

    monkeypatch.setattr(FitBar, "on_step", stop)
    with pytest.raises(Stopped):
        run([*command, "--checkpoint-steps", "1", "--run", str(stopped)])
    monkeypatch.undo()
    run_json(capsys, *command, "--checkpoint-steps", "1", "--run", stopped)
    weights = "model.safetensors"
    assert digest_file(uninterrupted / weights) == digest_file(stopped / weights)
    without = tmp_path / "without"
    run_json(capsys, *command[: command.index("--aspects")], "--run", without)
    assert digest_file(uninterrupted / weights) != digest_file(without / weights)


def test_invalid_aspects_are_rejected(command, aspects, tmp_path, capsys):
    base = command[: command.index("--aspects")]

    def get_error(*options: object) -> str:
        return run_rejected(capsys, *base, "--run", tmp_path / "run", *options)

    assert get_error("--aspects-texts", 30) == (
        "--aspects-texts needs --aspects FOLDER. Add it, or leave out --aspects-texts."
    )
    assert "contains no dataset" in get_error("--aspects", tmp_path)
    assert "--aspects-texts is 3; it must be at least 4" in get_error(
        "--aspects", aspects, "--aspects-texts", 3
    )
    (tmp_path / "odd").mkdir()
    single = {"texts": [{"text": "a", "attrs": {"c": 1}}], "conds": {"c": "the c"}}
    (tmp_path / "odd" / "one.json").write_text(json.dumps(single))
    assert "nothing to learn from" in get_error("--aspects", tmp_path / "odd")
    shutil.rmtree(tmp_path / "odd")
    with pytest.raises(UserError, match="for rated pairs, and the task kgc has none"):
        llmcond.train_lora(model="minilm", head="linear", task="kgc", aspects=aspects)
