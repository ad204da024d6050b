"""Options of an encoder: told once, checked where they are made, and keyword arguments."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

import llmcond
from llmcond.encoders import EncoderOptions
from llmcond.encoders.settings import CHOICES, MODEL_SETTINGS, STATED, EncoderIdentity
from llmcond.errors import LlmcondError, UserError
from llmcond.options import declaration_of


def test_load_encoder_takes_every_option_by_keyword():
    parameters = list(inspect.signature(llmcond.load_encoder).parameters.values())
    assert parameters[0].name == "model"
    assert [p.name for p in parameters[1:]] == [field.name for field in fields(EncoderOptions)]
    assert {p.kind for p in parameters[1:]} == {inspect.Parameter.KEYWORD_ONLY}
    for field in fields(EncoderOptions):
        assert f"{field.name}: {declaration_of(field).help}" in llmcond.load_encoder.__doc__


@pytest.mark.parametrize("name", ["weights", "quantize", "instruction_format", "attention"])
def test_a_record_without_what_all_have_is_damaged(name):
    options = {"dtype": "float32", "quantize": "none", "pooling": "mean", "max_length": 8}
    options |= {"normalize": True, "instruction_format": "", "attention": "bidirectional"}
    recorded = EncoderIdentity(weights="sha256:0", **options).to_json()
    assert EncoderIdentity.from_json(recorded, "run.json").to_json() == recorded
    del recorded[name]
    with pytest.raises(
        LlmcondError, match=rf"run\.json has no valid encoder identity: '{name}' is missing"
    ):
        EncoderIdentity.from_json(recorded, "run.json")


@pytest.mark.parametrize("name", CHOICES)
def test_values_that_are_not_legal_are_one_clear_line(name):
    for value in CHOICES[name]:
        assert getattr(EncoderOptions(**{name: value}), name) == value
    with pytest.raises(UserError, match=rf"{name} is 'flot32'.* Legal: .*{CHOICES[name][-1]}\."):
        EncoderOptions(**{name: "flot32"})


def test_no_quantisation_has_two_spellings():
    assert EncoderOptions(quantize=None) == EncoderOptions(quantize="none") == EncoderOptions()


def test_settings_of_a_model_are_those_that_training_has_always_recorded():
    routers = {
        "router": str, "router_mode": str, "router_layers": int, "router_strength": float,
    }  # fmt: skip
    # Those of a router are recorded since there are any, and where there is one.
    assert routers.items() <= MODEL_SETTINGS.items()
    assert not set(STATED) & set(routers)
    assert [(name, MODEL_SETTINGS[name]) for name in STATED] == [
        ("pooling", str),
        ("attention", str),
        ("pool_over", str),
        ("normalize", bool),
        ("max_length", int),
        ("instruction_format", str),
        ("special_tokens", str),
    ]


def test_options_import_no_large_library():
    code = (
        "import sys, llmcond.encoders.settings\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
