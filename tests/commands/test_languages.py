"""The line about texts in other languages, once in every command that embeds a user's texts."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmcond.cli import run

GERMAN = [f"{'Wo ist das ' * (i + 1)}Paket?" for i in range(24)]


@pytest.mark.parametrize(
    ("command", "start"),
    [
        ("cluster texts.csv --clusters 2 --no-check", "24 of 24 texts seem"),
        ("embed texts.csv --out vectors.npy", "24 of 24 texts seem"),
        ("embed texts.parquet --out vectors", "24 of 24 texts seem"),
        ("index texts.csv --out texts.index", "24 of 24 texts seem"),
        ("check-condition texts.csv", "24 of 24 texts seem"),
        ("similarity SENTENCE SENTENCE", "2 of 2 texts seem"),
    ],
)
def test_foreign_texts_are_reported_once(
    command, start, tiny_run, write_rows, in_tmp, monkeypatch, capsys
):
    monkeypatch.setattr("llmcond.runs.languages._has_english_card", lambda _: True)
    write_rows([(text,) for text in GERMAN], "texts.csv", "text")
    pq.write_table(pa.table({"text": GERMAN}), "texts.parquet")
    words = [GERMAN[0] if word == "SENTENCE" else word for word in command.split()]
    options = ["--condition", "the topic", "--run", str(tiny_run), "--device", "cpu"]
    assert run([*words, *options]) == 0
    printed = capsys.readouterr().err
    assert printed.count("not to be in English") == printed.count(start) == 1
    if command.startswith("index"):
        query = ["search", "texts.index", GERMAN[0], "--condition", "the topic", "--no-check"]
        assert run([*query, "--device", "cpu"]) == 0
        assert capsys.readouterr().err.count("1 of 1 text seems not to be in English") == 1
