"""Positional encodings: the formula, every length and width, dtypes, masks, and where a cached step stands.

Learned positions: rows of a table, its gradient, and no wrong vector for positions that the table does not have.
"""

import json

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend import get_keras_mask

import keras_transformer as kt

on_tensorflow = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's own")
on_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's own")


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


# learned positions


def learned(max_length=8, width=4, **options):
    layer = kt.LearnedPositions(max_length, **options)
    layer.build((None, None, width))
    return layer


def test_learned_positions_are_rows_of_a_table_as_an_embedding_of_keras_gives_them(rng):
    layer, theirs = learned(), keras.layers.Embedding(8, 4)
    theirs.build(None)
    theirs.set_weights(layer.get_weights())
    for length in (1, 5, 8):
        x = rng.normal(size=(2, length, 4)).astype("float32")
        np.testing.assert_allclose(layer(x), x + theirs(np.arange(length)), atol=1e-6)


def test_learned_positions_start_anew_in_each_segment(rng):
    layer, x = learned(max_length=3), rng.normal(size=(2, 5, 4)).astype("float32")
    segments = np.array([[1, 1, 1, 2, 2], [1, 2, 2, 3, 0]], "int32")
    rows = np.asarray(layer.table)[[[0, 1, 2, 0, 1], [0, 0, 1, 0, 0]]]
    np.testing.assert_allclose(layer(x, segment_ids=segments), x + rows, atol=1e-6)


def test_learned_positions_in_a_decoding_scope_start_at_each_rows_index():
    layer = learned()
    with kt.DecodingScope(None, index=np.array([0, 3]), length=9):
        y = np.asarray(layer(ops.zeros((2, 2, 4))))
    np.testing.assert_allclose(y, np.asarray(layer.table)[[[0, 1], [3, 4]]], atol=1e-6)


def test_learned_positions_pass_the_mask_on_and_leave_it_alone():
    symbolic = keras.layers.Embedding(10, 4, mask_zero=True)(keras.Input((None,), dtype="int32"))
    assert get_keras_mask(learned()(symbolic)) is not None
    x = kt.TokenEmbedding(10, 4)(np.array([[3, 4, 0]]))
    mask = get_keras_mask(x)
    y = learned()(x)
    assert get_keras_mask(x) is mask
    assert np.asarray(get_keras_mask(y)).tolist() == [[True, True, False]]


def test_learned_positions_drop_in_training_only():
    layer, x = learned(max_length=200, dropout=0.5), ops.ones((1, 200, 4))
    np.testing.assert_array_equal(layer(x), layer(x, training=False))
    assert 0.4 < np.mean(np.asarray(layer(x, training=True)) == 0) < 0.6


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_learned_positions_have_the_dtype_of_the_policy_and_round_once(policy):
    layer = learned(dtype=policy)
    assert layer.table.dtype == layer.variable_dtype
    y = layer(ops.zeros((1, 8, 4)))
    assert keras.backend.standardize_dtype(y.dtype) == layer.compute_dtype
    expected = ops.cast(ops.cast(layer.table, layer.compute_dtype), "float32")
    np.testing.assert_array_equal(ops.cast(y[0], "float32"), expected)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", keras.DTypePolicy("mixed_bfloat16")], ids=["name", "object"])
def test_learned_positions_come_back_from_their_config(policy):
    layer = kt.LearnedPositions(np.int64(8), np.float32(0.5), name="mine", trainable=False, dtype=policy)
    config = layer.get_config()
    again = kt.LearnedPositions.from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config
    assert (config["max_length"], config["dropout"], again.name, again.trainable) == (8, 0.5, "mine", False)
    assert again.dtype_policy.name == "mixed_bfloat16"
    assert keras.saving.get_registered_name(kt.LearnedPositions) == "keras_transformer>LearnedPositions"


def table_after_one_step(segments):
    """The change by one step of Adam, at rate 0.1, on the sum of all vectors' components."""
    keras.utils.set_random_seed(0)
    layer = kt.LearnedPositions(4)
    vectors, ids = keras.Input((None, 2)), keras.Input((None,), dtype="int32")
    model = keras.Model([vectors, ids], ops.sum(layer(vectors, segment_ids=ids), axis=(1, 2)))
    model.compile(keras.optimizers.Adam(0.1), loss=lambda y, x: ops.mean(x), jit_compile=False)
    before = np.array(layer.table)
    model.train_on_batch([np.zeros((*segments.shape, 2), "float32"), segments], np.zeros((len(segments), 1)))
    return np.asarray(layer.table) - before


def test_an_adam_step_does_not_depend_on_how_often_a_position_occurs():
    once, often = table_after_one_step(np.array([[1, 1]])), table_after_one_step(np.array([[*range(1, 99), 99, 99]]))
    np.testing.assert_allclose(often[:2], once[:2], rtol=1e-4)
    np.testing.assert_allclose(once[:2], -0.1, rtol=1e-4)
    np.testing.assert_array_equal(often[2:], 0)


