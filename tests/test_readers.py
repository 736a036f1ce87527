"""Classifiers, masked language models, regressors and pooling: padding, precision, files, learning."""

import keras
import numpy as np
import pytest
from keras import ops
from keras.src.backend import get_keras_mask

import keras_transformer as kt

TF = keras.backend.backend() == "tensorflow"
JIT = not TF  # without it JAX takes many times longer, where a test learns
VOCAB, LENGTH = 12, 6
SIZES = {"d_model": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 16}
METHODS = ("mean", "first", "last", "attention")
VARIANTS = {
    "as it comes": {},
    "learned": {"positions": "learned", "max_length": 12},
    "rotary": {"attention": {"position": "rotary"}},
    "rms, pre-norm": {"normalization": "rms", "norm_first": True},
    "all of these": {
        "positions": "learned",
        "max_length": 12,
        "attention": {"position": "rotary", "num_kv_heads": 1},
        "normalization": "rms",
        "norm_first": True,
        "activation": "gelu_tanh",
        "use_bias": False,
    },
}
IDS = np.array([[2, 5, 6, 7, 11, 3], [2, 8, 3, 0, 0, 0], [9, 0, 0, 0, 0, 0]])
SERIES = np.random.default_rng(1).normal(size=(3, LENGTH, 2)).astype("float32")
READERS = {"classifier": IDS, "masked_language_model": IDS, "regressor": SERIES}


def classifier(num_classes=3, **options):
    return kt.build_classifier(**{"vocab_size": VOCAB, "num_classes": num_classes, **SIZES, **options})


def masked_language_model(**options):
    return kt.build_masked_language_model(**{"vocab_size": VOCAB, **SIZES, **options})


def regressor(**options):
    return kt.build_regressor(**{"num_features": 2, "num_outputs": 3, **SIZES, **options})


BUILD = {"classifier": classifier, "masked_language_model": masked_language_model, "regressor": regressor}


def with_weights_in_pooling(kind, variant):
    return {**VARIANTS[variant], **({} if kind == "masked_language_model" else {"pooling": "attention"})}


def array(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(array(actual), array(expected), atol=atol, rtol=0)


def stirred(model, rng):
    """The model with weights none of which is at a start such as 0 or 1, where an error could hide."""
    for weight in model.trainable_weights:
        weight.assign(weight + 0.2 * rng.normal(size=weight.shape))
    return model


def reloaded(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.saving.load_model(tmp_path / "model.keras", safe_mode=True)


def served(model, tmp_path):
    """The model as a SavedModel, a function of NumPy arrays."""
    import tensorflow as tf

    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    dtype = model.inputs[0].dtype
    return lambda inputs: loaded.serve(inputs.astype(dtype))


def gradients(f, *arguments):
    """Of a function of tensors to a number."""
    if TF:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(arguments)
            loss = f(*arguments)
        return tape.gradient(loss, arguments)
    jax = pytest.importorskip("jax")
    return jax.grad(f, argnums=tuple(range(len(arguments))))(*arguments)


# ---- pooling


def pooled(x, mask, method, kernel=None):
    """The definition, a row at a time."""
    rows = np.zeros((len(x), x.shape[-1]))
    for row, vectors, real in zip(rows, x.astype("float64"), mask):
        vectors = vectors[real]
        if not len(vectors):
            continue
        if method == "attention":
            weights = np.exp(vectors @ kernel - np.max(vectors @ kernel))
            row[:] = (weights * vectors).sum(0) / weights.sum()
        else:
            row[:] = {"mean": vectors.mean(0), "first": vectors[0], "last": vectors[-1]}[method]
    return rows


def pooling(method, width=4, **options):
    layer = kt.Pooling(method, **options)
    layer.build((None, None, width))
    return layer


def kernel_of(layer):
    return array(layer.weights[0]) if layer.weights else None


MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], bool)


