"""Analyses: compared with slow reference implementations, at extremes, and as figures."""

import csv
import json
import math
import shutil
import sys
import tracemalloc
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import entropy

import llmcond
import llmcond.evaluation.analyses as isotropy_module
from llmcond import fit_head
from llmcond.errors import UserError
from llmcond.evaluation.analyses import (
    Change,
    Isotropy,
    change_table,
    frobenius_variance,
    impurity,
    impurity_from_counts,
    isotropy,
    most_changed,
    project_2d,
    seen_unseen,
)
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.files import check_figure
from llmcond.metrics import METRICS
from llmcond.report.figures import plot_clusters, plot_curve

SPEARMAN = METRICS["spearman"]


def sample_gaussians(n, dim, seed=0, shift=0.0, dtype=np.float32):
    return (np.random.default_rng(seed).normal(size=(n, dim)) + shift).astype(dtype)


# Isotropy


def compute_isotropy_slowly(vectors, directions, seed):
    """Compute isotropy literally as in appendix B of the CASE paper."""
    rows = [[float(value) for value in row] for row in vectors]
    mean = np.mean(rows, axis=0)
    cosines = [row @ mean / (np.linalg.norm(row) * np.linalg.norm(mean)) for row in np.array(rows)]
    normals = np.random.default_rng((seed, directions)).standard_normal((directions, len(mean)))
    sums = []
    for direction in normals:
        u = direction / math.sqrt(sum(value**2 for value in direction))
        sums.append(sum(math.exp(np.dot(row, u) / np.linalg.norm(row)) for row in rows))
    return np.mean(cosines), np.std(cosines), min(sums) / max(sums)


