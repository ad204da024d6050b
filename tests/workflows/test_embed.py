"""``llmcond embed`` into one file: quantised embeddings, and several conditions."""

import csv
import json
import shutil
from itertools import product
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected
from helpers.model_server import EmbeddingServer
from safetensors.numpy import load_file, save_file

import llmcond
from llmcond import Condition
from llmcond.base.files import digest_file
from llmcond.runs.embedder import EmbeddingModel

CONDITIONS = ("the animal", "the U.S. number", "aspect")
NAMES = ["embedding (the animal)", "embedding (the U_S_ number)", "embedding (aspect)"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """120 texts with a column of conditions in texts.parquet, in the current folder."""
    monkeypatch.chdir(tmp_path)
    texts = [f"{i} dogs and {i % 7} cats" for i in range(120)]
    aspects = [("the size", "the colour")[i % 2] for i in range(120)]
    pq.write_table(pa.table({"text": texts, "aspect": aspects}), "texts.parquet")


@pytest.fixture
def embed(capsys, tiny_run, table):
    """Return a function that embeds the texts with the run under conditions."""

    def embed_texts(out, conditions, *options, run=tiny_run, command=run_json):
        flags = [word for condition in conditions for word in ("--condition", condition)]
        source = ("embed", "texts.parquet", "--run", run, "--out", out)
        return command(capsys, *source, *flags, *options)

    return embed_texts


def read_columns(out, names):
    """Return the vectors of each column, and the names of all columns."""
    if out.endswith(".npy"):
        array = np.load(out)
        return list(np.moveaxis(array, 1, 0) if len(names) > 1 else [array]), list(names)
    if out.endswith(".csv"):
        rows = list(csv.DictReader(Path(out).read_text().splitlines()))
        return [np.array([json.loads(row[name]) for row in rows]) for name in names], list(rows[0])
    table = lance.dataset(out).to_table() if out.endswith(".lance") else pq.read_table(out)
    return [np.stack(table[name].to_numpy()) for name in names], table.column_names


def test_head_that_returns_nan_is_rejected(embed, capsys, fitted, tmp_path):
    folder = Path(shutil.copytree(fitted, tmp_path / "damaged"))
    (record_path,) = folder.glob("heads/*/head.json")
    (weights,) = record_path.parent.glob("*.safetensors")
    tensors = {name: np.full_like(value, np.nan) for name, value in load_file(weights).items()}
    save_file(tensors, weights)
    digest = digest_file(weights)
    weights.rename(weights.with_name(f"head-{digest[:16]}.safetensors"))
    record = json.loads(record_path.read_text()) | {"weights_sha256": digest}
    record_path.write_text(json.dumps(record))
    model = ("--run", folder, "--condition", "the animal")
    for arguments in (
        ("embed", "texts.parquet", "--out", "v.npy", *model),
        ("embed", "texts.parquet", "--out", "vectors", *model),
        ("cluster", "texts.parquet", *model),
        ("index", "texts.parquet", "--out", "index", *model),
    ):
        line = run_rejected(capsys, *arguments, "--head", record_path.parent.name)
        assert "returned NaN or infinity" in line


def test_ranges_are_recorded_and_give_same_codes_to_other_texts(embed):
    options = ("--precision", "int8")
    result = embed("v.parquet", CONDITIONS[:1], *options)
    assert result["ranges"] == "v-ranges.npy"
    ranges = np.load("v-ranges.npy")
    record = json.loads(pq.read_schema("v.parquet").metadata[b"llmcond"])
    np.testing.assert_array_equal(np.array(record["ranges"], np.float32), ranges)
    assert (record["precision"], record["truncate_dim"]) == ("int8", None)
    (codes,), _ = read_columns("v.parquet", ["embedding"])
    pq.write_table(pa.table({"text": ["7 dogs and 0 cats"]}), "texts.parquet")
    embed("one.npy", CONDITIONS[:1], *options, "--ranges", "v-ranges.npy")
    np.testing.assert_allclose(np.load("one.npy")[0], codes[7], atol=1)
    np.testing.assert_array_equal(np.load("one-ranges.npy"), ranges)
    line = embed("w.npy", CONDITIONS[:1], "--precision", "uint8", command=run_rejected)
    assert "a single embedding has none" in line
    assert not Path("w.npy").exists()
    line = embed("w.npy", CONDITIONS[:1], "--ranges", "v-ranges.npy", command=run_rejected)
    assert "--ranges needs --precision int8 or --precision uint8" in line
    # Other types of files hold the same codes.
    options = ("--truncate-dim", 12, "--precision", "ubinary")
    embed("one.npy", CONDITIONS[:1], *options)
    assert embed("one.csv", CONDITIONS[:1], *options)["dim"] == 12
    (codes,), _ = read_columns("one.csv", ["embedding"])
    np.testing.assert_array_equal(codes, np.load("one.npy"))
    assert codes.shape == (1, 2)  # 12 bits


# -- several conditions ------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["v.npy", "v.parquet", "v.csv", "v", "v.lance"])
def test_several_conditions_give_a_column_of_vectors_each(embed, out):
    keep = () if out.endswith(".npy") else ("--keep", "text")
    result = embed(out, (*CONDITIONS, " The  Animal "), *keep)
    assert result["columns"] == dict(zip(NAMES, CONDITIONS, strict=True))
    assert (result["rows"], result["dim"]) == (120, 32)
    columns, names = read_columns(out, NAMES)
    if not out.endswith(".npy"):
        assert names == ["text", "sentence", *NAMES]
    for i, condition in enumerate(CONDITIONS):
        single = embed(f"single-{i}.npy", [condition])
        assert single["columns"] == {"embedding": condition}
        np.testing.assert_allclose(columns[i], np.load(f"single-{i}.npy"), atol=2e-4)
    assert np.abs(columns[0] - columns[2]).max() > 0.01


def test_several_conditions_are_recorded_with_their_values(embed):
    values = ("--values", "dog, cat", "--values", "", "--values", "small")
    result = embed("v.parquet", CONDITIONS, *values)
    assert result["columns"][NAMES[0]] == "the animal, such as dog, cat"
    record = json.loads(pq.read_schema("v.parquet").metadata[b"llmcond"])
    assert [list(column.values()) for column in record["conditions"]] == [
        [NAMES[0], None, "the animal", ["dog", "cat"], []],
        [NAMES[1], None, "the U.S. number", None, []],
        [NAMES[2], "aspect", None, ["small"], []],
    ]
    # Titles stay distinct when they are cut.
    long = "the number of animals that are mentioned " * 2
    names = list(embed("w.csv", (f"{long}first", f"{long}second", "a.b", "a_b"))["columns"])
    assert len(set(names)) == 4
    assert names[2:] == ["embedding (a_b)", "embedding (a_b, 4)"]
    assert all(len(name) < 80 for name in names)


def test_ignored_conditions_are_removed_as_by_an_embedder(embed, tiny_run):
    parts = ("two men", "dogs"), ("sit", "play", "walk", "run"), ("a park", "a beach", "the rain")
    texts = [" ".join(words) for words in product(*parts, ("now", "again", "alone"))]
    aspects = [text.split()[0] for text in texts]
    pq.write_table(pa.table({"text": texts, "aspect": aspects}), "texts.parquet")
    condition = Condition("the animal | the beast", ignore=["the number", "the mood"])
    expected = llmcond.load_embedder(tiny_run).ignoring(texts, condition).encode(texts, condition)
    options = ("--ignore", "the number", "--ignore", "the mood")
    for out in ("v.parquet", "folder", "folder"):  # the second call finds the folder complete
        result = embed(out, ["the animal | the beast"], *options)
        assert result["guides"][condition]["ignored"] == ["the number", "the mood"]
        (vectors,), _ = read_columns(out, ["embedding"])
        np.testing.assert_allclose(vectors, expected, atol=0.01)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-3)
    embed("text.npy", (), "--condition-text", "the animal | the beast", *options)
    np.testing.assert_allclose(np.load("text.npy"), expected, atol=0.01)
    for out in ("w.npy", "other"):
        result = embed(out, CONDITIONS[:2], "--ignore", "others", "--ignore-column", "aspect")
        names = ["the animal, ignoring the U.S. number", "the U.S. number, ignoring the animal"]
        assert list(result["guides"]) == names
        assert result["guides"][names[0]]["ignored"] == ["the U.S. number", "aspect"]