@pytest.mark.parametrize("method", METHODS)
def test_pooling_is_what_numpy_gives(method, rng):
    layer, x = pooling(method), rng.normal(size=(5, 5, 4)).astype("float32")
    assert len(layer.weights) == (method == "attention")
    for mask in (MASK, MASK.astype("int32") * 7, MASK.astype("uint8")):
        close(layer(x, padding_mask=mask), pooled(x, MASK, method, kernel_of(layer)), atol=1e-6)
    close(layer(x), pooled(x, np.ones((5, 5), bool), method, kernel_of(layer)), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_pooling_leaves_out_what_either_mask_hides(method, rng):
    layer, x, other = pooling(method), rng.normal(size=(5, 5, 4)).astype("float32"), rng.random((5, 5)) < 0.6
    marked = np.where(MASK[..., None], x, 0.0).astype("float32")
    hidden = keras.layers.Masking()(ops.convert_to_tensor(marked))  # carries the Keras mask
    close(layer(hidden), pooled(marked, MASK, method, kernel_of(layer)), atol=1e-6)
    found = layer(hidden, padding_mask=other)
    close(found, pooled(marked, MASK & other, method, kernel_of(layer)), atol=1e-6)
    assert get_keras_mask(found) is None  # it is used up: there are no tokens any more


@pytest.mark.parametrize("method", METHODS)
def test_vectors_at_padding_do_not_count(method, rng):
    layer, x = pooling(method), rng.normal(size=(5, 5, 4)).astype("float32")
    other = np.where(MASK[..., None], x, 1e4).astype("float32")
    np.testing.assert_array_equal(array(layer(other, padding_mask=MASK)), array(layer(x, padding_mask=MASK)))
    longer = np.concatenate([x, x + 1], axis=1)
    mask = np.concatenate([MASK, np.zeros_like(MASK)], axis=1)
    close(layer(longer, padding_mask=mask), layer(x, padding_mask=MASK), atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_padding_alone_gives_0_and_finite_gradients(method, rng):
    layer, x = pooling(method), ops.convert_to_tensor(rng.normal(size=(5, 5, 4)), "float32")
    assert np.all(array(layer(x, padding_mask=MASK))[4] == 0)
    assert layer(x[:, :0]).shape == (5, 4) and np.all(array(layer(x[:, :0])) == 0)
    (found,) = gradients(lambda x: ops.sum(layer(x, padding_mask=MASK) ** 2), x)
    assert np.all(np.isfinite(array(found))) and np.all(array(found)[~MASK] == 0)
    assert np.any(array(found)[0] != 0)


@pytest.mark.parametrize("method", METHODS)
def test_weights_stay_finite_where_a_row_is_padding_alone(method, rng):
    inputs, mask = keras.Input((None, 4)), keras.Input((None,), dtype="bool")
    model = keras.Model([inputs, mask], keras.layers.Dense(2)(kt.Pooling(method)(inputs, padding_mask=mask)))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False, run_eagerly=TF)  # faster for one step
    before = [array(weight) for weight in model.trainable_weights]
    model.train_on_batch([rng.normal(size=(5, 5, 4)), MASK], rng.normal(size=(5, 2)))
    for weight, old in zip(model.trainable_weights, before):
        assert np.all(np.isfinite(array(weight))) and np.any(array(weight) != old)


@pytest.mark.parametrize(["dtype", "rtol"], [("mixed_bfloat16", 2**-8), ("mixed_float16", 2**-11)])
@pytest.mark.parametrize("method", ["mean", "attention"])
def test_sums_of_halves_are_in_float32(method, dtype, rtol):
    layer = pooling(method, dtype=dtype)
    x = ops.cast(np.random.default_rng(0).uniform(1, 2, (2, 5000, 4)), layer.compute_dtype)
    mask = np.arange(5000) < [[5000], [4001]]
    if layer.weights:
        layer.weights[0].assign([[0.0]] * 4)  # a mean, so that rounded scores do not matter
    found = layer(x, padding_mask=mask)
    assert keras.backend.standardize_dtype(found.dtype) == layer.compute_dtype
    np.testing.assert_allclose(array(found), pooled(array(x), mask, "mean"), rtol=1.01 * rtol)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(["dtype", "atol"], [("mixed_bfloat16", 0.05), ("mixed_float16", 0.01)])
def test_pooling_of_halves_is_near_that_of_float32(method, dtype, atol, rng):
    layer, half = pooling(method), pooling(method, dtype=dtype)
    half.set_weights(layer.get_weights())
    x = rng.normal(size=(5, 5, 4)).astype("float32")
    found = half(x, padding_mask=MASK)
    assert keras.backend.standardize_dtype(found.dtype) == dtype.removeprefix("mixed_")
    close(found, layer(x, padding_mask=MASK), atol=atol)
    assert np.all(array(found)[4] == 0)


@pytest.mark.parametrize("method", METHODS)
def test_pooling_comes_back_from_its_config(method):
    layer = kt.Pooling(method, name="mine", dtype=keras.DTypePolicy("mixed_bfloat16"))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert (again.method, again.name, again.dtype_policy.name) == (method, "mine", "mixed_bfloat16")


@pytest.mark.parametrize("method", METHODS)
def test_pooling_in_a_model_composed_by_hand_sees_the_mask_that_travels(method, tmp_path):
    tokens = keras.Input((None,), dtype="int32")
    x = kt.EncoderBlock(2, 16)(kt.PositionalEncoding()(kt.TokenEmbedding(VOCAB, 16)(tokens)))
    model = keras.Model(tokens, kt.Pooling(method)(x))
    close(model(IDS)[1], model(IDS[1:2, :3])[0])
    close(reloaded(model, tmp_path)(IDS), model(IDS))


@pytest.mark.parametrize(
    ["call", "rule"],
    [
        (lambda: kt.Pooling("max"), "`method` must be one of ['mean', 'first', 'last', 'attention']; got 'max'."),
        (lambda: kt.Pooling(None), "`method` must be one of ['mean', 'first', 'last', 'attention']; got None."),
        (lambda: kt.Pooling()(np.ones((2, 3), "float32")), "`x` must be float vectors of shape [B, T, D]; got float32"),
        (lambda: kt.Pooling()(np.ones((2, 3, 4), "int32")), "`x` must be float vectors of shape [B, T, D]; got int32"),
        (
            lambda: kt.Pooling()(np.ones((2, 3, 4), "float32"), padding_mask=np.ones((2, 4), bool)),
            "`padding_mask` must have the shape [B, 3]; got [2, 4].",
        ),
        (
            lambda: kt.Pooling()(np.ones((2, 3, 4), "float32"), padding_mask=np.ones((2, 3), "float32")),
            "`padding_mask` must be boolean or integer, True (non-zero) where a query may look; got float32.",
        ),
    ],
)
def test_pooling_refuses_what_it_cannot_pool(call, rule):
    with pytest.raises(ValueError) as error:
        call()
    assert rule in str(error.value)


# ---- padding


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_does_not_change_a_class(variant, method, rng):
    model = stirred(classifier(pooling=method, **VARIANTS[variant]), rng)
    logits = array(model(IDS))
    close(model(np.pad(IDS, [[0, 0], [0, 5]])), logits)
    for row, ids in zip(logits, IDS):
        close(model(ids[None, ids != 0])[0], row)
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_does_not_change_what_is_filled_in(variant, rng):
    model = stirred(masked_language_model(**VARIANTS[variant]), rng)
    logits = array(model(IDS))
    close(model(np.pad(IDS, [[0, 0], [0, 5]]))[:, :LENGTH][IDS != 0], logits[IDS != 0])
    for row, ids in zip(logits, IDS):
        close(model(ids[None, ids != 0])[0], row[ids != 0])


@pytest.mark.parametrize("kind", ["classifier", "masked_language_model"])
def test_vectors_at_padding_do_not_reach_the_others(kind, rng):
    model = stirred(BUILD[kind](num_layers=2), rng)
    encoder, mask = model.get_layer("encoder"), ops.convert_to_tensor(IDS != 0)
    x = rng.normal(size=(*IDS.shape, 16)).astype("float32")
    other = np.where(IDS[..., None] != 0, x, 100.0).astype("float32")
    real = IDS != 0
    close(array(encoder([ops.convert_to_tensor(other), mask]))[real], array(encoder([ops.array(x), mask]))[real])


def test_rows_of_padding_alone_are_classified_the_same_whatever_their_length():
    model = classifier()
    close(model(np.zeros((1, 7), "int32")), model(np.zeros((1, 2), "int32")))
    assert np.all(np.isfinite(array(masked_language_model()(np.zeros((1, 7), "int32")))))


def test_all_steps_of_a_series_count(rng):
    for method in ("mean", "attention", "last", "first"):
        model = stirred(regressor(pooling=method), rng)
        before = array(model(SERIES))
        for step in range(LENGTH):
            other = SERIES.copy()
            other[:, step] = 0  # zeros are numbers here
            assert np.all(np.abs(array(model(other)) - before).max(axis=-1) > 1e-6), (method, step)


def test_every_token_looks_both_ways(rng):
    model = stirred(masked_language_model(), rng)
    before = array(model(IDS[:1]))
    for place in range(LENGTH):
        other = IDS[:1].copy()
        other[0, place] = 4
        assert np.all(np.abs(array(model(other)) - before).max(axis=-1) > 1e-6)


# ---- parts, files and options


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("variant", ["as it comes", "all of these"])
def test_options_compose_and_a_reload_gives_equal_outputs(variant, kind, tmp_path, rng):
    model = stirred(BUILD[kind](**VARIANTS[variant]), rng)
    outputs = array(model(READERS[kind]))
    wide = {"masked_language_model": (3, LENGTH, VOCAB)}.get(kind, (3, 3))
    assert outputs.shape == wide and np.all(np.isfinite(outputs))
    close(reloaded(model, tmp_path)(READERS[kind]), outputs, atol=1e-6)


@pytest.mark.skipif(not TF, reason="SavedModel export needs TensorFlow")
@pytest.mark.parametrize("kind", READERS)
def test_a_saved_model_gives_equal_outputs_for_any_length(kind, tmp_path, rng):
    model = stirred(BUILD[kind](**with_weights_in_pooling(kind, "all of these")), rng)
    serve = served(model, tmp_path)
    for inputs in (READERS[kind], READERS[kind][:2, :3], READERS[kind][:1, :1]):
        close(serve(inputs), model(inputs))


def test_the_parts_make_the_whole_before_and_after_a_reload(tmp_path, rng):
    model = stirred(classifier(pooling="attention"), rng)
    for each in (model, reloaded(model, tmp_path)):
        part, mask = each.get_layer, ops.convert_to_tensor(IDS != 0)
        vectors = part("encoder")([part("positions")(part("embedding")(IDS)), mask])
        close(part("logits")(part("pooling")(vectors, padding_mask=mask)), model(IDS))


def test_a_masked_language_model_shares_its_table_with_the_logits(tmp_path, rng):
    model = stirred(masked_language_model(), rng)
    for each in (model, reloaded(model, tmp_path)):
        assert [w.path for w in each.weights if w.path.endswith("embeddings")] == ["embedding/embeddings"]
        part, mask = each.get_layer, ops.convert_to_tensor(IDS != 0)
        vectors = part("encoder")([part("positions")(part("embedding")(IDS)), mask])
        vectors = part("head_norm")(part("head")(vectors))
        close(model(IDS), array(vectors) @ array(part("embedding").embeddings).T)


@pytest.mark.parametrize("kind", READERS)
def test_inputs_and_models_have_the_names_that_are_told(kind):
    model = BUILD[kind](name="mine")
    close(model.predict(READERS[kind], verbose=0), model(READERS[kind]))
    assert model.name == "mine" and BUILD[kind]().name == kind
    assert [x.name for x in model.inputs] == [("series" if kind == "regressor" else "tokens")]


def test_numpy_arguments_build_a_model_that_can_be_saved(tmp_path):
    sizes = {name: np.int64(size) for name, size in SIZES.items()}
    for model, inputs in (
        (kt.build_classifier(np.int64(VOCAB), np.int64(3), dropout=np.float32(0.1), **sizes), IDS),
        (kt.build_regressor(np.int64(2), np.int64(3), dropout=np.float32(0.1), **sizes), SERIES),
    ):
        close(reloaded(model, tmp_path)(inputs), model(inputs))


# ---- precision


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ["variant", "policy"],
    [("as it comes", "mixed_bfloat16"), ("all of these", keras.DTypePolicy("mixed_bfloat16"))],
    ids=["name", "object"],
)
def test_a_dtype_reaches_every_layer(variant, kind, policy, rng):
    model = BUILD[kind](dtype=policy, **with_weights_in_pooling(kind, variant))
    holders = (keras.Model, keras.layers.InputLayer)
    layers = [layer for layer in model._flatten_layers() if not isinstance(layer, holders)]
    own = {layer.path or layer.name: layer.dtype_policy.name for layer in layers}
    wrong = {path for path, name in own.items() if name != "mixed_bfloat16"}
    assert wrong == ({"outputs"} if kind == "regressor" else set())
    assert "embedding" in own or kind == "regressor"
    assert len(layers) > 12
    outputs = model(READERS[kind])
    assert keras.backend.standardize_dtype(outputs.dtype) == ("float32" if kind == "regressor" else "bfloat16")
    encoder = model.get_layer("encoder")
    assert {keras.backend.standardize_dtype(x.dtype) for x in encoder.outputs} == {"bfloat16"}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(["dtype", "atol"], [("mixed_bfloat16", 0.2), ("mixed_float16", 0.03)])
