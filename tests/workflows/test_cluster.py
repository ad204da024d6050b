"""``llmcond cluster``: its output, its error messages and its page."""

import copy
import csv
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from helpers.commands import read_page_data, run_json, run_rejected
from helpers.flags import change_flags
from helpers.pages import HOSTILE, ParsedPage, check_views, open_page
from sklearn.metrics import v_measure_score

import llmcond
from llmcond.bundled import DEFAULT_MODEL
from llmcond.cli import run
from llmcond.clustering.methods import kmeans
from llmcond.runs.embedder import EmbeddingModel, normalise_vectors

PEOPLE = ("two men", "three women", "children", "two dogs")
PLACES = ("in the park", "at the beach", "in the kitchen", "on the street")
TEXTS = [f"{PEOPLE[i % 4]} play {PLACES[i // 4 % 4]} number {i}" for i in range(48)]
ROWS = [(i, text, PEOPLE[i % 4], PLACES[i // 4 % 4]) for i, text in enumerate(TEXTS)]
PLACE, PEOPLE_COUNT = ("--condition", "the place"), ("--condition", "the number of people")


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
    """Return a function that clusters the texts with the run."""

    def call(*arguments, source=None):
        return run_json(capsys, "cluster", source or texts, "--run", module_run, *arguments)

    return call


def read_csv(path):
    with Path(path).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_each_text_is_written_with_cluster(call, texts):
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
        assert {row["name"] for row in rows if int(row["cluster"]) == cluster["cluster"]} == {
            cluster["name"]
        }
        assert all(labels[TEXTS.index(text)] == cluster["cluster"] for text in cluster["typical"])


def test_k_is_selected_and_seed_is_reproducible(call):
    first, second = (call(*PLACE, "--out", f"{i}.csv", "--seed", 3) for i in (1, 2))
    (clustering,) = first["clusterings"]
    assert str(clustering["k"]) in clustering["silhouettes"]
    assert clustering == second["clusterings"][0]
    assert read_csv("1.csv") == read_csv("2.csv")


def test_each_condition_has_columns(call):
    result = call(*PLACE, *PEOPLE_COUNT, "--clusters", 2, "--out", "out.parquet")
    assert [clustering["condition"] for clustering in result["clusterings"]] == [
        PLACE[1],
        PEOPLE_COUNT[1],
    ]
    columns = pq.read_table("out.parquet").to_pydict()
    ends = [f" ({option[1]})" for option in (PLACE, PEOPLE_COUNT)]
    assert list(columns) == [
        "text",
        *(f"{name}{end}" for end in ends for name in ("cluster", "name")),
    ]
    assert {type(value) for value in columns[f"cluster{ends[0]}"]} == {int}
    call(*PEOPLE_COUNT, "--clusters", 2, "--out", "one.parquet")
    single = pq.read_table("one.parquet").to_pydict()
    assert (single["cluster"], single["name"]) == tuple(
        columns[f"{column}{ends[1]}"] for column in ("cluster", "name")
    )


def test_values_are_reported_and_change_clusters(call, module_run):
    options = (*PLACE, *PEOPLE_COUNT, "--values", "kitchen, beach", "--values", "")
    result = call(*options, "--clusters", 4, "--out", "out.csv", "--report", "page.html")
    first, second = result["clusterings"]
    assert (first["condition"], first["values"]) == ("the place", ["kitchen", "beach"])
    assert (second["condition"], "values" in second) == ("the number of people", False)
    assert list(read_csv("out.csv")[0])[1:3] == ["cluster (the place)", "name (the place)"]
    page = Path("page.html").read_text()
    assert "such as kitchen" not in page
    assert '<dt>values of the place</dt><dd dir="auto">kitchen, beach</dd>' in page
    condition = llmcond.Condition("the place", ["kitchen", "beach"])
    arguments = {"texts": TEXTS, "clusters": 4, "run": module_run}
    with_values, without_values = (
        llmcond.cluster(condition=c, **arguments).clusterings[0] for c in (condition, "the place")
    )
    assert with_values.to_json()["clusters"] == first["clusters"]
    assert with_values.silhouette != without_values.silhouette
    assert (with_values.condition, with_values.title) == (condition, "the place")


def test_labels_score_clusters_and_base_encoder(call, capsys, module_run, texts):
    result = call(*PLACE, *PEOPLE_COUNT, "--labels", "place", "people", "--out", "out.csv")
    rows, scores = read_csv("out.csv"), [c["scores"] for c in result["clusterings"]]
    assert [score["column"] for score in scores] == ["place", "people"]
    labels = [place for *_, place in ROWS]
    predicted = [row["cluster (the place)"] for row in rows]
    assert scores[0]["v_measure"] == pytest.approx(v_measure_score(labels, predicted))
    assert scores[0]["v_measure_ci"][0] <= scores[0]["v_measure"] < scores[0]["v_measure_ci"][1]
    arguments = ["cluster", texts, *PLACE, "--labels", "place", "--out", "o.csv"]
    assert run([str(argument) for argument in (*arguments, "--run", module_run)]) == 0
    printed = capsys.readouterr().out
    assert "V-measure" in printed
    # An untrained encoder is compared with itself, without a condition.
    name = f"{Path(result['encoder']).name}, no condition"
    assert scores[0]["base"] == name
    assert name.rsplit("/", maxsplit=1)[-1].split(maxsplit=1)[0] in "".join(printed.split())
    assert "best of 10 starts" in " ".join(printed.split())


def test_adapter_is_compared_with_base(minilm):
    result = llmcond.cluster(
        texts=[{"text": text, "place": place} for _, text, _, place in ROWS],
        condition="the place",
        clusters=4,
        labels=["place"],
        model=DEFAULT_MODEL,
        device="cpu",
    )
    scores, labels = result.clusterings[0].scores, [place for *_, place in ROWS]
    assert scores.base_name == "minilm, no condition"
    base_clusters = kmeans(normalise_vectors(minilm.encode(TEXTS)), 4, 0)
    assert scores.base["v_measure"].value == pytest.approx(
        v_measure_score(labels, base_clusters), abs=0.05
    )


def test_labels_are_returned_and_printed_without_out_file(call, module_run, tmp_path):
    printed = call(*PLACE, "--clusters", 3)
    result = llmcond.cluster(texts=TEXTS, condition="the place", clusters=3, run=module_run)
    assert printed["out"] is result.out is None
    assert printed["clusterings"][0]["labels"] == result.clusterings[0].labels.tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["texts.csv"]
    assert "labels" not in call(*PLACE, "--clusters", 3, "--out", "a.csv")["clusterings"][0]


def test_result_has_short_repr_and_html(module_run):
    result = llmcond.cluster(texts=TEXTS, condition="the place", clusters=3, run=module_run)
    assert len(repr(result)) < 300
    assert set(re.findall(r"(\w+)=", repr(result))) <= set(vars(result))
    clustering = replace(result.clusterings[0], condition=llmcond.Condition("the place", ["a"]))
    assert len(repr(clustering)) < 300
    assert all(hasattr(clustering, name) for name in re.findall(r"(\w+)=", repr(clustering)))
    html = result._repr_html_()
    assert "the place" in html
    assert html.count("<tr") == 4


def test_poor_separation_is_reported_and_guide_recommended(capsys, write_rows, guide, module_run):
    random, words = np.random.default_rng(0), " ".join([*PEOPLE, *PLACES, "play"]).split()
    rows = [(" ".join(random.permutation(words)[:6]), str(i % 3)) for i in range(80)]
    mixed = write_rows(rows, "mixed.csv", "text,kind")

    def read_messages(source, *arguments):
        command = ["cluster", source, *arguments, "--clusters", "3", "--run", module_run]
        assert run([str(argument) for argument in command]) == 0
        return capsys.readouterr().err

    messages = read_messages(mixed, *PLACE, "--labels", "kind")
    assert re.search(
        r"the place: 3 clusters; silhouette 0\.\d+, so not clearly separated;", messages
    )
    assert "little agreement with the labels kind" in messages
    assert messages.count("--guide FILE") == 1
    # Without labels, a message says that nothing shows whether the clusters are right.
    messages = read_messages(mixed, *PLACE)
    assert "a silhouette does not show whether clusters are those you want" in messages
    assert messages.count("--guide FILE") == 1
    # A guide is not recommended if there is one already.
    messages = read_messages(mixed, "--guide", guide, "--labels", "kind")
    assert "More texts in the guide may help." in messages
    assert "--guide FILE" not in messages
    # Vectors in the store are not reported as encoded.
    assert "no condition: nothing to encode" in messages


def test_result_is_table_and_can_be_copied_and_compared(module_run, tmp_path):
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    arguments = {"texts": rows, "keep": ["id"], "clusters": 3, "run": module_run}
    conditions = ["the place", "the number of people"]
    result = llmcond.cluster(condition=conditions, out=tmp_path / "out.PARQUET", **arguments)
    pd.testing.assert_frame_equal(result.to_pandas(), pd.read_parquet(tmp_path / "out.PARQUET"))
    assert copy.deepcopy(result) == result
    assert result != replace(result, seed=1)
    other = replace(result.clusterings[0], labels=result.clusterings[0].labels + 1)
    assert result != replace(result, clusterings=[other, result.clusterings[1]])
    assert result.clusterings[0] != result.clusterings[1]
    single = llmcond.cluster(condition=conditions[0], **arguments)
    assert list(single.to_pandas()) == ["text", "id", "cluster", "name"]
    assert "table" not in single.to_json()


def test_nan_label_counts_as_missing(module_run):
    rows = [{"text": text, "people": who} for _, text, who, _ in ROWS]
    for row in rows[:5]:
        row["people"] = float("nan")
    result = llmcond.cluster(
        texts=rows, condition="the place", clusters=3, labels=["people"], run=module_run
    )
    assert (result.clusterings[0].scores.n, result.clusterings[0].scores.classes) == (43, 4)


def test_guide_replaces_condition(call, guide, write_rows):
    result = call("--guide", guide, "--labels", "place", "--out", "out.csv")
    (clustering,) = result["clusterings"]
    assert (clustering["condition"], clustering["k"], clustering["scores"]["n"]) == (None, 4, 24)
    assert clustering["guide"] == dict(zip(PLACES, (8, 8, 4, 4), strict=True))
    # With a guide, even random features can separate the places.
    assert clustering["scores"]["v_measure"] > 0.5
    assert clustering["scores"]["minus_base_v_measure"] > 0.1


def test_guide_rows_apply_to_their_condition_only(call, write_rows, tmp_path):
    rows = [(text, location, "the place") for _, text, _, location in ROWS[:24]]
    rows += [
        (text, who, "the number of people") for _, text, who, _ in ROWS[:24] if "dogs" not in who
    ]
    guide = write_rows(rows, "both.csv", "text,label,condition")
    conditions = (*PLACE, *PEOPLE_COUNT, "--condition", "the mood")
    page = tmp_path / "page.html"
    result = call(*conditions, "--guide", guide, "--out", "out.csv", "--report", page)
    location, people, mood = result["clusterings"]
    assert (location["k"], people["k"], mood["guide"]) == (4, 3, None)
    assert people["guide"] == dict.fromkeys(PEOPLE[:3], 6)
    assert sum(map(Counter, people["guided"].values()), Counter()) == people["guide"]
    assert (len(people["guided"]) > 1, mood["guided"]) == (True, None)
    # Clusters under one condition do not depend on the labels of another.
    guide_path = write_rows([row[:2] for row in rows[:24]], "place.csv", "text,label")
    (unchanged,) = call(*PLACE, "--guide", guide_path, "--out", "out.csv")["clusterings"]
    assert unchanged["clusters"] == location["clusters"]
    assert "guide of the number of people" in page.read_text()


def test_guide_may_hold_other_texts(call, capsys, module_run, texts, write_rows):
    rows = [(f"{who} sit {place}", place) for who in PEOPLE for place in PLACES[:2]]
    guide = write_rows(rows, "other.csv", "text,label")
    arguments = ["cluster", texts, "--guide", guide, "--out", "out.csv", "--run", module_run]
    assert run([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr()
    assert "8 of 8 labelled texts are not in texts.csv" in printed.err
    assert "guide labels" not in printed.out
    assert len(read_csv("out.csv")) == 48


def test_table_shows_labels_of_guide_in_each_cluster(capsys, module_run, texts, guide):
    arguments = ["cluster", str(texts), "--guide", str(guide), "--run", str(module_run)]
    assert run(arguments) == 0
    table = capsys.readouterr().out
    assert "guide labels" in table
    assert all(re.search(rf"{label} \d", table) for label in PLACES)


def test_hdbscan_counts_texts_without_cluster(call, capsys, module_run, texts):
    arguments = ["cluster", texts, *PLACE, "--method", "hdbscan", "--min-cluster-size", 3]
    arguments += ["--out", "out.csv", "--labels", "place", "--run", module_run]
    assert run([str(argument) for argument in arguments]) == 0
    labels = [int(row["cluster"]) for row in read_csv("out.csv")]
    assert f"{labels.count(-1)} of 48 texts are in no cluster" in capsys.readouterr().err
    assert all(row["name"] == "" for row in read_csv("out.csv") if row["cluster"] == "-1")


def test_api_accepts_texts_and_tables(module_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = llmcond.cluster(
        texts=TEXTS, condition="the place", clusters=2, out="a.parquet", run=module_run
    )
    assert result.texts == 48
    assert result.clusterings[0].labels.shape == (48,)
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
    first, second = (pq.read_table(f"{name}.parquet").to_pydict() for name in "ab")
    assert first["cluster"] == second["cluster"]
    assert list(second) == ["body", "id", "cluster", "name"]


def test_text_file_has_one_text_per_line_and_keeps_duplicates(call, tmp_path, capsys, module_run):
    lines = tmp_path / "lines.txt"
    lines.write_text("two men\n\nthree women\ntwo men\nchildren\n")
    arguments = ["cluster", lines, *PLACE, "--clusters", "3", "--out", "out.csv", "--skip-empty"]
    assert run([str(argument) for argument in (*arguments, "--run", module_run)]) == 0
    assert "1 of 4 texts repeat an earlier one, and are kept" in capsys.readouterr().err
    rows = read_csv("out.csv")
    assert [row["text"] for row in rows] == ["two men", "three women", "two men", "children"]
    assert rows[0]["cluster"] == rows[2]["cluster"]


def test_long_texts_are_truncated_and_counted(call, write_rows, capsys, module_run):
    long = write_rows([("the park " * 200,), ("two dogs",), ("children",)], "long.csv", "text")
    arguments = ["cluster", long, *PLACE, "--clusters", "2", "--out", "out.csv"]
    assert run([str(argument) for argument in (*arguments, "--run", module_run)]) == 0
    assert "1 input is longer than 64 tokens: the ends of sentences" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "neither --condition nor --guide"),
        (("--condition", " "), "--condition is empty"),
        (
            (*PLACE, *PLACE, "--values", "", "--values", "a, b"),
            "'the place' is given more than once",
        ),
        (
            (*PLACE, *PEOPLE_COUNT, "--values", "a, b"),
            "1 --values and 2 --condition. Give --values",
        ),
        (("--values", "a, b"), "1 --values and 0 --condition"),
        ((*PLACE, "--clusters", "1"), "--clusters is 1; it must be at least 2"),
        ((*PLACE, "--clusters", "-3"), "--clusters is '-3'; expected a number"),
        ((*PLACE, "--clusters", "some"), "--clusters is 'some'; expected a number or auto"),
        ((*PLACE, "--clusters", "49"), "48 distinct texts, but --clusters is 49. Give at most 48"),
        (
            (*PLACE, "--method", "hdbscan", "--min-cluster-size", "49"),
            "--min-cluster-size is 49, but texts.csv has 48 texts. Give at most 48, or more texts",
        ),
        (
            (*PLACE, "--method", "hdbscan", "--clusters", "3"),
            "--clusters cannot be given with",
        ),
        ((*PLACE, "--min-cluster-size", "3"), "--min-cluster-size needs --method hdbscan"),
        ((*PLACE, "--method", "hdbscan", "--min-cluster-size", "1"), "must be at least 2"),
        ((*PLACE, "--text", "body"), "no column 'body'"),
        ((*PLACE, "--keep", "text"), "--keep text: a column of that name is written"),
        ((*PLACE, "--labels", "topic"), "no column 'topic'"),
        ((*PLACE, "--labels", "place", "people"), "--labels names 2 columns"),
        ((*PLACE, "--seed", "-1"), "--seed is -1"),
        ((*PLACE, "--report", "page.txt"), "name an .html or .htm file"),
        ((*PLACE, "--map", "map.html"), "name a .png or .svg or .pdf file"),
        ((*PLACE, "--map", "folder/map"), "has no suffix; name a .png or .svg or .pdf file"),
        ((*PLACE, "--map", "texts.csv"), "name a .png or .svg or .pdf file"),
        ((*PLACE, "--map", "out.png", "--out", "out-data.csv"), "the positions of --map out.png"),
        ((*PLACE, "--keep", "id", "id"), "--keep id: a column of that name is written"),
        ((*PLACE, "--keep", "cluster"), "--keep cluster: a column of that name is written"),
        ((*PLACE, "--guide", "missing.csv"), "missing.csv does not exist"),
        ((*PLACE, *PEOPLE_COUNT, "--guide", "{guide}"), "there are 2 conditions"),
    ],
)
def test_invalid_arguments_are_rejected(capsys, texts, guide, arguments, expected, tmp_path):
    options = [str(guide) if argument == "{guide}" else argument for argument in arguments]
    assert expected in run_rejected(
        capsys, *change_flags(("cluster", texts, "--out", "out.csv"), *options)
    )
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (("--out", "out.xlsx"), ".parquet or .csv"),
        (("--out", "texts.csv"), "is an input of the same command"),
        (("--map", "texts.png"), "texts-data.csv is an input of the same command"),
    ],
)
def test_invalid_out_file_is_rejected(capsys, texts, out, expected):
    source = texts.rename("texts-data.csv") if "--map" in out else texts
    before = source.read_bytes()
    assert expected in run_rejected(capsys, "cluster", source, *PLACE, *out)
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("two men", "a"), ("children", "a")], "guide.csv has one label, 'a'"),
        ([("two men", "a"), ("two men", "b")], "row 2 of guide.csv: 'two men' has the label 'b'"),
        ([("two men", "a"), ("children", "")], "row 2 of guide.csv: label is empty"),
        ([("", "a"), ("children", "b")], "row 1 of guide.csv: text is empty"),
    ],
)
def test_invalid_guide_is_rejected(capsys, texts, write_rows, rows, expected):
    guide = write_rows(rows, "guide.csv", "text,label")
    assert expected in run_rejected(capsys, "cluster", texts, "--guide", guide, "--out", "out.csv")
    other = write_rows(rows, "other.csv", "text,class")
    message = run_rejected(capsys, "cluster", texts, "--guide", other, "--out", "out.csv")
    assert "no column 'label'" in message
    assert "A guide needs the columns text and label." in message


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("two men",)], "few.csv has 1 distinct text, and clusters need at least 2"),
        ([("two men",), ("two men",)], "few.csv has 1 distinct text, and clusters need at least 2"),
        (
            [("two men",), (" ",), ("",)],
            "data row 2 of few.csv: text is empty (1 more row is invalid: 3). The header is not",
        ),
    ],
)
def test_too_few_or_empty_texts_are_rejected(capsys, texts, write_rows, rows, expected):
    few = write_rows(rows, "few.csv", "text")
    assert expected in run_rejected(capsys, "cluster", few, *PLACE, "--out", "out.csv")


