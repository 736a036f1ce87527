"""Weights go from model to model by their paths; whatever does not fit is named, and then nothing is copied."""

import keras
import numpy as np
import pytest

import keras_transformer as kt
from keras_transformer.transfer import assign_weights

SIZES = {"d_model": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 8}
VOCAB = 10
IDS = np.array([[2, 5, 6, 3], [2, 7, 3, 0]])
HEAD = {"unused": ("head", "head_norm")}
BOTH = {"missing": ("logits",), **HEAD}


def masked_language_model(**options):
    return stirred(kt.build_masked_language_model(VOCAB, **{**SIZES, **options}))


def classifier(num_classes=3, **options):
    return stirred(kt.build_classifier(VOCAB, num_classes, **{**SIZES, **options}))


def language_model(**options):
    return stirred(kt.build_language_model(VOCAB, **{**SIZES, **options}))


def stirred(model):
    """No weight of two models is equal by its start."""
    for weight in model.trainable_weights:
        weight.assign(weight + keras.random.normal(weight.shape))
    return model


def values(model):
    """By path, without the states of random generators."""
    return {w.path: np.array(w) for w in model.weights}


def same(one, other):
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


def refused(*arguments, **options):
    """The lines of the error, each of which names something that does not fit."""
    with pytest.raises(ValueError, match="^All weights must fit; got\n") as error:
        kt.transfer_weights(*arguments, **options)
    return [line.strip() for line in str(error.value).split("\n")[1:]]


def test_what_was_pretrained_is_in_the_classifier_and_the_rest_is_as_it_was():
    source, target = masked_language_model(), classifier()
    theirs, before = values(source), values(target)
    copied = kt.transfer_weights(source, target, **BOTH)
    assert copied == [path for path in before if not path.startswith("logits/")]
    assert len(copied) == len(set(copied)) == len(theirs) - 4  # but the head's kernel, bias, scale and shift
    for path, value in values(target).items():
        np.testing.assert_array_equal(value, theirs[path] if path in copied else before[path], err_msg=path)
        assert path not in copied or np.any(value != before[path])
    same(values(source), theirs)


def test_a_copied_encoder_gives_the_vectors_of_the_pretrained_one():
    source, target = masked_language_model(), classifier()

    def vectors(model):
        x = model.get_layer("positions")(model.get_layer("embedding")(IDS))
        return np.array(model.get_layer("encoder")([x, keras.ops.convert_to_tensor(IDS != 0)]))

    assert np.abs(vectors(source) - vectors(target)).max() > 0.1
    kt.transfer_weights(source, target, **BOTH)
    np.testing.assert_array_equal(vectors(source), vectors(target))


def test_weights_of_a_model_that_was_saved_have_their_paths_still(tmp_path):
    source, target = masked_language_model(), classifier()
    source.save(tmp_path / "pretrained.keras")
    again = keras.models.load_model(tmp_path / "pretrained.keras")
    copied = kt.transfer_weights(again, target, **BOTH)
    theirs, ours = values(source), values(target)
    same({path: ours[path] for path in copied}, {path: theirs[path] for path in copied})
    assert copied == kt.transfer_weights(source, target, **BOTH)


def with_another_head(model):
    """The language model's vectors, with three scores a token instead of logits."""
    layer, node, _ = model.outputs[0]._keras_history
    vectors = layer._inbound_nodes[node].input_tensors[0]
    return keras.Model(model.inputs, keras.layers.Dense(3, name="scores")(vectors))


def test_a_language_model_gets_another_head():
    source, target = language_model(num_layers=2, norm_first=True), language_model(num_layers=2, norm_first=True)
    target = with_another_head(target)
    head, theirs = np.array(target.get_layer("scores").kernel), values(source)
    copied = kt.transfer_weights(source, target, missing=("scores",))
    ours = values(target)
    assert copied == list(theirs) and set(ours) == {*theirs, "scores/kernel", "scores/bias"}
    same({path: ours[path] for path in copied}, theirs)
    np.testing.assert_array_equal(ours["scores/kernel"], head)