def test_half_precision_is_near_float32_and_comes_back_under_float32(dtype, atol, kind, tmp_path):
    full = BUILD[kind]()
    keras.config.set_dtype_policy(dtype)
    half = BUILD[kind]()
    half.set_weights(full.get_weights())
    outputs = array(half(READERS[kind]))
    close(outputs, full(READERS[kind]), atol=atol)
    half.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    close(keras.saving.load_model(tmp_path / "model.keras")(READERS[kind]), outputs, atol=1e-6)
    assert {keras.backend.standardize_dtype(weight.dtype) for weight in half.trainable_weights} == {"float32"}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_trains(dtype, kind, rng):
    model = BUILD[kind](dtype=dtype, dropout=0.0)
    labels = {"classifier": np.array([0, 1, 2]), "masked_language_model": IDS, "regressor": rng.normal(size=(3, 3))}
    loss = {
        "classifier": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "masked_language_model": kt.TokenCrossentropy(),
        "regressor": "mse",
    }[kind]
    model.compile(keras.optimizers.Adam(3e-3), loss, jit_compile=False, run_eagerly=TF)  # faster for few steps
    losses = [float(model.train_on_batch(READERS[kind], labels[kind])) for _ in range(5)]
    assert np.all(np.isfinite(losses)) and losses[-1] < losses[0]


