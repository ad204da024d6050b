"""Options and settings of encoders, known models, and `llmcond models --check`."""

import inspect
import io
import json
import re
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from helpers.checkpoints import change_json
from helpers.identities import IDENTITY
from rich.console import Console

import llmcond
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.options import declaration_of
from llmcond.cli import run
from llmcond.commands.lists import check_model
from llmcond.encoders import MODELS, EncoderInput, EncoderOptions, find_model
from llmcond.encoders import checkpoint as checkpoints
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.settings import (
    CHOICES,
    MODEL_SETTINGS,
    STATED,
    EncoderIdentity,
    known_names,
    read_model,
)
from llmcond.encoders.spec import POOLINGS
from llmcond.report.tables import render_checkup

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
        ({"max_length": "64"}, "max_length is '64'; expected a whole number"),
        ({"max_length": True}, "max_length is True; expected a whole number"),
        ({"max_length": 7}, "max_length is 7; it must be at least 8"),
        ({"max_tokens_per_batch": 0}, "max_tokens_per_batch is 0; it must be at least 1"),
        ({"normalize": "yes"}, "normalize is 'yes'; expected True or False"),
        ({"share_prefixes": 1}, "share_prefixes is 1; expected True or False"),
        ({"router_strength": "1"}, "router_strength is '1'; expected a number"),
        ({"router_strength": 0}, "router_strength is 0; it must be above 0"),
        ({"special_tokens": 3}, "special_tokens is 3; expected a text"),
        ({"device": "gpu"}, "device is 'gpu'. Legal: auto, cpu, cuda, cuda:N"),
        ({"dtype": np.float32}, "dtype is <class 'numpy.float32'>. Legal: auto, float32"),
        ({"quantize": 4}, "quantize is 4. Legal: none, 8bit, 4bit"),
        ({"quantize": "8bits"}, "quantize is '8bits'. Did you mean '8bit'"),
        ({"pooling": 3}, "pooling is 3; expected a text"),
        ({"model": ["minilm"]}, r"model is \['minilm'\]; expected a name or a folder"),
        ({"model": None}, "model is None; expected a name or a folder"),
    ):
        with pytest.raises(UserError, match=message):
            llmcond.load_encoder(**{"model": "minilm", **options})
    options = EncoderOptions(max_length=np.int64(64), dtype=None, quantize=None)
    assert options == EncoderOptions(max_length=64)
    assert type(options.max_length) is int  # JSON cannot encode NumPy's numbers
    for name, values in CHOICES.items():
        assert [getattr(EncoderOptions(**{name: value}), name) for value in values] == [*values]


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


def test_recorded_model_settings_are_unchanged():
    stated = {
        "pooling": str, "attention": str, "pool_over": str, "normalize": bool, "max_length": int,
        "instruction_format": str, "special_tokens": str,
    }  # fmt: skip
    # Settings of a router are recorded only if the encoder has one.
    router_settings = {
        "router": str, "router_mode": str, "router_weight": str, "router_layers": int,
        "router_strength": float,
    }  # fmt: skip
    assert stated | router_settings == MODEL_SETTINGS
    assert list(STATED) == list(stated)


