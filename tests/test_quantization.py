"""Quantised and truncated embeddings, compared with those of sentence-transformers."""

import numpy as np
import pytest

from llmcond.errors import UserError
from llmcond.quantization import (
    PRECISIONS,
    Quantizer,
    StoredCodes,
    check_truncate_dim,
    measure_ranges,
    quantize_embeddings,
)


@pytest.fixture(scope="module")
def embeddings():
    vectors = np.random.default_rng(0).normal(size=(150, 20)).astype(np.float32)
    vectors[5, :7] = 0.0
    vectors[:, 3] = 0.25  # a dimension without a range
    return vectors


def quantize_with_peer(*arguments, **options):
    from sentence_transformers.util.quantization import quantize_embeddings as quantize

    return quantize(*arguments, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("source", ["embeddings", "calibration", "ranges"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_codes_are_those_of_sentence_transformers(embeddings, precision, source, dtype):
    options = {
        "embeddings": {},
        "calibration": {"calibration_embeddings": embeddings[:120]},
        "ranges": {"ranges": np.array([[-1.0] * 20, [0.8] * 20])},
    }[source]
    vectors = embeddings.astype(dtype)
    codes = quantize_embeddings(vectors, precision, **options)
    expected = quantize_with_peer(vectors, precision, **options)
    assert codes.dtype == expected.dtype
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(20,), (0, 20), (2, 0)])
def test_codes_of_few_embeddings_have_shape_of_sentence_transformers(precision, shape):
    vectors, ranges = np.ones(shape, np.float32), np.stack([np.zeros(shape[-1])] * 2)
    codes = quantize_embeddings(vectors, precision, ranges=ranges)
    expected = quantize_with_peer(vectors, precision, ranges=ranges)
    assert (codes.shape, codes.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_codes_stand_for_middle_of_their_step(embeddings, precision):
    ranges = measure_ranges(embeddings)
    quantizer = Quantizer(precision, ranges)
    decoded = StoredCodes(quantizer, 20).decode(quantizer(embeddings))
    half_step = (ranges[1] - ranges[0]) / 255 / 2
    inside = embeddings < ranges[1]  # the highest value is the end of the last step
    assert (np.abs(decoded - embeddings) <= half_step * 1.001 + 1e-6)[inside].all()
    np.testing.assert_array_equal(decoded[:, 3], embeddings[:, 3])


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_bits_stand_for_signs_with_unit_norm(embeddings, precision):
    quantizer = Quantizer(precision)
    decoded = StoredCodes(quantizer, 20).decode(quantizer(embeddings))
    np.testing.assert_allclose(decoded, np.where(embeddings > 0, 1, -1) / 20**0.5, rtol=1e-6)


def test_ranges_of_few_embeddings_are_reported(embeddings, caplog):
    quantize_embeddings(embeddings[:99], "int8")
    assert "come from 99 embeddings only" in caplog.text
    caplog.clear()
    quantize_embeddings(embeddings[:100], "int8")
    assert not caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((3, 4)), "int4"), "precision is 'int4'.* Legal: float32, int8, uint8"),
        ((np.ones((3, 4)), None), "precision is None.* Legal: float32, int8, uint8"),
        ((np.ones((3, 4)), ["int8"]), r"precision is \['int8'\]"),
        ((np.ones((3, 4), np.int8), "binary"), "the embeddings are of the type int8"),
        ((np.ones((3, 4), np.int8), "float32"), "the embeddings are of the type int8"),
        (([[1.0], [1.0, 2.0]], "binary"), "the embeddings cannot be read as an array"),
        ((np.float32(1), "binary"), "the embeddings are of a single number"),
        ((np.array([[1.0, 2.0], [3.0, np.nan]]), "int8"), "are not finite: row 2 has NaN or"),
        ((np.array([1.0, np.inf]), "binary"), "the embeddings are not finite: row 1"),
        ((np.ones((3, 4)), "int8", None, np.full((3, 4), np.nan)), "calibration_embeddings is not"),
        ((np.ones((3, 4)), "uint8", None, np.full((3, 4), -np.inf)), "not finite: row 1"),
        (
            (np.ones((3, 4)), "int8", None, np.ones((3, 5))),
            "calibration_embeddings is 3x5; expected",
        ),
        ((np.ones((3, 4)), "int8", None, np.ones(4)), "calibration_embeddings is 4; expected"),
        ((np.ones((3, 4)), "int8", None, np.ones((3, 4), int)), "is of the type int64"),
        ((np.ones(4), "int8"), "a single embedding has none"),
        ((np.ones((1, 4)), "uint8"), "a single embedding has none"),
        ((np.ones((3, 4)), "int8", np.zeros((2, 5))), "has the shape 2x5, not 2x4"),
        ((np.ones((3, 4)), "int8", np.ones((2, 4)) * [[1], [0]]), "the lowest is above"),
        ((np.ones((3, 4)), "int8", np.full((2, 4), np.nan)), "not finite"),
        ((np.ones((3, 4)), "int8", [["a"] * 4] * 2), "holds no numbers"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(UserError, match=message):
        quantize_embeddings(*arguments)


@pytest.mark.parametrize("value", [True, 1.0, 2.5, "2", 0, -1, 5, [2], float("nan")])
def test_invalid_truncate_dim_is_rejected(value):
    with pytest.raises(UserError, match=r"truncate_dim is .*whole number"):
        check_truncate_dim(value, 4)
    assert check_truncate_dim(np.int64(3), 4) == 3
