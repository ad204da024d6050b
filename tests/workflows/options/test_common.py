"""`--values` beside `--condition`, as a user runs it; index, search and serve have theirs."""

import pytest
from helpers.commands import ok, refused

import llmcond
from llmcond.cli import run

PAIR = ("two men play in the park", "children sit at the beach")
VALUES = ("park", "Paris, Texas")


@pytest.fixture
def command(tiny_run):
    return ("similarity", *PAIR, "--run", str(tiny_run), "--device", "cpu")


def test_similarity_is_that_under_the_condition_with_its_values(command, tiny_run, capsys):
    place, people = ("--condition", "the place"), ("--condition", "the number of people")
    both = (*place, *people, "--values", 'park, "Paris, Texas"', "--values", "")
    first, second = ok(capsys, *command, *both)["similarities"]
    assert (first["condition"], first["values"]) == ("the place", [*VALUES])
    assert set(second) == {"condition", "similarity"}
    embedder = llmcond.load_embedder(tiny_run, device="cpu")
    found = embedder.similarity(*PAIR, llmcond.Condition("the place", VALUES))
    assert first["similarity"] == pytest.approx(found, abs=1e-5)
    (plain,) = ok(capsys, *command, *place)["similarities"]
    assert abs(plain["similarity"] - first["similarity"]) > 1e-4
    # Whoever writes the same text out gets the same.
    written = ("--condition", "the place, such as park, Paris, Texas")
    (same,) = ok(capsys, *command, *written)["similarities"]
    assert same["similarity"] == first["similarity"]


def test_the_table_has_values_where_there_are_some(command, capsys):
    assert run([*command, "--condition", "the place", "--values", "park, beach"]) == 0
    shown = capsys.readouterr().out.split()
    assert shown[:3] == ["condition", "values", "similarity"]
    assert "park, beach" in " ".join(shown)
    assert run([*command, "--condition", "the place"]) == 0
    assert "values" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--values", "a", "--values", "b"), "there are 2 --values and 3 --condition. Give"),
        (("--values", "a, 'b"), "1 --values and 3 --condition"),
        (("--values", "a", "--values", 'b "', "--values", '"c'), "the values '\"c' cannot be read"),
        (("--values", ",".join(map(str, range(65))), "--values", "", "--values", ""), "at most 64"),
    ],
)
def test_wrong_values_are_refused_in_a_line(command, capsys, given, said):
    three = [word for one in "abc" for word in ("--condition", one)]
    assert said in refused(capsys, *command, *three, *given)
