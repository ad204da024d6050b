"""Distilling: rows without ratings, rated by the head of another run and trained on beside train's.

Labels that a model gives to unlabelled inputs, for a smaller one to learn from: Hinton et al. 2015
(arXiv 1503.02531); here they are similarities on the scale of ratings, of train's own sentence
pairs under conditions of other rows.
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
from llmcond.encoders.checkpoints.adapter import read_tuned
from llmcond.errors import LlmcondError, UserError
from llmcond.files import digest_text, read_json, write_json
from llmcond.log import log
from llmcond.runs import Run, open_run
from llmcond.runs.cross import NAME, CrossEncoder, load_cross_encoder
from llmcond.runs.embedder import Embedder, make_embedder
from llmcond.runs.extraction import LazyEncoder

#: Rows that are rated at a time; a kill loses no more.
_BLOCK = 2_048
#: What rows are drawn by, beside the seed; steps are drawn by numbers from 0.
_ROWS = 2**32 + 1


@dataclass(frozen=True)
class Teacher:
    """A run whose head rates rows; nothing of it is loaded until it does.

    Attributes:
        head: its full name; of a cross-encoder, the linear layer's.
        rows: how many it rates.
        record: what tells it from others: digests of encoder and head, and ``rows``.
        trained_on: splits that it was trained on, encoder or head.
    """

    run: Run
    head: str
    rows: int
    record: Mapping[str, Any]
    trained_on: tuple[str, ...]

    def about(self) -> dict[str, Any]:
        """Return what it is, for people; of an adapter also the encoder that it belongs to."""
        tuned = read_tuned(self.run.folder)
        base = {} if tuned is None or tuned.base is None else {"base": tuned.base}
        own = {"encoder": self.run.encoder_name, **base}
        return {**own, "head": self.head, "rows": self.rows}

    def knows_dev(self, dataset: Dataset) -> bool:
        """Return whether it was trained on the dev rows of a data set."""
        same = self.run.manifest["data"]["digest"] == dataset.digest
        return same and "dev" in self.trained_on

    def rate(self, train: Rows, seed: int, folder: Path, device: str) -> Rows:
        """Return rows that train lacks, with the teacher's ratings.

        What it has rated is kept in ``folder``; after a kill it goes on from there.

        Raises:
            UserError: train has too few conditions, or similarities that are not finite.
            LlmcondError: the encoder cannot be loaded, or the file of ratings was damaged.
        """
        rows = unrated_rows(train, self.rows, seed)
        about = json.dumps([self.record, seed, list(rows.texts.values())])
        path = folder / f"teacher-{digest_text(about)}.json"
        found = _kept(path)
        if len(found) < len(rows):
            log.info(f"rating {len(rows) - len(found):,} rows by {self.head} of {self.run.folder}")
            loaded = self._load(device)
            while len(found) < len(rows):
                part = slice(len(found), len(found) + _BLOCK)
                texts = (rows.sentence1[part], rows.sentence2[part], rows.condition[part])
                rated = loaded.similarity(*map(list, texts), show_progress=True)
                # Cosines and regressions may pass the ends of the scale.
                rated = rated.clip(0, 1)
                found += rated.astype(np.float64).tolist()
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"ratings": found})
        return replace(rows, rating=np.array(found))

    def _load(self, device: str) -> CrossEncoder | Embedder:
        if self.run.cross:
            return load_cross_encoder(self.run.folder, device=device)
        encoder = LazyEncoder(self.run.resolve_encoder(device))()
        return make_embedder(encoder, self.run.load_head(self.head))


def find_teacher(folder: Path | None, rows: int | None, dataset: Dataset) -> Teacher | None:
    """Return the teacher of a run; None: none was asked for.

    Raises:
        UserError: no such run, one without a head, or whose head does not give ratings.
    """
    if folder is None:
        return None
    run = open_run(folder, cross=True)
    splits, rows = run.trained_on, rows or int(dataset.splits["train"].rated.sum())
    if run.cross:
        name = NAME
    else:
        usual = run.default_head()
        if usual is None:
            raise UserError(
                f"{folder} has no fitted head, and cosines of its features are no ratings. Fit "
                f"one: llmcond fit-head --run {folder}; or train its encoder: llmcond train-lora."
            )
        saved, why = run.load_head(usual[0]), usual[1]
        log.info(f"teacher: {saved.name} of {folder}, {why}")
        if not getattr(saved.head.settings, "mse", 1.0):
            raise UserError(
                f"the head {saved.name} of {folder} was fitted to the order of ratings, so that "
                "its similarities are on another scale. Fit one with mse above 0."
            )
        name, splits = saved.name, (*splits, *saved.trained_on)
    record = {
        "encoder": run.manifest["encoder"]["fingerprint"],
        "head": run.head_record(name)["weights_sha256"],
        "rows": rows,
    }
    return Teacher(run, name, rows, record, tuple(dict.fromkeys(splits)))


def unrated_rows(rows: Rows, count: int, seed: int) -> Rows:
    """Return the sentence pairs of rows under conditions of others, ``count`` of them, unrated.

    Both are drawn by ``seed``: pairs alike, conditions as often as they occur. None has a pair and
    a condition that occur together, rated or not, and none comes twice.

    Raises:
        UserError: fewer than ``count`` such rows can be found.
    """
    drawn = np.random.Generator(np.random.SFC64([seed, _ROWS]))
    _, first = np.unique(rows.pair, return_index=True)
    pair, condition = rows.pair.tolist(), rows.condition
    taken = set(zip(pair, condition, strict=True))
    possible = len(first) * len(set(condition)) - len(taken)
    if count > possible / 2:  # more would be drawn again and again
        raise UserError(
            f"--teacher-rows is {count:,}, and {rows.file} has {possible:,} sentence pairs and "
            f"conditions that do not stand together; at most half of them, {possible // 2:,}."
        )
    where, texts = list[int](), list[str]()
    while len(where) < count:
        pairs = drawn.integers(len(first), size=count).tolist()
        others = drawn.integers(len(rows), size=count).tolist()
        for own, other in zip(pairs, others, strict=True):
            if (own, condition[other]) not in taken and len(where) < count:
                taken.add((own, condition[other]))
                where.append(int(first[own]))
                texts.append(condition[other])
    found = rows.take(np.array(where))
    return replace(found, condition=texts, rating=np.full(count, np.nan))


def _kept(path: Path) -> list[float]:
    """Return the ratings that a file holds; none where there is no such file."""
    if not path.is_file():
        return []
    found = read_json(path).get("ratings")
    if not isinstance(found, list) or not all(isinstance(own, float) for own in found):
        raise LlmcondError(f"{path} is damaged. Delete it, and the rows are rated again.")
    return found
