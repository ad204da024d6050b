"""NumPy and PyTorch give the same results for vectors in half precision."""

from functools import partial

import numpy as np
import pytest

from llmcond.search import views


@pytest.mark.parametrize("n", [1, 3, 9_000])
def test_torch_results_match_numpy_results(monkeypatch, n):
    rng = np.random.default_rng(n)
    vectors = rng.standard_normal((n, 24)).astype(np.float16)
    queries = rng.standard_normal((2, 24)).astype(np.float32)

    def compute_both(function, *arguments):
        numpy_result = function(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(views, "_MAX_NUMPY_VALUES", 0)
            return numpy_result, function(*arguments)

    np.testing.assert_array_equal(
        *compute_both(views.convert_dtype, vectors, "float32", vectors.size)
    )
    wide = rng.standard_normal((n, 24)).astype(np.float32)
    np.testing.assert_array_equal(*compute_both(views.convert_dtype, wide, "float16", wide.size))
    products = compute_both(views.inner_products, vectors, queries)
    np.testing.assert_allclose(*products, atol=1e-5)
    bits = np.packbits(vectors > 0, axis=1)
    signs = compute_both(views.inner_products, bits, queries, partial(np.unpackbits, axis=1))
    np.testing.assert_allclose(*signs, atol=1e-5)
    indices = compute_both(views.top_k, products[0][0], min(5, n))
    assert set(indices[0]) == set(indices[1])
