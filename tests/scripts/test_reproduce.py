"""The papers' tables: complete rows, correct figures, cached work, and a current index."""

import json
import re
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import reproduce
import reproduced
from helpers.dialogues import write_dialogues
from helpers.paths import ROOT
from reproduce import Value, average_over_seeds, to_value

from llmcond.base.metrics import METRICS
from llmcond.evaluation.paired import bootstrap_metrics

FOLDER = ROOT / "docs" / "reproduced"
QUICK = ["--quick", "--device", "cpu", "--dtype", "float32", "--json"]
CSR = ["--router-layers", "2", "--layers", "0", "2", "--trained-layers", "2"]
#: Script -> further options, and the numbers of the tables and figures that it prints.
SCRIPTS = {
    "reproduce_case": (["--workers", "1"], [*"12345678", *"3456"]),
    "reproduce_csr": (["--workers", "1", "--train-share", "2", *CSR], [*"12344"]),
    "reproduce_graphs": (["--heads", "hadamard-paper", "hypernet", "--neighbours"], [*"24"]),
    "reproduce_hypercl": (["--workers", "1"], [*"135678", "5.2", "4", "5.4.1"]),
    "reproduce_triple": (["--plan-history", "2"], [*"234567", *"678"]),
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_prints_every_table_and_resumes(
    name, tiny_checkpoint, small_rows, write_rows, graph, tmp_path, capsys, monkeypatch
):
    options, numbers = SCRIPTS[name]
    data = graph if name == "reproduce_graphs" else write_rows(small_rows)
    if name == "reproduce_triple":
        data = write_dialogues(tmp_path / "dialogues")
    elif name == "reproduce_csr":
        options = [*options, "--kgc-data", str(graph), "--kgc-share", "2"]
    encoder, out = str(tiny_checkpoint(hidden=64)), tmp_path / "page.md"
    arguments = ["--encoders", encoder, "--data", str(data), "--folder", str(tmp_path / "runs")]
    main = partial(reproduce.run_paper, import_module(name).PAPER)
    assert main([*arguments, *QUICK, *options, "--out", str(out)]) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert [section["table"].split()[1] for section in record["sections"]] == numbers
    assert json.loads(capsys.readouterr().out.strip().splitlines()[-1]) == record
    measured = [row for section in record["sections"] for row in section["rows"] if row["ours"]]
    assert len(measured) > 2 * len(numbers)
    assert str(tmp_path.parent) not in out.read_text().replace(encoder, "")
    # A second command fits nothing and prints the same figures.
    monkeypatch.setattr(reproduce, "fit_head", None)
    assert main([*arguments, *QUICK, *options, "--tables", numbers[1]]) == 0
    again = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["sections"][0]
    assert again["rows"] == record["sections"][1]["rows"]
    assert main([*arguments, *options, "--seeds", "0"]) == 2


def test_printed_figures_are_complete():
    import cache_costs
    import reproduce_case as case
    import reproduce_hypercl as hypercl

    sizes = [len(t) for t in (case.TABLE_1, case.TABLE_2, case.TABLE_4, case.TABLE_5, case.TABLE_6)]
    assert sizes == [24, 6, 12, 6, 36]
    assert case.TABLE_1["NV", "cond", "yes"] == ("31.32", "64.91")
    assert hypercl.TABLE_1["SimCSE_base", "low-cl"] == ("38.36 ± 0.1", "37.53 ± 0.04")
    # The cache sizes of the paper follow from the numbers of distinct texts of C-STS.
    for head, matrix in (("hadamard", 0), ("hypernet", 2 * 768 * 64), ("hypernet-full", 768**2)):
        vectors = 14_680 + (0 if matrix else 5_675)
        size = cache_costs.cache_size(768, vectors, 5_675 if matrix else 0, matrix)
        printed = float(cache_costs.TABLE_3["SimCSE_base", head][2])
        assert printed == pytest.approx(size, rel=2e-3)


def test_interval_over_seeds_is_that_of_compare():
    mean = average_over_seeds([Value(0.1), Value(0.2), Value(0.3)])
    assert mean.high - mean.value == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert mean.format(100, 1) == "20.0 ± 10.0 [-4.8, 44.8]"
    assert average_over_seeds([Value(0.5), Value(None)]).format(1, 3) == "undefined"
    rng, pair = np.random.default_rng(0), np.repeat(np.arange(300), 2)
    rating = rng.random(len(pair))
    shared = rating + rng.normal(size=len(pair))
    # Their predictions have a correlation of about 0.9, as those of a head's fits.
    fits = np.stack([shared + rng.normal(scale=0.3, size=len(pair)) for _ in range(3)])

    def estimate(predicted):
        resampled = bootstrap_metrics([predicted], rating, pair, [METRICS["spearman"]])
        return resampled.estimates(0)["spearman"]

    together = estimate(fits)
    mean = average_over_seeds([to_value(estimate(fit[None])) for fit in fits])
    assert mean.value == pytest.approx(together.value)
    assert 1 < (mean.high - mean.low) / (together.high - together.low) < 1.1


def test_committed_index_is_up_to_date_and_lists_every_table():
    pages = reproduced.read_pages(FOLDER)
    text = reproduced.render(pages)
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == text
    for page, record in pages.items():
        assert not re.search("/(work|tmp|home)/", json.dumps(record))
        headings = (FOLDER / page).read_text(encoding="utf-8").splitlines()
        for section in record["sections"]:
            assert f"[{section['table']}]({page}#" in text, (page, section["table"])
            assert f"## {section['table']}: {section['title']}" in headings
