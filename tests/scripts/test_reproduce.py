"""The papers' tables: complete rows, correct figures, cached work, and reported errors."""

import csv
import json
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import checkpoints
from helpers.flags import change_flags
from helpers.graphs import write_graph
from helpers.paths import ROOT

from llmcond import train_lora
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.kinds.ranking.graph import read_graph
from llmcond.metrics import METRICS
from llmcond.runs import open_run
from llmcond.runs.extraction import LazyEncoder

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.script("reproduce", "reproduce_case", "reproduce_csr", "reproduce_hypercl"),
]

SFR = "Salesforce/SFR-Embedding-Mistral"
#: Imported by its full name, because the package also has functions with such names.
FITTING = import_module("llmcond.runs.rated")
QUICK = ["--quick", "--workers", "1", "--device", "cpu", "--dtype", "float32", "--json"]


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import bench_cache
        import reproduce
        import reproduce_case
        import reproduce_csr
        import reproduce_hypercl

        yield SimpleNamespace(
            shared=reproduce,
            case=reproduce_case,
            csr=reproduce_csr,
            hypercl=reproduce_hypercl,
            cache=bench_cache,
        )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, tiny_checkpoint, small_rows):
    """Data, an encoder without instructions, and a stand-in for one of CASE's encoders."""
    folder = tmp_path_factory.mktemp("reproduce")
    mistral = checkpoints.build_checkpoint("mistral", folder / "mistral").folder
    bert = tiny_checkpoint()
    write_csv(folder / "rows.csv", small_rows)
    return SimpleNamespace(
        folder=folder, data=str(folder / "rows.csv"), bert=str(bert), sfr=f"{SFR}={mistral}"
    )


def write_csv(path, rows):
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["sentence1", "sentence2", "condition", "label"])
        writer.writerows(rows)
    return str(path)


@pytest.fixture
def call(capsys, inputs):
    """Run a script; return its code, its Markdown and its JSON."""

    def run(script, encoders, *options, data=None):
        folder = ["--folder", str(inputs.folder / "runs"), "--data", data or inputs.data]
        code = script.main(change_flags(["--encoders", *encoders, *folder, *QUICK], *options))
        out = capsys.readouterr().out
        text, _, last = out.rstrip("\n").rpartition("\n")
        return code, text, json.loads(last) if last.startswith("{") else None

    return run


def table_rows(record, table):
    return next(part for part in record["sections"] if part["table"] == table)["rows"]


def fail_if_called(*_, **__):
    raise AssertionError("this work was already done")


# Complete scripts


