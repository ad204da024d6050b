"""Analyses of heads: examples, histograms, clusters, and similarities of answers."""

import json
import shutil

import numpy as np
import pytest
from helpers.commands import read_csv

import llmcond
from llmcond.base.arrays import as_matrix
from llmcond.base.errors import UserError
from llmcond.cli import run
from llmcond.evaluation.analyses import impurity
from llmcond.runs import open_run
from llmcond.runs.rated import RatedExamples

pytestmark = pytest.mark.usefixtures("one_thread")

NONE, LINEAR = "none@concat-sent-cond", "linear@concat-sent-cond"


def test_histograms_of_cosines_are_written_with_their_data(fitted, tmp_path):
    folder = shutil.copytree(fitted, tmp_path / "run")
    options = {"what": ["isotropy"], "figure_format": "svg", "split": "train"}
    analysis = llmcond.analyse(run=folder, **options)
    figures = folder / "analyses"
    assert {path.name for path in figures.iterdir()} == {"isotropy.svg", "isotropy-data.csv"}
    series = {}
    for row in read_csv(figures / "isotropy-data.csv"):
        series.setdefault((row["panel"], row["series"]), []).append(row)
    assert set(series) == {(NONE, "minus c"), (NONE, "with c"), (LINEAR, "minus c")}
    for row in analysis["isotropy"]:
        bins = series[f"{row['head']}@{row['prompt']}", "minus c" if row["subtract"] else "with c"]
        counts = np.array([int(line["vectors"]) for line in bins])
        edges = np.array([[float(line[end]) for end in ("from", "to")] for line in bins])
        assert counts.sum() == row["n"]
        # The histogram agrees with table 4 up to the width of its bins.
        mean = (counts * edges.mean(axis=1)).sum() / counts.sum()
        assert mean == pytest.approx(row["mean_cosine"], abs=edges[0, 1] - edges[0, 0])
        assert sum(float(line["percent"]) for line in bins) == pytest.approx(100)


def test_analysis_of_several_conditions_is_left_out_for_one(
    model, small_rows, write_rows, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    rows = [(a, b, "the place", rating) for a, b, _, rating in small_rows]
    data = write_rows(rows, "data/train.csv").parent
    llmcond.extract(model=model, data=data, run="run", prompt=["concat-sent-cond"], device="cpu")
    options = {"run": "run", "split": "train", "out": "figures"}
    analysis = llmcond.analyse(**options)
    assert "isotropy" in analysis
    assert "clusters" not in analysis
    with pytest.raises(UserError, match="at least 2 conditions"):
        llmcond.analyse(**options, what=["clusters"])


def test_tables_and_figures_of_all_analyses_are_written(capsys, fitted, tmp_path):
    what = ("isotropy", "clusters", "conditions")
    options = ("--out", str(tmp_path), "--conditions", "2", "--figure-format", "pdf")
    command = ["analyse", "--run", str(fitted), "--what", *what, *options, "--format", "markdown"]
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    tables = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines if line[:1] == "|"]
    rows = [row for row in tables if "@" in row[0]]
    assert rows == [[f"{NONE}+c", "no"], [NONE, "yes"], [LINEAR, "yes"]] * len(what)
    assert tables.count(["name", "minus c"]) == len(what)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"isotropy.pdf", "isotropy-data.csv", f"clusters-{LINEAR}.pdf"} <= names


def test_clusters_before_a_head_are_those_of_sentences_without_their_condition(heads_run, tmp_path):
    pytest.importorskip("vl_convert")
    options = {"run": heads_run, "head": ["low"], "split": "train", "what": ["clusters"]}
    report = llmcond.analyse(**options, sentences=3, out=tmp_path, figure_format="svg").to_json()
    zero_shot, head = report["clusters"]
    opened = open_run(heads_run)
    rows, examples = opened.rows("train"), RatedExamples(opened)
    sentences = as_matrix(examples.rated(opened.load_head("low").view, "train").first)
    conditions = np.array(rows.take(rows.rated).condition)
    matches = [np.flatnonzero(conditions == condition)[:3] for condition in head["conditions"]]
    positions = np.concatenate(matches).tolist()
    labels = conditions[positions].tolist()
    assert head["impurity_before"] == impurity(sentences.read(positions), labels, 0)["value"]
    assert "impurity_before" not in zero_shot
    assert "</svg>" in (tmp_path / "clusters-low.svg").read_text(encoding="utf-8")
    names = [row["name"].partition(": ")[2] for row in read_csv(tmp_path / "clusters-low-data.csv")]
    assert names == labels * 2  # before and after the head


# -- answers -----------------------------------------------------------------------------------

FIRST, SECOND = PAIR = ("A girl in an orange dress.", "A girl in gray.")
#: The first question has both answers, the second only that of the second sentence.
COLUMNS = ("sentence1", "sentence2", "condition", "answer1", "answer2")
ROWS = [
    dict(zip(COLUMNS, (FIRST, SECOND, "color", "orange", "gray"), strict=True)),
    dict(zip(COLUMNS, (FIRST, SECOND, "game", "", "tennis"), strict=True)),
]
#: The texts that are compared, with their conditions.
COMPARISONS = [
    (FIRST, SECOND, None),
    (FIRST, SECOND, "color"),
    (FIRST, "orange", "color"),
    (SECOND, "gray", "color"),
    (FIRST, SECOND, "game"),
    (SECOND, "tennis", "game"),
]


def analyse_answers(folder, answers=ROWS):
    (head,) = llmcond.analyse(run=folder, what=["answers"], answers=answers)["answers"]
    return head


def texts_of(head):
    return [(row["text1"], row["text2"], row["condition"]) for row in head["rows"]]


def test_similarities_equal_those_of_embedder(fitted):
    head = analyse_answers(fitted)
    assert texts_of(head) == COMPARISONS
    columns = list(zip(*COMPARISONS[1:], strict=True))
    # The prompt encodes a text without a condition as it is.
    alone = [llmcond.EncoderInput(instruction="", text=text) for text in PAIR]
    for key, name in (("before", "none"), ("after", "linear")):
        embedder = llmcond.load_embedder(fitted, name)
        values = [row[key] for row in head["rows"]]
        expected = embedder.similarity(*columns)
        assert values[1:] == pytest.approx(expected.tolist(), abs=1e-5)
        assert len({round(value, 6) for value in values}) >= 4
        vectors = embedder.encoder.encode(alone)
        if name == "linear":
            vectors = embedder.head.transform(vectors)
        similarity = embedder.head.compare(vectors[:1], vectors[1:])[0]
        assert values[0] == pytest.approx(float(similarity), abs=1e-5)


def test_invalid_request_is_rejected(fitted, tmp_path):
    for options, message in (
        ({"what": ["answers"]}, "the analysis answers needs the texts to compare"),
        ({"what": ["isotropy"], "answers": ROWS}, "--answers is only for the analysis answers"),
    ):
        with pytest.raises(UserError, match=message):
            llmcond.analyse(run=fitted, **options)
    # Other analyses do not need the encoder.
    folder = shutil.copytree(fitted, tmp_path / "run")
    manifest = json.loads((folder / "run.json").read_text())
    manifest["encoder"]["model"] = str(tmp_path / "gone")
    (folder / "run.json").write_text(json.dumps(manifest))
    assert "answers" not in llmcond.analyse(run=folder, what=["isotropy"])
    with pytest.raises(UserError, match="gone"):
        analyse_answers(folder)
