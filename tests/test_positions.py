"""Positional encodings: the formula, every length and width, dtypes, masks, and where a cached step stands."""

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend import get_keras_mask

import keras_transformer as kt


def exact(length, width, layout, max_wavelength=10000):
    """The paper's formula in float64, column by column."""
    positions = np.arange(length, dtype=np.float64)
    columns = np.zeros((length, width))
    for i in range((width + 1) // 2):
        angle = positions / max_wavelength ** (2 * i / width)
        sine, cosine = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, (width + 1) // 2 + i)
        columns[:, sine] = np.sin(angle)
        if 2 * i + 1 < width:
            columns[:, cosine] = np.cos(angle)
    return columns


def encoding(length, width, **options):
    layer = kt.PositionalEncoding(**options)
    return np.asarray(ops.cast(layer(ops.zeros((1, length, width))), "float32"))[0]


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("width", [1, 2, 7, 8, 64])
def test_equals_the_formula_at_every_width_and_far_out(layout, width):
    np.testing.assert_allclose(encoding(5000, width, layout=layout), exact(5000, width, layout), atol=1e-5)


def test_other_wavelengths():
    np.testing.assert_allclose(
        encoding(50, 6, max_wavelength=100), exact(50, 6, "concatenated", max_wavelength=100), atol=1e-5
    )


@pytest.mark.parametrize("policy, rounding", [("mixed_bfloat16", 4e-3), ("mixed_float16", 5e-4)])
def test_half_precision_rounds_once(policy, rounding):
    keras.config.set_dtype_policy(policy)
    layer = kt.PositionalEncoding()
    x = ops.zeros((1, 5000, 8), dtype=layer.compute_dtype)
    assert keras.backend.standardize_dtype(layer(x).dtype) == layer.compute_dtype
    rows = encoding(5000, 8)
    np.testing.assert_allclose(rows, exact(5000, 8, "concatenated"), atol=rounding)
    assert np.all(np.any(rows[1:] != rows[:-1], axis=1))


def test_adds_to_its_input(rng):
    x = rng.normal(size=(2, 3, 4)).astype("float32")
    np.testing.assert_allclose(kt.PositionalEncoding()(x) - x, np.tile(encoding(3, 4), (2, 1, 1)), atol=1e-6)


def test_the_mask_is_passed_on_and_left_alone():
    symbolic = keras.layers.Embedding(10, 8, mask_zero=True)(keras.Input((None,), dtype="int32"))
    assert get_keras_mask(kt.PositionalEncoding()(symbolic)) is not None
    x = kt.TokenEmbedding(10, 8)(np.array([[3, 4, 0]]))
    mask = get_keras_mask(x)
    y = kt.PositionalEncoding()(x)
    assert get_keras_mask(x) is mask
    assert np.asarray(get_keras_mask(y)).tolist() == [[True, True, False]]


def test_in_a_decoding_scope_each_row_starts_at_its_index():
    layer = kt.PositionalEncoding()
    with kt.DecodingScope(None, index=np.array([0, 3]), length=9):
        y = np.asarray(layer(ops.zeros((2, 2, 8))))
    table = encoding(9, 8)
    np.testing.assert_allclose(y, np.stack([table[:2], table[3:5]]), atol=1e-6)


def test_dropout_acts_in_training_only():
    layer = kt.PositionalEncoding(dropout=0.5)
    x = ops.ones((1, 200, 8))
    np.testing.assert_array_equal(layer(x), layer(x, training=False))
    assert 0.4 < np.mean(np.asarray(layer(x, training=True)) == 0) < 0.6


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layout": "stacked"}, "`layout` must be 'concatenated' or 'interleaved'; got 'stacked'"),
        ({"max_wavelength": 0}, "`max_wavelength` must be above 0; got 0"),
        ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1; got 1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kt.PositionalEncoding(**arguments)


def test_token_ids_are_refused():
    with pytest.raises(ValueError, match="float vectors of shape"):
        kt.PositionalEncoding()(np.array([[1, 2]]))
