"""Losses, metrics and the schedule: they count tokens, not padding, and survive saving."""

import json

import keras
import numpy as np
import pytest
from fresh import run_in_fresh_process
from keras import ops

import keras_transformer as kt

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's own")
VOCAB = 11


def batch(rng, lengths=(1, 4, 2, 3), length=5):
    """Labels with padding behind, and logits."""
    labels = rng.integers(1, VOCAB, (len(lengths), length))
    labels[np.arange(length) >= np.array(lengths)[:, None]] = 0
    return labels.astype("int32"), rng.normal(size=(*labels.shape, VOCAB)).astype("float32")


def log_softmax(logits):
    logits = logits.astype("float64")
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def cross_entropies(labels, logits, smoothing=0.0):
    """The one-hot formula, in float64."""
    target = (1 - smoothing) * np.eye(VOCAB)[np.maximum(labels, 0)] + smoothing / VOCAB
    return -(target * log_softmax(logits)).sum(-1)


def token_model(mask_zero=True):
    """Ids to logits, each position by itself: small, and it shows which tokens were counted."""
    ids = keras.Input((None,), dtype="int32")
    x = kt.TokenEmbedding(VOCAB, 8, mask_zero=mask_zero)(ids)
    return keras.Model(ids, keras.layers.Dense(VOCAB)(x))


def language_model():
    """The smallest model of this package's layers that reads what comes before."""
    ids = keras.Input((None,), dtype="int32")
    embedding = kt.TokenEmbedding(VOCAB, 8)
    x = kt.DecoderBlock(2, 16, dropout=0.0)(kt.PositionalEncoding()(embedding(ids)))
    return keras.Model(ids, embedding(x, reverse=True))


def language_batches(rng, steps):
    labels = [batch(rng)[0] for _ in range(steps)]
    return [(np.pad(y[:, :-1], ((0, 0), (1, 0)), constant_values=2), y) for y in labels]


# ---- the loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_loss_is_the_mean_over_real_tokens(rng, smoothing):
    labels, logits = batch(rng)
    expected = cross_entropies(labels, logits, smoothing)[labels != 0].mean()
    np.testing.assert_allclose(kt.TokenCrossentropy(smoothing)(labels, logits), expected, rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_equals_keras_one_hot_loss_on_the_real_tokens(rng, smoothing):
    labels, logits = batch(rng)
    real = labels != 0
    one_hot = np.eye(VOCAB, dtype="float32")[labels[real]]
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing)(one_hot, logits[real])
    np.testing.assert_allclose(kt.TokenCrossentropy(smoothing)(labels, logits), expected, rtol=1e-5)


def test_padded_columns_and_rows_do_not_change_loss_or_metrics(rng):
    labels, logits = batch(rng)
    more_labels = np.pad(labels, ((0, 2), (0, 3)))
    more_logits = np.concatenate([np.pad(logits, ((0, 2), (0, 0), (0, 0))), np.ones((6, 3, VOCAB), "float32")], axis=1)
    for function in (kt.TokenCrossentropy(0.1), kt.TokenLoss(), kt.TokenAccuracy(), kt.Perplexity()):
        few = float(function(labels, logits))
        if isinstance(function, keras.metrics.Metric):
            function.reset_state()
        np.testing.assert_allclose(function(more_labels, more_logits), few, rtol=1e-6)


@pytest.mark.parametrize("mask_zero", [False, True])
def test_evaluate_counts_real_tokens_whether_a_mask_arrives_or_not(rng, mask_zero):
    labels, _ = batch(rng)
    model = token_model(mask_zero)
    model.compile(loss=kt.TokenCrossentropy(), metrics=[kt.TokenAccuracy()], jit_compile=False)
    found = model.evaluate(labels, labels, batch_size=len(labels), verbose=0, return_dict=True)
    logits, real = np.array(model(labels)), labels != 0
    np.testing.assert_allclose(found["loss"], cross_entropies(labels, logits)[real].mean(), rtol=1e-5)
    np.testing.assert_allclose(found["token_accuracy"], (logits.argmax(-1) == labels)[real].mean(), rtol=1e-6)


