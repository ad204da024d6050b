"""Arithmetic on rows of vectors."""

import numpy as np


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of one array with the same row of the other."""
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return (first * second).sum(axis=1) / norms


def normalize(values: np.ndarray) -> np.ndarray:
    """Scale vectors to unit norm."""
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def assert_close(vectors: np.ndarray, expected: np.ndarray) -> None:
    """Check that no value differs by more than 1e-5."""
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
