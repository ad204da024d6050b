"""Write docs/reproduced/README.md: a row for each table and figure of the four papers.

    python scripts/reproduced.py

The figures are read from the JSON files in docs/reproduced, which reproduce_case.py,
reproduce_hypercl.py, reproduce_graphs.py, reproduce_csr.py and reproduce_triple.py write.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Options, markdown_table

from llmcond.base.errors import format_count
from llmcond.base.files import read_json, write_text

FOLDER = Path(__file__).parents[1] / "docs" / "reproduced"
HEADINGS = ("in the paper", "subject", "command", "paper", "ours", "what differs")
NO_DATA = "an illustration without results"
NO_BOOKS = "not done: the Children's Book Test was not measured"
ONE_SENTENCE = "a picture of one sentence, which the command draws for any sentence and encoder"
EXPLAIN = "llmcond explain SENTENCE --condition C --run RUN --out FIGURE.svg"
CBT = "llmcond extract --task dialogue --data FOLDER"


def _expand(numbers: str) -> list[str]:
    """Return the names of tables, figures and sections, such as those of ``T1 F3 S5.2``."""
    kinds = {"T": "Table", "F": "Figure", "S": "Section"}
    return [f"{kinds[number[0]]} {number[1:]}" for number in numbers.split()]


#: The first words of a paper's name in the JSON files -> its reference, a note, and its contents in
#: order: the number of a table that a script computes, or with its subject, why it has no figures,
#: and the command that produces it, if there is one.
PAPERS: Mapping[str, tuple[str, str, Sequence[str | Sequence[str]]]] = {
    "CASE": (
        "[CASE](https://arxiv.org/abs/2503.17279)",
        "The paper trains on the original ratings. It tunes on 70 % of the re-annotated validation "
        "set, which it split itself, and scores the other 30 %.",
        (
            ("Figure 1", "a sentence pair under two conditions", NO_DATA),
            ("Figure 2", "the method", NO_DATA),
            *_expand("T1 F3 F4 T2 T3 T4 T5 F5 F6 T6 T7 T8"),
        ),
    ),
    "Hyper-CL": (
        "[Hyper-CL](https://arxiv.org/abs/2403.09490) (ACL 2024)",
        "",
        (
            ("Figure 1", "two conditions of a sentence pair", NO_DATA),
            ("Figure 2", "four architectures", NO_DATA),
            ("Figure 3", "the training procedure", NO_DATA),
            *_expand("T1 T2 T3 T4 S5.2 F4 T5 T6 S5.4.1 T7 T8"),
        ),
    ),
    "CSR": (
        "[CSR](https://github.com/bigai-nlco/CSR) (EMNLP 2024 Findings)",
        "",
        (
            ("Figure 1", "architectures", NO_DATA),
            ("Figures 2 and 3", "the method", NO_DATA),
            *_expand("T1 F4 T2 T3 T4"),
            ("Figure 5", "token weights without a router", ONE_SENTENCE, EXPLAIN),
            ("Figure 6", "token weights with a router", ONE_SENTENCE, EXPLAIN),
            ("Figure 7", "token weights under several conditions", ONE_SENTENCE, EXPLAIN),
        ),
    ),
    "Triple-Encoders": (
        "[Triple-Encoders](https://arxiv.org/abs/2402.12332) (ACL 2024)",
        "",
        (
            ("Figure 1", "the method", NO_DATA),
            ("Figure 2", "a difficult example", NO_DATA),
            ("Figure 3", "relative distances", NO_DATA),
            ("Figure 4", "the architecture", NO_DATA),
            ("Figure 5", "the relative time dimension", NO_DATA),
            ("Table 1", "pairs of turns that are averaged", NO_DATA),
            *_expand("F6 T2 F7 T3 T4 T5 T6 F8 T7"),
            ("Table 8", "last rows on the Children's Book Test", NO_BOOKS, CBT),
            ("Figure 9", "next sentences on the Children's Book Test", NO_BOOKS, CBT),
        ),
    ),
}


def render(pages: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the index.

    Args:
        pages: the record of each page, by the page's file name.
    """
    parts = [
        "# The papers, reproduced",
        "This page has a row for every table and figure of four papers. "
        "`python scripts/reproduced.py` generates it from the JSON files in this folder, which the "
        "scripts write together with the pages that the first column links to.",
        "Columns with figures have the range over the rows that the paper has, in a table's first "
        "column of figures. If there is no figure of ours in these rows, it is the range over all "
        "rows of ours. "
        '"What differs" has the differences that at least half of these rows have.',
        "No figure of a paper can be reproduced exactly without its encoders; the scripts take any "
        "encoder (`--encoders`). In the commands, `csts`, `wn18rr`, `fb15k-237` and `dialogues` "
        "are the folders with the data of C-STS, of the graphs and of the dialogues.",
    ]
    for name, (reference, note, entries) in PAPERS.items():
        records = {
            page: record for page, record in pages.items() if record["paper"].startswith(name)
        }
        commands = "\n".join(record["command"] for record in records.values())
        block = f"```bash\n{commands}\n```" if commands else ""
        parts += [f"## {reference}", *filter(None, (note, block))]
        rows = [row for entry in entries for row in _rows(entry, records)]
        parts.append(markdown_table(HEADINGS, rows))
    return "\n\n".join(parts) + "\n"


