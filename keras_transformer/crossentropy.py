"""Cross-entropy of each token, from logits or, a block of tokens at a time, from the vectors behind them.

Letters: `B` batch, `T` tokens, `M` all tokens of a batch, `C` tokens of a block, `D` width, `V` vocabulary.
"""

import math

import keras
from keras import ops

from keras_transformer.loops import each

BLOCK = 2**22  # logits of a block, at most: 16 MB in float32, which stay near the processor


def token_losses(labels, logits, label_smoothing=0.0, pad_id=0):
    """Cross-entropy of each token, in float32.

    With smoothing the target distribution is `(1 - label_smoothing) one_hot(label) + label_smoothing / V` (Szegedy et
    al. 2016, https://arxiv.org/abs/1512.00567).

    Args:
        labels: integer tensor `[B, T]`.
        logits: float tensor `[B, T, V]`; or `[B, T]`, cross-entropies already, as `loss_model` gives them.
        label_smoothing: float in [0, 1).
        pad_id: int, the label of padding, also outside `[0, V)`.

    Returns:
        (losses float32 `[B, T]`, 0 at padding; real float32 `[B, T]`, 1 at real tokens and 0 at padding).
    """
    is_real = ops.not_equal(labels, pad_id)
    real = ops.cast(is_real, "float32")
    check_tokens(labels, logits)
    if len(logits.shape) == 2:
        if label_smoothing:
            raise ValueError(f"Cross-entropies are smoothed by `loss_model`, not here; got {label_smoothing}.")
        return ops.where(is_real, ops.cast(logits, "float32"), 0.0), real
    flat = ops.reshape(ops.cast(logits, "float32"), (-1, ops.shape(logits)[-1]))
    own = ops.reshape(ops.cast(ops.where(is_real, labels, 0), "int32"), (-1,))
    losses = ops.reshape(_crossentropy(flat, own, label_smoothing), ops.shape(labels))
    return ops.where(is_real, losses, 0.0), real


def check_tokens(labels, predictions, ranks=(2, 3)):
    """Refuses shapes that do not fit each other, which would broadcast, and predictions that are ids."""
    shapes = tuple(labels.shape), tuple(predictions.shape)
    dtype = keras.backend.standardize_dtype(predictions.dtype)
    fit = len(shapes[0]) == 2 and len(shapes[1]) in ranks and keras.backend.is_float_dtype(dtype)
    if not fit or any(None not in sizes and sizes[0] != sizes[1] for sizes in zip(*shapes)):
        raise ValueError(
            "Labels must be token ids [B, T] and predictions float logits [B, T, V]; "
            f"got shapes {shapes[0]} and {shapes[1]}, predictions of {dtype}."
        )


def _crossentropy(logits, labels, label_smoothing):
    """Float32 logits `[M, V]` and int labels `[M]` -> `[M]`; one pass of softmax serves values and gradients.

    On a CPU it takes less than half the time of TensorFlow's own op. Labels outside `[0, V)` give NaN, or an error of
    TensorFlow's on a CPU.
    """

    @ops.custom_gradient
    def losses(logits, labels):
        values, shares = _losses_and_softmax(logits, labels, label_smoothing)

        def backward(*args, upstream=None):
            return _logit_gradient(shares, labels, label_smoothing, args[0] if upstream is None else upstream), None

        return values, backward

    vocab_size = logits.shape[-1]
    known = ops.logical_and(labels >= 0, labels < vocab_size)
    labels = ops.where(labels < 0, vocab_size, labels)  # Keras counts a negative place from the end
    return ops.where(known, losses(logits, labels), float("nan"))


def _losses_and_softmax(logits, labels, label_smoothing):
    """(cross-entropy of each row `[M]`, softmax `[M, V]`) of float32 logits `[M, V]`."""
    shares = ops.softmax(logits, axis=-1)
    target = ops.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    if label_smoothing:
        target = (1 - label_smoothing) * target + label_smoothing * ops.mean(logits, axis=-1)
    # the largest share is at least 1 / V and has a logarithm, whatever the shares of the labels are
    largest, largest_share = (ops.max(x, axis=-1, initial=least) for x, least in ((logits, -math.inf), (shares, 0.0)))
    return largest - target - ops.log(largest_share), shares