@pytest.mark.parametrize("pad_id", [0, -100, 10])
def test_any_id_can_be_padding(rng, pad_id):
    labels, logits = batch(rng)
    labels = np.where(labels == pad_id, 1, labels)
    labels[0, 1:] = pad_id
    real = labels != pad_id
    expected = cross_entropies(labels, logits)[real].mean()
    np.testing.assert_allclose(kt.TokenCrossentropy(pad_id=pad_id)(labels, logits), expected, rtol=1e-6)
    np.testing.assert_allclose(kt.TokenLoss(pad_id)(labels, logits), expected, rtol=1e-6)
    np.testing.assert_allclose(kt.Perplexity(pad_id)(labels, logits), np.exp(expected), rtol=1e-5)
    hits = (logits.argmax(-1) == labels)[real].mean()
    np.testing.assert_allclose(kt.TokenAccuracy(pad_id)(labels, logits), hits, rtol=1e-6)


@pytest.mark.parametrize("pad_id", [0, -100])
def test_a_batch_of_padding_has_loss_0_and_leaves_weights_as_they_are(pad_id):
    model = token_model(mask_zero=False)
    model.compile(
        keras.optimizers.SGD(1.0), kt.TokenCrossentropy(0.1, pad_id), metrics=[kt.Perplexity(pad_id)], jit_compile=False
    )
    before = model.get_weights()
    found = model.train_on_batch(np.ones((2, 3), "int32"), np.full((2, 3), pad_id, "int32"), return_dict=True)
    assert float(found["loss"]) == 0 and float(found["perplexity"]) == 1
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_are_computed_in_float32(rng, dtype):
    labels, logits = batch(rng)
    logits = ops.cast(logits * 30, dtype)
    as_float32 = np.array(ops.cast(logits, "float32"))
    loss = kt.TokenCrossentropy(0.1)(labels, logits)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    np.testing.assert_allclose(loss, cross_entropies(labels, as_float32, 0.1)[labels != 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(kt.TokenLoss()(labels, logits), kt.TokenLoss()(labels, as_float32), rtol=1e-6)


@pytest.mark.parametrize("label_dtype", ["int32", "int64", "uint8", "float32"])
def test_labels_of_any_number_type_give_the_same(rng, label_dtype):
    labels, logits = batch(rng)
    for function in (kt.TokenCrossentropy, kt.TokenLoss, kt.TokenAccuracy):
        np.testing.assert_allclose(
            function()(labels.astype(label_dtype), logits), function()(labels, logits), rtol=1e-6
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradient_is_that_of_the_formula_and_0_at_padding(rng, smoothing):
    labels, logits = batch(rng)
    variable = keras.Variable(logits)
    loss = kt.TokenCrossentropy(smoothing)
    if IS_TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss(labels, variable.value)
        gradient = tape.gradient(value, variable.value)
    else:
        import jax

        gradient = jax.grad(lambda x: loss(labels, x))(variable.value)
    real = (labels != 0)[..., None]
    target = (1 - smoothing) * np.eye(VOCAB)[labels] + smoothing / VOCAB
    expected = (np.exp(log_softmax(logits)) - target) * real / real.sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


# ---- weights of samples


def token_weights(labels, kind, rng):
    if kind == "rows":
        return np.array([0.5, 2.0, 0.0, 1.0])
    if kind == "tokens":
        return rng.uniform(size=labels.shape)
    return (labels != 0).astype("float32")  # padding told twice


@pytest.mark.parametrize("kind", ["rows", "tokens", "padding"])
def test_sample_weight_makes_weighted_means_over_real_tokens(rng, kind):
    labels, logits = batch(rng)
    weights = token_weights(labels, kind, rng)
    full = (weights[:, None] if weights.ndim == 1 else weights) * (labels != 0)
    losses = cross_entropies(labels, logits)
    hits = logits.argmax(-1) == labels
    for function, values in ((kt.TokenCrossentropy(), losses), (kt.TokenLoss(), losses), (kt.TokenAccuracy(), hits)):
        np.testing.assert_allclose(function(labels, logits, weights), (values * full).sum() / full.sum(), rtol=1e-5)
    np.testing.assert_allclose(
        kt.Perplexity()(labels, logits, weights), np.exp((losses * full).sum() / full.sum()), rtol=1e-5
    )


@pytest.mark.parametrize("shape", ["rows", "tokens"])
def test_sample_weight_of_fit_reaches_loss_and_weighted_metrics(rng, shape):
    labels, _ = batch(rng)
    weights = rng.uniform(size=labels.shape if shape == "tokens" else len(labels)).astype("float32")
    model = token_model()
    model.compile(loss=kt.TokenCrossentropy(), weighted_metrics=[kt.TokenLoss()], jit_compile=False)
    found = model.evaluate(labels, labels, batch_size=4, sample_weight=weights, verbose=0, return_dict=True)
    full = (weights[:, None] if weights.ndim == 1 else weights) * (labels != 0)
    expected = (cross_entropies(labels, np.array(model(labels))) * full).sum() / full.sum()
    np.testing.assert_allclose([found["loss"], found["token_loss"]], expected, rtol=1e-5)


# ---- errors


@pytest.mark.parametrize("function", [kt.TokenCrossentropy, kt.TokenLoss, kt.TokenAccuracy, kt.Perplexity])
@pytest.mark.parametrize(
    ("labels", "logits"), [((2, 3, 1), (2, 3, 8)), ((2, 3), (2,)), ((2,), (2, 8)), ((2, 1), (2, 4, 8))]
)
def test_labels_and_logits_of_wrong_ranks_are_refused(function, labels, logits):
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        function()(np.ones(labels, "int32"), np.ones(logits, "float32"))


@pytest.mark.parametrize("function", [kt.TokenCrossentropy, kt.TokenLoss, kt.TokenAccuracy, kt.Perplexity])
def test_ids_are_refused_as_predictions(function):
    with pytest.raises(ValueError, match="predictions of int32"):
        function()(np.ones((2, 3), "int32"), np.ones((2, 3), "int32"))


def test_accuracy_is_not_that_of_losses():
    with pytest.raises(ValueError, match=r"logits \[B, T, V\]; got shapes \(2, 3\) and \(2, 3\)"):
        kt.TokenAccuracy()(np.ones((2, 3), "int32"), np.ones((2, 3), "float32"))


@pytest.mark.parametrize("function", [kt.TokenCrossentropy, kt.TokenLoss])
@pytest.mark.parametrize("shape", [(), (2, 3, 1)])
def test_sample_weight_of_another_rank_is_refused(function, shape):
    with pytest.raises(ValueError, match=r"`sample_weight` must be of shape \[B\] or \[B, T\]"):
        function()(np.ones((2, 3), "int32"), np.ones((2, 3, 8), "float32"), np.ones(shape))


@pytest.mark.parametrize(
    "arguments", [{"label_smoothing": 1.0}, {"label_smoothing": -0.1}, {"divisor": 0}, {"divisor": -1.0}]
)
def test_loss_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` must be .*; got {next(iter(arguments.values()))}"):
        kt.TokenCrossentropy(**arguments)


@pytest.mark.parametrize("arguments", [{"d_model": 0}, {"warmup_steps": 0}, {"warmup_steps": 1.5}, {"scale": 0}])
def test_schedule_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` must be"):
        kt.WarmupInverseSqrt(**{"d_model": 8, **arguments})


# ---- a fixed divisor is linear in the tokens


def test_divisor_makes_the_loss_a_sum_over_tokens(rng):
    labels, logits = batch(rng)
    losses = cross_entropies(labels, logits, 0.1)
    loss = kt.TokenCrossentropy(0.1, divisor=20)
    np.testing.assert_allclose(loss(labels, logits), losses[labels != 0].sum() / 20, rtol=1e-6)
    parts = [float(loss(labels[i : i + 1], logits[i : i + 1])) for i in range(len(labels))]
    np.testing.assert_allclose(sum(parts), loss(labels, logits), rtol=1e-6)


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_accumulated_uneven_micro_batches_equal_the_big_batch(rng, optimizer):
    labels, _ = batch(rng)
    tokens = 20
    weights = {}
    for name, steps, size in (("big", None, 4), ("small", 2, 2)):
        keras.utils.set_random_seed(0)
        model = token_model()
        divisor = tokens / (steps or 1)
        model.compile(
            optimizer(0.1, gradient_accumulation_steps=steps),
            kt.TokenCrossentropy(divisor=divisor),
            jit_compile=False,
        )
        model.fit(labels, labels, batch_size=size, epochs=2, shuffle=False, verbose=0)
        assert int(model.optimizer.iterations) == 2  # updates
        weights[name] = model.get_weights()
    for big, small in zip(weights["big"], weights["small"]):
        np.testing.assert_allclose(small, big, atol=1e-5)


@tensorflow_only
@pytest.mark.slow
def test_two_replicas_equal_one_device_with_a_divisor_also_where_padding_is_uneven():
    found = run_in_fresh_process(
        """
        import json
        import keras, numpy as np, tensorflow as tf
        import keras_transformer as kt
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        labels = np.array([[4, 0, 0, 0], [5, 6, 0, 0], [4, 5, 6, 7], [7, 8, 9, 4]], "int32")

        def trained(strategy, rows, divisor=None):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                model = keras.Sequential([keras.layers.Embedding(11, 8, mask_zero=True), keras.layers.Dense(11)])
                model.build((None, None))
                loss = kt.TokenCrossentropy(0.1, divisor=divisor)
                model.compile(keras.optimizers.SGD(1.0), loss, metrics=[kt.TokenLoss()], jit_compile=False)
            data = tf.data.Dataset.from_tensor_slices((labels[rows], labels[rows])).batch(4)
            history = model.fit(data, verbose=0, shuffle=False).history
            return [history["loss"][0], history["token_loss"][0], *(x for w in model.get_weights() for x in w.ravel())]

        one, two = tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        uneven, even = [0, 1, 2, 3], [2, 3, 2, 3]
        runs = [trained(one, uneven, 11), trained(two, uneven, 11), trained(one, even), trained(two, even)]
        print(json.dumps(np.array(runs, "float64").tolist()))
        """
    )
    summed, summed_by_two, averaged, averaged_by_two = map(np.array, found)
    np.testing.assert_allclose(summed_by_two, summed, atol=1e-5)
    np.testing.assert_allclose(averaged_by_two, averaged, atol=1e-5)


# ---- metrics


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_metrics_of_evaluate_do_not_depend_on_the_batch_size(rng, batch_size):
    labels, _ = batch(rng)
    model = token_model()
    metrics = [kt.TokenLoss(), kt.TokenAccuracy(), kt.Perplexity()]
    model.compile(loss=kt.TokenCrossentropy(), metrics=metrics, jit_compile=False)
    found = model.evaluate(labels, labels, batch_size=batch_size, verbose=0, return_dict=True)
    logits, real = np.array(model(labels)), labels != 0
    mean = cross_entropies(labels, logits)[real].mean()
    hits = (logits.argmax(-1) == labels)[real].mean()
    names = ["token_loss", "token_accuracy", "perplexity"]
    np.testing.assert_allclose([found[name] for name in names], [mean, hits, np.exp(mean)], rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("metric", [kt.TokenLoss, kt.TokenAccuracy, kt.Perplexity])
def test_metrics_do_not_depend_on_how_long_each_batch_is_padded(rng, metric, weighted):
    labels, logits = batch(rng, lengths=(1, 2, 5, 4))
    weights = rng.uniform(size=4) if weighted else np.ones(4)
    expected = float(metric()(labels, logits, weights))
    metric = metric()
    for rows, length in (([0, 1], 2), ([2, 3], 5)):
        metric.update_state(labels[rows, :length], logits[rows, :length], weights[rows])
    np.testing.assert_allclose(metric.result(), expected, rtol=1e-5)


@pytest.mark.parametrize("metric", [kt.TokenLoss, kt.TokenAccuracy, kt.Perplexity])
def test_metrics_start_anew_after_a_reset(rng, metric):
    labels, logits = batch(rng)
    metric = metric()
    first = float(metric(labels, logits))
    metric.update_state(*batch(rng))
    assert float(metric.result()) != first
    metric.reset_state()
    np.testing.assert_allclose(metric(labels, logits), first, rtol=1e-6)


def test_metrics_have_names_that_users_can_change():
    assert [m().name for m in (kt.TokenLoss, kt.TokenAccuracy, kt.Perplexity)] == [
        "token_loss",
        "token_accuracy",
        "perplexity",
    ]
    assert kt.TokenLoss(name="nats").name == "nats"


def test_fit_works_on_unequal_lengths_and_learns(rng):
    model = token_model()
    model.compile(keras.optimizers.Adam(0.1), kt.TokenCrossentropy(), metrics=[kt.Perplexity()], jit_compile=False)
    labels, _ = batch(rng)
    history = model.fit(labels, labels, epochs=20, batch_size=3, shuffle=False, verbose=0).history["perplexity"]
    assert history[-1] < 1.1 < history[0]


# ---- configurations


@pytest.mark.parametrize(
    "part",
    [
        kt.TokenCrossentropy(0.25, -100, 64, name="mine"),
        kt.TokenCrossentropy(),
        kt.TokenLoss(-100, "mine", "float16"),
        kt.TokenAccuracy(7, "mine"),
        kt.Perplexity(7, "mine"),
        kt.WarmupInverseSqrt(16, 10, 0.5),
        kt.WarmupInverseSqrt(np.int64(16), np.int32(10), np.float32(0.5)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_every_argument_survives_serialization_through_json(part):
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(part)))
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(part)
    assert again.get_config() == part.get_config()
    assert json.loads(json.dumps(part.get_config())) == part.get_config()


def test_reloaded_loss_and_metrics_give_the_same_numbers(rng):
    labels, logits = batch(rng)
    for part in (kt.TokenCrossentropy(0.2, 3, 9), kt.TokenLoss(3), kt.TokenAccuracy(3), kt.Perplexity(3)):
        again = type(part).from_config(part.get_config())
        np.testing.assert_allclose(again(labels, logits), part(labels, logits), rtol=1e-6)


# ---- the schedule


def paper(step, d_model, warmup_steps):
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def test_schedule_is_the_papers_formula():
    schedule = kt.WarmupInverseSqrt(512, 4000)
    steps = [1, 2, 100, 3999, 4000, 4001, 10000, 1_000_000]
    np.testing.assert_allclose([schedule(s) for s in steps], [paper(s, 512, 4000) for s in steps], rtol=1e-5)
    np.testing.assert_allclose(kt.WarmupInverseSqrt(512, 4000, scale=3)(7), 3 * paper(7, 512, 4000), rtol=1e-5)


@pytest.mark.parametrize("warmup_steps", [1, 10, 4000])
def test_schedule_is_positive_from_step_0_on_highest_at_warmup_and_continuous_there(warmup_steps):
    schedule = kt.WarmupInverseSqrt(64, warmup_steps)
    rates = np.array(schedule(np.arange(0, 3 * warmup_steps + 3)))
    assert np.all(rates > 0) and np.all(np.isfinite(rates))
    assert rates[0] == rates[1]
    assert rates.max() == rates[warmup_steps]
    assert np.all(np.diff(rates[1 : warmup_steps + 1]) > 0) and np.all(np.diff(rates[warmup_steps:]) < 0)
    np.testing.assert_allclose(schedule(warmup_steps), schedule(warmup_steps + 1e-3 * warmup_steps), rtol=1e-2)


STEPS = [0, 1, 3, 10, 11, 500]


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_schedule_takes_steps_of_every_type(dtype):
    steps = np.minimum(STEPS, 255).astype(dtype)
    schedule = kt.WarmupInverseSqrt(16, 10)
    expected = [float(schedule(int(step))) for step in steps]
    as_numpy = [schedule(step) for step in steps]
    as_tensors = [schedule(ops.convert_to_tensor(step)) for step in steps]
    for rates in (as_numpy, as_tensors, schedule(steps), schedule(ops.convert_to_tensor(steps))):
        np.testing.assert_allclose(rates, expected, rtol=1e-6)
        assert np.array(rates).dtype == np.float32


@tensorflow_only
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
def test_schedule_gives_the_same_in_a_graph(dtype, jit):
    import tensorflow as tf

    schedule = kt.WarmupInverseSqrt(16, 10)
    compiled = tf.function(schedule, jit_compile=jit)
    steps = tf.constant(STEPS, dtype)
    np.testing.assert_allclose(compiled(steps), schedule(steps), rtol=1e-6)
    np.testing.assert_allclose(compiled(steps[2]), schedule(3), rtol=1e-6)


def test_the_first_batch_moves_weights(rng):
    labels, _ = batch(rng)
    model = token_model()
    model.compile(keras.optimizers.Adam(kt.WarmupInverseSqrt(8, 10)), kt.TokenCrossentropy(), jit_compile=False)
    before = model.get_weights()
    model.train_on_batch(labels, labels)
    assert all(np.abs(new - old).max() > 1e-4 for old, new in zip(before, model.get_weights()))


# ---- saving a compiled model


def compiled(rate, optimizer=keras.optimizers.Adam, wrap=lambda optimizer: optimizer):
    model = language_model()
    model.compile(
        wrap(optimizer(rate)),
        kt.TokenCrossentropy(0.1),
        metrics=[kt.TokenLoss(), kt.TokenAccuracy()],
        jit_compile=False,
    )
    return model


def losses_of(model, batches):
    return [float(model.train_on_batch(x, y, return_dict=True)["loss"]) for x, y in batches]


def test_training_goes_on_after_a_reload_as_if_it_had_not_stopped(rng, tmp_path):
    batches = language_batches(rng, 6)
    straight = compiled(kt.WarmupInverseSqrt(8, 4))
    expected = losses_of(straight, batches)
    keras.utils.set_random_seed(0)
    first = compiled(kt.WarmupInverseSqrt(8, 4))
    found = losses_of(first, batches[:3])
    first.save(tmp_path / "model.keras")
    second = keras.models.load_model(tmp_path / "model.keras")
    assert int(second.optimizer.iterations) == 3
    found += losses_of(second, batches[3:])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for old, new in zip(straight.get_weights(), second.get_weights()):
        np.testing.assert_allclose(new, old, atol=1e-5)


def test_a_compiled_model_loads_in_a_process_that_only_imports_the_package(rng, tmp_path):
    (x, y), *more = language_batches(rng, 4)
    model = compiled(kt.WarmupInverseSqrt(8, 4, 0.5))
    losses_of(model, more)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", inputs=x, labels=y)
    rate, next_loss = float(model.optimizer.learning_rate), losses_of(model, [(x, y)])[0]
    found = run_in_fresh_process(
        """
        import json, os
        import keras, numpy as np
        import keras_transformer
        os.chdir(os.environ["FOLDER"])
        model = keras.models.load_model("model.keras")
        batch = np.load("batch.npz")
        schedule = model.optimizer._learning_rate
        state = [type(schedule).__name__, schedule.get_config(), int(model.optimizer.iterations)]
        rate = float(model.optimizer.learning_rate)
        loss = float(model.train_on_batch(batch["inputs"], batch["labels"], return_dict=True)["loss"])
        print(json.dumps([*state, rate, loss]))
        """,
        FOLDER=str(tmp_path),
    )
    assert found[:3] == ["WarmupInverseSqrt", {"d_model": 8, "warmup_steps": 4, "scale": 0.5}, 3]
    np.testing.assert_allclose(found[3:], [rate, next_loss], rtol=1e-5)


def test_mixed_float16_goes_on_after_a_reload_with_its_loss_scale(rng, tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    batches = language_batches(rng, 4)
    model = compiled(1e-2, wrap=lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**20))
    assert np.all(np.isfinite(losses_of(model, batches[:3])))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, keras.optimizers.LossScaleOptimizer)
    assert float(again.optimizer.dynamic_scale) == float(model.optimizer.dynamic_scale)
    (expected,), (found,) = losses_of(model, batches[3:]), losses_of(again, batches[3:])
    assert np.isfinite(found)
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    assert all(np.all(np.isfinite(weights)) for weights in again.get_weights())
    for old, new in zip(model.get_weights(), again.get_weights()):
        np.testing.assert_allclose(new, old, atol=1e-3)


# ---- XLA


@tensorflow_only
@pytest.mark.slow
def test_a_model_trains_under_xla_with_the_losses_of_the_graph(rng):
    batches = language_batches(rng, 2)
    losses = {}
    for jit in (False, True):
        keras.utils.set_random_seed(0)
        model = language_model()
        model.compile(
            keras.optimizers.Adam(kt.WarmupInverseSqrt(8, 4)),
            kt.TokenCrossentropy(0.1),
            metrics=[kt.TokenLoss(), kt.TokenAccuracy(), kt.Perplexity()],
            jit_compile=jit,
        )
        losses[jit] = losses_of(model, batches)
        assert model.jit_compile is jit
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-5)
