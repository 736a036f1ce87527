"""Checks of arguments: each states the rule, then what came."""

import keras
import numpy as np


def check_rate(name: str, rate: float) -> float:
    """A dropout rate as a float."""
    if not 0 <= rate < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1; got {rate!r}.")
    return float(rate)


def check_count(name: str, count: int, least: int = 1) -> int:
    """A whole number of at least `least`, as an int."""
    if isinstance(count, bool) or int(count) != count or count < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}; got {count!r}.")
    return int(count)


def check_activation(activation: str) -> str:
    """The name of a Keras activation."""
    if not isinstance(activation, str):
        raise ValueError(
            f"`activation` must be the name of a Keras activation, so that it can be saved; got {activation!r}."
        )
    keras.activations.get(activation)  # raises a ValueError on an unknown name
    return activation


def check_options(name: str, options: dict | None, allowed) -> dict:
    """A dict of constructor arguments, copied and plain, so that it can be saved; None is the empty one."""
    options = dict(options or {})
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"`{name}` takes the options {sorted(allowed)}; got {unknown}.")
    return {option: _check_option(option, value) for option, value in options.items()}


def _check_option(name, value):
    """An option as the layer that gets it will check it."""
    if name == "key_dim":
        return None if value is None else check_count(name, value)
    return check_rate(name, value) if name == "dropout" else bool(value)


def check_vectors(name: str, x) -> None:
    """Vectors are `[B, T, D]` floats; token ids passed by mistake are integers `[B, T]`."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if len(x.shape) != 3 or not keras.backend.is_float_dtype(dtype):
        raise ValueError(f"`{name}` must be float vectors of shape [B, T, D]; got {dtype} of shape {tuple(x.shape)}.")


def check_range(name: str, value, least: float, most: float = float("inf"), above: bool = False):
    """A number from `least` (or above it) to `most`, as a float; a tensor, whose value may not be known, as it is."""
    known = concrete(value)
    if known is not None and not np.all((known > least if above else known >= least) & (known <= most)):
        lower = f"{'above' if above else 'at least'} {least}"
        upper = "" if most == float("inf") else f" and at most {most}"
        raise ValueError(f"`{name}` must be {lower}{upper}; got {value!r}.")
    return float(value) if isinstance(value, (int, float)) else value


def concrete(value):
    """The value of a tensor as a NumPy array; None inside a graph, where there is none yet."""
    try:
        return np.asarray(value)
    except (NotImplementedError, TypeError):  # TensorFlow's and JAX's way to say that it is symbolic
        return None
