"""The blocks of the Transformer: "Attention Is All You Need", section 3.1, and its pre-norm form.

Letters: `B` batch, `T` tokens, `S` tokens of the context, `D` width, `C` width of the context.
"""

import inspect

import keras
from keras.src.backend import set_keras_mask

from keras_transformer.checks import check_activation, check_count, check_options, check_rate, check_vectors
from keras_transformer.feed_forward import FeedForward
from keras_transformer.masks import padding_of
from keras_transformer.multi_head import MultiHeadCrossAttention, MultiHeadSelfAttention
from keras_transformer.noise import Dropout
from keras_transformer.policies import saved_policy
from keras_transformer.remat import rematerialized


@keras.saving.register_keras_serializable(package="keras_transformer")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` that passes masks on; Keras's drops them with a warning."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True


NORMALIZATIONS = {"layer": keras.layers.LayerNormalization, "rms": RMSNormalization}


class _Block(keras.layers.Layer):
    """What both blocks share: their arguments, their children and the residual connection around each child."""

    is_causal = False

    def __init__(
        self,
        num_heads: int,
        intermediate_dim: int,
        dropout: float = 0.1,
        activation: str = "relu",
        norm_first: bool = False,
        use_bias: bool = True,
        epsilon: float = 1e-6,
        normalization: str = "layer",
        attention: dict | None = None,
        feed_forward: dict | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = check_count("num_heads", num_heads)
        self.intermediate_dim = check_count("intermediate_dim", intermediate_dim)
        self.dropout = check_rate("dropout", dropout)
        self.activation = check_activation(activation)
        self.norm_first = bool(norm_first)
        self.use_bias = bool(use_bias)
        self.epsilon = float(epsilon)
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"`normalization` must be one of {list(NORMALIZATIONS)}; got {normalization!r}.")
        self.normalization = normalization
        self.attention = check_options("attention", attention, MultiHeadSelfAttention, num_heads, causal=self.is_causal)
        self.feed_forward = check_options("feed_forward", feed_forward, FeedForward, intermediate_dim, activation)
        self.supports_masking = True

    def _build_attention(self, name, cls, *shapes, **options):
        of_self = ("position", "window") if cls is MultiHeadCrossAttention else ()  # a context has no positions here
        attention = {option: value for option, value in self.attention.items() if option not in of_self}
        child = cls(
            self.num_heads,
            **{"use_bias": self.use_bias, **attention, **options},
            dtype=self.dtype_policy,
            name=name,
        )
        child.build(*shapes)
        setattr(self, name, child)
        self._build_residual(name, shapes[0])

    def _build_feed_forward(self, shape):
        self.feed_forward_layer = FeedForward(
            self.intermediate_dim,
            self.activation,
            **{"use_bias": self.use_bias, **self.feed_forward},
            dtype=self.dtype_policy,
            name="feed_forward",
        )
        self.feed_forward_layer.build(shape)
        self._build_residual("feed_forward", shape)

    def _build_residual(self, name, shape):
        norm = NORMALIZATIONS[self.normalization](epsilon=self.epsilon, dtype=self.dtype_policy, name=f"{name}_norm")
        norm.build(shape)
        dropout = Dropout(self.dropout, dtype=self.dtype_policy, name=f"{name}_dropout")
        setattr(self, f"{name}_norm", norm)
        setattr(self, f"{name}_dropout", dropout)

    def _residual(self, name, x, sublayer, training):
        """The paper's `norm(x + dropout(sublayer(x)))`, or pre-norm `x + dropout(sublayer(norm(x)))`."""
        norm, dropout = getattr(self, f"{name}_norm"), getattr(self, f"{name}_dropout")
        if self.norm_first:
            return x + dropout(sublayer(norm(x)), training=training)
        return norm(x + dropout(sublayer(x), training=training))

    def rematerialized_call(self, layer_call, *args, **kwargs):
        return layer_call  # `call` does it itself: see remat.py

    def get_config(self):
        names = [name for name in inspect.signature(_Block.__init__).parameters if name not in ("self", "kwargs")]
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own, "dtype": saved_policy(self)}


@keras.saving.register_keras_serializable(package="keras_transformer")
class EncoderBlock(_Block):
    """Self-attention and feed-forward, each in a residual connection with dropout and layer normalization.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1; pre-norm: Xiong et al. 2020,
    https://arxiv.org/abs/2002.04745. The Keras mask of `x` is used as a padding mask, left as it is and passed on (an
    explicit `padding_mask` too). A pre-norm stack needs a normalization behind its last block.

    Args:
        num_heads: int, number of attention heads.
        intermediate_dim: int, inner width of the feed-forward layer.
        dropout: float in [0, 1), dropout on the output of each sublayer.
        activation: str, name of a Keras activation.
        norm_first: bool, whether normalization stands before each sublayer (pre-norm) or, as in the paper, after its
            residual connection.
        use_bias: bool, whether dense layers have biases.
        epsilon: float, epsilon of the normalizations.
        normalization: `"layer"` (Ba et al. 2016, https://arxiv.org/abs/1607.06450) or `"rms"`, by the root mean square
            alone (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467).
        attention: dict of options of the attention layers, the arguments of `MultiHeadSelfAttention`: `key_dim`,
            `dropout` (on the weights), `use_bias`, `num_kv_heads`, `position`, `window`, `soft_cap`, `qk_norm`,
            `kernel`. Cross-attention takes all but `position` and `window`.
        feed_forward: dict of options of the `FeedForward`: `gated`, `dropout` (between its layers), `use_bias`.

    Call arguments:
        x: float tensor `[B, T, D]`.
        padding_mask: bool or integer tensor `[B, T]`, non-zero for real tokens.
        attention_mask: bool or integer tensor, non-zero where a query may look: `[T, T]`, `[B, T, T]`,
            `[B, 1, T, T]` or `[B, N, T, T]`.
        segment_ids: integer tensor `[B, T]` where a row is packed of several sequences: the number of each token's; a
            token looks at its own only.
        training: bool, whether dropout acts.

    Returns:
        float tensor `[B, T, D]`.

    Raises:
        ValueError: on wrong sizes, rates, names or options; otherwise as `MultiHeadSelfAttention`.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    source = keras.Input((None,), dtype="int32")
    x = kt.TokenEmbedding(vocab_size=100, d_model=16)(source)
    x = kt.PositionalEncoding()(x)
    x = kt.EncoderBlock(num_heads=2, intermediate_dim=32)(x)
    encoder = keras.Model(source, x)
    assert encoder(np.array([[4, 7, 0]])).shape == (1, 3, 16)
    ```
    """

    def build(self, input_shape):
        with keras.RematScope(mode=None):  # the block as a whole
            self._build_attention("self_attention", MultiHeadSelfAttention, input_shape)
            self._build_feed_forward(input_shape)

    def call(self, x, padding_mask=None, attention_mask=None, segment_ids=None, training=None):
        check_vectors("x", x)
        padding_mask = padding_of(x, padding_mask, "padding_mask")

        def attend(y):
            return self.self_attention(y, padding_mask, attention_mask, segment_ids, training=training)

        def run(x):
            x = self._residual("self_attention", x, attend, training)
            return self._residual("feed_forward", x, lambda y: self.feed_forward_layer(y, training=training), training)

        x = rematerialized(self, run, x)
        set_keras_mask(x, padding_mask)
        return x


@keras.saving.register_keras_serializable(package="keras_transformer")
class DecoderBlock(_Block):
    """Causal self-attention, cross-attention to a context if there is one, and feed-forward, each in its residual.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1; pre-norm: Xiong et al. 2020,
    https://arxiv.org/abs/2002.04745. Without `context` it is a block of a language model and has no cross-attention.
    Keras masks of `x` and `context` are used as padding masks, left as they are, and that of `x` is passed on (an
    explicit `padding_mask` too). In a `DecodingScope` it continues from its cache. A pre-norm stack needs a
    normalization behind its last block.

    Args: as `EncoderBlock`.

    Call arguments:
        x: float tensor `[B, T, D]`.
        context: float tensor `[B, S, C]`, what an encoder returned; None for no cross-attention.
        padding_mask: bool or integer tensor `[B, T]`, non-zero for real tokens of `x`.
        context_padding_mask: bool or integer tensor `[B, S]`, non-zero for real tokens of the context.
        attention_mask: bool or integer tensor, non-zero where a query of the self-attention may look, beside the lower
            triangle: `[T, T]`, `[B, T, T]`, `[B, 1, T, T]` or `[B, N, T, T]`.
        segment_ids, context_segment_ids: integer tensors `[B, T]` and `[B, S]` where rows are packed of several pairs:
            a token looks at the segments of its own number only.
        training: bool, whether dropout acts.

    Returns:
        float tensor `[B, T, D]`.

    Raises:
        ValueError: as `EncoderBlock`; if it was built with a context and is called without one, or the other way
            round; on masks or segments of a context without one.

    Example:
    ```python
    import keras
    import keras_transformer as kt
    x, memory = keras.random.normal((2, 3, 16)), keras.random.normal((2, 5, 16))
    assert kt.DecoderBlock(num_heads=2, intermediate_dim=32)(x, memory).shape == (2, 3, 16)
    ```
    """

    is_causal = True

    def build(self, x_shape, context_shape=None):
        with keras.RematScope(mode=None):  # the block as a whole
            self._build_attention("self_attention", MultiHeadSelfAttention, x_shape, causal=self.is_causal)
            if context_shape is not None:
                self._build_attention("cross_attention", MultiHeadCrossAttention, x_shape, context_shape)
            self._build_feed_forward(x_shape)

    def call(
        self,
        x,
        context=None,
        padding_mask=None,
        context_padding_mask=None,
        attention_mask=None,
        segment_ids=None,
        context_segment_ids=None,
        training=None,
    ):
        check_vectors("x", x)
        has_context = hasattr(self, "cross_attention")
        if has_context != (context is not None):
            built, called = ("with", "without") if has_context else ("without", "with")
            raise ValueError(f"A DecoderBlock built {built} `context` is called {built} one; got a call {called} one.")
        padding_mask = padding_of(x, padding_mask, "padding_mask")
        if has_context:
            context_padding_mask = padding_of(context, context_padding_mask, "context_padding_mask")
        elif context_padding_mask is not None or context_segment_ids is not None:
            raise ValueError("Masks and segments of a context need the context; got them without one.")
        segments = {"segment_ids": segment_ids, "context_segment_ids": context_segment_ids}

        def attend(y):
            return self.self_attention(y, padding_mask, attention_mask, segment_ids, training=training)

        def run(x, *context):
            def attend_context(y):
                return self.cross_attention(y, *context, context_padding_mask, **segments, training=training)

            x = self._residual("self_attention", x, attend, training)
            x = self._residual("cross_attention", x, attend_context, training) if has_context else x
            return self._residual("feed_forward", x, lambda y: self.feed_forward_layer(y, training=training), training)

        x = rematerialized(self, run, x, *([context] if has_context else []))
        set_keras_mask(x, padding_mask)
        return x