def _rows(
    entry: str | Sequence[str], records: Mapping[str, Mapping[str, Any]]
) -> Iterator[list[str]]:
    """Yield a row for each section of an entry's table, or one without figures."""
    if not isinstance(entry, str):
        table, subject, reason, *commands = entry
        yield [table, subject, f"`{commands[0]}`" if commands else "–", "–", "–", reason]
        return
    for page, record in records.items():
        for section in (s for s in record["sections"] if s["table"] == entry):
            link = f"[{entry}]({page}#{_anchor(section)})"
            command = _full_command(section["command"], record["command"])
            yield [link, section["title"], f"`{command}`", *_figures(section)]


def _full_command(command: str, page_command: str) -> str:
    """Return the command of a section with the options of the command of its page."""
    script, _, options = command.partition(" ")
    start = page_command.partition(" --tables ")[0]
    if options and options in start:
        return start
    return f"{start} {options}".rstrip() if script in start else f"python scripts/{command}"


def _anchor(section: Mapping[str, Any]) -> str:
    """Return the anchor of a section's heading, as GitHub makes it."""
    heading = f"{section['table']}: {section['title']}".lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def _figures(section: Mapping[str, Any]) -> list[str]:
    """Return the cells with the paper's figures, ours, and what differs."""
    rows = section["rows"]
    reasons = [row["reason"] for row in rows if row["reason"]]
    for measure in section["measures"]:
        key = measure["key"]
        printed = [
            figure
            for row in rows
            for figure in (
                *([row["paper"][key]] if key in row["paper"] else []),
                *row["paper_others"].get(key, []),
            )
        ]
        all_measured = [
            row
            for row in rows
            if row["ours"] and key in row["ours"] and row["ours"][key]["value"] is not None
        ]
        # The rows of stand-ins, which the paper does not have, are no part of the comparison.
        measured = [
            row for row in all_measured if key in row["paper"] or row["paper_others"].get(key)
        ] or all_measured
        ours = [measure["scale"] * row["ours"][key]["value"] for row in measured]
        if not printed and not ours:
            continue
        heading, digits = measure["heading"], measure["digits"]
        counts = Counter(text for row in measured for text in row["set_up"])
        common = [text for text, count in counts.items() if 2 * count >= len(ours)]
        # "Scored on dev" is part of "scored on dev, which also chose the epoch".
        common = [text for text in common if not any(o != text and text in o for o in common)]
        n_left_out = len(all_measured) - len(measured)
        if n_left_out:
            further = format_count(n_left_out, "further row")
            common.append(f"the page has {further} that the paper lacks")
        cells = [_range(printed, None), _range(ours, digits)]
        texts = [f"{heading} {cell}" if cell != "–" else cell for cell in cells]
        return [*texts, "; ".join(common) or (reasons[0] if reasons and not ours else "nothing")]
    return ["–", "–", reasons[0] if reasons else "see the page"]


def _range(figures: Sequence[float], digits: int | None) -> str:
    if not figures:
        return "–"
    texts = [
        f"{f:g}" if digits is None else f"{f:.{digits}f}" for f in (min(figures), max(figures))
    ]
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def read_pages(folder: Path) -> dict[str, Any]:
    """Return the JSON record of each page in a folder, by the page's file name."""
    return {path.with_suffix(".md").name: read_json(path) for path in sorted(folder.glob("*.json"))}


def main() -> None:
    """Write the index."""
    Options(__doc__).parse_args()
    write_text(FOLDER / "README.md", render(read_pages(FOLDER)))


if __name__ == "__main__":
    main()