# ---- training


@pytest.mark.parametrize("kind", READERS)
def test_one_step_changes_every_weight(kind, rng):
    model = BUILD[kind](**with_weights_in_pooling(kind, "as it comes"))
    loss = "mse" if kind == "regressor" else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = {"classifier": np.array([0, 1, 2]), "masked_language_model": IDS, "regressor": rng.normal(size=(3, 3))}
    model.compile(keras.optimizers.Adam(3e-3), loss, jit_compile=False, run_eagerly=TF)
    before = [array(weight) for weight in model.trainable_weights]
    model.train_on_batch(READERS[kind], labels[kind])
    for weight, old in zip(model.trainable_weights, before):
        assert np.all(np.isfinite(array(weight))), weight.path
        assert weight.path.endswith("key/bias") or np.abs(array(weight) - old).max() > 1e-6, weight.path


def counted(number, rng):
    """Rows of tokens 4 to 9 with padding behind; the class is whether 4 or 5 comes more often."""
    ids = rng.integers(4, 10, (number * 2, 10))
    ids[np.arange(10) >= rng.integers(5, 11, (number * 2, 1))] = 0
    more = (ids == 4).sum(1) - (ids == 5).sum(1)
    return ids[more != 0][:number], (more > 0)[more != 0][:number].astype("int32")


