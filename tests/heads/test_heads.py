"""Projections, recipes, heads in NumPy, and saved heads."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
import torch
from helpers.heads import fit, ignore_progress, make_recipe, tensors
from safetensors.numpy import load_file, save

import llmcond.heads.storage
from llmcond.base.errors import LlmcondError, UserError
from llmcond.heads import (
    FittedHead,
    PairArrays,
    cosine,
    fit_recipe,
    load_head,
    load_recipe,
    save_head,
)
from llmcond.heads.numpy_heads import DenseLayer, NumpyHead, apply_layers
from llmcond.heads.recipes import parse_settings
from llmcond.heads.storage import load_embedding_head

pytestmark = pytest.mark.usefixtures("one_thread")

DIM = 12
SHORT = {"epochs": 1, "batch_size": 16}
HEADS = {
    "none": ("none", {}),
    "linear": ("linear", {"dim": 5, "matryoshka": [3, 2], **SHORT}),
    "mlp": ("mlp", {"dim": 5, **SHORT}),
    "mlp-gelu": ("mlp", {"dim": 5, "activation": "gelu", "depth": 3, **SHORT}),
    "mlp-tanh": ("mlp", {"dim": 5, "activation": "tanh", "hidden": 9, "last": "none", **SHORT}),
    "mlp-members": ("mlp", {"dim": 5, "members": 3, **SHORT}),
    **{kind: (kind, {"dim": 5}) for kind in ("pca", "ica", "whitening", "random")},
}
PROJECTIONS = ["pca", "ica", "whitening", "random"]


def make_pairs(n=60, seed=0):
    """Make rated pairs of vectors whose mean is larger than their spread."""
    rng = np.random.default_rng(seed)
    scales = np.arange(1, DIM + 1)
    first, second = (scales * (rng.normal(size=(2, n, DIM)) + 3)).astype(np.float32)
    return PairArrays(first, second, rng.uniform(size=n))


PAIRS = make_pairs()
VECTORS = np.concatenate([PAIRS.first, PAIRS.second])


# -- projections -------------------------------------------------------------------------------


def test_pca_and_random_projection_equal_scikit_learn():
    from sklearn.decomposition import PCA
    from sklearn.random_projection import GaussianRandomProjection

    head, reference = fit("pca", PAIRS, dim=5), PCA(5, svd_solver="full").fit(VECTORS)
    np.testing.assert_allclose(
        head.transform(PAIRS.first), reference.transform(PAIRS.first), atol=1e-3
    )
    explained = reference.explained_variance_ratio_.sum()
    assert head.fit.record["explained_variance"] == pytest.approx(explained, rel=1e-4)
    head = fit("random", PAIRS, seed=3, dim=5)
    reference = GaussianRandomProjection(5, random_state=3).fit(VECTORS)
    np.testing.assert_allclose(
        head.transform(PAIRS.first), reference.transform(PAIRS.first), rtol=1e-4, atol=1e-3
    )


def test_whitening_gives_leading_components_unit_variance():
    head, principal = (fit(kind, PAIRS, dim=5).transform(VECTORS) for kind in ("whitening", "pca"))
    np.testing.assert_allclose(head.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.cov(head.T), np.eye(5), atol=1e-4)
    correlations = np.abs(np.corrcoef(head.T, principal.T)[:5, 5:])
    np.testing.assert_allclose(correlations, np.eye(5), atol=1e-3)


def test_ica_finds_planted_sources():
    rng = np.random.default_rng(3)
    sources = rng.uniform(-1, 1, size=(4_000, 3)) ** 3
    mixed = (sources @ rng.normal(size=(3, 3))).astype(np.float32)
    pairs = PairArrays(mixed[:2_000], mixed[2_000:], rng.uniform(size=2_000))
    head = fit("ica", pairs, dim=3)
    correlations = np.abs(np.corrcoef(head.transform(mixed).T, sources.T)[:3, 3:])
    assert head.fit.record["converged"]
    assert correlations.max(axis=1).min() > 0.99
    assert sorted(correlations.argmax(axis=1)) == [0, 1, 2]
    head = fit("ica", PAIRS, dim=10, max_iterations=1)
    assert (head.fit.record["converged"], head.fit.record["iterations"]) == (False, 1)
    assert "after 1 iterations (try max_iterations=2" in head.fit.notes[0]


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_projections_depend_on_training_vectors_and_seed_only(kind):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    head = fit(kind, PAIRS, dim=4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # noqa: NPY002
    unrated = replace(PAIRS, rating=np.full(len(PAIRS), 0.5))
    np.random.seed(2)  # noqa: NPY002
    assert tensors(head) == tensors(fit(kind, unrated, make_pairs(20, seed=1), dim=4))
    assert head.fit.record["selected_on"] is None
    with pytest.raises(UserError, match="all 0 training vectors are equal"):
        fit(kind, PAIRS.take(np.arange(0)), dim=1)
    with pytest.raises(UserError, match=r"dim is 13, but the features have 12.*dim to 12 or less"):
        fit(kind, PAIRS, dim=DIM + 1)
    if kind != "random":
        with pytest.raises(UserError, match=r"at least 7 training vectors; there are 6.*dim to 6"):
            fit(kind, PAIRS.take(np.arange(3)), dim=7)


def test_cosine_equals_its_definition():
    first, second = PAIRS.first, PAIRS.second
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    np.testing.assert_allclose(
        cosine(first, second), (first * second).sum(axis=1) / norms, atol=1e-6
    )
    zeros = np.array([[0, 0], [1, 2], [0, 0]], dtype=np.float32)
    np.testing.assert_array_equal(cosine(zeros, zeros[[1, 0, 0]]), [0, 0, 0])
    for value in (1e-25, 1e25):
        vector = np.full((1, 3), value, dtype=np.float32)
        assert cosine(vector, vector)[0] == pytest.approx(1)


# -- recipes -----------------------------------------------------------------------------------


def test_invalid_settings_are_rejected():
    cases = [
        ("mlp", {"dimm": 4}, "unknown key 'dimm'.*Did you mean 'dim'"),
        ("mlp", {"dim": "4"}, "'dim' is '4'"),
        ("mlp", {"dropout": 1.0}, "'dropout' is 1.0: .*below 1"),
        ("mlp", {"learning_rate": 0.0}, "'learning_rate' is 0.0: .*above 0"),
        *(
            ("mlp", {key: 0}, f"'{key}' is 0: .*at least 1")
            for key in ("dim", "epochs", "batch_size", "patience", "depth", "members")
        ),
        ("mlp", {"matryoshka": [4, 0]}, "'matryoshka.1' is 0: .*at least 1"),
        ("ica", {"tolerance": 0.0}, "'tolerance' is 0.0: .*above 0"),
        ("concat", {"features": "sentence"}, "'separate', 'joint' or 'both'"),
        ("hypernet", {"rank": -1}, "'rank' is -1: .*at least 0"),
        ("hypernet-ablation", {"rank": 0}, "'rank' is 0: .*at least 1"),
        ("towers", {"dim": 5}, "'dim' is 5: .*multiple of 2"),
    ]
    for kind, changes, message in cases:
        with pytest.raises(UserError, match=message):
            make_recipe(kind, **changes)


def test_set_values_are_parsed_by_setting_types():
    changes = {"epochs": "7", "learning_rate": "1e-2", "dropout": "0", "matryoshka": "8,4"}
    settings = load_recipe("mlp").with_changes(changes, "--set").settings
    values = [getattr(settings, name) for name in changes]
    assert values == [7, 0.01, 0.0, (8, 4)]
    assert [type(value) for value in values] == [int, float, float, tuple]
    assert not load_recipe("concat").with_changes({"bias": "false"}, "--set").settings.bias
    for invalid, message in (
        ({"epoch": "7"}, r"--set: the head mlp has no setting 'epoch'. Did you mean 'epochs'"),
        ({"matryoshka": "8x4"}, "'matryoshka.0' is '8x4': it should be a whole number"),
        ({"last": "3"}, "'last' is '3': it should be 'same' or 'none'"),
        ({"objective": "mine"}, "objective is 'mine'; expected code as FILE.py:NAME"),
    ):
        with pytest.raises(UserError, match=message):
            load_recipe("mlp").with_changes(invalid, "--set")
    with pytest.raises(UserError, match=r"the head none has no setting 'dim'. Known: none"):
        load_recipe("none").with_changes({"dim": "4"}, "--vary")


def test_set_values_of_texts_are_not_parsed():
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        label: str = ""
        form: Literal["1", "2"] = "1"

    assert parse_settings(Settings, {"label": "1e3", "form": "2"}) == {"label": "1e3", "form": "2"}


def test_recipe_files_are_validated_and_named_after_their_file(tmp_path):
    path = tmp_path / "mine.toml"
    rest = '\ndescription = "d"\nsource = "s"'
    for text, message in (
        ('kind = "mlpp"' + rest, "there is no kind of head 'mlpp'.*'mlp'"),
        ('kind = "pca"' + rest, "the key 'dim' is missing"),
        ('kind = "regression"' + rest, "a regression head is the head of a cross-encoder"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_recipe(str(path))
    path.write_text(f'kind = "pca"{rest}\ndim = 3\n')
    loaded = load_recipe(str(path))
    assert loaded.path == str(path)
    assert loaded.to_json() == {
        "name": "mine", "description": "d", "source": "s", "kind": "pca", "settings": {"dim": 3},
    }  # fmt: skip
    with pytest.raises(UserError, match=r"unknown head 'linaer'. Did you mean 'linear'"):
        load_recipe("linaer")


# -- heads in NumPy ----------------------------------------------------------------------------


def save_fitted_head(folder, name, seed=5):
    kind, changes = HEADS[name]
    head = fit_recipe(make_recipe(kind, **changes), PAIRS, PAIRS, seed, ignore_progress)
    save_head(head, folder, {"prompt": "cond"})
    return head


@pytest.mark.parametrize("name", HEADS)
def test_loaded_heads_equal_fitted_head(name, tmp_path, monkeypatch):
    fitted = save_fitted_head(tmp_path / "head", name)
    loaded, description = load_head(tmp_path / "head")
    numpy_head, numpy_description = load_embedding_head(tmp_path / "head")
    assert isinstance(numpy_head, NumpyHead)
    assert numpy_description == description
    assert (description["prompt"], description["dim_out"]) == ("cond", fitted.dim_out)
    assert (loaded.seed, loaded.fit.record) == (5, fitted.fit.record)
    for attribute in (
        "kind settings dim_in dim_condition dim_out features conditioned is_identity "
        "generates_matrices compares_by_cosine"
    ).split():
        expected = getattr(fitted, attribute)
        assert getattr(numpy_head, attribute) == getattr(loaded, attribute) == expected, attribute
    transformed = fitted.transform(PAIRS.first)
    np.testing.assert_array_equal(loaded.transform(PAIRS.first), transformed)
    assert numpy_head.tensors.keys() == fitted.tensors.keys()
    monkeypatch.setattr("llmcond.heads.numpy_heads._BLOCK", 7)
    actual = numpy_head.transform(PAIRS.first)
    assert actual.dtype == np.float32
    tolerance = 1e-6 * np.abs(transformed).max()
    np.testing.assert_allclose(actual, transformed, rtol=0, atol=tolerance)
    similarity = numpy_head.similarity(PAIRS.first, PAIRS.second)
    expected = fitted.similarity(PAIRS.first, PAIRS.second)
    np.testing.assert_allclose(similarity, expected, atol=1e-5)
    assert numpy_head.transform(PAIRS.first[:0]).shape == (0, fitted.dim_out)


def test_heads_of_other_kinds_have_layers_under_one_condition(tmp_path):
    pairs = replace(PAIRS, condition=PAIRS.first[:, :5])
    condition = pairs.condition[:1]
    for kind, changes, linear in (
        ("hypernet-mse", {"dim": 4, "rank": 2, "activation": "relu"}, True),
        ("concat", {"dim": 4, "activation": "tanh"}, True),
        ("towers", {"dim": 4, "hidden": 3, "rank": 2}, False),
    ):
        head = fit(kind, pairs, **SHORT, **changes)
        layers = head.dense_layers(condition)
        assert (layers is not None) == linear
        for weight, bias, activation, _ in layers or []:
            layer = DenseLayer(weight.numpy(), None if bias is None else bias.numpy(), activation)
            transformed = head.transform(pairs.first, condition)
            values = apply_layers([layer], pairs.first)
            np.testing.assert_allclose(values, transformed, rtol=1e-3, atol=1e-4)
    save_head(head, tmp_path / "towers", {})
    assert isinstance(load_embedding_head(tmp_path / "towers")[0], FittedHead)
    save_fitted_head(tmp_path / "members", "mlp-members")
    assert load_embedding_head(tmp_path / "members")[0].dense_layers() is None


# -- saved heads -------------------------------------------------------------------------------


def find_weights(folder):
    (path,) = folder.glob("head-*.safetensors")
    return path


@pytest.fixture
def saved_head(tmp_path):
    save_head(fit("linear", PAIRS, **SHORT, dim=4), tmp_path / "head", {})
    return tmp_path / "head"


def assert_rejected(folder, message):
    """Check that torch and NumPy reject a head for the same reason, except for library details."""
    raised = []
    for load in (load_embedding_head, load_head):
        with pytest.raises(LlmcondError, match=message) as error:
            load(folder)
        raised.append((type(error.value), str(error.value).partition(" (")[0]))
    assert raised[0] == raised[1]


def test_changed_or_missing_weights_are_rejected(saved_head):
    path = find_weights(saved_head)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert_rejected(saved_head, r"is damaged: .*Fit the head again")
    path.unlink()
    assert_rejected(saved_head, "cannot be read: No such file")
    assert_rejected(saved_head.parent / "nothing", "does not exist")


def test_invalid_description_is_rejected(saved_head):
    path = saved_head / "head.json"
    description = json.loads(path.read_text())
    for changes, message in (
        ({"format": 3}, r"newer version of llmcond \(format 3.*Upgrade llmcond"),
        ({"seed": "0"}, r"was damaged: 'seed' is '0': it should be a whole number\. Fit"),
        ({"dim_in": 2**24}, "does not hold the parameters"),
        ({"fit": {"curve": [{"epoch": 1}]}}, r"the key 'fit\.curve\.0\.loss' is missing"),
        ({"kind": "mlp"}, "does not hold the parameters of a mlp head"),
        ({"settings": {"dim": 4}}, "the key 'dropout' is missing"),
        ({"weights_sha256": "0" * 64}, "cannot be read"),
    ):
        path.write_text(json.dumps({**description, **changes}))
        assert_rejected(saved_head, message)


@pytest.mark.parametrize("name", ["linear", "mlp-members", "pca"])
def test_tensors_of_another_head_are_rejected_despite_matching_digest(name, tmp_path):
    save_fitted_head(tmp_path, name)
    tensors = load_file(find_weights(tmp_path))
    first = next(iter(tensors))
    record = json.loads((tmp_path / "head.json").read_text())
    others = {key: value for key, value in tensors.items() if key != first}
    for damaged in (
        {**tensors, first: np.ascontiguousarray(tensors[first][..., :-1])},
        others,
        {**tensors, "more": tensors[first]},
        {**others, "renamed": tensors[first]},
    ):
        weights = save(damaged)
        digest = hashlib.sha256(weights).hexdigest()
        (tmp_path / f"head-{digest[:16]}.safetensors").write_bytes(weights)
        (tmp_path / "head.json").write_text(json.dumps({**record, "weights_sha256": digest}))
        assert_rejected(tmp_path, "does not hold the parameters")


@pytest.mark.parametrize("stop", range(4))
def test_interrupted_replacement_leaves_loadable_head(saved_head, monkeypatch, stop):
    """Whenever a save is killed, the old or the new head can be loaded; the next save cleans up."""
    changes, loaded_kinds, new_head = [], [], fit("pca", PAIRS, dim=2)

    def interrupt(original):
        def load_and_change(path, *arguments, **options):
            loaded_kinds.append(load_head(saved_head)[0].kind)
            changes.append(path)
            if len(changes) == stop:
                raise SystemExit
            return original(path, *arguments, **options)

        return load_and_change

    for name in ("replace", "unlink"):
        monkeypatch.setattr(type(saved_head), name, interrupt(getattr(type(saved_head), name)))
    with suppress(SystemExit):
        save_head(new_head, saved_head, {})
    monkeypatch.undo()
    assert loaded_kinds[0] == "linear"
    assert set(loaded_kinds) <= {"linear", "pca"}
    save_head(new_head, saved_head, {})
    assert len(list(saved_head.iterdir())) == 3


def test_reader_loads_new_head_if_writer_replaces_it(saved_head, monkeypatch):
    check_record = llmcond.heads.storage.check_record

    def replace_head(*arguments):
        monkeypatch.setattr(llmcond.heads.storage, "check_record", check_record)
        save_head(fit("pca", PAIRS, dim=2), saved_head, {})

    monkeypatch.setattr(llmcond.heads.storage, "check_record", replace_head)
    assert load_head(saved_head)[0].kind == "pca"
