"""Isotropy: how evenly vectors are distributed over all directions (CASE, appendix B)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError

#: The number of random directions of the partition ratio: k of CASE, appendix B.
DIRECTIONS = 1_000

#: The largest number of vectors that are measured; more do not change the digits that are shown.
MAX_VECTORS = 100_000

#: The number of vectors that are read together, so that memory does not grow with all vectors.
_BLOCK = 8_192

# A mean shorter than this fraction of the vectors' mean length is rounding and has no direction.
_NO_MEAN = 1e-12


@dataclass(frozen=True, slots=True)
class Isotropy:
    """How isotropic a set of vectors is, by the two measures of CASE, appendix B.

    Attributes:
        mean_cosine: The mean of the vectors' cosines with the mean vector (table 4). Near 1, all
            vectors have a similar direction. 0 if the vectors cancel out, so that there is no mean
            direction.
        partition_ratio: min F(u) / max F(u) over random unit directions u, where F(u) is the sum
            of exp(e . u) over the vectors e, each scaled to unit length (equation 10, table 5);
            1 is isotropic.
        n: The number of vectors.
        std_cosine: The standard deviation of the cosines with the mean vector (table 4).
    """

    mean_cosine: float
    partition_ratio: float
    n: int
    std_cosine: float


def isotropy(vectors: NDArray[Any], directions: int = DIRECTIONS, seed: int = 0) -> Isotropy:
    """Measure the isotropy of vectors.

    The partition ratio of Mu et al. (2018) is over the eigenvectors of the vectors' second moment.
    CASE (appendix B) and this function use random directions instead. In d dimensions random
    directions have a cosine of at most about 3 / sqrt(d) with a vector, so the ratio is never near
    0 for large d: n equal vectors have a ratio of about 0.45 for d = 64, 0.77 for 512 and 0.91 for
    4096. Compare it only between vectors of the same size, with the same seed and number of
    directions.

    Args:
        vectors: (n, d) in any float type. They are read in blocks of rows, so a memory map works.
        directions: The number of random directions.
        seed: The random seed of the directions.

    Raises:
        UserError: There are no vectors, values are not finite, or vectors are zero.
    """
    n, dim = check_shape(vectors)
    norms, mean_direction = _norms_and_mean_direction(vectors)
    # Directions are uniform on the sphere. The number of directions is part of the seed, so that
    # they differ from vectors that were themselves sampled with this seed.
    random_directions = np.random.default_rng((seed, directions)).standard_normal((directions, dim))
    random_directions /= np.linalg.norm(random_directions, axis=1, keepdims=True)
    directions_by_column = np.ascontiguousarray(random_directions.T, dtype=np.float32)
    cosines, partition = np.empty(n), np.zeros(directions)
    for part in _blocks(n):
        unit = np.asarray(vectors[part], dtype=np.float64) / norms[part, None]
        cosines[part] = unit @ mean_direction
        # The product of two unit vectors is at most 1, so exp neither overflows nor underflows.
        exponent = unit.astype(np.float32) @ directions_by_column
        partition += np.exp(exponent, out=exponent).sum(axis=0, dtype=np.float64)
    return Isotropy(
        mean_cosine=float(cosines.mean()),
        partition_ratio=float(partition.min() / partition.max()),
        n=n,
        std_cosine=float(cosines.std()),
    )


def cosines_to_mean(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Return the cosine of each vector with the mean vector (CASE, figures 5 and 6).

    Args:
        vectors: (n, d) in any float type.

    Returns:
        The cosines, (n,); 0 if the vectors cancel out, so that there is no mean direction.

    Raises:
        UserError: As for ``isotropy``.
    """
    norms, mean_direction = _norms_and_mean_direction(vectors)
    cosines = np.empty(len(norms))
    for part in _blocks(len(norms)):
        cosines[part] = np.asarray(vectors[part], np.float64) @ mean_direction / norms[part]
    return cosines


def _norms_and_mean_direction(
    vectors: NDArray[Any],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the norms, (n,), of checked vectors, and the unit vector, (d,), of their mean."""
    n, dim = check_shape(vectors)
    total, norms = np.zeros(dim), np.empty(n)
    for part in _blocks(n):
        # float64, because the squares of float16 and float32 numbers may overflow.
        block = np.asarray(vectors[part], dtype=np.float64)
        total += block.sum(axis=0)
        norms[part] = np.linalg.norm(block, axis=1)
    for bad, what in ((~np.isfinite(norms), "NaN or infinite"), (norms == 0, "zero")):
        if bad.any():
            raise UserError(
                f"{int(bad.sum()):,} of {n:,} vectors are {what}, the first at position "
                f"{int(bad.argmax())}. They have no direction; leave them out."
            )
    mean = total / n
    length = float(np.linalg.norm(mean))
    return norms, mean / length if length > _NO_MEAN * norms.mean() else np.zeros(dim)


def _blocks(n: int) -> list[slice]:
    return [slice(start, start + _BLOCK) for start in range(0, n, _BLOCK)]


def check_shape(vectors: NDArray[Any]) -> tuple[int, int]:
    """Return the shape (n, d) of vectors.

    Raises:
        UserError: There are no vectors, or the shape is not (n, d).
    """
    shape = vectors.shape
    if len(shape) != 2 or 0 in shape:
        raise UserError(
            f"the vectors have the shape {shape}; expected (n, d) with n and d at least 1."
        )
    return int(shape[0]), int(shape[1])


def measure_isotropy(
    name: str, vectors: NDArray[Any], seed: int = 0
) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Measure the isotropy of vectors for results. Zero vectors are counted and left out.

    Returns:
        The figures for JSON, and the cosines of the vectors that are not zero to their mean.
    """
    nonzero = vectors[np.linalg.norm(vectors, axis=1) > 0]
    if not len(nonzero):
        nothing = dict.fromkeys(("mean_cosine", "std_cosine", "partition_ratio"))
        return {"name": name, **nothing, "n": 0, "n_zero": len(vectors)}, np.empty(0)
    figures = asdict(isotropy(nonzero, seed=seed))
    n_zero = len(vectors) - len(nonzero)
    return {"name": name, **figures, "n_zero": n_zero}, cosines_to_mean(nonzero)
