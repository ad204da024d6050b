"""The bench command on small shapes, and the errors that its checks must detect."""

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from helpers.commands import run_json

from llmcond.base.errors import LlmcondError
from llmcond.benchmark import checks, speeds
from llmcond.benchmark.shapes import Shape, csts_inputs, random_encoder
from llmcond.benchmark.speeds import PlainLoop, sentence_transformers
from llmcond.commands.encode import Bench
from llmcond.encoders import EncoderOptions
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.loading import build_on_meta, load_config
from llmcond.workflows.bench import Benchmark

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return checks.CheckEnvironment("cpu", tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def mistral(environment):
    return Encoder(environment.resolve("mistral-7b"))


# -- the command -------------------------------------------------------------------------------


@pytest.mark.slow
def test_command_runs_checks_and_timings_on_cpu(capsys, tmp_path):
    page = tmp_path / "bench.md"
    options = ("--shape", "nv-embed-v2", "--quantize", "none", "--device", "cpu")
    options += ("--lengths", "32", "64")
    result = run_json(capsys, "bench", "--quick", *options, "--out", page)
    for check in result["checks"]:
        needs_cuda = "CUDA" in check["name"] or "memory" in check["name"]
        assert check["passed"] is (None if needs_cuda else True), check["name"]
        assert ("needs CUDA" in check["note"]) == (check["difference"] is None) == needs_cuda
        assert needs_cuda or check["difference"] <= check["bound"]
    ways = ["packed", "padded", "packed, not folded", speeds.PLAIN, "sentence-transformers"]
    assert [row["way"] for row in result["speeds"] if row["inputs"] == "C-STS"] == ways
    for row in result["speeds"]:
        assert row["tokens_per_second"] > row["inputs_per_second"] > 0
        assert 0 < row["peak_share"] < 2
    assert "| nv-embed-v2: stored vectors" in page.read_text()


def test_failed_checks_are_named_after_output(capsys):
    bad = checks.Check("a = b", 0.5, 0.1, False)
    fine = checks.Check("c = d", 0.0, 0.1, True)
    not_run = checks.Check("e = f", None, 0.1, None, "needs CUDA")
    machine = {"device": "cpu", "versions": {}}
    result = Benchmark(machine, [fine, bad, not_run], [])
    command = Bench()
    command.show(result, "table")
    assert "**NO**" in capsys.readouterr().out
    failure = command.failed(result)
    assert (type(failure), failure.exit_code) == (LlmcondError, 1)
    assert str(failure) == "1 of 3 checks failed: a = b."
    assert command.failed(replace(result, checks=[fine, not_run])) is None


# -- checks ------------------------------------------------------------------------------------


def test_check_fails_beyond_its_bound_or_with_error():
    def absent():
        import no_such_library  # noqa: F401

    def broken():
        raise ValueError("a\nb")

    assert checks.run_check("x", 0.1, lambda: (math.nan, "")).passed is False
    check = checks.run_check("x", 0.1, broken)
    assert (check.passed, check.note) == (False, "ValueError: a")
    check = checks.run_check("x", 0.1, absent)
    assert (check.passed, check.note) == (None, "needs no_such_library, which is not installed")


def test_packing_check_detects_wrong_attention_and_padding(environment):
    encoder = Encoder(environment.resolve("nv-embed-v2"))
    inputs, engine = csts_inputs(4, instruct=True), encoder.engine
    assert checks.packing_difference(encoder, inputs)[0] < checks.BOUNDS["float32"]
    engine._runtime = replace(engine._runtime, attention="causal")  # affects packed rows only
    assert checks.packing_difference(encoder, inputs)[0] > checks.BOUNDS["bfloat16"]
    engine.packs = False
    with pytest.raises(RuntimeError, match="rows are padded"):
        checks.packing_difference(encoder, inputs)


def test_weights_and_heads_of_benchmark_are_deterministic(environment, mistral, tmp_path):
    np.testing.assert_array_equal(checks.fit_head("cpu"), checks.fit_head("cpu"))
    folder, inputs = mistral.resolved.checkpoint.folder, csts_inputs(3, instruct=True)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2**20  # weights are not stored
    rebuilt = Encoder(environment.resolve("mistral-7b"))
    np.testing.assert_array_equal(rebuilt.encode(inputs), mistral.encode(inputs))
    for shape in get_args(Shape):
        resolved = random_encoder(shape, tmp_path, EncoderOptions(), "cpu")
        network = build_on_meta(load_config(resolved.checkpoint, resolved.identity.attention))
        n_parameters = sum(value.numel() for value in network.parameters())
        assert n_parameters == resolved.checkpoint.known.n_parameters


# -- texts and peers ---------------------------------------------------------------------------


def test_peers_compute_same_vectors(mistral):
    inputs = csts_inputs(40, instruct=True)
    loop = PlainLoop(mistral, mistral.engine.model.network)
    vectors = mistral.encode(inputs)
    np.testing.assert_allclose(loop.encode(inputs), vectors, atol=1e-5)
    np.testing.assert_allclose(sentence_transformers(loop, mistral)(inputs), vectors, atol=1e-5)
    assert loop.computed(inputs) > loop.computed(inputs, by_length=True)


# -- stored vectors ----------------------------------------------------------------------------


def test_stored_vectors_match_engine(tmp_path):
    difference, _ = checks.golden_differences("cpu", tmp_path)
    assert 0 < difference < 2e-5
