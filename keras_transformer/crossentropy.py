"""Cross-entropy of each token, from logits or, a block of tokens at a time, from the vectors behind them.

Letters: `B` batch, `T` tokens, `M` all tokens of a batch, `C` tokens of a block, `D` width, `V` vocabulary.
"""

import keras
from keras import ops

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
        return ops.where(is_real, ops.cast(logits, "float32"), 0.0), real
    logits = ops.cast(logits, "float32")
    labels = ops.cast(ops.where(is_real, labels, 0), "int32")
    losses = ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    if label_smoothing:
        uniform = ops.logsumexp(logits, axis=-1) - ops.mean(logits, axis=-1)  # cross-entropy against 1 / V
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    return losses * real, real


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


def linear_crossentropy(vectors, kernel, labels, label_smoothing=0.0):
    """`token_losses(labels, vectors @ kernel)`, values and gradients, without the logits of all tokens at once.

    Logits are computed for a block of tokens at a time, in the forward pass and again in the backward pass (Wijmans et
    al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", https://arxiv.org/abs/2411.09009).

    Args:
        vectors: float tensor `[M, D]`.
        kernel: float tensor `[D, V]`, of the dtype of `vectors`.
        labels: int tensor `[M]` of ids in `[0, V)`.
        label_smoothing: float in [0, 1).

    Returns:
        float32 tensor `[M]`.
    """
    num_tokens, vocabulary = ops.shape(vectors)[0], kernel.shape[-1]
    size = max(1, BLOCK // vocabulary)
    blocks = (num_tokens + size - 1) // size
    blocks = max(1, blocks) if isinstance(blocks, int) else blocks  # JAX looks at the loop's body also if it never runs

    def padded(tensor):
        return ops.pad(tensor, [[0, blocks * size - num_tokens], *([0, 0] for _ in tensor.shape[1:])])

    def block(tensor, i):
        return ops.slice(tensor, (i * size, *(0 for _ in tensor.shape[1:])), (size, *tensor.shape[1:]))

    def put(tensor, i, values):
        return ops.slice_update(tensor, (i * size, *(0 for _ in tensor.shape[1:])), values)

    def each_block(step, *results):
        """Runs `results = step(i, *results)` for each block."""
        _, *results = ops.while_loop(lambda i, *_: i < blocks, lambda i, *r: (i + 1, *step(i, *r)), (0, *results))
        return results

    def logits_of(rows, kernel):
        return ops.cast(ops.matmul(rows, kernel), "float32")  # [C, V]

    labels = padded(labels)

    @ops.custom_gradient
    def losses(vectors, kernel):
        rows = padded(vectors)

        def forward(i, values, norms):
            logits = logits_of(block(rows, i), kernel)
            norm = ops.logsumexp(logits, axis=-1)
            target = ops.take_along_axis(logits, block(labels, i)[:, None], axis=-1)[:, 0]
            if label_smoothing:
                target = (1 - label_smoothing) * target + label_smoothing * ops.mean(logits, axis=-1)
            return put(values, i, norm - target), put(norms, i, norm)

        zeros = ops.zeros((blocks * size,), "float32")
        values, norms = each_block(forward, zeros, zeros)

        def backward(*args, upstream=None):
            weights = padded(ops.cast(args[0] if upstream is None else upstream, "float32"))

            def step(i, row_gradients, kernel_gradient):
                errors = ops.exp(logits_of(block(rows, i), kernel) - block(norms, i)[:, None])  # softmax, [C, V]
                is_label = ops.arange(vocabulary, dtype="int32") == block(labels, i)[:, None]
                errors = errors - ops.where(is_label, 1 - label_smoothing, 0.0) - label_smoothing / vocabulary
                errors = ops.cast(errors * block(weights, i)[:, None], rows.dtype)
                kernel_gradient += ops.cast(ops.matmul(ops.transpose(block(rows, i)), errors), "float32")
                return put(row_gradients, i, ops.matmul(errors, ops.transpose(kernel))), kernel_gradient

            row_gradients, kernel_gradient = each_block(step, ops.zeros_like(rows), ops.zeros(kernel.shape, "float32"))
            return row_gradients[:num_tokens], ops.cast(kernel_gradient, kernel.dtype)

        return values[:num_tokens], backward

    return losses(vectors, kernel)
