"""A callback that lets a killed `fit` go on where it was, to the last bit.

One file holds all that training depends on: weights, optimizer, seed generators, metrics and the place in the data.
"""

import itertools
import json
import os
import pathlib
import re
import warnings
import zipfile

import keras
import numpy as np
from keras.src.random.seed_generator import global_seed_generator  # has no public name; what `seed=None` draws from

from keras_transformer.checks import check_count

ANEW = "Delete the file to train from the start."


class Resume(keras.callbacks.Callback):
    """Saves the state of `fit`, so that the same program, run again after a kill, goes on as if it had not stopped.

    Killed at any moment, also while it saves, training ends with the weights, optimizer and logs of the remaining
    epochs that it would have had, bit for bit where the device computes the same twice (for TensorFlow on a GPU:
    `tf.config.experimental.enable_op_determinism()`). `keras.callbacks.BackupAndRestore` loses the dropout's seeds, the
    place in the data and the metrics, and a kill while it writes.

    The state is saved as each epoch begins, and given `every` within epochs too: then the first batches of the resumed
    epoch are read again, not trained on again, and other callbacks see the logs of the first. List `Resume` last: what
    callbacks before it change as an epoch ends or begins is saved. What they remember themselves (`EarlyStopping`,
    `ReduceLROnPlateau`, `ModelCheckpoint`: the best so far; `GenerationScores`: the last scores) is not.

    Each epoch must read `data` in an order that depends on nothing but the epoch. Where there is a method
    `set_epoch(epoch)`, it is called before each epoch, counted from 0: the batches of `pair_batches` have one. Other
    data must come in the same order each time: arrays with `fit(shuffle=False)`; a `tf.data.Dataset` that is not
    shuffled, or shuffled with a `seed` and `reshuffle_each_iteration=False`. A dataset that is repeated and cut by
    `steps_per_epoch` is refused. Under `tf.distribute.MirroredStrategy` the replicas' sums of a metric are saved as
    one, so that the logs of an epoch resumed in its midst may differ in the last bit; the weights do not.

    A state is refused where the configuration of the optimizer, that of the loss or the options of the batches is
    another than it was saved under; `epochs` may be, unless the learning rate depends on them.

    When `fit` ends, the file is deleted: the next one starts anew. Give each `fit` of a program its own folder.

    Args:
        folder: str or path, where `state.npz` is kept; made if it is not there.
        data: what `fit` trains on.
        every: int, the number of batches between two saves within an epoch; None for the beginnings of epochs alone.

    Raises:
        ValueError: if `every` is not a whole number above 0; from `fit`, if the model is not built, if `data` does not
            start anew each epoch, or if the file is damaged or of another model, optimizer, loss or of other batches.

    Example:
    ```python
    import tempfile
    import keras
    import numpy as np
    import keras_transformer as kt
    x, y = np.ones((8, 3)), np.ones((8, 1))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    with tempfile.TemporaryDirectory() as folder:
        resume = kt.Resume(folder, x, every=100)
        model.fit(x, y, batch_size=2, epochs=3, shuffle=False, callbacks=[resume], verbose=0)
    ```
    """

    def __init__(self, folder, data, every=None):
        super().__init__()
        self.path = pathlib.Path(folder) / "state.npz"
        self.data = data
        self.every = None if every is None else check_count("every", every)

    def on_train_begin(self, logs=None):
        model = self.model
        self._check_fit(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model._initial_epoch = None
        self._settings = self._described()  # before a schedule or a state changes the learning rate
        self._batches_done, self._result = 0, None
        self._is_resumed = self.path.exists()
        if self._is_resumed:
            place = self._restore()
            self._batches_done = place["batches"]
            model._initial_epoch = place["epoch"]  # what `fit` reads next

    def on_epoch_begin(self, epoch, logs=None):
        self.model._initial_epoch = None  # was for this `fit` alone
        if hasattr(self.data, "set_epoch"):
            self.data.set_epoch(epoch)
        self._epoch = epoch
        if self._is_resumed:
            self._restore()  # once more: callbacks before may have changed for this epoch what was so already
            self._is_resumed = False
        else:
            # not at the end of the epoch before: there `SwapEMAWeights` has the averages in the place of the weights
            self._save(epoch, 0)

    def on_train_batch_begin(self, batch, logs=None):
        # Batches are saved before the next one, not at their end: there JAX may run callbacks in another thread.
        # `self.model` is left alone where nothing is done: it makes JAX bring its state back.
        if batch < self._batches_done:
            self._skip_next()
        elif self._batches_done:
            self._restore(metrics=True)
            self._batches_done, self._result = 0, None
        elif self.every and batch and batch % self.every < self._model.steps_per_execution:
            self._save(self._epoch, batch)

    def on_train_end(self, logs=None):
        self.model._initial_epoch = None
        self.path.unlink(missing_ok=True)

    def _check_fit(self, model):
        if not model.built:
            raise ValueError(f"`Resume` needs a model that is built before `fit`; got {model.name!r}, which is not.")
        steps = self.params["steps"]
        size = int(self.data.cardinality()) if hasattr(self.data, "cardinality") else steps
        if steps not in (None, size):
            raise ValueError(
                "`data` must start anew each epoch: leave out `repeat` and `steps_per_epoch`, or cut it with `take`; "
                f"got {steps} batches an epoch, and data of {size if size >= 0 else 'unknown or infinite'} batches."
            )

    def _described(self):
        """What must not differ for the run to be the same one: by name."""
        model = self._model
        settings = {"steps": self.params["steps"], "steps_per_execution": model.steps_per_execution}
        settings["data"] = getattr(self.data, "settings", {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a lambda, which is not compared
            for name in ("optimizer", "loss"):
                part = getattr(model, name)
                settings[f"kind of {name}"] = type(part).__name__
                try:
                    settings[name] = part.get_config() if hasattr(part, "get_config") else part
                except NotImplementedError:  # a schedule without one
                    settings[name] = None
        return dict(_leaves(settings))

    def _skip_next(self):
        """The next call of the train function reads batches and no more.

        The first call trains all the same: it builds what is built when first used, such as metrics, and gives logs;
        what it changes is restored once all are skipped.
        """
        model, train = self._model, self._model.train_function

        def skip(*arguments):  # TensorFlow: iterator -> logs; JAX: state, iterator -> logs, state
            model.train_function = train  # at once, so that nothing stays behind if training stops here
            if self._result is None:
                self._result = train(*arguments)
            elif not sum(1 for _ in itertools.islice(arguments[-1], model.steps_per_execution)):
                raise ValueError(f"`data` must hold the {self._batches_done} batches trained on before; got fewer.")
            return self._result

        model.train_function = skip

    def _save(self, epoch, batches):
        variables = _variables(self.model, metrics=batches > 0)  # an epoch starts with new ones
        about = {"epoch": epoch, "batches": batches, "settings": self._settings}
        about["variables"] = {part: [_describe(variable) for variable in own] for part, own in variables.items()}
        values = {
            f"{part}/{place}": _plain(np.asarray(keras.ops.convert_to_tensor(variable)))
            for part, own in variables.items()
            for place, variable in enumerate(own)
        }
        _write(self.path, about, values)

    def _restore(self, metrics=False):
        """Checks and assigns what was saved; returns what is said about it."""
        about, values = _read(self.path)
        before = about.get("settings", {})  # an older file has none
        for name in {**before, **self._settings}:
            saved, now = (settings.get(name, "not there") for settings in (before, self._settings))
            if saved != now:
                raise ValueError(f"`fit` must be as in {self.path}: {name} is {saved!r}; got {now!r}. {ANEW}")
        variables = _variables(self.model, metrics)
        for part, own in variables.items():
            both = itertools.zip_longest(about["variables"][part], map(_describe, own), fillvalue="not there")
            for place, (saved, now) in enumerate(both):
                if saved != now:
                    raise ValueError(
                        f"The {part} must be as in {self.path}: variable {place} is {saved}; got {now}. {ANEW}"
                    )
        for part, own in variables.items():
            for place, variable in enumerate(own):
                variable.assign(values[f"{part}/{place}"].view(np.dtype(variable.dtype)))
        return about


def _leaves(config, path=()):
    """(path, value) of each number, string, truth value and None inside a config, but for names, which Keras counts."""
    if isinstance(config, dict) and config.get("class_name") == "__lambda__":
        return
    if isinstance(config, (dict, list, tuple)):
        for name, value in config.items() if isinstance(config, dict) else enumerate(config):
            if name not in ("name", "registered_name"):
                yield from _leaves(value, (*path, str(name)))
    elif config is None or isinstance(config, (bool, int, float, str)):
        yield ".".join(path), config


def _variables(model, metrics=False):
    """All that a training step reads and writes, by part."""
    parts = {
        "model": [*model.variables, global_seed_generator().state],
        "optimizer": model.optimizer.variables,
        "metrics": model.metrics_variables,
    }
    return parts if metrics else {part: parts[part] for part in ("model", "optimizer")}


def _describe(variable):
    """Name, type and shape, without what differs from one building of a model to the next."""
    name = re.sub(r"_\d+(?=[_/]|$)", "", variable.path)  # Keras counts layers of a kind over the whole process
    name = re.sub(r".*(?=seed_generator/)", "", name)  # the global one is called after the layer that drew first
    return f"{name} {variable.dtype} {list(variable.shape)}"


def _plain(array):
    """The same bits in a type that files know: they do not know bfloat16."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _write(path, about, values):
    """Replaces the file in one step, once all is on the disk: a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        np.savez(file, about=json.dumps(about), **values)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _read(path):
    """(what is said about the state, its arrays by name)."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            values = {name: arrays[name] for name in arrays.files}
        return json.loads(values.pop("about").item()), values
    except (zipfile.BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must be a state that `Resume` wrote; got a damaged or foreign file. {ANEW}"
        ) from error
