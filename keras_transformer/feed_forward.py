"""The feed-forward layer of each block: "Attention Is All You Need", section 3.3, and its gated form.

Letters: `B` batch, `T` tokens, `D` width.
"""

import keras

from keras_transformer.checks import activation_named, check_activation, check_count, check_rate, check_vectors
from keras_transformer.heads import project
from keras_transformer.noise import Dropout
from keras_transformer.policies import saved_policy


@keras.saving.register_keras_serializable(package="keras_transformer")
class FeedForward(keras.layers.Layer):
    """Two dense layers with an activation between, the same at every position: `W2 activation(W1 x)`.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.3; gated: Shazeer 2020,
    https://arxiv.org/abs/2002.05202. The output has the width of the input, whose Keras mask is passed on.

    Args:
        intermediate_dim: int, width between the two layers.
        activation: str, name of a Keras activation, or `"gelu_tanh"` for GELU's approximation.
        gated: bool, whether the activation is multiplied by a third projection of `x` (with `"gelu"` GEGLU, with
            `"silu"` SwiGLU).
        dropout: float in [0, 1), dropout between the two layers.
        use_bias: bool, whether the dense layers have biases.

    Call arguments:
        x: float tensor `[B, T, D]`.
        training: bool, whether dropout acts.

    Returns:
        float tensor `[B, T, D]`.

    Raises:
        ValueError: on sizes below 1, a rate outside [0, 1) or an activation that Keras does not know.

    Example:
    ```python
    import keras
    import keras_transformer as kt
    y = kt.FeedForward(intermediate_dim=64, activation="silu", gated=True)(keras.ops.ones((2, 3, 16)))
    assert y.shape == (2, 3, 16)
    ```
    """

    def __init__(
        self,
        intermediate_dim: int,
        activation: str = "relu",
        gated: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.intermediate_dim = check_count("intermediate_dim", intermediate_dim)
        self.activation = check_activation(activation)
        self.gated = bool(gated)
        self.dropout = check_rate("dropout", dropout)
        self.use_bias = bool(use_bias)
        self.supports_masking = True

    def build(self, input_shape):
        self.inner = self._dense(self.intermediate_dim, input_shape, "inner")
        if self.gated:
            self.gate = self._dense(self.intermediate_dim, input_shape, "gate")
        inner_shape = (*input_shape[:-1], self.intermediate_dim)
        self.output_projection = self._dense(input_shape[-1], inner_shape, "output")
        self.dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy)

    def _dense(self, features, shape, name):
        dense = keras.layers.Dense(features, use_bias=self.use_bias, dtype=self.dtype_policy, name=name)
        dense.build(shape)
        return dense

    def call(self, x, training=None):
        check_vectors("x", x)
        hidden = activation_named(self.activation)(project(self.inner, x))  # [B, T, intermediate_dim]
        if self.gated:
            hidden = hidden * project(self.gate, x)
        return project(self.output_projection, self.dropout_layer(hidden, training=training))

    def get_config(self):
        names = ("intermediate_dim", "activation", "gated", "dropout", "use_bias")
        own = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **own, "dtype": saved_policy(self)}
