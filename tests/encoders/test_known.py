"""Definition files of known models: valid values, order, and unknown keys."""

import pytest

from llmcond.encoders import MODELS, EncoderOptions
from llmcond.encoders.known import find_model, known_names, read_model
from llmcond.encoders.spec import POOLINGS


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_values_of_known_models_are_valid(model):
    settings = model.all_settings
    assert EncoderOptions.of(settings).attention == settings["attention"]
    assert settings["attention"] is not None
    assert model.poolings
    assert set(model.poolings) <= POOLINGS.keys()
    assert isinstance(model.architecture["model_type"], str)
    assert {type(model.dim), type(model.n_parameters)} == {int}
    assert find_model(model.name.upper()) is model


def test_known_names_are_unique_and_begin_with_minilm():
    assert known_names()[:3] == [
        "minilm",
        "sentence-transformers/all-MiniLM-L6-v2",
        "nvidia/NV-Embed-v2",
    ]
    assert len(set(known_names())) == len(known_names()) == len(MODELS) + 1


@pytest.mark.parametrize("text", ['licence = "MIT"', "poolings = []\ndimension = 3"])
def test_file_with_missing_or_unknown_keys_is_rejected(tmp_path, text):
    (tmp_path / "custom.toml").write_text(text)
    with pytest.raises((KeyError, TypeError), match=r"poolings|dimension"):
        read_model(tmp_path / "custom.toml")