@on_tensorflow
def test_the_gradient_of_learned_positions_is_dense():
    import tensorflow as tf

    layer = learned(max_length=4)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(tf.zeros((3, 2, 4))))
    gradient = tape.gradient(y, layer.table.value)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_allclose(gradient[:, 0], [3, 3, 0, 0])


# positions that a table does not have


def in_scope(layer, index, tokens=2, rows=2):
    with kt.DecodingScope(None, index=index, length=99):
        return layer(ops.zeros((rows, tokens, 4)))


def test_more_tokens_than_positions_are_refused():
    layer = learned()
    with pytest.raises(ValueError, match="has 8 positions; got tokens up to the 9th"):
        layer(ops.zeros((1, 9, 4)))
    with pytest.raises(ValueError, match="has 8 positions; got tokens up to the 9th"):
        layer(keras.Input((9, 4)))
    with pytest.raises(ValueError, match="has 8 positions; got tokens up to the 9th"):
        in_scope(layer, [0, 7])
    segments = np.array([[1] * 5 + [2] * 9], "int32")
    with pytest.raises(ValueError, match="has 8 positions; got tokens up to the 9th"):
        layer(ops.zeros((1, 14, 4)), segment_ids=segments)


def test_rows_that_are_longer_than_the_table_are_fine_if_their_segments_are_not():
    assert np.all(np.isfinite(learned()(ops.zeros((1, 16, 4)), segment_ids=np.array([[1] * 8 + [2] * 8], "int32"))))


@on_tensorflow
def test_a_graph_refuses_more_tokens_than_positions_when_it_is_traced_or_else_when_it_runs():
    import tensorflow as tf

    layer, x = learned(), tf.zeros((2, 9, 4))
    with pytest.raises(ValueError, match="has 8 positions; got tokens up to the 9th"):
        tf.function(layer)(x)
    graph = tf.function(layer, input_signature=[tf.TensorSpec([None, None, 4])])
    assert np.all(np.isfinite(graph(x[:, :8])))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        graph(x)
    step = tf.function(lambda index: in_scope(layer, index), input_signature=[tf.TensorSpec([None], tf.int32)])
    np.testing.assert_allclose(step([0, 6]), np.asarray(layer.table)[[[0, 1], [6, 7]]], atol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        step([0, 7])


def assert_nan_beyond_the_table(y, table, positions):
    y, is_there = np.asarray(y), positions < len(table)
    assert not np.all(is_there) and np.all(np.isnan(y[~is_there]))
    np.testing.assert_allclose(y[is_there], table[positions[is_there]], atol=1e-6)


@on_tensorflow
def test_under_xla_vectors_of_positions_that_there_are_not_are_nan():
    import tensorflow as tf

    layer = learned()
    graph = tf.function(layer, input_signature=[tf.TensorSpec([None, None, 4])], jit_compile=True)
    positions = np.tile(np.arange(11), (2, 1))
    assert_nan_beyond_the_table(graph(tf.zeros((2, 11, 4))), np.asarray(layer.table), positions)
    step = tf.function(lambda index: in_scope(layer, index, tokens=3), jit_compile=True)
    positions = np.array([[6, 7, 8], [20, 21, 22]])
    assert_nan_beyond_the_table(step(tf.constant([6, 20])), np.asarray(layer.table), positions)


@on_jax
def test_in_a_graph_of_jax_vectors_of_positions_that_there_are_not_are_nan():
    layer, jax = learned(), pytest.importorskip("jax")
    with pytest.raises(ValueError, match="has 8 positions; got tokens up to the 9th"):
        jax.jit(layer)(ops.zeros((1, 9, 4)))
    step = jax.jit(lambda index: in_scope(layer, index, tokens=3))
    positions = np.array([[6, 7, 8], [20, 21, 22]])
    assert_nan_beyond_the_table(step(np.array([6, 20])), np.asarray(layer.table), positions)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_length": 0}, "`max_length` must be a whole number of at least 1; got 0"),
        ({"max_length": 2.5}, "`max_length` must be a whole number of at least 1; got 2.5"),
        ({"max_length": None}, "`max_length` must be a whole number of at least 1; got None"),
        ({"max_length": 8, "dropout": 1.0}, "`dropout` must be at least 0 and below 1; got 1.0"),
    ],
)
def test_bad_arguments_of_learned_positions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kt.LearnedPositions(**arguments)


def test_token_ids_and_segments_of_another_shape_are_refused_by_learned_positions():
    for ids in (np.array([[1, 2]]), keras.Input((None,), dtype="int32")):
        with pytest.raises(ValueError, match="float vectors of shape"):
            kt.LearnedPositions(8)(ids)
    with pytest.raises(ValueError, match=r"`segment_ids` must be integers of shape \[B, 3\]"):
        learned()(ops.zeros((1, 3, 4)), segment_ids=np.array([[1, 2]]))
