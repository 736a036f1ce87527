"""Token embeddings: scale, tying, gradients that do not depend on how often a token occurs, masks and dtypes."""

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend import get_keras_mask

import keras_transformer as kt

on_tensorflow = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="TensorFlow's own")


def test_vectors_are_scaled_rows_of_the_table():
    layer = kt.TokenEmbedding(10, 16)
    vectors = layer(np.array([[4, 7]]))
    np.testing.assert_allclose(vectors[0], np.asarray(layer.embeddings)[[4, 7]] * 4, rtol=1e-6)


def test_vectors_and_logits_start_with_variance_near_one(rng):
    layer = kt.TokenEmbedding(2000, 64)
    vectors = np.asarray(layer(np.arange(2000)[None]))
    assert 0.9 < vectors.std() < 1.1
    logits = np.asarray(layer(rng.normal(size=(1, 50, 64)).astype("float32"), reverse=True))
    assert 0.9 < logits.std() < 1.1


@pytest.mark.parametrize("tie_weights", [True, False])
def test_reverse_is_the_product_with_the_table(rng, tie_weights):
    layer = kt.TokenEmbedding(10, 4, tie_weights=tie_weights)
    layer.build((None, None))
    x = rng.normal(size=(2, 3, 4)).astype("float32")
    kernel = np.asarray(layer.embeddings).T if tie_weights else np.asarray(layer.reverse_embeddings)
    np.testing.assert_allclose(layer(x, reverse=True), x @ kernel, atol=1e-5)
    assert len(layer.weights) == (1 if tie_weights else 2)


def test_logit_soft_cap(rng):
    layer = kt.TokenEmbedding(10, 4, logit_soft_cap=0.5)
    x = 100 * rng.normal(size=(1, 3, 4)).astype("float32")
    assert np.max(np.abs(layer(x, reverse=True))) <= 0.5


def table_after_one_step(ids):
    """One step of Adam, at rate 0.1, on the mean of all vectors' first components."""
    keras.utils.set_random_seed(0)
    layer = kt.TokenEmbedding(8, 4)
    source = keras.Input((None,), dtype="int32")
    model = keras.Model(source, ops.sum(layer(source), axis=(1, 2)))
    model.compile(keras.optimizers.Adam(0.1), loss=lambda y, x: ops.mean(x), jit_compile=False)
    before = np.array(layer.embeddings)
    model.train_on_batch(ids, np.zeros((len(ids), 1)))
    return np.asarray(layer.embeddings) - before


def test_an_adam_step_does_not_depend_on_how_often_a_token_occurs():
    once, often = table_after_one_step(np.array([[1, 2]])), table_after_one_step(np.array([[1] * 100 + [2]]))
    np.testing.assert_allclose(often[1:3], once[1:3], rtol=1e-4)
    np.testing.assert_allclose(once[1:3], -0.1, rtol=1e-4)
    np.testing.assert_array_equal(often[3:], 0)


@on_tensorflow
def test_the_gradient_is_dense():
    import tensorflow as tf

    layer = kt.TokenEmbedding(8, 4)
    layer.build((None, None))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(layer(np.array([[1, 1, 2]])))
    gradient = tape.gradient(y, layer.embeddings.value if hasattr(layer.embeddings, "value") else layer.embeddings)
    assert isinstance(gradient, tf.Tensor)
    np.testing.assert_allclose(gradient[:3, 0], [0, 4, 2])  # sqrt(4) an occurrence


def test_padding_is_masked_unless_told_otherwise():
    ids = np.array([[3, 0]])
    assert np.asarray(get_keras_mask(kt.TokenEmbedding(5, 4)(ids))).tolist() == [[True, False]]
    assert get_keras_mask(kt.TokenEmbedding(5, 4, mask_zero=False)(ids)) is None


def test_reverse_passes_the_mask_of_the_vectors_on():
    layer = kt.TokenEmbedding(5, 4)
    logits = layer(layer(np.array([[3, 0]])), reverse=True)
    assert np.asarray(get_keras_mask(logits)).tolist() == [[True, False]]