def test_options_import_no_large_library():
    code = (
        "import sys, llmcond.encoders.settings\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'pydantic') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "[]\n"


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


def test_known_names_are_unique_and_begin_with_minilm():
    names = known_names()
    assert names[:2] == ["minilm", "sentence-transformers/all-MiniLM-L6-v2"]
    assert len(set(names)) == len(names) == len(MODELS) + 1


@pytest.mark.parametrize("text", ['licence = "MIT"', "poolings = []\ndimension = 3"])
def test_file_with_missing_or_unknown_keys_is_rejected(tmp_path, text):
    (tmp_path / "custom.toml").write_text(text)
    with pytest.raises((KeyError, TypeError), match=r"poolings|dimension"):
        read_model(tmp_path / "custom.toml")


def test_model_list_has_all_models_and_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["models"]) == 0
    out, err = capsys.readouterr()
    assert [model.name for model in MODELS if model.name not in out] == []
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "columns left out, because a line has only 80 characters: " in err
    assert run(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    columns = {
        "attention", "poolings", "instruction_format", "special_tokens", "padding_side",
        "max_length", "dtypes", "licence",
    }  # fmt: skip
    assert all(columns <= set(row) for row in rows)
    gte = next(row for row in rows if row["name"].endswith("gte-Qwen2-7B-instruct"))
    assert gte["dtypes"] == ["float32", "bfloat16"]


# -- llmcond models --check --------------------------------------------------------------------


def run_check(capsys, *arguments):
    code = run(["models", "--check", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_check_describes_tokens_parameters_and_memory(minilm):
    report, problem = check_model("minilm", CPU)
    assert (problem, report["complete"], report["pooling"]) == (None, True, "mean")
    conditional, unconditional = report["samples"]
    assert conditional["tokens"][:3] == ["[CLS]", "two", "people"]
    assert unconditional["tokens"] == ["[CLS]", "the", "number", "of", "people", "[SEP]"]
    row = minilm._tokenizer([EncoderInput("", "the number of people")])[0]
    assert minilm._tokenizer.strings(row) == unconditional["tokens"]
    # The pooler is dropped after loading, because it is not used.
    network = load_encoder("minilm", dtype="float32", device="cpu", runtime="torch").engine.model
    n_loaded = sum(parameter.numel() for parameter in network.network.parameters())
    assert report["n_parameters"] == n_loaded + 384 * 384 + 384
    memory = {(row["dtype"], row["quantize"]): row for row in report["memory"]}
    assert memory["float32", "none"]["weights"] == 4 * report["n_parameters"]
    assert memory["bfloat16", "none"]["weights"] == 2 * report["n_parameters"]
    assert all(row["fits"] for row in report["memory"])
    out = io.StringIO()
    Console(width=80, file=out).print(render_checkup(report, 80))
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= 80


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pooling": "cls"}, ["[CLS]"]),
        ({"pooling": "last"}, ["[SEP]"]),
        ({"pooling": "mean"}, ["[CLS]", "the", "number", "of", "people", "[SEP]"]),
        (
            {
                "pooling": "mean",
                "pool_over": "text",
                "instruction_format": "Query: {instruction} {text}",
            },
            ["the", "number", "of", "people"],
        ),
    ],
)
def test_pooled_tokens_are_marked(tiny_bert, options, expected):
    report, _ = check_model(str(tiny_bert), replace(CPU, **options))
    sample = report["samples"][-1]
    tokens = zip(sample["tokens"], sample["pooled"], strict=True)
    assert [token for token, is_pooled in tokens if is_pooled] == expected


def test_incomplete_check_reports_problem_and_fails(capsys, offline):
    code, report, err = run_check(capsys, "nvidia/NV-Embed-v2")
    assert code == 1
    assert err.startswith("llmcond: error: the Hugging Face hub cannot be reached.")
    assert report["problem"] == "the Hugging Face hub cannot be reached."
    assert report["pool_over"] == "after-instruction"
    assert run(["models", "--check", "nvidia/NV-Embed-v2"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"4bit \(bfloat16\)\s+4\.0 GiB", out)
    assert "7.85 B parameters" in out


def test_check_applies_options_without_reading_weights(capsys, tiny_checkpoint):
    folder = tiny_checkpoint("mistral")
    (folder / "model.safetensors").write_bytes(b"not read")
    options = ["--device", "cpu", "--pooling", "mean", "--max-length", "16"]
    code, report, _ = run_check(capsys, folder, *options)
    assert (code, report["attention"], report["pooling"]) == (0, "causal", "mean")
    assert report["max_length"] == 16
    assert any("causal" in sentence for sentence in report["assumed"])


def test_invalid_checks_print_only_an_error(capsys, tiny_checkpoint):
    code_folder, small_folder = tiny_checkpoint(), tiny_checkpoint()
    change_json(code_folder / "config.json", auto_map={"AutoModel": "x\x1b]0;pwn\x07.Y"})
    change_json(small_folder / "config.json", vocab_size=4)
    for arguments, message in (
        (["--check", "minilmm"], "unknown model 'minilmm'"),
        (["--check", "minilm", "--pooling", "latent"], "only supports mean or cls or last"),
        (["--quantize", "4bit"], "--check NAME"),
        (["--check", str(small_folder)], "for the ids 0 to 3."),
        (["--check", str(code_folder)], "x\\x1b]0;pwn\\x07.Y"),  # control characters are escaped
    ):
        assert run(["models", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert "\x1b" not in err
