"""``llmcond cluster``: its output, its error messages and its page."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers.commands import read_csv, read_page_data, run_json, run_rejected
from helpers.flags import change_flags
from helpers.pages import HOSTILE, ParsedPage
from sklearn.metrics import v_measure_score

import llmcond
from llmcond import Condition
from llmcond.cli import run
from llmcond.clustering import Clustering
from llmcond.data.datasets import Collection
from llmcond.workflows.cluster import compare_conditions

PEOPLE = ("two men", "three women", "children", "two dogs")
PLACES = ("in the park", "at the beach", "in the kitchen", "on the street")
TEXTS = [f"{PEOPLE[i % 4]} play {PLACES[i // 4 % 4]} number {i}" for i in range(48)]
ROWS = [(i, text, PEOPLE[i % 4], PLACES[i // 4 % 4]) for i, text in enumerate(TEXTS)]
PLACE, PEOPLE_COUNT = ("--condition", "the place"), ("--condition", "the number of people")


@pytest.fixture
def texts(write_rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_rows(ROWS, "texts.csv", "id,text,people,place")


@pytest.fixture
def guide(write_rows):
    # Spaces at the end of a text make no difference.
    rows = [(f"{text} ", place) for _, text, _, place in ROWS[:24]]
    return write_rows(rows, "guide.csv", "text,label")


@pytest.fixture
def call(capsys, run_copy, texts):
    """Return a function that clusters the texts with the run, and returns the JSON."""
    return lambda *options: run_json(capsys, "cluster", texts, "--run", run_copy, *options)


def test_each_text_is_written_with_cluster(call):
    result = call(*PLACE, "--clusters", 3, "--keep", "id", "--out", "out.csv")
    assert (result["texts"], result["distinct"], result["method"]) == (48, 48, "kmeans")
    (clustering,) = result["clusterings"]
    assert (clustering["condition"], clustering["k"], clustering["noise"]) == ("the place", 3, 0)
    rows = read_csv("out.csv")
    assert list(rows[0]) == ["text", "id", "cluster", "name"]
    assert [row["text"] for row in rows] == TEXTS
    assert [int(row["id"]) for row in rows] == list(range(48))
    labels = [int(row["cluster"]) for row in rows]
    assert [cluster["size"] for cluster in clustering["clusters"]] == np.bincount(labels).tolist()
    for cluster in clustering["clusters"]:
        names = {row["name"] for row in rows if int(row["cluster"]) == cluster["cluster"]}
        assert names == {cluster["name"]}
        assert all(labels[TEXTS.index(text)] == cluster["cluster"] for text in cluster["typical"])


def test_k_is_selected_and_seed_is_reproducible(call):
    (clustering,), (again,) = (call(*PLACE, "--seed", 3)["clusterings"] for _ in range(2))
    silhouettes = clustering["silhouettes"]
    assert silhouettes[str(clustering["k"])] == max(silhouettes.values())
    assert clustering == again  # with the label of each text


def test_conditions_with_values_have_columns_each(call, run_copy):
    options = (*PLACE, *PEOPLE_COUNT, "--values", "kitchen, beach", "--values", "")
    result = call(*options, "--clusters", 4, "--out", "out.parquet", "--report", "page.html")
    first, second = result["clusterings"]
    assert (first["condition"], first["values"]) == ("the place", ["kitchen", "beach"])
    assert (second["condition"], "values" in second) == ("the number of people", False)
    columns = pq.read_table("out.parquet").to_pydict()
    ends = (" (the place)", " (the number of people)")
    assert list(columns) == [
        "text",
        *(f"{name}{end}" for end in ends for name in ("cluster", "name")),
    ]
    call(*PEOPLE_COUNT, "--clusters", 4, "--out", "one.parquet")
    single = pq.read_table("one.parquet").to_pydict()
    for name in ("cluster", "name"):
        assert single[name] == columns[name + ends[1]]
    page = Path("page.html").read_text()
    assert '<dt>values of the place</dt><dd dir="auto">kitchen, beach</dd>' in page
    options = {"texts": TEXTS, "clusters": 4, "run": run_copy}
    without_values = llmcond.cluster(condition="the place", **options).clusterings[0].to_json()
    assert without_values["silhouette"] != first["silhouette"]


def test_labels_score_clusters_and_base_encoder(call, capsys, run_copy, texts, write_rows):
    result = call(*PLACE, *PEOPLE_COUNT, "--labels", "place", "people", "--out", "out.csv")
    rows, scores = read_csv("out.csv"), [c["scores"] for c in result["clusterings"]]
    assert [score["column"] for score in scores] == ["place", "people"]
    predicted = [row["cluster (the place)"] for row in rows]
    expected = v_measure_score([place for *_, place in ROWS], predicted)
    assert scores[0]["v_measure"] == pytest.approx(expected)
    low, high = scores[0]["v_measure_ci"]
    assert low <= scores[0]["v_measure"] < high
    # White space around labels does not count.
    padded = [(*row, f" {label}" if i % 2 else label) for i, (*row, label) in enumerate(ROWS)]
    table = write_rows(padded, "padded.csv", "id,text,people,place")
    command = ("cluster", table, *PLACE, "--labels", "place", "--run", run_copy)
    (clustering,) = run_json(capsys, *command)["clusterings"]
    assert clustering["scores"] == scores[0]
    # An untrained encoder is compared with itself, without a condition.
    assert scores[0]["base"] == f"{Path(result['encoder']).name}, no condition"
    command = ("cluster", texts, *PLACE, "--labels", "place", "--run", run_copy)
    assert run([str(argument) for argument in command]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "V-measure" in printed
    assert "best of 10 starts" in printed


def test_result_is_table(call, run_copy, tmp_path):
    printed = call(*PLACE, "--clusters", 3)
    assert printed["out"] is None
    frame = pd.DataFrame({"body": TEXTS, "id": range(48)})
    options = {"texts": frame, "text": "body", "keep": ["id"], "clusters": 3, "run": run_copy}
    conditions = ["the place", "the number of people"]
    result = llmcond.cluster(condition=conditions, out=tmp_path / "out.PARQUET", **options)
    assert printed["clusterings"][0]["labels"] == result.clusterings[0].labels.tolist()
    pd.testing.assert_frame_equal(result.to_pandas(), pd.read_parquet(tmp_path / "out.PARQUET"))
    assert result._repr_html_().count("<tr") == 7


def test_guide_replaces_condition(call, guide):
    result = call("--guide", guide, "--labels", "place", "--out", "out.csv")
    (clustering,) = result["clusterings"]
    assert (clustering["condition"], clustering["k"], clustering["scores"]["n"]) == (None, 4, 24)
    assert clustering["guide"] == dict(zip(PLACES, (8, 8, 4, 4), strict=True))
    # With a guide, even random features can separate the places.
    assert clustering["scores"]["v_measure"] > 0.5
    assert clustering["scores"]["minus_base_v_measure"] > 0.1


def test_ignored_conditions_and_columns_are_named_and_change_clusters(call, write_rows):
    write_rows(
        [*ROWS, (48, "five cats", "cats", ""), (49, "six birds", "birds", "")],
        "texts.csv",
        "id,text,people,place",
    )
    (plain,) = call(*PLACE)["clusterings"]
    result = call(*PLACE, "--ignore", PEOPLE_COUNT[1], "--ignore-column", "people")
    (clustering,) = result["clusterings"]
    assert (clustering["condition"], clustering["ignore"]) == ("the place", [PEOPLE_COUNT[1]])
    assert clustering["silhouette"] != plain["silhouette"]
    options = (*PLACE, *PEOPLE_COUNT, "--ignore", "others", "--report", "page.html")
    both = call(*options)["clusterings"]
    assert "ignored under the number of people" in Path("page.html").read_text()
    assert [one["ignore"] for one in both] == [[PEOPLE_COUNT[1]], ["the place"]]


def test_clusters_that_agree_while_nearest_texts_differ_give_advice(caplog):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(3), 40)
    samples = [np.eye(3, 30)[labels] + 0.1 * rng.normal(size=(120, 30)) for _ in range(3)]
    model = SimpleNamespace(embed=lambda rows, file: rng.normal(size=(len(rows), 30)))
    texts, numbers = [f"text {i}" for i in range(120)], range(1, 121)
    collection = Collection(texts, "texts.csv", {}, {}, True, numbers)
    caplog.set_level("INFO")
    conditions = ("the problem", "the product", Condition("the mood", ignore=["the product"]))
    clusterings = [Clustering("minilm", text, labels, [], 0.1) for text in conditions]
    compare_conditions(clusterings, samples, model, collection)
    assert [message.split(" (adjusted")[0] for message in caplog.messages] == [
        "the clusters under 'the problem' agree with those under 'the product'",
        "the clusters under 'the product' agree with those under 'the problem'",
    ]
    assert "try --ignore 'the product'" in caplog.messages[0]
    caplog.clear()
    compare_conditions(clusterings[:1], samples[:1], model, collection)
    compare_conditions(clusterings[2:], samples[2:], None, collection)  # embeds nothing
    assert caplog.messages == []
    general = SimpleNamespace(embed=lambda rows, file: samples[1])
    compare_conditions(clusterings[:1], samples[:1], general, collection)
    assert "try --ignore 'what it is about'" in caplog.text
    caplog.clear()
    compare_conditions(clusterings[:2], [samples[0]] * 2, model, collection)
    assert ["are alike" in message for message in caplog.messages] == [True]


def test_guide_rows_apply_to_their_condition_only(call, write_rows, tmp_path):
    rows = [(text, location, "the place") for _, text, _, location in ROWS[:24]]
    people = [(text, who) for _, text, who, _ in ROWS[:24] if "dogs" not in who]
    rows += [(*row, "the number of people") for row in people]
    guide = write_rows(rows, "both.csv", "text,label,condition")
    options = (*PLACE, *PEOPLE_COUNT, "--condition", "the mood", "--guide", guide)
    location, people, mood = call(*options, "--report", "page.html")["clusterings"]
    assert (location["k"], people["k"], mood["guide"]) == (4, 3, None)
    assert people["guide"] == dict.fromkeys(PEOPLE[:3], 6)
    assert sum(map(Counter, people["guided"].values()), Counter()) == people["guide"]
    assert (len(people["guided"]) > 1, mood["guided"]) == (True, None)
    # Clusters under one condition do not depend on the labels of another.
    guide = write_rows([row[:2] for row in rows[:24]], "place.csv", "text,label")
    (unchanged,) = call(*PLACE, "--guide", guide)["clusterings"]
    assert unchanged["clusters"] == location["clusters"]
    assert "guide of the number of people" in Path("page.html").read_text()


INVALID = [
    ((), "neither --condition nor --guide"),
    ((*PLACE, *PLACE, "--values", "", "--values", "a"), "'the place' is given more than once"),
    (
        (*PLACE, "--clusters", "49"),
        "48 distinct texts, and 49 clusters need at least 49",
    ),
    (
        (*PLACE, "--method", "hdbscan", "--min-cluster-size", "49"),
        "--min-cluster-size is 49, but texts.csv has 48 texts. Give at most 48, or more texts",
    ),
    ((*PLACE, "--keep", "text"), "the table would have two columns 'text'. Leave it out of --keep"),
    ((*PLACE, "--labels", "place", "people"), "--labels names 2 columns"),
    ((*PLACE, "--map", "out.png", "--out", "out-data.csv"), "--out and --map both write"),
    ((*PLACE, *PEOPLE_COUNT, "--guide", "guide.csv"), "there are 2 conditions"),
    ((*PLACE, "--ignore", "the mood"), "48 distinct texts, and at least 50 are needed"),
    ((*PLACE, "--ignore-column", "peple"), "no column 'peple'"),
    ((*PLACE, "--ignore", "The place"), "'the place' cannot ignore itself"),
]
GUIDES = [
    ([("two men", "a"), ("children", "a")], "guide.csv has one label, 'a'"),
    ([("two men", "a"), ("two men", "b")], "row 2 of guide.csv: 'two men' has the label 'b'"),
]


def test_invalid_arguments_are_rejected(capsys, texts, guide, write_rows):
    before = texts.read_bytes()
    command = ("cluster", "texts.csv", "--out", "out.csv")
    for arguments, expected in INVALID:
        assert expected in run_rejected(capsys, *change_flags(command, *arguments))
    for rows, expected in GUIDES:
        write_rows(rows, "guide.csv", "text,label")
        assert expected in run_rejected(capsys, *command, "--guide", "guide.csv")
    empty = write_rows([("two men",), (" ",), ("",)], "few.csv", "text")
    message = run_rejected(capsys, "cluster", empty, *PLACE, "--out", "out.csv")
    assert "data row 2 of few.csv: text is empty (1 more row is invalid: 3)" in message
    assert not Path("out.csv").exists()
    assert texts.read_bytes() == before


# -- page --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tiny_run, tmp_path_factory):
    """A page with ordinary and hostile texts, under two conditions and without one."""
    folder = tmp_path_factory.mktemp("page")
    texts = [*TEXTS, *(text.replace("\0", "") for text in HOSTILE)]  # readers refuse NUL
    rows = [{"text": text, "kind": str(i % 3)} for i, text in enumerate(texts)]
    rows[3]["text"] = "children <b>play</b> in the park"
    llmcond.cluster(
        texts=rows,
        condition=["the place", "<img src=x onerror=alert(1)>"],
        clusters=24,
        labels=["kind"],
        out=folder / "out.parquet",
        report=folder / "page.html",
        run=tiny_run,
    )
    return folder / "page.html"


def test_page_holds_every_text_once_and_loads_nothing(page):
    data, parsed = read_page_data(page), ParsedPage(page.read_text("utf-8"))
    assert len(data["texts"]) == 56
    assert data["texts"][:3] == TEXTS[:3]
    *titles, base = (view["title"] for view in data["shown"])
    assert titles == ["the place", "<img src=x onerror=alert(1)>"]
    assert base.endswith(", no condition")
    for view in data["shown"]:
        assert len(view["places"]) == 2 * len(view["labels"]) == 112
        assert 0 <= min(view["places"]) <= max(view["places"]) <= data["steps"]
        sizes = [size for _, _, size in view["clusters"]]
        assert np.bincount(view["labels"]).tolist() == sizes
    assert "56 texts, clustered with K-means" in parsed.visible_text
    assert parsed.visible_text.count("24 clusters; silhouette 0.") == len(data["shown"])
    assert parsed.all("img") == []
    assert not parsed.open


def test_map_is_picture_with_data(run_copy, tmp_path):
    texts = [*TEXTS, "x" * 300_000, "किताब", "快递"]
    conditions, path = ["the place", "the number of people"], tmp_path / "map.png"
    options = {"method": "hdbscan", "min_cluster_size": 5, "run": run_copy}
    result = llmcond.cluster(texts=texts, condition=conditions, map=path, **options)
    assert path.read_bytes().startswith(b"\x89PNG")
    rows = read_csv(tmp_path / "map-data.csv")
    assert list(rows[0]) == ["map", "x", "y", "cluster", "name", "text"]
    labels = [label for one in result.clusterings for label in one.labels.tolist()]
    assert [int(row["cluster"]) for row in rows] == labels
    assert max(len(row["text"]) for row in rows) < 1_100
