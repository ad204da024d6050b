"""``llmcond index`` and ``llmcond search`` on the command line."""

import csv
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.commands import run_json, run_rejected

from llmcond import Index
from llmcond.cli import run
from llmcond.workflows.index import index_texts
from llmcond.workflows.options.texts import IndexOptions

ROWS = [("a", "two men play in the park", "2019"), ("b", "children sit at the beach", "2024")]
ROWS += [("c", "three women walk in the rain", "2025"), ("d", "two dogs play at the beach", "2020")]
CONDITION = ("--condition", "the place")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("id", "text", "year"), *ROWS])
    return path


@pytest.fixture
def index(tmp_path: Path, texts: Path, heads_run: Path, capsys) -> Path:
    run_options = ["--run", heads_run, "--head", "low", "--device", "cpu"]
    out = tmp_path / "index"
    result = run_json(
        capsys, "index", texts, "--out", out, "--id", "id", "--keep", "year", *run_options
    )
    assert (result["texts"], result["added"]) == (4, 4)
    return out


def test_index_is_created_searched_and_updated(index: Path, texts: Path, capsys, tmp_path: Path):
    query = ["search", index, "dogs at the beach", *CONDITION, "-k", "2"]
    hits = run_json(capsys, *query, "--where", "year >= 2020")
    assert isinstance(hits["results"][0]["year"], int)
    assert [row["rank"] for row in hits["results"]] == [1, 2]
    assert set(hits["results"][0]) == {"rank", "score", "text", "id", "year"}
    assert hits["searched"] == 3
    (tmp_path / "gone.txt").write_text("a\nd\n")
    result = run_json(capsys, "index", "--out", index, "--delete", tmp_path / "gone.txt")
    assert (result["deleted"], result["texts"]) == (2, 2)
    result = run_json(capsys, "index", texts, "--out", index, "--id", "id", "--keep", "year")
    assert [result[name] for name in ("added", "replaced", "unchanged")] == [2, 0, 2]
    assert result["conditions"] == []  # a search prepares none


def test_options_decide_form_of_vectors(texts: Path, heads_run: Path, capsys, tmp_path: Path):
    options = ["--run", heads_run, "--head", "linear", "--device", "cpu", "--truncate-dim", "5"]
    command = ["index", texts, "--out", tmp_path / "small", *options, *CONDITION]
    result = run_json(capsys, *command, "--precision", "ubinary")
    assert (result["precision"], result["truncate_dim"]) == ("ubinary", 5)
    hits = run_json(capsys, "search", tmp_path / "small", "dogs", *CONDITION)
    assert (len(hits["results"]), hits["exact"]) == (4, False)
    assert "was built with precision ubinary, not int8" in run_rejected(
        capsys, *command, "--precision", "int8"
    )
    assert "4 texts are too few" in run_rejected(
        capsys, "index", texts, "--out", tmp_path / "other", *options, "--precision", "int8"
    )
    assert "--precision is 'float32'. Did you mean 'float16'" in run_rejected(
        capsys, *command, "--precision", "float32"
    )


TYPED = """id,text,year,price,flag,zip,key,day,note,big,gap
a,one,2019,1.50,true,01234,7,2024-01-31,,1234567890123456789,1
b,two,2024,-2e-3,False,99999,x,2024-02-01,,1,
"""


def test_csv_column_types_are_inferred(tmp_path, heads_run, capsys):
    path, out = tmp_path / "typed.csv", tmp_path / "typed"
    path.write_text(TYPED)
    run_options = ["--id", "id", "--run", heads_run, "--head", "low", "--device", "cpu"]
    keep = ["--keep", *TYPED.split(maxsplit=1)[0].split(",")[2:]]

    def search(where: str) -> list[dict]:
        hits = run_json(capsys, "search", out, "one", *CONDITION, "--where", where)["results"]
        return sorted(hits, key=lambda row: row["id"])

    run_json(capsys, "index", path, "--out", out, *keep, *run_options)
    first, second = search("true")
    assert [first[name] for name in keep[1:]] == [
        *(2019, 1.5, True, "01234", "7", "2024-01-31", "", "1234567890123456789", 1)
    ]
    assert (second["price"], second["flag"], second["gap"]) == (-0.002, False, None)
    where = "year > 2020 AND price < 0 AND NOT flag AND zip = '99999' AND day > '2024-01-31'"
    assert [row["id"] for row in search(where)] == ["b"]
    assert [row["id"] for row in search("gap IS NULL AND note = ''")] == ["b"]
    # Later files are read with the column types of the index.
    later = TYPED.split(maxsplit=1)[0] + "\nc,three,2025,3,true,7,8,9,10,11,\n"
    path.write_text(later)
    run_json(capsys, "index", path, "--out", out, *keep, *run_options)
    (third,) = search("id = 'c'")
    assert [third[name] for name in keep[1:]] == [
        *(2025, 3.0, True, "7", "8", "9", "10", "11", None)
    ]
    path.write_text(later.replace("c,three,2025", "d,four,unknown"))
    message = run_rejected(capsys, "index", path, "--out", out, *keep, *run_options)
    assert "the column 'year' has the type int64 in the index" in message
    assert "'unknown'" in message
    assert run_json(capsys, "search", out, "one", *CONDITION)["searched"] == 3


