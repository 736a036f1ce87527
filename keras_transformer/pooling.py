"""One vector out of a sequence's: by its mean, its first or last token, or by attention.

Letters: `B` batch, `T` tokens, `D` width.
"""

import keras
from keras import ops
from keras.src.backend import get_keras_mask

from keras_transformer.checks import check_vectors
from keras_transformer.masks import check_mask, combine_masks
from keras_transformer.scoring import MASKED_SCORE

METHODS = ("mean", "first", "last", "attention")


@keras.saving.register_keras_serializable(package="keras_transformer")
class Pooling(keras.layers.Layer):
    """A sequence's vectors to one vector, padding left out; of padding alone it is 0.

    Args:
        method: `"mean"` of the tokens; the `"first"` or the `"last"` token's vector; `"attention"`, a mean with weights
            that are the softmax of a learned projection of each vector (Lin et al. 2017,
            https://arxiv.org/abs/1703.03130, with one head and no inner layer).

    Call arguments:
        x: float tensor `[B, T, D]`.
        padding_mask: bool or integer tensor `[B, T]`, non-zero for real tokens; ANDed with the Keras mask of `x`.

    Returns:
        float tensor `[B, D]`. Sums are in float32.

    Raises:
        ValueError: on an unknown method; on input that is not `[B, T, D]` floats and masks that do not fit it.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    x = np.array([[[1.0, 2.0], [3.0, 6.0], [9.0, 9.0]]], "float32")
    pooled = kt.Pooling("mean")(x, padding_mask=np.array([[1, 1, 0]]))
    assert np.array(pooled).tolist() == [[2.0, 4.0]]
    ```
    """

    def __init__(self, method: str = "mean", **kwargs):
        super().__init__(**kwargs)
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {list(METHODS)}; got {method!r}.")
        self.method = method
        self.supports_masking = True  # the mask is used up: see `compute_mask`

    def build(self, input_shape):
        if self.method == "attention":
            self.score = keras.layers.Dense(1, use_bias=False, dtype=self.dtype_policy, name="score")
            self.score.build(input_shape)

    def call(self, x, padding_mask=None):
        check_vectors("x", x)
        if padding_mask is not None:
            padding_mask = check_mask("padding_mask", padding_mask, ("B", x.shape[1]))
        mask = combine_masks(get_keras_mask(x), padding_mask)
        mask = ops.ones(ops.shape(x)[:2], "bool") if mask is None else mask
        weights = ops.cast(self._weights(x, mask), "float32")
        return ops.cast(ops.einsum("bt,btd->bd", weights, ops.cast(x, "float32")), x.dtype)

    def _weights(self, x, mask):
        """What each token counts for: `[B, T]`."""
        place = ops.arange(ops.shape(x)[1], dtype="int32")
        if self.method == "mean":
            real = ops.cast(mask, "float32")
            return real / ops.maximum(ops.sum(real, axis=1, keepdims=True), 1.0)
        if self.method == "attention":
            scores = ops.where(mask, ops.cast(self.score(x)[..., 0], "float32"), MASKED_SCORE)
            exponentials = ops.exp(scores - ops.max(scores, axis=1, keepdims=True, initial=MASKED_SCORE))
            real = exponentials * ops.cast(mask, "float32")
            return real / ops.maximum(ops.sum(real, axis=1, keepdims=True), 1e-30)
        if self.method == "first":
            chosen = ops.min(ops.where(mask, place, 2**30), axis=1, keepdims=True, initial=2**30)
        else:
            chosen = ops.max(ops.where(mask, place, -1), axis=1, keepdims=True, initial=-1)
        return ops.logical_and(place == chosen, mask)

    def compute_mask(self, x, previous_mask=None):
        return None

    def get_config(self):
        return {**super().get_config(), "method": self.method}
