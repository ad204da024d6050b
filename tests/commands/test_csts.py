"""The method on real data: re-annotated C-STS with the real small encoder.

Slow and honest: no figure here comes from data that the project made itself.
"""

from pathlib import Path

import pytest

from llmcond.data.datasets import DataOptions
from llmcond.encoders import EncoderOptions
from llmcond.workflows.evaluate import evaluate
from llmcond.workflows.extract import extract
from llmcond.workflows.fit import fit_head


@pytest.fixture(scope="module")
def results(csts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict]:
    run = tmp_path_factory.mktemp("csts") / "run"
    extract("minilm", EncoderOptions(device="cpu"), run, DataOptions(str(csts)))
    fit_head(run, "mlp", changes={"epochs": "45"})
    return {(row.head, row.subtract): row.to_json() for row in evaluate(run)}


def test_subtraction_helps_zero_shot(results):
    """CASE, table 1: f(c; I(s)) - f(c; I(∅)) beats f(c; I(s))."""
    minus_c, plain = results["none", True], results["none", False]
    assert minus_c["spearman"] > plain["spearman"] + 0.05
    assert minus_c["accuracy"] > plain["accuracy"] + 0.05


def test_the_mlp_reaches_what_a_plain_prototype_did(results):
    mlp = results["mlp", True]
    assert mlp["spearman"] > 0.55
    assert mlp["accuracy"] > 0.75


def test_unrated_rows_are_dropped_and_counted(results):
    for row in results.values():
        assert (row["split"], row["n"], row["n_dropped"]) == ("dev", 1_830, 154)
