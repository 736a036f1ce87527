"""Writing a SavedModel so that a failed write leaves the old one whole."""

import pathlib
import tempfile

import keras


def write_saved_model(filepath, layer, endpoints):
    """Writes functions of a layer as the signatures of a SavedModel, by `keras.export.ExportArchive`.

    Args:
        filepath: path of the folder; an old SavedModel there is replaced when the new one is complete.
        layer: built Keras layer or model, whose variables and assets the functions use.
        endpoints: dict from a signature's name to (function of tensors, list of `tf.TensorSpec` with names).

    Raises:
        ValueError: if there is something else at `filepath`, which would be lost.
    """
    filepath = pathlib.Path(filepath)
    is_free = not filepath.exists() or (filepath.is_dir() and not any(filepath.iterdir()))
    if not is_free and not (filepath / "saved_model.pb").exists():
        raise ValueError(f"`filepath` must be a new path, an empty folder or a SavedModel to replace; got {filepath}.")
    filepath.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=filepath.parent, prefix=f".{filepath.name}-") as folder:
        new, old = pathlib.Path(folder, "new"), pathlib.Path(folder, "old")
        archive = keras.export.ExportArchive()
        archive.track(layer)
        for name, (function, signature) in endpoints.items():
            archive.add_endpoint(name, function, input_signature=signature)
        archive.write_out(str(new), verbose=False)
        if filepath.exists():
            filepath.rename(old)
        try:
            new.rename(filepath)
        except OSError:
            if old.exists():
                old.rename(filepath)
            raise
