"""`llmcond index` and `llmcond search`, as a user runs them."""

import csv
import json
import re
from pathlib import Path

import pandas as pd
import pytest
from helpers.commands import ok, refused

from llmcond.cli import run
from llmcond.workflows.index import index_texts
from llmcond.workflows.options.texts import IndexOptions

ROWS = [("a", "two men play in the park", "2019"), ("b", "children sit at the beach", "2024")]
ROWS += [("c", "three women walk in the rain", "2025"), ("d", "two dogs play at the beach", "2020")]
PLACE = ("--condition", "the place")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("id", "text", "year"), *ROWS])
    return path


@pytest.fixture
def made(tmp_path: Path, texts: Path, heads_run: Path, capsys) -> Path:
    made_by = ["--run", heads_run, "--head", "low", "--device", "cpu"]
    out = tmp_path / "index"
    result = ok(capsys, "index", texts, "--out", out, "--id", "id", "--keep", "year", *made_by)
    assert (result["texts"], result["added"]) == (4, 4)
    return out


def test_a_file_is_indexed_searched_and_changed(made: Path, texts: Path, capsys, tmp_path: Path):
    query = ["search", made, "dogs at the beach", *PLACE, "-k", "2"]
    found = ok(capsys, *query, "--where", "year >= 2020")
    assert isinstance(found["results"][0]["year"], int)
    assert [row["rank"] for row in found["results"]] == [1, 2]
    assert set(found["results"][0]) == {"rank", "score", "text", "id", "year"}
    assert found["searched"] == 3
    (tmp_path / "gone.txt").write_text("a\nd\n")
    result = ok(capsys, "index", "--out", made, "--delete", tmp_path / "gone.txt")
    assert (result["deleted"], result["texts"]) == (2, 2)
    result = ok(capsys, "index", texts, "--out", made, "--id", "id", "--keep", "year")
    assert [result[name] for name in ("added", "replaced", "unchanged")] == [2, 0, 2]
    assert result["conditions"] == ["the place"]


TYPED = """id,text,year,price,flag,zip,key,day,note,big,gap
a,one,2019,1.50,true,01234,7,2024-01-31,,1234567890123456789,1
b,two,2024,-2e-3,False,99999,x,2024-02-01,,1,
"""


def test_columns_of_a_csv_file_have_the_types_of_their_values(tmp_path, heads_run, capsys):
    path, out = tmp_path / "typed.csv", tmp_path / "typed"
    path.write_text(TYPED)
    made_by = ["--id", "id", "--run", heads_run, "--head", "low", "--device", "cpu"]
    keep = ["--keep", *TYPED.split(maxsplit=1)[0].split(",")[2:]]

    def search(where: str) -> list[dict]:
        found = ok(capsys, "search", out, "one", *PLACE, "--where", where)["results"]
        return sorted(found, key=lambda row: row["id"])

    ok(capsys, "index", path, "--out", out, *keep, *made_by)
    first, second = search("true")
    assert [first[name] for name in keep[1:]] == [
        *(2019, 1.5, True, "01234", "7", "2024-01-31", "", "1234567890123456789", 1)
    ]
    assert (second["price"], second["flag"], second["gap"]) == (-0.002, False, None)
    where = "year > 2020 AND price < 0 AND NOT flag AND zip = '99999' AND day > '2024-01-31'"
    assert [row["id"] for row in search(where)] == ["b"]
    assert [row["id"] for row in search("gap IS NULL AND note = ''")] == ["b"]
    # Later files are read as the types that the index has.
    later = TYPED.split(maxsplit=1)[0] + "\nc,three,2025,3,true,7,8,9,10,11,\n"
    path.write_text(later)
    ok(capsys, "index", path, "--out", out, *keep, *made_by)
    (third,) = search("id = 'c'")
    assert [third[name] for name in keep[1:]] == [
        *(2025, 3.0, True, "7", "8", "9", "10", "11", None)
    ]
    path.write_text(later.replace("c,three,2025", "d,four,unknown"))
    said = refused(capsys, "index", path, "--out", out, *keep, *made_by)
    assert "the column 'year' has the type int64 in the index" in said
    assert "'unknown'" in said
    assert ok(capsys, "search", out, "one", *PLACE)["searched"] == 3