def test_case_prints_every_table(scripts, call, inputs):
    code, text, record = call(scripts.case, [inputs.bert, inputs.sfr, "nobody/nothing-here"])
    encoders = [inputs.bert, SFR, "nobody/nothing-here"]
    assert code == 0
    tables = [f"Table {number}" for number in range(1, 9)]
    tables += [f"Figure {number}" for number in range(3, 7)]
    assert [part["table"] for part in record["sections"]] == tables
    assert re.findall(r"^## (.*):", text, re.MULTILINE) == tables
    for line in text.splitlines():
        assert line.startswith(("|", "#", "-", "```", "python ")) or not line
    # One encoder takes no instructions; the other gets those of the paper.
    ours = {(row["encoder"], row["setting"]): row for row in table_rows(record, "Table 1")}
    assert "takes none" in ours[inputs.bert, "cond - c"]["reason"]
    assert ours[inputs.bert, "cond - c"]["ours"] is None
    assert ours[inputs.bert, "CONC(c+s) - c"]["ours"]["spearman"]["value"] is not None
    assert ours[SFR, "cond - c"]["paper"] == {"spearman": 20.38, "accuracy": 52.51}
    assert ours[SFR, "cond - c"]["ours"]["accuracy"]["low"] is not None
    # An encoder that does not exist has its rows, and the reason is stated once.
    assert "see the remark" in ours["nobody/nothing-here", "CONC(s+c)"]["reason"]
    assert record["encoders"][2]["reason"]
    # Table 6 has the poolings and the figures of the paper.
    pooled = {(r["encoder"], r["pooling"], r["setting"]): r for r in table_rows(record, "Table 6")}
    assert pooled[SFR, "last", "sent"]["paper"]["spearman"] == -0.18
    assert pooled[SFR, "last", "sent"]["ours"] != pooled[SFR, "mean", "sent"]["ours"]
    assert pooled[inputs.bert, "last", "CONC(s+c)"]["ours"]
    heads = [row for row in table_rows(record, "Table 2") if row["encoder"] == SFR]
    assert [row["head"] for row in heads] == ["mlp", "linear", "pca", "ica", "mlp", "linear"]
    assert heads[0]["paper"] == {"spearman": 62.85}
    assert "32 dimensions, all that the encoder has" in heads[0]["set_up"]
    assert "not in the paper: without subtraction" in heads[-1]["set_up"]
    printed = "| 62.85 | "
    assert printed in text
    assert "(others -4.89 to 19.13)" in text
    # Tables 3 and 8 have the same similarities; those of other encoders than NV have no paper row.
    examples = [
        {(row["encoder"], row["sentences"], row["cosine"]): row for row in table_rows(record, name)}
        for name in ("Table 3", "Table 8")
    ]
    assert len(examples[0]) == 3 * 3 * 3
    assert len(examples[1]) == 3 * 3 * 7
    assert all(examples[1][key]["ours"] == row["ours"] for key, row in examples[0].items())
    row = examples[1][SFR, "tennis", "cos(s1, orange; c1)"]
    assert set(row["ours"]) == {"before", "after"}
    assert row["paper"] == {}
    curves = [row for row in table_rows(record, "Figure 3") if row["encoder"] == SFR]
    assert [row["head"] for row in curves] == ["mlp", "linear"]
    assert all(1 <= row["ours"]["epoch"]["value"] <= 2 for row in curves)
    histograms = [{row["encoder"] for row in table_rows(record, f"Figure {n}")} for n in (5, 6)]
    assert histograms == [set(encoders), {*encoders} - {SFR}]
    earlier = table_rows(record, "Table 7")
    assert earlier[0]["paper"] == {"spearman": 47.5}


def test_hypercl_prints_every_table(scripts, call, inputs):
    code, text, record = call(scripts.hypercl, [inputs.bert, "nobody/nothing-here"])
    assert code == 0
    tables = [f"Table {number}" for number in (1, 3, 5, 6, 7, 8)]
    tables += ["Section 5.2", "Figure 4", "Section 5.4.1"]
    assert [part["table"] for part in record["sections"]] == tables
    assert [row["set_up"] for row in table_rows(record, "Table 7")] == [["equal"]] * 6
    for table in set(tables) - {"Table 7"}:
        for row in table_rows(record, table):
            is_measured = row["encoder"] == inputs.bert and "train-lora" not in str(row)
            assert (row["reason"] is None) == is_measured, row
            # The few dev rows have no condition that training lacks. In one dimension, all
            # cosines can be 1.
            if table != "Table 5" and row.get("K") != "1":
                assert None not in [value["value"] for value in (row["ours"] or {}).values()], row
    rows = [row for row in table_rows(record, "Table 1") if row["encoder"] == inputs.bert]
    by_architecture = {row["architecture"]: row for row in rows}
    assert "– (others 33.10 to 38.36)" in text
    assert {"spearman", "pearson"} == set(by_architecture["hyper2-cl"]["ours"])
    ranks = [row["K"] for row in table_rows(record, "Table 8") if row["encoder"] == inputs.bert]
    assert ranks == ["32", "8", "4", "2", "2", "1"]
    # The same head has the same metrics in every table.
    full = [table_rows(record, "Table 8")[0], by_architecture["hyper-cl"]]
    assert full[0]["ours"]["spearman"] == full[1]["ours"]["spearman"]
    # The output contains no text of the data.
    assert "the number of people" not in text + json.dumps(record)


