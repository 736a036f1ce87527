"""A stopped fit goes on to the same numbers, whatever it was doing when it was stopped."""

import functools
import io
import os
import re
import signal
import textwrap

import keras
import numpy as np
import pytest
from fresh import run_in_fresh_process

import keras_transformer as kt
from keras_transformer.resume import Resume

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
tensorflow_only = pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's own")
EPOCHS, BATCHES, ROWS = 3, 5, 4


class Batches(keras.utils.PyDataset):
    """Rows in another order each epoch; `seen` is what was read."""

    def __init__(self, batches=BATCHES):
        super().__init__()
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(batches * ROWS, 3, 8)).astype("float32")
        self.set_epoch(77)

    def set_epoch(self, epoch):
        self.order = np.random.default_rng(epoch).permutation(len(self.x)).reshape(-1, ROWS)

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        x = self.x[self.order[index]]
        return x, x.sum(axis=(1, 2))


class Noise(keras.layers.Layer):
    """Draws from Keras's global seed generator, as a layer does that was given no seed."""

    def call(self, x, training=False):
        return x + keras.random.normal(keras.ops.shape(x), 0.0, 0.1, dtype=x.dtype) if training else x


class SetEpoch(keras.callbacks.Callback):
    """What `Resume` does with the data, without it."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.data.set_epoch(epoch)


class Stopped(Exception):
    pass


class StopAt(keras.callbacks.Callback):
    """An exception in the midst of an epoch, or (batch None) at its end before anything is saved."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise Stopped

    def on_epoch_end(self, epoch, logs=None):
        if (epoch, None) == self.at:
            raise Stopped


def build(seed=0, layer=None, optimizer=None, **compiling):
    """A small model with dropout, whose weights and dropout seeds come from `seed`."""
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((3, 8))
    x = layer()(x) if layer else keras.layers.Dense(4, "relu")(x)
    x = keras.layers.Dropout(0.3)(keras.layers.Flatten()(x))
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))
    model.compile(
        keras.optimizers.Adam(kt.WarmupInverseSqrt(8, 4), **(optimizer or {})),
        "mse",
        metrics=["mae"],
        jit_compile=not IS_TENSORFLOW,  # on JAX that takes the state out of the model during an epoch
        **compiling,
    )
    return model


def fit(model, data, *callbacks, **options):
    options = {"epochs": EPOCHS, "validation_data": data[0], "shuffle": False, "verbose": 0, **options}
    return model.fit(data, callbacks=list(callbacks), **options).history


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def run_with_stops(folder, stops, every, variant):
    """Trains a new model from new seeds after each stop; the last one's state and history."""
    for number, stop in enumerate(stops):
        seed = number if (folder / "state.npz").exists() else 0  # before the first save a run starts anew
        data = Batches()
        with pytest.raises(Stopped):
            fit(build(seed, **variant), data, StopAt(*stop), Resume(folder, data, every))
    data, model = Batches(), build(99, **variant)
    history = fit(model, data, Resume(folder, data, every))
    return state(model), history


@functools.cache
def uninterrupted(name):
    """State and history of a run without stops and without `Resume`."""
    data, model = Batches(), build(**VARIANTS[name])
    history = fit(model, data, SetEpoch(data))
    return state(model), history


def block():
    return kt.EncoderBlock(2, 16, dropout=0.2)


VARIANTS = {
    "plain": {},
    "block": {"layer": block},
    "average": {"optimizer": {"use_ema": True, "ema_momentum": 0.5}},
    "accumulation": {"optimizer": {"gradient_accumulation_steps": 2}},
    "executions": {"steps_per_execution": 2},
    "mixed_bfloat16": {},
    "mixed_float16": {},
    "bfloat16": {},
    "noise": {"layer": Noise},
}


STOPS = {"plain": [(0, 3), (1, None), (1, 3), (2, 1)]}


@pytest.fixture
def variant(request):
    """A variant's name, with its dtype policy set."""
    name = request.param
    if "float16" in name:
        keras.config.set_dtype_policy(name)
    return name


