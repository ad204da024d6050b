"""``llmcond index`` and ``llmcond search`` on the command line."""

import csv
import json

import pytest
from helpers.commands import run_json, run_rejected

from llmcond import Index
from llmcond.cli import run

ROWS = [("a", "two men play in the park", "2019"), ("b", "children sit at the beach", "2024")]
ROWS += [("c", "three women walk in the rain", "2025"), ("d", "two dogs play at the beach", "2020")]
CONDITION = ("--condition", "the place")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("id", "text", "year"), *ROWS])
    return path


@pytest.fixture
def create(capsys, heads_run):
    """Return a function that creates or extends an index with a head of a run."""

    def create_index(source, out, *options, head="low", command=run_json):
        model = ("--run", heads_run, "--head", head, "--device", "cpu")
        return command(capsys, "index", source, "--out", out, *model, *options)

    return create_index


@pytest.fixture
def index(tmp_path, texts, create):
    result = create(texts, tmp_path / "index", "--id", "id", "--keep", "year")
    assert (result["texts"], result["added"]) == (4, 4)
    return tmp_path / "index"


@pytest.fixture
def search(capsys, index):
    """Return a function that searches the index for two dogs, and returns the JSON."""
    return lambda *options: run_json(capsys, "search", index, "two dogs", *options)


@pytest.fixture
def show(capsys, index):
    """Return a function that searches the index for two dogs, and returns the printed output."""

    def show_hits(*options, folder=index):
        assert run(["search", str(folder), "two dogs", *options]) == 0
        return capsys.readouterr()

    return show_hits


def in_one_line(text):
    return " ".join(text.split())


def test_index_is_created_searched_and_updated(index, search, texts, capsys, tmp_path):
    hits = search(*CONDITION, "-k", "2", "--where", "year >= 2020")
    assert isinstance(hits["results"][0]["year"], int)
    assert [row["rank"] for row in hits["results"]] == [1, 2]
    assert set(hits["results"][0]) == {"rank", "score", "text", "id", "year"}
    assert hits["searched"] == 3
    (tmp_path / "gone.txt").write_text("a\nd\n")
    result = run_json(capsys, "index", "--out", index, "--delete", tmp_path / "gone.txt")
    assert (result["deleted"], result["texts"]) == (2, 2)
    # Invalid texts or ids delete nothing.
    for rows in ('x,1\n" ",2\n', "x,1\ny,1\n"):
        (tmp_path / "bad.csv").write_text(f"text,id\n{rows}")
        options = ("--out", index, "--id", "id", "--delete", "b")
        run_rejected(capsys, "index", tmp_path / "bad.csv", *options)
        assert len(Index.open(index)) == 2
    (tmp_path / "bad.csv").write_text("text,id,month\nx,1,2\n")
    line = run_rejected(capsys, "index", tmp_path / "bad.csv", *options, "--keep", "month")
    assert "but the index has" in line
    assert len(Index.open(index)) == 2
    result = run_json(capsys, "index", texts, "--out", index, "--id", "id", "--keep", "year")
    assert [result[name] for name in ("added", "replaced", "unchanged")] == [2, 0, 2]
    assert result["conditions"] == []  # a search prepares none


def test_weights_belong_to_conditions(search):
    def scores(*options):
        return {row["id"]: row["score"] for row in search(*options)["results"]}

    alone, colour = scores(*CONDITION), scores("--condition", "the colour")
    weights = ("--weight", "The  place=0.5", "--weight", "the colour=-2")
    for options in (weights, (*CONDITION, *weights)):
        for name, score in scores(*options).items():
            assert score == pytest.approx(0.5 * alone[name] - 2 * colour[name], abs=2e-3)
    for name, score in scores(*CONDITION, *weights[2:]).items():
        assert score == pytest.approx(alone[name] - 2 * colour[name], abs=2e-3)


def test_invalid_search_reports_one_line(index, tmp_path, capsys):
    search = (index, "dogs", *CONDITION)
    for arguments, expected in (
        ((tmp_path, "dogs", *CONDITION), "is not an index"),
        ((index, "dogs"), "there is no condition. Give --condition or --weight"),
        ((index, "dogs", "--ignore", "the colour"), "--ignore needs --condition or --weight"),
        ((*search, "--weight", "0.5"), "expected CONDITION=NUMBER"),
        ((*search, "--weight", "the place=much"), "expected CONDITION=NUMBER"),
        ((*search, "--weight", " =1"), "the condition of --weight is empty"),
        ((*search, "--weight", "A=1", "--weight", " a =2"), "--weight names 'a' twice"),
        ((*search, "--weight", "the place=nan"), "the weight of 'the place' is nan"),
        ((*search, "--rerank", "3"), "every text anyway. Leave it out"),
    ):
        assert expected in run_rejected(capsys, "search", *arguments)


