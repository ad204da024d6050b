"""Guides: the map that is fitted on a few labelled vectors, and its file."""

import copy
import json

import numpy as np
import pytest
from helpers.vectors import normalize
from safetensors.numpy import save_file
from scipy.linalg import sqrtm
from sklearn.covariance import ledoit_wolf
from sklearn.linear_model import Ridge

from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.text import Condition
from llmcond.heads.guide import (
    Guides,
    apply_guides,
    fit_guide,
    fit_ignoring,
    guide_file,
    load_guides,
    save_guide,
)

RNG = np.random.default_rng(0)
#: Three classes that differ in two of 40 directions; the others are noise.
KINDS = np.arange(120) % 3
POINTS = (RNG.normal(size=(120, 40)) + 2 * np.eye(3, 40)[KINDS]).astype(np.float32)
LABELS = [f"kind {kind}" for kind in KINDS[:48]]


@pytest.fixture(scope="module")
def guide():
    return fit_guide(POINTS[:48], LABELS, source="labels.csv", digest="d")


def test_guide_equals_ridge_outputs_with_damped_residual(guide):
    points = normalize(POINTS).astype(np.float64)
    weights = Ridge(alpha=0.3).fit(points[:48], np.eye(3)[KINDS[:48]]).coef_.T
    weights /= np.linalg.norm(weights, 2)
    centred = points - points[:48].mean(axis=0)
    expected = normalize(np.hstack([centred @ weights, 0.3 * centred]))
    mapped = guide.transform(POINTS)
    assert (mapped.shape, mapped.dtype) == (POINTS.shape, np.float32)
    assert mapped @ mapped.T == pytest.approx(expected @ expected.T, abs=1e-4)
    labels = {f"kind {kind}": 16 for kind in range(3)}
    assert guide.to_json() == {"labels": labels, "source": "labels.csv"}


def test_guides_find_conditions_in_any_spelling(guide):
    guides = Guides({"the café": guide, None: guide})
    for spelling in ("the cafe\u0301", " The  CAFÉ", "the\u00a0café"):
        assert spelling in guides
        assert guides[spelling] is guide
    assert "the place" not in guides
    assert list(guides) == ["the café", None]
    guides["The Café "] = other = fit_guide(POINTS[:48], [*LABELS[:47], "x"])
    assert (len(guides), guides["the café"]) == (2, other)
    del guides["THE CAFÉ"]
    assert list(guides) == [None]
    assert copy.deepcopy(guides) == guides


def test_zero_and_equal_vectors_stay_finite(guide):
    vectors = np.array([POINTS[0], np.zeros(40)], dtype=np.float32)
    assert not guide.transform(vectors)[1].any()
    constant_guide = fit_guide(np.ones((4, 8)), ["a", "b", "a", "b"])
    assert np.isfinite(constant_guide.transform(RNG.normal(size=(5, 8)))).all()


def test_guide_maps_only_vectors_of_its_condition(guide):
    conditions = ["the kind", "the mood"] * 2
    mapped = apply_guides(POINTS[:4], conditions, {"the kind": guide})
    assert (mapped[1::2] == POINTS[1:4:2]).all()
    assert mapped[::2] == pytest.approx(guide.transform(POINTS[:4:2]), abs=1e-6)
    assert apply_guides(POINTS, conditions, {}) is POINTS
    with pytest.raises(UserError, match="maps embeddings of 40 dimensions, and these have 39"):
        apply_guides(POINTS[:4, :39], conditions, {"the kind": guide})
    basis = np.linalg.qr(RNG.normal(size=(40, 40)))[0].astype(np.float32)
    rotated = guide.change_basis(basis).transform(POINTS @ basis.T)
    assert rotated == pytest.approx(guide.transform(POINTS) @ basis.T, abs=1e-5)


def test_saved_guides_are_loaded_again(guide, tmp_path):
    assert load_guides(tmp_path / "none") == {}
    save_guide(guide, "the kind", tmp_path / "guides")
    save_guide(guide, "the mood", tmp_path / "guides")
    guides = load_guides(tmp_path / "guides")
    assert set(guides) == {"the kind", "the mood"}
    assert (guides["the kind"].transform(POINTS) == guide.transform(POINTS)).all()
    assert guides["the kind"].to_json() == guide.to_json()
    assert guides["the kind"].digest == guide.digest != fit_guide(POINTS[:48], LABELS).digest