CASES = ("Good", "GOOD", "good", "gOOd")  # which an encoder without case gives one vector


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (CASES, {}, "under 'the place', the texts have 1 distinct vector, and clusters need at"),
        (CASES, {"clusters": 2}, "the texts have 1 distinct vector, and clusters need at least 2"),
        (CASES, {"clusters": 4}, "the texts have 1 distinct vector, and clusters need at least 2"),
        (CASES, {"clusters": 5}, "4 distinct texts, but --clusters is 5. Give at most 4"),
        (CASES, {"method": "hdbscan"}, "the texts have 1 distinct vector, and clusters need"),
        (
            (*CASES, "bad"),
            {"clusters": 3},
            "2 distinct vectors, but --clusters is 3. Give at most 2",
        ),
        (("a",) * 3, {"clusters": 3}, "has 1 distinct text, and clusters need at least 2"),
        (
            ("a", "b"),
            {"guide": 3},
            "2 distinct texts, but the guide has 3 labels. Label with at most",
        ),
        ((*CASES, "bad"), {"guide": 3}, "2 distinct vectors, but the guide has 3 labels."),
        (("a", "b", "c"), {"guide": 3, "clusters": 4}, "but --clusters is 4. Give at most 3"),
    ],
)
def test_messages_about_numbers_name_no_other_options(minilm, rows, options, message):
    if "guide" in options:
        words = ("good", "bad", "tall", "red", "far")
        guide = [{"text": words[i], "label": str(i)} for i in range(options["guide"])]
        options = options | {"guide": guide}
    with pytest.raises(llmcond.UserError) as caught:
        llmcond.cluster(texts=rows, condition="the place", model=DEFAULT_MODEL, **options)
    assert message in str(caught.value)
    for option in ("clusters", "min_cluster_size", "method"):
        assert option in options or f"--{option.replace('_', '-')}" not in str(caught.value)


