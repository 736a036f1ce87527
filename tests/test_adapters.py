"""LoRA and int8: outputs stay what they were or near it, little is trained; saving, reloading and exporting work."""

import keras
import numpy as np
import pytest

import keras_transformer as kt

TF = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not TF, reason="export is TensorFlow's")
SIZE = {"d_model": 16, "num_layers": 2, "num_heads": 2, "intermediate_dim": 32, "dropout": 0.0}
LLAMA = {**kt.PRESETS["llama"], **SIZE, "attention": {"num_kv_heads": 1, "position": "rotary"}}


def language_model(**options):
    keras.utils.set_random_seed(0)
    return kt.build_language_model(32, **{**SIZE, **options})


def trained(model, ids, **options):
    model.compile(keras.optimizers.Adam(0.01), kt.TokenCrossentropy(), jit_compile=not TF)
    model.fit(ids, np.roll(ids, -1, axis=1), batch_size=8, verbose=0, **options)
    return model


@pytest.fixture
def ids(rng):
    return rng.integers(1, 32, (16, 7)).astype("int32")


@pytest.mark.parametrize("options", [{}, LLAMA], ids=["plain", "llama"])
def test_outputs_stay_and_only_the_products_are_trained(options, ids):
    model = language_model(**options)
    before, weights = np.asarray(model(ids)), {w.path: np.asarray(w) for w in model.weights}
    number = kt.add_lora(model, rank=3, targets=("query", "self_attention/output", "inner"))
    np.testing.assert_allclose(model(ids), before, atol=1e-6)
    assert number == 2 * 3 * ((16 + 16) + (16 + 16) + (16 + 32))
    trained(model, ids, epochs=3)
    assert np.abs(np.asarray(model(ids)) - before).max() > 0.01
    for weight in model.weights:
        if weight.path in weights and "seed" not in weight.path:
            np.testing.assert_array_equal(weight, weights[weight.path])


def test_it_learns_with_few_numbers(ids):
    model = trained(language_model(), ids, epochs=30)  # a model of one text ...
    other = ids[:, ::-1].copy()
    losses = [model.evaluate(other, np.roll(other, -1, axis=1), verbose=0)]
    kt.add_lora(model, rank=4, targets=("query", "value", "feed_forward/inner", "feed_forward/output"))
    trained(model, other, epochs=30)  # ... learns another
    losses.append(model.evaluate(other, np.roll(other, -1, axis=1), verbose=0))
    assert losses[1] < 0.7 * losses[0]


def test_merging_keeps_outputs_and_leaves_a_plain_model(ids, tmp_path):
    model, names = language_model(), [w.path for w in language_model().weights]
    generate = kt.Generator(model, max_length=5)
    kt.add_lora(model, rank=3, alpha=7.0)
    trained(model, ids, epochs=2)
    before, predicted = np.asarray(model(ids)), model.predict(ids, verbose=0)
    written = np.asarray(generate(prompt=ids[:2])["ids"])
    kt.merge_lora(model)
    np.testing.assert_allclose(model(ids), before, atol=1e-5)
    np.testing.assert_allclose(model.predict(ids, verbose=0), predicted, atol=1e-5)
    np.testing.assert_array_equal(generate(prompt=ids[:2])["ids"], written)
    assert [w.path for w in model.weights] == names
    assert len(model.trainable_weights) == len(language_model().trainable_weights)
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "model.keras")(ids), before, atol=1e-5)
    with pytest.raises(ValueError, match="compile"):
        model.fit(ids, ids, verbose=0)
    trained(model, ids)  # goes on as a whole


