"""Analyses: equal to slow transcriptions of the papers, right at extremes, and pictures whole."""

import itertools
import math
import shutil
import sys
import tracemalloc
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import entropy

import llmcond
import llmcond.evaluation.isotropy as isotropy_module
from llmcond import fit_head
from llmcond.errors import UserError
from llmcond.evaluation.clusters import impurity, impurity_from_counts, project_2d
from llmcond.evaluation.conditions import (
    Change,
    change_table,
    frobenius_variance,
    most_changed,
    seen_unseen,
)
from llmcond.evaluation.isotropy import Isotropy, isotropy
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.metrics import METRICS
from llmcond.report.figures import plot_clusters, plot_curve

SPEARMAN = METRICS["spearman"]


def gaussians(n, dim, seed=0, shift=0.0, dtype=np.float32):
    return (np.random.default_rng(seed).normal(size=(n, dim)) + shift).astype(dtype)


# Isotropy


def slow_isotropy(vectors, directions, seed):
    """CASE, appendix B, word by word."""
    rows = [[float(value) for value in row] for row in vectors]
    mean = np.mean(rows, axis=0)
    cosines = [row @ mean / (np.linalg.norm(row) * np.linalg.norm(mean)) for row in np.array(rows)]
    drawn = np.random.default_rng((seed, directions)).standard_normal((directions, len(mean)))
    sums = []
    for direction in drawn:
        u = direction / math.sqrt(sum(value**2 for value in direction))
        sums.append(sum(math.exp(np.dot(row, u) / np.linalg.norm(row)) for row in rows))
    return np.mean(cosines), np.std(cosines), min(sums) / max(sums)


def figures(result: Isotropy):
    return result.mean_cosine, result.std_cosine, result.partition_ratio


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 20),
    dim=st.integers(1, 12),
    seed=st.integers(0, 99),
    shift=st.sampled_from([0.0, 0.3, 5.0]),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_isotropy_equals_a_transcription(n, dim, seed, shift, dtype):
    vectors = gaussians(n, dim, seed, shift, dtype)
    found = isotropy(vectors, directions=25, seed=seed)
    assert found.n == n
    assert figures(found) == pytest.approx(slow_isotropy(vectors, 25, seed), rel=1e-5, abs=1e-7)


def test_isotropy_is_the_same_in_blocks_and_from_a_file(monkeypatch, tmp_path):
    vectors = gaussians(100, 8, shift=0.2)
    whole = isotropy(vectors)
    monkeypatch.setattr(isotropy_module, "_BLOCK", 7)
    assert figures(isotropy(vectors)) == pytest.approx(figures(whole), rel=1e-6)
    np.save(tmp_path / "vectors.npy", vectors)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert isotropy(mapped) == isotropy(vectors)


@pytest.mark.parametrize(("dim", "floor"), [(64, 0.45), (512, 0.77), (4096, 0.91)])
def test_equal_vectors_have_cosine_one_and_the_floor_of_the_ratio(dim, floor):
    found = isotropy(np.tile(gaussians(1, dim), (50, 1)))
    assert found.mean_cosine == pytest.approx(1)
    assert found.std_cosine == pytest.approx(0, abs=1e-9)
    assert found.partition_ratio == pytest.approx(floor, abs=0.03)


def test_gaussians_are_isotropic_and_shifted_ones_are_not():
    even, shifted = isotropy(gaussians(20_000, 16)), isotropy(gaussians(20_000, 16, shift=1))
    assert abs(even.mean_cosine) < 0.02
    assert even.partition_ratio > 0.97
    assert shifted.mean_cosine > 0.6
    assert shifted.partition_ratio < 0.5


