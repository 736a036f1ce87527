"""Blocks made in a `keras.RematScope`: the same numbers, dropout and masks included, in less memory."""

import contextlib
import pathlib
import re
import textwrap

import keras
import numpy as np
import pytest
from fresh import PEAK, run_in_fresh_process
from keras import ops
from keras.src.backend import get_keras_mask
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

import keras_transformer as kt

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's own")
VOCAB, WIDTH = 12, 8
NAMES = [f"{kind}_{i}" for kind in ("encoder_block", "decoder_block") for i in (1, 2)]
SOURCE = np.array([[4, 5, 6, 7, 0], [8, 9, 4, 0, 0]], "int32")
TARGET = np.array([[2, 5, 7, 0], [2, 11, 6, 8]], "int32")


def scope(is_on=True):
    """In it the blocks of these names are rematerialized."""
    on = keras.RematScope(mode="list_of_layers", layer_names=NAMES)
    return on if is_on else contextlib.nullcontext()


def plain(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def compose(kind, dropout=0.3, seed=1, **options):
    """A model of two blocks, or two pairs of them, on vectors that carry masks, and its input."""
    keras.utils.set_random_seed(seed)
    options = {"num_heads": 2, "intermediate_dim": 16, "dropout": dropout, **options}
    source, target = (keras.Input((None,), dtype="int32", name=name) for name in ("source", "target"))
    x = kt.PositionalEncoding()(kt.TokenEmbedding(VOCAB, WIDTH)(source))
    if kind == "shared":
        block = kt.EncoderBlock(**options, name=NAMES[0])
        return keras.Model(source, block(block(x))), SOURCE
    block = kt.DecoderBlock if kind == "language model" else kt.EncoderBlock
    for name in NAMES[:2]:
        x = block(**options, name=name)(x)
    if kind != "both":
        return keras.Model(source, keras.layers.GlobalAveragePooling1D()(x)), SOURCE
    y = kt.PositionalEncoding()(kt.TokenEmbedding(VOCAB, WIDTH)(target))
    for name in NAMES[2:]:
        y = kt.DecoderBlock(**options, name=name)(y, x)
    return keras.Model([source, target], keras.layers.Dense(VOCAB)(y)), [SOURCE, TARGET]


def step(model, inputs, training=True):
    """A graph's (output, gradients of half its squares, what is not trained), as arrays."""
    trainable, others = ([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables))
    if IS_TENSORFLOW:
        import tensorflow as tf

        @tf.function
        def run():
            with tf.GradientTape() as tape:
                output = model(inputs, training=training)
            return output, tape.gradient(output, trainable, output_gradients=output)

        output, gradients = run()
        others = [variable.value for variable in model.non_trainable_variables]
    else:
        jax = pytest.importorskip("jax")

        def run(trainable):
            call = lambda values: model.stateless_call(values, others, inputs, training=training)  # noqa: E731
            output, pull, others_after = jax.vjp(call, trainable, has_aux=True)
            return output, pull(output)[0], others_after

        output, gradients, others = jax.jit(run)(trainable)
    return plain(output), [*map(plain, gradients)], [*map(plain, others)]


def assert_same_step(found, expected, tolerance=1e-6):
    output, gradients, others = expected
    np.testing.assert_allclose(found[0], output, atol=tolerance)
    for own, right in zip(found[1], gradients):
        np.testing.assert_allclose(own, right, atol=10 * tolerance * max(1, np.abs(right).max()))
    for own, right in zip(found[2], others):
        np.testing.assert_array_equal(own, right)


@pytest.fixture
def runs(monkeypatch):
    """A list that grows by one with each run of a feed-forward layer, where that is more than asking for a shape."""
    runs, call = [], kt.FeedForward.call

    def counted(self, *arguments, **options):
        if not in_symbolic_scope():
            runs.append(self)
        return call(self, *arguments, **options)

    monkeypatch.setattr(kt.FeedForward, "call", counted)
    return runs


def counted_step(model, inputs, runs, training=True):
    """(a step, how often TensorFlow ran one of the model's blocks more than once for it)."""
    runs.clear()
    found = step(model, inputs, training)
    return found, len(runs) - len(set(map(id, runs)))


# ---- the same numbers

OPTIONS = {
    "as in the paper": {},
    "pre-norm": {"norm_first": True, "normalization": "rms"},
    "attention": {"attention": {"dropout": 0.2, "num_kv_heads": 1, "position": "relative", "qk_norm": True}},
    "blocks": {"attention": {"dropout": 0.2, "kernel": "blockwise"}, "feed_forward": {"dropout": 0.2, "gated": True}},
}


@pytest.mark.parametrize(
    "kind, options",
    [
        ("encoder", "as in the paper"),
        ("language model", "pre-norm"),
        ("both", "as in the paper"),
        ("shared", "pre-norm"),
        ("encoder", "attention"),
        pytest.param("encoder", "blocks", marks=pytest.mark.slow),
        pytest.param("both", "attention", marks=pytest.mark.slow),
        pytest.param("both", "blocks", marks=pytest.mark.slow),
    ],
)
def test_outputs_gradients_and_seeds_are_the_same(kind, options):
    assert_scope_changes_nothing(kind, **OPTIONS[options])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)])
