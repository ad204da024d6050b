"""The name of every output is checked before any work, for all commands and flags."""

import os
import shlex

import pytest
from helpers.commands import run_rejected

from llmcond.base.files import FIGURE_SUFFIXES, PAGE_SUFFIXES
from llmcond.base.options import flag_of, options_of
from llmcond.cli import _command, run
from llmcond.commands import COMMANDS

TABLES = (".parquet", ".csv")
#: An output of each kind: the other arguments, the flag and the legal suffixes; () is a folder,
#: and None a new folder.
OUTPUTS = [
    ("analyse", "--out", ()),
    ("annotate texts.csv --endpoint http://127.0.0.1:9/v1 --model m", "--out", (".csv",)),
    (
        "answers texts.csv --condition c --server http://127.0.0.1:9/v1 --model m",
        "--out",
        (".csv", ".jsonl", ".parquet"),
    ),
    ("cluster texts.csv --condition c", "--out", TABLES),
    ("cluster texts.csv --condition c", "--map", FIGURE_SUFFIXES),
    ("compare a b", "--report", PAGE_SUFFIXES),
    ("embed texts.csv --condition-text c", "--out", (*TABLES, ".npy")),
    ("explain text --condition c", "--out", (*PAGE_SUFFIXES, *FIGURE_SUFFIXES)),
    ("export --condition c", "--out", None),
    ("extract --model minilm", "--run", ()),
    ("train-cross --model minilm", "--run", ()),
    ("train-lora --model minilm --head mlp", "--run", ()),
]
#: Names that no file or folder can have, or where none can be written.
NOWHERE = ["link", "texts.csv/x", "/proc/x", "a\nb", "\ud800", "x" * 300]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.csv").write_text("text\na dog\n")
    for suffix in ("", *TABLES, *PAGE_SUFFIXES, *FIGURE_SUFFIXES, ".md", ".npy", ".jsonl"):
        (tmp_path / f"link{suffix}").symlink_to("nowhere")
        (tmp_path / f"full{suffix}").mkdir()
        (tmp_path / f"full{suffix}" / "file").touch()
    os.mkfifo("pipe.csv")
    return tmp_path


def wrong_names(flag, suffixes):
    if not suffixes:
        return ["texts.csv", *NOWHERE, *(["full"] if suffixes is None else [])]
    names = [*(f"{name}{suffixes[-1]}" for name in NOWHERE), f"full{suffixes[-1]}", "x.xyz", "x.gz"]
    if ".csv" in suffixes:
        names += ["pipe.csv"]
    return names if ".npy" in suffixes else [*names, "x"]


@pytest.mark.parametrize(("command", "flag", "suffixes"), OUTPUTS)
def test_output_that_cannot_be_written_is_reported_before_any_work(
    capsys, folder, command, flag, suffixes
):
    before = sorted(str(path) for path in folder.rglob("*"))
    for name in wrong_names(flag, suffixes):
        message = run_rejected(capsys, *shlex.split(command), flag, name)
        expected = ["link to nowhere" if "link" in name else name.partition(".")[0][:40]]
        if not name.isprintable():
            expected = ["control character", "half of a surrogate pair", "NUL"]
        assert any(text in message for text in expected), message
        assert len(message) < 700
    if "texts.csv" in command and ".csv" in (suffixes or ()):
        message = run_rejected(capsys, *shlex.split(command), flag, "texts.csv")
        assert message == "texts.csv is an input of the same command; name another file."
    assert sorted(str(path) for path in folder.rglob("*")) == before


def test_answers_and_ranges_are_inputs_of_embed(capsys, folder):
    (folder / "ranges.npy").touch()
    (folder / "more.csv").write_text("text\na dog\n")
    command = ("embed", "more.csv", "--condition-text", "the animal", "--out")
    for flag, name in (("--answers", "texts.csv"), ("--ranges", "ranges.npy")):
        precision = () if flag == "--answers" else ("--precision", "int8")
        message = run_rejected(capsys, *command, name, flag, name, *precision)
        assert message == f"{name} is an input of the same command; name another file."


def test_all_outputs_are_checked():
    names = ("out", "report", "plot", "plot_steps", "predictions", "figures")
    unchecked = {
        (command, flag_of(name))
        for command in COMMANDS
        for name, _, spec in options_of(_command(command))
        if spec.writes is None and name in names
    }
    # The output of embed is checked when its kind is known.
    assert unchecked == {("embed", "--out")}


def test_links_to_files_and_empty_folders_are_written_through(tiny_run, folder):
    (folder / "real").mkdir()
    (folder / "old.csv").touch()
    (folder / "TO.CSV").symlink_to("old.csv")
    (folder / "to").symlink_to("real")
    flags = ("--run", str(tiny_run), "--condition", "the animal")
    assert run(["embed", "texts.csv", "--out", "TO.CSV", *flags]) == 0
    assert (folder / "TO.CSV").is_symlink()
    assert "embedding" in (folder / "old.csv").read_text()
    assert run(["export", "--out", "to", *flags]) == 0
    assert (folder / "to").is_symlink()
    assert (folder / "real" / "modules.json").is_file()