def test_two_equal_models_become_the_same():
    source, target = language_model(), language_model()
    assert kt.transfer_weights(source, target) == list(values(source))
    np.testing.assert_array_equal(source(IDS), target(IDS))


def test_a_layer_that_may_keep_its_weights_keeps_them_also_where_the_source_has_it():
    source, target = classifier(), classifier()
    before = values(target)
    copied = kt.transfer_weights(source, target, missing=("logits", "embedding"))
    assert copied and not [path for path in copied if path.startswith(("logits/", "embedding/"))]
    ours, theirs = values(target), values(source)
    same(ours, {path: (theirs if path in copied else before)[path] for path in ours})


def test_a_layer_that_is_kept_may_have_another_shape():
    source, target = classifier(3), classifier(5)
    copied = kt.transfer_weights(source, target, missing=("logits",))
    assert copied == [path for path in values(target) if not path.startswith("logits/")]


def test_a_name_that_begins_alike_is_another_layer():
    source, target = masked_language_model(), classifier()
    lines = refused(source, target, missing=("logit", "log"), unused=("hea", "head_"))
    assert "logits/kernel: no value for it" in lines and "head/kernel: not in the target" in lines


def test_a_whole_encoder_may_be_named():
    """Also the paths of its weights begin with the names of its blocks."""
    source, target = classifier(), classifier(num_layers=2)
    before = values(target)
    copied = kt.transfer_weights(source, target, missing=("encoder",))
    assert sorted(copied) == ["embedding/embeddings", "logits/bias", "logits/kernel"]
    ours = values(target)
    same({p: ours[p] for p in ours if p not in copied}, {p: before[p] for p in ours if p not in copied})


def test_one_block_may_be_named():
    source, target = classifier(), classifier(num_layers=2)
    copied = kt.transfer_weights(source, target, missing=("encoder_block_2",))
    assert copied == list(values(source))
    assert kt.transfer_weights(target, source, unused=("encoder_block_2",)) == copied
    assert kt.transfer_weights(target, source, unused=("encoder",)) == copied


# ---- what does not fit


def test_all_that_does_not_fit_is_named_and_nothing_is_copied():
    source, target = masked_language_model(), classifier(intermediate_dim=6, num_layers=2)
    before, theirs = values(target), values(source)
    lines = refused(source, target)
    head = {f"{path}: not in the target" for path in theirs if path not in before}
    new = {f"{path}: no value for it" for path in before if path not in theirs}
    shapes = {
        f"{path}: shape {list(theirs[path].shape)} for one of {list(before[path].shape)}"
        for path in before
        if path in theirs and theirs[path].shape != before[path].shape
    }
    assert len(head) == 4 and len(new) == 16 + 2 and len(shapes) == 3
    assert sorted(lines) == sorted(head | new | shapes)
    same(values(target), before)
    same(values(source), theirs)


@pytest.mark.parametrize(
    ["options", "expected"],
    [
        ({"missing": ("logits",)}, ["head/kernel", "head/bias", "head_norm/gamma", "head_norm/beta"]),
        ({"missing": ("logits",), "unused": ("head",)}, ["head_norm/gamma", "head_norm/beta"]),
        ({"unused": ("head", "head_norm")}, ["logits/kernel", "logits/bias"]),
    ],
)
def test_layers_that_were_not_named_are(options, expected):
    target = classifier()
    before = values(target)
    assert [line.split(":")[0] for line in refused(masked_language_model(), target, **options)] == expected
    same(values(target), before)


def test_another_vocabulary_is_named():
    source, target = language_model(), stirred(kt.build_language_model(VOCAB + 1, **SIZES))
    assert refused(source, target) == [f"embedding/embeddings: shape [{VOCAB}, 8] for one of [{VOCAB + 1}, 8]"]