def test_base_vectors_may_be_fewer_than_clusters(minilm, monkeypatch):
    embed = EmbeddingModel.embed_with_base
    monkeypatch.setattr(
        EmbeddingModel,
        "embed_with_base",
        lambda self, texts: (embed(self, texts)[0], np.ones((len(texts), 3), np.float32)),
    )
    rows = [{"text": text, "kind": str(i % 2)} for i, text in enumerate(TEXTS[:6])]
    result = llmcond.cluster(
        texts=rows, condition="the place", clusters=3, labels=["kind"], model=DEFAULT_MODEL
    )
    assert result.clusterings[0].scores.base["v_measure"].value == 0


# -- page --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(module_run, tmp_path_factory):
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
        run=module_run,
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
        assert min(view["places"]) >= 0
        assert max(view["places"]) <= data["steps"]
        sizes = [size for _, _, size in view["clusters"]]
        assert np.bincount(view["labels"]).tolist() == sizes
    assert "56 texts, clustered with K-means" in parsed.visible_text
    assert parsed.visible_text.count("24 clusters; silhouette 0.") == len(data["shown"])
    assert "no head" in parsed.visible_text
    policy = parsed.all("meta")[1]["content"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not any(
        name.startswith("on") for _, attributes in parsed.elements for name in attributes
    )
    assert parsed.all("img") == []
    assert not parsed.open


@pytest.mark.parametrize("name", ["map.png", "map.SVG"])
def test_map_is_picture_with_data(module_run, tmp_path, name):
    options = {"method": "hdbscan", "min_cluster_size": 5}
    result = llmcond.cluster(
        texts=[*TEXTS, "x" * 300_000, "किताब", "快递"],
        condition=["the place", "the number of people"],
        map=tmp_path / name,
        run=module_run,
        **options,
    )
    assert result.map == tmp_path / name
    content = (tmp_path / name).read_bytes()
    assert content.startswith((b"\x89PNG", b"<svg"))
    rows = read_csv(tmp_path / "map-data.csv")
    assert list(rows[0]) == ["map", "x", "y", "cluster", "name", "text"]
    assert len(rows) == 2 * 51
    labels = [label for one in result.clusterings for label in one.labels.tolist()]
    assert [int(row["cluster"]) for row in rows] == labels
    assert max(len(row["text"]) for row in rows) < 1_100


def test_map_shows_part_of_large_collections(module_run, tmp_path, monkeypatch):
    monkeypatch.setattr("llmcond.clustering.page._MAX_TEXTS", 20)
    llmcond.cluster(
        texts=TEXTS,
        condition="the place",
        clusters=2,
        out=tmp_path / "out.csv",
        report=tmp_path / "page.html",
        run=module_run,
    )
    data = read_page_data(tmp_path / "page.html")
    assert len(data["texts"]) == len(data["shown"][0]["labels"]) == 20
    assert sum(size for _, _, size in data["shown"][0]["clusters"]) == 48
    assert "48 texts, 20 of them on the map" in (tmp_path / "page.html").read_text("utf-8")


def test_map_in_browser(browser, page):
    data = json.loads(json.dumps(read_page_data(page)))
    with open_page(browser, page, 390, "dark") as tab:
        check_views(tab)
        # Each cluster has its own mark, and the list ends below a whole row.
        marks = tab.locator("#legend svg").evaluate_all(
            "(marks) => marks.map((mark) => mark.style.color + mark.innerHTML)"
        )
        assert len(set(marks)) == 24
        assert tab.locator("#h-legend").inner_text().endswith("(scroll for all 24)")
        cut_rows = """(list) => [...list.children].filter((row) => {
            const [box, inner] = [row.getBoundingClientRect(), list.getBoundingClientRect()];
            return box.top < inner.bottom - 2 && box.bottom > inner.bottom + 2;
        }).length"""
        assert tab.locator("#legend").evaluate(cut_rows) == 0
        # Black marks are white on a dark screen; paper is light.
        has_white_marks = """(expected) => {
            const canvas = document.getElementById("canvas");
            const copy = new OffscreenCanvas(canvas.width, canvas.height);
            const pen = copy.getContext("2d", { willReadFrequently: true });
            pen.drawImage(canvas, 0, 0);
            const image = pen.getImageData(0, 0, copy.width, copy.height);
            return expected === image.data.some((value, i, data) => i % 4 === 3 && value > 150
                && data.slice(i - 3, i).every((colour) => colour > 250));
        }"""
        tab.wait_for_function(has_white_marks, arg=True)
        tab.emulate_media(media="print")
        tab.wait_for_function(has_white_marks, arg=False)
        tab.emulate_media(media="screen")
        # Arrow keys step through the texts; without one, there is no band below the map.
        canvas, text = tab.locator("#canvas"), tab.locator("#text")
        assert not text.is_visible()
        canvas.focus()
        tab.keyboard.press("ArrowRight")
        first = text.text_content()
        tab.keyboard.press("ArrowDown")
        second = text.text_content()
        assert first in data["texts"]
        assert second in data["texts"]
        assert first != second
        # Under another condition, points move and take its clusters.
        tab.get_by_role("radio", name="no condition").check()
        tab.locator("#canvas[data-moving=false]").wait_for()
        assert tab.locator("#legend li").count() == 24
        index = data["texts"].index(second)
        assert f"cluster {data['shown'][2]['labels'][index]}" in tab.locator("#of").inner_text()
        # The legend shows one cluster only, or all again; then the search applies to all texts.
        size = data["shown"][2]["clusters"][0][2]
        tab.locator("#legend button").first.click()
        assert tab.locator("#count").inner_text() == f"{size} of 56 texts"
        tab.locator("#legend button").first.click()
        tab.get_by_label("Search texts").fill("<b>PLAY</b>")
        assert tab.locator("#count").inner_text() == "1 of 56 texts"
        # The tooltip shows markup in a text as text.
        position = data["shown"][2]["places"][6:8]
        box = canvas.bounding_box()
        x, y = (
            box[key] + size / 2 + (coordinate / data["steps"] - 0.5) * (size - 28)
            for key, size, coordinate in zip(
                "xy", (box["width"], box["height"]), position, strict=True
            )
        )
        tab.mouse.move(x, y)
        assert "<b>play</b>" in tab.locator("#tooltip").inner_text()
        assert tab.locator("#tooltip b").count() == 0
