"""The runtime of a run's vectors, when the run is used or extended with another runtime."""

import numpy as np
import pytest

import llmcond
from llmcond.encoders.openvino import support
from llmcond.errors import UserError
from llmcond.runs.open import open_run

pytest.importorskip("openvino")
pytestmark = pytest.mark.processor
in_bfloat16 = pytest.mark.skipif(not support.computes_bfloat16(), reason="no bfloat16 on this CPU")
ROW = (["two men play in the park"], "the place")


@pytest.fixture
def extract(tmp_path, tiny_checkpoint, write_rows, small_rows):
    """Function that extracts a few rows into a run with a runtime and a dtype."""
    data = write_rows(small_rows)

    def extract_run(runtime, dtype, prompt="concat-cond-sent"):
        options = {"model": str(tiny_checkpoint()), "data": str(data), "device": "cpu"}
        folder = tmp_path / "run"
        llmcond.extract(**options, runtime=runtime, dtype=dtype, prompt=[prompt], run=folder)
        return open_run(folder)

    return extract_run


def load_runtime(run):
    return llmcond.load_embedder(run.folder, head="none", device="cpu").encoder.resolved.runtime


@in_bfloat16
def test_16_bit_run_keeps_its_runtime(extract, tmp_path):
    run = extract("torch", "bfloat16")
    assert run.manifest["encoder"]["identity"]["runtime"] == "torch"
    assert run.manifest["prompts"]["concat-cond-sent"]["extraction"]["runtime"] == "torch"
    assert load_runtime(run) == "torch"
    assert len(extract("auto", "bfloat16", "concat-sent-cond").prompts()) == 2
    with pytest.raises(UserError, match="runtime: 'openvino', not 'torch'"):
        extract("openvino", "bfloat16", "routed")


@in_bfloat16
def test_openvino_run_is_usable_but_not_extensible_without_openvino(extract, monkeypatch, caplog):
    run = extract("auto", "bfloat16")
    assert run.manifest["encoder"]["identity"]["runtime"] == "openvino"
    expected = llmcond.load_embedder(run.folder, head="none", device="cpu").encode(*ROW)
    monkeypatch.setattr(support, "is_installed", lambda name: False)
    caplog.set_level("INFO")
    embedder = llmcond.load_embedder(run.folder, head="none", device="cpu")
    assert embedder.encoder.resolved.runtime == "torch"
    assert any("differ by rounding" in line for line in caplog.messages)
    assert (embedder.encode(*ROW) * expected).sum() > 0.99
    with pytest.raises(UserError, match=r"runtime is 'openvino'.*OpenVINO is not installed"):
        extract("auto", "bfloat16", "concat-sent-cond")


def test_float32_run_is_shared_by_both_runtimes(extract, monkeypatch):
    run = extract("torch", "float32")
    assert load_runtime(run) == "openvino"
    expected = llmcond.load_embedder(run.folder, head="none", device="cpu").encode(*ROW)
    assert len(extract("openvino", "float32", "concat-sent-cond").prompts()) == 2
    monkeypatch.setattr(support, "is_installed", lambda name: False)
    embedder = llmcond.load_embedder(run.folder, head="none", prompt="concat-cond-sent")
    np.testing.assert_allclose(embedder.encode(*ROW), expected, atol=1e-5)
