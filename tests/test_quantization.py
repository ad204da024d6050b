"""Quantised and truncated embeddings, compared with those of sentence-transformers."""

import numpy as np
import pytest

from llmcond.base.arrays import (
    PRECISIONS,
    Quantizer,
    StoredCodes,
    check_truncate_dim,
    measure_ranges,
    quantize_embeddings,
)
from llmcond.base.errors import UserError


@pytest.fixture(scope="module")
def embeddings():
    vectors = np.random.default_rng(0).normal(size=(150, 20)).astype(np.float32)
    vectors[5, :7] = 0.0
    vectors[:, 3] = 0.25  # a dimension without a range
    return vectors


def quantize_with_peer(*arguments, **options):
    from sentence_transformers.util.quantization import quantize_embeddings as quantize

    return quantize(*arguments, **options)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_codes_are_those_of_sentence_transformers(embeddings, precision):
    ranges = np.array([[-1.0] * 20, [0.8] * 20])
    for vectors, options in (
        (embeddings, {}),
        (embeddings.astype(np.float16), {"calibration_embeddings": embeddings[:120]}),
        (embeddings.astype(np.float64), {"ranges": ranges}),
        (embeddings[0], {"ranges": ranges}),
        (embeddings[:0], {"ranges": ranges}),
    ):
        codes = quantize_embeddings(vectors, precision, **options)
        expected = quantize_with_peer(vectors, precision, **options)
        assert (codes.shape, codes.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_codes_stand_for_middle_of_their_step(embeddings, precision):
    ranges = measure_ranges(embeddings)
    quantizer = Quantizer(precision, ranges)
    decoded = StoredCodes(quantizer, 20).decode(quantizer(embeddings))
    half_step = (ranges[1] - ranges[0]) / 255 / 2
    inside = embeddings < ranges[1]  # the highest value is the end of the last step
    assert (np.abs(decoded - embeddings) <= half_step * 1.001 + 1e-6)[inside].all()
    np.testing.assert_array_equal(decoded[:, 3], embeddings[:, 3])
    bits = Quantizer("binary" if precision == "int8" else "ubinary")
    decoded = StoredCodes(bits, 20).decode(bits(embeddings))
    np.testing.assert_allclose(decoded, np.where(embeddings > 0, 1, -1) / 20**0.5, rtol=1e-6)


def test_invalid_arguments_are_rejected():
    for arguments, message in (
        ((np.ones((3, 4)), ["int8"]), r"precision is \['int8'\].* Legal: float32, int8, uint8"),
        ((np.ones((3, 4), np.int8), "binary"), "the embeddings are of the type int8"),
        (([[1.0], [1.0, 2.0]], "binary"), "the embeddings cannot be read as an array"),
        ((np.array([[1.0, 2.0], [3.0, np.nan]]), "int8"), "are not finite: row 2 has NaN or"),
        ((np.ones((3, 4)), "int8", None, np.ones((3, 5))), "calibration_embeddings is 3x5; expec"),
        ((np.ones((1, 4)), "uint8"), "a single embedding has none"),
        ((np.ones((3, 4)), "int8", np.zeros((2, 5))), "has the shape 2x5, not 2x4"),
        ((np.ones((3, 4)), "int8", np.ones((2, 4)) * [[1], [0]]), "the lowest is above"),
    ):
        with pytest.raises(UserError, match=message):
            quantize_embeddings(*arguments)


def test_invalid_truncate_dim_is_rejected():
    assert check_truncate_dim(np.int64(3), 4) == 3
    for value in (True, 1.0, "2", 0, 5, [2]):
        with pytest.raises(UserError, match=r"truncate_dim is .*whole number"):
            check_truncate_dim(value, 4)