def test_float_ids_are_refused():
    with pytest.raises(ValueError, match="Token ids must be integers; got float32"):
        kt.TokenEmbedding(5, 4)(np.array([[1.0, 2.0]], "float32"))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_ids_of_every_integer_type_are_taken(dtype):
    layer = kt.TokenEmbedding(300, 4)
    ids = np.array([[4, 7]])
    np.testing.assert_array_equal(layer(ids.astype(dtype)), layer(ids))


@on_tensorflow
@pytest.mark.parametrize("bad", [5, -1, -100])
def test_ids_outside_the_vocabulary_raise(bad):
    with pytest.raises(Exception, match="not in"):
        kt.TokenEmbedding(5, 4)(np.array([[1, bad]]))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="an index out of bounds is an error elsewhere")
@pytest.mark.parametrize("bad", [5, -1, -100])
def test_on_jax_ids_outside_the_vocabulary_give_nan_and_never_another_row(bad):
    assert np.all(np.isnan(np.asarray(kt.TokenEmbedding(5, 4)(np.array([[1, bad]])))[0, 1]))


@pytest.mark.parametrize("size", [{"vocab_size": 0}, {"d_model": 2.5}])
def test_sizes_are_checked(size):
    with pytest.raises(ValueError, match=f"`{next(iter(size))}` must be a whole number of at least 1"):
        kt.TokenEmbedding(**{"vocab_size": 4, "d_model": 4, **size})


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_reads_a_float32_table_and_casts_last(policy):
    layer = kt.TokenEmbedding(10, 16, dtype=policy)
    vectors = layer(np.array([[4, 7]]))
    assert keras.backend.standardize_dtype(vectors.dtype) == layer.compute_dtype
    exact = ops.cast(np.asarray(layer.embeddings)[[4, 7]] * 4, layer.compute_dtype)
    np.testing.assert_array_equal(ops.cast(vectors[0], "float32"), ops.cast(exact, "float32"))
    assert keras.backend.standardize_dtype(layer(vectors, reverse=True).dtype) == layer.compute_dtype


def test_tied_logits_survive_a_reload_and_stay_tied(tmp_path, rng):
    ids = keras.Input((None,), dtype="int32")
    table = kt.TokenEmbedding(10, 8)
    x = kt.EncoderBlock(num_heads=2, intermediate_dim=8, dropout=0.0)(table(ids))
    model = keras.Model(ids, table(x, reverse=True))
    model.compile(keras.optimizers.Adam(0.01), kt.TokenCrossentropy(), jit_compile=False)
    data = rng.integers(1, 10, size=(4, 6))
    model.train_on_batch(data, data)
    model.save(tmp_path / "model.keras")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(reloaded(data), model(data), atol=1e-6)
    for one in (model, reloaded):
        one.train_on_batch(data, data)
        assert len([w for w in one.weights if w.shape == (10, 8)]) == 1
    np.testing.assert_allclose(reloaded(data), model(data), atol=1e-5)


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
def test_a_model_in_int8_is_near_the_one_before():
    ids = keras.Input((None,), dtype="int32")
    table = kt.TokenEmbedding(20, 16)
    x = kt.EncoderBlock(num_heads=2, intermediate_dim=32)(table(ids))
    model = keras.Model(ids, [table(ids), table(x, reverse=True)])
    batch = np.array([[3, 4, 5, 0]])
    vectors, logits = (np.asarray(y) for y in model(batch))
    model.quantize("int8")
    quantized = [layer for layer in model._flatten_layers() if getattr(layer, "quantization_mode", None) == "int8"]
    assert len(quantized) == 7 and table in quantized
    near_vectors, near_logits = (np.asarray(y) for y in model(batch))
    np.testing.assert_allclose(near_vectors, vectors, atol=0.05)
    np.testing.assert_allclose(near_logits, logits, atol=0.15)