def test_map_drops_directions_that_vary_more_under_another_condition():
    noise = np.hstack([np.zeros((120, 38)), 9 * RNG.normal(size=(120, 2))])
    target, other = normalize(POINTS), normalize(POINTS + noise)
    variances, directions = np.linalg.eigh(np.cov(other.T) - np.cov(target.T))
    assert (variances > 0.1 * variances[-1]).sum() == 2
    guide = fit_ignoring(target, {"the mood": other}, {})
    centred = target - target.mean(axis=0)
    expected = centred - centred @ directions[:, -2:] @ directions[:, -2:].T
    assert guide.transform(POINTS) == pytest.approx(normalize(expected), abs=1e-4)
    assert fit_ignoring(target, {"the mood": other}, {}, 3).directions.shape == (40, 3)
    assert fit_ignoring(target, {"the mood": target}, {}).directions.shape == (40, 0)
    assert fit_ignoring(0.1 * target + 1, {"the mood": target}, {}).directions.shape == (40, 10)
    with pytest.raises(UserError, match="40 directions of embeddings with 40, and leave nothing"):
        fit_ignoring(target, {"the mood": other, "the place": other}, {}, 20)


def test_known_labels_are_erased_as_leace_does():
    labels = [*LABELS, "", *(f"kind {kind}" for kind in KINDS[49:])]
    guide = fit_ignoring(POINTS, {}, {"kind": labels})
    assert guide.all_ignored == guide.to_json()["ignored"] == ["kind"]
    known = np.delete(np.arange(120), 48)
    # The vectors of zero ignored conditions are centred and have unit length.
    unit = normalize(POINTS)
    centred = normalize(unit - unit.mean(axis=0)).astype(np.float64)
    mean = centred[known].mean(axis=0)
    whitening = np.linalg.inv(sqrtm(ledoit_wolf(centred[known])[0]))
    one_hot = np.eye(3)[KINDS[known]]
    cross = (centred[known] - mean).T @ (one_hot - one_hot.mean(axis=0))
    projection = whitening @ cross @ np.linalg.pinv(whitening @ cross)
    removed = (centred - mean) @ (np.linalg.inv(whitening) @ projection @ whitening).T
    expected = centred - mean - removed
    assert guide.transform(POINTS) == pytest.approx(normalize(expected), abs=1e-3)
    means = [expected[known][KINDS[known] == kind].mean(axis=0) for kind in range(3)]
    assert np.abs(np.diff(means, axis=0)).max() < 1e-6


def test_maps_of_a_condition_are_stored_in_order(guide, tmp_path):
    condition = Condition("the kind | the sort", ["a", "b"], ["the mood"])
    ignoring = fit_ignoring(POINTS, {"the mood": POINTS[::-1]}, {})
    chain = fit_guide(ignoring.transform(POINTS[:48]), LABELS, before=ignoring)
    expected = fit_guide(ignoring.transform(POINTS[:48]), LABELS).transform(
        ignoring.transform(POINTS)
    )
    assert chain.transform(POINTS) == pytest.approx(expected, abs=1e-5)
    save_guide(chain, condition, tmp_path)
    (stored, loaded) = next(iter(load_guides(tmp_path).items()))
    assert (stored, stored.ignore, stored.values) == (condition, ("the mood",), ("a", "b"))
    assert (loaded.transform(POINTS) == chain.transform(POINTS)).all()
    assert loaded.digest == chain.digest
    assert loaded.before.to_json() == ignoring.to_json()
    assert load_guides(tmp_path).without_labels(condition) == ignoring


def test_condition_that_ignores_needs_a_map():
    condition = Condition("the kind", ignore=["the mood"])
    with pytest.raises(UserError, match=r"Call embedder\.ignoring\(texts, condition\)"):
        apply_guides(POINTS, [condition] * 120, {})


def test_damaged_file_is_reported_in_one_line(guide, tmp_path):
    save_guide(guide, "the kind", tmp_path)
    path = guide_file(tmp_path, "the kind")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(LlmcondError, match="is damaged") as error:
        load_guides(tmp_path)
    assert "\n" not in str(error.value)
    newer = {"format": 3, "text": "the kind", "values": [], "ignore": [], "maps": []}
    vectors = {name: np.zeros(3, np.float32) for name in ("mean", "directions", "gains")}
    save_file(vectors, path, {"guide": json.dumps(newer)})
    with pytest.raises(UserError, match="newer version"):
        load_guides(tmp_path)
