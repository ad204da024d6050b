"""Strict TOML: valid files become dataclasses, invalid files cause helpful errors."""

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


VALID_VALUES = {"rate": 0.5, "inner": {"width": 4}}


def test_valid_values_become_nested_dataclasses_with_defaults():
    assert build(Outer, VALID_VALUES, "x.toml") == Outer(0.5, Inner(4, ""), 3)


def test_integer_is_valid_float():
    assert build(Outer, {**VALID_VALUES, "rate": 2}, "x.toml").rate == 2.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**VALID_VALUES, "epoch": 1}, ["'epoch'", "Did you mean 'epochs'", "rate, inner, epochs"]),
        ({**VALID_VALUES, "zzz": 1}, ["unknown key 'zzz'", "Legal keys: rate, inner, epochs"]),
        ({"rate": 1.0}, ["the key 'inner' is missing", "rate, inner, epochs"]),
        (
            {**VALID_VALUES, "inner": {"width": 1, "widht": 2}},
            ["unknown key 'inner.widht'", "Did you mean 'width'", "Legal keys: width, label."],
        ),
        (
            {**VALID_VALUES, "inner": {}},
            ["the key 'inner.width' is missing", "Legal keys: width, label."],
        ),
        ({**VALID_VALUES, "inner": {"width": "4"}}, ["'inner.width' is '4'", "integer"]),
        ({**VALID_VALUES, "inner": 4}, ["'inner' is 4"]),
        ({**VALID_VALUES, "rate": "fast"}, ["'rate' is 'fast'", "number"]),
        ({**VALID_VALUES, "rate": True}, ["'rate' is True", "number"]),
        ({**VALID_VALUES, "rate": float("nan")}, ["'rate' is nan", "finite"]),
        ({**VALID_VALUES, "rate": float("inf")}, ["'rate' is inf", "finite"]),
        ({**VALID_VALUES, "epochs": 2.0}, ["'epochs' is 2.0", "integer"]),
        ({**VALID_VALUES, "rate": datetime.date(2024, 1, 1)}, ["date", "not JSON serializable"]),
        ({"inner": {"width": 1}, "zzz": 1}, ["the key 'rate' is missing", "unknown key 'zzz'"]),
    ],
)
def test_invalid_value_error_names_valid_alternatives(values: dict[str, Any], words: list[str]):
    with pytest.raises(UserError) as error:
        build(Outer, values, "x.toml")
    message = str(error.value)
    assert message.startswith("x.toml: ")
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_error_of_dataclass_is_reported():
    with pytest.raises(UserError, match="epochs must be at least 1"):
        build(Outer, {**VALID_VALUES, "epochs": 0}, "x.toml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"dim = ", "cannot be read as TOML"),
        (b"a = 1\na = 2\n", "cannot be read as TOML"),
        (b'text = "caf\xe9"\n', "not UTF-8"),
        (b"a = " + 5_000 * b"[", "cannot be read as TOML: maximum recursion"),
    ],
)
def test_invalid_toml_is_a_user_error(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        read_toml(path)
    assert str(path) in str(error.value)


def test_deeply_nested_and_long_values_are_reported_briefly(tmp_path: Path):
    path = tmp_path / "x.toml"
    path.write_text(f"dim{5_000 * '.a'} = 1\n")
    with pytest.raises(UserError, match="recursion"):
        build(Outer, read_toml(path), "x.toml")
    with pytest.raises(UserError, match="'epochs' is 'aaa") as error:
        build(Outer, {**VALID_VALUES, "epochs": "a" * 1_000_000}, "x.toml")
    assert len(str(error.value)) < 200


def test_missing_file_and_folder_are_user_errors(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        read_toml(tmp_path / "x.toml")
    with pytest.raises(UserError, match="cannot be read"):
        read_toml(tmp_path)


@pytest.mark.parametrize("kind", ["prompts", "heads"])
def test_bundled_names_are_resolved(kind: str):
    files = list((ROOT / kind).glob("*.toml"))
    assert bundled_names(kind) == sorted(path.stem for path in files)
    for path in files:
        assert resolve_toml(path.stem, kind).read_bytes() == path.read_bytes()


def test_path_is_resolved_to_itself(tmp_path: Path):
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
    with pytest.raises(UserError) as error:
        resolve_toml(name, kind)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("path", sorted((ROOT / "prompts").glob("*.toml")), ids=lambda p: p.stem)
def test_bundled_prompt_has_description_and_source(path: Path):
    prompt = load_prompt(path.stem)
    assert prompt.name == path.stem
    assert prompt.description
    assert prompt.source


@pytest.mark.parametrize("path", sorted((ROOT / "heads").glob("*.toml")), ids=lambda p: p.stem)
def test_bundled_head_has_settings_of_its_file(path: Path):
    recipe = load_recipe(path.stem)
    content = read_toml(path)
    assert (recipe.name, recipe.kind) == (path.stem, content["kind"])
    assert (recipe.description, recipe.source) == (content["description"], content["source"])
    assert dict(recipe.finetune) == content.pop("finetune", {})
    settings = recipe.to_json()["settings"]
    assert {key: settings[key] for key in content if key in settings} == {
        key: value for key, value in content.items() if key not in {"kind", "description", "source"}
    }


def test_unknown_key_in_head_file_lists_settings_of_its_kind(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('kind = "pca"\ndescription = "d"\nsource = "s"\ndimension = 3\n')
    with pytest.raises(UserError, match=r"unknown key 'dimension'.*\bdim\b"):
        load_recipe(str(path))
