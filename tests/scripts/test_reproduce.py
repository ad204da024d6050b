"""The papers' tables: every row there, printed figures right, nothing done twice, nothing lost."""

import csv
import json
import re
from importlib import import_module
from types import SimpleNamespace

import pytest
from helpers import checkpoints
from helpers.paths import ROOT

from llmcond.runs.extraction import LazyEncoder

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.script("reproduce", "reproduce_case", "reproduce_hypercl"),
]

SFR = "Salesforce/SFR-Embedding-Mistral"
#: By its full name: the package has functions of such names.
FITTING = import_module("llmcond.runs.rated")
QUICK = ["--quick", "--workers", "1", "--device", "cpu", "--dtype", "float32", "--json"]


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import reproduce
        import reproduce_case
        import reproduce_hypercl

        yield SimpleNamespace(shared=reproduce, case=reproduce_case, hypercl=reproduce_hypercl)


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny_checkpoint, small_rows):
    """Data, an encoder without instructions, and a copy of one of CASE's encoders."""
    folder = tmp_path_factory.mktemp("reproduce")
    mistral = checkpoints.make("mistral", folder / "mistral").folder
    bert = tiny_checkpoint()
    write(folder / "rows.csv", small_rows)
    return SimpleNamespace(
        folder=folder, data=str(folder / "rows.csv"), bert=str(bert), sfr=f"{SFR}={mistral}"
    )


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["sentence1", "sentence2", "condition", "label"])
        writer.writerows(rows)
    return str(path)


@pytest.fixture
def call(capsys, work):
    """Run a script; return its code, its Markdown and its JSON."""

    def run(script, encoders, *options, data=None):
        folder = ["--folder", str(work.folder / "runs"), "--data", data or work.data]
        code = script.main(["--encoders", *encoders, *folder, *QUICK, *options])
        out = capsys.readouterr().out
        text, _, last = out.rstrip("\n").rpartition("\n")
        return code, text, json.loads(last) if last.startswith("{") else None

    return run


def rows_of(record, table):
    return next(part for part in record["sections"] if part["table"] == table)["rows"]


def forbid(*_, **__):
    raise AssertionError("this was done before")


# The whole


def test_case_lays_out_every_table(scripts, call, work):
    code, text, record = call(scripts.case, [work.bert, work.sfr, "nobody/nothing-here"])
    assert code == 0
    tables = ["Table 1", "Table 2", "Table 4", "Table 5", "Table 6", "Figure 4"]
    assert [part["table"] for part in record["sections"]] == tables
    assert re.findall(r"^## (.*):", text, re.MULTILINE) == tables
    for line in text.splitlines():
        assert line.startswith(("|", "#", "-", "```", "python ")) or not line
    # Instructions: not by one encoder, and in the words of the paper by the other.
    ours = {(row["encoder"], row["setting"]): row for row in rows_of(record, "Table 1")}
    assert "takes none" in ours[work.bert, "cond - c"]["reason"]
    assert ours[work.bert, "cond - c"]["ours"] is None
    assert ours[work.bert, "CONC(c+s) - c"]["ours"]["spearman"]["value"] is not None
    assert ours[SFR, "cond - c"]["paper"] == {"spearman": 20.38, "accuracy": 52.51}
    assert ours[SFR, "cond - c"]["ours"]["accuracy"]["low"] is not None
    # An encoder that is not there has its rows, with the reason told once.
    assert "see the remark" in ours["nobody/nothing-here", "CONC(s+c)"]["reason"]
    assert record["encoders"][2]["reason"]
    # Table 6 has the poolings of the paper, and its figures.
    pooled = {(r["encoder"], r["pooling"], r["setting"]): r for r in rows_of(record, "Table 6")}
    assert pooled[SFR, "last", "sent"]["paper"]["spearman"] == -0.18
    assert pooled[SFR, "last", "sent"]["ours"] != pooled[SFR, "mean", "sent"]["ours"]
    assert pooled[work.bert, "last", "CONC(s+c)"]["ours"]
    heads = [row for row in rows_of(record, "Table 2") if row["encoder"] == SFR]
    assert [row["head"] for row in heads] == ["mlp", "linear", "pca", "ica", "mlp", "linear"]
    assert heads[0]["paper"] == {"spearman": 62.85}
    assert "32 dimensions, all that the encoder has" in heads[0]["set_up"]
    assert "not in the paper: without subtraction" in heads[-1]["set_up"]
    printed = "| 62.85 | "
    assert printed in text
    assert "(others -4.89 to 19.13)" in text


def test_hypercl_lays_out_every_table(scripts, call, work):
    code, text, record = call(scripts.hypercl, [work.bert, "nobody/nothing-here"])
    assert code == 0
    tables = ["Table 1", "Table 5", "Table 6", "Table 8", "Section 5.2", "Section 5.4.1"]
    assert [part["table"] for part in record["sections"]] == tables
    for table in tables:
        for row in rows_of(record, table):
            done = row["encoder"] == work.bert and "fine-tuned" not in str(row)
            assert (row["reason"] is None) == done, row
            # The few rows of dev have no condition that training lacks; of one dimension all
            # cosines may be 1.
            if table != "Table 5" and row.get("K") != "1":
                assert None not in [value["value"] for value in (row["ours"] or {}).values()], row
    there = [row for row in rows_of(record, "Table 1") if row["encoder"] == work.bert]
    first = {row["architecture"]: row for row in there}
    assert "– (others 33.10 to 38.36)" in text
    assert {"spearman", "pearson"} == set(first["hyper2-cl"]["ours"])
    ranks = [row["K"] for row in rows_of(record, "Table 8") if row["encoder"] == work.bert]
    assert ranks == ["32", "8", "4", "2", "2", "1"]
    # The same head is the same row in every table.
    full = [rows_of(record, "Table 8")[0], first["hyper-cl"]]
    assert full[0]["ours"]["spearman"] == full[1]["ours"]["spearman"]
    # Nothing of the rows themselves.
    assert "the number of people" not in text + json.dumps(record)


