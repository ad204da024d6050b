"""How evenly vectors spread over all directions (CASE, appendix B)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError

#: Random directions that the partition ratio is taken over: k of CASE, appendix B.
DIRECTIONS = 1_000

#: Vectors that are worth looking at: more change no digit that is shown.
MOST_VECTORS = 100_000

#: Vectors looked at together, so that memory does not grow with their number.
_BLOCK = 8_192

# A mean shorter than this share of the vectors' length is rounding: it points nowhere.
_NO_MEAN = 1e-12


@dataclass(frozen=True, slots=True)
class Isotropy:
    """How isotropic a set of vectors is, by the two measures of CASE, appendix B.

    Attributes:
        mean_cosine: mean over the vectors of their cosine with the mean vector (table 4); near 1,
            all point the same way. 0 where the vectors cancel out and there is no mean direction.
        partition_ratio: min F(u) / max F(u) over random unit directions u, where F(u) is the sum
            of exp(e . u) over the vectors e, each scaled to unit length (equation 10, table 5);
            1 is isotropic.
        n: number of vectors.
        std_cosine: standard deviation of what ``mean_cosine`` is the mean of (table 4).
    """

    mean_cosine: float
    partition_ratio: float
    n: int
    std_cosine: float


def isotropy(vectors: NDArray[Any], directions: int = DIRECTIONS, seed: int = 0) -> Isotropy:
    """Measure how isotropic vectors are.

    The partition ratio of Mu et al. (2018) takes F over the eigenvectors of the vectors' second
    moment; CASE (appendix B) takes it over random directions, and so does this. In d dimensions
    random directions have a cosine of at most some 3 / sqrt(d) with a vector, so the ratio is
    never near 0 where d is large: n equal vectors give about 0.45 for d = 64, 0.77 for 512 and
    0.91 for 4096. Compare it among vectors of the same size only, with the same seed and number
    of directions.

    Args:
        vectors: (n, d) in any float type. Read in blocks of rows, so it may be a memory map.
        directions: how many random directions.
        seed: of the directions.

    Raises:
        UserError: no vectors, values that are not finite, or zero vectors.
    """
    n, dim = shape_of(vectors)
    parts = [slice(start, start + _BLOCK) for start in range(0, n, _BLOCK)]
    total, norms = np.zeros(dim), np.empty(n)
    for part in parts:
        # float64: the squares of float16 and float32 leave their own range.
        block = np.asarray(vectors[part], dtype=np.float64)
        total += block.sum(axis=0)
        norms[part] = np.linalg.norm(block, axis=1)
    for bad, what in ((~np.isfinite(norms), "NaN or infinite"), (norms == 0, "zero")):
        if bad.any():
            raise UserError(
                f"{int(bad.sum()):,} of {n:,} vectors are {what}, the first at position "
                f"{int(bad.argmax())}: they have no direction. Leave them out."
            )
    mean = total / n
    length = float(np.linalg.norm(mean))
    pointing = mean / length if length > _NO_MEAN * norms.mean() else np.zeros(dim)
    # Uniform on the sphere. Seeded with their number, too: vectors that were themselves drawn with
    # this seed are not to be met again.
    drawn = np.random.default_rng((seed, directions)).standard_normal((directions, dim))
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    towards = np.ascontiguousarray(drawn.T, dtype=np.float32)
    cosines, partition = np.empty(n), np.zeros(directions)
    for part in parts:
        unit = np.asarray(vectors[part], dtype=np.float64) / norms[part, None]
        cosines[part] = unit @ pointing
        # Of two unit vectors: at most 1, so that exp neither overflows nor vanishes.
        exponent = unit.astype(np.float32) @ towards
        partition += np.exp(exponent, out=exponent).sum(axis=0, dtype=np.float64)
    return Isotropy(
        mean_cosine=float(cosines.mean()),
        partition_ratio=float(partition.min() / partition.max()),
        n=n,
        std_cosine=float(cosines.std()),
    )


def shape_of(vectors: NDArray[Any]) -> tuple[int, int]:
    """Return (n, d) of a set of vectors; a UserError where there are none."""
    shape = vectors.shape
    if len(shape) != 2 or 0 in shape:
        raise UserError(
            f"vectors of shape {shape} were given; expected (n, d), n and d at least 1."
        )
    return int(shape[0]), int(shape[1])


def measure_isotropy(name: str, vectors: NDArray[Any], seed: int = 0) -> dict[str, Any]:
    """Return the isotropy of vectors as results have it; zero vectors are counted, and left out."""
    kept = vectors[np.linalg.norm(vectors, axis=1) > 0]
    if not len(kept):
        nothing = dict.fromkeys(("mean_cosine", "std_cosine", "partition_ratio"))
        return {"name": name, **nothing, "n": 0, "n_zero": len(vectors)}
    found = asdict(isotropy(kept, seed=seed))
    return {"name": name, **found, "n_zero": len(vectors) - len(kept)}