def collect_statistics(result: Isotropy):
    return result.mean_cosine, result.std_cosine, result.partition_ratio


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 20),
    dim=st.integers(1, 12),
    seed=st.integers(0, 99),
    shift=st.sampled_from([0.0, 0.3, 5.0]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_isotropy_matches_slow_implementation(n, dim, seed, shift, dtype):
    vectors = sample_gaussians(n, dim, seed, shift, dtype)
    result = isotropy(vectors, directions=25, seed=seed)
    assert result.n == n
    assert collect_statistics(result) == pytest.approx(
        compute_isotropy_slowly(vectors, 25, seed), rel=1e-5, abs=1e-7
    )


def test_isotropy_does_not_depend_on_block_size_or_memory_map(monkeypatch, tmp_path):
    vectors = sample_gaussians(100, 8, shift=0.2)
    whole = isotropy(vectors)
    monkeypatch.setattr(isotropy_module, "_BLOCK", 7)
    assert collect_statistics(isotropy(vectors)) == pytest.approx(
        collect_statistics(whole), rel=1e-6
    )
    np.save(tmp_path / "vectors.npy", vectors)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert isotropy(mapped) == isotropy(vectors)


@pytest.mark.parametrize(("dim", "floor"), [(64, 0.45), (512, 0.77), (4096, 0.91)])
def test_equal_vectors_have_cosine_1_and_lowest_partition_ratio(dim, floor):
    result = isotropy(np.tile(sample_gaussians(1, dim), (50, 1)))
    assert result.mean_cosine == pytest.approx(1)
    assert result.std_cosine == pytest.approx(0, abs=1e-9)
    assert result.partition_ratio == pytest.approx(floor, abs=0.03)


def test_gaussians_are_isotropic_and_shifted_ones_are_not():
    even, shifted = (
        isotropy(sample_gaussians(20_000, 16)),
        isotropy(sample_gaussians(20_000, 16, shift=1)),
    )
    assert abs(even.mean_cosine) < 0.02
    assert even.partition_ratio > 0.97
    assert shifted.mean_cosine > 0.6
    assert shifted.partition_ratio < 0.5


def test_mean_uses_raw_vectors_and_partition_ratio_unit_vectors():
    result = isotropy(np.array([[10.0, 0.0], [0.0, 1.0]]))
    assert result.mean_cosine == pytest.approx((5 + 0.5) / math.hypot(5, 0.5) / 2)
    vectors = sample_gaussians(30, 4)
    longer = vectors * np.linspace(0.1, 9, 30, dtype=np.float32)[:, None]
    ratios = [isotropy(v).partition_ratio for v in (vectors, longer)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_vectors_that_cancel_out_have_mean_cosine_0():
    half = sample_gaussians(500, 6, dtype=np.float64)
    result = isotropy(np.concatenate([half, -half]))
    assert (result.mean_cosine, result.std_cosine) == (0, 0)


@pytest.mark.parametrize(("scale", "dtype"), [(6e4, np.float16), (1e-30, np.float32)])
def test_isotropy_does_not_depend_on_scale_or_dtype(scale, dtype):
    unit = sample_gaussians(40, 8, dtype=np.float64)
    unit /= np.abs(unit).max()
    result = isotropy((unit * scale).astype(dtype))
    assert collect_statistics(result) == pytest.approx(
        collect_statistics(isotropy(unit)), rel=1e-2, abs=1e-3
    )


def test_memory_does_not_grow_with_number_of_vectors():
    vectors = np.tile(sample_gaussians(1_000, 32), (60, 1))
    tracemalloc.start()
    isotropy(vectors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Computing all exponents at once would take 240 MB.
    assert peak < 80e6


BAD_VECTORS = [
    (np.zeros((0, 3)), r"shape \(0, 3\)"),
    (np.zeros((3, 0)), r"shape \(3, 0\)"),
    (np.ones(5), r"shape \(5,\)"),
    (np.array([[1.0, 2.0], [np.nan, 1.0]]), "1 of 2 vectors are NaN or infinite.*position 1"),
    (np.array([[np.inf, 2.0], [3.0, 1.0]]), "1 of 2 vectors are NaN or infinite.*position 0"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("vectors", "message"),
    [*BAD_VECTORS, (np.array([[1.0, 0], [0, 0], [0, 0]]), "2 of 3 vectors are zero.*position 1")],
)
def test_isotropy_rejects_invalid_vectors(vectors, message):
    with pytest.raises(UserError, match=message):
        isotropy(vectors)


# Clusters


@given(
    st.tuples(st.integers(2, 6), st.integers(2, 6)).flatmap(
        lambda shape: arrays(np.int64, shape, elements=st.integers(0, 9))
    )
)
def test_impurity_is_weighted_mean_entropy_of_conditions(counts):
    counts[:, 0] += 1
    expected = sum(row.sum() / counts.sum() * entropy(row) for row in counts)
    assert impurity_from_counts(counts) == pytest.approx(expected, abs=1e-12)


def test_impurity_weights_conditions_by_size():
    assert impurity_from_counts(np.array([[1, 1], [8, 0]])) == pytest.approx(0.2 * math.log(2))


def make_blobs(k, per_group, dim=8, seed=0, spread=0.05):
    """Return k well-separated groups of vectors, and the group number of each vector."""
    group = np.repeat(np.arange(k), per_group)
    centres = np.eye(k, dim) * 10
    return (centres[group] + spread * sample_gaussians(k * per_group, dim, seed)).astype(
        np.float32
    ), group


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_separated_conditions_have_impurity_0(dtype):
    vectors, group = make_blobs(3, 20)
    names = ["The sport", "The number of people", "The name of the object"]
    result = impurity(vectors.astype(dtype), [names[i] for i in group])
    assert str(result.value) == "0.0"
    assert (result.n_clusters, result.conditions) == (3, tuple(names))
    assert np.sort(result.counts, axis=1).tolist() == [[0, 0, 20]] * 3


def test_random_conditions_have_nearly_maximal_impurity():
    vectors, _ = make_blobs(4, 250)
    labels = [f"condition {i}" for i in np.random.default_rng(1).integers(4, size=1_000)]
    result = impurity(vectors, labels)
    assert 0.98 * math.log(4) < result.value <= math.log(4)
    assert np.sum(result.counts, axis=0).tolist() == [250] * 4
    assert np.sum(result.counts, axis=1).tolist() == [labels.count(c) for c in result.conditions]


def test_shared_cluster_shows_in_counts_but_not_in_impurity():
    vectors, group = make_blobs(3, 20)
    # b and c share a cluster, and a has two clusters to itself.
    labels = [("a", "a", "b")[i] for i in group]
    labels[-10:] = ["c"] * 10
    result = impurity(vectors, labels)
    assert result.value == pytest.approx(40 / 60 * math.log(2))
    assert np.sort(result.counts, axis=1).tolist() == [[0, 20, 20], [0, 0, 10], [0, 0, 10]]
    assert np.argmax(result.counts[1]) == np.argmax(result.counts[2])


def test_impurity_matches_slow_implementation_without_clusters():
    from sklearn.cluster import KMeans

    vectors, labels = sample_gaussians(90, 5), list("abc" * 30)
    cluster = KMeans(3, n_init=10, random_state=3).fit(vectors).labels_
    expected = 0.0
    for condition in "abc":
        inside = cluster[[label == condition for label in labels]]
        for j in range(3):
            share = np.mean(inside == j)
            expected -= len(inside) / 90 * share * math.log(share)
    assert impurity(vectors, labels, seed=3).value == pytest.approx(expected)


@pytest.mark.parametrize(("vectors", "message"), BAD_VECTORS)
def test_impurity_and_projection_reject_invalid_vectors(vectors, message):
    with pytest.raises(UserError, match=message):
        impurity(vectors, ["a"] * len(vectors))
    with pytest.raises(UserError, match=message):
        project_2d(vectors)


@pytest.mark.parametrize(
    ("vectors", "labels", "message"),
    [
        (np.ones((4, 2)), list("abab"), "have 1 distinct values, but 2 clusters"),
    ],
)
def test_impurity_rejects_fewer_distinct_vectors_than_clusters(vectors, labels, message):
    with pytest.raises(UserError, match=message):
        impurity(vectors, labels)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(3, 30), dim=st.integers(2, 12), seed=st.integers(0, 99))
def test_projection_equals_singular_value_decomposition(n, dim, seed):
    vectors = sample_gaussians(n, dim, seed, dtype=np.float64)
    centred = vectors - vectors.mean(axis=0)
    _, _, directions = np.linalg.svd(centred)
    expected = centred @ directions[:2].T
    np.testing.assert_allclose(np.abs(project_2d(vectors)), np.abs(expected), atol=1e-6)


def test_projection_separates_groups_and_is_deterministic():
    vectors, group = make_blobs(3, 15)
    points = project_2d(vectors.astype(np.float16))
    assert points.shape == (45, 2)
    centres = np.array([points[group == i].mean(axis=0) for i in range(3)])
    nearest = np.argmin(np.linalg.norm(points[:, None] - centres, axis=2), axis=1)
    np.testing.assert_array_equal(nearest, group)
    np.testing.assert_array_equal(points, project_2d(vectors.astype(np.float16)))


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.eye(2), r"shape \(2, 2\)"),
        (np.arange(5.0)[:, None], r"shape \(5, 1\)"),
    ],
)
def test_projection_rejects_too_few_vectors_or_dimensions(vectors, message):
    with pytest.raises(UserError, match=message):
        project_2d(vectors)


