"""Write the table of GPU memory into docs/encoders.md: ``python scripts/memory_table.py``.

The sizes are computed from the architectures in ``llmcond/encoders/known``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from common import Options
from tabulate import tabulate

from llmcond.base.files import format_bytes
from llmcond.encoders.inspect import describe_known
from llmcond.encoders.loading import default_token_budget
from llmcond.encoders.settings import MODELS

PAGE = Path(__file__).parents[1] / "docs" / "encoders.md"
#: Memory of common cards, and the memory that CUDA and its libraries occupy, roughly; in GiB.
CARDS, CONTEXT = (12, 16, 24, 80), 0.75
_TABLE = re.compile(r"(<!-- scripts/memory_table\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def smallest_card(loading: int, weights: int, batch: int) -> int | None:
    """Return the memory in GiB of the smallest card that suffices, or None if no card does.

    An encoder needs the larger of its peak while loading, and its weights with a full batch.

    Args:
        loading: peak memory while the encoder is loaded, in bytes.
        weights: memory of the weights, in bytes.
        batch: memory of a full batch, in bytes.
    """
    needed = max(loading, weights + batch) / 2**30 + CONTEXT
    return next((card for card in CARDS if needed <= card), None)


def row(name: str, description: dict[str, Any]) -> dict[str, str]:
    """Return the row of one encoder, by column.

    Args:
        name: name of the encoder.
        description: its description, as from ``describe_known``.
    """
    tokens = default_token_budget("cuda")
    cells = {"encoder": name, "parameters": f"{description['n_parameters'] / 1e6:,.0f} M"}
    for size in description["memory"]:
        if size["dtype"] == "float32":
            continue
        batch = size["batch"] * tokens // size["batch_tokens"]
        cells.setdefault("batch", format_bytes(batch))
        bits = {"none": "16 bit", "8bit": "8 bit", "4bit": "4 bit"}[size["quantize"]]
        card = smallest_card(size["loading"], size["weights"], batch)
        cells[bits] = f"{format_bytes(size['weights'])}, {f'{card} GB' if card else 'none'}"
    return cells


def table() -> str:
    """Return the table of all known encoders in Markdown."""
    rows = [row(known.name, describe_known(known, "cpu")) for known in MODELS]
    return tabulate(rows, "keys", "github", disable_numparse=True) + "\n"


def main() -> None:
    """Write the table."""
    Options(__doc__).parse_args()
    page = PAGE.read_text(encoding="utf-8")
    new_table = table()
    updated = _TABLE.sub(lambda match: match[1] + new_table + match[3], page)
    PAGE.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
