"""Write the table of GPU memory into docs/encoders.md: ``python scripts/memory_table.py``.

``--check`` compares only. Sizes are computed from the architectures in ``llmcond/encoders/known``.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from llmcond.encoders.inspect import describe_known
from llmcond.encoders.known import MODELS
from llmcond.encoders.loading.device import default_token_budget
from llmcond.files import format_bytes

PAGE = Path(__file__).parents[1] / "docs" / "encoders.md"
#: Memory of common cards in GiB, and what CUDA and its libraries take of it, about.
CARDS, CONTEXT = (12, 16, 24, 80), 0.75
_TABLE = re.compile(r"(<!-- scripts/memory_table\.py -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def smallest_card(loading: int, weights: int, batch: int) -> int | None:
    """Return the smallest card that an encoder fits on with a full batch; sizes are in bytes."""
    needed = max(loading, weights + batch) / 2**30 + CONTEXT
    return next((card for card in CARDS if needed <= card), None)


def row(name: str, told: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    tokens = default_token_budget("cuda")
    found = {"encoder": name, "parameters": f"{told['n_parameters'] / 1e6:,.0f} M"}
    for size in told["memory"]:
        if size["dtype"] == "float32":
            continue
        batch = size["batch"] * tokens // size["batch_tokens"]
        found.setdefault("batch", format_bytes(batch))
        bits = {"none": "16 bit", "8bit": "8 bit", "4bit": "4 bit"}[size["quantize"]]
        card = smallest_card(size["loading"], size["weights"], batch)
        found[bits] = f"{format_bytes(size['weights'])}, {f'{card} GB' if card else 'none'}"
    return found


def table() -> str:
    """Return the table of all known encoders."""
    rows = [row(known.name, describe_known(known, "cpu")) for known in MODELS]
    return tabulate(rows, "keys", "github", disable_numparse=True) + "\n"


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description="Write the table of GPU memory.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    given = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    made = table()
    written = _TABLE.sub(lambda match: match[1] + made + match[3], page)
    if given.check:
        return int(written != page)
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