# Conditions


def make_rated_rows(n=40):
    """Return conditions, ratings, similarities and pair numbers of n pairs with two rows each."""
    rng = np.random.default_rng(0)
    rating = rng.integers(0, 5, size=2 * n) / 4
    similarity = (rating + rng.normal(size=2 * n)).astype(np.float32)
    condition = [f"condition {i // 4 % 7}" for i in range(2 * n)]
    return condition, rating, similarity, np.repeat(np.arange(n), 2)


@pytest.mark.parametrize("name", ["spearman", "accuracy"])
def test_seen_and_unseen_rows_are_scored_separately(name):
    condition, rating, similarity, pair = make_rated_rows()
    train = ["condition 1", "condition 4", "condition 4", "never scored"]
    metric = METRICS[name]
    results = seen_unseen(train, condition, rating, similarity, pair, metric, resamples=50)
    seen = np.array([text in train for text in condition])
    for kind, mask in (("overall", seen | ~seen), ("seen", seen), ("unseen", ~seen)):
        separate = bootstrap_metrics(
            [similarity[None, mask]], rating[mask], pair[mask], [metric], 50
        )
        score = results[kind].main
        assert score == separate.estimates(0)[name]
        assert score.low < score.value < score.high
    assert results["overall"].n == results["seen"].n + results["unseen"].n == 80
    assert (results["seen"].about["n_conditions"], results["unseen"].about["n_conditions"]) == (
        2,
        5,
    )


