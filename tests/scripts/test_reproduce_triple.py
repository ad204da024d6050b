"""The tables of Triple-Encoders on dialogues: complete rows, cached heads and reported errors."""

import json
from pathlib import Path

import pytest
from helpers.dialogues import write_dialogues
from helpers.flags import change_flags
from helpers.paths import ROOT

from llmcond.runs import open_any_run

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.script("reproduce", "reproduce_triple"),
]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import reproduce_triple

        yield reproduce_triple


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, tiny_bert):
    folder = tmp_path_factory.mktemp("triple")
    data = write_dialogues(folder / "dialogues")
    options = ("--quick", "--device", "cpu", "--dtype", "float32", "--plan-history", "2", "--json")
    return [
        *("--encoders", str(tiny_bert), "--data", str(data), "--folder", str(folder / "runs")),
        *options,
    ]


def run(script, capsys, arguments):
    code = script.main(arguments)
    out = capsys.readouterr().out
    text, _, last = out.rstrip("\n").rpartition("\n")
    return code, text, json.loads(last)


def test_every_table_has_figures_next_to_those_of_paper(script, arguments, capsys, tmp_path):
    out = tmp_path / "page.md"
    code, _, record = run(script, capsys, change_flags(arguments, "--out", str(out)))
    assert code == 0
    assert json.loads(out.with_suffix(".json").read_text()) == record
    sections = {section["table"]: section["rows"] for section in record["sections"]}
    assert list(sections) == [
        *(f"Table {n}" for n in range(2, 8)),
        *(f"Figure {n}" for n in (6, 7, 8)),
    ]
    for table, rows in sections.items():
        for row in rows:
            if row.get("candidates") == "samples of DialoGPT":
                assert row["reason"] == "not done: it needs a language model (--generate)"
            else:
                assert row["reason"] is None, (table, row)
    by_label = {row["terms"]: row for row in sections["Table 5"]}
    assert by_label["mean with only [B1]"]["paper"] == {"average_rank": 33.45}
    figures = [row["ours"]["average_rank"]["value"] for row in sections["Table 5"]]
    assert len(set(figures)) > 2
    # The same heads and scores have the same figures in all tables.
    assert figures[0] == sections["Table 4"][0]["ours"]["average_rank"]["value"]
    assert figures[0] == sections["Table 2"][-1]["ours"]["average_rank"]["value"]
    newest, all_turns = (sections["Table 7"][i]["ours"]["tokens"]["value"] for i in (0, 3))
    assert 2 < newest < all_turns
    page = out.read_text()
    for number in (6, 7, 8):
        assert f"](page-figure-{number}.svg)" in page
        assert (tmp_path / f"page-figure-{number}-data.csv").is_file()
    assert str(tmp_path.parent) not in page + json.dumps(record)


def test_fitted_heads_are_reused_and_start_from_ccl(script, arguments, capsys, monkeypatch):
    code, text, _ = run(script, capsys, change_flags(arguments, "--tables", "2"))
    assert code == 0
    (folder,) = Path(arguments[arguments.index("--folder") + 1]).iterdir()
    opened = open_any_run(folder)
    record = opened.head_record("c3l-0")
    assert record["start"]["weights_sha256"] == opened.head_record("ccl-0")["weights_sha256"]

    def fail_if_called(**_):
        raise AssertionError("this head was already fitted")

    monkeypatch.setattr("reproduce.fit_head", fail_if_called)
    assert run(script, capsys, change_flags(arguments, "--tables", "2"))[1] == text
    # A head with other settings is fitted again.
    fits = []
    monkeypatch.setattr("reproduce.fit_head", lambda **options: fits.append(options["name"]))
    monkeypatch.setitem(script.HEADS, "c3l", ("c3l-paper", {}, "ccl"))
    run(script, capsys, change_flags(arguments, "--tables", "2"))
    assert fits == ["c3l-0"]


def test_invalid_input_is_reported(script, arguments, capsys, caplog, tmp_path):
    assert script.main(change_flags(arguments, "--seeds", "0")) == 2
    assert "--seeds is 0; it must be at least 1" in caplog.text
    assert script.main(change_flags(arguments, "--out", str(tmp_path / "page.txt"))) == 2
    assert script.main(change_flags(arguments, "--data", str(tmp_path / "missing"))) == 2
    arguments = ["--encoders", str(tmp_path / "missing"), *arguments[2:], "--tables", "4"]
    code, text, record = run(script, capsys, arguments)
    assert code == 1
    assert "not done: " in text
    assert all(row["ours"] is None for row in record["sections"][0]["rows"])
