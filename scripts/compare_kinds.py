r"""Compare two models by kind of condition, from their files of predictions.

    llmcond evaluate --split dev --run runs/before --predictions before.csv   # and runs/after
    python scripts/compare_kinds.py before.csv after.csv --data CSTS_FOLDER \
        --fit none@concat-cond-sent+c

The words of a condition determine its kind. The figures are Spearman times 100 with 95 % intervals
over sentence pairs, and the difference between the models on the same bootstrap samples. A
condition counts as being in train if train has exactly the same text.
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

#: Kind -> regular expression of its words; the first match determines the kind of a condition.
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
    matches = (
        name for name, words in KINDS.items() if re.search(rf"\b({words})\b", condition, re.I)
    )
    return next(matches, "other")


def read(path: Path, fit: str | None) -> dict[int, float]:
    """Return the predictions of a fit by row number of the data.

    Args:
        path: file of predictions.
        fit: column of the fit; not needed if the file has only one.

    Raises:
        UserError: The file has no predictions or no fit of that name, or it has several and
            ``fit`` is None.
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
    """Print a table with a line for each kind of condition in the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path, help="predictions of the first model, as CSV")
    parser.add_argument("after", type=Path, help="predictions of the second model, as CSV")
    parser.add_argument("--data", required=True, help="data that both models were evaluated on")
    parser.add_argument("--split", default="dev", help="evaluated split (default: dev)")
    parser.add_argument("--fit", help="column of the fit, if the files have several")
    options = parser.parse_args()
    try:
        splits = read_dataset(options.data).splits
        if options.split not in splits:
            raise UserError(
                f"{options.data} has no split {options.split}. It has {', '.join(splits)}."
            )
        before, after = (read(path, options.fit) for path in (options.before, options.after))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    rows, train_conditions = splits[options.split], set(splits["train"].condition)
    if not before.keys() == after.keys() == set(rows.number.tolist()):
        sys.exit(f"error: both files must contain the {len(rows):,} rows of {options.split}.")
    rows = rows.take(rows.rated)
    first, second = (
        np.array([predictions[row] for row in rows.number.tolist()])
        for predictions in (before, after)
    )
    seen = np.array([text in train_conditions for text in rows.condition])
    kinds = np.array([kind(text) for text in rows.condition])
    groups = {"all": seen | ~seen, "condition in train": seen, "condition not in train": ~seen}
    groups |= {name: kinds == name for name in (*KINDS, "other")}
    print("| rows | n | before | after | difference |\n|---|---|---|---|---|")
    metric = METRICS["spearman"]
    for name, selected in groups.items():
        if selected.any():
            gain = DevGain.of(first[selected], second[selected], rows.take(selected), metric)
            cells = [estimate_text(metric, value) for value in (gain.without, gain.trained)]
            change = gain.difference
            cells.append(
                f"{100 * change.value:+.1f} [{100 * change.low:.1f}, {100 * change.high:.1f}]"
            )
            print(f"| {name} | {gain.n:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
