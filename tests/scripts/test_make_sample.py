"""The bundled sample: up to date, without leaks, and not solvable without the condition."""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from scipy.stats import spearmanr

from llmcond.arrays import cosine
from llmcond.data.datasets import Dataset, read_dataset
from llmcond.data.rows import Rows, leaked_pairs
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.spec import EncoderInput


@pytest.fixture(scope="module")
def sample() -> Dataset:
    return read_dataset(None)


def distinct_sentences(rows: Rows) -> set[str]:
    return {*rows.sentence1, *rows.sentence2}


def test_files_are_up_to_date():
    process = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_sample.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def test_check_fails_for_changed_files(tmp_path: Path):
    script = [sys.executable, ROOT / "scripts" / "make_sample.py", "--out", tmp_path]
    subprocess.run(script, capture_output=True, check=True)
    test = tmp_path / "test.csv"
    test.write_text(test.read_text(encoding="utf-8").replace("the", "a", 1), encoding="utf-8")
    process = subprocess.run([*script, "--check"], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "test.csv: missing, or differs from what this script writes" in process.stdout


def test_sample_is_large_and_has_all_ratings(sample: Dataset):
    assert list(sample.splits) == ["train", "dev", "test"]
    assert sum(map(len, sample.splits.values())) >= 1200
    for rows in sample.splits.values():
        assert sorted(set(rows.rating)) == [0, 0.25, 0.5, 0.75, 1]


def test_pairs_are_adjacent_rows_under_two_conditions(sample: Dataset):
    for rows in sample.splits.values():
        assert rows.sentence1[::2] == rows.sentence1[1::2]
        assert rows.sentence2[::2] == rows.sentence2[1::2]
        assert len(rows.pair_keys()) == len(rows) / 2
        condition_pairs = zip(rows.condition[::2], rows.condition[1::2], strict=True)
        assert all(first != second for first, second in condition_pairs)


def test_splits_have_same_conditions(sample: Dataset):
    conditions = [set(rows.condition) for rows in sample.splits.values()]
    assert len(conditions[0]) >= 6
    assert conditions[0] == conditions[1] == conditions[2]


def test_splits_share_no_sentences(sample: Dataset):
    train, dev, test = sample.splits.values()
    assert distinct_sentences(train).isdisjoint(distinct_sentences(dev) | distinct_sentences(test))
    assert distinct_sentences(dev).isdisjoint(distinct_sentences(test))
    assert leaked_pairs(test, train) == 0


def test_condition_alone_does_not_predict_rating(sample: Dataset):
    train, test = sample.splits["train"], sample.splits["test"]
    ratings = defaultdict(list)
    for condition, rating in zip(train.condition, train.rating, strict=True):
        ratings[condition].append(rating)
    predicted = np.array([np.mean(ratings[condition]) for condition in test.condition])
    explained = 1 - np.mean((test.rating - predicted) ** 2) / np.var(test.rating)
    assert abs(explained) < 0.02


def test_cosine_without_condition_does_not_predict_rating(sample: Dataset, minilm: Encoder):
    test = sample.splits["test"]
    first, second = (
        minilm.encode([EncoderInput("", text) for text in texts[::2]])  # each pair is rated twice
        for texts in (test.sentence1, test.sentence2)
    )
    predicted = np.repeat(cosine(first, second), 2)
    assert abs(spearmanr(predicted, test.rating).statistic) < 0.1