def test_outputs_gradients_and_seeds_are_the_same_in_half_precision(policy):
    keras.config.set_dtype_policy(policy)
    # JAX rounds to half precision at other places where it has other neighbours to fuse
    assert_scope_changes_nothing("encoder", tolerance=1e-6 if IS_TENSORFLOW else 3e-3)


def assert_scope_changes_nothing(kind, tolerance=1e-6, **options):
    steps = []
    for is_on in (False, True):
        with scope(is_on):
            model, inputs = compose(kind, **options)
        steps.append(step(model, inputs))
    assert_same_step(*steps, tolerance)
    assert all(np.any(gradient) for gradient in steps[0][1][:-1])
    with pytest.raises(AssertionError):  # dropout has acted
        np.testing.assert_allclose(steps[0][0], plain(model(inputs)), atol=1e-3)


@tensorflow_only
@pytest.mark.parametrize("kind, often, blocks", [("both", 0, 4), ("shared", 1, 2)])
def test_blocks_compute_again_what_they_do_not_keep(runs, kind, often, blocks):
    for is_on in (False, True):
        with scope(is_on):
            model, inputs = compose(kind)
        assert counted_step(model, inputs, runs)[1] == often + blocks * is_on


@pytest.mark.skipif(IS_TENSORFLOW, reason="JAX's own")
def test_blocks_are_checkpoints_of_jax():
    jax = pytest.importorskip("jax")
    for is_on in (False, True):
        with scope(is_on):
            model, inputs = compose("both")
        values = [[v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables)]
        text = str(jax.make_jaxpr(lambda *v: model.stateless_call(*v, inputs, training=True))(*values))  # noqa: B023
        assert len(re.findall(r"= (?:remat|checkpoint)\w*\[", text)) == (4 if is_on else 0)


