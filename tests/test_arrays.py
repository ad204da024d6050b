"""Matrices in memory and on disk: equal to the dense array, and read only where necessary."""

import mmap

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.arrays import as_matrix
from llmcond.heads import ConcatenatedMatrix, Difference, PairArrays, SharedRows

TYPES = [np.float16, np.float32, np.float64]


class UnreadableMatrix:
    """A matrix whose vectors must not be read."""

    shape = (5, 3)

    def __len__(self):
        return 5

    def __getitem__(self, rows):
        raise AssertionError("vectors were read")


def random_integers(shape, seed, dtype=np.float32):
    """Return small integers, which every type can represent and which make some rows equal."""
    return np.random.default_rng(seed).integers(-2, 3, size=shape).astype(dtype)


@st.composite
def matrices(draw, n, dim, depth=2):
    """A matrix of any class, and the float32 array with its values."""
    kinds = ["plain", "gathered", "difference", "concatenated"]
    kind = draw(st.sampled_from(kinds[: 3 if dim < 2 else 4])) if depth else "plain"
    if kind == "plain":
        values = random_integers((n, dim), draw(st.integers(0, 99)), draw(st.sampled_from(TYPES)))
        return values, values.astype(np.float32)
    if kind == "gathered":
        size = draw(st.integers(1, 5))
        table, dense = draw(matrices(size, dim, depth - 1))
        index = np.array(draw(st.lists(st.integers(0, size - 1), min_size=n, max_size=n)), int)
        return SharedRows(table, index), dense[index]
    if kind == "difference":
        (first, dense1), (second, dense2) = (draw(matrices(n, dim, depth - 1)) for _ in range(2))
        return Difference(first, second), dense1 - dense2
    cut = draw(st.integers(1, dim - 1))
    (left, dense1), (right, dense2) = (
        draw(matrices(n, size, depth - 1)) for size in (cut, dim - cut)
    )
    return ConcatenatedMatrix([left, right]), np.concatenate([dense1, dense2], axis=1)


@st.composite
def matrices_and_rows(draw):
    n = draw(st.integers(0, 9))
    matrix, dense = draw(matrices(n, draw(st.integers(1, 4))))
    mask = st.lists(st.booleans(), min_size=n, max_size=n).map(lambda rows: np.array(rows, bool))
    indices = st.lists(st.integers(0, max(n - 1, 0)), max_size=12 if n else 0)
    return matrix, dense, draw(st.one_of(mask, indices.map(lambda rows: np.array(rows, int))))


@settings(deadline=None, max_examples=150)
@given(matrices_and_rows(), st.integers(0, 9), st.integers(0, 9))
def test_matrices_equal_dense_array(example, start, stop):
    matrix, dense, rows = example
    assert matrix.shape == dense.shape
    assert len(matrix) == len(dense)
    for part in (rows, slice(None), slice(start, stop)):
        actual = as_matrix(matrix).read(part)
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, dense[part])


@settings(deadline=None, max_examples=150)
@given(matrices_and_rows(), st.data())
def test_taken_rows_equal_dense_rows_and_can_be_taken_from_again(example, data):
    matrix, dense, rows = example
    part, expected = as_matrix(matrix).take(rows), dense[rows]
    assert part.shape == expected.shape
    assert len(part) == len(expected)
    np.testing.assert_array_equal(as_matrix(part).read(), expected)
    if len(expected):
        further_rows = np.array(
            data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=5)), int
        )
        np.testing.assert_array_equal(
            as_matrix(as_matrix(part).take(further_rows)).read(), expected[further_rows]
        )


@settings(deadline=None, max_examples=150)
@given(matrices_and_rows())
def test_unique_rows_reconstruct_all_rows(example):
    matrix, dense, _ = example
    first, number = as_matrix(matrix).unique()
    assert len(number) == len(dense)
    np.testing.assert_array_equal(dense[first][number], dense)
    np.testing.assert_array_equal(number[first], np.arange(len(first)))
    if not isinstance(matrix, SharedRows):
        assert len(first) == len({row.tobytes() for row in dense + np.float32(0)})


def test_rows_without_columns_are_all_equal():
    first, number = as_matrix(np.zeros((4, 0), dtype=np.float32)).unique()
    assert (first.tolist(), number.tolist()) == ([0], [0, 0, 0, 0])
    first, number = as_matrix(np.zeros((0, 0), dtype=np.float32)).unique()
    assert (len(first), len(number)) == (0, 0)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", TYPES)
def test_unique_rows_work_in_any_memory_layout(dtype, order):
    rows = np.array([[1, 2], [2, 1], [1, 2], [0, 0]], dtype=dtype, order=order)
    first, number = as_matrix(rows[:, ::-1]).unique()
    assert len(first) == 3
    assert number[0] == number[2]
    assert len(set(number.tolist())) == 3


def test_unique_compares_shared_rows_without_reading_them():
    first, number = as_matrix(SharedRows(UnreadableMatrix(), np.array([4, 0, 4, 2]))).unique()
    assert len(first) == 3
    assert number[0] == number[2]
    np.testing.assert_array_equal(np.array([4, 0, 4, 2])[first][number], [4, 0, 4, 2])


