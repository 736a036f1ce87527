"""Masks: which keys a query may look at. Boolean, True where it may; integers count as booleans, floats are refused.

Letters: `B` batch, `T` queries, `S` keys, `N` heads.
"""

import keras
from keras import ops
from keras.src.backend import get_keras_mask  # Keras has no public way to read the mask that travels with a tensor

from keras_transformer.checks import check_integers


def lower_triangular_mask(num_queries, num_keys=None):
    """Which keys each query of a decoder may look at: those at its own position and before.

    With more keys than queries the queries are the last of them, as in decoding with a cache: the triangle is aligned
    to the last key. Of equal number, it is the sources' `tf.linalg.LinearOperatorLowerTriangular` of ones.

    Args:
        num_queries: int or scalar int tensor, `T`.
        num_keys: int or scalar int tensor, `S`; None for `T`.

    Returns:
        bool tensor `[T, S]`.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    mask = kt.lower_triangular_mask(2, 3)
    assert np.array(mask).tolist() == [[True, True, False], [True, True, True]]
    ```
    """
    num_keys = num_queries if num_keys is None else num_keys
    queries = ops.arange(num_queries, dtype="int32")[:, None] + (num_keys - num_queries)
    return ops.arange(num_keys, dtype="int32") <= queries


def combine_masks(*masks):
    """The masks that are not None, ANDed (they broadcast); None where nothing is masked."""
    combined = None
    for mask in masks:
        if combined is None:
            combined = mask
        elif mask is not None and mask is not combined:
            combined = ops.logical_and(combined, mask)
    return combined


def check_mask(name: str, mask, *shapes: tuple):
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
    return ops.cast(mask, "bool")


def four_axes(mask, queries, keys, heads, name="mask"):
    """A checked attention mask as bool `[B or 1, N or 1, T, S]`."""
    pair = queries, keys
    mask = check_mask(name, mask, pair, ("B", *pair), ("B", 1, *pair), ("B", heads, *pair), ("B", 1, 1, keys))
    mask = mask[None] if len(mask.shape) == 2 else mask
    return mask[:, None] if len(mask.shape) == 3 else mask


def padding_of(x, padding_mask, name):
    """The explicit padding mask of `x`, checked, ANDed with the one that travels with `x`: bool `[B, S]` or None."""
    if padding_mask is not None:
        padding_mask = check_mask(name, padding_mask, ("B", x.shape[1]))
    return combine_masks(get_keras_mask(x), padding_mask)


def keys_mask(x, padding_mask, name):
    """Hides the padding of `x` from every query: bool `[B, 1, 1, S]` or None."""
    mask = padding_of(x, padding_mask, name)
    return None if mask is None else mask[:, None, None]


def check_segments(query_segments, key_segments, queries, keys):
    """The numbers of the segments of packed rows, checked.

    Args:
        query_segments: integer tensor `[B, T]`, the number of the segment that each query belongs to; or None.
        key_segments: integer tensor `[B, S]`, the same of each key; or None.
        queries: int or None, `T` if it is known.
        keys: int or None, `S` if it is known.

    Returns:
        Both as int32 tensors, or None if there are no segments.
    """
    if query_segments is None and key_segments is None:
        return None
    if query_segments is None or key_segments is None:
        raise ValueError("Segments must be given for queries and keys, or for neither; got those of one.")
    check_integers("segment_ids", query_segments, queries)
    check_integers("context_segment_ids", key_segments, keys)
    return ops.cast(query_segments, "int32"), ops.cast(key_segments, "int32")
