"""Token ids to vectors, and vectors back to logits: "Attention Is All You Need", section 3.4.

Letters: `B` batch, `T` tokens, `D` width, `V` vocabulary.
"""

import math

import keras
from keras import ops

from keras_transformer.checks import check_count, check_integers, check_rate, check_vectors
from keras_transformer.crossentropy import linear_crossentropy


@keras.saving.register_keras_serializable(package="keras_transformer")
class TokenEmbedding(keras.layers.ReversibleEmbedding):
    """Token ids to vectors scaled by `sqrt(d_model)`; in reverse, vectors to logits with the same table.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.4; tying: Press and Wolf 2016,
    https://arxiv.org/abs/1608.05859. The table starts normal with standard deviation `d_model ** -0.5`, so that vectors
    and logits start with a variance near 1. Its gradient is dense, so that an optimizer step does not depend on how
    often a token occurs (with `keras.layers.Embedding` on TensorFlow, Adam adds one step for each occurrence). The
    table is read in its own dtype and cast last.

    Args:
        vocab_size: int, `V`.
        d_model: int, `D`.
        mask_zero: bool, whether id 0 is padding: the output then carries the Keras mask `ids != 0`.
        **kwargs: what `keras.layers.ReversibleEmbedding` takes beyond (`embeddings_initializer`,
            `embeddings_regularizer`, `tie_weights`, `reverse_dtype`, `logit_soft_cap`, `name`, `dtype`, ...).

    Call arguments:
        x: integer tensor `[B, T]` with values in `[0, V)`; in reverse, float tensor `[B, T, D]`.
        reverse: bool, whether to map vectors to logits.
        labels: integer tensor `[B, T]`: vectors are mapped to the cross-entropy of these labels, a block of tokens at a
            time, without holding all logits (`linear_crossentropy`). It is NaN for padding and for
            ids outside `[0, V)`.
        label_smoothing: float in [0, 1), weight of the uniform distribution over the vocabulary in training.
        pad_id: int, the label of padding, which costs no time; None if there is none.
        training: bool, whether labels are smoothed.

    Returns:
        float tensor `[B, T, D]`; in reverse `[B, T, V]`; with labels float32 `[B, T]`.

    Raises:
        ValueError: on sizes below 1 and on ids that are not integers.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    embedding = kt.TokenEmbedding(vocab_size=100, d_model=16)
    vectors = embedding(np.array([[4, 7, 0]]))
    logits = embedding(vectors, reverse=True)
    assert vectors.shape == (1, 3, 16) and logits.shape == (1, 3, 100)
    ```
    """

    def __init__(self, vocab_size: int, d_model: int, mask_zero: bool = True, **kwargs):
        vocab_size, d_model = check_count("vocab_size", vocab_size), check_count("d_model", d_model)
        kwargs.setdefault("embeddings_initializer", keras.initializers.RandomNormal(stddev=d_model**-0.5))
        super().__init__(vocab_size, d_model, mask_zero=mask_zero, **kwargs)
        self.supports_masking = True  # in reverse it passes the mask of the vectors on

    def call(self, x, reverse=False, labels=None, label_smoothing=0.0, pad_id=None, training=None):
        if labels is not None:
            return self._crossentropy(x, labels, label_smoothing if training else 0.0, pad_id)
        if reverse:
            return self._logits(x)
        dtype = keras.backend.standardize_dtype(x.dtype)
        if not keras.backend.is_int_dtype(dtype):
            raise ValueError(f"Token ids must be integers; got {dtype}.")
        # TensorFlow gathers by few types. Keras counts a negative id from the end: beyond it, it is refused as others.
        ids = x if dtype in ("int32", "int64") else ops.cast(x, "int32")
        ids = ops.where(ids < 0, ops.cast(self.input_dim, ids.dtype), ids)
        # Keras does not autocast here: the sum of the gradient over a token's occurrences is in the table's dtype.
        # TensorFlow's gradient of a gather is a list of slices, which Keras's optimizers do not add up first: through
        # the reshape, which changes nothing, it becomes a dense tensor.
        table = ops.reshape(self.embeddings, (self.input_dim, self.output_dim))
        return ops.cast(ops.take(table, ids, axis=0) * math.sqrt(self.output_dim), self.compute_dtype)

    def _logits(self, x):
        dtype = self.reverse_dtype or self.compute_dtype
        flat = ops.reshape(ops.cast(x, dtype), (-1, self.output_dim))  # one product of all rows, as `project`
        logits = ops.reshape(ops.matmul(flat, ops.cast(self._kernel(), dtype)), (*ops.shape(x)[:-1], self.input_dim))
        cap = self.logit_soft_cap
        return logits if cap is None else ops.tanh(logits / cap) * cap

    def _crossentropy(self, x, labels, label_smoothing, pad_id):
        check_vectors("x", x)
        check_integers("labels", labels, x.shape[1])
        if self.logit_soft_cap is not None:
            raise ValueError(f"Labels are for a layer without `logit_soft_cap`; got {self.logit_soft_cap}.")
        dtype = self.reverse_dtype or self.compute_dtype
        labels = ops.cast(labels, "int32")
        real = ops.logical_and(labels >= 0, labels < self.input_dim)
        if pad_id is not None:
            real = ops.logical_and(real, ops.not_equal(labels, pad_id))
        losses = linear_crossentropy(
            ops.reshape(ops.cast(x, dtype), (-1, self.output_dim)),
            ops.cast(self._kernel(), dtype),
            ops.reshape(ops.where(real, labels, 0), (-1,)),
            ops.reshape(real, (-1,)),
            check_rate("label_smoothing", label_smoothing),
        )
        return ops.where(real, ops.reshape(losses, ops.shape(labels)), float("nan"))

    def _kernel(self):
        return ops.transpose(self.embeddings) if self.tie_weights else self.reverse_embeddings  # [D, V]

    def quantize(self, mode=None, type_check=True, config=None):
        super().quantize(mode, type_check=False, config=config)

    def quantized_call(self, x, reverse=False, labels=None, label_smoothing=0.0, pad_id=None, training=None):
        if labels is not None:
            raise ValueError(f"Labels are for a layer that can be trained; got one in {self.quantization_mode}.")
        y = super().quantized_call(x, reverse=reverse)
        return y if reverse else y * math.sqrt(self.output_dim)

    def compute_output_spec(self, x, reverse=False, labels=None, label_smoothing=0.0, pad_id=None, training=None):
        if labels is not None:
            return keras.KerasTensor(labels.shape, dtype="float32")
        return super().compute_output_spec(x, reverse=reverse)

    def compute_mask(self, x, previous_mask=None):
        is_ids = keras.backend.is_int_dtype(x.dtype)
        return ops.not_equal(x, 0) if is_ids and self.mask_zero else previous_mask

    def get_config(self):
        config = super().get_config()
        own = {"vocab_size": config.pop("input_dim"), "d_model": config.pop("output_dim")}
        return {**config, **own}
