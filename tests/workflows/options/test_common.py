"""``--values`` with ``--condition``; index, search and serve have their own tests."""

import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.cli import run

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
