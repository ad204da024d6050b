"""Distillation: new rows, rated by the head of another run, for training in addition to train.

A smaller model learns from the labels that a larger one gives to unlabelled inputs (Hinton et al.
2015, arXiv 1503.02531). The labels are similarities on the scale of ratings, and the inputs are
sentence pairs of train under the conditions of other rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.data.datasets import Dataset
from llmcond.data.rows import Rows
from llmcond.encoders.checkpoints.adapter import read_encoder_record
from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_text, read_json, write_json
from llmcond.log import log
from llmcond.runs import Run, open_run
from llmcond.runs.cross import NAME, CrossEncoder, load_cross_encoder
from llmcond.runs.embedder import Embedder, make_embedder
from llmcond.runs.extraction import LazyEncoder

#: The number of rows that are rated and saved together. A kill loses no more than these.
_BLOCK = 2_048
#: The second seed for sampling rows. The training steps use numbers from 0 as theirs.
_ROW_SEED = 2**32 + 1


@dataclass(frozen=True)
class Teacher:
    """A run whose head rates rows. Its model is loaded when it rates the first rows.

    Attributes:
        run: the run.
        head: the full name of the head; for a cross-encoder, the name of its linear layer.
        rows: the number of rows to rate.
        record: what identifies the teacher: the digests of encoder and head, and ``rows``.
        trained_on: the splits that its encoder or its head was trained on.
    """

    run: Run
    head: str
    rows: int
    record: Mapping[str, Any]
    trained_on: tuple[str, ...]

    def record_fields(self) -> dict[str, Any]:
        """Return the names of encoder and head for the training record, with an adapter's base."""
        tuned = read_encoder_record(self.run.folder)
        base = {} if tuned is None or tuned.base is None else {"base": tuned.base}
        fields = {"encoder": self.run.encoder_name, **base}
        return {**fields, "head": self.head, "rows": self.rows}

    def was_trained_on_dev(self, dataset: Dataset) -> bool:
        """Return whether the teacher was trained on the dev rows of a dataset."""
        is_same_data = self.run.manifest["data"]["digest"] == dataset.digest
        return is_same_data and "dev" in self.trained_on

    def rate(self, train: Rows, seed: int, folder: Path, device: str) -> Rows:
        """Return new rows, which train does not contain, with the teacher's ratings.

        The ratings are saved in ``folder``, so that a killed call continues from there.

        Args:
            train: the rows whose sentence pairs and conditions are combined.
            seed: the seed for sampling the new rows.
            folder: the folder of the ratings.
            device: the device to rate on.

        Raises:
            UserError: train has too few conditions, or a similarity is not finite.
            LlmcondError: the encoder cannot be loaded, or the file of ratings is damaged.
        """
        rows = sample_unrated_rows(train, self.rows, seed)
        identity = json.dumps([self.record, seed, list(rows.texts.values())])
        path = folder / f"teacher-{digest_text(identity)}.json"
        ratings = _read_ratings(path)
        if len(ratings) < len(rows):
            log.info(
                f"rating {len(rows) - len(ratings):,} rows with {self.head} of {self.run.folder}"
            )
            model = self._load(device)
            while len(ratings) < len(rows):
                batch = slice(len(ratings), len(ratings) + _BLOCK)
                texts = (rows.sentence1[batch], rows.sentence2[batch], rows.condition[batch])
                similarities = model.similarity(*map(list, texts), show_progress=True)
                # Cosines and regressions may lie outside the scale of ratings.
                similarities = similarities.clip(0, 1)
                ratings += similarities.astype(np.float64).tolist()
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"ratings": ratings})
        return replace(rows, rating=np.array(ratings))

    def _load(self, device: str) -> CrossEncoder | Embedder:
        if self.run.cross:
            return load_cross_encoder(self.run.folder, device=device)
        encoder = LazyEncoder(self.run.resolve_encoder(device))()
        return make_embedder(encoder, self.run.load_head(self.head))


