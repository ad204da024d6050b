"""Options and settings of encoders, known models, and `llmcond models --check`."""

import inspect
import json
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from helpers.checkpoints import change_json
from helpers.identities import IDENTITY

import llmcond
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.options import declaration_of
from llmcond.cli import run
from llmcond.commands.lists import check_model
from llmcond.encoders import MODELS, EncoderOptions, find_model
from llmcond.encoders import checkpoint as checkpoints
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import POOLINGS

CPU = EncoderOptions(device="cpu")


# -- options -----------------------------------------------------------------------------------


def test_load_encoder_accepts_every_option_as_keyword():
    parameters = list(inspect.signature(llmcond.load_encoder).parameters.values())
    assert parameters[0].name == "model"
    assert [p.name for p in parameters[1:]] == [field.name for field in fields(EncoderOptions)]
    assert {p.kind for p in parameters[1:]} == {inspect.Parameter.KEYWORD_ONLY}
    for field in fields(EncoderOptions):
        assert f"{field.name}: {declaration_of(field).help}" in llmcond.load_encoder.__doc__


def test_invalid_options_of_load_encoder_are_rejected():
    for options, message in (
        ({"max_length": "64"}, "--max-length is '64'; expected a whole number"),
        ({"max_length": 7}, "--max-length is 7; it must be at least 8"),
        ({"max_tokens_per_batch": 0}, "--max-tokens-per-batch is 0; it must be at least 1"),
        ({"normalize": "yes"}, "--normalize is 'yes'; expected True or False"),
        ({"router_strength": 0}, "--router-strength is 0; it must be above 0"),
        ({"router_layers": 0}, "--router-layers is 0; it must be at least 1"),
        ({"special_tokens": 3}, "--special-tokens is 3; expected a text"),
        ({"device": "gpu"}, "device is 'gpu'. Legal: auto, cpu, cuda, cuda:N"),
        ({"dtype": np.float32}, "--dtype is <class 'numpy.float32'>. Legal: auto, float32"),
        ({"quantize": "8bits"}, "--quantize is '8bits'. Did you mean '8bit'"),
        ({"router_weight": "uniform"}, "--router-weight is 'uniform'"),
        ({"pooling": 3}, "--pooling is 3; expected a text"),
        ({"pooling": "means"}, "--pooling is 'means'. Did you mean 'mean'"),
        ({"pooling": "mean", "router_mode": "released-tri"}, "the encoder has no router"),
        ({"model": None}, "model is None; expected a name or a folder"),
    ):
        with pytest.raises(UserError, match=message):
            llmcond.load_encoder(**{"model": "minilm", **options})
    options = EncoderOptions(max_length=np.int64(64))
    assert options == EncoderOptions(max_length=64)
    assert type(options.max_length) is int  # JSON cannot encode NumPy's numbers


def test_identity_record_must_be_complete():
    changed = [
        replace(IDENTITY, router="csr", router_weight=weight) for weight in ("only", "random")
    ]
    assert len({IDENTITY.fingerprint, *(identity.fingerprint for identity in changed)}) == 3
    recorded = changed[0].to_json()
    assert EncoderIdentity.from_json(recorded, "run.json") == changed[0]
    del recorded["instruction_format"]
    expected = r"run\.json has no valid encoder identity: instruction_format is missing"
    with pytest.raises(LlmcondError, match=expected):
        EncoderIdentity.from_json(recorded, "run.json")


# -- known models ------------------------------------------------------------------------------


@pytest.fixture
def offline(monkeypatch):
    """Make the hub unreachable; its cache is empty."""

    def unreachable(*_):
        raise LlmcondError("the Hugging Face hub cannot be reached.")

    monkeypatch.setattr(checkpoints, "download_files", unreachable)
    monkeypatch.setattr(checkpoints, "_find_package_folder", lambda _: None)