slowly = [pytest.param(name, marks=[] if name in ("plain", "block") else pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize("variant", slowly, indirect=True)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(variant, tmp_path):
    if variant == "noise" and not IS_TENSORFLOW:
        pytest.skip("JAX does not draw from a global generator")
    expected, full = uninterrupted(variant)
    found, history = run_with_stops(tmp_path, STOPS.get(variant, [(1, None), (2, 3)]), 2, VARIANTS[variant])
    assert_same(found, expected)
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    assert history == {name: values[2:] for name, values in full.items()}


def test_without_every_a_run_goes_on_from_where_the_epoch_began(tmp_path):
    expected, full = uninterrupted("plain")
    found, history = run_with_stops(tmp_path, [(1, 3), (1, 0), (2, None)], None, {})
    assert_same(found, expected)
    assert history == {name: values[2:] for name, values in full.items()}


def test_averages_that_were_swapped_in_are_not_taken_for_the_weights(tmp_path):
    def run(data, *callbacks):
        model = build(optimizer={"use_ema": True, "ema_momentum": 0.5})
        fit(model, data, keras.callbacks.SwapEMAWeights(swap_on_epoch=True), *callbacks)
        return state(model)

    data = Batches()
    expected = run(data, SetEpoch(data))
    for stop in ((0, None), (1, None), (2, 1)):
        data = Batches()
        with pytest.raises(Stopped):
            run(data, StopAt(*stop), Resume(tmp_path, data, every=3))
    data = Batches()
    assert_same(run(data, Resume(tmp_path, data, every=3)), expected)


class Log(keras.callbacks.Callback):
    """The optimizer's steps after each batch."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(int(self.model.optimizer.iterations))


@pytest.mark.parametrize("every, done", [(2, 4), (3, 3), (50, 0)])
def test_batches_that_were_done_are_read_but_not_trained_on(every, done, tmp_path):
    data = Batches()
    with pytest.raises(Stopped):
        fit(build(), data, StopAt(1, 4), Resume(tmp_path, data, every))
    model, log = build(7), Log()
    fit(model, data, log, Resume(tmp_path, data, every), epochs=2)
    after = BATCHES + done + 1  # what is skipped leaves this: the first batch trains, to build what is missing
    assert log.steps == [after] * done + list(range(after, 2 * BATCHES + 1))


# ---- fit after fit


def test_one_model_is_fitted_twice_with_a_stop_in_each(tmp_path):
    data, model = Batches(), build()
    for _ in range(2):
        fit(model, data, SetEpoch(data), epochs=2)
    expected = state(model)

    data, model = Batches(), build()
    resume = Resume(tmp_path, data, 2)
    for _ in range(2):
        with pytest.raises(Stopped):
            fit(model, data, StopAt(1, 3), resume, epochs=2)
        assert resume.path.exists()
        train = model.train_function
        history = fit(model, data, resume, epochs=2)
        assert len(history["loss"]) == 1
        assert not resume.path.exists() and model.train_function is train
    assert_same(state(model), expected)


def test_a_stop_while_batches_are_skipped_leaves_the_model_as_keras_made_it(tmp_path):
    data, model = Batches(), build()
    for at in ((1, 4), (1, 1), (1, 2)):
        with pytest.raises(Stopped):
            fit(model, data, StopAt(*at), Resume(tmp_path, data, 4))
    train = model.train_function
    history = fit(model, data, SetEpoch(data), epochs=1)
    assert len(history["loss"]) == 1  # begins at epoch 0
    assert model.train_function is train and train.__name__ != "skip"
    fit(model, data, Resume(tmp_path, data, 4))
    assert_same(state(model), uninterrupted("plain")[0])


def test_the_order_of_arrays_needs_no_method(tmp_path):
    data = Batches()
    x, y = data.x, data.x.sum(axis=(1, 2))
    model = build()
    model.fit(x, y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    again = build()
    options = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0}
    with pytest.raises(Stopped):
        again.fit(x, y, callbacks=[StopAt(1, 3), Resume(tmp_path, x, 3)], **options)
    again = build(5)
    again.fit(x, y, callbacks=Resume(tmp_path, x, 3), **options)  # one by itself: Keras takes it too
    assert_same(state(again), state(model))


# ---- writing


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    data, model = Batches(), build()

    def full(*_):
        raise OSError("No space left on device")

    fail = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epoch and monkeypatch.setattr(os, "fsync", full)
    )
    with pytest.raises(OSError, match="No space"):
        fit(model, data, fail, Resume(tmp_path, data))
    monkeypatch.undo()
    again = build(5)
    fit(again, data, Resume(tmp_path, data))
    assert_same(state(again), uninterrupted("plain")[0])


# one process forks one that trains after the other, so that TensorFlow is imported once; each but the last kills itself
KILLED = """
    import io, json, os, pathlib, signal
    import keras, numpy as np
    import tensorflow as tf
    from keras_transformer.resume import Resume

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def half(file, **arrays):
        whole = io.BytesIO()
        savez(whole, **arrays)
        file.write(whole.getvalue()[: whole.tell() // 2])
        file.flush()
        die()

    class KillAt(keras.callbacks.Callback):
        def __init__(self, run, event, epoch, batch=None):
            super().__init__()
            self.run, self.at = run, (event, epoch, batch)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def happens(self, event, batch=None):
            if (event, self.epoch, batch) == self.at:
                die()

        def on_train_batch_end(self, batch, logs=None):
            self.happens("batch", batch)

        def on_test_batch_end(self, batch, logs=None):
            self.happens("test", batch)

        def on_epoch_end(self, epoch, logs=None):
            (folder / f"{self.run}{epoch}.json").write_text(json.dumps(logs))
            self.happens("epoch end")

    def counted(function, instead, number):  # does something else the nth time
        calls = iter(range(1000))
        return lambda *args, **kwargs: (instead if next(calls) == number else function)(*args, **kwargs)

    def train(run, seed, kill=("never", -1)):
        keras.utils.set_random_seed(seed)
        x = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
        now = {"epoch": 0}

        def batches():
            order = np.random.default_rng(now["epoch"]).permutation(20).reshape(5, 4)
            yield from ((x[rows], x[rows].sum(1)) for rows in order)

        specs = tf.TensorSpec([None, 8]), tf.TensorSpec([None])
        data = tf.data.Dataset.from_generator(batches, output_signature=specs)
        data = data.apply(tf.data.experimental.assert_cardinality(5)).prefetch(2)
        data.set_epoch = lambda epoch: now.update(epoch=epoch)
        layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"], jit_compile=False)
        kind, *where = kill
        if kind == "in the midst of writing":
            np.savez = counted(savez, half, *where)
        elif kind == "before fsync":
            os.fsync = counted(os.fsync, die, *where)
        elif kind == "before replace":
            os.replace = counted(os.replace, die, *where)
        elif kind == "after replace":
            replace = os.replace
            os.replace = counted(replace, lambda *args: (replace(*args), die()), *where)
        options = {"epochs": 3, "validation_data": (x[:8], x[:8].sum(1)), "shuffle": False, "verbose": 0}
        model.fit(data, callbacks=[KillAt(run, *kill), Resume(folder / run, data, 2)], **options)
        variables = [*model.variables, *model.optimizer.variables]
        savez(folder / f"{run}.npz", **{str(place): np.array(variable) for place, variable in enumerate(variables)})

    def attempt(*arguments):
        child = os.fork()
        if not child:
            train(*arguments)
            os._exit(0)
        return os.waitpid(child, 0)[1]

    savez, folder = np.savez, pathlib.Path(os.environ["FOLDER"])
    seeds = (n if (folder / "killed" / "state.npz").exists() else 0 for n in range(1, 100))
    deaths = [attempt("killed", next(seeds), kill) for kill in KILLS]
    print(json.dumps([deaths, attempt("killed", 99), attempt("whole", 0)]))
"""
KILLS = [
    ("in the midst of writing", 0),  # nothing is saved yet
    ("batch", 0, 3),
    ("before replace", 0),
    ("in the midst of writing", 1),
    ("test", 0, 0),
    ("after replace", 1),
    ("batch", 1, 1),
    ("before fsync", 1),
    ("epoch end", 1),
    ("batch", 2, 4),
    ("epoch end", 2),
]


@tensorflow_only
@pytest.mark.slow
def test_a_process_killed_eleven_times_ends_with_the_weights_of_one_that_was_not(tmp_path):
    code = f"KILLS = {KILLS}\n" + textwrap.dedent(KILLED)
    found = run_in_fresh_process(code, timeout=600, FOLDER=str(tmp_path))
    assert found == [[signal.SIGKILL] * len(KILLS), 0, 0]
    assert list((tmp_path / "killed").iterdir()) == []
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "killed.npz") as killed:
        assert len(whole.files) > 10
        assert_same([killed[name] for name in whole.files], list(whole.values()))
    for epoch in range(3):
        assert (tmp_path / f"killed{epoch}.json").read_text() == (tmp_path / f"whole{epoch}.json").read_text()


# ---- refusals


def saved(folder, model=None, data=None, every=2, **options):
    """Leaves a state behind."""
    data = data or Batches()
    with pytest.raises(Stopped):
        fit(model or build(), data, StopAt(1, 3), Resume(folder, data, every), **options)


def refused(folder, message, model=None, data=None, **options):
    data = data or Batches()
    with pytest.raises(ValueError, match=message):
        fit(model or build(), data, Resume(folder, data), **options)


def test_another_model_optimizer_or_number_of_batches_is_refused(tmp_path):
    saved(tmp_path)
    state = (tmp_path / "state.npz").read_bytes()
    wider = build(layer=lambda: keras.layers.Dense(5))
    refused(
        tmp_path, r"The model must be as .* variable 0 is dense/kernel .*\[8, 4\]; got dense/kernel .*\[8, 5\]", wider
    )
    more = build(layer=block)
    refused(tmp_path, "The model must be as .* variable 0 is dense/kernel", more)
    average = build(optimizer={"use_ema": True})
    refused(tmp_path, "optimizer.use_ema is False; got True", average)
    half = build(layer=lambda: keras.layers.Dense(4, dtype="bfloat16"))
    refused(tmp_path, "dense/kernel float32 .* got dense/kernel bfloat16", half)
    refused(tmp_path, "`fit` must be as .*: steps is 5; got 6", data=Batches(6))
    refused(tmp_path, "steps_per_execution is 1; got 3", build(steps_per_execution=3))
    assert (tmp_path / "state.npz").read_bytes() == state


def compiled(optimizer=None, loss=None):
    model = build()
    optimizer = optimizer or keras.optimizers.Adam(1e-2)
    model.compile(optimizer, loss or keras.losses.MeanSquaredError(), metrics=["mae"], jit_compile=not IS_TENSORFLOW)
    return model


@pytest.mark.parametrize(
    "changes, message",
    [
        (lambda: {"optimizer": keras.optimizers.Adam(2e-2)}, r"optimizer.learning_rate is 0.0\d+; got 0.0"),
        (lambda: {"optimizer": keras.optimizers.Adam(kt.WarmupInverseSqrt(8))}, "optimizer.learning_rate is 0.0"),
        (lambda: {"optimizer": keras.optimizers.Adamax(1e-2)}, "kind of optimizer is 'Adam'; got 'Adamax'"),
        (lambda: {"loss": keras.losses.MeanSquaredError("sum")}, "loss.reduction is 'sum_over_batch_size'; got 'sum'"),
        (lambda: {"loss": "mae"}, "kind of loss is 'MeanSquaredError'; got 'str'"),
    ],
)
def test_another_rate_optimizer_or_loss_is_refused(changes, message, tmp_path):
    saved(tmp_path, compiled())
    refused(tmp_path, message, compiled(**changes()))


def test_a_rate_that_callbacks_change_is_the_same_run(tmp_path):
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    data, whole, again = Batches(), compiled(), compiled()
    fit(whole, data, halve, Resume(tmp_path / "whole", data))
    with pytest.raises(Stopped):
        fit(compiled(), data, halve, StopAt(2, 3), Resume(tmp_path, data))
    fit(again, data, halve, Resume(tmp_path, data))
    assert_same(state(again), state(whole))


@tensorflow_only
@pytest.mark.parametrize(
    "option, name",
    [
        ({"seed": 2}, "data.seed"),
        ({"shuffle": 3}, "data.shuffle"),
        ({"tokens_per_batch": 16}, "steps"),
        ({"buckets": [4, 8]}, "data.lengths.0"),
    ],
)
def test_other_batches_are_refused(option, name, tmp_path):
    pairs = [("a b c", "c b a"), ("a b", "b a"), ("c a", "a c"), ("b", "b")]
    tokenizer = kt.Tokenizer.train([source for source, _ in pairs], kind="word")
    options = {"tokens_per_batch": 8, "max_length": 8, "shuffle": 4, "seed": 1}

    def run(**options):
        batches = kt.pair_batches(pairs, tokenizer, tokenizer, **options)
        model = kt.build_transformer(tokenizer.vocab_size, **kt.PRESETS["tiny"])
        model.compile("adam", kt.TokenCrossentropy(), jit_compile=False)
        model.fit(batches, epochs=3, callbacks=[StopAt(1, 0), Resume(tmp_path, batches)], shuffle=False, verbose=0)

    with pytest.raises(Stopped):
        run(**options)
    with pytest.raises(ValueError, match=f"`fit` must be as in .*: {name} is"):
        run(**{**options, **option})


def test_other_metrics_are_refused(tmp_path):
    saved(tmp_path)
    model = build()
    model.compile(model.optimizer, "mse", metrics=["mse"], jit_compile=not IS_TENSORFLOW)
    refused(tmp_path, "The metrics must be as .* mean_absolute_error", model)


def another_archive():
    file = io.BytesIO()
    np.savez(file, weights=np.ones(3))
    return file.getvalue()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content[:900] + bytes([content[900] ^ 1]) + content[901:],
        lambda content: b"not an archive",
        lambda content: another_archive(),
    ],
    ids=["half", "short of a byte", "empty", "a flipped bit", "text", "another archive"],
)
def test_a_damaged_or_foreign_file_is_refused(damage, tmp_path):
    model = build()
    saved(tmp_path, model)
    path = tmp_path / "state.npz"
    path.write_bytes(damage(path.read_bytes()))
    refused(
        tmp_path,
        f"{re.escape(str(path))} must be a state that `Resume` wrote; got a damaged or foreign file. Delete",
        model,
    )


def test_a_model_that_is_not_built_is_refused(tmp_path):
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)[:, 0, 0]

    if not IS_TENSORFLOW:
        pytest.skip("on JAX `fit` builds the model first")
    model = Unbuilt()
    model.compile("adam", "mse", jit_compile=False)
    refused(tmp_path, "needs a model that is built before `fit`; got 'unbuilt", model)


@tensorflow_only
@pytest.mark.parametrize("size", [3, None])
def test_data_that_does_not_start_anew_each_epoch_is_refused(size, tmp_path):
    import tensorflow as tf

    x = np.ones((6, 3, 8), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, 0, 0])).batch(2).repeat(1 if size else None)
    with pytest.raises(ValueError, match=f"`take`; got 2 batches an epoch, and data of {size or 'unknown'}"):
        build().fit(data, epochs=2, shuffle=False, steps_per_epoch=2, callbacks=[Resume(tmp_path, data)], verbose=0)


@tensorflow_only
def test_data_of_unknown_size_goes_on_unless_it_has_become_shorter(tmp_path):
    import tensorflow as tf

    size = {"now": 4}
    x = np.ones((1, 3, 8), "float32")

    def batches():
        yield from [(x, x[:, 0, 0])] * size["now"]

    specs = tf.TensorSpec([None, 3, 8]), tf.TensorSpec([None])
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    model = build()
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = model.fit(data, **options).history
    model = build()
    with pytest.raises(Stopped), pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, callbacks=[StopAt(1, None), Resume(tmp_path, data, 4)], **options)
    size["now"] = 3
    with pytest.raises(ValueError, match="`data` must hold the 4 batches trained on before; got fewer"):
        build(5).fit(data, callbacks=[Resume(tmp_path, data, 4)], **options)
    size["now"] = 4
    again = build(5)
    with pytest.warns(UserWarning, match="ran out of data"):
        history = again.fit(data, callbacks=[Resume(tmp_path, data, 4)], **options).history
    assert history == {name: values[1:] for name, values in expected.items()}
    assert_same(state(again), state(model))


@pytest.mark.parametrize("every", [0, -1, 1.5, "2"])
def test_every_is_a_whole_number_above_0(every, tmp_path):
    with pytest.raises(ValueError, match=f"`every` must be a whole number of at least 1; got {every!r}"):
        Resume(tmp_path, None, every)
