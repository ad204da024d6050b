"""``llmcond embed`` into one file: truncated and quantised embeddings."""

import csv
import json
import shutil
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.commands import run_json, run_rejected

from llmcond.quantization import PRECISIONS, quantize_embeddings

N = 120


@pytest.fixture
def embed_command(tiny_run, tmp_path):
    """Return a function that embeds 120 texts, and returns the arguments of the command."""
    source = tmp_path / "texts.csv"
    source.write_text("text\n" + "\n".join(f"{i} dogs and {i % 7} cats" for i in range(N)) + "\n")

    def command(out, *options):
        start = ("embed", source, "--run", tiny_run, "--condition", "the animal")
        return (*start, "--out", tmp_path / out, *options)

    return command


def read_vectors(path):
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".csv":
        with path.open(newline="") as stream:
            return np.array([json.loads(row["embedding"]) for row in csv.DictReader(stream)])
    return np.stack(pq.read_table(path)["embedding"].to_numpy())


@pytest.mark.parametrize("suffix", ["npy", "parquet", "csv"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_files_hold_quantised_embeddings(capsys, embed_command, tmp_path, suffix, precision):
    run_json(capsys, *embed_command("full.npy"))
    full = np.load(tmp_path / "full.npy")
    expected = full[:, :12] / np.linalg.norm(full[:, :12], axis=1, keepdims=True)
    expected = quantize_embeddings(expected, precision)
    options = ("--truncate-dim", 12, "--precision", precision)
    result = run_json(capsys, *embed_command(f"small.{suffix}", *options))
    vectors = read_vectors(tmp_path / f"small.{suffix}")
    if suffix != "csv":
        assert vectors.dtype == expected.dtype
    if precision == "float32":
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    else:  # rounding may change a step
        assert np.abs(vectors.astype(int) - expected).max() <= 1 or precision.endswith("binary")
        assert (vectors == expected).mean() > 0.99
    assert (result["dim"], result["precision"]) == (12, precision)


def test_ranges_are_recorded_and_give_same_codes_to_other_texts(capsys, embed_command, tmp_path):
    options = ("--precision", "int8")
    result = run_json(capsys, *embed_command("v.parquet", *options))
    assert result["ranges"] == str(tmp_path / "v-ranges.npy")
    ranges = np.load(result["ranges"])
    record = json.loads(pq.read_schema(tmp_path / "v.parquet").metadata[b"llmcond"])
    np.testing.assert_array_equal(np.array(record["ranges"], np.float32), ranges)
    assert (record["precision"], record["truncate_dim"]) == ("int8", None)
    codes = read_vectors(tmp_path / "v.parquet")
    (tmp_path / "texts.csv").write_text("text\n7 dogs and 0 cats\n")
    run_json(capsys, *embed_command("one.npy", *options, "--ranges", result["ranges"]))
    np.testing.assert_allclose(np.load(tmp_path / "one.npy")[0], codes[7], atol=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--truncate-dim 500", "truncate_dim is 500, but the embeddings have 32 dimensions"),
        ("--truncate-dim 0", "--truncate-dim is 0; it must be at least 1"),
        ("--precision int4", "--precision is 'int4'. Did you mean 'int8'"),
        ("--ranges r.npy", "--ranges is for --precision int8 and uint8, not float32"),
        ("--precision int8 --ranges no.npy", "--ranges no.npy does not exist"),
    ],
)
def test_invalid_options_report_one_line(capsys, embed_command, options, message):
    assert message in run_rejected(capsys, *embed_command("v.npy", *options.split()))


def test_one_text_cannot_be_calibrated(capsys, embed_command, tmp_path):
    (tmp_path / "texts.csv").write_text("text\na dog\n")
    line = run_rejected(capsys, *embed_command("v.npy", "--precision", "uint8"))
    assert "a single embedding has none" in line
    assert not (tmp_path / "v.npy").exists()


# -- several conditions ------------------------------------------------------------------------

CONDITIONS = ("the animal", "the U.S. number", "aspect")
NAMES = ["embedding (the animal)", "embedding (the U_S_ number)", "embedding (aspect)"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Thirty texts, and a column of conditions, in a .parquet file in the current folder."""
    monkeypatch.chdir(tmp_path)
    texts = [f"{i} dogs and {i % 7} cats" for i in range(30)]
    aspects = [("the size", "the colour")[i % 2] for i in range(30)]
    pq.write_table(pa.table({"text": texts, "aspect": aspects}), "texts.parquet")
    return texts, aspects


def embed_table(capsys, run_folder, out, conditions, *options):
    flags = [word for condition in conditions for word in ("--condition", condition)]
    return run_json(
        capsys, "embed", "texts.parquet", "--run", run_folder, "--out", out, *flags, *options
    )


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


@pytest.mark.parametrize("out", ["v.npy", "v.parquet", "v.csv", "v", "v.lance"])
def test_several_conditions_give_a_column_of_vectors_each(capsys, tiny_run, table, out):
    keep = () if out.endswith(".npy") else ("--keep", "text")
    result = embed_table(capsys, tiny_run, out, (*CONDITIONS, " The  Animal "), *keep)
    assert result["columns"] == dict(zip(NAMES, CONDITIONS, strict=True))
    assert (result["rows"], result["dim"]) == (30, 32)
    columns, names = read_columns(out, NAMES)
    if not out.endswith(".npy"):
        assert names == ["text", "sentence", *NAMES]
    for i, condition in enumerate(CONDITIONS):
        single = embed_table(capsys, tiny_run, f"single-{i}-{out}", [condition])
        assert single["columns"] == {"embedding": condition}
        (expected,), _ = read_columns(f"single-{i}-{out}", ["embedding"])
        np.testing.assert_allclose(columns[i], expected, atol=2e-4)
    assert np.abs(columns[0] - columns[2]).max() > 0.01


@pytest.mark.parametrize("precision", ["int8", "ubinary"])
def test_several_conditions_share_ranges(capsys, tiny_run, table, precision):
    embed_table(capsys, tiny_run, "full.npy", CONDITIONS)
    result = embed_table(capsys, tiny_run, "v.npy", CONDITIONS, "--precision", precision)
    full = np.load("full.npy").reshape(-1, 32)
    ranges = None if result["ranges"] is None else np.load(result["ranges"])
    expected = quantize_embeddings(full, precision, ranges).reshape(30, 3, -1)
    assert (np.load("v.npy") == expected).mean() > 0.99


def test_several_conditions_are_recorded_with_their_values(capsys, tiny_run, table):
    values = ("--values", "dog, cat", "--values", "", "--values", "small")
    result = embed_table(capsys, tiny_run, "v.parquet", CONDITIONS, *values)
    assert result["columns"][NAMES[0]] == "the animal, such as dog, cat"
    record = json.loads(pq.read_schema("v.parquet").metadata[b"llmcond"])
    assert record["conditions"] == [
        {"name": NAMES[0], "source": None, "text": "the animal", "values": ["dog", "cat"]},
        {"name": NAMES[1], "source": None, "text": "the U.S. number", "values": None},
        {"name": NAMES[2], "source": "aspect", "text": None, "values": ["small"]},
    ]
    line = run_rejected(
        capsys, "embed", "texts.parquet", "--out", "w.npy", "--run", tiny_run,
        *("--condition", "a", "--condition", "b", "--values", "x"),
    )  # fmt: skip
    assert "there are 1 --values and 2 --condition" in line


def test_titles_of_conditions_stay_distinct_when_they_are_cut(capsys, tiny_run, table):
    long = "the number of animals that are mentioned " * 2
    conditions = (f"{long}first", f"{long}second", "a.b", "a_b")
    names = list(embed_table(capsys, tiny_run, "v.csv", conditions)["columns"])
    assert len(set(names)) == 4
    assert names[2:] == ["embedding (a_b)", "embedding (a_b, 4)"]
    assert all(len(name) < 80 for name in names)


@pytest.mark.parametrize("out", ["v", "v.lance"])
def test_output_of_several_conditions_is_extended(capsys, tiny_run, table, out):
    before = embed_table(capsys, tiny_run, out, CONDITIONS[:2])
    columns, _ = read_columns(out, NAMES[:2])
    assert embed_table(capsys, tiny_run, out, CONDITIONS[:2]) == before
    again, _ = read_columns(out, NAMES[:2])
    np.testing.assert_array_equal(columns, again)
    flags = ("embed", "texts.parquet", "--run", tiny_run, "--out", out)
    line = run_rejected(capsys, *flags, "--condition", "the animal")
    assert "was started with another condition" in line


def test_missing_cell_of_a_column_of_conditions_is_reported(capsys, tiny_run, table):
    pq.write_table(pa.table({"text": ["a", "b"], "aspect": ["x", None]}), "texts.parquet")
    flags = ("embed", "texts.parquet", "--run", tiny_run)
    for out in ("v.npy", "v"):
        line = run_rejected(
            capsys, *flags, "--out", out, "--condition", "x", "--condition", "aspect"
        )
        assert "row 2" in line
        assert "aspect is empty" in line


@pytest.mark.parametrize("name", ["a.b", "a`b", "_rowid"])
def test_column_that_lance_cannot_hold_is_reported_before_encoding(
    capsys, tiny_run, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["a dog", "a cat"], name: [1, 2]}), "texts.parquet")
    flags = ("embed", "texts.parquet", "--run", tiny_run, "--condition", "x", "--out", "v.lance")
    for keep in ((), ("--keep", name)):
        line = run_rejected(capsys, *flags, *keep)
        assert f"the column name {name!r}" in line
        assert not (tmp_path / "v.lance").exists()
    run_json(capsys, *flags[:-1], "v", "--keep", name)
    assert pq.read_table("v").column_names[0] == name


def test_workers_embed_a_file_as_one_process_does(
    capsys, caplog, tiny_run, tmp_path, table, two_threads
):
    caplog.set_level("INFO", "llmcond")
    for name, options in (("alone", ()), ("shared", ("--workers", "2"))):
        run_folder = shutil.copytree(tiny_run, tmp_path / name)
        embed_table(capsys, run_folder, f"{name}.npy", ["the size"], *options)
    assert "2 workers on this machine" in caplog.text
    np.testing.assert_allclose(np.load("shared.npy"), np.load("alone.npy"), rtol=0, atol=1e-5)
