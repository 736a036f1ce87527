"""The cross-entropy that never holds all logits: the same numbers as the plain one, in less memory."""

import pathlib
import textwrap

import keras
import numpy as np
import pytest
from fresh import PEAK, run_in_fresh_process
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import keras_transformer as kt
from keras_transformer import crossentropy
from keras_transformer.crossentropy import linear_crossentropy, token_losses
from keras_transformer.loops import each

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's own")
VOCAB, WIDTH = 13, 6
ODD = [0, 1, 5, 17, 40]  # tokens: none, one, fewer than a block, and not a multiple of one


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(crossentropy, "BLOCK", 8 * VOCAB)  # 8 tokens


def numbers(tokens, seed=0):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(tokens, WIDTH)).astype("float32")
    kernel = rng.normal(size=(WIDTH, VOCAB)).astype("float32")
    return vectors, kernel, rng.integers(0, VOCAB, tokens).astype("int32"), rng.uniform(size=tokens).astype("float32")


def value_and_gradients(function, weights, *arguments):
    """(values, gradients of their weighted sum)."""
    if IS_TENSORFLOW:
        import tensorflow as tf

        arguments = [tf.constant(argument) for argument in arguments]
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            values = function(*arguments)
            total = tf.reduce_sum(values * weights)
        return np.array(values), [np.array(ops.cast(g, "float32")) for g in tape.gradient(total, arguments)]
    import jax

    arguments = [ops.convert_to_tensor(argument) for argument in arguments]
    gradients = jax.grad(lambda *a: (function(*a) * weights).sum(), argnums=(0, 1))(*arguments)
    return np.array(function(*arguments)), [np.array(ops.cast(g, "float32")) for g in gradients]


def plain(labels, smoothing):
    return lambda vectors, kernel: token_losses(labels[None], ops.matmul(vectors, kernel)[None], smoothing, -1)[0][0]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("scale", [1.0, 50.0, 3e4, 1e30])
def test_values_and_gradients_are_the_formulas(scale, smoothing):
    rng = np.random.default_rng(0)
    logits = (scale * rng.normal(size=(40, VOCAB))).astype("float32")
    labels, weights = rng.integers(0, VOCAB, 40).astype("int32"), rng.uniform(size=40).astype("float32")

    def losses(logits, more):
        return token_losses(labels[None], (logits + more)[None], smoothing, -1)[0][0]

    found, (gradient, _) = value_and_gradients(losses, weights, logits, np.zeros_like(logits))
    wide = logits.astype("float64")
    shifted = wide - wide.max(axis=1, keepdims=True)
    log_shares = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    target = (1 - smoothing) * np.eye(VOCAB)[labels] + smoothing / VOCAB
    np.testing.assert_allclose(found, -(target * log_shares).sum(axis=1), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, (np.exp(log_shares) - target) * weights[:, None], atol=1e-6)


def test_tokens_that_cannot_be_have_no_share_in_the_loss():
    logits = np.array([[[0.0, 1.0, -np.inf, -np.inf]]], "float32")
    np.testing.assert_allclose(token_losses(np.array([[1]]), logits)[0], [[np.log1p(np.exp(-1))]], rtol=1e-6)
    assert np.isposinf(np.array(token_losses(np.array([[2]]), logits)[0])).all()


@pytest.mark.parametrize("label", [-1, VOCAB, VOCAB + 9])
def test_a_label_outside_the_vocabulary_is_refused_or_not_a_number(label):
    labels, logits = np.array([[1, label, 2]], "int32"), np.zeros((1, 3, VOCAB), "float32")
    if IS_TENSORFLOW:
        with pytest.raises(Exception, match=rf"= {VOCAB if label < 0 else label} is not in \[0, {VOCAB}\)"):
            kt.TokenCrossentropy()(labels, logits)
    else:
        assert np.isnan(np.array(kt.TokenCrossentropy()(labels, logits)))