def _logit_gradient(shares, labels, label_smoothing, weights):
    """Gradient `[M, V]` of the cross-entropies' sum, weighted `[M]`, with respect to the logits behind `shares`."""
    rest = label_smoothing / shares.shape[-1]
    own = ops.take_along_axis(shares, labels[:, None], axis=-1)[:, 0] - rest - (1 - label_smoothing)
    places = ops.stack([ops.arange(ops.shape(labels)[0], dtype=labels.dtype), labels], axis=-1)
    return ops.scatter_update((shares - rest) * weights[:, None], places, own * weights)


def linear_crossentropy(vectors, kernel, labels, real, label_smoothing=0.0):
    """`token_losses(labels, vectors @ kernel)`, values and gradients, without the logits of all tokens at once.

    Logits are computed for a block of tokens at a time, in the forward pass and again in the backward pass (Wijmans et
    al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", https://arxiv.org/abs/2411.09009). Tokens that are
    not `real` are put behind the others, where no logits are computed.

    Args:
        vectors: float tensor `[M, D]`.
        kernel: float tensor `[D, V]`, of the dtype of `vectors`.
        labels: int tensor `[M]` of ids in `[0, V)`.
        real: bool tensor `[M]`, False for padding.
        label_smoothing: float in [0, 1).

    Returns:
        float32 tensor `[M]`, 0 where not `real`.
    """

    @ops.custom_gradient
    def losses(vectors, kernel, labels, real):
        blocks = _Blocks(ops.shape(vectors)[0], max(1, BLOCK // kernel.shape[-1]))
        order = ops.argsort(ops.cast(ops.logical_not(real), "int32"))
        back = ops.argsort(order)
        span = 0, blocks.holding(ops.sum(ops.cast(real, "int32")))

        def sorted_rows(tensor):
            return blocks.padded(ops.take(tensor, order, axis=0))

        labels = sorted_rows(labels)

        rows = sorted_rows(vectors)

        def logits_of(i):
            return ops.cast(ops.matmul(blocks.take(rows, i), kernel), "float32")  # [C, V]

        def forward(i, values):
            values_of_block, _ = _losses_and_softmax(logits_of(i), blocks.take(labels, i), label_smoothing)
            return (blocks.put(values, i, values_of_block),)

        (values,) = each(span, forward, ops.zeros((blocks.number * blocks.size,), "float32"))

        def backward(*args, upstream=None):
            weights = sorted_rows(ops.cast(args[0] if upstream is None else upstream, "float32"))

            def step(i, row_gradients, kernel_gradient):
                shares, own = ops.softmax(logits_of(i), axis=-1), blocks.take(labels, i)
                errors = _logit_gradient(shares, own, label_smoothing, blocks.take(weights, i))  # [C, V]
                errors = ops.cast(errors, rows.dtype)
                kernel_gradient += ops.cast(ops.matmul(ops.transpose(blocks.take(rows, i)), errors), "float32")
                return blocks.put(row_gradients, i, ops.matmul(errors, ops.transpose(kernel))), kernel_gradient

            zeros = ops.zeros_like(rows), ops.zeros(kernel.shape, "float32")
            row_gradients, kernel_gradient = each(span, step, *zeros)
            return ops.take(row_gradients, back, axis=0), ops.cast(kernel_gradient, kernel.dtype), None, None

        return ops.take(values, back, axis=0), backward

    return ops.where(real, losses(vectors, kernel, labels, real), 0.0)


class _Blocks:
    """Tensors of `num_tokens` rows, worked on by `size` rows at a time in a loop."""

    def __init__(self, num_tokens, size):
        self.num_tokens, self.size = num_tokens, size
        number = self.holding(num_tokens)
        self.number = max(1, number) if isinstance(number, int) else number  # JAX looks into loops that never run

    def holding(self, number):
        """How many blocks hold the first `number` rows."""
        return (number + self.size - 1) // self.size

    def padded(self, tensor):
        """Zeros behind, up to whole blocks."""
        rest = ((0, 0) for _ in tensor.shape[1:])
        return ops.pad(tensor, ((0, self.number * self.size - self.num_tokens), *rest))

    def take(self, tensor, i):
        return ops.slice(tensor, self._start(tensor, i), (self.size, *tensor.shape[1:]))

    def put(self, tensor, i, values):
        return ops.slice_update(tensor, self._start(tensor, i), values)

    def _start(self, tensor, i):
        return (i * self.size, *(0 for _ in tensor.shape[1:]))