def test_a_classifier_learns_which_of_two_tokens_comes_more_often(rng):
    model = classifier(2, dropout=0.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"], jit_compile=JIT)
    model.fit(*counted(1500, rng), batch_size=64, epochs=4, verbose=0)
    held_out, classes = counted(1000, rng)
    assert 0.4 < classes.mean() < 0.6
    assert model.evaluate(held_out, classes, verbose=0, return_dict=True)["accuracy"] > 0.95


def test_a_masked_language_model_learns_to_fill_in_a_cycle(rng):
    """Tokens go round, 4 5 6 4 5 6, from any beginning; every third one is hidden on the average."""
    ids = 4 + (rng.integers(0, 3, (2500, 1)) + np.arange(8)) % 3
    is_hidden = rng.random(ids.shape) < 0.3
    tokens, labels = np.where(is_hidden, 1, ids), np.where(is_hidden, ids, 0)
    model = masked_language_model(vocab_size=7, dropout=0.0, attention={"position": "rotary"})
    model.compile(keras.optimizers.Adam(3e-3), kt.TokenCrossentropy(), metrics=[kt.TokenAccuracy()], jit_compile=JIT)
    model.fit(tokens[:2000], labels[:2000], batch_size=64, epochs=10, verbose=0)
    found = model.evaluate(tokens[2000:], labels[2000:], verbose=0, return_dict=True)
    assert found["token_accuracy"] > 0.9


@pytest.mark.parametrize(["method", "target"], [("last", lambda x: x[:, -1]), ("mean", lambda x: x.mean(1))])
def test_a_regressor_learns_a_value_of_the_series(method, target, rng):
    series = rng.normal(size=(1200, 8, 1)).astype("float32")
    values = target(series)
    model = regressor(num_features=1, num_outputs=1, pooling=method, dropout=0.0)
    model.compile(keras.optimizers.Adam(1e-2), "mse", jit_compile=JIT)
    model.fit(series[:1000], values[:1000], batch_size=64, epochs=6, verbose=0)
    error = np.mean((model.predict(series[1000:], verbose=0) - values[1000:]) ** 2)
    assert error < 0.2 * values[1000:].var()


# ---- rules


OF_ALL = [
    ({"num_layers": 0}, "`num_layers` must be a whole number of at least 1; got 0"),
    ({"num_layers": 1.5}, "`num_layers` must be a whole number of at least 1; got 1.5"),
    ({"num_heads": 0}, "`num_heads` must be a whole number of at least 1; got 0"),
    ({"intermediate_dim": 0}, "`intermediate_dim` must be a whole number of at least 1; got 0"),
    ({"d_model": 0}, "`d_model` must be a whole number of at least 1; got 0"),
    ({"d_model": 15}, "`d_model` must be divisible by `num_heads` where `key_dim` is None; got 15 and 2"),
    ({"dropout": 1.0}, "`dropout` must be at least 0 and below 1; got 1.0"),
    ({"positions": "relative"}, "`positions` must be 'sinusoid', 'learned', 'none' or None; got 'relative'"),
    ({"positions": "learned"}, "`max_length` belongs to `positions='learned'`; got None and 'learned'"),
    ({"max_length": 9}, "`max_length` belongs to `positions='learned'`; got 9 and 'sinusoid'"),
    ({"normalization": "batch"}, "`normalization` must be one of ['layer', 'rms']; got 'batch'"),
    ({"attention": {"heads": 2}}, "`attention` takes the options"),
    ({"no_such_argument": 2}, "no_such_argument"),
]
OF_SOME = {
    "classifier": [
        ({"vocab_size": 0}, "`vocab_size` must be a whole number of at least 1; got 0"),
        ({"num_classes": 0}, "`num_classes` must be a whole number of at least 1; got 0"),
        ({"num_classes": None}, "`num_classes` must be a whole number of at least 1; got None"),
        ({"pooling": "max"}, "`method` must be one of ['mean', 'first', 'last', 'attention']; got 'max'"),
    ],
    "masked_language_model": [({"vocab_size": 0}, "`vocab_size` must be a whole number of at least 1; got 0")],
    "regressor": [
        ({"num_features": 0}, "`num_features` must be a whole number of at least 1; got 0"),
        ({"num_outputs": 0}, "`num_outputs` must be a whole number of at least 1; got 0"),
        ({"pooling": "max"}, "`method` must be one of ['mean', 'first', 'last', 'attention']; got 'max'"),
    ],
}


@pytest.mark.parametrize(
    ["kind", "arguments", "rule"],
    [(kind, *case) for kind in READERS for case in (*OF_ALL, *OF_SOME[kind])],
)
def test_wrong_arguments_are_refused(kind, arguments, rule):
    with pytest.raises(ValueError) as error:
        BUILD[kind](**arguments)
    assert rule in str(error.value)


@pytest.mark.parametrize("kind", READERS)
def test_rows_longer_than_the_learned_positions_are_refused(kind):
    model = BUILD[kind](positions="learned", max_length=4)
    with pytest.raises(ValueError, match="`LearnedPositions` has 4 positions; got tokens up to the 6th"):
        model(READERS[kind])
