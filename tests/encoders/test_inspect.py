"""`llmcond models --check`, which describes an encoder before it is downloaded."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from llmcond.cli import run
from llmcond.commands.lists import models
from llmcond.encoders import MODELS, EncoderInput, EncoderOptions
from llmcond.encoders.checkpoints import checkpoint as checkpoints
from llmcond.encoders.encoder import load_encoder
from llmcond.errors import LlmcondError, UserError
from llmcond.report.tables import render_checkup, token_lines
from llmcond.workflows.check import check_model

CPU = EncoderOptions(device="cpu")


@pytest.fixture
def offline(monkeypatch):
    """Make the hub unreachable; its cache is empty."""

    def unreachable(*_):
        raise LlmcondError("the Hugging Face hub cannot be reached.")

    monkeypatch.setattr(checkpoints, "download_files", unreachable)


def run_check(capsys, *arguments):
    code = run(["models", "--check", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_samples_show_tokens_and_pooled_positions(minilm):
    report, problem = check_model("minilm", CPU)
    assert problem is None
    assert report["complete"]
    assert report["pooling"] == "mean"
    conditional, unconditional = report["samples"]
    assert conditional["tokens"][:3] == ["[CLS]", "two", "people"]
    assert conditional["tokens"][-1] == "[SEP]"
    assert all(conditional["pooled"])
    assert unconditional["tokens"] == ["[CLS]", "the", "number", "of", "people", "[SEP]"]
    row = minilm._tokenizer([EncoderInput("", "the number of people")])[0]
    assert minilm._tokenizer.strings(row) == unconditional["tokens"]


def test_token_without_embedding_raises(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 4}))
    with pytest.raises(UserError, match=r"produces the token id \d+, .* for the ids 0 to 3\."):
        check_model(str(folder), CPU)


def test_check_counts_parameters_and_bytes_of_weights():
    report, _ = check_model("minilm", CPU)
    network = load_encoder(
        "minilm", dtype="float32", device="cpu", runtime="torch"
    ).engine.model.network
    # The pooler is dropped after loading, because it is not used.
    n_loaded = sum(parameter.numel() for parameter in network.parameters())
    assert report["n_parameters"] == n_loaded + 384 * 384 + 384
    memory = {(row["dtype"], row["quantize"]): row for row in report["memory"]}
    assert memory["float32", "none"]["weights"] == 4 * report["n_parameters"]
    assert memory["bfloat16", "none"]["weights"] == 2 * report["n_parameters"]
    assert all(row["fits"] for row in report["memory"])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("cls", [0]), ("last", [5]), ("mean", [0, 1, 2, 3, 4, 5])],
)
def test_marks_are_under_pooled_tokens(pooling, expected):
    report, _ = check_model("minilm", EncoderOptions(device="cpu", pooling=pooling))
    assert [
        i for i, is_pooled in enumerate(report["samples"][1]["pooled"]) if is_pooled
    ] == expected


def test_marks_are_under_text_after_instruction(tiny_checkpoint):
    options = EncoderOptions(
        device="cpu",
        pooling="mean",
        pool_over="text",
        instruction_format="Instruct: {instruction} Query: {text}",
    )
    report, _ = check_model(str(tiny_checkpoint()), options)
    sample = report["samples"][0]
    pooled = [
        token
        for token, is_pooled in zip(sample["tokens"], sample["pooled"], strict=True)
        if is_pooled
    ]
    assert pooled == ["the", "number", "of", "people"]


def test_token_lines_fit_the_width_and_align_marks():
    sample = {
        "tokens": ["<s>", "▁the", "東京", "\n", "a\x1b[31m", "</s>"] * 4,
        "pooled": [False, True, True, True, False, True] * 4,
    }
    lines = token_lines(sample, 30)
    assert len(lines) % 2 == 0
    assert all(len(line) <= 31 for line in lines)
    assert not any("\x1b" in line or "\n" in line for line in lines)
    first, marks = lines[0], lines[1]
    assert marks[first.index("▁the") :].startswith("^^^^ ^^^^ ^^")
    assert marks[0] == " "


def test_check_fits_narrow_terminal():
    report, _ = check_model("minilm", CPU)
    out = io.StringIO()
    Console(width=80, file=out).print(render_checkup(report, 80))
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= 80


@pytest.mark.parametrize("known", MODELS, ids=lambda model: model.name)
def test_check_describes_every_known_model_without_its_files(offline, monkeypatch, known):
    monkeypatch.setattr(checkpoints, "_find_package_folder", lambda _: None)
    report, problem = check_model(known.name, CPU)
    assert "cannot be reached" in str(problem)
    assert not report["complete"]
    assert report["attention"] == known.all_settings["attention"]
    assert report["n_parameters"] == known.n_parameters
    assert report["width"] > 0
    sizes = [row["weights"] for row in report["memory"]]
    assert sizes == sorted(sizes, reverse=True)
    assert {row["quantize"] for row in report["memory"]} == {"none", "8bit", "4bit"}


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


def test_unknown_model_exits_with_code_2(capsys):
    assert run(["models", "--check", "minilmm"]) == 2
    assert "unknown model 'minilmm'" in capsys.readouterr().err


def test_check_does_not_read_weights(capsys, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint("mistral"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not read")
    code, report, _ = run_check(capsys, folder, "--device", "cpu", "--pooling", "last")
    assert code == 0
    assert report["attention"] == "causal"
    assert any("causal" in sentence for sentence in report["assumed"])


def test_check_applies_encoder_options(capsys, tiny_checkpoint):
    folder = tiny_checkpoint("mistral")
    options = ["--pooling", "mean", "--attention", "bidirectional", "--max-length", "16"]
    code, report, _ = run_check(capsys, folder, "--device", "cpu", *options)
    assert code == 0
    assert (report["attention"], report["pooling"], report["max_length"]) == (
        "bidirectional",
        "mean",
        16,
    )
    encoder = load_encoder(
        str(folder), device="cpu", pooling="mean", attention="bidirectional", max_length=16
    )
    assert encoder.identity.attention == "bidirectional"


def test_check_rejects_float16_for_folder_like_gte_qwen2(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint("mistral"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    options = EncoderOptions(
        device="cpu", dtype="float16", like="Alibaba-NLP/gte-Qwen2-7B-instruct"
    )
    with pytest.raises(UserError, match=r"does not work in float16: .*mteb #4935"):
        check_model(str(folder), options)


def test_invalid_options_print_only_an_error(capsys):
    assert run(["models", "--check", "minilm", "--pooling", "latent"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "only supports mean or cls or last" in err
    assert run(["models", "--quantize", "4bit"]) == 2
    assert "--check NAME" in capsys.readouterr().err


def test_model_list_fits_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["models"]) == 0
    out, err = capsys.readouterr()
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(row["name"] in out for row in models())
    assert "columns left out, because a line has only 80 characters: " in err


def test_control_characters_of_a_checkpoint_are_escaped(capsys, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "auto_map": {"AutoModel": "x\x1b]0;pwn\x07.Y"}}
    (folder / "config.json").write_text(json.dumps(changed))
    assert run(["models", "--check", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\\x1b" in err


def test_model_list_has_all_models_and_columns(capsys):
    assert run(["models"]) == 0
    out = capsys.readouterr().out
    for model in MODELS:
        assert model.name in out
    script = [sys.executable, "-m", "llmcond", "models", "--json"]
    rows = json.loads(subprocess.run(script, capture_output=True, check=True, text=True).stdout)
    columns = {
        "attention", "poolings", "instruction_format", "special_tokens", "padding_side",
        "max_length", "dtypes", "licence",
    }  # fmt: skip
    assert all(columns <= set(row) for row in rows["models"])
    gte = next(row for row in rows["models"] if row["name"].endswith("gte-Qwen2-7B-instruct"))
    assert gte["dtypes"] == ["float32", "bfloat16"]