def test_conditions_match_by_exact_text():
    _, rating, similarity, pair = make_rated_rows(2)
    condition = ["The sport", "The sport.", "the sport", "The sport "]
    results = seen_unseen(["The sport"], condition, rating, similarity, pair, SPEARMAN, resamples=0)
    assert (results["seen"].n, results["unseen"].n) == (1, 3)
    assert (results["seen"].about["n_conditions"], results["unseen"].about["n_conditions"]) == (
        1,
        3,
    )


def test_subset_without_rows_has_no_score():
    condition, rating, similarity, pair = make_rated_rows()
    results = seen_unseen(condition, condition, rating, similarity, pair, SPEARMAN, resamples=0)
    assert (results["unseen"].n, math.isnan(results["unseen"].main.value)) == (0, True)
    assert results["seen"].main.value == results["overall"].main.value
    results = seen_unseen([], condition, rating, similarity, pair, SPEARMAN, resamples=0)
    assert (results["seen"].n, results["unseen"].n) == (0, 80)


def test_seen_unseen_rejects_non_finite_predictions():
    condition, rating, _, pair = make_rated_rows()
    with pytest.raises(UserError, match="80 of 80 predictions are NaN or infinite"):
        seen_unseen(["a"], condition, rating, np.full(80, np.inf), pair, SPEARMAN)


@given(n=st.integers(2, 8), height=st.integers(1, 6), width=st.integers(1, 6))
def test_variance_of_norms_equals_variance_of_matrices(n, height, width):
    matrices = sample_gaussians(n * height, width, dtype=np.float64).reshape(n, height, width)
    norms = np.array([math.sqrt((matrix**2).sum()) for matrix in matrices])
    result = frobenius_variance(norms, height * width)
    scaled = [math.sqrt((matrix**2).mean()) for matrix in matrices]
    assert result.n == n
    assert result.raw == pytest.approx(sum((norms - norms.mean()) ** 2) / n)
    assert result.normalised == pytest.approx(np.mean(np.square(scaled)) - np.mean(scaled) ** 2)


def test_float16_norms_are_squared_in_higher_precision():
    norms = np.array([100.0, 60_000.0], dtype=np.float16)
    assert frobenius_variance(norms, 1).raw == pytest.approx(29_950.0**2, rel=1e-3)


def test_variance_of_single_norm_is_rejected():
    with pytest.raises(UserError, match=r"shape \(1,\)"):
        frobenius_variance(np.array([1.0]), 4)


# Table 3 of the CASE paper, with its rows shuffled.
TABLE = [
    ("a skier alone", "two skiers", "The type of job.", 5, 0.7502, 0.9539),
    ("a tennis player", "a girl", "The name of the game.", 5, 0.6233, 0.9660),
    ("a skier alone", "two skiers", "The number of person.", 1, 0.6358, 0.2788),
    ("a tennis player", "a girl", "The color of the dress.", 1, 0.4757, 0.2522),
]


def test_change_table_is_sorted_as_in_paper():
    records = change_table([Change(*row) for row in TABLE])
    shown = [(r.sentence1, r.condition, r.rating, r.before, r.after) for r in records]
    assert shown == [
        ("a skier alone", "The number of person.", 1, 0.6358, 0.2788),
        ("a skier alone", "The type of job.", 5, 0.7502, 0.9539),
        ("a tennis player", "The color of the dress.", 1, 0.4757, 0.2522),
        ("a tennis player", "The name of the game.", 5, 0.6233, 0.9660),
    ]
    assert [r.sentence2 for r in records] == ["two skiers"] * 2 + ["a girl"] * 2


def test_rows_of_equal_rating_keep_their_order():
    table = [Change("s", "t", condition, 3, 0.1, 0.2) for condition in "bca"]
    assert [r.condition for r in change_table(table)] == ["b", "c", "a"]


UNIT = st.integers(0, 4).map(lambda value: value / 4)