@pytest.mark.parametrize("tokens", ODD)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_values_and_gradients_are_those_of_the_plain_loss(small_blocks, tokens, smoothing):
    vectors, kernel, labels, weights = numbers(tokens)
    everything = np.ones(tokens, bool)

    def losses(vectors, kernel):
        return linear_crossentropy(vectors, kernel, labels, everything, smoothing)

    found = value_and_gradients(losses, weights, vectors, kernel)
    expected = value_and_gradients(plain(labels, smoothing), weights, vectors, kernel)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for own, right in zip(found[1], expected[1]):
        np.testing.assert_allclose(own, right, rtol=1e-4, atol=1e-5)


@tensorflow_only
@settings(deadline=None, max_examples=15)
@given(tokens=st.integers(0, 30), block=st.integers(1, 40), seed=st.integers(0, 99), share=st.sampled_from([0, 0.2, 1]))
def test_neither_the_size_of_the_block_nor_padding_changes_what_is_real(tokens, block, seed, share):
    vectors, kernel, labels, weights = numbers(tokens, seed)
    real = np.random.default_rng(seed).uniform(size=tokens) < share
    expected = value_and_gradients(plain(np.where(real, labels, -1), 0.1), weights, vectors, kernel)

    def losses(vectors, kernel):
        return linear_crossentropy(vectors, kernel, labels, real, 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossentropy, "BLOCK", block * VOCAB)
        found = value_and_gradients(losses, weights, vectors, kernel)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for own, right in zip(found[1], expected[1]):
        np.testing.assert_allclose(own, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_float32_losses_near_those_of_float32(small_blocks, dtype):
    vectors, kernel, labels, weights = numbers(17)
    half = [np.array(ops.cast(ops.cast(x, dtype), "float32")) for x in (vectors, kernel)]

    def losses(vectors, kernel):
        return linear_crossentropy(ops.cast(vectors, dtype), ops.cast(kernel, dtype), labels, labels >= 0, 0.1)

    values, gradients = value_and_gradients(losses, weights, *half)
    right, right_gradients = value_and_gradients(plain(labels, 0.1), weights, *half)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, right, atol=0.05)
    for own, other in zip(gradients, right_gradients):
        np.testing.assert_allclose(own, other, atol=0.05)


