"""Rows that share a sentence with train are counted, and the others are also scored separately."""

import csv

import pytest
from helpers.commands import run_json
from scipy.stats import spearmanr

from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.report.tables import MINUS
from llmcond.runs.rated import log_rows

pytestmark = pytest.mark.usefixtures("one_thread")

HEADER = ("sentence1", "sentence2", "condition", "label")


def write_csv(path, rows):
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([HEADER, *rows])


def test_warning_of_shared_pairs_says_how_to_leave_them_out(tmp_path, caplog, small_rows):
    write_csv(tmp_path / "train.csv", small_rows[:40])
    write_csv(tmp_path / "dev.csv", small_rows[38:])
    log_rows(read_dataset(str(tmp_path)))
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "1 sentence pair of dev is also in train" in warning
    assert "remove their rows from one of the splits" in warning


def test_rows_with_unseen_sentences_are_scored_separately(
    tmp_path, monkeypatch, capsys, tiny_checkpoint, small_rows
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    train, dev = small_rows[:40], list(small_rows[40:])
    # These pairs are not in train, but their first sentence is.
    dev[::5] = [(train[0][0].upper(), *row[1:]) for row in dev[::5]]
    write_csv(tmp_path / "data" / "train.csv", train)
    write_csv(tmp_path / "data" / "dev.csv", dev)
    words = ("--data", "data", "--prompt", "concat-sent-cond", "--pooling", "mean", "--run", "r")
    assert run(["extract", "--model", str(tiny_checkpoint()), *words]) == 0
    messages = capsys.readouterr().err
    assert "sentence pairs of dev are also in train" not in messages
    assert "dev: 8 of 40 rated rows share a sentence with train" in messages
    evaluate = ("evaluate", "--run", "r", "--head", "none")
    result, _ = run_json(capsys, *evaluate, "--predictions", "p.csv")["results"]
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    unseen = [row for row in rows if row["sentence1"] != train[0][0].upper()]
    assert (result["n_unseen_sentences"], len(unseen)) == (32, 32)
    expected = spearmanr(
        [float(row[result["name"]]) for row in unseen], [float(row["rating"]) for row in unseen]
    )
    scores = result["unseen_sentences"]
    assert scores["spearman"] == pytest.approx(expected.statistic, abs=1e-3)
    assert scores["n_pairs"] < result["n_pairs"]
    low, high = scores["spearman_ci"]
    assert low < scores["spearman"] < high
    assert run([*evaluate, "--format", "markdown"]) == 0
    assert "8 rows share a sentence with training, 32 do not" in capsys.readouterr().out
    # All sentences of train are known, and so are those of another file with the same pairs.
    assert "unseen_sentences" not in run_json(capsys, *evaluate, "--split", "train")["results"][0]
    write_csv(
        tmp_path / "known.csv",
        [(a, b, "the weather", 3 + i % 2) for i, (a, b, *_) in enumerate(train)],
    )
    known = run_json(capsys, *evaluate, "--data", "known.csv")["results"][0]
    assert (known["n_unseen_sentences"], known["unseen_sentences"]["spearman"]) == (0, None)


def test_compare_prompts_scores_unseen_sentences_separately(
    tmp_path, monkeypatch, capsys, tiny_checkpoint, small_rows
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_csv(tmp_path / "data" / "train.csv", small_rows[:40])
    dev = list(small_rows[40:])
    dev[::5] = [(small_rows[0][0].upper(), *row[1:]) for row in dev[::5]]
    write_csv(tmp_path / "data" / "dev.csv", dev)
    compare = ["compare-prompts", "--model", str(tiny_checkpoint()), "--data", "data"]
    compare += ["--prompts", "concat-sent-cond", "concat-cond-sent", "--pooling", "mean"]
    compare += ["--heads", "linear", "--seeds", "1", "--set", "epochs=1", "dim=4", "--run", "r"]
    results = run_json(capsys, *compare, "--report", "page.html")["results"]
    scored = run_json(capsys, "evaluate", "--run", "r", "--head", "none")["results"]
    by_name = {row["name"]: row for row in results}
    for row in scored:
        assert by_name[row["name"]]["n_unseen_sentences"] == 32
        assert by_name[row["name"]]["unseen_sentences"] == row["unseen_sentences"]
    fitted = [row for row in results if row["head"] == "linear"]
    assert all(row["unseen_sentences"]["spearman"] != row["spearman"] for row in fitted)
    page = (tmp_path / "page.html").read_text()
    assert "8 rows share a sentence with training, 32 do not" in page
    figures = [f"{100 * row['unseen_sentences']['spearman']:.1f}" for row in results]
    column = page[page.index(">Spearman, unseen sentences<") :]
    assert all(f">{figure.replace('-', MINUS)}<" in column for figure in figures)
    for form in ("table", "markdown", "latex"):
        assert run([*compare, "--format", form]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "8 rows share a sentence with training, 32 do not" in shown
        assert "Spearman, unseen sentences" in shown
        assert all(f"{figure} [" in shown for figure in figures)
    # A run without such rows has no such column.
    write_csv(tmp_path / "data" / "dev.csv", small_rows[40:])
    result = run_json(capsys, *compare[:-1], "other")["results"][0]
    assert "unseen_sentences" not in result