def test_take_does_not_read_rows():
    matrix = ConcatenatedMatrix(
        [
            Difference(SharedRows(UnreadableMatrix(), np.arange(5)), UnreadableMatrix()),
            SharedRows(UnreadableMatrix(), np.zeros(5, int)),
        ]
    )
    part = as_matrix(matrix).take(np.array([True, False, True, False, False]))
    assert part.shape == (2, 6)


def test_difference_of_float16_vectors_is_computed_in_float32():
    first, second = (np.array([[value]], dtype=np.float16) for value in (2048, 0.5))
    difference = as_matrix(Difference(first, second)).read()
    assert difference.item() == 2047.5  # float16 cannot represent this number
    assert Difference(first, second)[np.array([0])].dtype == np.float32


def test_taking_pairs_takes_all_their_arrays():
    rng = np.random.default_rng(0)
    first, second, table = (rng.normal(size=(6, 3)).astype(np.float16) for _ in range(3))
    pairs = PairArrays(
        first,
        Difference(second, first),
        np.linspace(0, 1, 6),
        SharedRows(table, np.array([0, 0, 1, 1, 2, 2])),
        np.array([7, 7, 8, 8, 9, 9]),
    )
    for rows in (np.array([5, 1]), np.arange(6) % 4 == 1):
        part = pairs.take(rows)
        assert (len(part), part.dim, part.dim_condition) == (2, 3, 3)
        for name in ("first", "second", "condition"):
            whole = as_matrix(getattr(pairs, name)).read()
            np.testing.assert_array_equal(as_matrix(getattr(part, name)).read(), whole[rows])
        for name in ("rating", "pair"):
            np.testing.assert_array_equal(getattr(part, name), getattr(pairs, name)[rows])


def test_pairs_without_conditions_can_be_taken():
    pairs = PairArrays(np.zeros((3, 2)), np.ones((3, 2)), np.zeros(3))
    part = pairs.take(np.array([1]))
    assert (part.condition, part.pair) == (None, None)
    assert part.dim_condition == 0


def test_taking_pairs_does_not_read_vectors():
    pairs = PairArrays(
        UnreadableMatrix(),
        Difference(UnreadableMatrix(), UnreadableMatrix()),
        np.zeros(5),
        UnreadableMatrix(),
    )
    assert len(pairs.take(np.array([3, 4]))) == 2


def test_equal_conditions_stay_equal_after_take():
    condition = random_integers((3, 2), 0)[np.array([0, 1, 0, 1, 2, 0])]
    pairs = PairArrays(np.zeros((6, 2)), np.ones((6, 2)), np.zeros(6), condition)
    taken = pairs.take(np.arange(6))
    assert len(as_matrix(taken.condition).unique()[0]) == len(as_matrix(condition).unique()[0])


# -- memory maps -------------------------------------------------------------------------------


@pytest.fixture
def map_array(tmp_path):
    def make(values, mode="r"):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npy"
        np.save(path, values)
        return np.load(path, mmap_mode=mode)

    return make


def wrap_matrix(matrix):
    """Return matrices of every class that contain a matrix."""
    plain = np.zeros(matrix.shape, dtype=np.float32)
    return [
        SharedRows(matrix, np.arange(len(matrix))),
        Difference(matrix, plain),
        Difference(plain, matrix),
        ConcatenatedMatrix([plain, matrix]),
        ConcatenatedMatrix([SharedRows(matrix, np.arange(len(matrix))), plain]),
        as_matrix(matrix).take(np.arange(len(matrix))),
    ]


def test_on_disk_is_true_for_memory_maps_only(map_array):
    values = random_integers((6, 3), 0)
    disk = map_array(values)
    assert all(
        as_matrix(matrix).on_disk for matrix in [disk, disk[2:], disk[:, 1:], *wrap_matrix(disk)]
    )
    assert not any(
        as_matrix(matrix).on_disk for matrix in [values, *wrap_matrix(values), disk[np.array([1])]]
    )


def test_copy_of_memory_map_is_in_memory(map_array):
    disk = map_array(random_integers((6, 3), 0))
    assert not as_matrix(disk.astype(np.float16)).on_disk
    assert not as_matrix(disk.copy()).on_disk


def test_release_keeps_values(map_array):
    values = random_integers((6, 3), 0, np.float16)
    disk = map_array(values)
    for matrix in [disk, values, *wrap_matrix(disk), *wrap_matrix(values)]:
        before = as_matrix(matrix).read()
        as_matrix(matrix).release()
        np.testing.assert_array_equal(as_matrix(matrix).read(), before)


def test_release_keeps_values_written_to_memory_map(map_array):
    disk = map_array(random_integers((6, 3), 0), "r+")
    disk[:] = 7
    as_matrix(disk).release()
    assert (disk == 7).all()


def test_release_keeps_values_written_to_private_memory_map(map_array):
    disk = map_array(random_integers((6, 3), 0), "c")
    disk[:] = 7
    as_matrix(disk).release()
    assert (disk == 7).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="needs madvise")
def test_release_frees_memory(map_array):
    disk = map_array(np.ones((8_192, 1_024), dtype=np.float32))
    process = psutil.Process()
    matrix = SharedRows(
        Difference(disk, np.broadcast_to(np.float32(0), disk.shape)), np.arange(8_192)
    )
    for start in range(0, 8_192, 512):
        as_matrix(matrix).read(slice(start, start + 512))
    read = process.memory_info().rss
    as_matrix(matrix).release()
    assert read - process.memory_info().rss > 24 * 2**20
