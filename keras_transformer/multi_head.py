"""Multi-head attention: "Attention Is All You Need", section 3.2.2.

Masks are boolean, True where a query may look. Letters: `B` batch, `T` queries, `S` keys, `D` width of the queries,
`C` width of the context, `N` heads, `H` head size.
"""

import keras
from keras import ops

from keras_transformer.attention import cached_attention, dot_product_attention
from keras_transformer.checks import check_count, check_rate, check_vectors
from keras_transformer.masks import combine_masks, four_axes, keys_mask, lower_triangular_mask, segments_mask
from keras_transformer.scopes import AttentionMaps, DecodingScope


def project(dense, x):
    """Applies a Dense layer to `[B, T, D]`, as one product of `B * T` rows.

    On three axes TensorFlow multiplies batch row by batch row, and its gradient holds a kernel for each of them.
    """
    flat = dense(ops.reshape(x, (-1, x.shape[-1])))
    return ops.reshape(flat, (*ops.shape(x)[:-1], flat.shape[-1]))


class _MultiHeadAttention(keras.layers.Layer):
    """What self- and cross-attention share: the projections and the way from vectors to heads and back."""

    def __init__(
        self, num_heads: int, key_dim: int | None = None, dropout: float = 0.0, use_bias: bool = True, **kwargs
    ):
        super().__init__(**kwargs)
        self.num_heads = check_count("num_heads", num_heads)
        self.key_dim = None if key_dim is None else check_count("key_dim", key_dim)
        self.dropout = check_rate("dropout", dropout)
        self.use_bias = bool(use_bias)
        self.supports_masking = True
        self._seed = keras.random.SeedGenerator() if self.dropout else None

    def _build(self, x_shape, context_shape):
        for name, shape in (("x", x_shape), ("context", context_shape)):
            if len(shape) != 3 or shape[-1] is None:  # token ids, most likely
                raise ValueError(f"`{name}` must be float vectors of shape [B, T, D], D known; got {list(shape)}.")
        width = x_shape[-1]
        if self.key_dim is None and width % self.num_heads:
            raise ValueError(
                f"`d_model` must be divisible by `num_heads` where `key_dim` is None; got {width} and {self.num_heads}."
            )
        self.head_size = self.key_dim or width // self.num_heads
        inner = self.num_heads * self.head_size
        for name, shape, features in (
            ("query", x_shape, inner),
            ("key", context_shape, inner),
            ("value", context_shape, inner),
            ("output", (*x_shape[:-1], inner), width),
        ):
            dense = keras.layers.Dense(features, use_bias=self.use_bias, dtype=self.dtype_policy, name=name)
            dense.build(shape)
            setattr(self, f"{name}_projection", dense)

    def _heads(self, dense, x):
        """`[B, T, D]` -> `[B, T, N, H]`."""
        return ops.reshape(project(dense, x), (*ops.shape(x)[:2], self.num_heads, self.head_size))

    def _attend(self, query, key, value, mask, return_attention_scores, training, cached=False):
        """Heads to the layer's output `[B, T, D]`, with the weights `[B, N, T, S]` if asked."""
        if cached:
            heads, weights = cached_attention(query, key, value, mask)
        else:
            dropout = self.dropout if training else 0.0
            heads, weights = dot_product_attention(query, key, value, mask, dropout, seed=self._seed)
        maps = AttentionMaps.current()
        if maps is not None:
            maps.collect(self, weights, is_cross=isinstance(self, MultiHeadCrossAttention))
        joined = ops.reshape(heads, (*ops.shape(heads)[:2], self.num_heads * self.head_size))
        output = project(self.output_projection, joined)
        return (output, weights) if return_attention_scores else output

    def get_config(self):
        own = {name: getattr(self, name) for name in ("num_heads", "key_dim", "dropout", "use_bias")}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="keras_transformer")
