"""Scaled dot-product attention: "Attention Is All You Need", section 3.2.1.

Masks are boolean, True where a query may look. Letters: `B` batch, `T` queries, `S` keys, `N` heads, `H` head size.
"""

import math

import keras
from keras import ops

from keras_transformer.masks import four_axes
from keras_transformer.noise import dropout as drop
from keras_transformer.scopes import shared_by

MASKED_SCORE = -(2.0**32) + 1  # far below any score; softmax is in float32, where it fits and its exponent is 0


def dot_product_attention(query, key, value, mask=None, dropout: float = 0.0, seed=None):
    """`softmax(query key^T / sqrt(H)) value`, for each head.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1. Queries are scaled before the product, so that
    float16 does not overflow; softmax is in float32. A query that may look nowhere gets weights and output of 0.

    Args:
        query: float tensor `[B, T, N, H]`.
        key: float tensor `[B, S, N, H]`.
        value: float tensor `[B, S, N, H]`.
        mask: bool or integer tensor, non-zero where a query may look: `[T, S]` (`lower_triangular_mask` for a decoder),
            `[B, T, S]`, `[B, 1, T, S]`, `[B, N, T, S]` or, for padding, `[B, 1, 1, S]`; None for everywhere.
        dropout: float in [0, 1), dropout on the weights. There is no `training` here: 0 for inference.
        seed: int or `keras.random.SeedGenerator` for the dropout.

    Returns:
        (output `[B, T, N, H]`, weights `[B, N, T, S]` before dropout), both of the dtype of `query`.

    Raises:
        ValueError: on a float mask or a mask of another shape.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    x = keras.random.normal((1, 3, 2, 4))
    output, weights = kt.dot_product_attention(x, x, x, mask=kt.lower_triangular_mask(3))
    np.testing.assert_allclose(weights[0, 0, 0], [1, 0, 0])
    ```
    """
    if mask is not None:
        mask = four_axes(mask, query.shape[1], key.shape[1], query.shape[2])
    return _attention(query, key, value, mask, dropout, seed)


def _attention(query, key, value, mask, dropout=0.0, seed=None, keys="bsnh"):
    """`dot_product_attention` on a checked mask; `keys` names the axes of `key` and `value`."""
    scale = 1 / math.sqrt(query.shape[-1])
    scores = ops.einsum(f"btnh,{keys}->bnts", query * ops.cast(scale, query.dtype), key)
    scores = ops.cast(scores, keras.backend.result_type(scores.dtype, "float32"))
    if mask is not None:
        scores = ops.where(mask, scores, ops.cast(MASKED_SCORE, scores.dtype))
    # softmax over one key is 1; Keras warns about it, for most who write it mean another axis
    weights = ops.ones_like(scores) if scores.shape[-1] == 1 else ops.softmax(scores, axis=-1)
    weights = ops.cast(weights, query.dtype)  # [B, N, T, S]
    if mask is not None:
        somewhere = ops.any(mask, axis=-1, keepdims=True)  # [B or 1, N or 1, T, 1]
        weights = weights * ops.cast(somewhere, weights.dtype)
    dropped = drop(weights, dropout, seed) if dropout else weights
    return ops.einsum(f"bnts,{keys}->btnh", dropped, value), weights


def cached_attention(query, key, value, mask):
    """Attention to keys and values `[G, N, S, H]` of a `DecodingScope`, which `W` query rows share: `R = G W`.

    The rows of a group become queries of one row, so that its keys are read once and need not be copied.

    Args:
        query: `[R, T, N, H]`.
        mask: bool `[R or 1, N or 1, T or 1, S]`, or None.

    Returns:
        (output `[R, T, N, H]`, weights `[R, N, T, S]`).
    """
    rows, tokens, heads, size = ops.shape(query)
    groups, _, slots, _ = ops.shape(key)
    width = shared_by(rows, groups)
    query = ops.reshape(query, (groups, width * tokens, heads, size))
    if mask is not None:
        mask_heads = mask.shape[1]
        mask = ops.broadcast_to(mask, (rows, mask_heads, tokens, slots))
        mask = ops.reshape(mask, (groups, width, mask_heads, tokens, slots))
        mask = ops.reshape(ops.transpose(mask, (0, 2, 1, 3, 4)), (groups, mask_heads, width * tokens, slots))
    output, weights = _attention(query, key, value, mask, keys="bnsh")
    weights = ops.transpose(ops.reshape(weights, (groups, heads, width, tokens, slots)), (0, 2, 1, 3, 4))
    return ops.reshape(output, (rows, tokens, heads, size)), ops.reshape(weights, (rows, heads, tokens, slots))
