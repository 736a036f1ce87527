"""What `compile` takes: a loss, metrics and a schedule that count tokens, not padding.

Padding is taken from the labels, whatever happened to masks on the way. Letters: `B` batch, `T` tokens, `V` vocabulary.
"""

import keras
from keras import ops
from keras.src.losses.loss import scale_loss_for_distribution  # what Keras's own means do; 1 without replicas

from keras_transformer.checks import check_count
from keras_transformer.crossentropy import check_tokens, token_losses

register = keras.saving.register_keras_serializable(package="keras_transformer")


def _weighted(real, sample_weight):
    """The weight of each token: `real` times `sample_weight`, which is `[B]` or `[B, T]`."""
    if sample_weight is None:
        return real
    weight = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
    if len(weight.shape) not in (1, 2):
        raise ValueError(f"`sample_weight` must be of shape [B] or [B, T]; got {tuple(weight.shape)}.")
    return real * (weight[:, None] if len(weight.shape) == 1 else weight)


@register
class TokenCrossentropy(keras.losses.Loss):
    """Cross-entropy of integer labels, averaged over the real tokens of a batch.

    With `divisor` it is the sum over tokens divided by that fixed number instead, such as the token budget of a batch:
    then it is linear in the tokens, and gradient accumulation and several replicas give the big batch's gradient, also
    when they hold different numbers of tokens. Replicas add their gradients up: give the big batch's divisor. Keras
    divides accumulated gradients by the number of micro-batches: give the big batch's divisor over that number.

    The `loss` that Keras logs over an epoch averages batches by rows; `TokenLoss` does so by tokens.

    Args:
        label_smoothing: float in [0, 1), weight of the uniform distribution over the vocabulary.
        pad_id: int, the label of padding.
        divisor: number above 0, or None for the number of real tokens (their weights, given `sample_weight`).
        name: str.

    Call arguments:
        y_true: integer tensor `[B, T]`, labels.
        y_pred: float tensor `[B, T, V]`, logits of any float dtype; computed in float32. Or `[B, T]`, cross-entropies
            already, as a `loss_model` gives them; these are averaged as they are.
        sample_weight: float tensor `[B]` or `[B, T]`.

    Returns:
        float32 scalar; 0 for a batch of padding.

    Raises:
        ValueError: if labels and logits do not fit each other, or on arguments out of range.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    loss = kt.TokenCrossentropy(label_smoothing=0.1)
    value = loss(np.array([[4, 3, 0]]), np.zeros((1, 3, 8), "float32"))
    np.testing.assert_allclose(value, np.log(8), rtol=1e-6)
    ```
    """

    def __init__(self, label_smoothing=0.0, pad_id=0, divisor=None, name="token_crossentropy", **kwargs):
        super().__init__(name=name, **kwargs)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"`label_smoothing` must be at least 0 and below 1; got {label_smoothing!r}.")
        if divisor is not None and not divisor > 0:
            raise ValueError(f"`divisor` must be above 0; got {divisor!r}.")
        self.label_smoothing = float(label_smoothing)
        self.pad_id = int(pad_id)
        self.divisor = None if divisor is None else float(divisor)

    def __call__(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        losses, real = token_losses(y_true, y_pred, self.label_smoothing, self.pad_id)
        weights = _weighted(real, sample_weight)
        total = ops.sum(losses * weights)
        if self.divisor is not None:
            return total / self.divisor
        return scale_loss_for_distribution(ops.divide_no_nan(total, ops.sum(weights)))

    def get_config(self):
        own = {"label_smoothing": self.label_smoothing, "pad_id": self.pad_id, "divisor": self.divisor}
        return {**super().get_config(), **own}


class _TokenMean(keras.metrics.Mean):
    """The mean of something over the real tokens since the last reset, however they were batched."""

    def __init__(self, pad_id=0, name=None, dtype=None):
        super().__init__(name=name or self.default_name, dtype=dtype)
        self.pad_id = int(pad_id)

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        values, real = self.values(y_true, y_pred)
        weights = _weighted(real, sample_weight)
        # one axis: of two Keras takes the mean along the second first, and would count tokens per padded length
        return super().update_state(ops.reshape(values, (-1,)), sample_weight=ops.reshape(weights, (-1,)))

    def values(self, labels, logits):
        """(value of each token, 1 at real tokens and 0 at padding)."""
        return token_losses(labels, logits, pad_id=self.pad_id)

    def get_config(self):
        return {**super().get_config(), "pad_id": self.pad_id}


@register
class TokenLoss(_TokenMean):
    """Mean cross-entropy a token, in nats, without smoothing, over all real tokens since the epoch began.

    Args:
        pad_id: int, the label of padding.
        name: str.
        dtype: dtype of the sums.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    metric = kt.TokenLoss()
    metric.update_state(np.array([[4, 0]]), np.zeros((1, 2, 8), "float32"))
    np.testing.assert_allclose(metric.result(), np.log(8), rtol=1e-6)
    ```
    """

    default_name = "token_loss"


@register
class Perplexity(_TokenMean):
    """The exponential of `TokenLoss`: among how many equally likely tokens the model is as unsure as it is.

    Args:
        pad_id: int, the label of padding.
        name: str.
        dtype: dtype of the sums.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    metric = kt.Perplexity()
    metric.update_state(np.array([[4, 0]]), np.zeros((1, 2, 8), "float32"))
    np.testing.assert_allclose(metric.result(), 8, rtol=1e-5)
    ```
    """

    default_name = "perplexity"

    def result(self):
        return ops.exp(super().result())


@register
class TokenAccuracy(_TokenMean):
    """The share of real tokens whose label has the highest logit.

    Args:
        pad_id: int, the label of padding.
        name: str.
        dtype: dtype of the sums.

    Example:
    ```python
    import numpy as np
    import keras_transformer as kt
    metric = kt.TokenAccuracy()
    metric.update_state(np.array([[1, 2, 0]]), np.eye(3, dtype="float32")[None, [1, 1, 1]])
    assert metric.result() == 0.5
    ```
    """

    default_name = "token_accuracy"

    def values(self, labels, logits):
        check_tokens(labels, logits, ranks=(3,))
        hits = ops.equal(ops.cast(ops.argmax(logits, axis=-1), labels.dtype), labels)
        return ops.cast(hits, "float32"), ops.cast(ops.not_equal(labels, self.pad_id), "float32")


@register
class WarmupInverseSqrt(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly for `warmup_steps`, then falls with the inverse square root of the step.

    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 5.3:
    `scale * d_model ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5)`. Keras counts steps from 0; step 0 gets
    the rate of step 1, so that the first batch counts too. With gradient accumulation over `k` batches Keras counts
    each of them as a step: give `k * warmup_steps` and `k**0.5 * scale` for nearly the same rates.

    Args:
        d_model: int, width of the model.
        warmup_steps: int, the step of the highest rate.
        scale: number above 0, a factor on the paper's rate.

    Call arguments:
        step: Python, NumPy or tensor number or vector, integer or float.

    Returns:
        float32 tensor, the rate at `step`.

    Example:
    ```python
    import keras
    import numpy as np
    import keras_transformer as kt
    optimizer = keras.optimizers.Adam(kt.WarmupInverseSqrt(512), beta_2=0.98, epsilon=1e-9)
    np.testing.assert_allclose(kt.WarmupInverseSqrt(512)(4000), 512**-0.5 * 4000**-0.5, rtol=1e-6)
    ```
    """

    def __init__(self, d_model, warmup_steps=4000, scale=1.0):
        self.d_model = check_count("d_model", d_model)
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        if not scale > 0:
            raise ValueError(f"`scale` must be above 0; got {scale!r}.")
        self.scale = float(scale)

    def __call__(self, step):
        step = ops.maximum(ops.cast(ops.convert_to_tensor(step), "float32"), 1.0)
        rate = ops.minimum(ops.rsqrt(step), step * self.warmup_steps**-1.5)
        return self.scale * self.d_model**-0.5 * rate

    def get_config(self):
        return {"d_model": self.d_model, "warmup_steps": self.warmup_steps, "scale": self.scale}
