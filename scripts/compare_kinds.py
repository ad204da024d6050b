r"""What a model gains over another by kind of condition, from two files of predictions.

    llmcond evaluate --split dev --run runs/before --predictions before.csv   # and runs/after
    python scripts/compare_kinds.py before.csv after.csv --data CSTS_FOLDER \
        --fit none@concat-cond-sent+c

Kinds are told by words of the condition. Spearman times 100 with 95 % intervals over sentence
pairs; of the difference, on the same draws. A condition is seen where train has its exact text.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

import numpy as np

from llmcond.data.datasets import read_dataset
from llmcond.errors import UserError
from llmcond.evaluation.dev_gain import DevGain
from llmcond.metrics import METRICS
from llmcond.report.format import estimate_text

#: Kind -> words that tell it; the first that fits a condition is its kind.
KINDS = {
    "number": r"number|how many|count|amount|quantity",
    "colour": r"colou?rs?",
    "presence or absence": r"presence|absence|existence",
    "place": r"location|place|where|setting|environment|position",
    "activity": r"activit(y|ies)|actions?|doing|sports?|hobby|games?|motion|movement",
    "gender or age": r"gender|age|sex",
    "type or kind": r"types?|kinds?|species|breeds?|names?",
}


def kind(condition: str) -> str:
    """Return the kind of a condition."""
    found = (name for name, words in KINDS.items() if re.search(rf"\b({words})\b", condition, re.I))
    return next(found, "other")


def read(path: Path, fit: str | None) -> dict[int, float]:
    """Return the predictions of a fit, the only one unless it is named, by row of the data.

    Raises:
        UserError: no file of predictions, no fit of that name, or several and no name.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        names = list(rows.fieldnames or ())
        fits = names[5:] if names[:1] == ["row"] else []
        column = fits[0] if len(fits) == 1 else fit
        if column not in fits:
            raise UserError(f"--fit is {fit}; {path} has {', '.join(fits) or 'no predictions'}.")
        return {int(row["row"]): float(row[column]) for row in rows}


def main() -> None:
    """Print a line for each kind that rows have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--data", required=True, help="what both were evaluated on")
    parser.add_argument("--split", default="dev")
    parser.add_argument("--fit", help="its column in both files, where they have several")
    given = parser.parse_args()
    try:
        splits = read_dataset(given.data).splits
        if given.split not in splits:
            raise UserError(f"{given.data} has no {given.split}, but {', '.join(splits)}.")
        before, after = (read(path, given.fit) for path in (given.before, given.after))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    rows, known = splits[given.split], set(splits["train"].condition)
    if not before.keys() == after.keys() == set(rows.number.tolist()):
        sys.exit(f"error: the files are not both of the {len(rows):,} rows of {given.split}.")
    rows = rows.take(rows.rated)
    first, second = (
        np.array([own[row] for row in rows.number.tolist()]) for own in (before, after)
    )
    seen = np.array([text in known for text in rows.condition])
    kinds = np.array([kind(text) for text in rows.condition])
    groups = {"all": seen | ~seen, "condition in train": seen, "condition not in train": ~seen}
    groups |= {name: kinds == name for name in (*KINDS, "other")}
    print("| rows | n | before | after | difference |\n|---|---|---|---|---|")
    metric = METRICS["spearman"]
    for name, chosen in groups.items():
        if chosen.any():
            gain = DevGain.of(first[chosen], second[chosen], rows.take(chosen), metric)
            told = [estimate_text(metric, own) for own in (gain.without, gain.trained)]
            by = gain.difference
            told.append(f"{100 * by.value:+.1f} [{100 * by.low:.1f}, {100 * by.high:.1f}]")
            print(f"| {name} | {gain.n:,} | {' | '.join(told)} |")


if __name__ == "__main__":
    main()
