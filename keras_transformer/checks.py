"""Checks of arguments: each states the rule, then what came."""

import inspect

import keras
import numpy as np
from keras import ops


def check_rate(name: str, rate: float) -> float:
    """A dropout rate as a float."""
    if not 0 <= rate < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1; got {rate!r}.")
    return float(rate)


def check_count(name: str, count: int, least: int = 1) -> int:
    """A whole number of at least `least`, as an int."""
    if (
        count is None
        or isinstance(count, (bool, str))
        or not np.isfinite(count)
        or int(count) != count
        or count < least
    ):
        raise ValueError(f"`{name}` must be a whole number of at least {least}; got {count!r}.")
    return int(count)


@keras.saving.register_keras_serializable(package="keras_transformer")
def gelu_tanh(x):
    """The GELU by a hyperbolic tangent, as in GPT-2."""
    return keras.activations.gelu(x, approximate=True)


def activation_named(name: str):
    """The activation: one of Keras's, or `"gelu_tanh"`; a Keras layer can hold and save either."""
    return gelu_tanh if name == "gelu_tanh" else keras.activations.get(name)


def check_activation(activation: str) -> str:
    """The name of an activation."""
    if not isinstance(activation, str):
        raise ValueError(
            f"`activation` must be the name of a Keras activation, so that it can be saved; got {activation!r}."
        )
    activation_named(activation)  # raises a ValueError on an unknown name
    return activation


def check_options(name: str, options: dict | None, layer: type, *args, **own) -> dict:
    """Options of a block's child, checked by making one, and plain, so that they can be saved; None is the empty dict.

    Args:
        layer: the child's class.
        *args: what its constructor takes first.
        **own: further arguments of it that are not options.
    """
    options, taken = dict(options or {}), ("self", "kwargs", *own)
    allowed = [option for option in inspect.signature(layer.__init__).parameters if option not in taken][len(args) :]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"`{name}` takes the options {sorted(allowed)}; got {unknown}.")
    config = layer(*args, **own, **options).get_config()
    return {option: config[option] for option in options}


def check_names(name: str, names) -> tuple:
    """Names as a tuple; a string alone would be taken for its letters."""
    if isinstance(names, str) or not all(isinstance(each, str) for each in names):
        raise ValueError(f"`{name}` must be a tuple of names; got {names!r}.")
    return tuple(names)


def check_vectors(name: str, x) -> None:
    """Vectors are `[B, T, D]` floats; token ids passed by mistake are integers `[B, T]`."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if len(x.shape) != 3 or not keras.backend.is_float_dtype(dtype):
        raise ValueError(f"`{name}` must be float vectors of shape [B, T, D]; got {dtype} of shape {tuple(x.shape)}.")


def check_shape(name: str, shape) -> None:
    """What a layer is built for: the shape of vectors, whose width is known."""
    if len(shape) != 3 or shape[-1] is None:  # token ids, most likely
        raise ValueError(f"`{name}` must be float vectors of shape [B, T, D], D known; got {list(shape)}.")


def check_integers(name: str, ids, length: int | None) -> None:
    """Labels and segments of packed rows are integers `[B, T]`."""
    dtype, shape = keras.backend.standardize_dtype(ids.dtype), tuple(ids.shape)
    fits = len(shape) == 2 and (None in (shape[1], length) or shape[1] == length)
    if not fits or not keras.backend.is_int_dtype(dtype):
        raise ValueError(f"`{name}` must be integers of shape [B, {length or 'T'}]; got {dtype} of shape {shape}.")


def check_range(name: str, value, least: float, most: float = 1e6, above: bool = False):
    """A number from `least` (or above it) to `most`, as a float; a scalar tensor as it is, checked if it is known."""
    known = concrete(value)
    if isinstance(value, (bool, str)) or value is None or len(np.shape(value) if known is not None else value.shape):
        raise ValueError(f"`{name}` must be one number; got {value!r}.")
    if known is not None and not np.all((known > least if above else known >= least) & (known <= most)):
        lower = f"{'above' if above else 'at least'} {least}"
        upper = "" if most in (1e6, float("inf")) else f" and at most {most}"
        raise ValueError(f"`{name}` must be {lower}{upper}; got {value!r}.")
    return float(value) if isinstance(value, (int, float, np.number)) else value


def concrete(value):
    """The value of a tensor as a NumPy array; None inside a graph, where there is none yet."""
    try:
        return np.asarray(value)
    except (NotImplementedError, TypeError):  # TensorFlow's and JAX's way to say that it is symbolic
        return None


def check_numbers(name, value, least):
    """Whole numbers of at least `least`: an int, or an int32 tensor, scalar or `[B]`."""
    if np.isscalar(value) or value is None:
        return check_count(name, value, least)
    known = concrete(value)
    if known is not None and (known.ndim > 1 or not np.all((known >= least) & (known == np.floor(known)))):
        raise ValueError(f"`{name}` must be whole numbers of at least {least}, one or one for each row; got {value!r}.")
    return ops.cast(value, "int32")


def check_ids(name, ids):
    """Token ids `[B, T]` as an int32 tensor."""
    ids = ops.convert_to_tensor(ids)
    known = concrete(ids)
    if not keras.backend.is_int_dtype(ids.dtype) or len(ids.shape) != 2:
        raise ValueError(f"`{name}` must be integer ids of shape [B, T]; got {ids.dtype} of shape {tuple(ids.shape)}.")
    if known is not None and np.any(known < 0):
        raise ValueError(f"`{name}` must be ids of at least 0; got {known.min()}.")
    return ops.cast(ids, "int32")


def check_prompts(lengths):
    """Raises a ValueError if a prompt is known to hold no token."""
    known = concrete(lengths)
    if known is not None and np.any(known == 0):
        raise ValueError("Each prompt must hold a token; got one that is padding alone.")


def check_rows(name, ids, rows):
    """Raises a ValueError if there are not as many rows of ids as of sources, where both are known."""
    if isinstance(rows, int) and ids.shape[0] not in (None, rows):
        raise ValueError(f"`{name}` must have a row for each of the {rows} sources or prompts; got {ids.shape[0]}.")
