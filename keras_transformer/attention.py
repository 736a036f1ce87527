"""Scaled dot-product attention: "Attention Is All You Need", section 3.2.1.

Two functions give the same numbers: one keeps the weights of all queries and keys, the other a block of them. Masks are
boolean, True where a query may look. Letters: `B` batch, `T` queries, `S` keys, `N` heads, `K` kv heads, each of which
serves `N / K` heads that follow one another, `H` head size.
"""

from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_transformer.blockwise import blockwise
from keras_transformer.noise import draw_state, weights_dropout
from keras_transformer.scopes import shared_by
from keras_transformer.scoring import MASKED_SCORE, Scoring, scaled

KERNELS = ("auto", "exact", "blockwise")
LONG = 2**21  # weights of a head from which blocks are faster than all at once, in causal attention on a CPU


def dot_product_attention(
    query,
    key,
    value,
    mask=None,
    *,
    bias=None,
    distance_bias=None,
    causal: bool = False,
    window: int | None = None,
    segments=None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed=None,
):
    """`softmax(query key^T / sqrt(H)) value`, for each head.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 1; grouped heads: Ainslie et al. 2023,
    https://arxiv.org/abs/2305.13245. Queries are scaled before the product, so that float16 does not overflow; softmax
    is in float32. A query that may look nowhere gets weights and output of 0. Where queries and keys differ in number,
    the last query stands at the last key.

    Args:
        query: float tensor `[B, T, N, H]`.
        key: float tensor `[B, S, K, H]`; `K` divides `N`.
        value: float tensor `[B, S, K, H]`, or of another head size, which is that of the output then.
        mask: bool or integer tensor, non-zero where a query may look: `[T, S]`, `[B, T, S]`, `[B, 1, T, S]`,
            `[B, N, T, S]` or, for padding, `[B, 1, 1, S]`; None for everywhere.
        bias: float tensor `[B or 1, N or 1, T, S]` that is added to the scores; below -2**31, as -inf, it hides a key.
        distance_bias: float tensor `[N, T + S - 1]` that is added to the scores by how far a key stands behind a query:
            the last `T - 1` entries are those of later keys, the one before them is that of the query's own position.
        causal: bool, whether a query may look only at its own position and before (`lower_triangular_mask`).
        window: int, whether a query may look only at distances below it (Beltagy et al. 2020,
            https://arxiv.org/abs/2004.05150): with `causal` at this many keys; None for any distance.
        segments: a pair of integer tensors `[B, T]` and `[B, S]`: a query looks at keys of its own number only.
        soft_cap: float above 0, scores become `soft_cap * tanh(scores / soft_cap)` before biases and masks.
        dropout: float in [0, 1), dropout on the weights. There is no `training` here: 0 for inference.
        seed: int or `keras.random.SeedGenerator` for the dropout.

    Returns:
        (output `[B, T, N, H]`, weights `[B, N, T, S]` before dropout), both of the dtype of `query`.

    Raises:
        ValueError: on a float mask or a mask of another shape, and so for biases and segments; if `K` does not divide
            `N`.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    x = keras.random.normal((1, 3, 2, 4))
    output, weights = kt.dot_product_attention(x, x, x, causal=True)
    np.testing.assert_allclose(weights[0, 0, 0], [1, 0, 0])
    ```
    """
    scoring = _scoring(query, key, (mask,), bias, distance_bias, causal, window, segments, soft_cap)
    return exact_attention(query, key, value, scoring, dropout, seed)


def blockwise_attention(
    query,
    key,
    value,
    mask=None,
    *,
    bias=None,
    distance_bias=None,
    causal: bool = False,
    window: int | None = None,
    segments=None,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    seed=None,
):
    """The output of `dot_product_attention`, to rounding, without ever holding the weights of all queries and keys.

    Dao et al. 2022, "FlashAttention", https://arxiv.org/abs/2205.14135; Rabe and Staats 2021,
    https://arxiv.org/abs/2112.05682. Memory grows with `T + S`, not with their product, in the backward pass too, where
    weights are computed again. Blocks that the triangle or the window hides are not computed. The same seed drops the
    same weights as in `dot_product_attention`.

    Args: as `dot_product_attention`. The gradient of `bias` is held for each row and head, with as many numbers as the
        weights have.

    Returns:
        output `[B, T, N, H]` of the dtype of `query`.

    Raises:
        ValueError: as `dot_product_attention`.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    x = keras.random.normal((1, 2000, 2, 4))
    output = kt.blockwise_attention(x, x, x, causal=True, window=100)
    np.testing.assert_allclose(output, kt.dot_product_attention(x, x, x, causal=True, window=100)[0], atol=1e-5)
    ```
    """
    scoring = _scoring(query, key, (mask,), bias, distance_bias, causal, window, segments, soft_cap)
    return blockwise(query, key, value, scoring, dropout, seed)


