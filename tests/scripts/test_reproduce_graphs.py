"""Hyper-CL's tables of knowledge graphs: complete rows, cached heads, and reported errors."""

import json

import pytest
from helpers.flags import change_flags
from helpers.paths import ROOT

from llmcond import fit_head

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.script("reproduce_graphs")]

QUICK = ["--quick", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import reproduce_graphs

        yield reproduce_graphs


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint):
    return str(tiny_checkpoint(hidden=64))  # the rank of the hypernetwork


@pytest.fixture
def call(script, capsys, encoder, graph, tmp_path):
    """Run the script; return its code and its JSON record."""

    def run(*arguments, data=graph, encoders=(encoder,)):
        command = ["--encoders", *encoders, "--data", str(data), "--folder", str(tmp_path)]
        code = script.main(change_flags([*command, *QUICK], *arguments, "--json"))
        lines = capsys.readouterr().out.strip().splitlines()
        return code, json.loads(lines[-1]) if lines and code < 2 else None

    return run


def test_table_has_rows_of_all_heads_and_is_written_with_its_figures(call, tmp_path):
    out = tmp_path / "page.md"
    heads = ["hadamard-paper", "hypernet"]
    code, record = call("--heads", *heads, "--neighbours", "--out", str(out))
    assert code == 0
    (link_prediction,) = record["sections"]
    rows = {row["architecture"]: row["ours"] for row in link_prediction["rows"]}
    assert list(rows) == [
        "no head: e(h)",
        "Hadamard product, as in the paper",
        "hyper64-cl",
        "Hadamard product, as in the paper, neighbours",
        "hyper64-cl, neighbours",
    ]
    assert all(0 < row["mrr"]["value"] < 1 for row in rows.values())
    assert all(row["mrr"]["low"] < row["mrr"]["high"] for row in rows.values())
    written = json.loads(out.with_suffix(".json").read_text())
    assert written["sections"][0]["rows"] == link_prediction["rows"]
    assert "| hyper64-cl, neighbours |" in out.read_text()


def test_each_head_is_fitted_once(call, monkeypatch):
    fitted = []
    monkeypatch.setattr(
        "reproduce.fit_head",
        lambda **options: fitted.append(options["name"]) or fit_head(**options),
    )
    arguments = ["--heads", "hadamard-paper"]
    first, again = call(*arguments)[1], call(*arguments)[1]
    assert first["sections"] == again["sections"]
    assert fitted == ["hadamard-paper-seed0"]
    call(*arguments, "--epochs", "2")  # --quick decides
    assert fitted == ["hadamard-paper-seed0"]
    call(*arguments, "--neighbours")
    assert fitted == ["hadamard-paper-seed0", "hadamard-paper-neighbours-seed0"]


def test_published_figures_are_those_of_the_graph_with_the_same_sizes(script):
    table, measures = script.TABLE_2, script.MEASURES
    printed, _ = script.printed_figures(table, measures, "WN18RR", "hypernet-full")
    assert printed == {"mrr": "61.6", "hits@1": "50.6", "hits@3": "69.0", "hits@10": "81.0"}
    assert script.printed_figures(table, measures, "mine", "hypernet")[0] == {}


def test_unusable_encoder_gets_a_reason_in_each_row(call):
    code, record = call("--heads", "hypernet", encoders=["./missing"])
    assert code == 1
    (section,) = record["sections"]
    assert [row["ours"] for row in section["rows"]] == [None, None]
    assert all(row["reason"].startswith("not done: ") for row in section["rows"])


def test_invalid_input_is_one_error_with_code_2(call, tmp_path, caplog):
    assert call(data=tmp_path / "missing")[0] == 2
    assert call("--epochs", "0")[0] == 2
    assert "--epochs is 0; it must be at least 1." in caplog.text
