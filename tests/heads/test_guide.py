"""Guides: the map that a few labelled vectors give, and its file."""

import json

import numpy as np
import pytest
from helpers.vectors import unit
from safetensors.numpy import save_file
from sklearn.linear_model import Ridge

from llmcond.errors import LlmcondError, UserError
from llmcond.heads.guide import apply_guides, fit_guide, guide_file, load_guides, save_guide

RNG = np.random.default_rng(0)
#: Three classes that differ in two of 40 directions, and much noise in the others.
KINDS = np.arange(120) % 3
POINTS = (RNG.normal(size=(120, 40)) + 2 * np.eye(3, 40)[KINDS]).astype(np.float32)
LABELS = [f"kind {kind}" for kind in KINDS[:48]]


def share_nearest(vectors):
    cosines = unit(vectors) @ unit(vectors).T
    np.fill_diagonal(cosines, -1)
    return (KINDS[48:] == KINDS[48:][cosines.argmax(axis=1)]).mean()


@pytest.fixture(scope="module")
def guide():
    return fit_guide(POINTS[:48], LABELS, source="labels.csv", digest="d")


def test_vectors_keep_their_size_and_texts_of_one_label_come_nearer(guide):
    mapped = guide.transform(POINTS)
    assert (mapped.shape, mapped.dtype) == (POINTS.shape, np.float32)
    assert np.linalg.norm(mapped, axis=1) == pytest.approx(1, abs=1e-5)
    assert share_nearest(mapped[48:]) > share_nearest(POINTS[48:]) + 0.05
    assert guide.to_json() == {
        "labels": {f"kind {kind}": 16 for kind in range(3)},
        "source": "labels.csv",
    }


def test_inner_products_are_those_of_the_ridge_beside_a_damped_residual(guide):
    points = unit(POINTS).astype(np.float64)
    weights = Ridge(alpha=0.3).fit(points[:48], np.eye(3)[KINDS[:48]]).coef_.T
    weights /= np.linalg.norm(weights, 2)
    centred = points - points[:48].mean(axis=0)
    beside = unit(np.hstack([centred @ weights, 0.3 * centred]))
    mapped = guide.transform(POINTS)
    assert mapped @ mapped.T == pytest.approx(beside @ beside.T, abs=1e-4)


def test_what_says_nothing_stays_so(guide):
    given = np.array([POINTS[0], np.zeros(40)], dtype=np.float32)
    assert not guide.transform(given)[1].any()
    same = fit_guide(np.ones((4, 8)), ["a", "b", "a", "b"])
    assert np.isfinite(same.transform(RNG.normal(size=(5, 8)))).all()


def test_only_vectors_under_its_condition_are_mapped(guide):
    conditions = ["the kind", "the mood"] * 2
    found = apply_guides(POINTS[:4], conditions, {"the kind": guide})
    assert (found[1::2] == POINTS[1:4:2]).all()
    assert found[::2] == pytest.approx(guide.transform(POINTS[:4:2]), abs=1e-6)
    assert apply_guides(POINTS, conditions, {}) is POINTS


def test_a_file_gives_the_same_guide(guide, tmp_path):
    assert load_guides(tmp_path / "none") == {}
    save_guide(guide, "the kind", tmp_path / "guides")
    save_guide(guide, "the mood", tmp_path / "guides")
    found = load_guides(tmp_path / "guides")
    assert set(found) == {"the kind", "the mood"}
    assert (found["the kind"].transform(POINTS) == guide.transform(POINTS)).all()
    assert found["the kind"].to_json() == guide.to_json()
    assert found["the kind"].digest == guide.digest != fit_guide(POINTS[:48], LABELS).digest


def test_a_damaged_file_is_an_error_in_a_line(guide, tmp_path):
    save_guide(guide, "the kind", tmp_path)
    path = guide_file(tmp_path, "the kind")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LlmcondError, match="is damaged") as error:
        load_guides(tmp_path)
    assert "\n" not in str(error.value)
    newer = {"format": 2, "condition": "the kind", "labels": {}, "source": "", "digest": ""}
    vectors = {name: np.zeros(3, np.float32) for name in ("mean", "directions", "gains")}
    save_file(vectors, path, {"guide": json.dumps(newer)})
    with pytest.raises(UserError, match="newer version"):
        load_guides(tmp_path)
    save_file(vectors, path, {"guide": json.dumps({**newer, "format": 1, "labels": 3})})
    with pytest.raises(LlmcondError, match="'labels' is 3"):
        load_guides(tmp_path)
