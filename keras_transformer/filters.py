"""What may be written next: small functions of the log-probabilities of the next token.

A filter is a function `(log_probs float32 [R, V], written) -> log_probs`; the searches take any number of them and call
them in order. What it sets to -inf is not written; it need not normalize the rest, but must not raise anything above 0.
`threshold` is for sampling alone.

Letters: `R` rows, `V` vocabulary, `P` tokens of the longest prompt, `L` longest output.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_transformer.checks import check_count, check_range


class Written(NamedTuple):
    """What each row has so far.

    Attributes:
        tokens: int32 `[R, P + L]`: the prompt, which ends in column `P - 1` (padding before it), then what was written.
        start: int, `P`.
        count: int or scalar int tensor, how many tokens were written.
        pad_id: int, what stands in columns that hold nothing.
    """

    tokens: Any
    start: Any
    count: Any
    pad_id: int


def forbid(ids):
    """A filter: no token of `ids` is written."""
    ids = [check_count("forbidden id", i, least=0) for i in ids]

    def filtered(log_probs, written):
        vocabulary = ops.shape(log_probs)[-1]
        if isinstance(vocabulary, int) and max(ids, default=0) >= vocabulary:
            raise ValueError(f"A forbidden id must be below the vocabulary's size, {vocabulary}; got {max(ids)}.")
        return ops.where(is_one_of(ops.arange(vocabulary), ids), -np.inf, log_probs)

    return filtered


def least_length(end_ids, length):
    """A filter: no end before `length` tokens (int, or int `[R]`), the end among them."""

    def filtered(log_probs, written):
        is_end = is_one_of(ops.arange(ops.shape(log_probs)[-1]), end_ids)  # [V]
        is_early = ops.reshape(ops.convert_to_tensor(length, "int32") > written.count + 1, (-1, 1))  # [R or 1, 1]
        return ops.where(ops.logical_and(is_early, is_end), -np.inf, log_probs)

    return filtered


def no_repeat_ngram(size):
    """A filter: no sequence of `size` tokens stands twice in a row, its prompt included.

    Paulus et al. 2017, https://arxiv.org/abs/1705.04304, section 2.5.
    """
    size = check_count("no_repeat_ngram", size)

    def filtered(log_probs, written):
        tokens, end = written.tokens, written.start + written.count
        columns = ops.shape(tokens)[1]
        padded = ops.pad(tokens, [[0, 0], [0, size]], constant_values=written.pad_id)
        repeats = ops.arange(columns, dtype="int32") + (size - 1) < end  # [P + L]: a whole n-gram begins here
        repeats = ops.logical_and(repeats, tokens != written.pad_id)
        for i in range(size - 1):
            last = ops.take(tokens, [ops.maximum(end - (size - 1) + i, 0)], axis=1)  # [R, 1]
            repeats = ops.logical_and(repeats, padded[:, i : columns + i] == last)
        is_next = _marked(padded[:, size - 1 : columns + size - 1], repeats, ops.shape(log_probs)[-1])
        return ops.where(is_next, -np.inf, log_probs)

    return filtered


def repetition_penalty(penalty):
    """A filter: the log-probabilities of tokens that a row has already, its prompt included, times `penalty`.

    Keskar et al. 2019, https://arxiv.org/abs/1909.05858, section 4.1, applied to log-probabilities, which are all
    below 0: above 1 repetition is discouraged, below 1 encouraged.
    """
    penalty = check_range("repetition_penalty", penalty, 0, above=True)

    def filtered(log_probs, written):
        is_old = _marked(written.tokens, written.tokens != written.pad_id, ops.shape(log_probs)[-1])
        return ops.where(is_old, log_probs * penalty, log_probs)

    return filtered


def threshold(log_probs, top_k=0, top_p=1.0, min_p=0.0):
    """The log-probability below which no token is sampled.

    A token must pass all three; those as likely as one that passes do too. `top_k` comes before `top_p`, whose
    probabilities are those of what `top_k` left.

    Args:
        log_probs: float `[R, V]`.
        top_k: int or scalar int tensor, how many tokens may be written (Fan et al. 2018,
            https://arxiv.org/abs/1805.04833); 0 for all.
        top_p: float or scalar tensor in (0, 1]: the fewest most likely tokens that have this probability together
            (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751).
        min_p: float or scalar tensor in [0, 1]: tokens of at least this share of the highest probability (Nguyen et
            al. 2024, https://arxiv.org/abs/2407.01082).

    Returns:
        float `[R, 1]`.
    """
    best = ops.max(log_probs, axis=-1, keepdims=True, initial=-np.inf)
    vocabulary = ops.shape(log_probs)[-1]

    def from_sorted():
        count = min(top_k, vocabulary) if isinstance(top_k, int) and top_k else vocabulary
        ordered = ops.top_k(log_probs, count)[0]  # [R, count], the highest first
        kept = ops.arange(count, dtype="int32") < ops.where(ops.equal(top_k, 0), vocabulary, top_k)
        probs = ops.exp(ordered - best) * ops.cast(kept, ordered.dtype)
        probs = probs / ops.sum(probs, axis=-1, keepdims=True)
        before = ops.cumsum(probs, axis=-1) - probs
        kept = ops.logical_and(kept, ops.logical_or(before < top_p, ops.equal(top_p, 1.0)))
        return ops.min(ops.where(kept, ordered, np.inf), axis=-1, keepdims=True, initial=np.inf)

    def of_all():
        return ops.full_like(best, -np.inf)

    if isinstance(top_k, int) and isinstance(top_p, (int, float)):
        lowest = from_sorted() if top_k or top_p < 1 else of_all()
    else:  # sorting takes longer than all the rest
        lowest = ops.cond(ops.logical_or(ops.not_equal(top_k, 0), ops.less(top_p, 1.0)), from_sorted, of_all)
    return ops.maximum(lowest, best + ops.log(ops.cast(min_p, best.dtype)))


def is_one_of(tokens, ids):
    """bool, of the shape of `tokens`."""
    return ops.any(tokens[..., None] == np.array(ids, "int32"), axis=-1)


def _marked(tokens, where, vocabulary):
    """bool `[R, V]`: the tokens that stand in `tokens` `[R, C]` where `where` is True."""
    rows, columns = ops.shape(tokens)
    row = ops.broadcast_to(ops.arange(rows, dtype="int32")[:, None], (rows, columns))
    marks = ops.zeros((rows, vocabulary + 1), dtype="bool")  # the last column takes what is not to be marked
    places = ops.reshape(ops.stack([row, ops.where(where, tokens, vocabulary)], axis=-1), (-1, 2))
    marks = ops.scatter_update(marks, places, ops.ones((rows * columns,), dtype="bool"))
    return marks[:, :vocabulary]
