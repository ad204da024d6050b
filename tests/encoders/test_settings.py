"""Encoder options: one definition, validation on creation, and use as keyword arguments."""

import inspect
import subprocess
import sys
from dataclasses import fields, replace

import pytest

import llmcond
from llmcond.encoders import EncoderOptions
from llmcond.encoders.settings import CHOICES, MODEL_SETTINGS, STATED, EncoderIdentity
from llmcond.errors import LlmcondError, UserError
from llmcond.options import declaration_of


def test_load_encoder_accepts_every_option_as_keyword():
    parameters = list(inspect.signature(llmcond.load_encoder).parameters.values())
    assert parameters[0].name == "model"
    assert [p.name for p in parameters[1:]] == [field.name for field in fields(EncoderOptions)]
    assert {p.kind for p in parameters[1:]} == {inspect.Parameter.KEYWORD_ONLY}
    for field in fields(EncoderOptions):
        assert f"{field.name}: {declaration_of(field).help}" in llmcond.load_encoder.__doc__


@pytest.mark.parametrize("name", ["weights", "quantize", "instruction_format", "attention"])
def test_identity_record_with_missing_key_is_rejected(name):
    options = {"dtype": "float32", "quantize": "none", "pooling": "mean", "max_length": 8}
    options |= {"normalize": True, "instruction_format": "", "attention": "bidirectional"}
    recorded = EncoderIdentity(weights="sha256:0", **options).to_json()
    assert EncoderIdentity.from_json(recorded, "run.json").to_json() == recorded
    del recorded[name]
    with pytest.raises(
        LlmcondError, match=rf"run\.json has no valid encoder identity: {name} is missing"
    ):
        EncoderIdentity.from_json(recorded, "run.json")


@pytest.mark.parametrize("name", CHOICES)
def test_invalid_value_reports_legal_values(name):
    for value in CHOICES[name]:
        assert getattr(EncoderOptions(**{name: value}), name) == value
    with pytest.raises(UserError, match=rf"{name} is 'flot32'.* Legal: .*{CHOICES[name][-1]}\."):
        EncoderOptions(**{name: "flot32"})


def test_each_router_weight_has_its_own_identity():
    options = {"dtype": "float32", "quantize": "none", "pooling": "mean", "max_length": 8}
    options |= {"normalize": True, "instruction_format": "", "attention": "bidirectional"}
    identity = EncoderIdentity(weights="sha256:0", router="csr", **options)
    changed = [replace(identity, router_weight=weight) for weight in ("only", "random")]
    assert len({identity.fingerprint, *(each.fingerprint for each in changed)}) == 3
    assert EncoderIdentity.from_json(changed[0].to_json(), "run.json") == changed[0]


def test_quantize_none_has_two_spellings():
    assert EncoderOptions(quantize=None) == EncoderOptions(quantize="none") == EncoderOptions()


def test_recorded_model_settings_are_unchanged():
    router_settings = {
        "router": str, "router_mode": str, "router_weight": str, "router_layers": int,
        "router_strength": float,
    }  # fmt: skip
    # Settings of a router are recorded only if the encoder has one.
    assert router_settings.items() <= MODEL_SETTINGS.items()
    assert not set(STATED) & set(router_settings)
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
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "[]\n"