@pytest.mark.parametrize("kind", ["encoder", "both"])
def test_fit_learns_the_same_weights(kind):
    weights = []
    for is_on in (False, True):
        with scope(is_on):
            model, inputs = compose(kind)
        start = model.get_weights()
        labels = np.random.default_rng(0).normal(size=model(inputs).shape)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=not IS_TENSORFLOW)
        model.fit(inputs, labels, batch_size=1, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for own, right in zip(*reversed(weights)):
        np.testing.assert_allclose(own, right, atol=1e-5)
    assert sum(np.any(np.abs(right - before) > 1e-5) for right, before in zip(weights[0], start)) > len(start) / 2


MODES = [  # (block, how the scope is made, whether that means the block)
    (kt.EncoderBlock, {"mode": "full"}, True),
    (kt.EncoderBlock, {"mode": "larger_than", "output_size_threshold": 1}, True),
    (kt.DecoderBlock, {"mode": "larger_than", "output_size_threshold": 1}, True),
    (kt.EncoderBlock, {"mode": "larger_than", "output_size_threshold": 10**6}, False),
    (kt.EncoderBlock, {"mode": "activations"}, False),
    (kt.DecoderBlock, {"mode": "list_of_layers", "layer_names": ["block"]}, True),
    (kt.EncoderBlock, {"mode": "list_of_layers", "layer_names": ["another"]}, False),
]


@pytest.mark.parametrize("cls, options, is_meant", MODES)
def test_every_mode_of_the_scope_gives_the_same(runs, cls, options, is_meant):
    rng, steps = np.random.default_rng(0), []
    vectors = [rng.normal(size=(2, length, WIDTH)).astype("float32") for length in (5, 4)]
    vectors = vectors[: 1 if cls is kt.EncoderBlock else 2]
    for mode in (contextlib.nullcontext(), keras.RematScope(**options)):
        keras.utils.set_random_seed(1)
        with mode:
            block = cls(2, 16, dropout=0.3, name="block")
        inputs = [keras.Input((None, WIDTH)) for _ in vectors]
        steps.append(counted_step(keras.Model(inputs, block(*inputs)), vectors, runs))
    assert_same_step(steps[1][0], steps[0][0])
    if IS_TENSORFLOW:
        assert [again for _, again in steps] == [0, is_meant]


# ---- masks, caches, maps, files


@pytest.mark.parametrize(
    "embedding, cls", [(kt.TokenEmbedding, kt.EncoderBlock), (keras.layers.Embedding, kt.DecoderBlock)]
)
def test_padding_does_not_leak_behind_a_rematerialized_block(embedding, cls):
    ids = keras.Input((None,), dtype="int32")
    with scope():
        x = embedding(VOCAB, WIDTH, mask_zero=True)(ids)
        for name in NAMES[:2]:
            x = cls(2, 16, name=name)(x)
        model = keras.Model(ids, [x, keras.layers.GlobalAveragePooling1D()(x)])
    short, padded = np.array([[3, 4], [5, 6]]), np.array([[3, 4, 0, 0], [5, 6, 0, 0]])
    (vectors, pooled), (expected, expected_pooled) = model(padded), model(short)
    np.testing.assert_allclose(vectors[:, :2], expected, atol=1e-6)
    np.testing.assert_allclose(pooled, expected_pooled, atol=1e-6)
    assert np.array_equal(get_keras_mask(vectors), padded != 0)
    of_table = step(keras.Model(ids, keras.layers.GlobalAveragePooling1D()(x)), padded)[1][0]
    assert np.all(of_table[0] == 0) and np.all(np.any(of_table[3:7] != 0, axis=-1))


def test_explicit_masks_and_segments_are_heeded():
    rng, outputs = np.random.default_rng(0), []
    x, context = (rng.normal(size=(2, length, WIDTH)).astype("float32") for length in (5, 4))
    rules = {
        "padding_mask": np.array([[1, 1, 1, 1, 0], [1] * 5]),
        "context_padding_mask": np.array([[1, 1, 0, 0], [1] * 4]),
        "attention_mask": rng.random((5, 5)) < 0.5,
        "segment_ids": np.array([[1, 1, 2, 2, 2]] * 2),
        "context_segment_ids": np.array([[1, 2, 2, 2]] * 2),
    }
    for is_on in (False, True):
        keras.utils.set_random_seed(1)
        with scope(is_on):
            block = kt.DecoderBlock(2, 16, dropout=0.3, name=NAMES[2])
        outputs.append(block(x, context, **rules, training=True))
    np.testing.assert_array_equal(*outputs)
    assert np.array_equal(get_keras_mask(outputs[1]), rules["padding_mask"] != 0)
    assert np.max(np.abs(plain(block(x, context)) - plain(block(x, context, **rules)))) > 1e-3


def test_caches_and_maps_work_inside():
    models = []
    for is_on in (False, True):
        keras.utils.set_random_seed(1)
        with scope(is_on):
            models.append(kt.build_transformer(VOCAB, **{**kt.PRESETS["tiny"], "num_layers": 1}))
    found = []
    for model in models:
        with kt.AttentionMaps() as maps:
            model({"source": SOURCE, "target": TARGET})
        answer = kt.Generator(model, max_length=4)({"source": SOURCE})
        found.append({**maps, "ids": answer["ids"], "score": answer["score"]})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 5
    for name, expected in found[0].items():
        np.testing.assert_allclose(found[1][name], expected, atol=1e-6)
    with scope():
        layer = kt.DecoderBlock(2, 16, name=NAMES[2])
    x, cache, steps = np.random.default_rng(0).normal(size=(1, 4, WIDTH)).astype("float32"), None, []
    for t in range(4):
        with kt.DecodingScope(cache, index=ops.array([t]), length=4) as cached:
            steps.append(plain(layer(x[:, t : t + 1])))
        cache = cached.cache
    np.testing.assert_allclose(np.concatenate(steps, axis=1), layer(x), atol=1e-5)


def test_a_reloaded_model_gives_the_same_and_is_rematerialized_where_a_scope_says_so(tmp_path, runs):
    with scope():
        model, inputs = compose("both")
    model.save(tmp_path / "model.keras")
    outside = keras.models.load_model(tmp_path / "model.keras")
    with scope():
        inside = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(outside(inputs), model(inputs))
    found, again = counted_step(inside, inputs, runs, training=False)
    expected, never = counted_step(outside, inputs, runs, training=False)
    assert_same_step((*found[:2], []), (*expected[:2], []))  # the seeds of dropout are drawn anew
    if IS_TENSORFLOW:
        assert (again, never) == (4, 0)


@tensorflow_only
@pytest.mark.slow
def test_an_exported_model_gives_the_same(tmp_path):
    import tensorflow as tf

    with scope():
        model, inputs = compose("both")
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    np.testing.assert_allclose(loaded.serve(inputs), model(inputs), atol=1e-6)


# ---- cost


@tensorflow_only
@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peak memory is Linux's to tell")
def test_training_takes_less_memory():
    code = """
        import contextlib, json, sys
        import keras, numpy as np, tensorflow as tf
        import keras_transformer as kt

        names = [f"block_{i}" for i in range(12)]
        scopes = {"kept": contextlib.nullcontext(), "recomputed": keras.RematScope("list_of_layers", layer_names=names)}
        x = inputs = keras.Input((None, 32))
        with scopes[sys.argv[1]]:
            for name in names:
                x = kt.EncoderBlock(4, 64, attention={"kernel": "exact"}, name=name)(x)
        model = keras.Model(inputs, x)

        @tf.function(input_signature=[tf.TensorSpec([1, None, 32])])
        def largest(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
            return tf.reduce_max([tf.reduce_max(tf.abs(gradient)) for gradient in gradients])

        largest(tf.ones([1, 8, 32]))
        before = peak()
        assert np.isfinite(largest(tf.random.normal([1, 1024, 32])))
        print(json.dumps(peak() - before))
    """
    megabytes = {kind: run_in_fresh_process(PEAK + textwrap.dedent(code), kind) for kind in ("kept", "recomputed")}
    assert megabytes["kept"] > 200  # 12 blocks' weights, 17 MB each
    assert megabytes["recomputed"] < 0.4 * megabytes["kept"]