def test_csr_prints_every_table(scripts, call, inputs, tmp_path, monkeypatch):
    graph = write_graph(tmp_path / "graph")
    out = tmp_path / "page.md"
    layers = ["--router-layers", "2", "--layers", "0", "2", "9", "--trained-layers", "2"]
    shares = ["--kgc-data", str(graph), "--kgc-share", "2", "--train-share", "2"]
    encoders = [inputs.bert, "nobody/nothing"]
    code, _, record = call(scripts.csr, encoders, *layers, *shares, "--out", str(out))
    assert code == 0
    tables = ["Table 1", "Table 2", "Table 3", "Table 4", "Figure 4"]
    assert [part["table"] for part in record["sections"]] == tables
    assert "--layers 0 2 9 --trained-layers 2 --kgc-data graph --kgc-share 2" in record["command"]
    for table in tables[:-1]:
        for row in table_rows(record, table):
            if row["encoder"] == inputs.bert and row["system"] != "Hyper-CL":
                assert row["reason"] is None
                assert None not in [value["value"] for value in row["ours"].values()], row
            else:
                assert row["reason"].startswith("not done")
    trained = {row["system"]: row for row in table_rows(record, "Table 1")[:9]}
    assert "LoRA of rank 16 instead of all weights" in trained["CSR"]["set_up"]
    assert "1/2 of train" in trained["CSR"]["set_up"]
    graph_rows = {row["system"]: row for row in table_rows(record, "Table 2")[:7]}
    assert graph_rows["CSR, 2 layers (tri-encoder)"]["paper"]["mrr"] == 66.1
    assert "LoRA of rank 16 instead of all weights" in graph_rows["bi-encoder"]["set_up"]
    untrained = [system for system in graph_rows if system.endswith(", not trained")]
    assert len(untrained) == 3
    assert graph_rows[untrained[-1]]["ours"] != graph_rows["CSR, 2 layers (tri-encoder)"]["ours"]
    # The tables share encoders.
    weights = {row["system"]: row["ours"] for row in table_rows(record, "Table 3")[:7]}
    assert weights["CSR: 1 + w"] == trained["CSR"]["ours"]
    runs = {path.name for path in (inputs.folder / "runs").glob("*-csr/share2-*/*")}
    assert {"paper-2-only-seed0", "paper-2-random-seed0", "released-tri-2-random-seed0"} <= runs
    by_layers = {row["layers"]: row for row in table_rows(record, "Figure 4")[:4]}
    assert set(by_layers["2"]["ours"]) == {"untrained", "trained", "seconds"}
    assert set(by_layers["0"]["ours"]) == {"untrained", "seconds"}
    assert by_layers["9"]["reason"].startswith("not done: router_layers is 9, but")
    assert (tmp_path / "page-figure4-data.csv").read_text().count("\n") == 4
    assert (inputs.folder / "runs/graph-share2/train.tsv").read_text().count("\n") == 21
    # A second command trains and encodes nothing.
    monkeypatch.setattr(LazyEncoder, "__call__", fail_if_called)
    again = call(scripts.csr, [inputs.bert], *layers, *shares, "--tables", *"1234")
    for table in tables[:-1]:
        rows = [row for row in table_rows(record, table) if row["encoder"] != "nobody/nothing"]
        assert table_rows(again[2], table) == rows


def test_csr_needs_test_triples(scripts, call, inputs, tmp_path):
    graph = write_graph(tmp_path / "graph")
    (graph / "test.tsv").unlink()
    options = ["--tables", "2", "--kgc-data", str(graph), "--router-layers", "2"]
    _, _, record = call(scripts.csr, [inputs.bert], *options)
    reasons = {row["reason"] for row in table_rows(record, "Table 2")}
    assert reasons == {"not done: the graph has no test triples"}


def test_csr_rejects_invalid_options(scripts, inputs, capsys):
    for options in (["--rank", "half"], ["--train-share", "0"]):
        with pytest.raises(SystemExit, match="2"):
            scripts.csr.main(["--encoders", inputs.bert, *options])
        assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_hypercl_caches_are_larger_and_hit_more_often_for_tri_encoders(
    scripts, call, inputs, small_rows
):
    _, _, record = call(scripts.hypercl, [inputs.bert], "--tables", "3")
    rows = {row["architecture"]: row["ours"] for row in table_rows(record, "Table 3")}
    bi, full = rows["bi-encoder"], rows["tri-encoder, hyper-cl"]
    joint = {(text, c) for first, second, c, _ in small_rows for text in (first, second)}
    texts = {text for row in small_rows for text in row[:2]} | {row[2] for row in small_rows}
    n = len(small_rows)
    assert bi["hits"]["value"] == pytest.approx(1 - len(joint) / (2 * n))
    assert full["hits"]["value"] == pytest.approx(1 - len(texts) / (3 * n))
    hadamard = rows["tri-encoder, Hadamard product"]
    assert full["size"]["value"] > hadamard["size"]["value"]
    assert all(ours["single"]["value"] > 0 for ours in rows.values())