@pytest.mark.parametrize("known", MODELS, ids=lambda model: model.name)
def test_known_models_are_described_without_their_files(offline, known):
    settings = known.all_settings
    assert EncoderOptions.of(settings).attention == settings["attention"] is not None
    assert set(known.poolings) <= POOLINGS.keys()
    assert find_model(known.name.upper()) is known
    report, problem = check_model(known.name, CPU)
    assert "cannot be reached" in str(problem)
    assert (report["complete"], report["attention"]) == (False, settings["attention"])
    assert (report["n_parameters"], report["width"]) == (known.n_parameters, known.dim)
    weights = {row["quantize"]: row["weights"] for row in report["memory"]}
    assert weights["4bit"] < weights["8bit"] < weights["none"]


def test_model_list_has_all_models_and_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["models"]) == 0
    out, err = capsys.readouterr()
    assert [model.name for model in MODELS if model.name not in out] == []
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "columns left out, because a line has only 80 characters: " in err
    assert run(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert all({"attention", "poolings", "max_length", "licence"} <= set(row) for row in rows)


# -- llmcond models --check --------------------------------------------------------------------


def run_check(capsys, *arguments):
    code = run(["models", "--check", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_check_describes_tokens_parameters_and_memory():
    report, problem = check_model("minilm", CPU)
    assert (problem, report["complete"], report["pooling"]) == (None, True, "mean")
    conditional, unconditional = report["samples"]
    assert conditional["tokens"][:3] == ["[CLS]", "two", "people"]
    assert unconditional["tokens"] == ["[CLS]", "the", "number", "of", "people", "[SEP]"]
    # The pooler is dropped after loading, because it is not used.
    network = load_encoder("minilm", dtype="float32", device="cpu", runtime="torch").engine.model
    n_loaded = sum(parameter.numel() for parameter in network.network.parameters())
    assert report["n_parameters"] == n_loaded + 384 * 384 + 384
    memory = {(row["dtype"], row["quantize"]): row for row in report["memory"]}
    assert memory["float32", "none"]["weights"] == 4 * report["n_parameters"]
    assert memory["bfloat16", "none"]["weights"] == 2 * report["n_parameters"]
    assert all(row["fits"] for row in report["memory"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pooling": "last"}, ["[SEP]"]),
        ({"pooling": "mean"}, ["[CLS]", "the", "number", "of", "people", "[SEP]"]),
        ({"pooling": "mean", "pool_over": "text"}, ["the", "number", "of", "people"]),
    ],
)
def test_pooled_tokens_are_marked(tiny_bert, options, expected):
    report, _ = check_model(str(tiny_bert), replace(CPU, **options))
    sample = report["samples"][-1]
    tokens = zip(sample["tokens"], sample["pooled"], strict=True)
    assert [token for token, is_pooled in tokens if is_pooled] == expected


def test_incomplete_check_reports_problem_and_fails(capsys, offline, monkeypatch):
    code, report, err = run_check(capsys, "nvidia/NV-Embed-v2")
    assert code == 1
    assert err.startswith("llmcond: error: the Hugging Face hub cannot be reached.")
    assert report["problem"] == "the Hugging Face hub cannot be reached."
    assert report["pool_over"] == "after-instruction"
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["models", "--check", "nvidia/NV-Embed-v2"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"4bit \(bfloat16\)\s+4\.0 GiB", out)
    assert "7.85 B parameters" in out
    assert max(map(len, out.splitlines())) <= 80


def test_check_applies_options_without_reading_weights(capsys, tiny_checkpoint):
    folder = tiny_checkpoint("mistral")
    (folder / "model.safetensors").write_bytes(b"not read")
    options = ["--device", "cpu", "--pooling", "mean", "--max-length", "16"]
    code, report, _ = run_check(capsys, folder, *options)
    assert (code, report["attention"], report["pooling"]) == (0, "causal", "mean")
    assert report["max_length"] == 16
    assert any("causal" in sentence for sentence in report["assumed"])
    change_json(folder / "config.json", auto_map={"AutoModel": "x\x1b]0;pwn\x07.Y"})
    assert run(["models", "--check", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "x\\x1b]0;pwn\\x07.Y" in err  # control characters are escaped
