"""Loops over the blocks of a long tensor."""

from keras import ops


def each(span, step, *results):
    """Runs `results = step(i, *results)` for each `i` from `span[0]` to below `span[1]`, one after another.

    Args:
        span: (first, end), ints or int tensors.
        step: function of an int32 scalar and the results so far, which gives as many of the same shapes and dtypes.
        *results: tensors, those before the first step; the first one has values wherever a step is run.

    Returns:
        list, the results of the last step.
    """
    first, end = (ops.convert_to_tensor(i, "int32") for i in span)

    def run(i, *results):
        results = step(i, *results)
        # TensorFlow starts ten steps at once, and holds what they make, unless the next one's number waits for a result
        is_done = ops.reshape(results[0], (-1,))[0] > 0
        return i + ops.where(is_done, 1, 1), *results

    return ops.while_loop(lambda i, *_: i < end, run, (first, *results))[1:]