def test_cache_sizes_of_the_paper_are_reproduced(scripts):
    """The numbers of distinct texts are those of the original C-STS, and of WN18RR."""
    size, printed = scripts.cache.cache_size, scripts.cache.TABLE_3
    sentences, conditions = 14_680, 5_675
    for encoder, dim, rank in (("SimCSE_base", 768, 64), ("SimCSE_large", 1_024, 85)):
        for head, n_vectors, matrix in (
            ("hadamard", sentences + conditions, 0),
            ("hypernet", sentences, 2 * dim * rank),
            ("hypernet-full", sentences, dim * dim),
        ):
            expected = size(dim, n_vectors, conditions if matrix else 0, matrix)
            assert float(printed[encoder, head][2]) == pytest.approx(expected, rel=2e-3)
    assert float(scripts.cache.TABLE_4["BERT_base", "hypernet-full"][2]) == pytest.approx(
        size(768, 40_943, 11, 768 * 768), rel=1e-4
    )


def test_costs_of_graph_condition_only_the_head_entity(
    scripts, inputs, graph, tmp_path, monkeypatch
):
    out = tmp_path / "page.md"
    options = ["--model", inputs.bert, "--graph", str(graph), "--sample", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench_cache", *options])
    scripts.cache.main()
    record = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    (section,) = record["sections"]
    rows = {row["architecture"]: row for row in section["rows"]}
    triples = np.concatenate(list(read_graph(graph).splits.values()))
    heads, tails = len(np.unique(triples[:, :2], axis=0)), len(np.unique(triples[:, 2]))
    hits = rows["bi-encoder"]["ours"]["hits"]["value"]
    assert hits == pytest.approx(1 - (heads + tails) / (2 * len(triples)))
    assert rows["tri-encoder, hyper-cl"]["paper_others"]["hits"] == [85.32, 85.32]
    assert (section["table"], section["command"]) == (
        "Table 4", "bench_cache.py --graph graph --sample 2"
    )  # fmt: skip


def test_trained_encoder_has_figures_once_its_run_exists(
    scripts, call, inputs, tiny_checkpoint, small_rows, tmp_path
):
    folder = tmp_path / "runs"
    options = ["--folder", str(folder), "--tables", "1"]
    name = Path(inputs.bert).name
    train_lora(
        model=inputs.bert, data=inputs.data, head="none", prompt=["concat-cond-sent"],
        epochs=1, dtype="float32", device="cpu", run=folder / f"{name}-bi",
    )  # fmt: skip
    _, text, record = call(scripts.hypercl, [inputs.bert], *options)
    rows = {row["architecture"]: row for row in table_rows(record, "Table 1")}
    trained = rows["bi-encoder, encoder trained"]
    assert trained["ours"]["spearman"]["value"] is not None
    assert "one seed" in trained["set_up"][-1]
    untrained = rows["hyper-cl, encoder trained"]
    assert (
        f"--head hypercl-simcse-base-full --prompt separate --set dim={32}" in untrained["reason"]
    )
    assert str(tmp_path) not in text


def test_second_run_reuses_all_work(scripts, call, inputs, monkeypatch, tmp_path):
    """Reuses the work of the two tests above; if run alone, it first does this work itself."""
    out = tmp_path / "tables.md"
    # The few texts of tables 3 and 8 are not stored, so they are encoded again.
    tables = [table for table in scripts.case.PAPER.sections if table not in ("3", "8")]
    calls = [
        (scripts.case, [inputs.bert], "--out", str(out), "--tables", *tables),
        (scripts.hypercl, [inputs.bert], "--out", str(out)),
    ]
    expected_results = [call(*arguments) for arguments in calls]
    monkeypatch.setattr(FITTING, "fit_recipe", fail_if_called)
    monkeypatch.setattr(LazyEncoder, "__call__", fail_if_called)
    for arguments, expected in zip(calls, expected_results, strict=True):
        code, text, record = call(*arguments)
        assert (code, text, record["sections"]) == (0, expected[1], expected[2]["sections"])
        assert out.read_text(encoding="utf-8").strip() == text.strip()


# Protocols


@pytest.mark.parametrize(("protocol", "scored"), [("9:1", "all"), ("70:30", "30 %")])
def test_protocol_chooses_epochs_and_scores_on_different_rows(
    protocol, scored, scripts, call, inputs, small_rows, tmp_path
):
    data = tmp_path / "data"
    data.mkdir()
    train, dev = small_rows[: len(small_rows) // 2], small_rows[len(small_rows) // 2 :]
    write_csv(data / "train.csv", train)
    write_csv(data / "dev.csv", dev)
    out = tmp_path / "page.md"
    options = ["--protocol", protocol, "--tables", "2", "--out", str(out)]
    code, _, record = call(scripts.case, [inputs.bert], *options, data=str(data))
    assert code == 0
    assert (record["split"], record["protocol"]) == ("test", protocol)
    assert json.loads(out.with_suffix(".json").read_text(encoding="utf-8")) == record
    assert f"--protocol {protocol}" in record["command"]
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert record["sections"][0]["command"] == "reproduce_case.py --tables 2"
    assert record["command"].endswith(" --tables 2")
    n_dev = len({row[:2] for row in map(tuple, dev)})
    run = open_run(inputs.folder / "runs" / protocol.replace(":", "-") / inputs.bert.split("/")[-1])
    pairs = {name: set(run.rows(name).pair_keys()) for name in ("train", "dev", "test")}
    assert not pairs["train"] & pairs["dev"]
    assert not pairs["dev"] & pairs["test"]
    expected = n_dev if scored == "all" else round(0.3 * n_dev)
    assert abs(len(pairs["test"]) - expected) <= 1


def test_protocol_is_rejected_if_test_is_rated(scripts, inputs, caplog):
    options = ["--encoders", inputs.bert, "--data", inputs.data, "--protocol", "9:1"]
    assert scripts.case.main(options) == 2
    assert "rows.csv has a rated test split, which is scored" in caplog.text


# Interrupts and invalid input


def test_interrupted_command_is_resumed(scripts, call, inputs, monkeypatch, tmp_path):
    fit_recipe, fitted = FITTING.fit_recipe, []

    def interrupt_third(recipe, *arguments):
        if len(fitted) == 2:
            raise KeyboardInterrupt
        fitted.append(recipe.name)
        return fit_recipe(recipe, *arguments)

    out = tmp_path / "tables.md"
    options = ["--folder", str(tmp_path / "runs"), "--tables", "6", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(FITTING, "fit_recipe", interrupt_third)
        assert call(scripts.hypercl, [inputs.bert], *options)[0] == 1
    assert not out.exists()
    fits = []
    monkeypatch.setattr(FITTING, "fit_recipe", lambda *a: fits.append(1) or fit_recipe(*a))
    code, _, record = call(scripts.hypercl, [inputs.bert], *options)
    assert code == 0
    assert len(fits) == len(table_rows(record, "Table 6")) - len(fitted)
    assert out.exists()


def test_heads_that_cannot_be_fitted_have_rows_with_reason(
    scripts, call, inputs, small_rows, tmp_path
):
    single_rows = [small_rows[2 * i + i % 2] for i in range(len(small_rows) // 2)]
    data = write_csv(tmp_path / "one-each.csv", single_rows)
    options = ["--folder", str(tmp_path / "runs"), "--tables", "6", "5.2"]
    code, text, record = call(scripts.hypercl, [inputs.bert], *options, data=data)
    assert code == 0
    for row in table_rows(record, "Table 6"):
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
def test_invalid_input_is_rejected_before_any_work(scripts, inputs, monkeypatch, options, code):
    monkeypatch.setattr(scripts.shared, "extract", fail_if_called)
    arguments = ["--folder", str(inputs.folder / "runs"), "--data", inputs.data]
    words = change_flags(["--encoders", inputs.bert, *arguments], *options)
    assert scripts.case.main(words) == code


def test_folder_of_other_data_is_rejected(scripts, call, inputs, small_rows, tmp_path):
    data = write_csv(tmp_path / "fewer.csv", small_rows[:60])
    options = ["--folder", str(tmp_path / "runs"), "--tables", "1"]
    assert call(scripts.case, [inputs.bert], *options)[0] == 0
    code, text, record = call(scripts.case, [inputs.bert], *options, data=data)
    assert code == 1
    assert "has other examples" in record["encoders"][0]["reason"]
    assert "not done" in text


# Printed figures and their format


def test_printed_figures_are_complete(scripts):
    case, hypercl = scripts.case, scripts.hypercl
    sizes = [len(t) for t in (case.TABLE_1, case.TABLE_2, case.TABLE_4, case.TABLE_5, case.TABLE_6)]
    assert sizes == [24, 6, 12, 6, 36]
    assert case.TABLE_1["NV", "cond", "yes"] == ("31.32", "64.91")
    assert all(len(figures.split()) == 6 for *_, figures in case.CONDITIONS)
    assert {subject for subject, *_ in case.CONDITIONS} == set(case.EXAMPLES)
    assert case.TABLE_2["GTE",] == ("64.16", "56.10", "22.82", "7.26")
    assert [len(t) for t in (hypercl.TABLE_1, hypercl.TABLE_5, hypercl.TABLE_6)] == [12, 2, 4]
    assert (len(hypercl.TABLE_7), len(hypercl.TABLE_8)) == (6, 16)
    assert [len(t) for t in (scripts.cache.TABLE_3, scripts.cache.TABLE_4)] == [8, 8]
    assert hypercl.TABLE_1["SimCSE_base", "low-cl"] == ("38.36 ± 0.1", "37.53 ± 0.04")
    for repo, pooling in case.POOLINGS.items():
        from llmcond.encoders.known import find_model

        known = find_model(repo)
        assert known is not None
        assert pooling in known.poolings


def test_values_are_averaged_over_seeds(scripts):
    value, average = scripts.shared.Value, scripts.shared.average_over_seeds
    mean = average([value(0.1), value(0.2), value(0.3)])
    assert (mean.value, mean.deviation, mean.seeds) == (pytest.approx(0.2), pytest.approx(0.1), 3)
    assert mean.high - mean.value == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert mean.format(100, 1) == "20.0 ± 10.0 [-4.8, 44.8]"
    assert average([value(0.5, 0.4, 0.6)]).format(100, 1) == "50.0 [40.0, 60.0]"
    assert average([value(0.5), value(None)]).format(1, 3) == "undefined"


def test_interval_over_seeds_is_that_of_compare(scripts):
    rng = np.random.default_rng(0)
    pair = np.repeat(np.arange(300), 2)
    rating = rng.random(len(pair))
    shared = rating + rng.normal(size=len(pair))
    # Their predictions have a correlation of about 0.9, as those of a head's fits.
    fits = np.stack([shared + rng.normal(scale=0.3, size=len(pair)) for _ in range(3)])
    spearman = METRICS["spearman"]
    together = bootstrap_metrics([fits], rating, pair, [spearman]).estimates(0)["spearman"]
    values = [
        scripts.shared.to_value(
            bootstrap_metrics([fit[None]], rating, pair, [spearman]).estimates(0)["spearman"]
        )
        for fit in fits
    ]
    mean = scripts.shared.average_over_seeds(values)
    assert mean.value == pytest.approx(together.value)
    assert 1 < (mean.high - mean.low) / (together.high - together.low) < 1.1
    same = scripts.shared.average_over_seeds([values[0]] * 3)
    assert (same.low, same.high) == pytest.approx((values[0].low, values[0].high), rel=0.02)


def test_reason_has_neither_advice_nor_folders(scripts):
    reason = scripts.shared.failure_reason("/home/me/runs/x holds features of a/b. Use another.")
    assert reason == "not done: x holds features of a/b"


def test_table_cells_are_escaped(scripts):
    text = scripts.shared.markdown_table(["a", "b"], [["x | y", "two\nlines"]])
    assert text.splitlines()[2] == r"| x \| y | two lines |"