@given(st.lists(st.tuples(UNIT, UNIT, UNIT), min_size=1, max_size=12))
def test_most_changed_matches_slow_implementation(rows):
    # Quarters are exact in floating point, so equal changes compare equal.
    result = most_changed(*np.array(rows).T)
    gain = {i: abs(before - r) - abs(after - r) for i, (r, before, after) in enumerate(rows)}
    better = sorted((i for i in gain if gain[i] > 0), key=lambda i: (-gain[i], i))
    worse = sorted((i for i in gain if gain[i] < 0), key=lambda i: (gain[i], i))
    assert result == (better, worse)


def test_most_changed_rejects_infinity():
    half = np.array([0.5, 0.5])
    with pytest.raises(UserError, match="1 of 2 similarities before"):
        most_changed(half, np.array([np.inf, 0.2]), half)


# Figures

NAMES = [
    r"The price in $ of the ticket, whether paid in $ or in \euro, as told by the person standing "
    "at the counter of the station in the rain",
    r"$\frac{broken$",
    "_hidden_^",
    "\x1b[31mred",
    *(f"the number of things of kind {i}" for i in range(6)),
]


def draw_clusters(path, n=60, names=NAMES):
    points = sample_gaussians(n, 2), sample_gaussians(n, 2, seed=1)
    plot_clusters(*points, np.arange(n) % len(names), names, path, ("before", "after"))


def draw_curves(path, log_x=True, x=(4096, 64, 512, 128, 256, 1024), names=NAMES):
    x = np.array(x, dtype=np.float64)
    mean = 0.7 - 1 / x
    scores = {name: (mean - i / 50, mean - i / 40, mean) for i, name in enumerate(names)}
    series = {name: zip(x, *columns, strict=True) for name, columns in scores.items()}
    plot_curve(series, path, "dimensions $d$", "Spearman, $times$ 100", log_x)


DRAWINGS = pytest.mark.parametrize("draw", [draw_clusters, draw_curves])


def assert_image_is_complete(path):
    data = path.read_bytes()
    if path.suffix.lower() == ".png":
        assert data.startswith(b"\x89PNG")
        assert b"IEND" in data[-12:]
    elif path.suffix.lower() == ".pdf":
        assert data.startswith(b"%PDF")
        assert b"%%EOF" in data[-8:]
    else:
        assert ET.fromstring(data).tag.endswith("svg")


@pytest.mark.matrix
@DRAWINGS
@pytest.mark.parametrize("name", ["figure.png", "new/figure.svg", "figure.pdf", "figure.PNG"])
def test_figure_file_is_complete_and_reproducible(draw, name, tmp_path):
    path = tmp_path / name
    draw(path)
    assert_image_is_complete(path)
    first = path.read_bytes()
    draw(path)
    # The library that writes PDF files sorts their objects differently in each of them.
    assert path.read_bytes() == first or path.suffix == ".pdf"
    assert {p.name for p in path.parent.iterdir()} == {path.name, "figure-data.csv"}


def read_data(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.reader(stream))


def test_figure_data_has_the_plotted_points(tmp_path):
    plot_curve({"b": [(2, 0.5, 0.4, 0.6), (1, 0.25, 0, 1)]}, tmp_path / "curve.svg", "steps", "MRR")
    headings, *rows = read_data(tmp_path / "curve-data.csv")
    assert headings == ["series", "steps", "MRR", "low", "high"]
    assert rows == [["b", "1", "0.25", "0", "1"], ["b", "2", "0.5", "0.4", "0.6"]]
    points = np.array([[0.5, 1.0], [2.0, 3.0]])
    titles = ("before", "after")
    plot_clusters(points, points + 1, np.array([1, 0]), NAMES[:2], tmp_path / "x.png", titles)
    headings, *rows = read_data(tmp_path / "x-data.csv")
    assert headings == ["condition", "before_x", "before_y", "after_x", "after_y"]
    assert rows == [[NAMES[1], "0.5", "1.0", "1.5", "2.0"], [NAMES[0], "2.0", "3.0", "3.0", "4.0"]]


@DRAWINGS
def test_special_characters_are_shown_literally(draw, tmp_path):
    draw(tmp_path / "figure.svg")
    texts = [*ET.parse(tmp_path / "figure.svg").getroot().itertext()]
    for name in (r"$\frac{broken$", "_hidden_^", r"\x1b[31mred"):
        assert name in texts
    assert any(text.startswith("The price in $ of the ticket") for text in texts)


