"""Checks of arguments: each states the rule, then what came."""

import keras


def check_rate(name, rate):
    """A dropout rate as a float."""
    if not 0 <= rate < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1; got {rate!r}.")
    return float(rate)


def check_count(name, count, least=1):
    """A whole number of at least `least`, as an int."""
    if isinstance(count, bool) or int(count) != count or count < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}; got {count!r}.")
    return int(count)


def check_options(name, options, allowed):
    """A dict of constructor arguments, copied; None is the empty one."""
    options = dict(options or {})
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ValueError(f"`{name}` takes the options {sorted(allowed)}; got {unknown}.")
    return options


def check_vectors(name, x):
    """Vectors are `[B, T, D]` floats; token ids passed by mistake are integers `[B, T]`."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    if len(x.shape) != 3 or not keras.backend.is_float_dtype(dtype):
        raise ValueError(f"`{name}` must be float vectors of shape [B, T, D]; got {dtype} of shape {tuple(x.shape)}.")


def check_mask(name, mask, *shapes):
    """A mask as booleans, True where a query may look.

    Args:
        name: the argument's name.
        mask: boolean or integer tensor, non-zero counting as True.
        shapes: the shapes it may have, tuples of sizes (None where unknown) or of letters for any size.
    """
    dtype = keras.backend.standardize_dtype(mask.dtype)
    if keras.backend.is_float_dtype(dtype):
        raise ValueError(
            f"`{name}` must be boolean or integer, True (non-zero) where a query may look; got {dtype}. Additive masks "
            f"(0 to look, a large negative number to hide) are converted by `mask == 0`, ones and zeros by `mask == 1`."
        )

    def fits(got, wanted):
        return got == wanted or got is None or wanted is None or isinstance(wanted, str)

    shape = tuple(mask.shape)
    if not any(len(shape) == len(s) and all(map(fits, shape, s)) for s in shapes):
        allowed = " or ".join(str(list(s)).replace("'", "") for s in shapes)
        raise ValueError(f"`{name}` must have the shape {allowed}; got {list(shape)}.")
    return keras.ops.cast(mask, "bool")