def test_a_saved_model_has_the_products_merged(ids, tmp_path):
    model = language_model()
    kt.add_lora(model, rank=3)
    trained(model, ids, epochs=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_allclose(loaded(ids), model(ids), atol=1e-5)
    assert len(loaded.weights) == len(language_model().weights)


def test_a_layer_can_stay_trainable(ids):
    model = kt.build_classifier(32, 3, **SIZE)
    assert kt.add_lora(model, rank=2, trainable=("logits",)) == 2 * 2 * 2 * (16 + 16) + 16 * 3 + 3


@pytest.mark.parametrize(
    "options, rule",
    [
        ({"rank": 0}, "`rank` must be a whole number"),
        ({"rank": 2, "alpha": 0}, "`alpha` must be above 0"),
        ({"rank": 2, "targets": "query"}, "`targets` must be a tuple of names; got 'query'"),
        ({"rank": 2, "trainable": "logits"}, "`trainable` must be a tuple of names; got 'logits'"),
        ({"rank": 2, "targets": ("query", "nothing")}, r"`targets` must name dense layers, .*got \['nothing'\]"),
        ({"rank": 2, "targets": ()}, "`targets` must name dense layers"),
        ({"rank": 2, "trainable": ("nothing",)}, "nothing"),
    ],
)
def test_what_names_nothing_is_refused_before_anything_is_changed(options, rule):
    model = language_model()
    with pytest.raises(ValueError, match=rule):
        kt.add_lora(model, **options)
    assert len(model.trainable_weights) == len(language_model().trainable_weights)


def test_what_was_not_trained_is_not_trained_after_merging():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(3, name="head")])
    model.layers[0].trainable = False
    before = [weight.path for weight in model.trainable_weights]
    kt.add_lora(model, rank=2, targets=("head",))
    kt.merge_lora(model)
    assert [weight.path for weight in model.trainable_weights] == before
    model.layers[0].trainable = True
    assert len(model.trainable_weights) == 4 and len(model.non_trainable_weights) == 2


def test_layers_of_equal_paths_get_their_own_products():
    tokens, size = keras.Input((None,), dtype="int32"), {**SIZE, "num_layers": 1}
    both = [kt.build_classifier(32, 2, **size, name=name)(tokens) for name in ("one", "other")]
    assert kt.add_lora(keras.Model(tokens, both), rank=2, targets=("query",)) == 2 * 2 * (16 + 16)


def test_layers_that_are_frozen_are_refused():
    model = kt.build_classifier(32, 2, **SIZE)
    model.get_layer("encoder").trainable = False
    with pytest.raises(ValueError, match=r"must be layers that are trained; got .*encoder_block_1"):
        kt.add_lora(model, rank=2)


def test_products_are_added_once_and_merged_where_they_are():
    model = language_model()
    with pytest.raises(ValueError, match="must be there; got"):
        kt.merge_lora(model)
    kt.add_lora(model, rank=2)
    with pytest.raises(ValueError, match="one LoRA product"):
        kt.add_lora(model, rank=2)


def quantized(model):
    """Keras warns of layers that have nothing to quantize."""
    with pytest.warns(UserWarning, match="does not have a `quantize"):
        model.quantize("int8")
    return model


MODELS = {
    "language model": lambda: language_model(),
    "llama": lambda: language_model(**LLAMA, tie_embeddings=False),
    "classifier": lambda: kt.build_classifier(32, 3, **SIZE),
    "mixed": lambda: language_model(dtype="mixed_bfloat16"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_int8_is_close_and_comes_back_from_a_file(kind, ids, tmp_path):
    model = MODELS[kind]()
    before = np.asarray(keras.ops.cast(model(ids), "float32"))
    quantized(model)
    after = np.asarray(keras.ops.cast(model(ids), "float32"))
    assert 0 < np.abs(after - before).max() < 0.1 * np.abs(before).max()
    kernels = [w for w in model.weights if w.path.endswith(("kernel", "embeddings"))]
    assert {keras.backend.standardize_dtype(w.dtype) for w in kernels} == {"int8"}
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.ops.cast(loaded(ids), "float32"), after)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(keras.ops.cast(clone(ids), "float32"), after)


def test_int8_is_not_trained(ids):
    model = quantized(language_model())
    with pytest.raises(ValueError, match="can be trained; got one in int8"):
        kt.loss_model(model)({"tokens": ids, "labels": ids})


@pytest.mark.slow
def test_an_int8_encoder_decoder_writes_with_its_cache(ids, tmp_path):
    model = quantized(kt.build_transformer(32, **SIZE))
    model.save(tmp_path / "model.keras")
    found = kt.Generator(model, max_length=6)({"source": ids})
    loaded = kt.Generator(keras.models.load_model(tmp_path / "model.keras"), max_length=6)({"source": ids})
    np.testing.assert_array_equal(found["ids"], loaded["ids"])


@tensorflow_only
@pytest.mark.slow
def test_int8_and_lora_models_export(ids, tmp_path):
    import tensorflow as tf

    adapted = language_model()
    kt.add_lora(adapted, rank=3)
    for name, model in {"int8": quantized(language_model()), "lora": trained(adapted, ids)}.items():
        model.export(tmp_path / name, verbose=False)
        loaded = tf.saved_model.load(tmp_path / name)
        np.testing.assert_allclose(loaded.serve(ids), model(ids), atol=1e-5)
