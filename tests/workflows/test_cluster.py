"""``llmcond cluster``: what it writes, what it refuses, and its page."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers.commands import embedded, ok, refused
from helpers.pages import HOSTILE, Parsed, faults, opened, sideways
from sklearn.metrics import v_measure_score

import llmcond
from llmcond.bundled import DEFAULT_MODEL
from llmcond.cli import run
from llmcond.clustering.methods import kmeans
from llmcond.runs.embedder import normalise_vectors

PEOPLE = ("two men", "three women", "children", "two dogs")
PLACES = ("in the park", "at the beach", "in the kitchen", "on the street")
TEXTS = [f"{PEOPLE[i % 4]} play {PLACES[i // 4 % 4]} number {i}" for i in range(48)]
ROWS = [(i, text, PEOPLE[i % 4], PLACES[i // 4 % 4]) for i, text in enumerate(TEXTS)]
PLACE, PEOPLE_TOO = ("--condition", "the place"), ("--condition", "the number of people")


@pytest.fixture(scope="module")
def module_run(tiny_run, tmp_path_factory):
    return shutil.copytree(tiny_run, tmp_path_factory.mktemp("cluster") / "run")


@pytest.fixture
def texts(write_rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_rows(ROWS, "texts.csv", "id,text,people,place")


@pytest.fixture
def guide(write_rows):
    return write_rows([(text, place) for _, text, _, place in ROWS[:24]], "guide.csv", "text,label")


@pytest.fixture
def call(capsys, module_run, texts):
    """The command on the texts and the run."""

    def call(*arguments, of=None):
        return ok(capsys, "cluster", of or texts, "--run", module_run, *arguments)

    return call


def table(path):
    with Path(path).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_each_text_is_written_with_its_cluster(call, texts):
    found = call(*PLACE, "--clusters", 3, "--keep", "id", "--out", "out.csv")
    assert (found["texts"], found["distinct"], found["method"]) == (48, 48, "kmeans")
    (one,) = found["clusterings"]
    assert (one["condition"], one["k"], one["noise"]) == ("the place", 3, 0)
    rows = table("out.csv")
    assert list(rows[0]) == ["text", "id", "cluster", "name"]
    assert [row["text"] for row in rows] == TEXTS
    assert [int(row["id"]) for row in rows] == list(range(48))
    labels = [int(row["cluster"]) for row in rows]
    assert [own["size"] for own in one["clusters"]] == np.bincount(labels).tolist()
    for own in one["clusters"]:
        assert {row["name"] for row in rows if int(row["cluster"]) == own["cluster"]} == {
            own["name"]
        }
        assert all(labels[TEXTS.index(text)] == own["cluster"] for text in own["typical"])


def test_k_is_chosen_and_the_seed_decides(call):
    first, again = (call(*PLACE, "--out", f"{i}.csv", "--seed", 3) for i in (1, 2))
    (one,) = first["clusterings"]
    assert str(one["k"]) in one["silhouettes"]
    assert one == again["clusterings"][0]
    assert table("1.csv") == table("2.csv")


def test_conditions_stand_side_by_side(call):
    found = call(*PLACE, *PEOPLE_TOO, "--clusters", 2, "--out", "out.parquet")
    assert [one["condition"] for one in found["clusterings"]] == [PLACE[1], PEOPLE_TOO[1]]
    written = pq.read_table("out.parquet").to_pydict()
    ends = [f" ({one[1]})" for one in (PLACE, PEOPLE_TOO)]
    assert list(written) == ["text", *(f"{of}{end}" for end in ends for of in ("cluster", "name"))]
    assert {type(value) for value in written[f"cluster{ends[0]}"]} == {int}
    call(*PEOPLE_TOO, "--clusters", 2, "--out", "one.parquet")
    one = pq.read_table("one.parquet").to_pydict()
    assert (one["cluster"], one["name"]) == tuple(
        written[f"{of}{ends[1]}"] for of in ("cluster", "name")
    )


def test_values_stand_beside_conditions_and_change_their_clusters(call, module_run):
    both = (*PLACE, *PEOPLE_TOO, "--values", "kitchen, beach", "--values", "")
    found = call(*both, "--clusters", 4, "--out", "out.csv", "--report", "page.html")
    first, second = found["clusterings"]
    assert (first["condition"], first["values"]) == ("the place", ["kitchen", "beach"])
    assert (second["condition"], "values" in second) == ("the number of people", False)
    assert list(table("out.csv")[0])[1:3] == ["cluster (the place)", "name (the place)"]
    page = Path("page.html").read_text()
    assert "such as kitchen" not in page
    assert '<dt>values of the place</dt><dd dir="auto">kitchen, beach</dd>' in page
    condition = llmcond.Condition("the place", ["kitchen", "beach"])
    given = {"texts": TEXTS, "clusters": 4, "run": module_run}
    made, plain = (
        llmcond.cluster(condition=one, **given).clusterings[0] for one in (condition, "the place")
    )
    assert made.to_json()["clusters"] == first["clusters"]
    assert made.silhouette != plain.silhouette
    assert (made.condition, made.title) == (condition, "the place")


def test_known_labels_score_it_beside_the_base_encoder(call, capsys, module_run, texts):
    found = call(*PLACE, *PEOPLE_TOO, "--labels", "place", "people", "--out", "out.csv")
    rows, scores = table("out.csv"), [one["scores"] for one in found["clusterings"]]
    assert [one["column"] for one in scores] == ["place", "people"]
    truth = [place for *_, place in ROWS]
    own = [row["cluster (the place)"] for row in rows]
    assert scores[0]["v_measure"] == pytest.approx(v_measure_score(truth, own))
    assert scores[0]["v_measure_ci"][0] <= scores[0]["v_measure"] < scores[0]["v_measure_ci"][1]
    arguments = ["cluster", texts, *PLACE, "--labels", "place", "--out", "o.csv"]
    assert run([str(one) for one in (*arguments, "--run", module_run)]) == 0
    printed = capsys.readouterr().out
    assert "V-measure" in printed
    # An encoder that was not trained is its own base.
    name = f"{Path(found['encoder']).name}, no condition"
    assert scores[0]["base"] == name
    assert name.rsplit("/", maxsplit=1)[-1].split(maxsplit=1)[0] in "".join(printed.split())
    assert "best of 10 starts" in " ".join(printed.split())


def test_an_adapter_is_compared_with_its_base(minilm):
    found = llmcond.cluster(
        texts=[{"text": text, "place": place} for _, text, _, place in ROWS],
        condition="the place",
        clusters=4,
        labels=["place"],
        model=DEFAULT_MODEL,
        device="cpu",
    )
    scores, truth = found.clusterings[0].scores, [place for *_, place in ROWS]
    assert scores.base_name == "minilm, no condition"
    plain = kmeans(normalise_vectors(minilm.encode(TEXTS)), 4, 0)
    assert scores.base["v_measure"].value == pytest.approx(v_measure_score(truth, plain), abs=0.05)


def test_without_a_file_labels_are_returned_and_printed(call, module_run, tmp_path):
    printed = call(*PLACE, "--clusters", 3)
    found = llmcond.cluster(texts=TEXTS, condition="the place", clusters=3, run=module_run)
    assert printed["out"] is found.out is None
    assert printed["clusterings"][0]["labels"] == found.clusterings[0].labels.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["texts.csv"]
    assert "labels" not in call(*PLACE, "--clusters", 3, "--out", "a.csv")["clusterings"][0]


def test_results_show_themselves(module_run):
    found = llmcond.cluster(texts=TEXTS, condition="the place", clusters=3, run=module_run)
    assert len(repr(found)) < 300
    assert len(repr(found.clusterings[0])) < 300
    html = found._repr_html_()
    assert "clusters: the place" in html
    assert html.count("<tr") == 4


def test_poor_separation_is_said_and_a_guide_advised(capsys, write_rows, guide, module_run):
    random, words = np.random.default_rng(0), " ".join([*PEOPLE, *PLACES, "play"]).split()
    rows = [(" ".join(random.permutation(words)[:6]), str(i % 3)) for i in range(80)]
    mixed = write_rows(rows, "mixed.csv", "text,kind")

    def said(of, *arguments):
        command = ["cluster", of, *arguments, "--clusters", "3", "--run", module_run]
        assert run([str(one) for one in command]) == 0
        return capsys.readouterr().err

    messages = said(mixed, *PLACE, "--labels", "kind")
    assert re.search(
        r"the place: 3 clusters; silhouette 0\.\d+, so not clearly separated;", messages
    )
    assert "little agreement with the labels kind" in messages
    assert messages.count("--guide FILE") == 1
    # Without labels nothing tells whether clusters are right, and this is said.
    messages = said(mixed, *PLACE)
    assert "a silhouette does not show whether clusters are those you want" in messages
    assert messages.count("--guide FILE") == 1
    # A guide is no advice where there is one.
    messages = said(mixed, "--guide", guide, "--labels", "kind")
    assert "More texts in the guide may help." in messages
    assert "--guide FILE" not in messages
    # Vectors that are stored already are not said to be encoded.
    assert "no condition: nothing to encode" in messages


def test_a_label_that_is_nan_is_none(module_run):
    rows = [{"text": text, "people": who} for _, text, who, _ in ROWS]
    for row in rows[:5]:
        row["people"] = float("nan")
    found = llmcond.cluster(
        texts=rows, condition="the place", clusters=3, labels=["people"], run=module_run
    )
    assert (found.clusterings[0].scores.n, found.clusterings[0].scores.classes) == (43, 4)


def test_a_guide_says_what_is_wanted(call, guide, write_rows):
    found = call("--guide", guide, "--labels", "place", "--out", "out.csv")
    (one,) = found["clusterings"]
    assert (one["condition"], one["k"], one["scores"]["n"]) == (None, 4, 24)
    assert one["guide"] == dict(zip(PLACES, (8, 8, 4, 4), strict=True))
    # Even random features tell places apart once they are told which to look for.
    assert one["scores"]["v_measure"] > 0.5
    assert one["scores"]["minus_base_v_measure"] > 0.1


def test_each_condition_has_the_labels_of_its_rows(call, write_rows, tmp_path):
    rows = [(text, place, "the place") for _, text, _, place in ROWS[:24]]
    rows += [
        (text, who, "the number of people") for _, text, who, _ in ROWS[:24] if "dogs" not in who
    ]
    guide = write_rows(rows, "both.csv", "text,label,condition")
    several = (*PLACE, *PEOPLE_TOO, "--condition", "the mood")
    page = tmp_path / "page.html"
    found = call(*several, "--guide", guide, "--out", "out.csv", "--report", page)
    place, people, mood = found["clusterings"]
    assert (place["k"], people["k"], mood["guide"]) == (4, 3, None)
    assert people["guide"] == dict.fromkeys(PEOPLE[:3], 6)
    # What is clustered under one condition does not depend on the labels of another.
    alone = write_rows([row[:2] for row in rows[:24]], "place.csv", "text,label")
    (same,) = call(*PLACE, "--guide", alone, "--out", "out.csv")["clusterings"]
    assert same["clusters"] == place["clusters"]
    assert "guide of the number of people" in page.read_text()


def test_labelled_texts_from_elsewhere_guide_as_well(call, capsys, module_run, texts, write_rows):
    other = [(f"{who} sit {place}", place) for who in PEOPLE for place in PLACES[:2]]
    guide = write_rows(other, "other.csv", "text,label")
    arguments = ["cluster", texts, "--guide", guide, "--out", "out.csv", "--run", module_run]
    assert run([str(one) for one in arguments]) == 0
    assert "8 of 8 labelled texts are not in texts.csv" in capsys.readouterr().err
    assert len(table("out.csv")) == 48


def test_hdbscan_counts_what_is_in_no_cluster(call, capsys, module_run, texts):
    arguments = ["cluster", texts, *PLACE, "--method", "hdbscan", "--min-cluster-size", 3]
    arguments += ["--out", "out.csv", "--labels", "place", "--run", module_run]
    assert run([str(one) for one in arguments]) == 0
    labels = [int(row["cluster"]) for row in table("out.csv")]
    assert f"{labels.count(-1)} of 48 texts are in no cluster" in capsys.readouterr().err
    assert all(row["name"] == "" for row in table("out.csv") if row["cluster"] == "-1")


def test_python_takes_texts_and_tables(module_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = llmcond.cluster(
        texts=TEXTS, condition="the place", clusters=2, out="a.parquet", run=module_run
    )
    assert found.texts == 48
    assert found.clusterings[0].labels.shape == (48,)
    frame = pd.DataFrame({"body": TEXTS, "id": range(48)})
    llmcond.cluster(
        texts=frame,
        text="body",
        keep=["id"],
        condition="the place",
        clusters=2,
        out="b.parquet",
        run=module_run,
    )
    a, b = (pq.read_table(f"{name}.parquet").to_pydict() for name in "ab")
    assert a["cluster"] == b["cluster"]
    assert list(b) == ["body", "id", "cluster", "name"]


def test_a_text_file_has_one_text_a_line_and_repeats_are_kept(call, tmp_path, capsys, module_run):
    lines = tmp_path / "lines.txt"
    lines.write_text("two men\n\nthree women\ntwo men\nchildren\n")
    arguments = ["cluster", lines, *PLACE, "--clusters", "3", "--out", "out.csv"]
    assert run([str(one) for one in (*arguments, "--run", module_run)]) == 0
    assert "1 of 4 texts repeat an earlier one, and are kept" in capsys.readouterr().err
    rows = table("out.csv")
    assert [row["text"] for row in rows] == ["two men", "three women", "two men", "children"]
    assert rows[0]["cluster"] == rows[2]["cluster"]


def test_too_long_texts_are_cut_and_counted(call, write_rows, capsys, module_run):
    long = write_rows([("the park " * 200,), ("two dogs",), ("children",)], "long.csv", "text")
    arguments = ["cluster", long, *PLACE, "--clusters", "2", "--out", "out.csv"]
    assert run([str(one) for one in (*arguments, "--run", module_run)]) == 0
    assert "1 inputs are longer than 64 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "neither --condition nor --guide"),
        (("--condition", " "), "--condition is empty"),
        ((*PLACE, *PLACE), "'the place' is given more than once"),
        (
            (*PLACE, *PLACE, "--values", "", "--values", "a, b"),
            "'the place' is given more than once",
        ),
        ((*PLACE, *PEOPLE_TOO, "--values", "a, b"), "1 --values and 2 --condition. Give --values"),
        (("--values", "a, b"), "1 --values and 0 --condition"),
        ((*PLACE, "--clusters", "1"), "--clusters is 1; it must be at least 2"),
        ((*PLACE, "--clusters", "-3"), "--clusters is '-3'; expected a number"),
        ((*PLACE, "--clusters", "some"), "--clusters is 'some'; expected a number or auto"),
        ((*PLACE, "--clusters", "49"), "48 distinct texts, but --clusters is 49"),
        ((*PLACE, "--method", "hdbscan", "--clusters", "3"), "--clusters is for --method kmeans"),
        ((*PLACE, "--min-cluster-size", "3"), "is for --method hdbscan"),
        ((*PLACE, "--method", "hdbscan", "--min-cluster-size", "1"), "must be at least 2"),
        ((*PLACE, "--text", "body"), "no column 'body'"),
        ((*PLACE, "--keep", "text"), "--keep text: a column of that name is written"),
        ((*PLACE, "--labels", "topic"), "no column 'topic'"),
        ((*PLACE, "--labels", "place", "people"), "--labels names 2 columns"),
        ((*PLACE, "--seed", "-1"), "--seed is -1"),
        ((*PLACE, "--report", "page.txt"), "name an .html or .htm file"),
        ((*PLACE, "--guide", "missing.csv"), "missing.csv does not exist"),
        ((*PLACE, *PEOPLE_TOO, "--guide", "{guide}"), "there are 2 conditions"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, texts, guide, arguments, said, tmp_path):
    given = [str(guide) if one == "{guide}" else one for one in arguments]
    assert said in refused(capsys, "cluster", texts, "--out", "out.csv", *given)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("out", "said"),
    [("out.xlsx", ".parquet or .csv"), ("texts.csv", "is an input of the same command")],
)
def test_no_other_kind_of_file_and_no_input_is_written(capsys, texts, out, said):
    before = texts.read_bytes()
    assert said in refused(capsys, "cluster", texts, *PLACE, "--out", out)
    assert texts.read_bytes() == before


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("two men", "a"), ("children", "a")], "guide.csv has one label, 'a'"),
        ([("two men", "a"), ("two men", "b")], "row 2 of guide.csv: 'two men' has the label 'b'"),
        ([("two men", "a"), ("children", "")], "row 2 of guide.csv: label is empty"),
        ([("", "a"), ("children", "b")], "row 1 of guide.csv: text is empty"),
    ],
)
def test_a_guide_that_is_none_is_refused(capsys, texts, write_rows, rows, said):
    guide = write_rows(rows, "guide.csv", "text,label")
    assert said in refused(capsys, "cluster", texts, "--guide", guide, "--out", "out.csv")
    other = write_rows(rows, "other.csv", "text,class")
    message = refused(capsys, "cluster", texts, "--guide", other, "--out", "out.csv")
    assert "no column 'label'" in message
    assert "A guide needs the columns text and label." in message


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("two men",)], "1 distinct text, but at least 2"),
        ([("two men",), ("two men",)], "1 distinct text, but at least 2"),
        (
            [("two men",), (" ",), ("",)],
            "row 2 of few.csv: text is empty (1 more row is invalid)",
        ),
    ],
)
def test_too_few_and_empty_texts_are_refused(capsys, texts, write_rows, rows, said):
    few = write_rows(rows, "few.csv", "text")
    assert said in refused(capsys, "cluster", few, *PLACE, "--out", "out.csv")


# -- the page ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(module_run, tmp_path_factory):
    """A page of ordinary and of hostile texts, under two conditions and none."""
    folder = tmp_path_factory.mktemp("page")
    rows = [{"text": text, "kind": str(i % 3)} for i, text in enumerate([*TEXTS, *HOSTILE])]
    rows[3]["text"] = "children <b>play</b> in the park"
    llmcond.cluster(
        texts=rows,
        condition=["the place", "<img src=x onerror=alert(1)>"],
        clusters=8,
        labels=["kind"],
        out=folder / "out.parquet",
        report=folder / "page.html",
        run=module_run,
    )
    return folder / "page.html"


def test_the_page_holds_every_text_once_and_asks_for_nothing(page):
    data, parsed = embedded(page), Parsed(page.read_text("utf-8"))
    assert len(data["texts"]) == 56
    assert data["texts"][:3] == TEXTS[:3]
    *titles, base = (one["title"] for one in data["shown"])
    assert titles == ["the place", "<img src=x onerror=alert(1)>"]
    assert base.endswith(", no condition")
    for one in data["shown"]:
        assert len(one["places"]) == 2 * len(one["labels"]) == 112
        assert min(one["places"]) >= 0
        assert max(one["places"]) <= data["steps"]
        sizes = [size for _, _, size in one["clusters"]]
        assert np.bincount(one["labels"]).tolist() == sizes
    policy = parsed.all("meta")[1]["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not any(name.startswith("on") for _, own in parsed.elements for name in own)
    assert parsed.all("img") == []
    assert not parsed.open
    # Every text once in each cross-table.
    cells = [int(one) for one in data["shown"][0]["labels"]]
    assert len(cells) == 56


def test_large_collections_are_drawn_in_part(module_run, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcond.clustering.page._MAX_TEXTS", 20)
    llmcond.cluster(
        texts=TEXTS,
        condition="the place",
        clusters=2,
        out=tmp_path / "out.csv",
        report=tmp_path / "page.html",
        run=module_run,
    )
    data = embedded(tmp_path / "page.html")
    assert len(data["texts"]) == len(data["shown"][0]["labels"]) == 20
    assert sum(size for _, _, size in data["shown"][0]["clusters"]) == 48
    assert "48 texts, 20 of them on the map" in (tmp_path / "page.html").read_text("utf-8")


def test_the_map_in_a_browser(browser, page):
    data = json.loads(json.dumps(embedded(page)))
    with opened(browser, page, 390, "dark") as tab:
        assert sideways(tab) == [0, []]
        assert faults(tab) == []
        # Arrow keys read one text after the other.
        canvas, text = tab.locator("#canvas"), tab.locator("#text")
        canvas.focus()
        tab.keyboard.press("ArrowRight")
        first = text.text_content()
        tab.keyboard.press("ArrowDown")
        second = text.text_content()
        assert first in data["texts"]
        assert second in data["texts"]
        assert first != second
        # Points move to where another condition has them, and carry its clusters.
        tab.get_by_role("radio", name="no condition").check()
        tab.locator("#canvas[data-moving=false]").wait_for()
        assert tab.locator("#legend li").count() == 8
        place = data["texts"].index(second)
        assert f"cluster {data['shown'][2]['labels'][place]}" in tab.locator("#of").inner_text()
        # A cluster alone; then a search within it.
        size = data["shown"][2]["clusters"][0][2]
        tab.locator("#legend button").first.click()
        assert tab.locator("#count").inner_text() == f"{size} of 56 texts"
        tab.locator("#legend button").first.click()
        tab.get_by_label("Search texts").fill("<b>PLAY</b>")
        assert tab.locator("#count").inner_text() == "1 of 56 texts"
        # Hovering shows a text as a text.
        where = data["shown"][2]["places"][6:8]
        box = canvas.bounding_box()
        x, y = (
            box[key] + size / 2 + (spot / data["steps"] - 0.5) * (size - 28)
            for key, size, spot in zip("xy", (box["width"], box["height"]), where, strict=True)
        )
        tab.mouse.move(x, y)
        assert "<b>play</b>" in tab.locator("#tooltip").inner_text()
        assert tab.locator("#tooltip b").count() == 0
