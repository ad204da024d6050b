"""Options that commands share: how texts are read, and ``--values`` with ``--condition``.

index, search and serve have their own tests of ``--values``.
"""

import io
import sys
from pathlib import Path

import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.cli import run
from llmcond.workflows.options.texts import ClusterOptions

PAIR = ("two men play in the park", "children sit at the beach")
VALUES = ("park", "Paris, Texas")


@pytest.fixture
def command(tiny_run):
    return ("similarity", *PAIR, "--run", str(tiny_run), "--device", "cpu")


def test_values_change_similarity_under_condition(command, tiny_run, capsys):
    location, people = ("--condition", "the place"), ("--condition", "the number of people")
    options = (*location, *people, "--values", 'park, "Paris, Texas"', "--values", "")
    first, second = run_json(capsys, *command, *options)["similarities"]
    assert (first["condition"], first["values"]) == ("the place", [*VALUES])
    assert set(second) == {"condition", "similarity"}
    embedder = llmcond.load_embedder(tiny_run, device="cpu")
    expected = embedder.similarity(*PAIR, llmcond.Condition("the place", VALUES))
    assert first["similarity"] == pytest.approx(expected, abs=1e-5)
    (without_values,) = run_json(capsys, *command, *location)["similarities"]
    assert abs(without_values["similarity"] - first["similarity"]) > 1e-4
    # A condition that contains the values as text gives the same similarity.
    full_condition = ("--condition", "the place, such as park, Paris, Texas")
    (equivalent,) = run_json(capsys, *command, *full_condition)["similarities"]
    assert equivalent["similarity"] == first["similarity"]


def test_table_has_values_column_if_any(command, capsys):
    assert run([*command, "--condition", "the place", "--values", "park, beach"]) == 0
    cells = capsys.readouterr().out.split()
    assert cells[:3] == ["condition", "values", "similarity"]
    assert "park, beach" in " ".join(cells)
    assert run([*command, "--condition", "the place"]) == 0
    assert "values" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--values", "a", "--values", "b"), "there are 2 --values and 3 --condition. Give"),
        (("--values", "a, 'b"), "1 --values and 3 --condition"),
        (("--values", "a", "--values", 'b "', "--values", '"c'), "the values '\"c' cannot be read"),
        (("--values", ",".join(map(str, range(65))), "--values", "", "--values", ""), "at most 64"),
    ],
)
def test_invalid_values_are_rejected(command, capsys, options, message):
    conditions = [word for text in "abc" for word in ("--condition", text)]
    assert message in run_rejected(capsys, *command, *conditions, *options)


# --- How texts are read -----------------------------------------------------------------------

SERVER = ("--endpoint", "http://127.0.0.1:9/v1", "--model", "none")
#: Commands that read texts, without the source.
READERS = {
    "embed": ("--out", "v.npy", "--condition-text", "the place"),
    "embed to a dataset": ("--out", "v.lance", "--condition-text", "the place"),
    "cluster": ("--condition", "the place"),
    "check-condition": ("--condition", "the place"),
    "index": ("--out", "index"),
    "annotate": (*SERVER, "--out", "rated.csv", "--propose", "2"),
}


@pytest.fixture(params=READERS)
def reader(request, tmp_path, monkeypatch):
    """The arguments of a command that reads texts, up to and after the source."""
    monkeypatch.chdir(tmp_path)
    return request.param.partition(" ")[0], READERS[request.param]


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (b"a\ncaf\xe9\n", (), "standard input is not UTF-8: byte 0xe9 in line 2 cannot be read."),
        (b"a\ncaf\xe9\n", ("--encoding", "ascii"), "standard input is not ascii: byte 0xe9"),
        (b"a\n\nb\n", (), "line 2 of standard input: text is empty. Correct"),
        (
            b"a\n<br>\n",
            ("--strip-html",),
            "line 2 of standard input: text is empty without its HTML",
        ),
        (b"<br>\n", ("--strip-html", "--skip-empty"), "the texts of all 1 rows are empty"),
        (b"text|n\na\n", ("--delimiter", "|"), "standard input line 2 has 1 field"),
        (b"a,b\nc,d\n", ("--text", "body"), "standard input has no column 'body'; it has 'a', 'b'"),
        (b"", (), "standard input is empty"),
    ],
)
def test_every_command_reads_standard_input_with_the_options(
    reader, capsys, monkeypatch, content, options, words
):
    name, arguments = reader
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert words in run_rejected(capsys, name, "-", *arguments, *options)
    assert not any(Path().iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--encoding", "cp125"), "--encoding is 'cp125', which is not an encoding of texts"),
        (("--encoding", "hex"), "--encoding is 'hex'"),
        (("--delimiter", ";;"), "--delimiter is ';;'; expected one character, such as ';', or tab"),
        (("--delimiter", ""), "--delimiter is ''"),
        (("--delimiter", '"'), "expected one character"),
    ],
)
def test_invalid_options_of_reading_are_refused_first(reader, capsys, options, words):
    name, arguments = reader
    Path("texts.csv").write_text("text\na\n")
    assert words in run_rejected(capsys, name, "texts.csv", *arguments, *options)


@pytest.mark.parametrize("delimiter", ["tab", "TAB", r"\t", "\t"])
def test_tab_is_named_in_several_ways(delimiter):
    options = ClusterOptions(texts=["a"], delimiter=delimiter)
    assert options.read_options().delimiter == "\t"
