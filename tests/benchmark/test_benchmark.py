"""The bench command on small shapes, and the errors that its checks must detect."""

import json
import math
import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from helpers.commands import run_json
from torch.nn import functional

from llmcond.base.errors import LlmcondError
from llmcond.benchmark import checks, speeds
from llmcond.benchmark.shapes import Shape, csts_inputs, random_encoder
from llmcond.benchmark.speeds import PlainLoop, sentence_transformers
from llmcond.commands.encode import Bench
from llmcond.encoders import EncoderOptions
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.loading import build_on_meta, load_config, load_model
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
    result = run_json(capsys, "bench", "--quick", *options, "--profile", "--out", page)
    for check in result["checks"]:
        needs_cuda = "CUDA" in check["name"] or "memory" in check["name"]
        assert check["passed"] is (None if needs_cuda else True), check["name"]
        assert ("needs CUDA" in check["note"]) == (check["difference"] is None) == needs_cuda
        assert needs_cuda or check["difference"] <= check["bound"]
    ways = ["packed", "padded", "packed, not folded", speeds.PLAIN, "sentence-transformers"]
    assert [row["way"] for row in result["speeds"] if row["inputs"] == "C-STS"] == ways
    for row in result["speeds"]:
        assert row["kernel"] == "scaled_dot_product_attention"
        assert row["tokens_per_second"] > row["inputs_per_second"] > 0
        assert 0 < row["peak_share"] < 2
    for profile in result["profiles"]:
        shares = [share for _, share, _ in profile["kernels"]]
        assert shares == sorted(shares, reverse=True)
        assert 0.5 < sum(shares) <= 1
    profiled = {profile["inputs"] for profile in result["profiles"]}
    assert profiled == {"C-STS", "32 tokens", "64 tokens"}
    assert result["skipped"] == []
    assert result["machine"]["versions"]["torch"] == torch.__version__
    assert "| nv-embed-v2: stored vectors" in page.read_text()


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
    assert (type(failure), failure.exit_code) == (LlmcondError, 1)
    assert str(failure) == "1 of 3 checks failed: a = b."
    assert command.failed(replace(result, checks=[fine, not_run])) is None


# -- checks ------------------------------------------------------------------------------------


def test_check_fails_beyond_its_bound_or_with_error():
    def broken():
        raise RuntimeError("CUDA error: no kernel image\nand more")

    def absent():
        import no_such_library  # noqa: F401

    for difference in (0.2, math.nan, math.inf):
        assert checks.run_check("x", 0.1, lambda: (difference, "")).passed is False  # noqa: B023
    check = checks.run_check("x", 0.1, broken)
    assert (check.passed, check.difference) == (False, None)
    assert check.note == "RuntimeError: CUDA error: no kernel image"
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


@torch.no_grad()
def compute_reference(inputs, folder):
    """Encode each input separately with bidirectional Mistral and the latent block of NV-Embed."""
    resolved = checks.stored_encoder("cpu", folder)
    resolved = replace(resolved, options=replace(resolved.options, fold_latents=False))
    network = load_model(resolved, load_config(resolved.checkpoint, "bidirectional")).network
    network.set_attn_implementation("eager")
    w = network.latent_attention_model.state_dict()
    cross, feed = (f"cross_attend_blocks.{i}." for i in (0, 1))

    def norm(x, name):
        return functional.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"])

    vectors = []
    for row in checks.stored_rows({"inputs": inputs}):
        mask = torch.zeros(1, 1, len(row.ids), len(row.ids))
        hidden = network.embedding_model(
            input_ids=torch.tensor([row.ids]), attention_mask=mask
        ).last_hidden_state[0]
        queries = norm(hidden, cross + "norm") @ w[cross + "fn.to_q.weight"].T
        context = norm(w["latents"], cross + "norm_context")
        keys, values = (context @ w[cross + "fn.to_kv.weight"].T).chunk(2, dim=-1)
        size = queries.shape[1] // 2  # of one of the two heads
        heads = zip(*(part.split(size, dim=-1) for part in (queries, keys, values)), strict=True)
        attended = [(q @ k.T * size**-0.5).softmax(dim=-1) @ v for q, k, v in heads]
        hidden = torch.cat(attended, dim=-1) @ w[cross + "fn.to_out.weight"].T + hidden
        wide = norm(hidden, feed + "norm") @ w[feed + "fn.net.0.weight"].T
        value, gate = (wide + w[feed + "fn.net.0.bias"]).chunk(2, dim=-1)
        narrow = (value * functional.gelu(gate)) @ w[feed + "fn.net.2.weight"].T
        hidden = narrow + w[feed + "fn.net.2.bias"] + hidden
        vectors.append(functional.normalize(hidden[row.first :].mean(dim=0), dim=0))
    return torch.stack(vectors).numpy()


def test_stored_vectors_match_formulas_and_engine(tmp_path):
    chance = random.Random(0)
    pooled = [(3, 0), (17, 0), (30, 9), (64, 21)]
    inputs = [{"ids": [2, *chance.choices(range(10, 8000), k=n), 3], "first": f} for n, f in pooled]
    stored = json.loads(checks.STORED.read_text())
    assert stored["inputs"] == inputs
    vectors = compute_reference(inputs, tmp_path / "a")
    np.testing.assert_allclose(vectors, stored["vectors"], rtol=0, atol=2e-6)
    difference, _ = checks.golden_differences("cpu", tmp_path / "b")
    assert 0 < difference < 2e-5
