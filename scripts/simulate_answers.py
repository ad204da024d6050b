"""Measure how often the intervals of ``llmcond check-condition --ask`` contain the truth.

    python scripts/simulate_answers.py TABLE.csv --condition COLUMN="the text" ... [--users 200]
    python scripts/simulate_answers.py FOLDER/NAME.json --condition ATTRIBUTE ...

Each simulated user sees another sample of pairs, of other texts, and answers them by the labels.
The truth is the figure that the labels of all pairs of these texts give. Wordings are separated by
``|``. A file of texts with known attributes (docs/aspects.md) has the wording of its conditions,
which is the default.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.files import read_json
from llmcond.base.package import DEFAULT_MODEL
from llmcond.base.text import as_condition, wordings
from llmcond.data.guides import parse_sample
from llmcond.evaluation.analyses import MOST_TEXTS
from llmcond.evaluation.pair_answers import (
    order_pairs,
    pair_positions,
    rank_pairs,
    score_answers,
    score_ranking,
)
from llmcond.runs.embedder import EmbeddingModel

#: The largest number of texts that are embedded.
MOST_EMBEDDED = 600
#: Texts with more characters are left out.
LONGEST = 400


def read_texts(path: Path) -> tuple[list[str], list[Mapping[str, str]], dict[str, str]]:
    """Return texts, their labels by attribute, and the conditions by attribute."""
    if path.suffix == ".json":
        sample = parse_sample(read_json(path), path.stem, str(path))
        rows = [(one.text, one.attributes) for one in sample.texts]
        conditions = {name: one.text for name, one in sample.conditions.items()}
    else:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = [(row["text"], row) for row in csv.DictReader(stream)]
        conditions = {}
    rows = [row for row in rows if len(row[0]) < LONGEST]
    random.Random(0).shuffle(rows)
    return [text for text, _ in rows], [labels for _, labels in rows], conditions


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each condition."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--condition", action="append", required=True, metavar="NAME[=TEXT]")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--users", type=int, default=200)
    options = parser.parse_args(arguments)
    texts, labels, conditions = read_texts(options.file)
    model = EmbeddingModel.find(model=options.model, quiet=True)
    for entry in options.condition:
        name, _, text = entry.partition("=")
        text = text or conditions[name]
        rows = [i for i, one in enumerate(labels) if one.get(name)][:MOST_EMBEDDED]
        sample = [texts[i] for i in rows]
        values = np.array([labels[i][name] for i in rows], dtype=object)
        vectors = {
            wording: model.embed([(one, wording) for one in sample], str(options.file))
            for wording in wordings(as_condition(text))
        }
        vectors["no condition"] = model.embed_with_base(sample)[1]
        report(name, values, vectors, options.pairs, options.users)


def report(
    name: str,
    values: NDArray[Any],
    vectors: Mapping[str, NDArray[Any]],
    n_pairs: int,
    users: int,
) -> None:
    """Simulate users, and print the truth, the mean estimate and the coverage of each figure.

    Wrongly behind are rankings that are said to have a lower AUC than the best one, but have not.
    """
    records, shares, n_behind, n_wrong = [], [], 0, 0
    for user in range(users):
        rows = np.random.default_rng(user).permutation(len(values))[:MOST_TEXTS]
        first, second = pair_positions(len(rows))
        same = values[rows][first] == values[rows][second]
        ranks = [rank_pairs(one[rows]) for one in vectors.values()]
        pairs = order_pairs(ranks[0], ranks[-1], user)[:n_pairs]
        if not 0 < same[pairs].sum() < len(pairs):
            continue
        scores = score_answers(ranks, pairs, same[pairs].tolist(), user)
        shares.append((same.mean(), same[pairs].mean()))
        figures = [score_ranking(same[None].astype(float), ranking) for ranking in ranks]
        truth = np.array(figures)[:, :, 0]
        best = truth[int(np.argmax([score.auc.value for score in scores])), 0]
        n_behind += sum(score.is_behind for score in scores)
        n_wrong += sum(s.is_behind and t >= best for s, t in zip(scores, truth[:, 0], strict=True))
        for true, score in zip(truth, scores, strict=True):
            for value, estimate in zip(true, (score.auc, score.accuracy), strict=True):
                # Figures are shown as whole percentages.
                low, high = estimate.low - 0.005, estimate.high + 0.005
                records.append([value, estimate.value, low <= value <= high, high - low])
    means = np.array(records, dtype=float).reshape(-1, len(vectors), 2, 4).mean(axis=0)
    same_share, answered_share = np.mean(shares, axis=0)
    print(
        f"{name}: {len(shares)} users, {same_share:.0%} of all pairs and {answered_share:.0%} of "
        f"the answers the same; {n_behind} behind, {n_wrong} wrongly"
    )
    for ranking, both in zip(vectors, means, strict=True):
        for figure, (value, estimate, coverage, width) in zip(
            ("AUC", "accuracy"), both, strict=True
        ):
            print(
                f"  {ranking}: {figure} {value:.2f}, estimate {estimate:.2f}, width {width:.2f}, "
                f"coverage {coverage:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