def test_kept_columns_stay_longer_than_the_id_in_a_narrow_terminal(made: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "52")
    assert run(["search", str(made), "two dogs", *PLACE]) == 0
    shown = capsys.readouterr()
    assert re.search("^ +rank +score +text +year *$", shown.out, re.MULTILINE)
    assert "columns left out, because a line has only 52 characters: id (" in shown.err
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["search", str(made), "two dogs", *PLACE, "--explain"]) == 0
    order = " +".join(["", "rank", "score", "text", "without", "rank without", "year", "id", "$"])
    assert re.search(f"^{order}", capsys.readouterr().out, re.MULTILINE)


def test_values_are_named_once(made: Path, texts: Path, capsys):
    values = ("--values", 'beach, "Hyde Park"')
    ok(capsys, "index", texts, "--out", made, "--id", "id", "--keep", "year", *PLACE, *values)
    reads = "the place, such as beach, Hyde Park"
    found = ok(capsys, "search", made, "two dogs", *PLACE)
    assert found["conditions"] == {reads: 1.0}
    assert found["results"] == ok(capsys, "search", made, "two dogs", *PLACE, *values)["results"]
    assert run(["search", str(made), "two dogs", *PLACE]) == 0
    said = "'the place' has the values that the index records: beach, Hyde Park (--values '' for"
    assert said in " ".join(capsys.readouterr().err.split())
    plain = ok(capsys, "search", made, "two dogs", *PLACE, "--values", "")
    assert plain["conditions"] == {"the place": 1.0}
    assert plain["results"] != found["results"]
    both = (*PLACE, *PLACE, "--values", "", *values, "--explain")
    assert run(["search", str(made), "two dogs", *both]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"under the place under {reads}" in shown
    several = (*PLACE, "--condition", "the number of people", *values, "--values", "")
    assert run(["search", str(made), "two dogs", *several, "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "under the place under the number of people" in shown
    said = refused(capsys, "index", "--out", made, "--delete", "a", *values)
    assert "1 --values and 0 --condition" in said


def test_hits_are_shown_in_a_table(made: Path, capsys):
    several = [*PLACE, "--condition", "the number of people", "--weight", "1", "--weight", "0.5"]
    assert run(["search", str(made), "two dogs", *several, "--explain"]) == 0
    shown = capsys.readouterr().out
    for text in ("rank", "score", "id", "year", "under the place", "without", "rank without"):
        assert text in " ".join(shown.split())
    assert all(row[1].split()[0] in shown for row in ROWS)


def test_scores_without_a_condition_are_said_to_be_of_which_encoder(
    tmp_path: Path, texts: Path, made: Path, heads_run: Path, capsys
):
    explained = ["two dogs", *PLACE, "--explain"]
    assert run(["search", str(made), *explained]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^without: bert\d+, no condition$", shown.err, re.MULTILINE)
    assert ("rank without" in shown.out, "under the place" in shown.out) == (True, False)
    joint = str(tmp_path / "joint")
    made_by = ["--run", str(heads_run), "--head", "linear", "--device", "cpu"]
    assert run(["index", str(texts), "--out", joint, *PLACE, *made_by]) == 0
    capsys.readouterr()
    assert run(["search", joint, *explained]) == 0
    shown = capsys.readouterr()
    assert "no condition; no ranks, because they need every text encoded" in shown.err
    assert ("without" in shown.out, "rank without" in shown.out) == (True, False)


def test_a_text_file_is_indexed_by_its_lines(tmp_path: Path, heads_run: Path, capsys):
    (tmp_path / "texts.txt").write_text("".join(f"{row[1]}\n\n" for row in ROWS))
    given = ["index", tmp_path / "texts.txt", "--out", tmp_path / "index", "--run", heads_run]
    result = ok(capsys, *given, "--head", "linear", *PLACE)
    assert (result["texts"], result["conditions"]) == (4, ["the place"])
    assert ok(capsys, *given, "--head", "linear")["unchanged"] == 4


def test_wrong_searches_are_told_in_a_line(made: Path, tmp_path: Path, capsys):
    search = ["search", made, "dogs"]
    assert "is not an index" in refused(capsys, "search", tmp_path, "dogs", *PLACE)
    assert "required: --condition" in refused(capsys, *search)
    assert "the query is empty" in refused(capsys, "search", made, "", *PLACE)
    assert "k is 0" in refused(capsys, *search, *PLACE, "-k", "0")
    assert "invalid int value" in refused(capsys, *search, *PLACE, "-k", "x")
    assert "there is no column 'kind'" in refused(capsys, *search, *PLACE, "--where", "kind = 1")
    assert "2 --weight and 1 --condition" in refused(
        capsys, *search, *PLACE, "--weight", "1", "--weight", "2"
    )
    assert "a --condition is repeated" in refused(capsys, *search, *PLACE, *PLACE)
    assert "every text anyway. Leave it out" in refused(capsys, *search, *PLACE, "--rerank", "3")


def test_wrong_texts_are_told_in_a_line(made: Path, texts: Path, tmp_path: Path, capsys):
    def told(*arguments: object) -> str:
        return refused(capsys, "index", *arguments)

    new = ["--out", tmp_path / "new"]
    assert "Name TEXTS to create one" in told(*new)
    assert "does not exist" in told(tmp_path / "none.csv", *new)
    assert "there is nothing to do" in told("--out", made)
    assert "has no column 'body'" in told(texts, *new, "--text", "body")
    assert "has no column 'key'" in told(texts, *new, "--id", "key")
    double = tmp_path / "double.csv"
    double.write_text("id,text\nx,one\ny, \nx,two\n")
    assert "row 2 of double.csv: text is empty" in told(double, *new, "--id", "id")
    double.write_text("id,text\nx,one\ny,two\nx,three\n")
    assert "the rows 1 and 3 have the same id, 'x'" in told(double, *new, "--id", "id")
    assert not (tmp_path / "new").exists()
    assert "another head" in told(texts, "--out", made, "--head", "relu")
    assert "is reserved" in told(texts, "--out", made, "--id", "id", "--keep", "id")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.json").write_text(json.dumps({}))
    assert "is not an index" in told(texts, "--out", tmp_path / "folder")


def test_a_guide_is_recorded_and_followed(made: Path, tmp_path: Path, capsys):
    labels = tmp_path / "labels.csv"
    labels.write_text("text,label\nmen in the park,park\ndogs at the beach,beach\na park,park\n")
    values = ("--values", "park, beach")
    before = ok(capsys, "search", made, "two dogs", *PLACE, *values)
    index = ("index", "--out", made)
    result = ok(capsys, *index, *PLACE, *values, "--guide", labels)
    reads = "the place, such as park, beach"
    guide = {"labels": {"park": 2, "beach": 1}, "source": "labels.csv"}
    assert result["guides"] == {reads: guide}
    found = ok(capsys, "search", made, "two dogs", *PLACE)
    assert (found["guides"], found["conditions"]) == ({reads: guide}, {reads: 1.0})
    assert found["results"] != before["results"]
    assert run(["search", str(made), "two dogs", *PLACE]) == 0
    messages = " ".join(capsys.readouterr().err.split())
    assert "'the place' is guided by labelled texts: park, beach (labels.csv)" in messages
    assert "no column condition, but there are 0" in refused(capsys, *index, "--guide", labels)
    assert "does not exist" in refused(capsys, *index, *PLACE, "--guide", tmp_path / "other.csv")
    assert "Name it: --condition" in refused(capsys, *index, "--guide", "none")
    assert "guides" not in ok(capsys, *index, *PLACE, "--guide", "none")
    after = ok(capsys, "search", made, "two dogs", *PLACE)
    assert after["results"] == before["results"]
    table = pd.DataFrame({"text": ["men in the park", "dogs at the beach"], "label": ["a", "b"]})
    result = index_texts(IndexOptions(out=made, condition=["the place"], guide=table))
    assert result.to_json()["guides"][reads]["labels"] == {"a": 1, "b": 1}