def test_nothing_is_done_twice(scripts, call, work, monkeypatch, tmp_path):
    """Runs after both of the above; by itself it does what they do first."""
    firsts = [call(script, [work.bert]) for script in (scripts.case, scripts.hypercl)]
    monkeypatch.setattr(FITTING, "fit_recipe", forbid)
    monkeypatch.setattr(LazyEncoder, "__call__", forbid)
    for script, first in zip((scripts.case, scripts.hypercl), firsts, strict=True):
        out = tmp_path / "tables.md"
        code, text, record = call(script, [work.bert], "--out", str(out))
        assert (code, text, record["sections"]) == (0, first[1], first[2]["sections"])
        assert out.read_text(encoding="utf-8").strip() == text.strip()


# Interrupts and mistakes


def test_an_interrupted_command_resumes(scripts, call, work, monkeypatch, tmp_path):
    real, fitted = FITTING.fit_recipe, []

    def stops(recipe, *arguments):
        if len(fitted) == 2:
            raise KeyboardInterrupt
        fitted.append(recipe.name)
        return real(recipe, *arguments)

    out = tmp_path / "tables.md"
    options = ["--folder", str(tmp_path / "runs"), "--tables", "6", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(FITTING, "fit_recipe", stops)
        assert call(scripts.hypercl, [work.bert], *options)[0] == 1
    assert not out.exists()
    counted = []
    monkeypatch.setattr(FITTING, "fit_recipe", lambda *a: counted.append(1) or real(*a))
    code, _, record = call(scripts.hypercl, [work.bert], *options)
    assert code == 0
    assert len(counted) == len(rows_of(record, "Table 6")) - len(fitted)
    assert out.exists()


def test_heads_that_cannot_be_fitted_are_rows_with_a_reason(
    scripts, call, work, small_rows, tmp_path
):
    one_each = [small_rows[2 * i + i % 2] for i in range(len(small_rows) // 2)]
    data = write(tmp_path / "one-each.csv", one_each)
    options = ["--folder", str(tmp_path / "runs"), "--tables", "6", "5.2"]
    code, text, record = call(scripts.hypercl, [work.bert], *options, data=data)
    assert code == 0
    for row in rows_of(record, "Table 6"):
        if "-cl" in row["architecture"]:
            assert "no sentence pair has two rated rows" in row["reason"]
            assert row["reason"] in text
        else:
            assert row["ours"]["spearman"]["value"] is not None
    assert "Use mse" not in text


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--seeds", "0"], 2), (["--data", "nothing.csv"], 2), (["--out", "."], 2)],
)
def test_wrong_input_is_found_before_any_work(scripts, work, monkeypatch, options, code):
    monkeypatch.setattr(scripts.shared, "extract", forbid)
    wanted = ["--folder", str(work.folder / "runs"), "--data", work.data]
    assert scripts.case.main(["--encoders", work.bert, *wanted, *options]) == code


def test_a_folder_of_other_rows_is_not_used(scripts, call, work, small_rows, tmp_path):
    data = write(tmp_path / "fewer.csv", small_rows[:60])
    options = ["--folder", str(tmp_path / "runs"), "--tables", "1"]
    assert call(scripts.case, [work.bert], *options)[0] == 0
    code, text, record = call(scripts.case, [work.bert], *options, data=data)
    assert code == 1
    assert "has other examples" in record["encoders"][0]["reason"]
    assert "not done" in text


# The parts


def test_printed_figures_are_complete(scripts):
    case, hypercl = scripts.case, scripts.hypercl
    sizes = [len(t) for t in (case.TABLE_1, case.TABLE_2, case.TABLE_4, case.TABLE_5, case.TABLE_6)]
    assert sizes == [24, 6, 12, 6, 36]
    assert case.TABLE_1["NV", "cond", "yes"] == ("31.32", "64.91")
    assert case.TABLE_2["GTE",] == ("64.16", "56.10", "22.82", "7.26")
    assert [len(t) for t in (hypercl.TABLE_1, hypercl.TABLE_5, hypercl.TABLE_6)] == [12, 2, 4]
    assert len(hypercl.TABLE_8) == 16
    assert hypercl.TABLE_1["SimCSE_base", "low-cl"] == ("38.36 ± 0.1", "37.53 ± 0.04")
    for repo, pooling in case.POOLINGS.items():
        from llmcond.encoders.known import find_model

        known = find_model(repo)
        assert known is not None
        assert pooling in known.poolings


def test_values_over_seeds(scripts):
    value, over = scripts.shared.Value, scripts.shared.average_over_seeds
    mean = over([value(0.1), value(0.2), value(0.3)])
    assert (mean.value, mean.deviation, mean.seeds) == (pytest.approx(0.2), pytest.approx(0.1), 3)
    assert mean.high - mean.value == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert mean.format(100, 1) == "20.0 ± 10.0 [-4.8, 44.8]"
    assert over([value(0.5, 0.4, 0.6)]).format(100, 1) == "50.0 [40.0, 60.0]"
    assert over([value(0.5), value(None)]).format(1, 3) == "undefined"


def test_cells_keep_their_column(scripts):
    text = scripts.shared.markdown_table(["a", "b"], [["x | y", "two\nlines"]])
    assert text.splitlines()[2] == r"| x \| y | two lines |"
