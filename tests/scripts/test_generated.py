"""Generated files are valid: bundled data and models, credits, the memory table, word counts."""

import runpy
import shutil
import sys
from dataclasses import replace

import make_pretrained
import memory_table
import numpy as np
import prose
import pytest
import torch
from helpers.paths import ROOT
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr

from llmcond import load_embedder
from llmcond.base.arrays import cosine
from llmcond.base.files import read_json
from llmcond.base.package import bundled_folder
from llmcond.data.datasets import read_dataset
from llmcond.encoders.adapter import (
    CARD,
    TRAINING_RECORD,
    WEIGHTS,
    read_encoder_record,
    write_encoder_record,
)
from llmcond.encoders.spec import EncoderInput
from llmcond.runs import open_any_run


def test_neither_condition_nor_sentences_alone_predict_rating_of_sample(minilm):
    splits = read_dataset(None).splits
    train, test = splits["train"], splits["test"]
    sentences = [{*rows.sentence1, *rows.sentence2} for rows in splits.values()]
    assert not sentences[0] & (sentences[1] | sentences[2])
    assert not sentences[1] & sentences[2]
    condition = np.array(train.condition)
    means = {name: train.rating[condition == name].mean() for name in set(train.condition)}
    predicted = np.array([means[name] for name in test.condition])
    assert abs(1 - np.mean((test.rating - predicted) ** 2) / np.var(test.rating)) < 0.02
    first, second = (
        minilm.encode([EncoderInput("", text) for text in texts[::2]])  # each pair is rated twice
        for texts in (test.sentence1, test.sentence2)
    )
    assert abs(spearmanr(np.repeat(cosine(first, second), 2), test.rating).statistic) < 0.1


def test_credits_and_memory_table_are_current(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_credits", "--check"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / "make_credits.py"), run_name="__main__")
    assert stopped.value.code == 0, capsys.readouterr().out
    assert memory_table.table() in memory_table.PAGE.read_text(encoding="utf-8")
    assert memory_table.smallest_card(15 * 2**30, 10 * 2**30, 2 * 2**30) == 16


def test_wording_is_counted_and_limited(tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text("It is told.\n\n```bash\ntold\n```\n")
    (tmp_path / "llmcond").mkdir()
    code = 'def f(own):\n    """See :class:`X`."""\n    add(help="of it")\n'
    (tmp_path / "llmcond" / "a.py").write_text(code)
    counts = {name: len(items) for name, items in prose.measure(tmp_path).items()}
    ones = {"words", "names", "help", "roles", "see"}
    assert counts == {name: int(name in ones) for name in prose.LIMITS}
    monkeypatch.setattr(prose, "LIMITS", {**dict.fromkeys(prose.LIMITS, 1), "words": 0})
    assert prose.main(["--root", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().out.startswith("words: 1, limit 0 (")


def test_averaged_adapter_records_both(monkeypatch, tmp_path):
    first, second = bundled_folder("models") / "minilm-conditions", tmp_path / "earlier"
    shutil.copytree(first, second)
    weights = load_file(first / WEIGHTS)
    save_file({name: weight + 1 for name, weight in weights.items()}, second / WEIGHTS)
    tuned = read_encoder_record(first)
    write_encoder_record(second, replace(tuned, dev_of="another"))
    options = ["--name", first.name, "--out", tmp_path, "--average", second, "--share", "0.75"]
    monkeypatch.setattr(sys, "argv", ["make_pretrained", *map(str, [first, *options])])
    make_pretrained.main()
    folder = tmp_path / first.name
    mixed, one, other = (load_file(path / WEIGHTS) for path in (folder, first, second))
    assert mixed.keys() == one.keys() == other.keys()
    for name, weight in mixed.items():
        torch.testing.assert_close(weight, 0.75 * one[name] + 0.25 * other[name])
    identity = load_embedder(str(folder)).encoder.identity
    assert identity == open_any_run(folder).identity
    assert read_encoder_record(folder).dev_digests == tuned.dev_digests | {"another"}
    assert identity.weights != open_any_run(first).identity.weights
    averaged_with = {"weights": open_any_run(second).identity.weights, "share": 0.25}
    assert read_json(folder / TRAINING_RECORD)["averaged_with"] == averaged_with
    card = (folder / CARD).read_text(encoding="utf-8")
    assert "averaged with those of `earlier`, whose share is 0.25." in card
