"""``llmcond embed`` into one file: truncated and quantised embeddings."""

import csv
import json

import numpy as np
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
