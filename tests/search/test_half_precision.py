"""NumPy and PyTorch give the same of vectors in half precision."""

import numpy as np
import pytest

from llmcond.search import half_precision


@pytest.mark.parametrize("n", [1, 3, 9_000])
def test_many_values_are_as_few(monkeypatch, n):
    chance = np.random.default_rng(n)
    vectors = chance.standard_normal((n, 24)).astype(np.float16)
    queries = chance.standard_normal((2, 24)).astype(np.float32)

    def both(function, *given):
        few = function(*given)
        with monkeypatch.context() as patch:
            patch.setattr(half_precision, "_MAX_NUMPY_VALUES", 0)
            return few, function(*given)

    np.testing.assert_array_equal(
        *both(half_precision.convert_dtype, vectors, "float32", vectors.size)
    )
    wide = chance.standard_normal((n, 24)).astype(np.float32)
    np.testing.assert_array_equal(*both(half_precision.convert_dtype, wide, "float16", wide.size))
    products = both(half_precision.inner_products, vectors, queries)
    np.testing.assert_allclose(*products, atol=1e-5)
    found = both(half_precision.top_k, products[0][0], min(5, n))
    assert set(found[0]) == set(found[1])