def twins():
    """A model with two nested ones whose layers have equal names."""

    def nested(name):
        x = keras.Input((4,))
        return keras.Model(x, keras.layers.Dense(4, name="dense")(x), name=name)

    x = keras.Input((4,))
    return keras.Model(x, nested("second")(nested("first")(x)), name="twins")


def test_two_layers_of_one_name_are_refused():
    for arguments in ((twins(), classifier()), (classifier(), twins())):
        with pytest.raises(ValueError, match="must have names of their own; got two weights 'dense/kernel' in 'twins'"):
            kt.transfer_weights(*arguments)


# ---- values given by path


def test_values_are_assigned_by_path():
    model, arrays = classifier(), values(classifier())
    assign_weights(model, arrays)
    same(values(model), arrays)


def test_kept_weights_need_no_value():
    model, arrays = classifier(), values(classifier())
    kept = ["logits/kernel", "logits/bias"]
    before = values(model)
    assign_weights(model, {path: value for path, value in arrays.items() if path not in kept}, kept=kept)
    same(values(model), {path: (before if path in kept else arrays)[path] for path in before})


def test_values_that_do_not_fit_are_named_and_none_is_assigned():
    model, arrays = classifier(), values(classifier())
    before = values(model)
    del arrays["logits/bias"]
    arrays.update({"logits/kernel": np.zeros((2, 2)), "embedding/embeddings": None, "elsewhere/kernel": np.zeros(3)})
    with pytest.raises(ValueError) as error:
        assign_weights(model, arrays, wrong=["x.weight: not in the files"])
    assert str(error.value).split("\n  ") == [
        "All weights must fit; got",
        "x.weight: not in the files",
        "logits/bias: no value for it",
        "elsewhere/kernel: no such weight in the model",
        "logits/kernel: shape [2, 2] for one of [8, 3]",
    ]
    same(values(model), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed_bfloat16"])
def test_weights_of_another_dtype_become_those_of_the_target(dtype):
    source, target = classifier(dtype=dtype), classifier()
    copied = kt.transfer_weights(source, target)
    assert {keras.backend.standardize_dtype(w.dtype) for w in target.trainable_weights} == {"float32"}
    ours, theirs = values(target), values(source)
    assert set(copied) == set(ours)
    for path in copied:
        np.testing.assert_array_equal(ours[path], theirs[path].astype("float32"))


# ---- in training


def test_a_frozen_encoder_stays_as_it_is_while_the_head_learns(rng):
    source, target = masked_language_model(), classifier(2)
    kt.transfer_weights(source, target, **BOTH)
    target.get_layer("encoder").trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    target.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    before = values(target)
    target.fit(rng.integers(4, VOCAB, (32, 5)), rng.integers(0, 2, 32), epochs=2, verbose=0)
    encoder = {weight.path for weight in target.get_layer("encoder").weights}
    assert len(encoder & set(before)) == 16
    for path, value in values(target).items():
        assert np.all(value == before[path]) == (path in encoder), path


def test_weights_can_be_copied_into_a_model_that_trains(rng):
    target = classifier(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    target.compile(keras.optimizers.Adam(1e-2), loss, jit_compile=False)
    ids, classes = rng.integers(4, VOCAB, (8, 5)), rng.integers(0, 2, 8)
    target.train_on_batch(ids, classes)
    source = masked_language_model()
    kt.transfer_weights(source, target, **BOTH)
    same({"table": values(target)["embedding/embeddings"]}, {"table": values(source)["embedding/embeddings"]})
    target.train_on_batch(ids, classes)
    assert np.any(values(target)["embedding/embeddings"] != values(source)["embedding/embeddings"])


@pytest.mark.parametrize("name", ["missing", "unused"])
def test_a_name_alone_is_refused(name):
    model = kt.build_classifier(9, 2, d_model=8, num_layers=1, num_heads=2, intermediate_dim=8)
    with pytest.raises(ValueError, match=f"`{name}` must be a tuple of names; got 'logits'"):
        kt.transfer_weights(model, model, **{name: "logits"})