def test_narrow_table_drops_id_before_extra_columns(index: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "52")
    assert run(["search", str(index), "two dogs", *CONDITION]) == 0
    captured = capsys.readouterr()
    assert re.search("^ +rank +score +text +year *$", captured.out, re.MULTILINE)
    assert "columns left out, because a line has only 52 characters: id (" in captured.err
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["search", str(index), "two dogs", *CONDITION, "--explain"]) == 0
    order = " +".join(["", "rank", "score", "text", "without", "rank without", "year", "id", "$"])
    assert re.search(f"^{order}", capsys.readouterr().out, re.MULTILINE)


def test_index_remembers_values_of_conditions(index: Path, texts: Path, capsys):
    values = ("--values", 'beach, "Hyde Park"')
    run_json(
        capsys, "index", texts, "--out", index, "--id", "id", "--keep", "year", *CONDITION, *values
    )
    condition_text = "the place, such as beach, Hyde Park"
    with_values = run_json(capsys, "search", index, "two dogs", *CONDITION)
    assert with_values["conditions"] == {condition_text: 1.0}
    assert (
        with_values["results"]
        == run_json(capsys, "search", index, "two dogs", *CONDITION, *values)["results"]
    )
    assert run(["search", str(index), "two dogs", *CONDITION]) == 0
    message = "'the place' has the values that the index records: beach, Hyde Park (--values '' for"
    assert message in " ".join(capsys.readouterr().err.split())
    without_values = run_json(capsys, "search", index, "two dogs", *CONDITION, "--values", "")
    assert without_values["conditions"] == {"the place": 1.0}
    assert without_values["results"] != with_values["results"]
    conditions = (*CONDITION, *CONDITION, "--values", "", *values, "--explain")
    assert run(["search", str(index), "two dogs", *conditions]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"under the place under {condition_text}" in output
    several_conditions = (
        *CONDITION,
        "--condition",
        "the number of people",
        *values,
        "--values",
        "",
    )
    assert run(["search", str(index), "two dogs", *several_conditions, "--explain"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "under the place under the number of people" in output
    message = run_rejected(capsys, "index", "--out", index, "--delete", "a", *values)
    assert "1 --values and 0 --condition" in message


def test_hits_are_printed_as_table(index: Path, capsys):
    conditions = [
        *CONDITION,
        "--condition",
        "the number of people",
        "--weight",
        "1",
        "--weight",
        "0.5",
    ]
    assert run(["search", str(index), "two dogs", *conditions, "--explain"]) == 0
    output = capsys.readouterr().out
    for text in ("rank", "score", "id", "year", "under the place", "without", "rank without"):
        assert text in " ".join(output.split())
    assert all(row[1].split()[0] in output for row in ROWS)


def test_explain_names_encoder_of_unconditional_scores(
    tmp_path: Path, texts: Path, index: Path, heads_run: Path, capsys
):
    query = ["two dogs", *CONDITION, "--explain"]
    assert run(["search", str(index), *query]) == 0
    captured = capsys.readouterr()
    assert re.search(r"^without: bert\d+, no condition$", captured.err, re.MULTILINE)
    assert ("rank without" in captured.out, "under the place" in captured.out) == (True, False)
    joint = str(tmp_path / "joint")
    run_options = ["--run", str(heads_run), "--head", "linear", "--device", "cpu"]
    assert run(["index", str(texts), "--out", joint, *CONDITION, *run_options]) == 0
    capsys.readouterr()
    assert run(["search", joint, *query]) == 0
    captured = capsys.readouterr()
    assert "no condition; no ranks, because they need every text encoded" in captured.err
    assert ("without" in captured.out, "rank without" in captured.out) == (True, False)


def test_text_file_is_indexed_by_line(tmp_path: Path, heads_run: Path, capsys):
    (tmp_path / "texts.txt").write_text("".join(f"{row[1]}\n\n" for row in ROWS))
    command = ["index", tmp_path / "texts.txt", "--out", tmp_path / "index", "--run", heads_run]
    assert "--skip-empty" in run_rejected(capsys, *command)
    command.append("--skip-empty")
    result = run_json(capsys, *command, "--head", "linear", *CONDITION)
    assert (result["texts"], result["conditions"]) == (4, ["the place"])
    assert run_json(capsys, *command, "--head", "linear")["unchanged"] == 4


def test_invalid_search_reports_one_line(index: Path, tmp_path: Path, capsys):
    search = ["search", index, "dogs"]
    assert "is not an index" in run_rejected(capsys, "search", tmp_path, "dogs", *CONDITION)
    assert "required: --condition" in run_rejected(capsys, *search)
    assert "the query is empty" in run_rejected(capsys, "search", index, "", *CONDITION)
    assert "k is 0" in run_rejected(capsys, *search, *CONDITION, "-k", "0")
    assert "invalid int value" in run_rejected(capsys, *search, *CONDITION, "-k", "x")
    assert "there is no column 'kind'" in run_rejected(
        capsys, *search, *CONDITION, "--where", "kind = 1"
    )
    assert "2 --weight and 1 --condition" in run_rejected(
        capsys, *search, *CONDITION, "--weight", "1", "--weight", "2"
    )
    assert "a --condition is repeated" in run_rejected(
        capsys, *search, *CONDITION, "--condition", "The  place", "--weight", "1", "--weight", "2"
    )
    assert "every text anyway. Leave it out" in run_rejected(
        capsys, *search, *CONDITION, "--rerank", "3"
    )


def test_invalid_index_input_reports_one_line(index: Path, texts: Path, tmp_path: Path, capsys):
    def index_error(*arguments: object) -> str:
        return run_rejected(capsys, "index", *arguments)

    new = ["--out", tmp_path / "new"]
    assert "Name TEXTS to create one" in index_error(*new)
    assert "does not exist" in index_error(tmp_path / "none.csv", *new)
    assert "there is nothing to do" in index_error("--out", index)
    assert "has no column 'body'" in index_error(texts, *new, "--text", "body")
    assert "has no column 'key'" in index_error(texts, *new, "--id", "key")
    path = tmp_path / "double.csv"
    path.write_text("id,text\nx,one\ny, \nx,two\n")
    assert "row 2 of double.csv: text is empty" in index_error(path, *new, "--id", "id")
    path.write_text("id,text\nx,one\ny,two\nx,three\n")
    assert "the rows 1 and 3 have the same id, 'x'" in index_error(path, *new, "--id", "id")
    path.write_text("id,text,a.b\n1,one,x\n2,two,y\n")
    assert "'a.b' contains '.'" in index_error(path, *new, "--keep", "a.b")
    path.write_text('{"id": NaN, "text": "one"}\n{"id": 1.0, "text": "two"}\n')
    path = path.rename(tmp_path / "double.jsonl")
    assert "row 1: the id is empty" in index_error(path, *new, "--id", "id")
    path.write_text('{"id": "\\ud800", "text": "one", "k": "\\udfff"}\n')
    assert "half of a surrogate pair" in index_error(path, *new, "--id", "id")
    assert "half of a surrogate pair" in index_error(path, *new, "--keep", "k")
    assert "half of a surrogate pair" in index_error(path, *new, "--keep", "\udce4")
    assert not (tmp_path / "new").exists()
    # The names of columns are checked before texts are deleted.
    delete = ["--delete", "a"]
    assert "'a.b' contains '.'" in index_error(texts, "--out", index, *delete, "--keep", "a.b")
    assert len(Index.open(index, device="cpu")) == 4
    assert "half of a surrogate pair" in index_error("--out", index, "--delete", "\udce4")
    assert "another head" in index_error(texts, "--out", index, "--head", "relu")
    assert "is reserved" in index_error(texts, "--out", index, "--id", "id", "--keep", "id")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.json").write_text(json.dumps({}))
    assert "is not an index" in index_error(texts, "--out", tmp_path / "folder")


def test_guide_is_recorded_and_applied(index: Path, tmp_path: Path, capsys):
    labels = tmp_path / "labels.csv"
    labels.write_text("text,label\nmen in the park,park\ndogs at the beach,beach\na park,park\n")
    values = ("--values", "park, beach")
    before = run_json(capsys, "search", index, "two dogs", *CONDITION, *values)
    command = ("index", "--out", index)
    result = run_json(capsys, *command, *CONDITION, *values, "--guide", labels)
    condition_text = "the place, such as park, beach"
    guide = {"labels": {"park": 2, "beach": 1}, "source": "labels.csv"}
    assert result["guides"] == {condition_text: guide}
    guided = run_json(capsys, "search", index, "two dogs", *CONDITION)
    assert (guided["guides"], guided["conditions"]) == (
        {condition_text: guide},
        {condition_text: 1.0},
    )
    assert guided["results"] != before["results"]
    assert run(["search", str(index), "two dogs", *CONDITION]) == 0
    messages = " ".join(capsys.readouterr().err.split())
    assert "'the place' is guided by labelled texts: park, beach (labels.csv)" in messages
    assert "no column condition, but there are 0" in run_rejected(
        capsys, *command, "--guide", labels
    )
    assert "does not exist" in run_rejected(
        capsys, *command, *CONDITION, "--guide", tmp_path / "other.csv"
    )
    assert "Name it: --condition" in run_rejected(capsys, *command, "--guide", "none")
    assert "guides" not in run_json(capsys, *command, *CONDITION, "--guide", "none")
    after = run_json(capsys, "search", index, "two dogs", *CONDITION)
    assert after["results"] == before["results"]
    table = pd.DataFrame({"text": ["men in the park", "dogs at the beach"], "label": ["a", "b"]})
    result = index_texts(IndexOptions(out=index, condition=["the place"], guide=table))
    assert result.to_json()["guides"][condition_text]["labels"] == {"a": 1, "b": 1}
