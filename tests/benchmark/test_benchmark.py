"""The bench command on small shapes, and the errors that its checks must detect."""

import math
import sys
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from helpers.commands import run_json, run_rejected

from llmcond.benchmark import checks, speeds
from llmcond.benchmark.shapes import branching_inputs, csts_inputs, long_inputs, shorten_input
from llmcond.benchmark.speeds import PlainLoop, sentence_transformers
from llmcond.commands.encode import Bench
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.loading.loading import load_config, load_model
from llmcond.errors import LlmcondError
from llmcond.workflows.bench import Benchmark

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return checks.CheckEnvironment("cpu", tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def mistral(environment):
    return Encoder(environment.resolve("mistral-7b"))


# -- the command -------------------------------------------------------------------------------


def test_command_runs_checks_and_timings_on_cpu(capsys, tmp_path):
    page = tmp_path / "bench.md"
    options = ("--shape", "nv-embed-v2", "--quantize", "none", "--device", "cpu")
    options += ("--lengths", "32", "64")
    result = run_json(capsys, "bench", "--quick", *options, "--profile", "--out", page)
    passed = {check["name"]: check["passed"] for check in result["checks"]}
    needs_cuda = {name for name in passed if "CUDA" in name or "memory" in name}
    assert {name for name, verdict in passed.items() if verdict is None} == needs_cuda
    assert all(passed[name] for name in passed if name not in needs_cuda)
    for check in result["checks"]:
        assert ("needs CUDA" in check["note"]) == (check["difference"] is None)
        assert check["passed"] is None or check["difference"] <= check["bound"]
    ways = ["packed", "padded", "packed, not folded", speeds.PLAIN, "sentence-transformers"]
    assert [row["way"] for row in result["speeds"] if row["inputs"] == "C-STS"] == ways
    for row in result["speeds"]:
        assert row["kernel"] == "scaled_dot_product_attention"
        assert row["tokens_per_second"] > row["inputs_per_second"] > 0
        assert 0 < row["peak_share"] < 2
    for profile in result["profiles"]:
        shares = [share for _, share, _ in profile["kernels"]]
        assert len(shares) == 10
        assert shares == sorted(shares, reverse=True)
        assert 0.5 < sum(shares) <= 1
    assert {profile["inputs"] for profile in result["profiles"]} == {
        "C-STS",
        "32 tokens",
        "64 tokens",
    }
    assert result["skipped"] == []
    assert result["machine"]["versions"]["torch"] == torch.__version__
    text = page.read_text()
    assert "| nv-embed-v2: stored vectors" in text
    assert "## nv-embed-v2-small, float32" in text or "## nv-embed-v2-small, bfloat16" in text


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--shape", "mistral"), r"'mistral'.*mistral-7b"),
        (("--model", "minlm"), r"unknown model 'minlm'.*minilm"),
        (("--device", "gpu"), "Legal: auto, cpu, cuda"),
        (("--device", "cuda:99"), "PyTorch sees"),
        (("--quantize", "3bit"), "Legal: none, 8bit, 4bit"),
        (("--shape", "gpt"), "--shape is 'gpt'. Legal: nv-embed-v2, mistral-7b"),
        (("--lengths", "64", "513"), "--lengths has 513; expected numbers from 16 to 512"),
        (("--out", "page.html"), r"name a \.md file"),
    ],
)
def test_invalid_options_are_rejected_before_any_check(capsys, arguments, pattern):
    import re

    assert re.search(pattern, run_rejected(capsys, "bench", "--quick", *arguments))


def test_failed_checks_are_named_after_output(capsys):
    bad = checks.Check("a = b", 0.5, 0.1, False)
    fine = checks.Check("c = d", 0.0, 0.1, True)
    not_run = checks.Check("e = f", None, 0.1, None, "needs CUDA")
    machine = {"device": "cpu", "versions": {}}
    result = Benchmark(machine, [fine, bad, not_run], [], [speeds.Skipped("4bit", "no memory")])
    command = Bench()
    command.show(result, "table")
    assert "**NO**" in capsys.readouterr().out
    failure = command.failed(result)
    assert isinstance(failure, LlmcondError)
    assert failure.exit_code == 1
    assert str(failure) == "1 of 3 checks failed: a = b."
    assert command.failed(replace(result, checks=[fine, not_run])) is None


# -- checks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [0.2, math.nan, math.inf])
def test_check_fails_beyond_its_bound(difference):
    assert checks.run_check("x", 0.1, lambda: (difference, "")).passed is False


def test_check_that_raises_fails_with_message():
    def broken():
        raise RuntimeError("CUDA error: no kernel image\nand more")

    check = checks.run_check("x", 0.1, broken)
    assert (check.passed, check.difference) == (False, None)
    assert check.note == "RuntimeError: CUDA error: no kernel image"


def test_check_with_missing_library_is_skipped():
    def absent():
        import no_such_library  # noqa: F401

    check = checks.run_check("x", 0.1, absent)
    assert (check.passed, check.note) == (None, "needs no_such_library, which is not installed")


def test_packing_check_detects_wrong_attention(environment):
    encoder = Encoder(environment.resolve("nv-embed-v2"))
    inputs = csts_inputs(4, instruct=True)
    engine = encoder.engine
    assert checks.packing_difference(encoder, inputs)[0] < checks.BOUNDS["float32"]
    engine._runtime = replace(engine._runtime, attention="causal")  # affects packed rows only
    assert checks.packing_difference(encoder, inputs)[0] > checks.BOUNDS["bfloat16"]


