"""Write the credits of the bundled models from models/credits.toml, which is their only definition.

    python scripts/make_credits.py
    python scripts/make_credits.py --check

The script writes credits.json, the end of the card and the card's metadata of each model, NOTICE,
and the table in docs/licences.md. With --check, it only compares them.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from common import Options

from llmcond.base.files import read_json
from llmcond.base.package import bundled_folder
from llmcond.base.records import check_record
from llmcond.encoders.adapter import CARD, CREDITS
from llmcond.report.card import add_metadata, trained_metadata
from llmcond.runs.portable import FORMAT, LICENCES, Credits, Work
from llmcond.workflows.training_record import RECORD

ROOT = Path(__file__).parents[1]
SECTION = "## Data and licences"
#: Lines around the generated part of docs/licences.md.
START, END = "<!-- table of scripts/make_credits.py -->", "<!-- end -->"


def read_table() -> dict[str, Any]:
    """Return the content of models/credits.toml."""
    return tomllib.loads((bundled_folder("models") / "credits.toml").read_text(encoding="utf-8"))


def model_texts(folder: Path, name: str) -> dict[Path, str]:
    """Return the text of the credits and of the card of a model, by their paths."""
    table = read_table()
    model = table["models"][name]
    works = {work["name"]: work for work in table["works"]}
    record = {
        "format": FORMAT,
        "licence": model["licence"],
        "works": [works[work] for work in model["works"]],
    }
    model_credits = check_record(record, Credits, "the credits")
    # The scores are those of the rated data, whose folder had another name.
    trained = read_json(folder / RECORD)
    trained["data"]["source"] = f"hf://datasets/{model_credits.metadata['datasets'][0]}"
    body = (folder / CARD).read_text(encoding="utf-8").partition(SECTION)[0].rstrip()
    card = add_metadata(
        f"{body}\n\n{model_credits.to_markdown()}\n",
        trained_metadata(trained, "rated"),
        **model_credits.metadata,
    )
    return {
        folder / CREDITS: json.dumps(record, indent=2, ensure_ascii=False) + "\n",
        folder / CARD: card,
    }


def notice_text() -> str:
    """Return the text of NOTICE."""
    table = read_table()
    lines = [
        "llmcond",
        "Copyright the llmcond contributors",
        "",
        "Licensed under the Apache License, Version 2.0 (see LICENSE).",
        "",
        f"The models {', '.join(table['models'])} derive from the following works.",
        "They contain no text of the data.",
    ]
    for work in (Work(**work) for work in table["works"]):
        licence, url = LICENCES[work.licence]
        lines += ["", work.name, f"  {work.url}", f"  by {work.authors}"]
        lines += [f"  licence: {licence}, {url}", f"  used as: {work.use}"]
    return "\n".join(lines) + "\n"


def page_text(page: str) -> str:
    """Return docs/licences.md with the current table of works."""
    table = read_table()
    lines = [START, "", "| Work | Used as | Authors | Licence | Models |", "|---|---|---|---|---|"]
    for work in (Work(**work) for work in table["works"]):
        licence, url = LICENCES[work.licence]
        models = ", ".join(f"`{n}`" for n, m in table["models"].items() if work.name in m["works"])
        cells = [f"[{work.name}]({work.url})", work.use, work.authors, f"[{licence}]({url})"]
        lines.append(f"| {' | '.join([*cells, models])} |")
    lines.append("")
    lines += [f"- **{w['name']}**: {w['origin']}" for w in table["works"] if "origin" in w]
    before, _, rest = page.partition(START)
    return before + "\n".join([*lines, "", END]) + rest.partition(END)[2]


def all_texts() -> dict[Path, str]:
    """Return every text that depends on the credits, by its path."""
    page = ROOT / "docs" / "licences.md"
    texts = {
        ROOT / "NOTICE": notice_text(),
        page: page_text(page.read_text(encoding="utf-8")),
    }
    for name in read_table()["models"]:
        texts |= model_texts(bundled_folder("models") / name, name)
    return texts


def main() -> int:
    """Write or compare the texts."""
    parser = Options(__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files, and write nothing")
    check = parser.parse_args().check
    outdated = False
    for path, text in all_texts().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        outdated = True
        if not check:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'is outdated' if check else 'was written'}")
    return int(check and outdated)


if __name__ == "__main__":
    sys.exit(main())
