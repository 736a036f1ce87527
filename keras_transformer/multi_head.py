"""Multi-head attention: "Attention Is All You Need", section 3.2.2, and what came after it.

Masks are boolean, True where a query may look. Letters: `B` batch, `T` queries, `S` keys, `D` width of the queries,
`C` width of the context, `N` heads, `K` kv heads, `H` head size.
"""

import keras
from keras import ops

from keras_transformer.checks import check_count, check_options, check_vectors
from keras_transformer.heads import HeadsLayer
from keras_transformer.masks import keys_mask
from keras_transformer.relative import AlibiBias, RelativeBias, RotaryPositions
from keras_transformer.scopes import DecodingScope


@keras.saving.register_keras_serializable(package="keras_transformer")
class MultiHeadSelfAttention(HeadsLayer):
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
        num_kv_heads: int, `K`, heads of keys and values, each of which serves `N / K` heads (Ainslie et al. 2023,
            https://arxiv.org/abs/2305.13245); 1 is multi-query attention (Shazeer 2019,
            https://arxiv.org/abs/1911.02150); None for `N`. A cache holds these only.
        position: positions that act inside attention: `"rotary"` (`RotaryPositions`), `"alibi"` (`AlibiBias`),
            `"relative"` (`RelativeBias`), or a dict of the layer's arguments with that name as `"type"`:
            `{"type": "rotary", "scaling": "linear", "factor": 4}`; None for none.
        window: int, whether a token may look only at distances below it (Beltagy et al. 2020,
            https://arxiv.org/abs/2004.05150); None for any distance. A cache keeps as many tokens only.
        soft_cap: float above 0, scores become `soft_cap * tanh(scores / soft_cap)` (Gemma 2, 2024,
            https://arxiv.org/abs/2408.00118).
        qk_norm: bool, whether each query's and key's root mean square is made 1 and scaled by a learned vector `[H]`
            (Henry et al. 2020, https://arxiv.org/abs/2010.04245; as RMS norm, Dehghani et al. 2023,
            https://arxiv.org/abs/2302.05442).
        kernel: `"exact"` keeps all weights, `"blockwise"` a block of them (`blockwise_attention`); `"auto"` takes
            blocks where both lengths are known before run time and long. Where weights are asked for, all are kept.

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
        ValueError: if the width is not divisible by `num_heads` and no `key_dim` is given, or `num_heads` by
            `num_kv_heads`; on an unknown `position` or `kernel`; on integer `x`; on float masks or masks of another
            shape; on segments that are not integers `[B, T]` or are given for one side only; on an `attention_mask`
            inside a `DecodingScope`, or a layer with a `window` that goes on in it by several tokens at once.

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
        num_kv_heads: int | None = None,
        position: str | dict | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        qk_norm: bool = False,
        kernel: str = "auto",
        **kwargs,
    ):
        super().__init__(num_heads, key_dim, dropout, use_bias, num_kv_heads, soft_cap, qk_norm, kernel, **kwargs)
        self.causal = bool(causal)
        self.window = None if window is None else check_count("window", window)
        self.position, self.rotary, self.distance_bias = position, None, None
        if position is not None:
            self._make_position(**(position if isinstance(position, dict) else {"type": position}))

    def _make_position(self, type=None, **options):
        """Makes the layer that turns queries and keys, or the one that makes biases."""
        kinds = {"rotary": (RotaryPositions,), "alibi": (AlibiBias, self.num_heads)}
        kinds["relative"] = RelativeBias, self.num_heads, not self.causal
        if not isinstance(type, str) or type not in kinds:
            raise ValueError(f"`position` must be one of {list(kinds)}, or a dict with it as 'type'; got {type!r}.")
        options = check_options("position", options, *kinds[type])
        layer = kinds[type][0](*kinds[type][1:], **options, dtype=self.dtype_policy, name="position")
        if type == "rotary":
            self.rotary = layer
        else:
            self.distance_bias = layer
        if isinstance(self.position, dict):
            self.position = {"type": type, **options}

    def build(self, input_shape):
        self._build(input_shape, input_shape)
        if self.rotary is not None and self.head_size % 2:
            raise ValueError(f"Rotary positions need an even head size; got {self.head_size}.")

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
        scope, length = DecodingScope.current() if self.causal else None, ops.shape(x)[1]
        query, key, value = (self._heads(name, x) for name in ("query", "key", "value"))
        if self.rotary is not None:
            positions = ops.arange(length, dtype="int32")[None] if scope is None else scope.positions(length)
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        rules = {"causal": self.causal, "window": self.window}
        if scope is None:
            padding = keys_mask(x, padding_mask, "padding_mask")
            rules["masks"] = padding, self._explicit(attention_mask, x, x)
            rules["segments"] = segment_ids, segment_ids
        elif attention_mask is not None:
            raise ValueError("A causal layer takes no `attention_mask` inside a `DecodingScope`; got one.")
        else:
            # padding stands behind a row's tokens, where nobody looks, and what is written is one segment
            cached = scope.append(self, key, value, self.window)
            if cached is not None:
                key, value, visible, distances = cached
                rules = {"masks": (visible,), "bias": self._bias(distances), "cached": True}
                return self._attend(query, key, value, return_attention_scores, training, **rules)
        rules["distance_bias"] = self._bias(ops.arange(2 * length - 1, dtype="int32") - (length - 1))
        return self._attend(query, key, value, return_attention_scores, training, **rules)

    def _bias(self, distances):
        """Of distances `[R, T, S]`: float32 `[R, N, T, S]`; of distances `[D]`: `[N, D]`; None if there is no bias."""
        if self.distance_bias is None:
            return None
        bias = self.distance_bias(distances)
        return bias if len(bias.shape) == 2 else ops.swapaxes(bias, 0, 1)

    def get_config(self):
        own = {"causal": self.causal, "position": self.position, "window": self.window}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="keras_transformer")
class MultiHeadCrossAttention(HeadsLayer):
    """Each token attends to the tokens of another sequence, the context, in several heads.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.2.3. Queries come from `x`, keys and values from
    `context`, whose width may differ. The Keras mask of the context is used as its padding mask; that of `x` is passed
    on. In a `DecodingScope` the keys and values of the context are computed in the first call and kept.

    Args: as `MultiHeadSelfAttention`, but for `causal`, `position` and `window`.

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

    is_cross = True

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
            return self._heads("key", context), self._heads("value", context)

        scope = DecodingScope.current()
        key, value = keys_and_values() if scope is None else scope.keep(self, keys_and_values)
        rules = {
            "masks": (
                keys_mask(context, context_padding_mask, "context_padding_mask"),
                self._explicit(attention_mask, x, context),
            ),
            "segments": (segment_ids, context_segment_ids),
            "cached": scope is not None,
        }
        return self._attend(self._heads("query", x), key, value, return_attention_scores, training, **rules)
