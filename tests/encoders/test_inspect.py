"""`llmcond models --check`: what an encoder will do, before it is downloaded."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from llmcond.cli import run
from llmcond.commands.models import models
from llmcond.encoders import MODELS, EncoderInput, EncoderOptions
from llmcond.encoders.checkpoints import checkpoint as checkpoints
from llmcond.encoders.encoder import load_encoder
from llmcond.errors import LlmcondError, UserError
from llmcond.report.checkup import render_checkup, token_lines
from llmcond.workflows.check import check_model

CPU = EncoderOptions(device="cpu")


@pytest.fixture
def offline(monkeypatch):
    """No hub, and nothing in its cache."""

    def unreachable(*_):
        raise LlmcondError("the Hugging Face hub cannot be reached.")

    monkeypatch.setattr(checkpoints, "_download", unreachable)


def checked(capsys, *arguments):
    code = run(["models", "--check", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_samples_show_what_the_network_is_given_and_pools(minilm):
    report, problem = check_model("minilm", CPU)
    assert problem is None
    assert report["complete"]
    assert report["pooling"] == "mean"
    conditional, unconditional = report["samples"]
    assert conditional["tokens"][:3] == ["[CLS]", "two", "people"]
    assert conditional["tokens"][-1] == "[SEP]"
    assert all(conditional["pooled"])
    assert unconditional["tokens"] == ["[CLS]", "the", "number", "of", "people", "[SEP]"]
    given = minilm._tokenizer([EncoderInput("", "the number of people")])[0]
    assert minilm._tokenizer.strings(given) == unconditional["tokens"]


def test_tokens_without_an_embedding_are_told(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 4}))
    with pytest.raises(UserError, match=r"produces the token id \d+, .* for the ids 0 to 3\."):
        check_model(str(folder), CPU)


def test_a_check_counts_the_parameters_and_the_bytes_that_are_loaded():
    report, _ = check_model("minilm", CPU)
    network = load_encoder(
        "minilm", dtype="float32", device="cpu", runtime="torch"
    ).engine.model.network
    # The pooler is dropped after loading: it is not used.
    loaded = sum(parameter.numel() for parameter in network.parameters())
    assert report["n_parameters"] == loaded + 384 * 384 + 384
    memory = {(row["dtype"], row["quantize"]): row for row in report["memory"]}
    assert memory["float32", "none"]["weights"] == 4 * report["n_parameters"]
    assert memory["bfloat16", "none"]["weights"] == 2 * report["n_parameters"]
    assert all(row["fits"] for row in report["memory"])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("cls", [0]), ("last", [5]), ("mean", [0, 1, 2, 3, 4, 5])],
)
def test_marks_stand_under_what_the_pooling_takes(pooling, expected):
    report, _ = check_model("minilm", EncoderOptions(device="cpu", pooling=pooling))
    assert [i for i, on in enumerate(report["samples"][1]["pooled"]) if on] == expected


def test_marks_stand_under_the_text_of_an_instruction(tiny_checkpoint):
    options = EncoderOptions(
        device="cpu",
        pooling="mean",
        pool_over="text",
        instruction_format="Instruct: {instruction} Query: {text}",
    )
    report, _ = check_model(str(tiny_checkpoint()), options)
    sample = report["samples"][0]
    pooled = [t for t, on in zip(sample["tokens"], sample["pooled"], strict=True) if on]
    assert pooled == ["the", "number", "of", "people"]


def test_lines_are_as_wide_as_the_terminal_and_marks_under_their_tokens():
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


def test_a_check_is_readable_in_a_narrow_terminal():
    report, _ = check_model("minilm", CPU)
    out = io.StringIO()
    Console(width=80, file=out).print(render_checkup(report, 80))
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= 80


@pytest.mark.parametrize("known", MODELS, ids=lambda model: model.name)
def test_every_known_model_is_described_without_its_files(offline, monkeypatch, known):
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


def test_what_could_not_be_checked_is_told_and_fails(capsys, offline):
    code, report, err = checked(capsys, "nvidia/NV-Embed-v2")
    assert code == 1
    assert err.startswith("llmcond: error: the Hugging Face hub cannot be reached.")
    assert report["problem"] == "the Hugging Face hub cannot be reached."
    assert report["pool_over"] == "after-instruction"
    assert run(["models", "--check", "nvidia/NV-Embed-v2"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"4bit \(bfloat16\)\s+4\.0 GiB", out)
    assert "7.85 B parameters" in out


def test_an_unknown_model_is_the_users_error(capsys):
    assert run(["models", "--check", "minilmm"]) == 2
    assert "unknown model 'minilmm'" in capsys.readouterr().err


def test_a_check_reads_no_weights(capsys, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint("mistral"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not read")
    code, report, _ = checked(capsys, folder, "--device", "cpu", "--pooling", "last")
    assert code == 0
    assert report["attention"] == "causal"
    assert any("causal" in sentence for sentence in report["assumed"])


def test_options_of_a_check_are_those_of_an_extraction(capsys, tiny_checkpoint):
    folder = tiny_checkpoint("mistral")
    options = ["--pooling", "mean", "--attention", "bidirectional", "--max-length", "16"]
    code, report, _ = checked(capsys, folder, "--device", "cpu", *options)
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


def test_a_folder_like_a_model_that_refuses_float16(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint("mistral"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    options = EncoderOptions(
        device="cpu", dtype="float16", like="Alibaba-NLP/gte-Qwen2-7B-instruct"
    )
    with pytest.raises(UserError, match=r"does not work in float16: .*mteb #4935"):
        check_model(str(folder), options)


def test_a_mistake_is_answered_by_its_line_alone(capsys):
    assert run(["models", "--check", "minilm", "--pooling", "latent"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "only supports mean or cls or last" in err
    assert run(["models", "--quantize", "4bit"]) == 2
    assert "--check NAME" in capsys.readouterr().err


def test_a_listing_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["models"]) == 0
    out, err = capsys.readouterr()
    assert all(len(line) <= 80 for line in out.splitlines())
    assert all(row["name"] in out for row in models())
    assert "columns left out, because a line has only 80 characters: " in err


def test_texts_of_a_checkpoint_do_not_steer_the_terminal(capsys, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "auto_map": {"AutoModel": "x\x1b]0;pwn\x07.Y"}}
    (folder / "config.json").write_text(json.dumps(changed))
    assert run(["models", "--check", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\\x1b" in err


def test_the_table_of_models_fits_and_names_all(capsys):
    assert run(["models"]) == 0
    out = capsys.readouterr().out
    for model in MODELS:
        assert model.name in out
    script = [sys.executable, "-m", "llmcond", "models", "--json"]
    rows = json.loads(subprocess.run(script, capture_output=True, check=True, text=True).stdout)
    wanted = {
        "attention", "poolings", "instruction_format", "special_tokens", "padding_side",
        "max_length", "dtypes", "licence",
    }  # fmt: skip
    assert all(wanted <= set(row) for row in rows["models"])
    gte = next(row for row in rows["models"] if row["name"].endswith("gte-Qwen2-7B-instruct"))
    assert gte["dtypes"] == ["float32", "bfloat16"]
