"""``llmcond prompts show``: the inputs that a prompt renders for a row, and their tokens."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from llmcond.bundled import bundled_names
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.encoders import EncoderInput, EncoderOptions, resolve
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.spec import Router
from llmcond.prompts import load_prompt
from llmcond.prompts.inputs import input_conditions, preview_prompt, render_rows

pytestmark = pytest.mark.usefixtures("in_tmp")

TRAIN = read_dataset(None).splits["train"]


def show_json(capsys, *arguments):
    assert run(["prompts", "show", *map(str, arguments), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def show_text(capsys, *arguments):
    assert run(["prompts", "show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def show_error(capsys, *arguments):
    assert run(["prompts", "show", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("llmcond: error: ")
    return line


def to_encoder_input(item):
    router = None if item["router"] is None else Router(**item["router"])
    return EncoderInput(item["instruction"], item["text"], item["context"], router=router)


def select(report, *keys):
    return [tuple(item[key] for key in keys) for item in report["inputs"]]


def test_exact_texts_of_a_row_are_shown(capsys):
    report = show_json(capsys, "concat-sent-cond", "--row", 3)
    first, second, condition = TRAIN.sentence1[2], TRAIN.sentence2[2], TRAIN.condition[2]
    assert (report["file"], report["split"], report["row"]) == ("train.csv", "train", 3)
    assert select(report, "part", "sentence", "instruction", "context", "text") == [
        ("conditional", 1, "", None, f"{first} {condition}"),
        ("conditional", 2, "", None, f"{second} {condition}"),
        ("unconditional", None, "", None, condition),
    ]
    assert report["encoder"] is None
    out = show_text(capsys, "concat-sent-cond", "--row", "3")
    # A text is printed on a single line, however long it is.
    assert f"text:        {first} {condition}\n" in out
    assert out.startswith("prompt concat-sent-cond: The sentence, then the condition")
    assert "row 3 of train.csv, train\n" in out


def test_first_training_row_is_shown_by_default(capsys):
    report = show_json(capsys, "cond")
    assert report["row"] == 1
    assert report["inputs"][0]["instruction"].endswith(TRAIN.sentence1[0])
    assert show_json(capsys, "cond", "--split", "test")["file"] == "test.csv"


@pytest.mark.matrix
@pytest.mark.parametrize("name", bundled_names("prompts"))
def test_preview_matches_extraction(capsys, name):
    report, inputs = show_json(capsys, name, "--row", 7), render_rows(TRAIN, load_prompt(name))
    actual = [to_encoder_input(item) for item in report["inputs"]]
    expected = [inputs.first[6], inputs.second[6]]
    if name != "control-no-condition":
        expected.append(inputs.first_unconditional[6])
    assert actual == expected


def test_tokens_and_marks_match_extraction(capsys, minilm):
    report = show_json(capsys, "pair-cond", "--row", 3, "--model", "minilm")
    inputs = render_rows(TRAIN, load_prompt("pair-cond"))
    items = [inputs.first[2], inputs.second[2], inputs.first_unconditional[2]]
    for item, row in zip(report["inputs"], minilm._tokenizer(items), strict=True):
        assert item["tokens"] == minilm._tokenizer.strings(row)
        marked = [i for i, pooled in enumerate(item["pooled"]) if pooled]
        assert marked == list(range(row.first, row.last))
        assert item["n_tokens"] == row.n_tokens == len(item["tokens"])
        assert item["cut"] == []
    assert report["encoder"] == {
        "name": "minilm",
        "pooling": "mean",
        "pool_over": "all",
        "max_length": 256,
        "special_tokens": "tokenizer",
        "instruction_format": "",
    }
    out = show_text(capsys, "pair-cond", "--row", 3, "--model", "minilm").splitlines()
    line_number = next(i for i, line in enumerate(out) if "[CLS]" in line)
    tokens, marks = out[line_number], out[line_number + 1]
    assert tokens[marks.index("^") : len(marks)] == " ".join(items[0].text.split())
    assert set(marks) == {"^", " "}
    assert out[line_number + 2].strip() == f"{len(report['inputs'][0]['tokens'])} tokens, 5 pooled"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "options"),
    [("concat-sent-cond", []), ("pair-cond", []), ("cond", ["--instruction-format"])],
)
@pytest.mark.parametrize("n_cut", [1, 5])
def test_cut_tokens_are_reported(capsys, name, options, n_cut):
    options = options and [*options, "Instruct: {instruction} Query: {text}"]
    options = ["--row", 3, "--model", "minilm", *options]
    whole = show_json(capsys, name, *options)
    length = whole["inputs"][0]["n_tokens"] - n_cut
    report = show_json(capsys, name, *options, "--max-length", length)
    for item, uncut in zip(report["inputs"], whole["inputs"], strict=True):
        assert item["n_tokens"] == uncut["n_tokens"] == len(uncut["tokens"])
        assert len(item["tokens"]) == min(length, item["n_tokens"])
        assert len(item["cut"]) == item["n_tokens"] - len(item["tokens"])
        assert sorted([*item["tokens"], *item["cut"]]) == sorted(uncut["tokens"])
    out = show_text(capsys, name, *options, "--max-length", length)
    cut = report["inputs"][0]["cut"]
    assert f"{len(cut)} tokens are cut: {' '.join(cut)}\n" in out


def test_context_is_cut_before_the_text(capsys):
    report = show_json(capsys, "pair-cond", "--row", 3, "--model", "minilm", "--max-length", 10)
    item = report["inputs"][0]
    assert item["tokens"] == "[CLS] in this [SEP] the mood of the people [SEP]".split()
    cut = "scene we see one gentleman reading a book on an over ##cast day , looking excited ."
    assert item["cut"] == cut.split()


def test_instruction_is_tokenized_and_last_token_is_marked(capsys, tiny_checkpoint):
    folder = tiny_checkpoint("mistral")
    options = ["--model", folder, "--device", "cpu", "--pooling", "last", "--row", 3]
    options += ["--instruction-format", "Instruct: {instruction} Query: {text}"]
    item = show_json(capsys, "sts-sent", *options)["inputs"][0]
    assert item["tokens"][:2] == ["[CLS]", "instruct"]
    assert item["pooled"] == [False] * (len(item["tokens"]) - 1) + [True]
    assert item["text"] == TRAIN.sentence1[2]
    exit_code = run(["prompts", "show", "sts-sent", *map(str, options)])
    captured = capsys.readouterr()
    assert exit_code == 0
    assert "assumed: " in captured.err
    assert (
        f"instruction: Retrieve semantically similar text, with regard to {TRAIN.condition[2]}."
        in (captured.out)
    )


def test_weights_are_not_read(capsys, tiny_checkpoint, tmp_path, monkeypatch):
    folder = shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not read")
    monkeypatch.setattr(Encoder, "__init__", lambda *_: pytest.fail("an encoder was loaded"))
    report = show_json(capsys, "eol", "--model", folder, "--device", "cpu")
    assert report["inputs"][0]["tokens"][-1] == "[SEP]"


def test_shuffled_control_shows_both_conditions(capsys):
    shuffled_condition = input_conditions(TRAIN, load_prompt("control-shuffled"))[2]
    report = show_json(capsys, "control-shuffled", "--row", 3)
    assert (report["condition"], report["given_condition"]) == (
        TRAIN.condition[2],
        shuffled_condition,
    )
    assert report["control"] == "shuffled"
    assert report["inputs"][2]["text"] == shuffled_condition != TRAIN.condition[2]
    out = show_text(capsys, "control-shuffled", "--row", 3)
    assert f"the prompt uses that of another row: {shuffled_condition}\n" in out
    out_without_condition = show_text(capsys, "control-no-condition", "--row", 3)
    assert (
        "the prompt leaves the condition out, and nothing is subtracted\n" in out_without_condition
    )
    assert "unconditional" not in out_without_condition


def test_unconditional_input_is_shown_for_both_sentences(capsys, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'description = "d"\nsource = "s"\n[conditional]\ntext = "{sentence} {condition}"\n'
        '[unconditional]\ntext = "{sentence}"\n'
    )
    inputs = select(show_json(capsys, "mine.toml"), "part", "sentence", "text")[2:]
    assert inputs == [
        ("unconditional", 1, TRAIN.sentence1[0]),
        ("unconditional", 2, TRAIN.sentence2[0]),
    ]


def test_row_of_a_single_file_is_looked_up_in_all_splits(capsys, write_rows, small_rows):
    data = write_rows(small_rows)
    splits = read_dataset(str(data)).splits
    for name, rows in splits.items():
        number = int(rows.number[0])
        report = show_json(capsys, "separate", "--data", data, "--row", number)
        assert (report["split"], report["row"]) == (name, number)
        assert report["sentence1"] == small_rows[number - 1][0]
    number = int(splits["dev"].number[0])
    line = show_error(capsys, "separate", "--data", data, "--split", "test", "--row", number)
    assert f"no row {number} in the test split of rows.csv" in line
    assert "It is in dev: --split dev." in line
    expected = read_dataset(str(data), seed=1).splits["dev"].number[0]
    report = show_json(capsys, "separate", "--data", data, "--split-seed", 1, "--split", "dev")
    assert report["row"] == expected


def test_markup_and_escapes_in_texts_are_not_interpreted(capsys, write_rows, tmp_path):
    sentence, condition = "[red]two[/red] :dog: \x1b[31m", "[bold]the\nplace[/bold]"
    rows = [(sentence, f"s{i}", condition, 3) for i in range(6)]
    data = write_rows(rows)
    out = show_text(capsys, "concat-sent-cond", "--data", data, "--row", 1, "--model", "minilm")
    assert r"text:        [red]two[/red] :dog: \x1b[31m [bold]the place[/bold]" in out
    assert "\x1b" not in out
    report = show_json(capsys, "concat-sent-cond", "--data", data, "--row", 1)
    assert report["inputs"][0]["text"] == f"{sentence} [bold]the place[/bold]"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["con"], ["unknown prompt 'con'", "'cond'", "llmcond prompts"]),
        (["mine.toml"], ["mine.toml does not exist"]),
        (["cond", "--row", "0"], ["no row 0 in the train split of train.csv", "1 to 2800"]),
        (["cond", "--row", "-4"], ["no row -4"]),
        (["cond", "--row", "402", "--split", "test"], None),
        (["cond", "--row", "601", "--split", "test"], ["test split of test.csv", "1 to 600"]),
        (["cond", "--row", "x"], ["invalid int value"]),
        (["cond", "--split", "tst"], ["--split is 'tst'", "'test'"]),
        (["cond", "--model", "minilm"], ["cond does not work with minilm", "takes none"]),
        (["pair-cond", "--model", "minilm", "--pooling", "cls"], ["--pooling mean"]),
        (["cond", "--pooling", "mean"], ["Name it with --model NAME"]),
        (["cond", "--model", "minilmm"], ["unknown model 'minilmm'"]),
        (["cond", "--data", "no.csv"], ["no.csv"]),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(capsys, arguments, expected):
    if expected is None:
        show_json(capsys, *arguments)
        return
    line = show_error(capsys, *arguments)
    assert all(text in line for text in expected), line


def test_missing_split_is_reported(capsys, write_rows, small_rows):
    for name in ("train", "dev"):
        write_rows(small_rows, f"data/{name}.csv")
    line = show_error(capsys, "cond", "--data", "data", "--split", "test")
    assert "data has no test split; it has train, dev." in line
    # Each file has its own row numbers, so other files are not searched.
    assert "no row 99" in show_error(capsys, "cond", "--data", "data", "--row", "99")


def test_unknown_action_is_rejected(capsys):
    assert run(["prompts", "shw"]) == 2
    assert "'shw'. Did you mean 'show'?" in capsys.readouterr().err


def test_listing_names_controls_and_json_may_precede_show(capsys):
    assert run(["prompts", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["prompts"]}
    assert list(rows) == bundled_names("prompts")
    assert rows["control-shuffled"]["control"] == "shuffled"
    assert rows["control-no-condition"]["control"] == "left-out"
    assert rows["cond"]["control"] is None
    assert run(["prompts", "--format", "markdown"]) == 0
    assert "left-out" in capsys.readouterr().out
    assert run(["prompts"]) == 0
    table = capsys.readouterr().out
    assert "left-out" not in table
    assert all(row["description"][:20] in table for row in rows.values())
    assert run(["prompts", "--json", "show", "cond"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "cond"


def test_help_is_fast_and_imports_no_heavy_library():
    for arguments in (["prompts"], ["prompts", "show"]):
        command = [sys.executable, "-X", "importtime", "-m", "llmcond", *arguments, "--help"]
        start = os.times()
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        end = os.times()
        # Processor time is measured, as other tests run at the same time.
        assert end.children_user - start.children_user < 2
        for heavy in ("torch", "transformers", "numpy", "pydantic", "rich"):
            assert f"| {heavy}\n" not in process.stderr.replace("|   ", "| ")
        assert "show" in process.stdout


def test_preview_is_available_in_python(minilm):
    resolved = resolve("minilm", EncoderOptions(device="cpu"), identify=False)
    report = preview_prompt(load_prompt("eol"), read_dataset(None), "dev", 2, resolved)
    row = minilm._tokenizer([EncoderInput("", report["inputs"][1]["text"])])[0]
    assert report["inputs"][1]["tokens"] == minilm._tokenizer.strings(row)
