"""Heads of dense layers in NumPy: the same embeddings and errors as in torch."""

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from llmcond.errors import LlmcondError, UserError
from llmcond.heads import FittedHead, PairArrays, fit_recipe, load_head, load_recipe, save_head
from llmcond.heads.numpy_heads import DENSE_KINDS, NumpyHead
from llmcond.heads.storage import load_embedding_head

pytestmark = pytest.mark.usefixtures("one_thread")

DIM = 12
SHORT = {"epochs": 1, "batch_size": 16}
HEADS = {
    "none": ("none", {}),
    "linear": ("linear", {"dim": 5, **SHORT}),
    "mlp": ("mlp", {"dim": 5, **SHORT}),
    **{
        f"mlp-{activation}": ("mlp", {"dim": 5, "activation": activation, "depth": 3, **SHORT})
        for activation in ("gelu", "tanh", "none")
    },
    "mlp-last-none": ("mlp", {"dim": 5, "hidden": 9, "last": "none", **SHORT}),
    "mlp-members": ("mlp", {"dim": 5, "members": 3, **SHORT}),
    "linear-members": ("linear", {"dim": 5, "members": 2, **SHORT}),
    **{kind: (kind, {"dim": 5}) for kind in ("pca", "ica", "whitening", "random")},
}


@pytest.fixture
def pairs():
    rng = np.random.default_rng(0)
    # The mean of the features is larger than their spread.
    first, second = (rng.normal(size=(2, 60, DIM)) + 3).astype(np.float32)
    return PairArrays(first, second, rng.uniform(size=60))


def save_fitted_head(folder, pairs, name):
    recipe, changes = HEADS[name]
    head = load_recipe(recipe).with_settings(changes, "test")
    save_head(fit_recipe(head, pairs, pairs, 0, lambda *_: None), folder, {})
    return folder


def test_every_dense_kind_is_compared():
    assert {load_recipe(recipe).kind for recipe, _ in HEADS.values()} == set(DENSE_KINDS)


@pytest.mark.parametrize("name", HEADS)
def test_numpy_head_equals_fitted_head(name, pairs, tmp_path):
    fitted, description = load_head(save_fitted_head(tmp_path, pairs, name))
    numpy_head, numpy_description = load_embedding_head(tmp_path)
    assert isinstance(numpy_head, NumpyHead)
    assert numpy_description == description
    for attribute in (
        "kind settings dim_in dim_condition dim_out features conditioned is_identity "
        "generates_matrices compares_by_cosine"
    ).split():
        assert getattr(numpy_head, attribute) == getattr(fitted, attribute), attribute
    sides = []
    for features in (pairs.first, pairs.second):
        expected, actual = fitted.transform(features), numpy_head.transform(features)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
        sides.append(actual)
    np.testing.assert_array_equal(numpy_head.compare(*sides), fitted.compare(*sides))
    assert numpy_head.transform(pairs.first[:0]).shape == (0, fitted.dim_out)
    assert numpy_head.tensors.keys() == fitted.tensors.keys()


@pytest.mark.parametrize("name", ["linear", "mlp-last-none", "mlp-gelu", "pca"])
def test_dense_layers_equal_those_of_fitted_head(name, pairs, tmp_path):
    fitted, _ = load_head(save_fitted_head(tmp_path, pairs, name))
    numpy_head, _ = load_embedding_head(tmp_path)
    for expected, layer in zip(fitted.dense_layers(), numpy_head.dense_layers(), strict=True):
        assert layer.activation == expected.activation
        np.testing.assert_allclose(layer.weight, expected.weight, atol=1e-5)
        if layer.mean is not None:
            np.testing.assert_allclose(-layer.weight @ layer.mean, expected.bias, atol=1e-5)


def test_ensemble_has_no_dense_layers(pairs, tmp_path):
    assert (
        load_embedding_head(save_fitted_head(tmp_path, pairs, "mlp-members"))[0].dense_layers()
        is None
    )


def test_other_kinds_are_loaded_with_torch(pairs, tmp_path):
    recipe = load_recipe("hadamard").with_settings(SHORT, "test")
    conditioned = PairArrays(pairs.first, pairs.second, pairs.rating, pairs.first)
    save_head(fit_recipe(recipe, conditioned, None, 0, lambda *_: None), tmp_path, {})
    assert isinstance(load_embedding_head(tmp_path)[0], FittedHead)


def collect_errors(folder):
    """Return the types and messages of NumPy's and torch's errors, without library details."""
    raised = []
    for load in (load_embedding_head, load_head):
        with pytest.raises(LlmcondError) as error:
            load(folder)
        raised.append((type(error.value), str(error.value).partition(" (")[0]))
    return raised


@pytest.mark.parametrize(
    "arguments", [(np.zeros((7, DIM + 1)),), (np.zeros((7, DIM)), np.ones((7, DIM)))]
)
def test_mismatched_features_raise_same_error(arguments, pairs, tmp_path):
    folder = save_fitted_head(tmp_path, pairs, "linear")
    raised = []
    for load in (load_embedding_head, load_head):
        with pytest.raises(UserError) as error:
            load(folder)[0].transform(*arguments)
        raised.append(str(error.value))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"format": None},
        {"dim_in": 2**40},
        {"dim_in": 2**24},
        {"kind": "hypernat"},
        {"kind": "mlp"},
        {"kind": 3},
        {"settings": {"dim": 4}},
        {"weights_sha256": "0" * 64},
    ],
)
def test_invalid_description_raises_same_error(changes, pairs, tmp_path):
    path = save_fitted_head(tmp_path, pairs, "linear") / "head.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    numpy_error, torch_error = collect_errors(tmp_path)
    assert numpy_error == torch_error


@pytest.mark.parametrize("name", ["linear", "mlp", "mlp-members", "pca"])
@pytest.mark.parametrize("damage", ["cut", "scalar", "missing", "more", "renamed"])
def test_invalid_tensors_raise_same_error(name, damage, pairs, tmp_path):
    (path,) = save_fitted_head(tmp_path, pairs, name).glob("head-*.safetensors")
    tensors = load_file(path)
    first = next(iter(tensors))
    if damage == "cut":
        tensors[first] = np.ascontiguousarray(tensors[first][..., :-1])
    elif damage == "scalar":
        tensors[first] = np.float32(1)[None]
    elif damage == "missing":
        del tensors[first]
    elif damage == "more":
        tensors["more"] = tensors[first]
    else:
        tensors["renamed"] = tensors.pop(first)
    weights = save(tensors)
    digest = hashlib.sha256(weights).hexdigest()
    (tmp_path / f"head-{digest[:16]}.safetensors").write_bytes(weights)
    record = json.loads((tmp_path / "head.json").read_text())
    (tmp_path / "head.json").write_text(json.dumps({**record, "weights_sha256": digest}))
    numpy_error, torch_error = collect_errors(tmp_path)
    assert numpy_error == torch_error
    assert "does not hold the parameters" in numpy_error[1]
