"""Strict TOML: legal files become dataclasses, all others an error that helps."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers.paths import ROOT

from llmcond.bundled import bundled_names
from llmcond.config import STRICT, build, read_toml, resolve_toml
from llmcond.errors import UserError
from llmcond.heads.recipes import load_recipe
from llmcond.prompts import load_prompt


@dataclass(frozen=True)
class Inner:
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    width: int
    label: str = ""


@dataclass(frozen=True)
class Outer:
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT

    rate: float
    inner: Inner
    epochs: int = 3

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError("Epochs must be at least 1")


LEGAL = {"rate": 0.5, "inner": {"width": 4}}


def test_legal_values_become_nested_dataclasses_with_defaults():
    assert build(Outer, LEGAL, "x.toml") == Outer(0.5, Inner(4, ""), 3)


def test_a_whole_number_is_a_legal_float():
    assert build(Outer, {**LEGAL, "rate": 2}, "x.toml").rate == 2.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**LEGAL, "epoch": 1}, ["'epoch'", "Did you mean 'epochs'", "rate, inner, epochs"]),
        ({**LEGAL, "zzz": 1}, ["unknown key 'zzz'", "Legal keys: rate, inner, epochs"]),
        ({"rate": 1.0}, ["the key 'inner' is missing", "rate, inner, epochs"]),
        (
            {**LEGAL, "inner": {"width": 1, "widht": 2}},
            ["unknown key 'inner.widht'", "Did you mean 'width'", "Legal keys: width, label."],
        ),
        (
            {**LEGAL, "inner": {}},
            ["the key 'inner.width' is missing", "Legal keys: width, label."],
        ),
        ({**LEGAL, "inner": {"width": "4"}}, ["'inner.width' is '4'", "integer"]),
        ({**LEGAL, "inner": 4}, ["'inner' is 4"]),
        ({**LEGAL, "rate": "fast"}, ["'rate' is 'fast'", "number"]),
        ({**LEGAL, "rate": True}, ["'rate' is True", "number"]),
        ({**LEGAL, "rate": float("nan")}, ["'rate' is nan", "finite"]),
        ({**LEGAL, "rate": float("inf")}, ["'rate' is inf", "finite"]),
        ({**LEGAL, "epochs": 2.0}, ["'epochs' is 2.0", "integer"]),
        ({**LEGAL, "rate": datetime.date(2024, 1, 1)}, ["date", "not JSON serializable"]),
        ({"inner": {"width": 1}, "zzz": 1}, ["the key 'rate' is missing", "unknown key 'zzz'"]),
    ],
)
def test_illegal_values_are_named_with_what_is_legal(values: dict[str, Any], words: list[str]):
    with pytest.raises(UserError) as caught:
        build(Outer, values, "x.toml")
    message = str(caught.value)
    assert message.startswith("x.toml: ")
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_value_the_dataclass_refuses_is_explained_in_its_own_words():
    with pytest.raises(UserError, match="epochs must be at least 1"):
        build(Outer, {**LEGAL, "epochs": 0}, "x.toml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"dim = ", "cannot be read as TOML"),
        (b"a = 1\na = 2\n", "cannot be read as TOML"),
        (b'text = "caf\xe9"\n', "not UTF-8"),
        (b"a = " + 5_000 * b"[", "cannot be read as TOML: maximum recursion"),
    ],
)
def test_a_file_that_is_no_toml_is_a_user_error(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)


def test_values_nested_too_deep_and_long_ones_are_told_in_short(tmp_path: Path):
    path = tmp_path / "x.toml"
    path.write_text(f"dim{5_000 * '.a'} = 1\n")
    with pytest.raises(UserError, match="recursion"):
        build(Outer, read_toml(path), "x.toml")
    with pytest.raises(UserError, match="'epochs' is 'aaa") as caught:
        build(Outer, {**LEGAL, "epochs": "a" * 1_000_000}, "x.toml")
    assert len(str(caught.value)) < 200


def test_a_missing_file_and_a_folder_are_user_errors(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        read_toml(tmp_path / "x.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path)


@pytest.mark.parametrize("kind", ["prompts", "heads"])
def test_names_are_found_among_the_bundled_files(kind: str):
    files = list((ROOT / kind).glob("*.toml"))
    assert bundled_names(kind) == sorted(path.stem for path in files)
    for path in files:
        assert resolve_toml(path.stem, kind).read_bytes() == path.read_bytes()


def test_a_path_is_taken_as_it_is(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.touch()
    assert resolve_toml(str(path), "heads") == path


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("mpl", "heads", ["unknown head 'mpl'", "Did you mean 'mlp'", "llmcond heads"]),
        ("zzzz", "heads", ["unknown head 'zzzz'", "ica, linear, mlp, none, pca"]),
        ("concat-sent", "prompts", ["unknown prompt", "'concat-sent-cond'", "llmcond prompts"]),
        ("nowhere/mlp.toml", "heads", ["the head file nowhere/mlp.toml does not exist"]),
        ("../heads/mlp", "heads", ["unknown head '../heads/mlp'"]),
    ],
)
def test_unknown_names_and_paths_are_user_errors(name: str, kind: str, words: list[str]):
    with pytest.raises(UserError) as caught:
        resolve_toml(name, kind)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("path", sorted((ROOT / "prompts").glob("*.toml")), ids=lambda p: p.stem)
def test_every_bundled_prompt_loads_and_says_where_it_comes_from(path: Path):
    prompt = load_prompt(path.stem)
    assert prompt.name == path.stem
    assert prompt.description
    assert prompt.source


@pytest.mark.parametrize("path", sorted((ROOT / "heads").glob("*.toml")), ids=lambda p: p.stem)
def test_every_bundled_head_loads_with_the_settings_its_file_states(path: Path):
    recipe = load_recipe(path.stem)
    stated = read_toml(path)
    assert (recipe.name, recipe.kind) == (path.stem, stated["kind"])
    assert (recipe.description, recipe.source) == (stated["description"], stated["source"])
    assert dict(recipe.finetune) == stated.pop("finetune", {})
    settings = recipe.to_json()["settings"]
    assert {key: settings[key] for key in stated if key in settings} == {
        key: value for key, value in stated.items() if key not in {"kind", "description", "source"}
    }


def test_an_unknown_key_in_a_head_file_lists_the_settings_of_its_kind(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "pca"\ndescription = "d"\nsource = "s"\ndimension = 3\n')
    with pytest.raises(UserError, match=r"unknown key 'dimension'.*\bdim\b"):
        load_recipe(str(path))