@pytest.fixture
def saved_charts(monkeypatch):
    """The specifications of the charts that a test saves."""
    charts, draw = [], vl_convert.vegalite_to_svg
    monkeypatch.setattr(
        vl_convert, "vegalite_to_svg", lambda spec: (charts.append(json.loads(spec)), draw(spec))[1]
    )
    return charts


@pytest.mark.matrix
@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("x", [(500, 512, 512.5), range(10, 25), (1, 2e5, 3e5, 1e6)])
def test_ticks_are_at_x_values(x, log_x, saved_charts, tmp_path):
    draw_curves(tmp_path / "figure.svg", log_x, x)
    (axis,) = {json.dumps(layer["encoding"]["x"]["axis"]) for layer in saved_charts[0]["layer"]}
    assert json.loads(axis)["values"] == sorted(x)
    svg = ET.parse(tmp_path / "figure.svg").getroot()
    labels = {text.strip() for text in svg.itertext()}
    assert f"{max(x):,.10g}" in labels


def test_curves_are_sorted_by_x_and_have_intervals(saved_charts, tmp_path):
    series = {
        "a": [(30, 3, 2, 4), (10, 1, 0, 2), (20, 2, 1, 3), (10, 1, 0, 2)],
        "b": [(5, 2, 1, 4)],
    }
    plot_curve(series, tmp_path / "figure.png", "x", "y")
    (chart,) = saved_charts
    (values,) = chart["datasets"].values()
    assert [tuple(row.values())[:5] for row in values] == [
        ("a", 10, 1, 0, 2),
        ("a", 20, 2, 1, 3),
        ("a", 30, 3, 2, 4),
        ("b", 5, 2, 1, 4),
    ]
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["area", "line", "rule", "point"]


def test_figures_have_colours_for_paper(saved_charts, tmp_path):
    draw_curves(tmp_path / "figure.svg")
    text = json.dumps(saved_charts)
    assert "var(--" not in text
    assert saved_charts[0]["config"]["background"] == "white"


def test_analyses_work_without_chart_libraries(monkeypatch, tmp_path, tiny_run, caplog):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    caplog.set_level("INFO")
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    fit_head(run=run, head="pca", dim=4)
    results = llmcond.analyse(run=run, what=["isotropy", "clusters"], conditions=2, split="train")
    assert {row["name"] for row in results["clusters"]} >= {"pca@concat-sent-cond"}
    assert (
        "no pictures: Altair and vl-convert, which draw figures, are not both installed (pip "
        "install 'llmcond[report]')" in caplog.text
    )
    assert not (run / "analyses").exists()


def test_missing_library_error_names_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"pip install 'llmcond\[report\]'"):
        check_figure(tmp_path / "figure.png")


def test_failed_write_keeps_old_figure(monkeypatch, tmp_path):
    def fail(svg, scale):
        raise OSError(28, "No space left on device")

    path = tmp_path / "figure.png"
    draw_curves(path)
    old = path.read_bytes()
    monkeypatch.setattr(vl_convert, "svg_to_png", fail)
    with pytest.raises(UserError, match="disk is full"):
        draw_curves(path)
    assert path.read_bytes() == old
    assert {p.name for p in tmp_path.iterdir()} == {"figure.png", "figure-data.csv"}


@pytest.mark.matrix
@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("x", [(512,), (500, 512, 512.5), range(1, 2_000, 10), (1, 1e6, 3e6)])
def test_curves_of_any_length_are_plotted(x, log_x, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(tmp_path / "figure.png", log_x, x, NAMES[:2])
    assert_image_is_complete(tmp_path / "figure.png")


def test_undefined_scores_are_plotted_without_warnings(tmp_path):
    nan = [np.nan] * 3
    scores = {"some": [0.1, np.nan, 0.3], "none": nan}
    series = {
        name: zip([1, 2, 3], values, nan, nan, strict=True) for name, values in scores.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curve(series, tmp_path / "figure.png", "x", "y")
    assert_image_is_complete(tmp_path / "figure.png")
