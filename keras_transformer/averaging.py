"""The mean of several checkpoints of a model."""

import contextlib
import os
import tempfile
import zipfile

import keras
import numpy as np
from keras import ops

WEIGHTS = "model.weights.h5"  # what a `.keras` archive calls its variables


def average_checkpoints(model, paths):
    """Sets the weights of a model to their mean over several of its checkpoints, such as those of the last epochs.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 6.1. The sum is in float64, with one file in memory
    at a time. Variables that are not floats are taken from the last file. The optimizer, compiled or not, is left as
    it is, and so are the states of random seeds, which files do not hold.

    Args:
        model: built `keras.Model`.
        paths: list of files of this model, `.weights.h5` (as `ModelCheckpoint(save_weights_only=True)` writes them) or
            `.keras`.

    Raises:
        ValueError: if there is no file, or one of another kind or of another model; FileNotFoundError if one is
            missing. The weights are then what they were before.

    Example:
    ```python
    import tempfile
    import keras
    import numpy as np
    import keras_transformer as kt
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{value}.weights.h5" for value in (1, 2, 6)]
        for path, value in zip(paths, (1, 2, 6)):
            model.set_weights([np.full((1, 1), value)])
            model.save_weights(path)
        kt.average_checkpoints(model, paths)
    np.testing.assert_array_equal(model.get_weights(), [[[3.0]]])
    ```
    """
    paths = _checkpoint_paths(paths)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(os.path.join(folder, WEIGHTS))
        layout = _layout(os.path.join(folder, WEIGHTS))
    before = [np.array(ops.convert_to_numpy(variable)) for variable in model.variables]
    floats = [variable for variable in model.variables if keras.backend.is_float_dtype(variable.dtype)]
    totals = [np.zeros(variable.shape, "float64") for variable in floats]
    try:
        for path in paths:
            with _weights_file(path) as file:
                _check_layout(path, _layout(file), layout)
                keras.saving.load_weights(model, file, objects_to_skip=[getattr(model, "optimizer", None)])
            for total, variable in zip(totals, floats):
                total += ops.convert_to_numpy(variable)
        for total, variable in zip(totals, floats):
            variable.assign(ops.cast(total / len(paths), variable.dtype))
    except BaseException:
        for value, variable in zip(before, model.variables):
            variable.assign(value)
        raise


def _checkpoint_paths(paths):
    """A list of paths of files that are there, as strings."""
    found = [] if isinstance(paths, (str, os.PathLike)) else [os.fspath(path) for path in paths]
    if not found or not all(path.endswith((".weights.h5", ".keras")) for path in found):
        raise ValueError(f"`paths` must be a list of at least one `.weights.h5` or `.keras` file; got {paths!r}.")
    for path in found:
        if not os.path.exists(path):
            raise FileNotFoundError(f"`paths` must be files that exist; got {path!r}.")
    return found


@contextlib.contextmanager
def _weights_file(path):
    """The `.weights.h5` file that a checkpoint is or holds: Keras loads only these without the optimizer."""
    import h5py

    with tempfile.TemporaryDirectory() as folder:
        file = path
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                file = archive.extract(WEIGHTS, folder) if WEIGHTS in archive.namelist() else path
        try:
            h5py.File(file, "r").close()
        except OSError as error:
            raise ValueError(f"`paths` must be files of weights that Keras wrote; got {path!r}: {error}") from error
        yield file


def _layout(file):
    """A dict from the variables' names in a `.weights.h5` file, but the optimizer's, to their shapes."""
    import h5py

    names = []
    with h5py.File(file, "r") as stored:
        stored.visit(names.append)
        items = {name: stored[name] for name in names if not name.startswith("optimizer/")}
        return {name: item.shape for name, item in items.items() if isinstance(item, h5py.Dataset)}


def _check_layout(path, found, own):
    """Raises a ValueError where they differ; Keras loads what a larger model, of more layers, shares with this one."""
    for name, _ in sorted(found.items() ^ own.items()):
        raise ValueError(
            f"`paths` must be checkpoints of this model; got {path!r}, where the shape of {name} is "
            f"{found.get(name)}, not {own.get(name)}."
        )
