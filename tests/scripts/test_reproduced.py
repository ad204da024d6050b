"""The index of the reproduced tables: complete, and equal to what its JSON files give."""

import json

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.script("reproduced", "reproduce")

FOLDER = ROOT / "docs" / "reproduced"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import reproduced

    return reproduced


def make_section(**changes):
    def row(paper, ours, set_up, others=()):
        figures = {"rank": {"value": ours}} if ours is not None else None
        reason = None if ours is not None else "not done: no data"
        return {
            "paper": {"rank": paper} if paper is not None else {},
            "paper_others": {"rank": list(others)},
            "ours": figures,
            "reason": reason,
            "set_up": set_up,
        }

    rows = [
        row(0.5, 0.256, ["other encoder"]),
        row(None, 0.1, ["other encoder", "one seed"], others=[0.25, 3]),
        row(None, None, []),
        row(None, 0.9, ["stand-in"]),
    ]
    return {
        "table": "Table 3",
        "title": "short-term planning (in %)",
        "command": "reproduce_triple.py --tables 3",
        "measures": [
            {"key": "unused", "heading": "Hits@1", "scale": 1, "digits": 0},
            {"key": "rank", "heading": "rank", "scale": 100, "digits": 1},
        ],
        "rows": rows,
        **changes,
    }


def rows_of(script, *sections):
    command = "python scripts/reproduce_triple.py --data talks --tables 2 3"
    record = {"paper": "Triple-Encoders", "command": command, "sections": sections}
    lines = script.render({"triple.md": record}).splitlines()
    return [line for line in lines if "Table 3" in line and "triple" in line]


def test_row_has_ranges_and_common_differences(script):
    (line,) = rows_of(script, make_section())
    assert line == (
        "| [Table 3](triple.md#table-3-short-term-planning-in-) | short-term planning (in %) | "
        "`python scripts/reproduce_triple.py --data talks --tables 3` | rank 0.25 to 3 | "
        "rank 10.0 to 25.6 | other encoder; one seed; "
        "the page has 1 further row that the paper lacks |"
    )


def test_table_that_paper_lacks_has_range_of_all_rows(script):
    (line,) = rows_of(script, make_section(rows=make_section()["rows"][3:]))
    assert line.endswith("| – | rank 90.0 | stand-in |")


def test_options_of_page_are_not_repeated(script):
    command = "bench_cache.py --graph g --sample 3"
    assert script._full_command(command, f"python scripts/{command}") == f"python scripts/{command}"
    page_command = "python scripts/reproduce_graphs.py --data g"
    assert script._full_command("reproduce_graphs.py", page_command) == page_command


def test_table_without_figures_has_reason(script):
    rows = make_section()["rows"][2:3]
    (line,) = rows_of(script, make_section(rows=rows))
    assert line.endswith("| – | – | not done: no data |")


def test_every_reproduced_table_is_listed(script):
    pages = script.read_pages(FOLDER)
    text = script.render(pages)
    for page, record in pages.items():
        for section in record["sections"]:
            assert f"[{section['table']}]({page}#" in text, (page, section["table"])
            headings = (FOLDER / page).read_text(encoding="utf-8").splitlines()
            assert f"## {section['table']}: {section['title']}" in headings


def test_committed_index_is_up_to_date(script):
    expected = script.render(script.read_pages(FOLDER))
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == expected


def test_json_files_contain_no_paths(script):
    for record in script.read_pages(FOLDER).values():
        assert "/work" not in json.dumps(record)
        assert "/tmp" not in json.dumps(record)
