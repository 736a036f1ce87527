"""Weights of one model into another, by name: what pretraining learned into what is fine-tuned."""

import keras
import numpy as np

from keras_transformer.checks import check_names


def transfer_weights(source: keras.Model, target: keras.Model, missing: tuple = (), unused: tuple = ()) -> list:
    """Copies the weights that have the same path in both models, and says what it could not copy.

    Every weight must find its counterpart, but for those of the layers that are named: so nothing is left out unseen.

    Args:
        source: built `keras.Model`, the pretrained one.
        target: built `keras.Model`, the one to train on.
        missing: names of the target's layers that keep their own weights (`("logits",)`): top layers, or blocks.
        unused: names of the source's layers that the target need not have (`("head", "head_norm")`).

    Returns:
        list of the paths that were copied, in the order of the target's weights.

    Raises:
        ValueError: naming all of them, on weights of the target that the source has not, or of another shape, and on
            weights of the source that the target has not. Nothing is copied then.

    Example:
    ```python
    import keras_transformer as kt
    size = kt.PRESETS["tiny"]
    pretrained = kt.build_masked_language_model(vocab_size=100, **size)
    model = kt.build_classifier(vocab_size=100, num_classes=3, **size)
    copied = kt.transfer_weights(pretrained, model, missing=("logits",), unused=("head", "head_norm"))
    model.get_layer("encoder").trainable = False
    assert copied[0] == "embedding/embeddings"
    ```
    """
    theirs, ours = _weights(source), _weights(target)
    left = _of_layers(source, check_names("unused", unused))
    kept = _of_layers(target, check_names("missing", missing))
    wrong = [f"{path}: not in the target" for path in theirs if path not in ours and path not in left]
    arrays = {path: np.asarray(theirs[path]) for path in ours if path in theirs and path not in kept}
    assign_weights(target, arrays, wrong, kept)
    return list(arrays)


def assign_weights(model, arrays, wrong=(), kept=()):
    """Gives every weight of a model a value, or raises a ValueError that names all that does not fit.

    Args:
        model: built `keras.Model`.
        arrays: dict from the paths of weights to arrays; None for one that `wrong` says is missing.
        wrong: what else is known not to fit, as lines of text.
        kept: paths of weights that keep their values.
    """
    if wrong := [*wrong, *misfits(model, arrays, kept)]:
        raise ValueError("All weights must fit; got\n  " + "\n  ".join(wrong))
    ours = _weights(model)
    for path, array in arrays.items():
        ours[path].assign(array)


def misfits(model, arrays, kept=()):
    """What of `arrays` does not fit the weights of a model, as lines of text; see `assign_weights`."""
    ours = _weights(model)
    wrong = [f"{path}: no value for it" for path in ours if path not in arrays and path not in kept]
    wrong += [f"{path}: no such weight in the model" for path in arrays if path not in ours]
    for path, array in arrays.items():
        if path in ours and array is not None and tuple(ours[path].shape) != array.shape:
            wrong.append(f"{path}: shape {list(array.shape)} for one of {list(ours[path].shape)}")
    return wrong


def _weights(model):
    """By their paths."""
    found = {}
    for weight in model.weights:
        if found.setdefault(weight.path, weight) is not weight:
            raise ValueError(f"Layers must have names of their own; got two weights {weight.path!r} in {model.name!r}.")
    return found


def _of_layers(model, names):
    """The paths of the weights of layers that are named: top layers, and those of models among them, as blocks."""
    within = {weight.path for layer in model.layers if layer.name in names for weight in layer.weights}
    return within | {weight.path for weight in model.weights if weight.path.split("/")[0] in names}