def find_teacher(folder: Path | None, rows: int | None, dataset: Dataset) -> Teacher | None:
    """Return the teacher of a run.

    Args:
        folder: the run's folder; None: there is no teacher.
        rows: the number of rows to rate; None: as many as train has rated rows.
        dataset: the dataset of the student.

    Returns:
        The teacher; None if there is none.

    Raises:
        UserError: there is no such run, it has no head, or its head does not give ratings.
    """
    if folder is None:
        return None
    run = open_run(folder, cross=True)
    splits, rows = run.trained_on, rows or int(dataset.splits["train"].rated.sum())
    if run.cross:
        name = NAME
    else:
        default_head = run.default_head()
        if default_head is None or default_head[0] not in run.head_names():
            raise UserError(
                f"{folder} has no fitted head that is better than zero-shot, and cosines of its "
                f"features are not ratings. Fit a head (llmcond fit-head --run {folder}), or train "
                "its encoder (llmcond train-lora)."
            )
        saved_head, reason = run.load_head(default_head[0]), default_head[1]
        log.info(f"teacher: {saved_head.name} of {folder}, {reason}")
        if not getattr(saved_head.head.settings, "mse", 1.0):
            raise UserError(
                f"the head {saved_head.name} of {folder} was fitted to the order of ratings, so "
                "its similarities are on another scale. Fit a head with mse above 0."
            )
        name, splits = saved_head.name, (*splits, *saved_head.trained_on)
    record = {
        "encoder": run.manifest["encoder"]["fingerprint"],
        "head": run.head_record(name)["weights_sha256"],
        "rows": rows,
    }
    return Teacher(run, name, rows, record, tuple(dict.fromkeys(splits)))


def sample_unrated_rows(rows: Rows, count: int, seed: int) -> Rows:
    """Combine sentence pairs of rows with conditions of other rows into unrated rows.

    Pairs are sampled uniformly, and conditions in proportion to their frequency. No new row repeats
    another one, or a pair with its condition in ``rows``, rated or not.

    Args:
        rows: the rows to combine.
        count: the number of new rows.
        seed: the random seed.

    Raises:
        UserError: fewer than ``count`` such rows can be sampled.
    """
    generator = np.random.Generator(np.random.SFC64([seed, _ROW_SEED]))
    _, first_rows = np.unique(rows.pair, return_index=True)
    pair, condition = rows.pair.tolist(), rows.condition
    used = set(zip(pair, condition, strict=True))
    possible = len(first_rows) * len(set(condition)) - len(used)
    if count > possible / 2:  # beyond that, sampling would mostly hit rows that are used already
        raise UserError(
            f"--teacher-rows is {count:,}, but {rows.file} gives {possible:,} new combinations of "
            f"sentence pairs and conditions. Ask for at most half of them, {possible // 2:,}."
        )
    row_indices, texts = list[int](), list[str]()
    while len(row_indices) < count:
        pair_numbers = generator.integers(len(first_rows), size=count).tolist()
        condition_rows = generator.integers(len(rows), size=count).tolist()
        for number, row in zip(pair_numbers, condition_rows, strict=True):
            if (number, condition[row]) not in used and len(row_indices) < count:
                used.add((number, condition[row]))
                row_indices.append(int(first_rows[number]))
                texts.append(condition[row])
    new_rows = rows.take(np.array(row_indices))
    return replace(new_rows, condition=texts, rating=np.full(count, np.nan))


def _read_ratings(path: Path) -> list[float]:
    """Read the ratings of a file; empty if there is no such file."""
    if not path.is_file():
        return []
    ratings = read_json(path).get("ratings")
    if not isinstance(ratings, list) or not all(isinstance(rating, float) for rating in ratings):
        raise LlmcondError(f"{path} is damaged. Delete it to rate the rows again.")
    return ratings
