"""Dropout: the share, the scale, independence, seeds, and every shape and dtype."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_transformer as kt
from keras_transformer.noise import Dropout, dropout

tensorflow_only = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's own")


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_a_share_is_dropped_and_the_rest_is_scaled(rate):
    out = np.array(dropout(ops.ones((1000, 999)), rate, seed=1))
    kept = out != 0
    assert abs(kept.mean() - (1 - rate)) < 5e-3 * (rate > 0) + 1e-9
    np.testing.assert_allclose(out[kept], 1 / (1 - rate), rtol=1e-4)  # the rate is rounded to 2**-16
    for axis in (0, 1):  # in each row and column
        assert np.abs(kept.mean(axis) - (1 - rate)).max() < 0.1


def test_elements_are_dropped_independently():
    kept = np.array(dropout(ops.ones((1000, 1000)), 0.5, seed=3)) != 0
    pairs = [(kept[:, :-step], kept[:, step:]) for step in (1, 2, 3, 500)]
    pairs += [(kept[:-1], kept[1:]), (kept[:500], kept[500:])]  # neighbours, and the two halves that share words
    pairs += [(kept, np.array(dropout(ops.ones((1000, 1000)), 0.5, seed=4)) != 0)]
    for one, other in pairs:
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5e-3


def test_one_seed_gives_the_same_and_a_generator_goes_on():
    x = ops.ones((20, 30))
    np.testing.assert_array_equal(dropout(x, 0.3, seed=1), dropout(x, 0.3, seed=1))
    generators = [keras.random.SeedGenerator(7) for _ in range(2)]
    first, again = ([np.array(dropout(x, 0.3, seed)) for _ in range(3)] for seed in generators)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1]) and not np.array_equal(first[1], first[2])
    assert not np.array_equal(dropout(x, 0.3), dropout(x, 0.3))  # Keras's global generator


@pytest.mark.parametrize("shape", [(0, 3), (1,), (1, 1), (3, 5, 7), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_any_shape_and_dtype(shape, dtype):
    out = dropout(ops.ones(shape, dtype), 0.5, seed=0)
    assert tuple(out.shape) == shape and keras.backend.standardize_dtype(out.dtype) == dtype
    assert set(np.array(ops.cast(out, "float32")).ravel().tolist()) <= {0.0, 2.0}


def test_the_same_elements_are_dropped_in_every_dtype():
    kept = [np.array(ops.cast(dropout(ops.ones((9, 9), d), 0.4, seed=5), "bool")) for d in ("float32", "bfloat16")]
    np.testing.assert_array_equal(*kept)


@tensorflow_only
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_graphs_of_unknown_shape_drop_what_eager_calls_drop_and_so_do_their_gradients(jit):
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None, None])], jit_compile=jit)
    def graph(x):
        y = dropout(x, 0.3, seed=2)
        return y, tf.gradients(y, x)[0]

    for shape in ((4, 6), (3, 5)):
        out, gradient = graph(np.ones(shape, "float32"))
        np.testing.assert_allclose(out, dropout(ops.ones(shape), 0.3, seed=2), rtol=1e-6)
        np.testing.assert_allclose(gradient, out, rtol=1e-6)


def test_the_layer_acts_in_training_alone_and_saves_as_keras_does():
    x = ops.ones((50, 50))
    layer = Dropout(0.5, seed=1)
    np.testing.assert_array_equal(layer(x), x)
    first, second = (np.array(layer(x, training=True)) for _ in range(2))
    assert 0.4 < (first == 0).mean() < 0.6 and not np.array_equal(first, second)
    np.testing.assert_array_equal(Dropout(0.0)(x, training=True), x)
    assert np.all(np.isfinite(Dropout(1 - 1e-7)(x, training=True)))
    assert Dropout.from_config(layer.get_config()).rate == 0.5


def test_blocks_drop_as_much_as_they_say():
    """With a rate of 0.5, both sublayers of a pre-norm block are cut by half in number: the residual stays."""
    x = keras.random.normal((8, 32, 64))
    block = kt.EncoderBlock(4, 64, dropout=0.5, norm_first=True)
    block.build(x.shape)
    untouched = np.array(block(x, training=True)) == np.array(x)
    assert abs(untouched.mean() - 0.25) < 0.02
