"""Where a token stands: the sinusoids of "Attention Is All You Need", section 3.5.

Letters: `B` batch, `T` tokens, `D` width.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_transformer.checks import check_rate, check_vectors
from keras_transformer.scopes import DecodingScope


def sinusoid(positions, width: int, max_wavelength: float = 10000, layout: str = "concatenated"):
    """Sines and cosines of positions, at wavelengths that grow geometrically from 2 pi to `max_wavelength` * 2 pi.

    Pair `i` of a width `D` turns by `max_wavelength ** (-2 i / D)` radians a position.

    Args:
        positions: int tensor of any shape.
        width: int, `D`, odd or even.
        max_wavelength: the slowest pair's wavelength is near `2 pi max_wavelength` positions.
        layout: `"concatenated"`, all sines then all cosines (Tensor2Tensor), or `"interleaved"`, the paper's formula:
            sine in the even and cosine in the odd columns.

    Returns:
        float32 tensor, the shape of `positions` with `[D]` behind, within 1e-5 of the exact value to position 10,000.
    """
    pairs = (width + 1) // 2
    turns = float(max_wavelength) ** (-2 * np.arange(pairs) / width) / (2 * math.pi)
    # The angle as a 32-bit fraction of a turn: integers wrap around, so whole turns drop out and far positions keep
    # their precision. position * frequency in float32 is off by 4e-4 at 5,000.
    steps = np.round(turns * 2.0**32).astype(np.int64).astype(np.int32)
    phase = ops.cast(positions, "int32")[..., None] * steps  # [..., pairs]
    angle = ops.cast(phase, "float32") * (2 * math.pi / 2.0**32)
    sines, cosines = ops.sin(angle), ops.cos(angle)
    if layout == "concatenated":
        return ops.concatenate([sines, cosines[..., : width // 2]], axis=-1)
    columns = ops.stack([sines, cosines], axis=-1)  # [..., pairs, 2]
    return ops.reshape(columns, (*ops.shape(angle)[:-1], 2 * pairs))[..., :width]


@keras.saving.register_keras_serializable(package="keras_transformer")
class PositionalEncoding(keras.layers.Layer):
    """Adds the sinusoidal position of each token to its vector: `x + encoding`.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5. Nothing is learned and no table is kept, so any
    length and width work, also lengths beyond those seen in training. The sinusoids are computed in float32 whatever
    the dtype policy and cast last. The Keras mask of `x` is passed on.

    Args:
        max_wavelength: number above 0; see `sinusoid`.
        layout: `"concatenated"` (sines in the first half, cosines in the second) or `"interleaved"` (the paper's).
        dropout: float in [0, 1), dropout on the sum (the paper's section 5.4).

    Call arguments:
        x: float tensor `[B, T, D]`, token embeddings, already scaled (`TokenEmbedding` does it).
        training: bool, whether dropout acts.

    Returns:
        float tensor `[B, T, D]`.

    Raises:
        ValueError: on an unknown layout, a rate outside [0, 1) or input that is not `[B, T, D]` floats.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    x = keras.ops.zeros((1, 3, 4))
    encoded = kt.PositionalEncoding()(x)
    np.testing.assert_allclose(encoded[0, 1], [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01)], atol=1e-6)
    ```
    """

    def __init__(self, max_wavelength: float = 10000, layout: str = "concatenated", dropout: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        if layout not in ("concatenated", "interleaved"):
            raise ValueError(f"`layout` must be 'concatenated' or 'interleaved'; got {layout!r}.")
        if not max_wavelength > 0:
            raise ValueError(f"`max_wavelength` must be above 0; got {max_wavelength!r}.")
        self.max_wavelength = float(max_wavelength)
        self.layout = layout
        self.dropout = check_rate("dropout", dropout)
        self.supports_masking = True

    def build(self, input_shape):
        self.dropout_layer = keras.layers.Dropout(self.dropout, dtype=self.dtype_policy)

    def call(self, x, training=None):
        check_vectors("x", x)
        scope = DecodingScope.current()
        num_tokens = ops.shape(x)[1]
        positions = ops.arange(num_tokens, dtype="int32")[None] if scope is None else scope.positions(num_tokens)
        encoding = sinusoid(positions, x.shape[-1], self.max_wavelength, self.layout)  # [1 or B, T, D]
        return self.dropout_layer(x + ops.cast(encoding, x.dtype), training=training)

    def get_config(self):
        own = {"max_wavelength": self.max_wavelength, "layout": self.layout, "dropout": self.dropout}
        return {**super().get_config(), **own}