def attend(query, key, value, scoring, dropout=0.0, seed=None, kernel="auto"):
    """Attention by the function that fits.

    Args:
        kernel: one of `KERNELS`; `"auto"` for blocks where both lengths are known before run time and each head has
            `LONG` weights.

    Returns:
        (output `[B, T, N, H]`, weights `[B, N, T, S]`, or None where they are not held).
    """
    lengths = query.shape[1], key.shape[1]
    is_long = all(isinstance(length, int) for length in lengths) and lengths[0] * lengths[1] >= LONG
    is_blockwise = kernel == "blockwise" or kernel == "auto" and is_long
    if is_blockwise and not in_symbolic_scope():  # where a graph is only described, either has the right shape
        return blockwise(query, key, value, scoring, dropout, seed), None
    return exact_attention(query, key, value, scoring, dropout, seed)


def cached_attention(query, key, value, scoring):
    """Attention to keys and values `[G, K, S, H]` of a `DecodingScope`, which `W` query rows share: `R = G W`.

    The rows of a group become queries of one row, so that its keys are read once and need not be copied.

    Args:
        query: `[R, T, N, H]`.
        scoring: of the rows' own queries.

    Returns:
        (output `[R, T, N, H]`, weights `[R, N, T, S]`).
    """
    rows, tokens, heads, size = ops.shape(query)
    groups, _, slots, _ = ops.shape(key)
    width = shared_by(rows, groups)

    def grouped(x):  # [R, heads, T, S] -> [G, heads, W T, S]
        if x is None:
            return None
        x = ops.broadcast_to(x, (rows, x.shape[1], tokens, slots))
        x = ops.transpose(ops.reshape(x, (groups, width, x.shape[1], tokens, slots)), (0, 2, 1, 3, 4))
        return ops.reshape(x, (groups, x.shape[1], width * tokens, slots))

    visible = grouped(scoring.visible((rows, heads, tokens, slots)))
    lengths = width * tokens, slots
    scoring = Scoring(lengths, heads, (visible,), grouped(scoring.bias), soft_cap=scoring.soft_cap)
    query = ops.reshape(query, (groups, width * tokens, heads, size))
    output, weights = exact_attention(query, key, value, scoring, keys="bksh")
    weights = ops.transpose(ops.reshape(weights, (groups, heads, width, tokens, slots)), (0, 2, 1, 3, 4))
    return ops.reshape(output, (rows, tokens, heads, value.shape[-1])), ops.reshape(
        weights, (rows, heads, tokens, slots)
    )


def exact_attention(query, key, value, scoring, dropout=0.0, seed=None, keys="bskh"):
    """(output, weights), all at once; `keys` names the axes of `key` and `value`."""
    if keys == "bskh":
        key, value = (ops.transpose(x, (0, 2, 1, 3)) for x in (key, value))  # [B, K, S, H]
    rows, tokens, heads, _ = ops.shape(query)
    sizes = (rows, heads, tokens, ops.shape(key)[2])
    # the queries of the heads that share keys stand behind each other; by products of matrices rather than `einsum`,
    # whose op takes thrice the time where TensorFlow does not know the lengths
    shared = (rows, key.shape[1], heads // key.shape[1] * tokens)
    query_heads = ops.reshape(ops.transpose(scaled(query), (0, 2, 1, 3)), (*shared, query.shape[-1]))
    products = ops.matmul(query_heads, ops.swapaxes(key, -1, -2))
    scores = scoring.add_biases(scoring.cap(ops.reshape(products, sizes)))
    visible = scoring.visible(sizes)
    if visible is not None:
        scores = ops.where(visible, scores, ops.cast(MASKED_SCORE, scores.dtype))
    # softmax over one key is 1, with a gradient of 0; Keras warns about it, for most who write it mean another axis
    weights = scores - scores + 1 if scores.shape[-1] == 1 else ops.softmax(scores, axis=-1)
    weights = ops.cast(weights, query.dtype)  # [B, N, T, S]
    if visible is not None:
        somewhere = ops.any(visible, axis=-1, keepdims=True)  # [B or 1, N or 1, T or 1, 1]
        weights = weights * ops.cast(somewhere, weights.dtype)
    dropped = weights
    if dropout:
        dropped = weights * weights_dropout(draw_state(seed), dropout, sizes, dtype=weights.dtype)
    output = ops.matmul(ops.reshape(dropped, (*shared, sizes[3])), value)
    return ops.transpose(ops.reshape(output, (*sizes[:3], value.shape[-1])), (0, 2, 1, 3)), weights


def _scoring(query, key, *options):
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"The number of kv heads must divide that of heads; got {key.shape[2]} and {query.shape[2]}.")
    return Scoring((ops.shape(query)[1], ops.shape(key)[1]), query.shape[2], *options)