def test_invalid_index_input_reports_one_line(index, texts, tmp_path, capsys):
    new, path = ("--out", tmp_path / "new"), tmp_path / "double.jsonl"
    for content, options, expected in (
        (
            [{"id": "x", "text": "a"}, {"id": "y", "text": " "}],
            (),
            "row 2 of double.jsonl: text is",
        ),
        ([{"id": name, "text": "a"} for name in "xyx"], (), "rows 1 and 3 have the same id, 'x'"),
        ([{"id": "x", "text": "a", "a.b": 1}], ("--keep", "a.b"), "'a.b' contains '.'"),
        ([{"id": float("nan"), "text": "a"}], (), "row 1: the id is empty"),
        (
            [{"id": "x", "text": " "}, {"id": None, "text": "a"}],
            ("--skip-empty",),
            "row 2: the id is empty",
        ),
        ([{"id": "x", "text": "a", "mentions": 1}], ("--keep", "mentions"), "is reserved"),
    ):
        path.write_text("\n".join(json.dumps(row) for row in content))
        message = run_rejected(capsys, "index", path, *new, "--id", "id", *options)
        assert expected in message
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.json").write_text("{}")
    for arguments, expected in (
        (new, "Name TEXTS to create one"),
        (("--out", index), "there is nothing to do"),
        (("--out", index, *CONDITION, "--keep", "year"), "--keep needs TEXTS"),
        ((texts, "--out", index, "--head", "relu"), "another head"),
        ((texts, "--out", tmp_path / "folder"), "is not an index"),
        (
            (texts, *new, *CONDITION, "--ignore", "year", "--precision", "binary"),
            "and --precision is binary",
        ),
        # The names of columns are checked before texts are deleted.
        ((texts, "--out", index, "--delete", "a", "--keep", "a.b"), "'a.b' contains '.'"),
    ):
        assert expected in run_rejected(capsys, "index", *arguments)
    assert not (tmp_path / "new").exists()
    more = tmp_path / "more.csv"
    for year in ("01067", "2024.5", "soon"):  # none would have made a column of whole numbers
        more.write_text(f"id,text,year\nn,a new text,{year}\n")
        message = run_rejected(
            capsys, "index", more, "--out", index, "--id", "id", "--keep", "year"
        )
        assert f"the column 'year' has the type int64 in the index: '{year}' is not" in message
    assert len(Index.open(index, device="cpu")) == 4
    # The options of the texts do not apply to the file of ids.
    more.write_text("id;text\nn;a new text\n")
    ids = tmp_path / "ids.txt"
    ids.write_text("n\n")
    added = ("index", more, "--out", index, "--id", "id", "--delimiter", ";", "--delete", ids)
    assert run([str(word) for word in added]) == 0


def test_values_and_guide_are_recorded_and_applied(index, search, show, tmp_path, capsys):
    labels = tmp_path / "labels.csv"
    labels.write_text("text,label\nmen in the park,park\ndogs at the beach,beach\na park,park\n")
    values = ("--values", "park, beach")
    before = search(*CONDITION, *values)
    assert before["results"] != search(*CONDITION)["results"]
    command, condition_text = ("index", "--out", index), "the place, such as park, beach"
    result = run_json(capsys, *command, *CONDITION, *values, "--guide", labels)
    guides = {condition_text: {"labels": {"park": 2, "beach": 1}, "source": "labels.csv"}}
    assert result["guides"] == guides
    guided = search(*CONDITION)
    assert (guided["guides"], guided["conditions"]) == (guides, {condition_text: 1.0})
    assert guided["results"] != before["results"]
    messages = in_one_line(show(*CONDITION).err)
    assert "'the place' is guided by labelled texts: park, beach (labels.csv)" in messages
    message = run_rejected(capsys, *command, "--guide", labels)
    assert "no column condition, but there are 0" in message
    assert "guides" not in run_json(capsys, *command, *CONDITION, "--guide", "none")
    assert search(*CONDITION)["results"] == before["results"]
    more = tmp_path / "more.csv"  # enough texts to find what to ignore
    more.write_text("id,text,year\n" + "".join(f"{i},{i} dogs,{i % 9}\n" for i in range(60)))
    run_json(capsys, *command, more, "--id", "id", "--keep", "year")
    run_json(capsys, *command, *CONDITION, "--guide", labels)
    ignoring = ("--guide", "none", "--ignore-column", "year")
    (guide,) = run_json(capsys, *command, *CONDITION, *ignoring)["guides"].values()
    assert guide == {"labels": {}, "source": "", "ignored": ["year"]}
    run_json(capsys, *command, *CONDITION, "--guide", "none")
    messages = in_one_line(show(*CONDITION).err)
    assert "'the place' has the values that the index records: park, beach" in messages