class MultiHeadSelfAttention(_MultiHeadAttention):
    """Each token attends to the tokens of its own sequence, in several heads.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.2. The output has the width of the input. The Keras
    mask of `x` is used as a padding mask, left as it is and passed on. In a `DecodingScope` a causal layer continues
    from its cache.

    Args:
        num_heads: int, `N`.
        key_dim: int, size `H` of a head; None for width / `num_heads`.
        causal: bool, whether a token may look only at its own position and before (`lower_triangular_mask`).
        dropout: float in [0, 1), dropout on the attention weights.
        use_bias: bool, whether the four projections have biases.

    Call arguments:
        x: float tensor `[B, T, D]`.
        padding_mask: bool or integer tensor `[B, T]`, non-zero for real tokens; ANDed with the Keras mask of `x`.
        attention_mask: bool or integer tensor, non-zero where a query may look: `[T, T]`, `[B, T, T]`,
            `[B, 1, T, T]` or `[B, N, T, T]`.
        segment_ids: integer tensor `[B, T]` where a row is packed of several sequences: the number of each token's; a
            token looks at its own only.
        return_attention_scores: bool, whether to return the attention weights too.
        training: bool, whether dropout acts.

    Returns:
        float tensor `[B, T, D]`; with `return_attention_scores`, a pair of it and the weights `[B, N, T, T]`. A query
        that may look nowhere has weights of 0, and the output projection's bias for output.

    Raises:
        ValueError: if the width is not divisible by `num_heads` and no `key_dim` is given; on integer `x`; on float
            masks or masks of another shape; on segments that are not integers `[B, T]` or are given for one side only;
            on an `attention_mask` inside a `DecodingScope`.

    Example:
    ```python
    import keras
    import keras_transformer as kt
    x = keras.random.normal((2, 5, 16))
    output, weights = kt.MultiHeadSelfAttention(num_heads=4, causal=True)(x, return_attention_scores=True)
    assert output.shape == (2, 5, 16) and weights.shape == (2, 4, 5, 5)
    ```
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, dropout, use_bias, **kwargs)
        self.causal = bool(causal)

    def build(self, input_shape):
        self._build(input_shape, input_shape)

    def call(
        self,
        x,
        padding_mask=None,
        attention_mask=None,
        segment_ids=None,
        return_attention_scores=False,
        training=None,
    ):
        check_vectors("x", x)
        query, key, value = (
            self._heads(dense, x) for dense in (self.query_projection, self.key_projection, self.value_projection)
        )
        scope = DecodingScope.current() if self.causal else None
        if scope is None:
            mask = self._mask(x, padding_mask, attention_mask, segment_ids)
        elif attention_mask is None:
            # padding stands behind a row's tokens, where nobody looks, and what is written is one segment
            key, value, mask = scope.append(self, key, value)
        else:
            raise ValueError("A causal layer takes no `attention_mask` inside a `DecodingScope`; got one.")
        return self._attend(query, key, value, mask, return_attention_scores, training, cached=scope is not None)

    def _mask(self, x, padding_mask, attention_mask, segment_ids):
        length = x.shape[1]
        if attention_mask is not None:
            attention_mask = four_axes(attention_mask, length, length, self.num_heads, "attention_mask")
        triangle = lower_triangular_mask(ops.shape(x)[1])[None, None] if self.causal else None
        segments = segments_mask(segment_ids, segment_ids, length, length)
        return combine_masks(keys_mask(x, padding_mask, "padding_mask"), attention_mask, segments, triangle)

    def get_config(self):
        return {**super().get_config(), "causal": self.causal}


@keras.saving.register_keras_serializable(package="keras_transformer")
class MultiHeadCrossAttention(_MultiHeadAttention):
    """Each token attends to the tokens of another sequence, the context, in several heads.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.2.3. Queries come from `x`, keys and values from
    `context`, whose width may differ. The Keras mask of the context is used as its padding mask; that of `x` is passed
    on. In a `DecodingScope` the keys and values of the context are computed in the first call and kept.

    Args: as `MultiHeadSelfAttention`, but for `causal`.

    Call arguments:
        x: float tensor `[B, T, D]`.
        context: float tensor `[B, S, C]`.
        context_padding_mask: bool or integer tensor `[B, S]`, non-zero for real tokens; ANDed with the context's Keras
            mask.
        segment_ids, context_segment_ids: integer tensors `[B, T]` and `[B, S]` where rows are packed: a token looks at
            the segment of its own number.
        attention_mask, return_attention_scores, training: as `MultiHeadSelfAttention`, with `S` keys.

    Returns:
        float tensor `[B, T, D]`; with `return_attention_scores`, a pair of it and the weights `[B, N, T, S]`.

    Raises:
        ValueError: as `MultiHeadSelfAttention`.

    Example:
    ```python
    import keras
    import keras_transformer as kt
    x, context = keras.random.normal((2, 3, 16)), keras.random.normal((2, 5, 24))
    output = kt.MultiHeadCrossAttention(num_heads=4)(x, context)
    assert output.shape == (2, 3, 16)
    ```
    """

    def build(self, x_shape, context_shape):
        self._build(x_shape, context_shape)

    def call(
        self,
        x,
        context,
        context_padding_mask=None,
        attention_mask=None,
        segment_ids=None,
        context_segment_ids=None,
        return_attention_scores=False,
        training=None,
    ):
        check_vectors("x", x)
        check_vectors("context", context)

        def keys_and_values():
            return self._heads(self.key_projection, context), self._heads(self.value_projection, context)

        scope = DecodingScope.current()
        key, value = keys_and_values() if scope is None else scope.keep(self, keys_and_values)
        if attention_mask is not None:
            attention_mask = four_axes(attention_mask, x.shape[1], context.shape[1], self.num_heads, "attention_mask")
        segments = segments_mask(segment_ids, context_segment_ids, x.shape[1], context.shape[1])
        mask = combine_masks(keys_mask(context, context_padding_mask, "context_padding_mask"), attention_mask, segments)
        query = self._heads(self.query_projection, x)
        return self._attend(query, key, value, mask, return_attention_scores, training, cached=scope is not None)