@tensorflow_only
@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_it_runs_in_a_graph_of_unknown_length_and_under_xla(small_blocks, jit):
    import tensorflow as tf

    spec = [tf.TensorSpec([None, WIDTH]), tf.TensorSpec([WIDTH, VOCAB]), tf.TensorSpec([None], tf.int32)]

    @tf.function(input_signature=spec, jit_compile=jit)
    def gradients(vectors, kernel, labels):
        losses = linear_crossentropy(vectors, kernel, labels, labels >= 0, 0.1)
        return losses, tf.gradients(tf.reduce_sum(losses), [vectors, kernel])

    for tokens in (1, 9, 16):
        vectors, kernel, labels, _ = numbers(tokens)
        losses, found = gradients(vectors, kernel, labels)
        expected = value_and_gradients(plain(labels, 0.1), 1.0, vectors, kernel)
        np.testing.assert_allclose(losses, expected[0], rtol=1e-5, atol=1e-5)
        for own, right in zip(found, expected[1]):
            np.testing.assert_allclose(own, right, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(IS_TENSORFLOW, reason="JAX's own")
@pytest.mark.parametrize("transformed", ["jit", "checkpoint"])
@pytest.mark.parametrize("kind", ["plain", "linear"])
def test_gradients_go_through_functions_that_jax_transforms(small_blocks, transformed, kind):
    import jax

    vectors, kernel, labels, _ = numbers(17)

    def total(vectors, kernel, labels):
        if kind == "plain":
            return plain(labels, 0.1)(vectors, kernel).sum()
        return linear_crossentropy(vectors, kernel, labels, labels >= 0, 0.1).sum()

    found = jax.grad(getattr(jax, transformed)(total), argnums=(0, 1))(vectors, kernel, labels)
    _, expected = value_and_gradients(plain(labels, 0.1), 1.0, vectors, kernel)
    for own, right in zip(found, expected):
        np.testing.assert_allclose(own, right, rtol=1e-4, atol=1e-5)


# ---- in a model


def build(kind, tie=True):
    sizes = {"d_model": 8, "num_layers": 1, "num_heads": 2, "intermediate_dim": 16, "dropout": 0.0}
    if kind == "language model":
        return kt.build_language_model(30, tie_embeddings=tie, **sizes)
    return kt.build_transformer(30, tie_embeddings="all" if tie else "none", **sizes)


def batch(model):
    rng = np.random.default_rng(0)
    labels = rng.integers(4, 30, (4, 7)).astype("int32")
    labels[2:, 4:] = 0
    inputs = {tensor.name: np.where(labels, np.roll(labels, 1, 1), 0) for tensor in model.inputs}
    return inputs, labels


@pytest.mark.parametrize("kind", ["language model", "transformer"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("divisor", [None, 20])
def test_a_loss_model_trains_its_model_as_the_plain_loss_does(kind, tie, divisor):
    weights, losses = [], []
    for lean in (False, True):
        keras.utils.set_random_seed(1)
        model = build(kind, tie)
        inputs, labels = batch(model)
        trained = kt.loss_model(model, label_smoothing=0.1) if lean else model
        loss = kt.TokenCrossentropy(0.0 if lean else 0.1, divisor=divisor)
        trained.compile(keras.optimizers.SGD(0.5), loss, jit_compile=False)
        if lean:
            inputs = {**inputs, "labels": labels}
        elif kind == "language model":
            inputs = inputs["tokens"]
        history = trained.fit(inputs, labels, epochs=3, batch_size=4, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
        weights.append(model.get_weights())
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[1][-1] < losses[1][0]
    for own, right in zip(*weights):
        np.testing.assert_allclose(own, right, atol=1e-5)


def test_what_is_evaluated_is_not_smoothed_and_padding_does_not_count():
    model = build("transformer")
    inputs, labels = batch(model)
    lean = kt.loss_model(model, label_smoothing=0.3)
    lean.compile(loss=kt.TokenCrossentropy(), metrics=[kt.TokenLoss(), kt.Perplexity()], jit_compile=False)
    model.compile(loss=kt.TokenCrossentropy(), metrics=[kt.TokenLoss(), kt.Perplexity()], jit_compile=False)
    expected = model.evaluate(inputs, labels, batch_size=4, verbose=0, return_dict=True)
    found = lean.evaluate({**inputs, "labels": labels}, labels, batch_size=4, verbose=0, return_dict=True)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def test_both_models_save_and_reload(tmp_path):
    model = build("transformer")
    inputs, labels = batch(model)
    lean = kt.loss_model(model)
    model.save(tmp_path / "model.keras")
    lean.save(tmp_path / "lean.keras")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(reloaded(inputs), model(inputs))
    all_inputs = {**inputs, "labels": labels}
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "lean.keras")(all_inputs), lean(all_inputs))
    generate = kt.Generator(model, max_length=3)
    assert generate({"source": inputs["source"]})["ids"].shape == (4, 1, 3)


@pytest.mark.parametrize("pad_id, own_pad_id", [(-100, None), (999, None), (1, 1)])
def test_padding_does_no_harm_whatever_its_label(pad_id, own_pad_id):
    embedding = kt.TokenEmbedding(VOCAB, WIDTH)
    vectors = np.random.default_rng(0).normal(size=(2, 3, WIDTH)).astype("float32")
    labels = np.array([[4, pad_id, pad_id], [5, 6, pad_id]], "int32")
    losses = embedding(vectors, labels=labels, pad_id=own_pad_id)
    assert np.isnan(np.array(losses)).sum() == 3
    expected = kt.TokenCrossentropy(pad_id=pad_id)(labels, embedding(vectors, reverse=True))
    np.testing.assert_allclose(kt.TokenCrossentropy(pad_id=pad_id)(labels, losses), expected, rtol=1e-5)


def test_a_model_whose_logits_are_no_embeddings_is_refused():
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, keras.layers.Dense(9, name="head")(kt.TokenEmbedding(9, 4)(tokens)))
    with pytest.raises(ValueError, match="must be the logits of a `TokenEmbedding`; got that of 'head'"):
        kt.loss_model(model)
    with pytest.raises(ValueError, match="must be the logits of a `TokenEmbedding`; got that of 'vectors'"):
        kt.loss_model(keras.Model(tokens, kt.TokenEmbedding(9, 4, name="vectors")(tokens)))


def test_other_padding_than_the_losss_is_seen():
    model = build("language model")
    inputs, labels = batch(model)
    losses = kt.loss_model(model, pad_id=5)({**inputs, "labels": np.where(labels == 4, 5, labels)})
    assert np.isnan(np.array(kt.TokenCrossentropy(pad_id=0)(np.where(labels == 4, 5, labels), losses)))


def test_padding_costs_no_logits(small_blocks, monkeypatch):
    vectors, kernel, labels, _ = numbers(64)
    ends = []

    def counted(span, *others):
        ends.append(int(span[1]))
        return each(span, *others)

    monkeypatch.setattr(crossentropy, "each", counted)
    for real in (np.ones(64, bool), np.arange(64) % 5 == 0, np.zeros(64, bool)):
        linear_crossentropy(vectors, kernel, labels, real)
    assert ends == [8, 2, 0]  # blocks of 8


def test_labels_that_are_none_are_refused_or_seen():
    embedding = kt.TokenEmbedding(VOCAB, WIDTH)
    vectors = np.zeros((2, 3, WIDTH), "float32")
    assert np.isnan(np.array(embedding(vectors, labels=np.full((2, 3), VOCAB)))).all()
    for labels in (np.ones((2, 3), "float32"), np.ones((2, 4), "int32"), np.ones((3,), "int32")):
        with pytest.raises(ValueError, match=r"`labels` must be integers of shape \[B, 3\]"):
            embedding(vectors, labels=labels)


def test_smoothing_twice_is_refused():
    with pytest.raises(ValueError, match="smoothed by `loss_model`, not here; got 0.1"):
        kt.TokenCrossentropy(label_smoothing=0.1)(np.ones((2, 3), "int32"), np.ones((2, 3), "float32"))


def test_smoothing_out_of_range_and_a_soft_cap_are_refused():
    with pytest.raises(ValueError, match="`label_smoothing` must be at least 0 and below 1; got 1"):
        kt.loss_model(build("language model"), label_smoothing=1)
    with pytest.raises(ValueError, match="without `logit_soft_cap`; got 30"):
        kt.TokenEmbedding(9, 4, logit_soft_cap=30.0)(np.zeros((1, 2, 4), "float32"), labels=np.ones((1, 2), "int32"))


@tensorflow_only
@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peak memory is Linux's to tell")
def test_the_logits_of_all_tokens_are_never_held_at_once():
    code = """
        import json, sys
        import numpy as np, tensorflow as tf
        from keras_transformer.crossentropy import linear_crossentropy, token_losses

        vectors, kernel = tf.random.normal([4096, 32]), tf.random.normal([32, 16000])
        labels = tf.random.uniform([4096], 0, 16000, tf.int32)

        @tf.function
        def gradients(vectors, kernel):
            if sys.argv[1] == "plain":
                losses, _ = token_losses(labels[None], (vectors @ kernel)[None], 0.1)
            else:
                losses = linear_crossentropy(vectors, kernel, labels, labels >= 0, 0.1)
            return tf.gradients(tf.reduce_sum(losses), [vectors, kernel])

        before = peak()
        [g.numpy() for g in gradients(vectors, kernel)]
        print(json.dumps(peak() - before))
    """
    code = PEAK + textwrap.dedent(code)
    megabytes = {kind: run_in_fresh_process(code, kind) for kind in ("plain", "linear")}
    assert megabytes["linear"] < 0.3 * megabytes["plain"]  # 4096 x 16000 logits are 262 MB