def test_the_mean_vector_is_of_the_vectors_as_they_are_and_the_ratio_of_unit_ones():
    found = isotropy(np.array([[10.0, 0.0], [0.0, 1.0]]))
    assert found.mean_cosine == pytest.approx((5 + 0.5) / math.hypot(5, 0.5) / 2)
    vectors = gaussians(30, 4)
    longer = vectors * np.linspace(0.1, 9, 30, dtype=np.float32)[:, None]
    ratios = [isotropy(v).partition_ratio for v in (vectors, longer)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_vectors_that_cancel_out_have_no_mean_direction():
    half = gaussians(500, 6, dtype=np.float64)
    found = isotropy(np.concatenate([half, -half]))
    assert (found.mean_cosine, found.std_cosine) == (0, 0)


@pytest.mark.parametrize(("scale", "dtype"), [(6e4, np.float16), (1e-30, np.float32)])
def test_the_range_of_the_type_does_not_matter(scale, dtype):
    unit = gaussians(40, 8, dtype=np.float64)
    unit /= np.abs(unit).max()
    found = isotropy((unit * scale).astype(dtype))
    assert figures(found) == pytest.approx(figures(isotropy(unit)), rel=1e-2, abs=1e-3)


def test_memory_does_not_grow_with_the_number_of_vectors():
    vectors = np.tile(gaussians(1_000, 32), (60, 1))
    tracemalloc.start()
    isotropy(vectors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All exponents at once would be 240 MB.
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
def test_isotropy_refuses(vectors, message):
    with pytest.raises(UserError, match=message):
        isotropy(vectors)


# Clusters


@given(
    st.tuples(st.integers(2, 6), st.integers(2, 6)).flatmap(
        lambda shape: arrays(np.int64, shape, elements=st.integers(0, 9))
    )
)
def test_impurity_is_the_weighted_entropy_of_each_condition(counts):
    counts[:, 0] += 1
    expected = sum(row.sum() / counts.sum() * entropy(row) for row in counts)
    assert impurity_from_counts(counts) == pytest.approx(expected, abs=1e-12)


def test_impurity_weighs_conditions_by_their_size():
    assert impurity_from_counts(np.array([[1, 1], [8, 0]])) == pytest.approx(0.2 * math.log(2))


def blobs(k, per, dim=8, seed=0, spread=0.05):
    """k groups of vectors far from each other, and the number of each vector's group."""
    group = np.repeat(np.arange(k), per)
    centres = np.eye(k, dim) * 10
    return (centres[group] + spread * gaussians(k * per, dim, seed)).astype(np.float32), group


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_conditions_apart_have_impurity_zero(dtype):
    vectors, group = blobs(3, 20)
    names = ["The sport", "The number of people", "The name of the object"]
    found = impurity(vectors.astype(dtype), [names[i] for i in group])
    assert str(found.value) == "0.0"
    assert (found.n_clusters, found.conditions) == (3, tuple(names))
    assert np.sort(found.counts, axis=1).tolist() == [[0, 0, 20]] * 3


def test_conditions_that_say_nothing_have_impurity_near_its_bound():
    vectors, _ = blobs(4, 250)
    labels = [f"condition {i}" for i in np.random.default_rng(1).integers(4, size=1_000)]
    found = impurity(vectors, labels)
    assert 0.98 * math.log(4) < found.value <= math.log(4)
    assert np.sum(found.counts, axis=0).tolist() == [250] * 4
    assert np.sum(found.counts, axis=1).tolist() == [labels.count(c) for c in found.conditions]


def test_conditions_that_share_a_cluster_show_in_the_counts_alone():
    vectors, group = blobs(3, 20)
    # b and c lie together; a has two places of its own.
    labels = [("a", "a", "b")[i] for i in group]
    labels[-10:] = ["c"] * 10
    found = impurity(vectors, labels)
    assert found.value == pytest.approx(40 / 60 * math.log(2))
    assert np.sort(found.counts, axis=1).tolist() == [[0, 20, 20], [0, 0, 10], [0, 0, 10]]
    assert np.argmax(found.counts[1]) == np.argmax(found.counts[2])


def test_impurity_equals_a_transcription_on_vectors_without_groups():
    from sklearn.cluster import KMeans

    vectors, labels = gaussians(90, 5), list("abc" * 30)
    cluster = KMeans(3, n_init=10, random_state=3).fit(vectors).labels_
    expected = 0.0
    for condition in "abc":
        inside = cluster[[label == condition for label in labels]]
        for j in range(3):
            share = np.mean(inside == j)
            expected -= len(inside) / 90 * share * math.log(share)
    assert impurity(vectors, labels, seed=3).value == pytest.approx(expected)


@pytest.mark.parametrize(("vectors", "message"), BAD_VECTORS)
def test_clusters_and_projections_refuse_vectors(vectors, message):
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
def test_impurity_refuses(vectors, labels, message):
    with pytest.raises(UserError, match=message):
        impurity(vectors, labels)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(3, 30), dim=st.integers(2, 12), seed=st.integers(0, 99))
def test_pca_equals_the_singular_value_decomposition(n, dim, seed):
    vectors = gaussians(n, dim, seed, dtype=np.float64)
    centred = vectors - vectors.mean(axis=0)
    _, _, directions = np.linalg.svd(centred)
    expected = centred @ directions[:2].T
    np.testing.assert_allclose(np.abs(project_2d(vectors)), np.abs(expected), atol=1e-6)


def test_a_projection_keeps_groups_apart_and_is_always_the_same():
    vectors, group = blobs(3, 15)
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
def test_projection_refuses(vectors, message):
    with pytest.raises(UserError, match=message):
        project_2d(vectors)


# Conditions


def rated_rows(n=40):
    """Rows of n pairs under two conditions, of which training knows some."""
    rng = np.random.default_rng(0)
    rating = rng.integers(0, 5, size=2 * n) / 4
    similarity = (rating + rng.normal(size=2 * n)).astype(np.float32)
    condition = [f"condition {i // 4 % 7}" for i in range(2 * n)]
    return condition, rating, similarity, np.repeat(np.arange(n), 2)


@pytest.mark.parametrize("name", ["spearman", "accuracy"])
def test_seen_and_unseen_rows_are_scored_as_if_alone(name):
    condition, rating, similarity, pair = rated_rows()
    train = ["condition 1", "condition 4", "condition 4", "never scored"]
    metric = METRICS[name]
    found = seen_unseen(train, condition, rating, similarity, pair, metric, resamples=50)
    seen = np.array([text in train for text in condition])
    for kind, rows in (("overall", seen | ~seen), ("seen", seen), ("unseen", ~seen)):
        alone = bootstrap_metrics([similarity[None, rows]], rating[rows], pair[rows], [metric], 50)
        score = found[kind].score
        assert score == alone.estimates(0)[name]
        assert score.low < score.value < score.high
    assert found["overall"].n == found["seen"].n + found["unseen"].n == 80
    assert (found["seen"].n_conditions, found["unseen"].n_conditions) == (2, 5)


def test_conditions_match_by_their_exact_text():
    _, rating, similarity, pair = rated_rows(2)
    condition = ["The sport", "The sport.", "the sport", "The sport "]
    found = seen_unseen(["The sport"], condition, rating, similarity, pair, SPEARMAN, resamples=0)
    assert (found["seen"].n, found["unseen"].n) == (1, 3)
    assert (found["seen"].n_conditions, found["unseen"].n_conditions) == (1, 3)


def test_a_part_without_rows_has_no_scores():
    condition, rating, similarity, pair = rated_rows()
    found = seen_unseen(condition, condition, rating, similarity, pair, SPEARMAN, resamples=0)
    assert (found["unseen"].n, math.isnan(found["unseen"].score.value)) == (0, True)
    assert found["seen"].score.value == found["overall"].score.value
    found = seen_unseen([], condition, rating, similarity, pair, SPEARMAN, resamples=0)
    assert (found["seen"].n, found["unseen"].n) == (0, 80)


def test_seen_and_unseen_refuse_predictions_that_are_no_numbers():
    condition, rating, _, pair = rated_rows()
    with pytest.raises(UserError, match="80 of 80 predictions are NaN or infinite"):
        seen_unseen(["a"], condition, rating, np.full(80, np.inf), pair, SPEARMAN)


@given(n=st.integers(2, 8), height=st.integers(1, 6), width=st.integers(1, 6))
def test_the_variance_of_norms_equals_that_of_the_matrices(n, height, width):
    matrices = gaussians(n * height, width, dtype=np.float64).reshape(n, height, width)
    norms = np.array([math.sqrt((matrix**2).sum()) for matrix in matrices])
    found = frobenius_variance(norms, height * width)
    scaled = [math.sqrt((matrix**2).mean()) for matrix in matrices]
    assert found.n == n
    assert found.raw == pytest.approx(sum((norms - norms.mean()) ** 2) / n)
    assert found.normalised == pytest.approx(np.mean(np.square(scaled)) - np.mean(scaled) ** 2)


def test_norms_in_16_bit_are_squared_in_more():
    norms = np.array([100.0, 60_000.0], dtype=np.float16)
    assert frobenius_variance(norms, 1).raw == pytest.approx(29_950.0**2, rel=1e-3)


def test_one_norm_has_no_variance():
    with pytest.raises(UserError, match=r"shape \(1,\)"):
        frobenius_variance(np.array([1.0]), 4)


# CASE, table 3, its rows out of order.
TABLE = [
    ("a skier alone", "two skiers", "The type of job.", 5, 0.7502, 0.9539),
    ("a tennis player", "a girl", "The name of the game.", 5, 0.6233, 0.9660),
    ("a skier alone", "two skiers", "The number of person.", 1, 0.6358, 0.2788),
    ("a tennis player", "a girl", "The color of the dress.", 1, 0.4757, 0.2522),
]


def test_the_table_of_changes_is_in_the_papers_order():
    records = change_table([Change(*row) for row in TABLE])
    shown = [(r.sentence1, r.condition, r.rating, r.before, r.after) for r in records]
    assert shown == [
        ("a skier alone", "The number of person.", 1, 0.6358, 0.2788),
        ("a skier alone", "The type of job.", 5, 0.7502, 0.9539),
        ("a tennis player", "The color of the dress.", 1, 0.4757, 0.2522),
        ("a tennis player", "The name of the game.", 5, 0.6233, 0.9660),
    ]
    assert [r.sentence2 for r in records] == ["two skiers"] * 2 + ["a girl"] * 2


def test_rows_of_one_rating_keep_their_order():
    table = [Change("s", "t", condition, 3, 0.1, 0.2) for condition in "bca"]
    assert [r.condition for r in change_table(table)] == ["b", "c", "a"]


UNIT = st.integers(0, 4).map(lambda value: value / 4)


@given(st.lists(st.tuples(UNIT, UNIT, UNIT), min_size=1, max_size=12))
def test_the_most_changed_rows_equal_a_transcription(rows):
    # Quarters are exact, so that equal changes are equal.
    found = most_changed(*np.array(rows).T)
    gain = {i: abs(before - r) - abs(after - r) for i, (r, before, after) in enumerate(rows)}
    better = sorted((i for i in gain if gain[i] > 0), key=lambda i: (-gain[i], i))
    worse = sorted((i for i in gain if gain[i] < 0), key=lambda i: (gain[i], i))
    assert found == (better, worse)


def test_the_most_changed_rows_refuse_infinity():
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
    points = gaussians(n, 2), gaussians(n, 2, seed=1)
    plot_clusters(*points, np.arange(n) % len(names), names, path, ("before", "after"))


def draw_curves(path, log_x=True, x=(4096, 64, 512, 128, 256, 1024), names=NAMES):
    x = np.array(x, dtype=np.float64)
    mean = 0.7 - 1 / x
    scores = {name: (mean - i / 50, mean - i / 40, mean) for i, name in enumerate(names)}
    series = {name: zip(x, *own, strict=True) for name, own in scores.items()}
    plot_curve(series, path, "dimensions $d$", "Spearman, $times$ 100", log_x)


DRAWINGS = pytest.mark.parametrize("draw", [draw_clusters, draw_curves])


def assert_whole(path):
    data = path.read_bytes()
    if path.suffix.lower() == ".png":
        assert data.startswith(b"\x89PNG")
        assert b"IEND" in data[-12:]
    else:
        assert ET.fromstring(data).tag.endswith("svg")


@pytest.mark.matrix
@DRAWINGS
@pytest.mark.parametrize("name", ["figure.png", "new/figure.svg", "figure.PNG"])
def test_a_picture_is_written_whole_and_always_the_same(draw, name, tmp_path):
    path = tmp_path / name
    draw(path)
    assert_whole(path)
    first = path.read_bytes()
    draw(path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@DRAWINGS
def test_texts_are_shown_as_they_are(draw, tmp_path):
    draw(tmp_path / "figure.svg")
    svg = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    # matplotlib writes each text that it draws into a comment.
    for text in ("in $", "paid in $", r"in \euro", r"$\frac{broken$", "_hidden_^", r"\x1b[31mred"):
        assert any(text in part.split("-->")[0] for part in svg.split("<!--")[1:]), text


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn, as matplotlib has them."""
    from matplotlib.figure import Figure

    found = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (found.append(f), save(f, *a, **k)))
    return found


@DRAWINGS
def test_everything_is_within_the_picture_and_the_legend_off_the_data(draw, drawn, tmp_path):
    draw(tmp_path / "figure.png")
    (figure,) = drawn
    edges, size = figure.get_tightbbox(), figure.get_size_inches()
    assert (edges.min >= 0).all()
    assert (edges.max <= size).all()
    (legend,) = figure.legends
    for axes in figure.axes:
        assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
        # However long the legend, the data have their room.
        assert axes.get_window_extent().height > 3.2 * figure.dpi


@pytest.mark.matrix
@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("x", [(500, 512, 512.5), range(10, 25), (1, 2e5, 3e5, 1e6)])
def test_ticks_do_not_run_into_each_other(x, log_x, drawn, tmp_path):
    draw_curves(tmp_path / "figure.png", log_x, x)
    (axes,) = drawn[0].axes
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) > 1
    assert {float(tick) for tick in axes.get_xticks()} <= set(x)
    for left, right in itertools.pairwise(sorted(boxes, key=lambda box: box.x0)):
        assert left.x1 < right.x0


def test_curves_are_drawn_along_x_with_their_intervals(drawn, tmp_path):
    series = {
        "a": [(30, 3, 2, 4), (10, 1, 0, 2), (20, 2, 1, 3), (10, 1, 0, 2)],
        "b": [(5, 2, 1, 4)],
    }
    plot_curve(series, tmp_path / "figure.png", "x", "y")
    (axes,) = drawn[0].axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [
        [[10, 1], [20, 2], [30, 3]],
        [[5, 2]],
    ]
    bars = [c.get_segments() for c in axes.collections if hasattr(c, "get_segments")]
    assert [[part.tolist() for part in bar] for bar in bars] == [
        [[[10, 0], [10, 2]], [[20, 1], [20, 3]], [[30, 2], [30, 4]]],
        [[[5, 1], [5, 4]]],
    ]


@DRAWINGS
def test_drawing_leaves_matplotlib_as_it_was(draw, monkeypatch, tmp_path):
    import matplotlib as mpl

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with mpl.rc_context({"text.usetex": True, "font.size": 3}):
        draw(tmp_path / "styled.svg")
        assert (mpl.rcParams["text.usetex"], mpl.rcParams["font.size"]) == (True, 3)
    draw(tmp_path / "plain.svg")
    assert (tmp_path / "styled.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()


def test_analyses_are_given_without_matplotlib(monkeypatch, tmp_path, tiny_run, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    caplog.set_level("INFO")
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    fit_head(run=run, head="pca", dim=4)
    found = llmcond.analyse(run=run, what=["isotropy", "clusters"], conditions=2, split="train")
    assert {row["name"] for row in found["clusters"]} >= {"pca@concat-sent-cond"}
    assert "no pictures: matplotlib is not installed (pip install '.[plots]' in" in caplog.text
    assert not (run / "analyses").exists()


def test_without_matplotlib_there_is_a_way_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install '\.\[plots\]'"):
        draw_curves(tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_leaves_the_old_one(monkeypatch, tmp_path):
    from matplotlib.figure import Figure

    def fail(self, path, **options):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    path = tmp_path / "figure.png"
    draw_curves(path)
    old = path.read_bytes()
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(UserError, match="disk is full"):
        draw_curves(path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["figure.png"]


@pytest.mark.matrix
@pytest.mark.parametrize("log_x", [False, True])
@pytest.mark.parametrize("x", [(512,), (500, 512, 512.5), range(1, 2_000, 10), (1, 1e6, 3e6)])
def test_curves_of_any_length_are_drawn(x, log_x, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(tmp_path / "figure.png", log_x, x, NAMES[:2])
    assert_whole(tmp_path / "figure.png")


def test_undefined_scores_leave_a_gap(tmp_path):
    nan = [np.nan] * 3
    scores = {"some": [0.1, np.nan, 0.3], "none": nan}
    series = {name: zip([1, 2, 3], own, nan, nan, strict=True) for name, own in scores.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curve(series, tmp_path / "figure.png", "x", "y")
    assert_whole(tmp_path / "figure.png")


def test_many_points_do_not_make_a_huge_svg(tmp_path):
    draw_clusters(tmp_path / "figure.svg", n=20_000, names=["a", "b", "no $point"])
    assert (tmp_path / "figure.svg").stat().st_size < 2e6