def test_invalid_arguments_of_ignore_report_one_line(embed):
    for conditions, options, expected in (
        (CONDITIONS[:1], ("--ignore", "the Animal"), "'the animal' cannot ignore itself"),
        (CONDITIONS[:1], ("--ignore", " "), "--ignore is empty"),
        (CONDITIONS[:1], ("--ignore", "others"), "--ignore others needs several --condition"),
        (CONDITIONS[2:], ("--ignore", "the size"), "'aspect' is a column of them"),
        (CONDITIONS[:1], ("--ignore-column", "aspct"), "no column 'aspct'"),
        (CONDITIONS[:1], ("--ignore-directions", "2"), "--ignore-directions needs --ignore"),
        ((), ("--ignore", "the size"), "--ignore needs --condition"),
    ):
        for out in ("v.parquet", "folder"):
            assert expected in embed(out, conditions, *options, command=run_rejected)
    few = pq.read_table("texts.parquet")[:49]
    pq.write_table(few, "texts.parquet")
    for out in ("v.parquet", "folder"):
        line = embed(out, CONDITIONS[:1], "--ignore", "the size", command=run_rejected)
        assert "there are 49 distinct texts, and at least 50 are needed" in line
    assert not Path("v.parquet").exists()
    assert not Path("folder").exists()


def test_workers_embed_a_file_as_one_process_does(embed, caplog, tiny_run, two_threads):
    caplog.set_level("INFO", "llmcond")
    for name, options in (("alone", ()), ("shared", ("--workers", "2"))):
        folder = shutil.copytree(tiny_run, Path(name))
        embed(f"{name}.npy", ["the size"], *options, run=folder)
    assert "2 workers on this machine" in caplog.text
    np.testing.assert_allclose(np.load("shared.npy"), np.load("alone.npy"), rtol=0, atol=1e-5)


def test_models_without_scores_of_mentions_are_rejected_before_encoding(capsys, table, monkeypatch):
    monkeypatch.setattr(EmbeddingModel, "extract", None)
    with EmbeddingServer() as server:
        model = ("--model", server.name, "--prompt", "concat-sent-cond")
        command = ("embed", "texts.parquet", *model, "--condition", "the animal")
        line = run_rejected(capsys, *command, "--mentions", "--out", "v.csv")
    assert "but routers and scores of mentions weight the states of tokens" in line


def test_columns_whose_short_names_are_equal_get_numbers(embed):
    conditions = ["a_, 3", "a.", "a`"]
    embed("v.parquet", conditions)
    names = pq.read_schema("v.parquet").names
    assert len({name for name in names if name.startswith("embedding")}) == 3


def test_output_in_the_home_folder_is_written_there(embed, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    embed("~/v.npy", ["the animal"])
    assert (tmp_path / "home" / "v.npy").is_file()
