"""Candidates from a causal language model: a tiny one, of random weights."""

import json
import shutil

import pytest
import torch
from helpers.commands import ok, refused
from helpers.dialogues import dialogue
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    words = "<eos> [UNK] two three men women children dogs ride play read sit in the park".split()
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=len(words), **shape, bos_token_id=0, eos_token_id=0)
    folder = tmp_path_factory.mktemp("speaker")
    GPT2LMHeadModel(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="[UNK]")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def own(dialogue_run, tmp_path):
    return shutil.copytree(dialogue_run, tmp_path / "own")


def test_what_a_model_says_is_kept_and_planned_among(capsys, own, speaker):
    command = ("evaluate", "--run", own, "--generate", speaker, "--samples", "4")
    command += ("--history", "5", "--distance", "1", "--head", "rank")
    rows = ok(capsys, *command)["results"]
    assert [(row["head"], row["goal"]) for row in rows] == [
        ("none", False),
        ("none", True),
        ("rank", False),
        ("rank", True),
    ]
    (kept,) = (own / "generated").glob("*.jsonl")
    text = kept.read_text()
    said = [json.loads(line) for line in text.splitlines()]
    long = [number for number in range(56, 72) if len(dialogue(number)) > 5]
    assert [(row["dialogue"], row["history"]) for row in said] == [
        (str(number - 55), 5) for number in long
    ]
    assert all(1 <= len(row["candidates"]) <= 4 for row in said)
    assert ok(capsys, *command)["results"] == rows
    # Stopped within a line: what is whole stays, and the rest is the same again.
    lines = text.splitlines(keepends=True)
    kept.write_text("".join([*lines[:2], lines[2][:20]]))
    assert ok(capsys, *command)["results"] == rows
    assert kept.read_text() == text
    # The file is one of samples, as any other.
    planned = (*command[:3], "--plan", kept, *command[7:])
    assert ok(capsys, *planned)["results"][1]["hits@5"] == rows[1]["hits@5"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--generate", "nowhere/at/all"), "cannot be loaded as a causal language model"),
        (("--generate", "SPEAKER", "--samples", "0"), "--samples is 0"),
        (("--generate", "SPEAKER", "--history", "9"), "a history of 9 turns"),
        (("--generate", "PICKLE"), "weights in safetensors"),
    ],
)
def test_what_cannot_be_said_is_told(capsys, dialogue_run, speaker, tmp_path, asked, words):
    pickled = shutil.copytree(speaker, tmp_path / "pickled")
    weights = pickled / "model.safetensors"
    weights.rename(pickled / "pytorch_model.bin")
    named = {"SPEAKER": speaker, "PICKLE": pickled}
    command = ("evaluate", "--run", dialogue_run, "--history", "3", "--distance", "1")
    assert words in refused(capsys, *command, *(named.get(word, word) for word in asked))
