"""Checks of arguments: each states the rule, then what came."""

import keras


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