def test_packing_check_fails_for_padded_rows(environment):
    encoder = Encoder(environment.resolve("minilm"))
    encoder.engine.packs = False
    with pytest.raises(RuntimeError, match="rows are padded"):
        checks.packing_difference(encoder, csts_inputs(2, instruct=False))


def test_dequantised_weights_match_multiplied_weights(environment):
    resolved = environment.resolve("minilm", "float32", "8bit")
    config = load_config(resolved.checkpoint, resolved.identity.attention)
    loaded = load_model(resolved, config)
    linear = loaded.network.encoder.layer[0].intermediate.dense
    values = checks.dequantized(linear)
    x = torch.randn(3, values.shape[1])
    expected = torch.nn.functional.linear(x, values, linear.bias)
    assert (linear(x) - expected).norm() < 0.02 * expected.norm()
    assert checks.dequantized(loaded.network.embeddings.word_embeddings) is None


def test_fitted_head_is_deterministic():
    np.testing.assert_array_equal(checks.fit_head("cpu"), checks.fit_head("cpu"))


# -- random weights ----------------------------------------------------------------------------


def test_random_weights_are_deterministic_and_not_stored(environment, mistral):
    folder = mistral.resolved.checkpoint.folder
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2**20
    inputs = csts_inputs(3, instruct=True)
    rebuilt = Encoder(environment.resolve("mistral-7b"))
    np.testing.assert_array_equal(rebuilt.encode(inputs), mistral.encode(inputs))


def test_full_shapes_have_parameter_counts_of_their_models(tmp_path):
    from typing import get_args

    from llmcond.benchmark.shapes import Shape, random_encoder
    from llmcond.encoders import EncoderOptions
    from llmcond.encoders.loading.loading import build_on_meta, load_config

    for shape in get_args(Shape):
        resolved = random_encoder(shape, tmp_path, EncoderOptions(), "cpu")
        network = build_on_meta(load_config(resolved.checkpoint, resolved.identity.attention))
        known = resolved.checkpoint.known
        assert sum(value.numel() for value in network.parameters()) == known.n_parameters


# -- texts and peers ---------------------------------------------------------------------------


def test_inputs_have_lengths_of_their_names(mistral):
    counts = mistral.encode_with_counts(csts_inputs(100, instruct=True)).n_tokens
    assert 30 < counts.mean() < 60
    long = long_inputs(3, instruct=True)
    assert mistral.encode_with_counts(long).n_tokens.min() > 512
    shortened = [
        shorten_input(item, 512, lambda candidate: mistral._tokenizer([candidate])[0].n_tokens)
        for item in long
    ]
    tokens = mistral.encode_with_counts(shortened).n_tokens
    assert 490 < tokens.min() <= tokens.max() <= 512
    inputs = branching_inputs(32, 8, instruct=True)
    assert len({item.instruction for item in inputs}) == 4
    assert len({item.text for item in inputs[:8]}) == 8
    with checks.engine_settings(mistral.engine, shares=True):
        shared = mistral.encode_with_counts(inputs).n_computed
    assert mistral.encode_with_counts(inputs).n_tokens.sum() > 3 * shared


def test_peers_compute_same_vectors(mistral):
    inputs = csts_inputs(40, instruct=True)
    loop = PlainLoop(mistral, mistral.engine.model.network)
    vectors = mistral.encode(inputs)
    np.testing.assert_allclose(loop.encode(inputs), vectors, atol=1e-5)
    np.testing.assert_allclose(sentence_transformers(loop, mistral)(inputs), vectors, atol=1e-5)
    assert loop.computed(inputs) > loop.computed(inputs, by_length=True)


def test_causal_encoder_is_timed_with_shared_prefixes(environment):
    scale = speeds.Scale(0.0, 1, 64, 64)
    results = list(speeds.run_encoder(environment.resolve("mistral-7b"), scale, must_pack=True))
    rows = [result for result in results if isinstance(result, speeds.Speed)]
    branching = [row for row in rows if row.inputs == "8 conditions a sentence"]
    assert [row.way for row in branching] == ["packed", "packed, shared prefixes"]
    assert branching[1].difference < 1e-5
    assert set(branching[1].ratios) == {"packed"}
    verdicts = [result.passed for result in results if isinstance(result, checks.Check)]
    assert verdicts == [True] * 3


def test_failing_way_does_not_stop_others(environment):
    loaded = speeds._load(environment.resolve("minilm"))

    def broken(inputs):
        raise RuntimeError("out of memory")

    first = next(speeds._list_ways(loaded))
    ways = [replace(first, name="broken", encode=broken), first]
    inputs = csts_inputs(8, instruct=False)
    results = list(speeds._measure(loaded, "C-STS", inputs, ways, speeds.Scale(0, 1, 64, 8)))
    assert [type(result) for result in results] == [speeds.Skipped, speeds.Speed]
    assert results[0].why == "RuntimeError: out of memory"
    assert results[1].ratios == {}


def test_memory_is_measured_without_resource_module(monkeypatch):
    """Windows has no ``resource`` module."""
    assert 0.01 < speeds.peak_memory("cpu") < 100
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delitem(sys.modules, "llmcond.benchmark.speeds")
    assert 0.01 < import_module("llmcond.benchmark.speeds").peak_memory("cpu") < 100
