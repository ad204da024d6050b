"""Matrices in memory and on disk: equal to the dense array, and read only where necessary."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcond.base.arrays import as_matrix
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


@settings(deadline=None, max_examples=100)
@given(matrices_and_rows(), st.integers(0, 9), st.integers(0, 9))
def test_matrices_equal_dense_array(example, start, stop):
    matrix, dense, rows = example
    assert matrix.shape == dense.shape
    assert len(matrix) == len(dense)
    for part in (rows, slice(None), slice(start, stop)):
        actual = as_matrix(matrix).read(part)
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, dense[part])
    taken, expected = as_matrix(matrix).take(rows), dense[rows]
    assert taken.shape == expected.shape
    np.testing.assert_array_equal(as_matrix(taken).read(), expected)
    reverse = np.arange(len(expected))[::-1]
    np.testing.assert_array_equal(as_matrix(as_matrix(taken).take(reverse)).read(), expected[::-1])


@settings(deadline=None, max_examples=100)
@given(matrices_and_rows())
def test_unique_rows_reconstruct_all_rows(example):
    matrix, dense, _ = example
    first, number = as_matrix(matrix).unique()
    assert len(number) == len(dense)
    np.testing.assert_array_equal(dense[first][number], dense)
    np.testing.assert_array_equal(number[first], np.arange(len(first)))
    if not isinstance(matrix, SharedRows):
        assert len(first) == len({row.tobytes() for row in dense + np.float32(0)})


def test_difference_of_float16_vectors_is_computed_in_float32():
    first, second = (np.array([[value]], dtype=np.float16) for value in (2048, 0.5))
    # float16 cannot represent this number
    assert as_matrix(Difference(first, second)).read().item() == 2047.5


def test_unique_rows_of_unusual_arrays():
    first, number = as_matrix(np.zeros((4, 0), dtype=np.float32)).unique()
    assert (first.tolist(), number.tolist()) == ([0], [0, 0, 0, 0])
    first, number = as_matrix(np.zeros((0, 0), dtype=np.float32)).unique()
    assert (len(first), len(number)) == (0, 0)
    rows = np.array([[1, 2], [2, 1], [1, 2], [0, 0]], dtype=np.float64, order="F")
    first, number = as_matrix(rows[:, ::-1]).unique()
    assert (len(first), number[0] == number[2], len(set(number.tolist()))) == (3, True, 3)
    # Shared rows are compared without reading them.
    first, number = as_matrix(SharedRows(UnreadableMatrix(), np.array([4, 0, 4, 2]))).unique()
    assert len(first) == 3
    np.testing.assert_array_equal(np.array([4, 0, 4, 2])[first][number], [4, 0, 4, 2])


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
    taken = pairs.take(np.arange(6)[::-1])
    assert len(as_matrix(taken.condition).unique()[0]) == 3  # equal conditions stay equal
    part = PairArrays(np.zeros((3, 2)), np.ones((3, 2)), np.zeros(3)).take(np.array([1]))
    assert (part.condition, part.pair, part.dim_condition) == (None, None, 0)


def test_taking_rows_does_not_read_vectors():
    difference = Difference(SharedRows(UnreadableMatrix(), np.arange(5)), UnreadableMatrix())
    pairs = PairArrays(
        ConcatenatedMatrix([difference, SharedRows(UnreadableMatrix(), np.zeros(5, int))]),
        difference,
        np.zeros(5),
        UnreadableMatrix(),
    )
    assert pairs.take(np.array([3, 4])).first.shape == (2, 6)


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
        as_matrix(matrix).take(np.arange(len(matrix))),
    ]


def test_memory_maps_are_on_disk_and_keep_values_when_released(map_array):
    values = random_integers((6, 3), 0, np.float16)
    disk = map_array(values)
    copies = disk[np.array([1])], disk.astype(np.float32), disk.copy()
    for matrix in (values, *wrap_matrix(values), *copies):
        assert not as_matrix(matrix).on_disk
    for matrix in (disk, disk[2:], disk[:, 1:], *wrap_matrix(disk)):
        assert as_matrix(matrix).on_disk
        before = as_matrix(matrix).read()
        as_matrix(matrix).release()
        np.testing.assert_array_equal(as_matrix(matrix).read(), before)
    for mode in ("r+", "c"):  # "c" is a private memory map, whose values are nowhere else
        disk = map_array(random_integers((6, 3), 0), mode)
        disk[:] = 7
        as_matrix(disk).release()
        assert (disk == 7).all()
